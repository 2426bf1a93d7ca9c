"""Training targets of the student, teacher features and caption words, and the losses.

Notation for tensor shapes: N images, D width of a teacher's features, W words, K classes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.backbones.backbone import Backbone, load_backbone
from capvid.backbones.weights import local_weights
from capvid.errors import DataError, UsageError, WeightsError
from capvid.features.feature_file import open_safetensors
from capvid.features.feature_store import FeatureStore
from capvid.text.tokenization import words
from capvid.utils.files import atomic_path
from distillation.images import ImageSource, View, decode_images, view_crops
from distillation.recipe import TeacherOptions

BATCH = 32


@dataclass(frozen=True)
class Words:
    """Caption words as prediction targets.

    Attributes:
        vocabulary: W words, the most frequent first.
        shares: (N, W) float16, share of an image's captions that contain the word.
        known: (N,) bool, whether the image has captions.
    """

    vocabulary: tuple[str, ...]
    shares: np.ndarray
    known: np.ndarray


def video_of(name: str) -> str:
    """Return the video that an image is a frame of: its name up to the last slash."""
    return name.rpartition("/")[0]


def stored_features(
    images: Sequence[ImageSource], stores: Sequence[FeatureStore]
) -> dict[str, dict[int, np.ndarray]]:
    """Return precomputed features by layer name: the vector (D,) of each image by row.

    The t-th image of a video, sorted by name, is frame t of the video's features.

    Raises:
        DataError: the numbers of images and features of a video differ.
    """
    rows: dict[str, list[int]] = {}
    for row, image in enumerate(images):
        rows.setdefault(video_of(image.name), []).append(row)
    features: dict[str, dict[int, np.ndarray]] = {}
    for store in stores:
        for video in store.ids():
            if video not in rows:
                continue
            for header, stream in zip(store.header.streams, store.get(video).streams, strict=True):
                if len(stream) != len(rows[video]):
                    raise DataError(
                        f"{video} has {len(rows[video])} images, but features of {len(stream)} frames",
                        remedy="give the images that the features were computed from",
                    )
                layer = features.setdefault(f"{header.backbone}:{header.layer}", {})
                layer.update(zip(rows[video], stream, strict=True))
    return features


def teacher_features(
    images: Sequence[ImageSource],
    teacher: str,
    layer: str,
    *,
    known: Mapping[int, np.ndarray],
    path: Path,
    view: View | None = None,
    weights: Path | None = None,
    device: torch.device | str = "cpu",
    workers: int = 2,
    progress: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    """Return a teacher's features of all images, (N, D) float16; computing those not ``known``.

    With a ``view``, the features are those of the view, and none are known. The result is cached in the
    safetensors file ``path`` and reused if images, view, layer and known features are the same.

    Raises:
        UsageError: the views do not have the teacher's clip size.
        WeightsError: its weights are missing.
    """
    key = _key(images, f"{teacher} {layer}" + (f" of {view.description}" if view else ""), known)
    if path.exists():
        with open_safetensors(path) as file:
            if (file.metadata() or {}).get("of") == key:
                return file.get_tensor("features")
    backbone = load_backbone(teacher, layer=layer, weights=weights, device=device, precision="fp32")
    features = np.empty((len(images), backbone.header.width), np.float16)
    for row, vector in known.items():
        features[row] = vector
    left = [row for row in range(len(images)) if row not in known]
    if view is not None:
        crops = view_crops(view, images, backbone, workers)
    else:
        crops = (backbone.prepare(image) for image in decode_images([images[row] for row in left], workers))
    waiting: list[np.ndarray] = []
    done = 0
    for crop in crops:
        waiting.append(crop)
        if len(waiting) == BATCH or done + len(waiting) == len(left):
            vectors = _vectors(backbone, np.concatenate(waiting))
            features[left[done : done + len(vectors)]] = vectors
            done, waiting = done + len(vectors), []
            progress(done)
    with atomic_path(path) as temporary:
        save_file({"features": features}, temporary, metadata={"of": key})
    return features


def _vectors(backbone: Backbone, crops: np.ndarray) -> np.ndarray:
    """Return a teacher's features of crops (n, h, w, 3) or clips (n, C, h, w, 3): (n, D)."""
    try:
        return backbone.compute(crops, batch_size=BATCH)
    except (RuntimeError, ValueError) as error:
        own = (backbone.entry.preprocess.crop,) * 2
        if backbone.entry.clip is None or crops.shape[2:4] in (own, backbone.entry.preprocess.size):
            raise
        raise UsageError(
            f"the teacher {backbone.entry.name} does not accept views of "
            f"{crops.shape[2]} x {crops.shape[3]} pixels",
            remedy="leave it out, or set training.views = 0",
        ) from error


def _key(images: Sequence[ImageSource], layer: str, known: Mapping[int, np.ndarray]) -> str:
    """Return everything stored features depend on: image names, teacher layer, given features."""
    digest = hashlib.sha256("\n".join([layer, *(image.name for image in images)]).encode())
    for row, vector in sorted(known.items()):
        digest.update(str(row).encode() + np.ascontiguousarray(vector).tobytes())
    return digest.hexdigest()


def caption_words(images: Sequence[ImageSource], captions: Mapping[str, Sequence[str]], count: int) -> Words:
    """Return the words of the captions of each image or its video.

    The vocabulary holds the ``count`` words that occur for the most images, of three letters or more.
    """
    sets = {name: [set(words(caption)) for caption in texts] for name, texts in captions.items()}
    of_picture = [image.name if image.name in sets else video_of(image.name) for image in images]
    counts = Counter(
        word
        for name in dict.fromkeys(of_picture)
        for word in sorted(set().union(*sets.get(name, [])))
        if len(word) > 2
    )
    vocabulary = tuple(word for word, _ in counts.most_common(count))
    column_of = {word: column for column, word in enumerate(vocabulary)}
    shares = np.zeros((len(images), len(vocabulary)), np.float16)
    for row, name in enumerate(of_picture):
        for caption in sets.get(name, []):
            columns = [column_of[word] for word in caption if word in column_of]
            shares[row, columns] += 1 / len(sets[name])
    return Words(vocabulary, shares, np.array([name in sets for name in of_picture]))


