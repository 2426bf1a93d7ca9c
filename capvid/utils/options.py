"""Options of long operations as dataclasses.

Each field's metadata holds its help text and bounds, from which the command line makes its options.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any


def option(default: Any, help: str, **metadata: Any) -> Any:
    """Declare an option.

    Args:
        default: value if the option is not given.
        help: help text.
        metadata: bounds ``minimum`` and ``maximum``, ``flags`` of the command line where they do not follow
            from the name, ``metavar`` and ``shown``, the default in words.
    """
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """How videos are decoded and on which device networks compute.

    Attributes:
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        workers: processes that decode videos; None takes one per CPU core, at most four.
        timeout: seconds before a file is abandoned; 0 disables the limit.
        reader: video reader: ``auto``, ``pyav`` or ``decord``.
    """

    device: str = option("auto", "auto, cpu, cuda, cuda:N or mps.")
    workers: int | None = option(
        None, "Processes that decode videos.", minimum=1, maximum=256, shown="CPU cores, at most 4"
    )
    timeout: float = option(
        600.0,
        "Seconds before a file is abandoned; 0 disables the limit.",
        minimum=0,
        maximum=1e6,
        metavar="SECONDS",
    )
    reader: str = option(
        "auto",
        "Video reader; auto takes PyAV, and decord where that fails.",
        choices=("auto", "pyav", "decord"),
    )

    @property
    def num_workers(self) -> int:
        """Number of decoding processes."""
        if self.workers is not None:
            return self.workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(4, cores))

    @property
    def seconds(self) -> float | None:
        """The timeout; None for no limit."""
        return self.timeout or None
