"""Initial weights of the student and of the prediction layers, and fast depthwise convolutions.

The batch normalisation of the pretrained network is re-estimated on the images, then folded into the
convolutions: with fixed mean m, variance v, scale g and shift b it is an affine map,
weights times g / sqrt(v + eps) and bias b - m g / sqrt(v + eps).

Notation for tensor shapes: B images, H and W their height and width, N images in all, E width of the
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
from capvid.backbones.weights import find_weights, load_weights
from capvid.errors import UsageError
from capvid.training.optimization import wants_bf16
from distillation.images import image_size, random_views, resize_images
from distillation.recipe import DistilRecipe
from distillation.targets import DistilData, DistillationLoss

NETWORK = "efficientnet_lite0"  # timm's name; padded equally on all sides, like the student
BATCHES = 8  # batches that re-estimate batch normalisation
RIDGE_IMAGES = 4096  # images that initialise the prediction layers
STRENGTHS = torch.logspace(
    -4, 2, 25, dtype=torch.float64
)  # of ridge regression, relative to the mean variance


def initial_network(recipe: DistilRecipe, weights: Path | None) -> nn.Module:
    """Return the pretrained network, named by ``recipe.begin``, that initialises the student.

    The weights are searched in the folder ``weights`` first, then in the usual places.

    Raises:
        UsageError: the backbone cannot be initialised from that network.
        WeightsError: the weights are missing.
        HubError: the download from the Hugging Face Hub failed.
    """
    entry, student = backbone_entry(recipe.begin or ""), backbone_entry(recipe.backbone)
    if student.kind != "capvid-small" or (entry.architecture or "").removeprefix("tf_") != NETWORK:
        raise UsageError(
            f"{recipe.name}: begin = {recipe.begin}: {student.name} cannot begin with its weights",
            remedy='write begin = "efficientnet-lite0" for a backbone of kind capvid-small, or leave it out',
        )
    network = build_network(replace(entry, architecture=NETWORK), entry.default_layer)
    path, _ = find_weights(entry, None, [weights] if weights else [])
    load_weights(network, path, entry.name)
    return network.network  # type: ignore[return-value]


def initialise(
    student: Student,
    lessons: DistillationLoss,
    network: nn.Module,
    *,
    recipe: DistilRecipe,
    data: DistilData,
    device: torch.device,
) -> None:
    """Initialise the student from ``network`` and fit the prediction layers by ridge regression.

    The word layer starts with zero weights, so that only its biases determine the scores.
    """
    options, how = recipe.training, backbone_entry(recipe.backbone).preprocess
    size, images = image_size(how), data.shown[0].images
    generator = torch.Generator().manual_seed(options.seed)
    bf16 = wants_bf16(options.precision, device, student)

    def shuffled() -> Tensor:
        return data.train[torch.randperm(len(data.train), generator=generator)]

    def augmented() -> Iterator[Tensor]:
        for _ in range(BATCHES):
            rows = shuffled()[: options.batch_size].sort().values
            batch = torch.from_numpy(images[rows.numpy()]).to(device)
            yield normalise(
                random_views(batch, size, least_area=options.least_area, generator=generator), how
            )

    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        measure(network.to(device).to(memory_format=torch.channels_last), augmented())
    fold(network.cpu(), student)
    student.to(device).to(memory_format=torch.channels_last)
    rows, embeddings = shuffled()[:RIDGE_IMAGES].sort().values, []
    for batch in rows.split(options.batch_size):
        inputs = normalise(resize_images(torch.from_numpy(images[batch.numpy()]).to(device), size), how)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            embeddings.append(student(inputs).float().cpu())
    inputs = torch.cat(embeddings)
    with torch.no_grad():
        for name, teacher in lessons.named_teachers():
            weight, bias = ridge(inputs, teacher.standardised(data.shown[0].features[name][rows].float()))
            teacher.tell.weight.copy_(weight)
            teacher.tell.bias.copy_(bias)
        lessons.words.weight.zero_()


@torch.no_grad()
def measure(network: nn.Module, batches: Iterable[Tensor]) -> None:
    """Re-estimate batch normalisation statistics as means over batches (B, 3, H, W)."""
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
    """Copy timm's EfficientNet-Lite0 into the student, folding in batch normalisation."""
    for conv, norm, ours in _pairs(network, student):
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        ours.weight.copy_(conv.weight * scale.view(-1, 1, 1, 1))
        ours.bias.copy_(norm.bias - norm.running_mean * scale)


