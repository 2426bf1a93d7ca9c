"""Downloaded checkpoints into weights files of our backbones: the tensors found, renamed, checked, saved.

Checkpoints wrap and name the same tensors in many ways: under ``state_dict``, behind ``module.`` or
``backbone.``, or by Caffe's layers with slashes or underscores. What fits is kept; nothing is guessed from
shapes alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from capvid.errors import UsageError, WeightsError
from capvid.features.networks import build
from capvid.features.registry import BackboneEntry, backbone_entry, backbones
from capvid.features.student import STAGES
from capvid.features.tensors import read_tensors
from capvid.files import atomic_path, sha256_file

_COUNTER = "num_batches_tracked"
_LONGEST_NAME = 500  # characters of a tensor's name
_NAMED = 3  # tensors that a message names
# a part of the names without which a checkpoint is none of these: their networks take long to import
_MARKS = {"clip": "visual_projection", "videomae": "patch_embeddings"}
# EfficientNet-Lite0's modules: lukemelas' names and timm's
_LITE0_ENDS = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
_LITE0_BLOCK = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
_LITE0_FIRST_BLOCK = {
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn1",
    "_project_conv": "conv_pw",
    "_bn2": "bn2",
}


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The tensors of a checkpoint under the names of a backbone.

    Attributes:
        entry: the backbone.
        tensors: by name, as its network has them, float32 (counts as they are).
        left_out: what else the checkpoint holds, such as a classifier.
    """

    entry: BackboneEntry
    tensors: Mapping[str, Tensor]
    left_out: tuple[str, ...]

    def save(self, path: Path) -> str:
        """Write them as a safetensors file, whole or not at all, and give its SHA-256.

        Raises:
            UsageError: the file cannot be written.
        """
        from safetensors.torch import save_file

        tensors = {name: self.tensors[name].contiguous().clone() for name in sorted(self.tensors)}
        try:
            with atomic_path(path) as temporary:
                save_file(tensors, temporary, metadata={"format": "pt"})
            return sha256_file(path)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error


def convert(path: Path, *, backbone: str | None = None) -> Conversion:
    """Read a checkpoint and find in it the tensors of a backbone.

    Args:
        path: safetensors, or what ``torch.save`` writes; nothing but tensors is ever unpickled.
        backbone: name or alias in the registry; ``None`` takes the only one whose names and shapes fit.

    Raises:
        UsageError: no such backbone, or none or several fit.
        WeightsError: the file cannot be read, or holds something else.
    """
    entry = None if backbone is None else backbone_entry(backbone)
    if entry is not None and entry.source == "none":
        raise UsageError(f"{entry.name} needs no weights")
    tensors = read_tensors(path)
    if entry is None:
        return _recognised(path, tensors)
    found = _match(entry, tensors)
    if isinstance(found, str):
        raise WeightsError(f"{path}: not a checkpoint of {entry.name} ({found})")
    return found


def _recognised(path: Path, tensors: Mapping[str, Tensor]) -> Conversion:
    """Find the one backbone that the tensors fit; of two networks the one that holds all of the other."""
    fits = []
    for entry in backbones().values():
        mark = _MARKS.get(entry.kind, "")
        if entry.source != "none" and any(mark in name for name in tensors):
            found = _match(entry, tensors)
            if isinstance(found, Conversion):
                fits.append(found)
    largest = max((len(one.tensors) for one in fits), default=0)
    best = [one for one in fits if len(one.tensors) == largest]
    if len(best) != 1 or not all(one.tensors.keys() <= best[0].tensors.keys() for one in fits):
        names = ", ".join(one.entry.name for one in fits)
        raise UsageError(
            f"{path}: fits {names}" if fits else f"{path}: fits no backbone",
            remedy="say which one it is with --as",
        )
    return best[0]


def _match(entry: BackboneEntry, tensors: Mapping[str, Tensor]) -> Conversion | str:
    """Find the backbone's tensors among those of a checkpoint, or say what is wrong with them."""
    wanted = _shapes(entry)
    names = _names(entry, tensors, wanted)
    found, other = {}, []
    for name, shape in wanted.items():
        if name in names:
            tensor = _fitted(tensors[names[name]], shape)
            if tensor is None:
                sizes = " x ".join(map(str, tensors[names[name]].shape))
                other.append(f"{name} is {sizes}, not {' x '.join(map(str, shape))}")
            else:
                found[name] = tensor
        elif name.endswith(_COUNTER):  # old files do not count, and nothing depends on it
            found[name] = torch.zeros((), dtype=torch.int64)
    missing = [name for name in wanted if name not in names and name not in found]
    left_out = tuple(sorted(tensors.keys() - set(names.values())))
    wrong = []
    if missing:
        wrong.append(f"{len(missing)} of {len(wanted)} tensors are missing: {_some(missing)}")
    if other:
        wrong.append(f"{len(other)} of another shape: {_some(other)}")
    if any(name.endswith("running_mean") for name in left_out) and not _normalises(wanted):
        wrong.append(f"it has batch normalisation, which {entry.name} has not")
    return "; ".join(wrong) or Conversion(entry=entry, tensors=found, left_out=left_out)


