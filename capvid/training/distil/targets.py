"""What the student is to tell of each picture: the teachers' features, and words of captions.

Notation for tensor shapes: N pictures, D width of a teacher's features, W words, K classes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.errors import DataError, RecipeError, WeightsError
from capvid.features.backbones import Backbone, load_backbone
from capvid.features.file import open_safetensors
from capvid.features.store import FeatureStore
from capvid.features.weights import local_weights
from capvid.files import atomic_path
from capvid.text.tokenize import words
from capvid.training.distil.consistent import View, view_crops
from capvid.training.distil.pictures import Picture, decoded
from capvid.training.distil.recipe import TeacherOptions

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
    """The video that a picture is a frame of: its name up to the last slash."""
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
    """A teacher's features of all pictures, (N, D) float16: those ``known`` by row, the others computed.

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
    """What a teacher computes of crops (n, h, w, 3) or clips of them (n, C, h, w, 3): (n, D)."""
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
    """What kept features depend on: the pictures' names, the teacher's layer, and the features given."""
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
    """The teacher's class head as the recipe names it, or None.

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
