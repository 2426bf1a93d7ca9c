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

from capvid.datasets.batches import prefetch
from capvid.training.recipe import TrainingOptions
from capvid.utils.device import check_precision, has_fast_path
from capvid.utils.registry import Registry

_T = TypeVar("_T")


Decays = Callable[[str, nn.Parameter], bool]  # name and parameter -> whether weight decay covers it
OPTIMIZERS: Registry[Callable[[nn.Module, TrainingOptions], torch.optim.Optimizer]] = Registry(
    "optimizer", "capvid.training"
)


def parameter_groups(module: nn.Module, options: TrainingOptions, decays: Decays) -> list[dict[str, Any]]:
    """Return the parameters in two groups: with the weight decay of ``options``, and without any."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": options.weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, parameter in module.named_parameters():
        groups[not decays(name, parameter)]["params"].append(parameter)
    return groups


@OPTIMIZERS.register("adam")
def adam(module: nn.Module, options: TrainingOptions) -> torch.optim.Optimizer:
    """Return Adam; the L2 term covers all parameters, as in HAM, Eq. 12."""
    betas = (options.beta1, options.beta2)
    parameters = module.parameters()
    return torch.optim.Adam(
        parameters, lr=options.learning_rate, betas=betas, weight_decay=options.weight_decay
    )


@OPTIMIZERS.register("adamw")
def adamw(module: nn.Module, options: TrainingOptions) -> torch.optim.Optimizer:
    """Return AdamW; neither vectors, such as biases, nor embeddings decay."""
    groups = parameter_groups(module, options, lambda name, p: p.ndim > 1 and "embedding" not in name)
    return torch.optim.AdamW(
        groups, lr=options.learning_rate, betas=(options.beta1, options.beta2), fused=True
    )


class BertAdam(torch.optim.Optimizer):
    """Adam of the BERT authors: decoupled weight decay, no bias correction."""

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float = 1e-6
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight] = {name: torch.zeros_like(weight) for name in ("mean", "square")}
            means, squares = ([self.state[w][name] for w in weights] for name in ("mean", "square"))
            gradients, (beta1, beta2) = [weight.grad for weight in weights], group["betas"]
            torch._foreach_lerp_(means, gradients, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
            divisors = torch._foreach_sqrt(squares)
            torch._foreach_add_(divisors, group["eps"])
            updates = torch._foreach_div(means, divisors)
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-group["lr"])


@OPTIMIZERS.register("bert-adam")
def bert_adam(module: nn.Module, options: TrainingOptions) -> torch.optim.Optimizer:
    """Return the Adam of the BERT authors, as the MART authors use it.

    Weight decay covers embeddings and the norms inside projections, but no bias and no other norm. They clip
    each weight's gradient to norm 1 as well, which ``clip_norm`` = 1 implies.
    """
    spared = ("slots", "norm.weight", "transform.2.weight")
    groups = parameter_groups(
        module, options, lambda name, p: "bias" not in name and not name.endswith(spared)
    )
    return BertAdam(groups, lr=options.learning_rate, betas=(options.beta1, options.beta2))


@OPTIMIZERS.register("adadelta")
def adadelta(module: nn.Module, options: TrainingOptions) -> torch.optim.Optimizer:
    """Return Adadelta; the L2 term covers all parameters, as in M3, Eq. 24."""
    return torch.optim.Adadelta(
        module.parameters(), lr=options.learning_rate, rho=options.rho, weight_decay=options.weight_decay
    )


def one_cycle(warmup: float, steps: int, *, cosine: bool = True) -> Callable[[int], float]:
    """Return the learning rate factor by step: linear over ``warmup``, then a cosine or line to 0."""
    rise = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        if not cosine:
            return max(0.0, (steps - step) / max(1, steps - rise))
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rise) / max(1, steps - rise))))

    return factor


def learning_rate_factor(options: TrainingOptions, steps: int) -> Callable[[int], float]:
    """Return the learning rate factor by step for the schedule of ``options``."""
    if options.schedule == "constant":
        return lambda step: 1.0
    if options.schedule == "bert":  # BERT's warmup_linear: the first step has the rate 0
        rise = max(options.warmup * steps, 1e-9)
        return lambda step: step / rise if step < rise else max(0.0, (steps - step) / max(1, steps - rise))
    return one_cycle(options.warmup, steps, cosine=options.schedule == "one-cycle")


def clip_gradients(captioner: nn.Module, options: TrainingOptions) -> None:
    """Clip gradients element by element and by norm, where ``options`` say so."""
    if options.clip_value:
        nn.utils.clip_grad_value_(captioner.parameters(), options.clip_value)
    if options.clip_norm:
        nn.utils.clip_grad_norm_(captioner.parameters(), options.clip_norm)


class AveragedWeights:
    """Running average of a module's weights, ``average = decay * average + (1 - decay) * weights``.

    Floating-point buffers (batch normalization) are averaged as well. Early on the decay is smaller,
    (1 + step) / (10 + step), to forget the first weights soon.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = [tensor.detach().clone() for tensor in self._averaged_tensors(module)]
        self.steps = 0

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Add the current weights to the average."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.weights, self._averaged_tensors(module), 1 - decay)

    @torch.no_grad()
    def swap(self, module: nn.Module) -> None:
        """Exchange the average and the module's weights; a second call undoes the first."""
        for average, weight in zip(self.weights, self._averaged_tensors(module), strict=True):
            current = weight.detach().clone()
            weight.copy_(average)
            average.copy_(current)

    @staticmethod
    def _averaged_tensors(module: nn.Module) -> list[Tensor]:
        learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return [*learned, *(buffer for buffer in module.buffers() if buffer.is_floating_point())]