class ClassHead(nn.Module):
    """A teacher's frozen layers from its features to its class scores: (B, D) -> (B, K)."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for name in names:
            try:
                weight, bias = tensors[f"{name}.weight"].float(), tensors[f"{name}.bias"].float()
            except KeyError as error:
                raise UsageError(f"the teacher's weights have no tensor {error}") from error
            layer = nn.Linear(weight[0].numel(), len(weight))
            layer.weight.data, layer.bias.data = weight.flatten(1), bias
            self.layers.append(layer)
        self.requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        """Map features (B, D) to class scores (B, K)."""
        for number, layer in enumerate(self.layers):
            features = layer(F.relu(features) if number else features)
        return features


def class_head(teacher: str, options: TeacherOptions, weights: Path | None) -> ClassHead | None:
    """Return the teacher's class head named by the recipe, or None.

    Raises:
        WeightsError: the teacher's weights are missing.
    """
    if not options.head:
        return None
    from safetensors.torch import load_file as load_tensors

    path = local_weights(teacher, weights=weights)
    if path is None:
        raise WeightsError(f"no weights of the teacher {teacher}", remedy="give their folder with --weights")
    return ClassHead(load_tensors(path), options.head)


@dataclass(frozen=True)
class BatchTargets:
    """Targets of a batch.

    Attributes:
        features: each teacher's features, (B, D) float32, not negative.
        shares: (B, W) share of the captions that contain the word.
        known: (B,) whether the image has captions.
    """

    features: Mapping[str, Tensor]
    shares: Tensor
    known: Tensor


class TeacherLoss(nn.Module):
    """Loss of predicting one teacher's features from the student's embedding.

    Features are compared as square roots (which evens out their long-tailed distributions) in units of their
    standard deviations: an error of 1 corresponds to always predicting the mean. The teacher's class head
    turns the predicted features into a class distribution, compared with that of the true features
    (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015).
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        features: Tensor,
        head: ClassHead | None,
        options: TeacherOptions,
        *,
        embedding: int,
        temperature: float,
    ) -> None:
        super().__init__()
        roots = features.float().clamp_min(0).sqrt()  # (N, D)
        self.register_buffer("mean", roots.mean(0))
        self.register_buffer("deviation", roots.std(0).clamp_min(1e-3))
        self.tell = nn.Linear(embedding, features.shape[1])
        self.head = head
        self.options = options
        self.temperature = temperature

    def standardised(self, features: Tensor) -> Tensor:
        """Return the standardised square roots of features (B, D)."""
        return (features.clamp_min(0).sqrt() - self.mean) / self.deviation

    def forward(self, embedding: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and its mean squared error for embeddings (B, E) and true features (B, D)."""
        predicted = self.tell(embedding)  # (B, D), in units of the deviation
        error = F.mse_loss(predicted, self.standardised(features))
        loss = self.options.features * error
        if self.head is not None and self.options.classes:
            features_predicted = (predicted * self.deviation + self.mean).clamp_min(0).square()
            divergence = F.kl_div(
                (self.head(features_predicted) / self.temperature).log_softmax(-1),
                (self.head(features) / self.temperature).log_softmax(-1),
                log_target=True,
                reduction="batchmean",
            )
            loss = loss + self.options.classes * divergence
        return loss, error


class DistillationLoss(nn.Module):
    """Sum of all losses, with the prediction layers that are trained alongside the student."""

    def __init__(
        self, teachers: Mapping[str, TeacherLoss], *, embedding: int, words: int, word_weight: float
    ) -> None:
        super().__init__()
        self.teachers = nn.ModuleDict(teachers)
        self.words = nn.Linear(embedding, words)
        nn.init.constant_(self.words.bias, -4.0)  # most words are absent
        self.word_weight = word_weight

    def named_teachers(self) -> Iterator[tuple[str, TeacherLoss]]:
        """Yield each teacher's name and loss."""
        for name, teacher in self.teachers.items():
            yield name, cast(TeacherLoss, teacher)

    def forward(self, embedding: Tensor, lesson: BatchTargets) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of embeddings (B, E), and the teachers' errors and the word loss for the log."""
        total = embedding.new_zeros(())
        parts = {}
        for name, teacher in self.named_teachers():
            loss, error = teacher(embedding, lesson.features[name])
            total = total + loss
            parts[name] = float(error.detach())
        if self.word_weight and len(self.words.bias) and bool(lesson.known.any()):
            scores = self.words(embedding[lesson.known])
            loss = F.binary_cross_entropy_with_logits(scores, lesson.shares[lesson.known], reduction="sum")
            loss = loss / len(scores)
            total = total + self.word_weight * loss
            parts["words"] = float(loss.detach())
        return total, parts


@dataclass(frozen=True)
class Shown:
    """The original images, or one view of each, with the teachers' features.

    Attributes:
        images: (N, 3, H, W) uint8.
        features: each teacher's features, (N, D) float16.
    """

    images: np.ndarray
    features: Mapping[str, Tensor]


@dataclass(frozen=True)
class DistilData:
    """Images and their training targets.

    Attributes:
        shown: the original images, then the views with their own targets.
        words: caption words.
        train: rows of the training split.
        val: rows of the validation split.
    """

    shown: Sequence[Shown]
    words: Words
    train: Tensor
    val: Tensor
