"""Optimizers, learning rate schedules, averaged weights and the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.captioners import Captioner
from capvid.captioners.base import ParagraphCaptioner
from capvid.device import has_fast_path
from capvid.text.vocabulary import PAD
from capvid.training.recipe import TrainingOptions


class Objective(nn.Module):
    """The negative log-likelihood of a batch's words, ends included (M3, Eq. 24, without its regularisation).

    It is a module of its own, so that several processes can share it. Only places of real words go through
    the vocabulary layer.

    Args:
        captioner: whose words.
        label_smoothing: probability spread over the vocabulary.
        temperature: that the logits are divided by.
    """

    def __init__(self, captioner: Captioner, label_smoothing: float, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.captioner = captioner
        self.label_smoothing = label_smoothing
        self.temperature = temperature

    def forward(
        self,
        features: Tensor,
        mask: Tensor,
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        remembered: Tensor | None = None,
    ) -> Tensor:
        """The sum over all words, each times its weight if there are ``weights``, like ``targets``.

        ``remembered`` is for captioners of paragraphs (:attr:`capvid.data.batches.Batch.remembered`).
        """
        z = teacher_forced(self.captioner, features, mask, inputs, remembered)  # (B, L, Z)
        spoken = targets != PAD
        logits = self.captioner.logits(z[spoken]).float() / self.temperature  # (words, V)
        if weights is None:
            return F.cross_entropy(
                logits, targets[spoken], label_smoothing=self.label_smoothing, reduction="sum"
            )
        return (F.cross_entropy(logits, targets[spoken], reduction="none") * weights[spoken]).sum()


def teacher_forced(
    captioner: Captioner, features: Tensor, mask: Tensor, inputs: Tensor, remembered: Tensor | None
) -> Tensor:
    """What the vocabulary layer of any captioner sees after each of the words ``inputs``."""
    if remembered is not None and isinstance(captioner, ParagraphCaptioner):
        return captioner.teacher_forced(features, mask, inputs, remembered)
    return captioner.teacher_forced(features, mask, inputs)


def make_optimizer(module: nn.Module, options: TrainingOptions) -> torch.optim.Optimizer:
    """The optimizer that ``options`` name; AdamW spares biases and embeddings its weight decay."""
    named = list(module.named_parameters())
    betas = (options.beta1, options.beta2)
    if options.optimizer == "adamw":
        decayed = [p for n, p in named if p.ndim > 1 and "embedding" not in n]
        spared = [p for n, p in named if p.ndim <= 1 or "embedding" in n]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": options.weight_decay},
            {"params": spared, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=options.learning_rate, betas=betas, fused=True)
    parameters = [p for _, p in named]
    rate, decay = options.learning_rate, options.weight_decay
    if options.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=rate, betas=betas, weight_decay=decay)
    return torch.optim.Adadelta(parameters, lr=rate, weight_decay=decay)


def one_cycle(warmup: float, steps: int) -> Callable[[int], float]:
    """Share of the highest learning rate at each of ``steps``: linear over ``warmup``, then a cosine to 0."""
    rise = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rise) / max(1, steps - rise))))

    return factor


def linear(warmup: float, steps: int) -> Callable[[int], float]:
    """Share of the highest learning rate at each of ``steps``: up over ``warmup``, then down to 0."""
    rise = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return max(0.0, (steps - step) / max(1, steps - rise))

    return factor


def learning_rate_factor(options: TrainingOptions, steps: int) -> Callable[[int], float]:
    """Share of the highest learning rate at each of ``steps``, by the schedule of ``options``."""
    if options.schedule == "one-cycle":
        return one_cycle(options.warmup, steps)
    if options.schedule == "linear":
        return linear(options.warmup, steps)
    return lambda step: 1.0


def clip_gradients(captioner: nn.Module, options: TrainingOptions) -> None:
    """Clip element by element, by norm, or not at all, as ``options`` say."""
    if options.clip_value:
        nn.utils.clip_grad_value_(captioner.parameters(), options.clip_value)
    if options.clip_norm:
        nn.utils.clip_grad_norm_(captioner.parameters(), options.clip_norm)


class AveragedWeights:
    """A running average of a module's weights, ``average = decay * average + (1 - decay) * weights``.

    Buffers of real numbers (batch normalisation's) are averaged with them. Early on the decay is smaller,
    (1 + step) / (10 + step), so that the first weights are soon forgotten.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = [tensor.detach().clone() for tensor in _averaged(module)]
        self.steps = 0

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Take the current weights into the average."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.weights, _averaged(module), 1 - decay)

    @torch.no_grad()
    def swap(self, module: nn.Module) -> None:
        """Exchange the average and the module's weights; a second call undoes the first."""
        for average, weight in zip(self.weights, _averaged(module), strict=True):
            held = weight.detach().clone()
            weight.copy_(average)
            average.copy_(held)


def _averaged(module: nn.Module) -> list[Tensor]:
    """What changes while a module is trained: learned parameters and buffers of real numbers."""
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [*learned, *(buffer for buffer in module.buffers() if buffer.is_floating_point())]


def bf16_in_hardware(device: torch.device) -> bool:
    """Whether matrices are multiplied in bfloat16 by instructions made for it."""
    if device.type == "cuda":
        return has_fast_path(torch.bfloat16, device)
    if device.type != "cpu" or not has_fast_path(torch.bfloat16, device):
        return False
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
