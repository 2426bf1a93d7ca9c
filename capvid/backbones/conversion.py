"""Conversion of downloaded checkpoints into weights files of backbones.

Checkpoints wrap and name the same tensors in many ways: under ``state_dict``, behind ``module.`` or
``backbone.``, or by Caffe's layers with slashes or underscores. Nothing is guessed from shapes alone.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from capvid.backbones.catalog import BackboneEntry, backbone_entry, backbones, build_network
from capvid.backbones.weights import COUNTER
from capvid.errors import UsageError, WeightsError
from capvid.utils.files import atomic_path, sha256_file

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST_NAME = 500  # characters of a tensor's name
_NAMED = 3  # tensors that a message names
# a part of the names without which a checkpoint is none of these: their networks take long to import
_MARKS = {"clip": "visual_projection", "videomae": "patch_embeddings"}
# EfficientNet-Lite0's modules: lukemelas' names and timm's, of the ends, of a block and of the first block
_LITE0_NAMES = [
    dict(pair.split(":") for pair in pairs.split())
    for pairs in (
        "_conv_stem:conv_stem _bn0:bn1 _conv_head:conv_head _bn1:bn2 _fc:classifier",
        "_expand_conv:conv_pw _bn0:bn1 _depthwise_conv:conv_dw _bn1:bn2 _project_conv:conv_pwl _bn2:bn3",
        "_depthwise_conv:conv_dw _bn1:bn1 _project_conv:conv_pw _bn2:bn2",
    )
]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The tensors of a checkpoint under the names of a backbone.

    Attributes:
        entry: the backbone.
        tensors: float32 by name (counters unchanged).
        left_out: names of other tensors in the checkpoint, such as a classifier.
    """

    entry: BackboneEntry
    tensors: Mapping[str, Tensor]
    left_out: tuple[str, ...]

    def save(self, path: Path) -> str:
        """Write a safetensors file atomically and return its SHA-256."""
        from safetensors.torch import save_file

        tensors = {name: self.tensors[name].contiguous().clone() for name in sorted(self.tensors)}
        try:
            with atomic_path(path) as temporary:
                save_file(tensors, temporary, metadata={"format": "pt"})
            return sha256_file(path)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error


def convert(path: Path, *, backbone: str | None = None) -> Conversion:
    """Read a checkpoint and match its tensors with those of a backbone.

    Args:
        path: safetensors, or a file of ``torch.save``, of which only tensors are unpickled.
        backbone: name or alias; ``None`` takes the only backbone whose names and shapes fit, or of two
            networks the one that contains the other.

    Raises:
        UsageError: no such backbone, or none or several fit.
        WeightsError: unreadable file, or one of another network.
    """
    from capvid.utils.tensor_files import read_tensors

    entry = None if backbone is None else backbone_entry(backbone)
    if entry is not None and entry.source == "none":
        raise UsageError(f"{entry.name} needs no weights")
    tensors = read_tensors(path)
    if entry is not None:
        match = _match(entry, tensors)
        if isinstance(match, str):
            raise WeightsError(f"{path}: not a checkpoint of {entry.name} ({match})")
        return match
    fits = []
    for candidate in backbones().values():
        mark = _MARKS.get(candidate.kind, "")
        if candidate.source != "none" and any(mark in name for name in tensors):
            match = _match(candidate, tensors)
            if isinstance(match, Conversion):
                fits.append(match)
    largest = max((len(fit.tensors) for fit in fits), default=0)
    best = [fit for fit in fits if len(fit.tensors) == largest]
    if len(best) != 1 or not all(fit.tensors.keys() <= best[0].tensors.keys() for fit in fits):
        names = ", ".join(fit.entry.name for fit in fits)
        raise UsageError(
            f"{path}: fits {names}" if fits else f"{path}: fits no backbone",
            remedy="say which one it is with --as",
        )
    return best[0]


def _match(entry: BackboneEntry, tensors: Mapping[str, Tensor]) -> Conversion | str:
    """Match the tensors of a checkpoint with a backbone, or say why they do not fit."""
    import torch

    wanted = _shapes(entry)
    names = _names(entry, tensors, wanted)
    matched, other = {}, []
    for name, shape in wanted.items():
        if name in names:
            tensor = _reshape(tensors[names[name]], shape)
            if tensor is None:
                sizes = " x ".join(map(str, tensors[names[name]].shape))
                other.append(f"{name} is {sizes}, not {' x '.join(map(str, shape))}")
            else:
                matched[name] = tensor
        elif name.endswith(COUNTER):  # old files lack it, and nothing depends on it
            matched[name] = torch.zeros((), dtype=torch.int64)
    missing = [name for name in wanted if name not in names and name not in matched]
    left_out = tuple(sorted(tensors.keys() - set(names.values())))
    wrong = []
    for problem, items in ((f"of {len(wanted)} tensors are missing", missing), ("of another shape", other)):
        if items:
            listed = ", ".join(items[:_NAMED]) + (", ..." if len(items) > _NAMED else "")
            wrong.append(f"{len(items)} {problem}: {listed}")
    left_statistics = any(name.endswith("running_mean") for name in left_out)
    if left_statistics and not any(name.endswith("running_mean") for name in wanted):
        wrong.append(f"it has batch normalisation, which {entry.name} has not")
    return "; ".join(wrong) or Conversion(entry=entry, tensors=matched, left_out=left_out)


