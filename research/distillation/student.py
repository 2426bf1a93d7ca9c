"""A student that begins with known weights, and teachers' lessons that begin with what it tells already.

The batch normalisation of the network that the weights are of is measured anew on the pictures, then folded
into the convolutions: with fixed mean m, variance v, scale g and shift b it is a convolution's affine map,
weights times g / sqrt(v + eps) and bias b - m g / sqrt(v + eps).

Notation for tensor shapes: B pictures, H and W their height and width, N pictures in all, E width of the
student's embedding, D of a teacher's features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from capvid.backbones.capvid_small import Student
from capvid.backbones.catalog import backbone_entry, build_network
from capvid.backbones.preprocessing import normalise
from capvid.backbones.weights import fill, find_weights
from capvid.errors import RecipeError
from capvid.training.optimization import wants_bf16
from distillation.pictures import picture_size, views, whole
from distillation.recipe import DistilRecipe
from distillation.targets import DistilData, Lessons

NETWORK = "efficientnet_lite0"  # timm's name; padded alike on all sides, as the student is
BATCHES = 8  # on which batch normalisation is measured
TOLD = 4096  # pictures from which the lessons begin
STRENGTHS = torch.logspace(-4, 2, 25, dtype=torch.float64)  # of ridge regression, by the mean variance


def known_network(recipe: DistilRecipe, weights: Path | None) -> nn.Module:
    """Return the network, with the weights that ``recipe.begin`` names, that the student begins as.

    The weights are looked for in the folder ``weights`` first, then where backbones' weights always are.

    Raises:
        RecipeError: the backbone to train cannot begin as that one.
        WeightsError: there are no such weights.
        HubError: they should come from the Hugging Face Hub and do not.
    """
    entry, student = backbone_entry(recipe.begin or ""), backbone_entry(recipe.backbone)
    if student.kind != "capvid-small" or (entry.architecture or "").removeprefix("tf_") != NETWORK:
        raise RecipeError(
            f"{recipe.name}: begin = {recipe.begin}: {student.name} cannot begin with its weights",
            remedy='write begin = "efficientnet-lite0" for a backbone of kind capvid-small, or leave it out',
        )
    network = build_network(replace(entry, architecture=NETWORK), entry.default_layer)
    path, _ = find_weights(entry, None, [weights] if weights else [])
    fill(network, path, entry.name)
    return network.network  # type: ignore[return-value]


def begin(
    student: Student,
    lessons: Lessons,
    network: nn.Module,
    *,
    recipe: DistilRecipe,
    data: DistilData,
    device: torch.device,
) -> None:
    """Give the student the weights of ``network``, and the lessons what best tells the targets from there.

    Words begin with the frequency that their biases say, whatever the picture.
    """
    options, how = recipe.training, backbone_entry(recipe.backbone).preprocess
    size, pictures = picture_size(how), data.shown[0].pictures
    generator = torch.Generator().manual_seed(options.seed)
    bf16 = wants_bf16(options.precision, device, student)

    def shuffled() -> Tensor:
        return data.train[torch.randperm(len(data.train), generator=generator)]

    def augmented() -> Iterator[Tensor]:
        for _ in range(BATCHES):
            rows = shuffled()[: options.batch_size].sort().values
            some = torch.from_numpy(pictures[rows.numpy()]).to(device)
            yield normalise(views(some, size, least_area=options.least_area, generator=generator), how)

    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        measure(network.to(device).to(memory_format=torch.channels_last), augmented())
    fold(network.cpu(), student)
    student.to(device).to(memory_format=torch.channels_last)
    rows, embeddings = shuffled()[:TOLD].sort().values, []
    for part in rows.split(options.batch_size):
        inputs = normalise(whole(torch.from_numpy(pictures[part.numpy()]).to(device), size), how)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            embeddings.append(student(inputs).float().cpu())
    told = torch.cat(embeddings)
    with torch.no_grad():
        for name, teacher in lessons.named_teachers():
            weight, bias = ridge(told, teacher.wanted(data.shown[0].features[name][rows].float()))
            teacher.tell.weight.copy_(weight)
            teacher.tell.bias.copy_(bias)
        lessons.words.weight.zero_()


@torch.no_grad()
def measure(network: nn.Module, batches: Iterable[Tensor]) -> None:
    """Measure the statistics of batch normalisation anew: their means over batches (B, 3, H, W)."""
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average
    network.train()
    for batch in batches:
        network(batch)
    network.eval()


@torch.no_grad()
def fold(network: nn.Module, student: Student) -> None:
    """Give the student the weights of timm's EfficientNet-Lite0, its batch normalisation folded in."""
    for conv, norm, ours in _pairs(network, student):
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        ours.weight.copy_(conv.weight * scale.view(-1, 1, 1, 1))
        ours.bias.copy_(norm.bias - norm.running_mean * scale)


