"""X3D-XS as PyTorchVideo publishes it: tensors by our names, and the fingerprint of the trained weights.

PyTorchVideo has two layouts of the network, with batch normalisation: ``create_x3d`` and ``EfficientX3d``
(``pytorchvideo/models/x3d.py``, ``pytorchvideo/models/accelerator/mobile_cpu/efficient_x3d.py``). They
are different trained networks: only ``EfficientX3d`` normalises the shortcut of the first block.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from capvid.backbones.catalog import BUNDLED, BackboneEntry
from capvid.backbones.clip_networks import X3D_STAGES
from capvid.errors import WeightsError
from capvid.utils.tensor_files import read_tensors

_EPSILON = 1e-5  # of their batch normalisation
_STATISTICS = ("weight", "bias", "running_mean", "running_var")
SAMPLES = 16  # values of each tensor in a fingerprint
_OUTLIERS = 1  # number of them that may be out of tolerance

# our layer: their convolution, and their batch normalisation ("" where there is none)
Layers = dict[str, tuple[str, str]]
_PLAIN_OUTSIDE: Layers = {
    "stem_xy": ("blocks.0.conv.conv_t", ""),  # theirs are named the other way round
    "stem_t": ("blocks.0.conv.conv_xy", "blocks.0.norm"),
    "conv5": ("blocks.5.pool.pre_conv", "blocks.5.pool.pre_norm"),
    "lin5": ("blocks.5.pool.post_conv", ""),
    "fc": ("blocks.5.proj", ""),
}
_PLAIN_BLOCK: Layers = {
    "a": ("branch2.conv_a", "branch2.norm_a"),
    "b": ("branch2.conv_b", "branch2.norm_b.0"),
    "se.fc1": ("branch2.norm_b.1.block.0", ""),
    "se.fc2": ("branch2.norm_b.1.block.2", ""),
    "c": ("branch2.conv_c", "branch2.norm_c"),
    "proj": ("branch1_conv", "branch1_norm"),
}
_EFFICIENT_OUTSIDE: Layers = {
    "stem_xy": ("s1.pathway0_stem_conv_xy.kernel.conv", ""),
    "stem_t": ("s1.pathway0_stem_conv.kernel.conv", "s1.pathway0_stem_conv.kernel.bn"),
    "conv5": ("head.conv_5.kernel.conv", "head.conv_5.kernel.bn"),
    "lin5": ("head.lin_5.kernel.conv", ""),
    "fc": ("projection.model", ""),
}
_EFFICIENT_BLOCK: Layers = {
    "a": ("layers.conv_0.kernel.conv", "layers.conv_0.kernel.bn"),
    "b": ("layers.conv_1.kernel.conv", "layers.conv_1.kernel.bn"),
    "se.fc1": ("layers.se.se.block.0", ""),
    "se.fc2": ("layers.se.se.block.2", ""),
    "c": ("layers.conv_2.kernel.conv", "layers.conv_2.kernel.bn"),
    "proj": ("_res_proj.kernel.conv", "_res_proj.kernel.bn"),
}


def layers_of(*, efficient: bool) -> Layers:
    """Return the convolution and the batch normalisation behind each of our layers, in one layout."""
    layers = dict(_EFFICIENT_OUTSIDE if efficient else _PLAIN_OUTSIDE)
    block, number = _EFFICIENT_BLOCK if efficient else _PLAIN_BLOCK, 0
    for stage, (count, *_) in enumerate(X3D_STAGES, 1):
        for index in range(count):
            theirs = f"blocks.{stage}.res_blocks.{index}."
            if efficient:
                theirs = f"s{stage + 1}.pathway0_res{index}."
            for ours, (convolution, norm) in block.items():
                if (ours.startswith("se.") and index % 2) or (ours == "proj" and index):
                    continue  # every other block has squeeze-excitation, the first of a stage a projection
                # create_x3d normalises a shortcut only if it changes the number of channels
                bare = not norm or (ours == "proj" and stage == 1 and not efficient)
                layers[f"blocks.{number}.{ours}"] = theirs + convolution, "" if bare else theirs + norm
            number += 1
    return layers


def fold_batch_norms(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors of X3D-XS by our names, with batch normalisation folded into the convolutions.

    Tensors of another network, and those that belong to no layer, keep their names. A layer without its
    convolution or its normalisation is left out.
    """
    for efficient in (False, True):
        layers = layers_of(efficient=efficient)
        stem = f"{layers['stem_xy'][0]}.weight"
        prefix = next((name.removesuffix(stem) for name in tensors if f".{name}".endswith(f".{stem}")), None)
        if prefix is not None:
            return _fold(tensors, layers, prefix)
    return tensors


def _fold(tensors: Mapping[str, Tensor], layers: Layers, prefix: str) -> dict[str, Tensor]:
    folded = {name: tensor for name, tensor in tensors.items() if not name.endswith("num_batches_tracked")}
    for ours, (convolution, norm) in layers.items():
        weight = tensors.get(f"{prefix}{convolution}.weight")
        statistics = [tensors.get(f"{prefix}{norm}.{name}") for name in _STATISTICS] if norm else []
        if weight is None or any(each is None or each.shape != weight.shape[:1] for each in statistics):
            continue
        weight = weight.double()
        bias = tensors.get(f"{prefix}{convolution}.bias", torch.zeros(weight.shape[:1])).double()
        if statistics:
            gain, shift, mean, variance = (each.double() for each in statistics if each is not None)
            scale = gain / (variance + _EPSILON).sqrt()
            weight = weight * scale.reshape(-1, *[1] * (weight.ndim - 1))
            bias = (bias - mean) * scale + shift
        for name in ("weight", "bias"):
            folded.pop(f"{prefix}{convolution}.{name}", None)
        for name in _STATISTICS:
            folded.pop(f"{prefix}{norm}.{name}", None)
        folded |= {f"{ours}.weight": weight.float(), f"{ours}.bias": bias.float()}
    return folded


def sample(tensor: Tensor) -> Tensor:
    """Return evenly spaced values of a tensor: (SAMPLES,) float32."""
    positions = torch.linspace(0, tensor.numel() - 1, SAMPLES, dtype=torch.float64).long()
    return tensor.flatten()[positions].float()


def differing_tensors(entry: BackboneEntry, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that differ from those that the backbone's fingerprint was made of.

    A fingerprint has ``values`` and ``tolerances``, both (tensors, SAMPLES): samples of the tensors in
    alphabetical order, and how far each may be off.
    """
    expected = load_file(BUNDLED / str(entry.fingerprint))
    names = sorted(f"{layer}.{blob}" for layer in layers_of(efficient=True) for blob in ("weight", "bias"))
    return [
        name
        for name, values, tolerances in zip(names, expected["values"], expected["tolerances"], strict=True)
        if name not in tensors
        or int(((sample(tensors[name]) - values).abs() <= tolerances).sum()) < SAMPLES - _OUTLIERS
    ]


def read_checked(entry: BackboneEntry, path: Path) -> Mapping[str, Tensor]:
    """Read weights in our layout or PyTorchVideo's, and compare them with the backbone's fingerprint.

    Raises:
        WeightsError: the file cannot be read, or these are other weights.
    """
    tensors = fold_batch_norms(read_tensors(path))
    if differing := differing_tensors(entry, tensors):
        published = next(iter(entry.urls), entry.file)
        problem = f"{path}: not the weights of {entry.name} that captioners are trained with"
        raise WeightsError(
            f"{problem} ({len(differing)} tensors differ, such as {differing[0]})",
            remedy=f"give {published} of PyTorchVideo's model zoo",
        )
    return tensors
