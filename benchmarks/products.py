"""Recording and replay of the matrix products of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = {"linear", "addmm", "mm", "bmm", "baddbmm"}


class _Recorded(TorchDispatchMode):
    """Dispatch mode that records every matrix product with its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function.overloadpacket.__name__ in _PRODUCTS:
            self.products.append((function, args, named))
        return function(*args, **named)


def products_of(run: Callable[[], object]) -> Callable[[], None]:
    """Return a function that repeats only the matrix products of ``run``.

    Those inside fused attention are not recorded, so the result is a lower bound.
    """
    with torch.inference_mode(), _Recorded() as recorded:
        run()

    @torch.inference_mode()
    def replay() -> None:
        for function, args, named in recorded.products:
            function(*args, **named)

    return replay
