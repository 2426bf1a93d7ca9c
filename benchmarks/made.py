"""Captioners of the small recipes with random weights, and random features."""

from __future__ import annotations

import torch
from torch import Tensor

from capvid.captioners.base import CAPTIONERS, Captioner, build
from capvid.training.recipe import Recipe

VOCABULARY, FRAMES, WIDTH, LOCATIONS, SEGMENTS = 5000, 8, 1024, 49, 3


def make(recipe: Recipe) -> Captioner:
    """Build the recipe's captioner for GoogLeNet features, with maps if it needs them."""
    sizes = {"vocabulary_size": VOCABULARY, "feature_width": WIDTH, **recipe.model}
    kind = CAPTIONERS[recipe.captioner]
    maps = kind.needs_maps(kind.config_class.from_dict(sizes))
    return build(recipe.captioner, {**sizes, "locations": LOCATIONS if maps else 0})


def features_for(captioner: Captioner, *shape: int, frames: int = FRAMES) -> tuple[Tensor, Tensor]:
    """Return features (*shape, frames, ...) and mask (*shape, frames); maps in half precision."""
    locations = (LOCATIONS,) if captioner.config.locations else ()
    features = torch.randn(*shape, frames, *locations, WIDTH)
    return features.half() if locations else features, torch.ones(*shape, frames, dtype=torch.bool)
