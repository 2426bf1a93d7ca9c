"""X3D-XS with random weights in PyTorchVideo's own layouts, a plain network of them, and their fingerprint.

Names and shapes are those that ``create_x3d(input_clip_length=4)`` and ``EfficientX3d(expansion="XS")`` of
pytorchvideo 0.1.5 have; the network was compared with both of theirs (6e-8 of the largest logit).
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from capvid.backbones.catalog import MODELS_FILE, backbone_entry
from capvid.backbones.x3d_checkpoints import fold_batch_norms, sample
from capvid.utils.files import sha256_file

Tensors = dict[str, Tensor]
STAGES = ((3, 24, 54, 8), (5, 48, 108, 8), (11, 96, 216, 16), (7, 192, 432, 32))


def random_checkpoint(*, efficient: bool, seed: int = 0) -> Tensors:
    """Return a state dict in one of the layouts."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}

    def convolution(name: str, *shape: int, bias: bool = False) -> None:
        fan_in = torch.Size(shape[1:]).numel()
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) / fan_in**0.5
        if bias:
            tensors[f"{name}.bias"] = torch.randn(shape[0], generator=generator) / 10

    def norm(name: str, width: int) -> None:
        tensors[f"{name}.weight"] = 1 + torch.randn(width, generator=generator) / 5
        tensors[f"{name}.bias"] = torch.randn(width, generator=generator) / 5
        tensors[f"{name}.running_mean"] = torch.randn(width, generator=generator) / 5
        tensors[f"{name}.running_var"] = 0.5 + torch.rand(width, generator=generator)
        tensors[f"{name}.num_batches_tracked"] = torch.tensor(7)

    if efficient:
        convolution("s1.pathway0_stem_conv_xy.kernel.conv", 24, 3, 1, 3, 3)
        convolution("s1.pathway0_stem_conv.kernel.conv", 24, 1, 5, 1, 1)
        norm("s1.pathway0_stem_conv.kernel.bn", 24)
    else:
        convolution("blocks.0.conv.conv_t", 24, 3, 1, 3, 3)
        convolution("blocks.0.conv.conv_xy", 24, 1, 5, 1, 1)
        norm("blocks.0.norm", 24)
    width = 24
    for stage, (count, out, inner, squeeze) in enumerate(STAGES, 1):
        for index in range(count):
            if efficient:
                block = f"s{stage + 1}.pathway0_res{index}."
                names = {part: f"{block}layers.conv_{number}.kernel." for number, part in enumerate("abc")}
                convs = {part: f"{name}conv" for part, name in names.items()}
                norms = {part: f"{name}bn" for part, name in names.items()}
                se, shortcut = f"{block}layers.se.se.block", (f"{block}_res_proj.kernel.conv",)
                shortcut += (f"{block}_res_proj.kernel.bn",)
            else:
                block = f"blocks.{stage}.res_blocks.{index}."
                convs = {part: f"{block}branch2.conv_{part}" for part in "abc"}
                norms = {part: f"{block}branch2.norm_{part}" for part in "abc"}
                norms["b"] += ".0"
                se = f"{block}branch2.norm_b.1.block"
                shortcut = (f"{block}branch1_conv", *([f"{block}branch1_norm"] if width != out else []))
            convolution(convs["a"], inner, width, 1, 1, 1)
            convolution(convs["b"], inner, 1, 3, 3, 3)
            convolution(convs["c"], out, inner, 1, 1, 1)
            for part, channels in (("a", inner), ("b", inner), ("c", out)):
                norm(norms[part], channels)
            if index % 2 == 0:
                convolution(f"{se}.0", squeeze, inner, 1, 1, 1, bias=True)
                convolution(f"{se}.2", inner, squeeze, 1, 1, 1, bias=True)
            if index == 0:
                convolution(shortcut[0], out, width, 1, 1, 1)
                for name in shortcut[1:]:
                    norm(name, out)
            width = out
    head = ("head.conv_5.kernel.conv", "head.conv_5.kernel.bn", "head.lin_5.kernel.conv", "projection.model")
    if not efficient:
        head = (
            "blocks.5.pool.pre_conv",
            "blocks.5.pool.pre_norm",
            "blocks.5.pool.post_conv",
            "blocks.5.proj",
        )
    convolution(head[0], 432, 192, 1, 1, 1)
    norm(head[1], 432)
    convolution(head[2], 2048, 432, 1, 1, 1)
    convolution(head[3], 400, 2048, bias=True)
    return tensors