def _pairs(network: Any, student: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each convolution of timm's network, its normalisation, and the student's convolution."""
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
    """Return the linear map from ``inputs`` to ``targets``, by ridge regression.

    The strength is the one of ``STRENGTHS`` with the lowest error by generalised cross-validation (Golub,
    Heath and Wahba, Technometrics 1979): with few images, too little would be worse than the mean.

    Args:
        inputs: embeddings, (N, E).
        targets: teacher features, (N, D).

    Returns:
        The weight (D, E) and the bias (D,), float32.
    """
    x, y = inputs.double(), targets.double()
    x_mean, y_mean = x.mean(0), y.mean(0)
    x, y = x - x_mean, y - y_mean
    values, vectors = torch.linalg.eigh(x.T @ x)  # (E,), (E, E)
    values = values.clamp_min(0)
    projected = vectors.T @ (x.T @ y)  # (E, D)
    power, total = projected.square().sum(1), y.square().sum()
    errors = []
    for strength in STRENGTHS * values.sum() / len(values):
        shrunk = values + strength
        left = total - (power * (2 / shrunk - values / shrunk.square())).sum()
        free = len(x) - 1 - (values / shrunk).sum()
        errors.append(left / free.square())
    strength = STRENGTHS[int(torch.stack(errors).argmin())] * values.sum() / len(values)
    weight = (vectors @ (projected / (values + strength).unsqueeze(1))).T  # (D, E)
    return weight.float(), (y_mean - weight @ x_mean).float()


SHARE = 8  # kernel gradients are estimated from every eighth image


class DepthwiseConv(torch.autograd.Function):
    """A depthwise convolution, padded by k // 2, with a kernel gradient estimated from some images.

    Over all ``start`` from 0 to ``share - 1`` the estimates have the true gradient as their mean; all other
    gradients are exact.
    """

    @staticmethod
    def forward(
        ctx: Any, maps: Tensor, weight: Tensor, bias: Tensor, stride: int, share: int, start: int
    ) -> Tensor:
        """Convolve maps (B, C, H, W) with (C, 1, k, k) and bias (C,) in the precision of ``maps``.

        The kernel's gradient is ``share`` times that of the images ``start``, ``start + share``, and so on.
        """
        ctx.save_for_backward(maps[start::share], weight)
        ctx.shape, ctx.stride, ctx.share, ctx.start = maps.shape, stride, share, start
        kernel, shift = weight.to(maps.dtype), bias.to(maps.dtype)
        return F.conv2d(maps, kernel, shift, stride, weight.shape[-1] // 2, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of maps, kernel and bias; the latter two in single precision."""
        subset, weight = ctx.saved_tensors
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
            subset.float(),
            weight.shape,
            gradient[ctx.start :: ctx.share].float(),
            stride=stride,
            padding=padding,
            groups=groups,
        )
        return of_maps, of_weight * ctx.share, gradient.sum((0, 2, 3), dtype=torch.float32), None, None, None


@contextmanager
def fast_depthwise(network: nn.Module, generator: torch.Generator, *, share: int = SHARE) -> Iterator[None]:
    """Use ``DepthwiseConv`` in ``network`` for bfloat16 inputs that need gradients.

    Args:
        network: network whose depthwise convolutions with bias are replaced.
        generator: chooses the subset for each convolution and batch.
        share: kernel gradients are estimated from one in ``share`` images.
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
    output: Tensor = DepthwiseConv.apply(maps, module.weight, module.bias, module.stride[0], share, start)
    return output
