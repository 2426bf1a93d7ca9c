"""Conversion of downloaded checkpoints into weights files of backbones.

Checkpoints nest and name the same tensors in many ways: under ``state_dict``, behind ``module.`` or
``backbone.``, or by Caffe layer with slashes or underscores. Nothing is guessed from shapes alone.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from capvid.backbones.catalog import BackboneEntry, backbone_entry, backbones, build_network
from capvid.backbones.weights import COUNTER
from capvid.errors import UsageError, WeightsError
from capvid.utils.files import atomic_path, sha256_file

if TYPE_CHECKING:
    from torch import Tensor

_MAX_NAME_LENGTH = 500  # characters of a tensor's name
_MAX_LISTED = 3  # tensors listed in a message
# text in the tensor names of these networks; without it they are not tried, since they are slow to build
_MARKERS = {
    "clip": "visual_projection",
    "videomae": "patch_embeddings",
    "vjepa2": "patch_embeddings",
    "vit": "patch_embed",
}
# names of EfficientNet-Lite2's modules, lukemelas' and timm's: outside blocks, in a block, in the first block
_LITE2_NAMES = [
    dict(pair.split(":") for pair in pairs.split())
    for pairs in (
        "_conv_stem:conv_stem _bn0:bn1 _conv_head:conv_head _bn1:bn2 _fc:classifier",
        "_expand_conv:conv_pw _bn0:bn1 _depthwise_conv:conv_dw _bn1:bn2 _project_conv:conv_pwl _bn2:bn3",
        "_depthwise_conv:conv_dw _bn1:bn1 _project_conv:conv_pw _bn2:bn2",
    )
]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The tensors of a checkpoint, named as a backbone names them."""

    entry: BackboneEntry
    tensors: Mapping[str, Tensor]  # float32, except counters
    left_out: tuple[str, ...]  # names of the checkpoint's other tensors, such as a classifier

    def save(self, path: Path) -> str:
        """Write a safetensors file atomically and return its SHA-256.

        Raises:
            UsageError: it cannot be written, or there is a file with other tensors.
        """
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import save_file

        with suppress(SafetensorError, OSError), safe_open(str(path), framework="pt") as existing:
            if existing.keys() != sorted(self.tensors):
                problem = f"{path}: holds the weights of another network than {self.entry.name}"
                raise UsageError(problem, remedy="give another name with -o")

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
        path: safetensors file, or a file of ``torch.save``, of which only tensors are unpickled.
        backbone: name or alias; ``None`` takes the only backbone whose names and shapes fit, or the largest
            if its tensors include those of all others that fit.

    Raises:
        UsageError: there is no such backbone, or none or several fit.
        WeightsError: the file cannot be read, or belongs to another network.
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
        family = (candidate.architecture or candidate.kind).partition("_")[0]
        marker = _MARKERS.get(family, "")
        if candidate.source != "none" and any(marker in name for name in tensors):
            match = _match(candidate, tensors)
            if isinstance(match, Conversion):
                fits.append(match)
    max_tensors = max((len(fit.tensors) for fit in fits), default=0)
    largest = [fit for fit in fits if len(fit.tensors) == max_tensors]
    if len(largest) != 1 or not all(fit.tensors.keys() <= largest[0].tensors.keys() for fit in fits):
        names = ", ".join(fit.entry.name for fit in fits) or "no backbone"
        raise UsageError(f"{path}: fits {names}", remedy="name the backbone with --as")
    return largest[0]


def _match(entry: BackboneEntry, tensors: Mapping[str, Tensor]) -> Conversion | str:
    """Match the tensors of a checkpoint with those of a backbone, or return why they do not fit."""
    import torch

    if entry.kind == "x3d":
        from capvid.backbones.x3d_checkpoints import fold_batch_norms

        tensors = fold_batch_norms(tensors)
    shapes = _shapes(entry)
    names = _names(entry, tensors, shapes)
    matched, misshapen = {}, []
    for name, shape in shapes.items():
        if name in names:
            tensor = _reshape(tensors[names[name]], shape)
            if tensor is None:
                sizes = " x ".join(map(str, tensors[names[name]].shape))
                misshapen.append(f"{name} is {sizes}, not {' x '.join(map(str, shape))}")
            else:
                matched[name] = tensor
        elif name.endswith(COUNTER):
            matched[name] = torch.zeros((), dtype=torch.int64)
    missing = [name for name in shapes if name not in names and name not in matched]
    left_out = tuple(sorted(tensors.keys() - set(names.values())))
    problems = []
    missing_problem = f"of {len(shapes)} tensors are missing"
    for problem, items in ((missing_problem, missing), ("of another shape", misshapen)):
        if items:
            listed = ", ".join(items[:_MAX_LISTED]) + (", ..." if len(items) > _MAX_LISTED else "")
            problems.append(f"{len(items)} {problem}: {listed}")
    has_statistics = any(name.endswith("running_mean") for name in left_out)
    if has_statistics and not any(name.endswith("running_mean") for name in shapes):
        problems.append(f"it has batch normalisation, which {entry.name} does not have")
    return "; ".join(problems) or Conversion(entry=entry, tensors=matched, left_out=left_out)