def _shapes(entry: BackboneEntry) -> dict[str, tuple[int, ...]]:
    """Give the names and shapes of all tensors that the layers of a backbone need."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in entry.layers:
        shapes |= {name: tuple(tensor.shape) for name, tensor in build(entry, layer).state_dict().items()}
    return shapes


def _names(entry: BackboneEntry, tensors: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """Say what each wanted tensor is called in the checkpoint, as far as it is there.

    All have the same prefix there: of those that occur, the one that finds most, and of equals the shortest.
    """
    spelled: dict[str, str] = {}
    spell = _spelling(entry)
    for name in tensors:
        if len(name) > _LONGEST_NAME:
            continue
        spelled.setdefault(spell(name), name)
    telling = sorted((name for name in wanted if not name.endswith(_COUNTER)), key=len)[-_NAMED:]
    prefixes = {
        name.removesuffix(end) for end in telling for name in spelled if f".{name}".endswith(f".{end}")
    }

    hits = Counter[str]()  # by prefix; counted in one pass, for there may be as many prefixes as tensors
    for name in spelled:
        starts = (0, *(dot.end() for dot in re.finditer(r"\.", name)))
        hits.update(name[:start] for start in starts if name[start:] in wanted)
    best = min(prefixes | {""}, key=lambda prefix: (-hits[prefix], len(prefix), prefix))
    return {name: spelled[best + name] for name in wanted if best + name in spelled}


def _spelling(entry: BackboneEntry) -> Callable[[str], str]:
    """Give what turns a checkpoint's names into ours, prefixes aside."""
    if entry.kind in ("c3d", "googlenet"):
        return _from_c3d if entry.kind == "c3d" else _from_caffe
    if entry.kind == "timm" and (entry.architecture or "").startswith("vgg"):
        return _from_torchvision_vgg
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
    name = _from_caffe(name)
    name = re.sub(r"^conv([12])\.", r"conv\1a.", name)
    return re.sub(r"^fc([678])[-_]1\.", r"fc\1.", name)


def _from_torchvision_vgg(name: str) -> str:
    """VGG's fully connected layers in torchvision are timm's convolutions over all places."""
    for theirs, ours in (("classifier.0.", "pre_logits.fc1."), ("classifier.3.", "pre_logits.fc2.")):
        name = name.replace(theirs, ours)
    return name


def _from_lukemelas_lite0(name: str) -> str:
    """Names of lukemelas' EfficientNet-PyTorch as timm's, which numbers blocks by stage and position.

    ``_blocks.2._bn0.weight`` is ``blocks.1.1.bn1.weight``; the first block has no expansion.
    """
    match = re.fullmatch(r"(.*?)(?:_blocks\.(\d+)\.)?(_[a-z]\w*)\.(\w+)", name)
    if match is None:
        return name
    prefix, number, module, blob = match.groups()
    if number is None:
        place, modules = "", _LITE0_ENDS
    else:
        stages = [(stage, at) for stage, (_, _, count, _, _) in enumerate(STAGES) for at in range(count)]
        if int(number) >= len(stages):
            return name
        place = "blocks.{}.{}.".format(*stages[int(number)])
        modules = _LITE0_BLOCK if int(number) else _LITE0_FIRST_BLOCK
    return f"{prefix}{place}{modules[module]}.{blob}" if module in modules else name


def _fitted(tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Give the tensor in the shape wanted, if only sizes of 1 differ or a convolution was a matrix."""
    as_matrix = tensor.ndim == 2 and len(shape) == 4 and tensor.shape[0] == shape[0]
    if tensor.numel() != torch.Size(shape).numel():
        return None
    if not as_matrix and [n for n in tensor.shape if n != 1] != [n for n in shape if n != 1]:
        return None
    tensor = tensor.reshape(shape)
    return tensor.float() if tensor.is_floating_point() else tensor


def _normalises(names: Collection[str]) -> bool:
    return any(name.endswith("running_mean") for name in names)


def _some(items: Collection[str]) -> str:
    shown = ", ".join(list(items)[:_NAMED])
    return shown if len(items) <= _NAMED else f"{shown}, ..."