def _pairs(network: Any, student: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Each convolution of timm's network, what normalises it, and the student's in its place."""
    yield network.conv_stem, network.bn1, student.stem
    blocks = [block for stage in network.blocks for block in stage]
    for block, ours in zip(blocks, student.blocks, strict=True):
        if ours.expand is None:
            yield block.conv_dw, block.bn1, ours.depth
            yield block.conv_pw, block.bn2, ours.project
        else:
            yield block.conv_pw, block.bn1, ours.expand
            yield block.conv_dw, block.bn2, ours.depth
            yield block.conv_pwl, block.bn3, ours.project
    yield network.conv_head, network.bn2, student.head


def ridge(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the linear map that tells ``targets`` from ``inputs``, by ridge regression.

    Its strength is the one of ``STRENGTHS`` with the least error by generalised cross-validation (Golub,
    Heath and Wahba, Technometrics 1979): too little, from few pictures, would tell worse than the mean.

    Args:
        inputs: (N, E).
        targets: (N, D).

    Returns:
        The weight (D, E) and the bias (D,), float32.
    """
    x, y = inputs.double(), targets.double()
    x_mean, y_mean = x.mean(0), y.mean(0)
    x, y = x - x_mean, y - y_mean
    values, vectors = torch.linalg.eigh(x.T @ x)  # (E,), (E, E)
    values = values.clamp_min(0)
    seen = vectors.T @ (x.T @ y)  # (E, D)
    power, total = seen.square().sum(1), y.square().sum()
    errors = []
    for strength in STRENGTHS * values.sum() / len(values):
        shrunk = values + strength
        left = total - (power * (2 / shrunk - values / shrunk.square())).sum()
        free = len(x) - 1 - (values / shrunk).sum()
        errors.append(left / free.square())
    strength = STRENGTHS[int(torch.stack(errors).argmin())] * values.sum() / len(values)
    weight = (vectors @ (seen / (values + strength).unsqueeze(1))).T  # (D, E)
    return weight.float(), (y_mean - weight @ x_mean).float()


SHARE = 8  # the kernels' gradients are estimated from every eighth picture


class DepthwiseConv(torch.autograd.Function):
    """A depthwise convolution, padded by k // 2, whose kernel's gradient comes from some of the pictures.

    Over all ``start`` from 0 to ``share - 1`` the estimates have the true gradient as their mean; all other
    gradients are exact.
    """

    @staticmethod
    def forward(
        ctx: Any, maps: Tensor, weight: Tensor, bias: Tensor, stride: int, share: int, start: int
    ) -> Tensor:
        """(B, C, H, W), (C, 1, k, k) and (C,) -> (B, C, h, w) in the numbers of ``maps``.

        The kernel's gradient is ``share`` times that of the pictures ``start``, ``start + share``, and so on.
        """
        ctx.save_for_backward(maps[start::share], weight)
        ctx.shape, ctx.stride, ctx.share, ctx.start = maps.shape, stride, share, start
        kernel, shift = weight.to(maps.dtype), bias.to(maps.dtype)
        return F.conv2d(maps, kernel, shift, stride, weight.shape[-1] // 2, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """(B, C, h, w) -> the gradients of maps, kernel and bias, the latter two in single precision."""
        some, weight = ctx.saved_tensors
        stride, padding, groups = ctx.stride, weight.shape[-1] // 2, len(weight)
        spread = gradient
        if stride > 1:
            spread = gradient.new_zeros(ctx.shape).contiguous(memory_format=torch.channels_last)
            spread[:, :, ::stride, ::stride] = gradient
        turned = weight.to(gradient.dtype).flip(2, 3)
        of_maps = F.conv2d(
            spread.contiguous(memory_format=torch.channels_last), turned, None, 1, padding, groups=groups
        )
        of_weight = conv2d_weight(
            some.float(),
            weight.shape,
            gradient[ctx.start :: ctx.share].float(),
            stride=stride,
            padding=padding,
            groups=groups,
        )
        return of_maps, of_weight * ctx.share, gradient.sum((0, 2, 3), dtype=torch.float32), None, None, None


@contextmanager
def fast_depthwise(network: nn.Module, generator: torch.Generator, *, share: int = SHARE) -> Iterator[None]:
    """Let the depthwise convolutions of ``network`` compute so while gradients are wanted in bfloat16.

    Args:
        network: whose convolutions of one channel each, with bias, are meant.
        generator: of what is drawn, once for each convolution and batch.
        share: a kernel's gradient is estimated from one of so many pictures.
    """
    changed = [module for module in network.modules() if _is_depthwise(module)]
    for module in changed:
        module.forward = partial(_forward, module, generator, share)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _is_depthwise(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d) or module.groups == 1 or module.bias is None:
        return False
    side = module.kernel_size[0]
    alike = module.kernel_size == (side, side) and module.stride[0] == module.stride[1]
    centred = side % 2 == 1 and module.padding == (side // 2, side // 2) and module.dilation == (1, 1)
    return alike and centred and module.groups == module.in_channels == module.out_channels


def _forward(module: Any, generator: torch.Generator, share: int, maps: Tensor) -> Tensor:
    if not (torch.is_grad_enabled() and maps.dtype == torch.bfloat16):
        return nn.Conv2d.forward(module, maps)
    share = min(share, len(maps))
    start = int(torch.randint(share, (), generator=generator))
    found: Tensor = DepthwiseConv.apply(maps, module.weight, module.bias, module.stride[0], share, start)
    return found
