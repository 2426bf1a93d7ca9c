"""What the student is to tell of each picture: the teachers' features, and words of captions.

Notation for tensor shapes: N pictures, D width of a teacher's features, W words, K classes.
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
from capvid.errors import DataError, RecipeError, WeightsError
from capvid.features.feature_file import open_safetensors
from capvid.features.feature_store import FeatureStore
from capvid.text.tokenization import words
from capvid.utils.files import atomic_path
from distillation.pictures import Picture, View, decoded, view_crops
from distillation.recipe import TeacherOptions

BATCH = 32


@dataclass(frozen=True)
class Words:
    """Words to tell from pictures.

    Attributes:
        vocabulary: W words, the most frequent first.
        shares: (N, W) float16, share of a picture's captions that hold the word.
        known: (N,) bool, whether the picture has captions.
    """

    vocabulary: tuple[str, ...]
    shares: np.ndarray
    known: np.ndarray


def video_of(name: str) -> str:
    """Return the video that a picture is a frame of: its name up to the last slash."""
    return name.rpartition("/")[0]


def given_features(
    pictures: Sequence[Picture], stores: Sequence[FeatureStore]
) -> dict[str, dict[int, np.ndarray]]:
    """Features that were computed before: for each layer's name the vector (D,) of pictures by row.

    The t-th picture of a video, in the order of names, is frame t of the video's features.

    Raises:
        DataError: a video has another number of pictures than of features.
    """
    rows: dict[str, list[int]] = {}
    for row, picture in enumerate(pictures):
        rows.setdefault(video_of(picture.name), []).append(row)
    found: dict[str, dict[int, np.ndarray]] = {}
    for store in stores:
        for video in store.ids():
            if video not in rows:
                continue
            for header, stream in zip(store.header.streams, store.get(video).streams, strict=True):
                if len(stream) != len(rows[video]):
                    raise DataError(
                        f"{video} has {len(rows[video])} pictures, but features of {len(stream)} frames",
                        remedy="give the pictures that the features were computed from",
                    )
                layer = found.setdefault(f"{header.backbone}:{header.layer}", {})
                layer.update(zip(rows[video], stream, strict=True))
    return found


def teacher_features(
    pictures: Sequence[Picture],
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
    """Return a teacher's features of all pictures, (N, D) float16; those not ``known`` are computed.

    With a ``view`` they are those of the pictures' views, and none are known. The result is kept in the
    safetensors file ``path``, and taken from there if pictures, view, layer and known features are the same.

    Raises:
        RecipeError: the teacher sees clips of another size than the views'.
        WeightsError: its weights are missing.
    """
    key = _key(pictures, f"{teacher} {layer}" + (f" of {view.description}" if view else ""), known)
    if path.exists():
        with open_safetensors(path) as file:
            if (file.metadata() or {}).get("of") == key:
                return file.get_tensor("features")
    backbone = load_backbone(teacher, layer=layer, weights=weights, device=device, precision="fp32")
    features = np.empty((len(pictures), backbone.header.width), np.float16)
    for row, vector in known.items():
        features[row] = vector
    left = [row for row in range(len(pictures)) if row not in known]
    if view is not None:
        crops = view_crops(view, pictures, backbone, workers)
    else:
        crops = (backbone.prepare(image) for image in decoded([pictures[row] for row in left], workers))
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
    """Return what a teacher computes of crops (n, h, w, 3) or clips of them (n, C, h, w, 3): (n, D)."""
    try:
        return backbone.compute(crops, batch_size=BATCH)
    except (RuntimeError, ValueError) as error:
        own = (backbone.entry.preprocess.crop,) * 2
        if backbone.entry.clip is None or crops.shape[2:4] in (own, backbone.entry.preprocess.size):
            raise
        raise RecipeError(
            f"the teacher {backbone.entry.name} cannot see views of "
            f"{crops.shape[2]} x {crops.shape[3]} pixels",
            remedy="leave it out, or set training.views = 0",
        ) from error


def _key(pictures: Sequence[Picture], layer: str, known: Mapping[int, np.ndarray]) -> str:
    """Return everything stored features depend on: picture names, teacher layer, given features."""
    digest = hashlib.sha256("\n".join([layer, *(picture.name for picture in pictures)]).encode())
    for row, vector in sorted(known.items()):
        digest.update(str(row).encode() + np.ascontiguousarray(vector).tobytes())
    return digest.hexdigest()


def caption_words(pictures: Sequence[Picture], captions: Mapping[str, Sequence[str]], count: int) -> Words:
    """Words of each picture's captions, or of its video's.

    The vocabulary holds the ``count`` words that most pictures' captions have, of three letters or more.
    """
    sets = {name: [set(words(caption)) for caption in texts] for name, texts in captions.items()}
    of_picture = [picture.name if picture.name in sets else video_of(picture.name) for picture in pictures]
    seen = Counter(
        word
        for name in dict.fromkeys(of_picture)
        for word in sorted(set().union(*sets.get(name, [])))
        if len(word) > 2
    )
    vocabulary = tuple(word for word, _ in seen.most_common(count))
    place = {word: column for column, word in enumerate(vocabulary)}
    shares = np.zeros((len(pictures), len(vocabulary)), np.float16)
    for row, name in enumerate(of_picture):
        for found in sets.get(name, []):
            columns = [place[word] for word in found if word in place]
            shares[row, columns] += 1 / len(sets[name])
    return Words(vocabulary, shares, np.array([name in sets for name in of_picture]))


class ClassHead(nn.Module):
    """A teacher's own layers from its features to its class scores: (B, D) -> (B, K). Not trained."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for name in names:
            try:
                weight, bias = tensors[f"{name}.weight"].float(), tensors[f"{name}.bias"].float()
            except KeyError as error:
                raise RecipeError(f"the teacher's weights have no tensor {error}") from error
            layer = nn.Linear(weight[0].numel(), len(weight))
            layer.weight.data, layer.bias.data = weight.flatten(1), bias
            self.layers.append(layer)
        self.requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        """(B, D) -> class scores (B, K)."""
        for number, layer in enumerate(self.layers):
            features = layer(F.relu(features) if number else features)
        return features