def _shapes(entry: BackboneEntry) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all tensors that the layers of a backbone need."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in entry.layers:
        shapes |= {
            name: tuple(tensor.shape) for name, tensor in build_network(entry, layer).state_dict().items()
        }
    return shapes


def _names(entry: BackboneEntry, tensors: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """Return the checkpoint's name of each wanted tensor that it has.

    All have one prefix there: of those that occur, the one that matches most, and of equals the shortest.
    """
    spelled: dict[str, str] = {}
    respell = _name_translator(entry)
    for name in tensors:
        if len(name) <= _LONGEST_NAME:
            spelled.setdefault(respell(name), name)
    longest = sorted((name for name in wanted if not name.endswith(COUNTER)), key=len)[-_NAMED:]
    prefixes = {
        name.removesuffix(end) for end in longest for name in spelled if f".{name}".endswith(f".{end}")
    }
    hits = Counter[str]()  # by prefix, in one pass, for there may be as many prefixes as tensors
    for name in spelled:
        starts = (0, *(dot.end() for dot in re.finditer(r"\.", name)))
        hits.update(name[:start] for start in starts if name[start:] in wanted)
    best = min(prefixes | {""}, key=lambda prefix: (-hits[prefix], len(prefix), prefix))
    return {name: spelled[best + name] for name in wanted if best + name in spelled}


def _name_translator(entry: BackboneEntry) -> Callable[[str], str]:
    """Return the function from a checkpoint's names to ours, prefixes aside."""
    if entry.kind in ("c3d", "googlenet"):
        return _from_c3d if entry.kind == "c3d" else _from_caffe
    if entry.kind == "timm" and (entry.architecture or "").startswith("vgg"):  # torchvision's names
        return lambda name: name.replace("classifier.0.", "pre_logits.fc1.").replace(
            "classifier.3.", "pre_logits.fc2."
        )
    if entry.kind == "timm" and (entry.architecture or "").endswith("efficientnet_lite0"):
        return _from_lukemelas_lite0
    return str


def _from_caffe(name: str) -> str:
    """Caffe's layer and blob: ``module.inception_3a/1x1/weights`` is ``inception_3a_1x1.weight``."""
    match = re.fullmatch(r"(?:.*?\.)??([^.]+?)(?:\.conv)?[./_](weights?|w|0|bias(?:es)?|b|1)", name)
    if match is None:
        return name
    return f"{match[1].replace('/', '_')}.{'weight' if match[2][0] in 'w0' else 'bias'}"


def _from_c3d(name: str) -> str:
    """``conv1``, ``conv1a.conv`` and ``fc6-1`` are ``conv1a`` and ``fc6``."""
    name = re.sub(r"^conv([12])\.", r"conv\1a.", _from_caffe(name))
    return re.sub(r"^fc([678])[-_]1\.", r"fc\1.", name)


def _from_lukemelas_lite0(name: str) -> str:
    """Names of lukemelas' EfficientNet-PyTorch as timm's, which numbers blocks by stage and position.

    ``_blocks.2._bn0.weight`` is ``blocks.1.1.bn1.weight``; the first block has no expansion.
    """
    from capvid.backbones.capvid_small import STAGES

    match = re.fullmatch(r"(.*?)(?:_blocks\.(\d+)\.)?(_[a-z]\w*)\.(\w+)", name)
    if match is None:
        return name
    prefix, number, module, blob = match.groups()
    block, modules = "", _LITE0_NAMES[0]
    if number is not None:
        stages = [(stage, at) for stage, (_, _, count, _, _) in enumerate(STAGES) for at in range(count)]
        if int(number) >= len(stages):
            return name
        block = "blocks.{}.{}.".format(*stages[int(number)])
        modules = _LITE0_NAMES[1 if int(number) else 2]
    return f"{prefix}{block}{modules[module]}.{blob}" if module in modules else name


def _reshape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Return the tensor in the wanted shape, if only sizes of 1 differ or a convolution was a matrix."""
    as_matrix = tensor.ndim == 2 and len(shape) == 4 and tensor.shape[0] == shape[0]
    if tensor.numel() != math.prod(shape):
        return None
    if not as_matrix and [n for n in tensor.shape if n != 1] != [n for n in shape if n != 1]:
        return None
    tensor = tensor.reshape(shape)
    return tensor.float() if tensor.is_floating_point() else tensor
