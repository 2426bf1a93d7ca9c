"""The processes that train one captioner together: ``accelerate launch -m capvid train ...``, or just one.

Every process knows all batches, computes its share of each, and has the same weights after every step; the
first one writes the files.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, gather_object
from torch import nn

from capvid.device import check_precision, has_fast_path
from capvid.training.optimise import bf16_in_hardware

PATIENCE = timedelta(hours=6)  # for each other: one may have to extract far longer videos than the rest

_T = TypeVar("_T")


def processes() -> int:
    """The number of processes that were launched together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def accelerator_on(device: torch.device, *, partial: bool = False) -> Accelerator:
    """What moves numbers between the processes; without a launcher there is one, on ``device``.

    Args:
        device: where one process computes; of several, ``cpu`` keeps them all there.
        partial: whether a share may leave parameters untouched, as a paragraph of one segment leaves those
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
    """Where this process computes: on ``device``, or, of several, on the one it was launched for."""
    return device if accelerator.num_processes == 1 else torch.device(accelerator.device)


def merged(accelerator: Accelerator, found: dict[str, _T]) -> dict[str, _T]:
    """What all processes have found, in every one of them, in the order of rank."""
    if accelerator.num_processes == 1:
        return found
    return {key: value for part in gather_object([found]) for key, value in part.items()}


def wants_bf16(precision: str, device: torch.device, module: nn.Module) -> bool:
    """Whether to multiply in bfloat16: as the recipe says, else the launcher, else what hardware is made for.

    Args:
        precision: fp32, bf16 or auto.
        device: where.
        module: the network that is trained.

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
