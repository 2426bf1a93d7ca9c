"""Optimizers, learning rate schedules, averaged weights, precision and processes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, gather_object
from torch import Tensor, nn

from capvid.datasets.batches import read_ahead
from capvid.training.recipe import TrainingOptions
from capvid.utils.device import check_precision, has_fast_path


def make_optimizer(module: nn.Module, options: TrainingOptions) -> torch.optim.Optimizer:
    """Return the optimizer that ``options`` name; AdamW spares biases and embeddings its weight decay."""
    named = list(module.named_parameters())
    rate, decay, betas = options.learning_rate, options.weight_decay, (options.beta1, options.beta2)
    if options.optimizer == "adamw":
        decayed = [p for n, p in named if p.ndim > 1 and "embedding" not in n]
        spared = [p for n, p in named if p.ndim <= 1 or "embedding" in n]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": decay},
            {"params": spared, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True)
    parameters = [p for _, p in named]
    if options.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=rate, betas=betas, weight_decay=decay)
    return torch.optim.Adadelta(parameters, lr=rate, weight_decay=decay)


def one_cycle(warmup: float, steps: int, *, cosine: bool = True) -> Callable[[int], float]:
    """Return the factor of the learning rate by step: up over ``warmup``, then a cosine or line to 0."""
    rise = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        if not cosine:
            return max(0.0, (steps - step) / max(1, steps - rise))
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rise) / max(1, steps - rise))))

    return factor


def learning_rate_factor(options: TrainingOptions, steps: int) -> Callable[[int], float]:
    """Return the factor of the learning rate by step, of the schedule of ``options``."""
    if options.schedule == "constant":
        return lambda step: 1.0
    return one_cycle(options.warmup, steps, cosine=options.schedule == "one-cycle")


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


@dataclass(frozen=True)
class Share:
    """A process's share of a batch.

    Attributes:
        number: number of the batch in its epoch, from 1.
        captions: captions of the batch, over all processes.
        words: words of the batch, ends included, over all processes.
        parts: micro-batches of this process.
    """

    number: int
    captions: int
    words: int
    parts: Sequence[Any]


def shares_of(batches: Any, epoch: int, done: int, parts: int, accelerator: Accelerator) -> Iterator[Share]:
    """Prefetch this process's shares of an epoch's batches.

    Args:
        batches: batches of the dataset.
        epoch: number of the epoch, from 1.
        done: batches of it to skip.
        parts: micro-batches of a share.
        accelerator: the processes.

    Raises:
        FeatureFileError: features cannot be read, when their turn comes.
    """
    count = accelerator.num_processes

    def job(number: int, plan: Any) -> Callable[[], Share]:
        most = min(parts, -(-len(plan) // count))  # further parts would all be empty
        mine = range(accelerator.process_index * most, (accelerator.process_index + 1) * most)
        readers = [plan.part(part, most * count) for part in mine]
        return lambda: Share(number, len(plan), plan.words, [read() for read in readers])

    plans = enumerate(batches.epoch(epoch), 1)
    return read_ahead(job(*item) for item in islice(plans, done, None))


PATIENCE = timedelta(hours=6)  # for each other: one may have to extract far longer videos than the rest

_T = TypeVar("_T")


def processes() -> int:
    """Return the number of processes that were launched together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def accelerator_on(device: torch.device, *, partial: bool = False) -> Accelerator:
    """Return the accelerator of all processes; without a launcher there is one, on ``device``.

    Args:
        device: device of a single process; ``cpu`` keeps several there as well.
        partial: whether a share may leave parameters unused, as a paragraph of one segment leaves those
            that carry over to the next.
    """
    return Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="no",  # ours is torch.autocast, of the step alone
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=partial),
            InitProcessGroupKwargs(timeout=PATIENCE),
        ],
    )


def device_of(accelerator: Accelerator, device: torch.device) -> torch.device:
    """Return ``device``, or, of several processes, the one this was launched for."""
    return device if accelerator.num_processes == 1 else torch.device(accelerator.device)


def merged(accelerator: Accelerator, items: dict[str, _T]) -> dict[str, _T]:
    """Return the items of all processes, in the order of rank; a collective call."""
    if accelerator.num_processes == 1:
        return items
    return {key: value for part in gather_object([items]) for key, value in part.items()}


def wants_bf16(precision: str, device: torch.device, module: nn.Module) -> bool:
    """Whether to multiply in bfloat16: by the recipe (fp32, bf16 or auto), the launcher, then the hardware.

    Raises:
        UsageError: bf16 is asked for, and the device has no fast path for it.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if precision == "auto" and processes() > 1 and launched in ("bf16", "no"):
        return launched == "bf16" and has_fast_path(torch.bfloat16, device)
    if precision == "bf16":
        remedy = "use --set training.precision=fp32"
        check_precision(torch.bfloat16, device, module, remedy=remedy)
    return precision == "bf16" or (precision == "auto" and bf16_in_hardware(device))
