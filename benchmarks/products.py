"""The matrix products of a run, and how long they take by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = {"linear", "addmm", "mm", "bmm", "baddbmm"}


class _Recorded(TorchDispatchMode):
    """Keeps every matrix product that is computed, with its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function.overloadpacket.__name__ in _PRODUCTS:
            self.products.append((function, args, named))
        return function(*args, **named)


def products_of(run: Callable[[], object]) -> Callable[[], None]:
    """What computes the matrix products of ``run`` once more, and nothing else.

    Those within a fused attention are left out: what is found is no more than ``run`` needs.
    """
    with torch.inference_mode(), _Recorded() as recorded:
        run()

    @torch.inference_mode()
    def again() -> None:
        for function, args, named in recorded.products:
            function(*args, **named)

    return again