def class_head(teacher: str, options: TeacherOptions, weights: Path | None) -> ClassHead | None:
    """Return the teacher's class head as the recipe names it, or None.

    Raises:
        WeightsError: the teacher's weights are not here.
    """
    if not options.head:
        return None
    from safetensors.torch import load_file as load_tensors

    path = local_weights(teacher, weights=weights)
    if path is None:
        raise WeightsError(f"no weights of the teacher {teacher}", remedy="give their folder with --weights")
    return ClassHead(load_tensors(path), options.head)


@dataclass(frozen=True)
class Lesson:
    """What there is to learn from a batch.

    Attributes:
        features: of each teacher, (B, D) float32, not negative.
        shares: (B, W) share of the captions that hold the word.
        known: (B,) whether the picture has captions.
    """

    features: Mapping[str, Tensor]
    shares: Tensor
    known: Tensor


class TeacherLoss(nn.Module):
    """One teacher's features, told from the student's embedding.

    Features are compared as square roots (which makes their long-tailed distributions even) in units of each
    one's standard deviation: an error of 1 is what telling the mean would give. From the features told, the
    teacher's own class head makes a class distribution, to be like that of the true features
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

    def wanted(self, features: Tensor) -> Tensor:
        """Return what is to be told of features (B, D): their square roots, less the mean, in deviations."""
        return (features.clamp_min(0).sqrt() - self.mean) / self.deviation

    def forward(self, embedding: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings (B, E) and true features (B, D) -> the loss, and the mean squared error in it."""
        told = self.tell(embedding)  # (B, D), in units of the deviation
        error = F.mse_loss(told, self.wanted(features))
        loss = self.options.features * error
        if self.head is not None and self.options.classes:
            seen = (told * self.deviation + self.mean).clamp_min(0).square()
            divergence = F.kl_div(
                (self.head(seen) / self.temperature).log_softmax(-1),
                (self.head(features) / self.temperature).log_softmax(-1),
                log_target=True,
                reduction="batchmean",
            )
            loss = loss + self.options.classes * divergence
        return loss, error


class Lessons(nn.Module):
    """All losses together, with what is learned for them beside the student."""

    def __init__(
        self, teachers: Mapping[str, TeacherLoss], *, embedding: int, words: int, word_weight: float
    ) -> None:
        super().__init__()
        self.teachers = nn.ModuleDict(teachers)
        self.words = nn.Linear(embedding, words)
        nn.init.constant_(self.words.bias, -4.0)  # most words are not there
        self.word_weight = word_weight

    def named_teachers(self) -> Iterator[tuple[str, TeacherLoss]]:
        """Each teacher's name and loss."""
        for name, teacher in self.teachers.items():
            yield name, cast(TeacherLoss, teacher)

    def forward(self, embedding: Tensor, lesson: Lesson) -> tuple[Tensor, dict[str, float]]:
        """Embeddings (B, E) -> the loss, and each teacher's error and the words' loss for the log."""
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
    """The pictures, or one view of each, and what the teachers see in them.

    Attributes:
        pictures: (N, 3, H, W) uint8.
        features: of each teacher, (N, D) float16.
    """

    pictures: np.ndarray
    features: Mapping[str, Tensor]


@dataclass(frozen=True)
class DistilData:
    """Pictures and what the student is to tell of them.

    Attributes:
        shown: the whole pictures, then views with targets of their own.
        words: of the captions.
        train: rows to learn from.
        val: rows to validate on.
    """

    shown: Sequence[Shown]
    words: Words
    train: Tensor
    val: Tensor