def _shapes(entry: BackboneEntry) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors, by name, that the layers of a backbone need."""
    return {
        name: tuple(tensor.shape)
        for layer in entry.layers
        for name, tensor in build_network(entry, layer).state_dict().items()
    }


def _names(entry: BackboneEntry, tensors: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """Return the checkpoint's names of those of the wanted tensors that it contains.

    All its names have a common prefix: the one that matches the most tensors; of equals, the shortest.
    """
    originals: dict[str, str] = {}  # names in the checkpoint by translated name
    translate = _name_translator(entry)
    for name in tensors:
        if len(name) <= _MAX_NAME_LENGTH:
            originals.setdefault(translate(name), name)
    longest = sorted((name for name in wanted if not name.endswith(COUNTER)), key=len)[-_MAX_LISTED:]
    prefixes = {
        name.removesuffix(end) for end in longest for name in originals if f".{name}".endswith(f".{end}")
    }
    matches = Counter[str]()  # by prefix, counted in one pass: there may be as many prefixes as tensors
    for name in originals:
        starts = (0, *(dot.end() for dot in re.finditer(r"\.", name)))
        matches.update(name[:start] for start in starts if name[start:] in wanted)
    best = min(prefixes | {""}, key=lambda prefix: (-matches[prefix], len(prefix), prefix))
    return {name: originals[best + name] for name in wanted if best + name in originals}


def _name_translator(entry: BackboneEntry) -> Callable[[str], str]:
    """Return the function that translates a checkpoint's names into ours, apart from prefixes."""
    architecture = (entry.architecture or "") if entry.kind == "timm" else ""
    if architecture.startswith("vgg"):  # torchvision's names
        return lambda name: name.replace("classifier.0.", "pre_logits.fc1.").replace(
            "classifier.3.", "pre_logits.fc2."
        )
    if architecture.endswith("efficientnet_lite2"):
        return _translate_lite2_name
    return {"c3d": _translate_c3d_name, "googlenet": _translate_caffe_name}.get(entry.kind, str)


def _translate_caffe_name(name: str) -> str:
    """Translate Caffe's layer and blob, ``inception_3a/1x1/weights`` to ``inception_3a_1x1.weight``."""
    match = re.fullmatch(r"(?:.*?\.)??([^.]+?)(?:\.conv)?[./_](weights?|w|0|bias(?:es)?|b|1)", name)
    if match is None:
        return name
    return f"{match[1].replace('/', '_')}.{'weight' if match[2][0] in 'w0' else 'bias'}"


def _translate_c3d_name(name: str) -> str:
    """Translate ``conv1`` and ``conv1a.conv`` to ``conv1a``, ``fc6-1`` to ``fc6``."""
    name = re.sub(r"^conv([12])\.", r"conv\1a.", _translate_caffe_name(name))
    return re.sub(r"^fc([678])[-_]1\.", r"fc\1.", name)


def _translate_lite2_name(name: str) -> str:
    """Translate names of lukemelas' EfficientNet-PyTorch into timm's, which numbers blocks within stages.

    ``_blocks.2._bn0.weight`` becomes ``blocks.1.1.bn1.weight``; the first block has no expansion.
    """
    from capvid.backbones.capvid_small import STAGES

    match = re.fullmatch(r"(.*?)(?:_blocks\.(\d+)\.)?(_[a-z]\w*)\.(\w+)", name)
    if match is None:
        return name
    prefix, number, module, blob = match.groups()
    block, modules = "", _LITE2_NAMES[0]
    if number is not None:
        blocks = [
            (stage, index) for stage, (_, _, count, _, _) in enumerate(STAGES) for index in range(count)
        ]
        if int(number) >= len(blocks):
            return name
        block = "blocks.{}.{}.".format(*blocks[int(number)])
        modules = _LITE2_NAMES[1 if int(number) else 2]
    return f"{prefix}{block}{modules[module]}.{blob}" if module in modules else name


def _reshape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Return the tensor in ``shape`` if only axes of size 1 differ, or if it is a convolution as a matrix."""
    is_matrix = tensor.ndim == 2 and len(shape) == 4 and tensor.shape[0] == shape[0]
    if tensor.numel() != math.prod(shape):
        return None
    if not is_matrix and [n for n in tensor.shape if n != 1] != [n for n in shape if n != 1]:
        return None
    tensor = tensor.reshape(shape)
    return tensor.float() if tensor.is_floating_point() else tensor