def plain_network(tensors: Tensors, clips: Tensor) -> Tensor:
    """Compute the logits (N, 400) of clips with torch's own 3D convolutions and batch normalisation."""
    efficient = any(name.startswith("s1.") for name in tensors)

    def conv(name: str, x: Tensor, **options: object) -> Tensor:
        return F.conv3d(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"), **options)  # type: ignore[arg-type]

    def norm(name: str, x: Tensor) -> Tensor:
        if f"{name}.weight" not in tensors:
            return x
        mean, variance = tensors[f"{name}.running_mean"], tensors[f"{name}.running_var"]
        return F.batch_norm(x, mean, variance, tensors[f"{name}.weight"], tensors[f"{name}.bias"], eps=1e-5)

    def block(prefix: str, x: Tensor, stride: int) -> Tensor:
        def name(plain: str, theirs: str) -> str:
            return prefix + (theirs if efficient else plain)

        strides = (1, stride, stride)
        y = conv(name("branch2.conv_a", "layers.conv_0.kernel.conv"), x)
        y = norm(name("branch2.norm_a", "layers.conv_0.kernel.bn"), y).relu()
        middle = name("branch2.conv_b", "layers.conv_1.kernel.conv")
        y = conv(middle, y, stride=strides, padding=1, groups=y.shape[1])
        y = norm(name("branch2.norm_b.0", "layers.conv_1.kernel.bn"), y)
        se = name("branch2.norm_b.1.block", "layers.se.se.block")
        if f"{se}.0.weight" in tensors:
            means = y.mean((2, 3, 4), keepdim=True)
            y = y * conv(f"{se}.2", conv(f"{se}.0", means).relu()).sigmoid()
        y = conv(name("branch2.conv_c", "layers.conv_2.kernel.conv"), F.silu(y))
        y = norm(name("branch2.norm_c", "layers.conv_2.kernel.bn"), y)
        shortcut = name("branch1_conv", "_res_proj.kernel.conv")
        if f"{shortcut}.weight" in tensors:
            x = norm(name("branch1_norm", "_res_proj.kernel.bn"), conv(shortcut, x, stride=strides))
        return (x + y).relu()

    first, second, stem = "blocks.0.conv.conv_t", "blocks.0.conv.conv_xy", "blocks.0.norm"
    head = ("blocks.5.pool.pre_conv", "blocks.5.pool.pre_norm", "blocks.5.pool.post_conv", "blocks.5.proj")
    if efficient:
        first, second = "s1.pathway0_stem_conv_xy.kernel.conv", "s1.pathway0_stem_conv.kernel.conv"
        stem = "s1.pathway0_stem_conv.kernel.bn"
        head = ("head.conv_5.kernel.conv", "head.conv_5.kernel.bn", "head.lin_5.kernel.conv")
        head += ("projection.model",)
    x = conv(first, clips, stride=(1, 2, 2), padding=(0, 1, 1))
    x = norm(stem, conv(second, x, padding=(2, 0, 0), groups=24)).relu()
    for stage, (count, *_) in enumerate(STAGES, 1):
        for index in range(count):
            plain, theirs = f"blocks.{stage}.res_blocks.{index}.", f"s{stage + 1}.pathway0_res{index}."
            x = block(theirs if efficient else plain, x, 1 if index else 2)
    x = norm(head[1], conv(head[0], x)).relu().mean((2, 3, 4), keepdim=True)
    x = conv(head[2], x).relu().flatten(1)
    return F.linear(x, tensors[f"{head[3]}.weight"], tensors[f"{head[3]}.bias"])


def make_fingerprint(tensors: Tensors) -> Tensors:
    """Return the fingerprint of weights in our layout that were rounded to 8 bits.

    A weight may be off by a step of its tensor, or of its slice in time, which have been rounded one by one.
    """
    values, tolerances = [], []
    for name in sorted(tensors):
        tensor = tensors[name].float()
        tolerance = tensor.abs() / 500 + 1e-3  # of biases, which have not been rounded but to half precision
        if re.search(r"\.weight$", name):
            others = [axis for axis in range(tensor.ndim) if axis != 2]
            tolerance = (tensor.abs().amax(others, keepdim=True) / 127).expand(tensor.shape)
        values.append(sample(tensor))
        tolerances.append(sample(tolerance.contiguous()))
    return {"values": torch.stack(values).half(), "tolerances": torch.stack(tolerances).half()}


def models_file(folder: Path, url: str, tensors: Tensors) -> Path:
    """Write a file of models in which x3d-xs has these weights, rounded to 8 bits, at another address."""
    folded = fold_batch_norms(tensors)
    rounded = {}
    for name, tensor in folded.items():
        axes = [axis for axis in range(tensor.ndim) if axis != 2]
        step = tensor.abs().amax(axes, keepdim=True) / 127
        rounded[name] = (tensor / step).round() * step if name.endswith("weight") else tensor
    save_file(rounded, folder / "x3d_xs_kinetics400.safetensors")
    save_file(make_fingerprint(rounded), folder / "fingerprint.safetensors")
    table = (MODELS_FILE).read_text()
    table = table[table.index("[backbones.x3d-xs]") : table.index("# C3D and torchvision")]
    entry = backbone_entry("x3d-xs")
    table = table.replace(entry.source.rpartition("/")[0], url)
    table = table.replace(str(entry.fingerprint), str(folder / "fingerprint.safetensors"))
    table = table.replace(str(entry.sha256), sha256_file(folder / "x3d_xs_kinetics400.safetensors"))
    path = folder / "models.toml"
    path.write_text(table)
    return path
