"""A device that no machine needs to have: its tensors lie in memory as others do, and may not meet those.

What computes with tensors of both, or leaves the device unasked, fails as it would on a GPU. Tests that
import this are skipped where torch cannot be given a device in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

try:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as _begin
except ImportError:
    pytest.skip("torch cannot be given a device in Python", allow_module_level=True)

_begin("elsewhere")
ELSEWHERE = torch.device("elsewhere", 0)
_HERE = torch.device("cpu")
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class Far(Tensor):
    """A tensor elsewhere; ``near`` has its values."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> Far:
        made: Far = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device=ELSEWHERE
        )
        made.near = near
        return made

    def tolist(self) -> Any:
        return self.near.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, dict(kwargs or {}))


def _computed(func: Any, args: Any, named: dict[str, Any]) -> Any:
    """Compute in memory; what is found is elsewhere unless it is to leave."""
    tensors = [value for value in tree_flatten((args, named))[0] if isinstance(value, Tensor)]
    leaves = named.get("device") == _HERE
    _check(func._schema.name, tensors)
    if "device" in named:
        named["device"] = _HERE
    compute = _OWN.get(func._schema.name, func)
    found = compute(*tree_map(_near, args), **tree_map(_near, named))
    own = {id(tensor.near): tensor for tensor in tensors if isinstance(tensor, Far)}

    def far(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if leaves:
            return value.clone()
        return own[id(value)] if id(value) in own else Far(value)

    return tree_map(far, found)


def _lstm_cell(
    of_input: Tensor, of_hidden: Tensor, cell: Tensor, b: Tensor | None = None, d: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One step from the summed gates, which processors have no operation of their own for."""
    gates = of_input + of_hidden + (0 if b is None else b) + (0 if d is None else d)
    i, f, g, o = gates.chunk(4, 1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell, gates


_OWN = {"aten::_thnn_fused_lstm_cell": _lstm_cell}
_RULES = torch.library.Library("_", "IMPL")
_RULES.fallback(lambda func, *args, **named: _computed(func, args, named), "PrivateUse1")


def _near(value: Any) -> Any:
    return value.near if isinstance(value, Far) else value


def _check(name: str, tensors: list[Tensor]) -> None:
    """Tensors of two devices meet as single numbers, as indices of those elsewhere, and to be copied."""
    others = [tensor for tensor in tensors if not isinstance(tensor, Far)]
    if name == "aten::copy_" or all(other.dim() == 0 for other in others):
        return
    if name in _INDEXED and isinstance(tensors[0], Far) and not any(o.is_floating_point() for o in others):
        return
    raise RuntimeError(f"{name}: tensors of two devices")


class _Reached(TorchFunctionMode):
    """Where tensors can be made on :data:`ELSEWHERE`, and moved there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is Tensor.to and any(isinstance(arg, torch.device) and arg == ELSEWHERE for arg in args):
            return moved(func(*(_HERE if isinstance(arg, torch.device) else arg for arg in args), **named))
        if named.get("device") == ELSEWHERE and not any(isinstance(arg, Far) for arg in args):
            del named["device"]
            return moved(func(*args, **named))
        return func(*args, **named)


def moved(tensor: Tensor) -> Tensor:
    """The tensor elsewhere."""
    return tensor if isinstance(tensor, Far) else Far(tensor.detach())


@contextmanager
def elsewhere() -> Iterator[None]:
    """Where there is such a device.

    Autocast does not know it and is left out; in inference mode it would have no views.
    """
    with pytest.MonkeyPatch.context() as patch, _Reached():
        patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
        patch.setattr(torch.inference_mode, "__enter__", torch.no_grad.__enter__)
        patch.setattr(torch.inference_mode, "__exit__", torch.no_grad.__exit__)
        yield
