"""Faster gradients of depthwise convolutions on processors, in bfloat16.

Most of a step would go into them there. Two things help. The input's gradient is itself a depthwise
convolution: of the outputs' gradient, with zeros between its places where the stride was larger than 1, by
the kernel turned around. And the kernel's gradient is a sum over all pictures of the batch and all places, of
which every eighth picture already gives a good estimate.

Notation for tensor shapes: B pictures, C channels, H x W pixels, h x w after the stride, k side of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

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