def bf16_in_hardware(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16 matrix products."""
    if device.type == "cuda":
        return has_fast_path(torch.bfloat16, device)
    if device.type != "cpu" or not has_fast_path(torch.bfloat16, device):
        return False
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def wants_bf16(precision: str, device: torch.device, module: nn.Module) -> bool:
    """Whether to multiply in bfloat16: by the recipe (fp32, bf16, auto), the launcher, then the hardware."""
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if precision == "auto" and processes() > 1 and launched in ("bf16", "no"):
        return launched == "bf16" and has_fast_path(torch.bfloat16, device)
    if precision == "bf16":
        remedy = "use --set training.precision=fp32"
        check_precision(torch.bfloat16, device, module, remedy=remedy)
    return precision == "bf16" or (precision == "auto" and bf16_in_hardware(device))


TIMEOUT = timedelta(hours=6)  # between processes: one may extract far longer videos than the others


def processes() -> int:
    """Return the number of processes that were launched together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def accelerate_on(device: torch.device, *, partial: bool = False) -> tuple[Accelerator, torch.device]:
    """Return the accelerator of all processes, and the device of this one.

    ``partial`` allows batches to leave parameters unused, as paragraphs of one segment do.
    """
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="no",  # the trainer uses torch.autocast, for the step alone
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=partial),
            InitProcessGroupKwargs(timeout=TIMEOUT),
        ],
    )
    return accelerator, device if accelerator.num_processes == 1 else torch.device(accelerator.device)


def gather_items(accelerator: Accelerator, items: dict[str, _T]) -> dict[str, _T]:
    """Return the items of all processes, in the order of rank; a collective call."""
    if accelerator.num_processes == 1:
        return items
    return {key: value for rank_items in gather_object([items]) for key, value in rank_items.items()}


@dataclass(frozen=True)
class Shard:
    """One process's shard of a batch, as micro-batches; the numbers are those of the batch."""

    number: int  # in its epoch, from 1
    captions: int
    words: int  # with end tokens
    micro_batches: Sequence[Any]


def shards_of(batches: Any, epoch: int, done: int, count: int, accelerator: Accelerator) -> Iterator[Shard]:
    """Prefetch this process's shards, of ``count`` micro-batches, of the batches after the first ``done``."""
    rank, ranks = accelerator.process_index, accelerator.num_processes

    def job(number: int, plan: Any) -> Callable[[], Shard]:
        each = min(count, -(-len(plan) // ranks))  # further micro-batches would all be empty
        readers = [plan.part(index, each * ranks) for index in range(rank * each, (rank + 1) * each)]
        return lambda: Shard(number, len(plan), plan.words, [read() for read in readers])

    plans = enumerate(batches.epoch(epoch), 1)
    return prefetch(job(*item) for item in islice(plans, done, None))
