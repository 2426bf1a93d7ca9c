"""Augmented views of a batch of pictures.

Notation for tensor shapes: B pictures, H and W their height and width, h and w those of the views.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

BLURRED = 0.15  # share of batches whose views are blurred along the rows, as by a moving camera
GREY = torch.tensor([0.299, 0.587, 0.114])


def views(
    pictures: Tensor, size: tuple[int, int], *, least_area: float, generator: torch.Generator
) -> Tensor:
    """Random views of pictures: part of the picture, mirrored or not, in other light and colours.

    Args:
        pictures: (B, 3, H, W) uint8, on any device.
        size: (h, w) of the views.
        least_area: least share of a picture that a view shows.
        generator: of all that is drawn, on the CPU, so that every device gets the same views.

    Returns:
        (B, 3, h, w) float32 from 0 to 255.
    """
    count = len(pictures)

    def uniform(low: float, high: float) -> Tensor:
        return (torch.rand(count, generator=generator) * (high - low) + low).to(pictures.device)

    area, stretch = uniform(least_area, 1.0).sqrt(), torch.exp(uniform(math.log(0.85), math.log(1.18)))
    wide, high = (area * stretch).clamp_max(1.0), (area / stretch).clamp_max(1.0)
    mirror = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    transform = torch.zeros(count, 2, 3, device=pictures.device)
    transform[:, 0, 0], transform[:, 1, 1] = wide * mirror, high
    transform[:, 0, 2], transform[:, 1, 2] = uniform(-1, 1) * (1 - wide), uniform(-1, 1) * (1 - high)
    grid = F.affine_grid(transform, [count, 3, *size], align_corners=False)  # (B, h, w, 2)
    seen = F.grid_sample(pictures.float(), grid, padding_mode="border", align_corners=False)
    if float(torch.rand((), generator=generator)) < BLURRED:
        seen = F.avg_pool2d(F.pad(seen, (2, 2, 0, 0), mode="replicate"), (1, 5), 1)
    return _recoloured(seen, uniform(0.5, 1.3), uniform(0.7, 1.3), uniform(0.3, 1.4))


def whole(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """Pictures (B, 3, H, W) uint8, seen whole: (B, 3, h, w) float32 from 0 to 255."""
    return F.interpolate(pictures.float(), size=size, mode="bilinear", antialias=True)


def _recoloured(pictures: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Scale light, distance from the mean, and distance from grey, (B,) each; one matrix per picture."""
    grey, eye = GREY.to(pictures.device), torch.eye(3, device=pictures.device)
    saturation = saturation.view(-1, 1, 1)
    matrix = saturation * eye + (1 - saturation) * grey.expand(3, 3)  # (B, 3, 3)
    matrix = matrix * (brightness * contrast).view(-1, 1, 1)
    mean = pictures.mean((2, 3)) @ grey * brightness * (1 - contrast)  # (B,)
    flat = torch.baddbmm(mean.view(-1, 1, 1), matrix, pictures.flatten(2))
    return flat.clamp_(0, 255).view_as(pictures)
