"""A fake accelerator: its tensors are stored in CPU memory but do not mix with CPU tensors.

Mixing the devices, or copying to the CPU implicitly, fails as on a GPU. Tests that import this module are
skipped if torch cannot register a device from Python.
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
    pytest.skip("torch cannot register a device from Python", allow_module_level=True)

_begin("fakedevice")
FAKE_DEVICE = torch.device("fakedevice", 0)
_CPU = torch.device("cpu")
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class FakeDeviceTensor(Tensor):
    """A tensor on the fake device; ``values`` holds its values on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> FakeDeviceTensor:
        tensor: FakeDeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.shape,
            values.stride(),
            values.storage_offset(),
            dtype=values.dtype,
            device=FAKE_DEVICE,
        )
        tensor.values = values
        return tensor

    def tolist(self) -> Any:
        return self.values.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, dict(kwargs or {}))


def _compute(func: Any, args: Any, named: dict[str, Any]) -> Any:
    """Compute on the CPU; wrap the results, unless they are copied to the CPU."""
    tensors = [value for value in tree_flatten((args, named))[0] if isinstance(value, Tensor)]
    leaves = named.get("device") == _CPU
    _check_devices(func._schema.name, tensors)
    if "device" in named:
        named["device"] = _CPU
    compute = _OWN_KERNELS.get(func._schema.name, func)
    results = compute(*tree_map(_unwrap, args), **tree_map(_unwrap, named))
    wrappers = {id(tensor.values): tensor for tensor in tensors if isinstance(tensor, FakeDeviceTensor)}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if leaves:
            return value.clone()
        return wrappers[id(value)] if id(value) in wrappers else FakeDeviceTensor(value)

    return tree_map(wrap, results)


def _lstm_cell(
    of_input: Tensor, of_hidden: Tensor, cell: Tensor, b: Tensor | None = None, d: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One LSTM step from the summed gates; torch has no CPU kernel of this operation."""
    gates = of_input + of_hidden + (0 if b is None else b) + (0 if d is None else d)
    i, f, g, o = gates.chunk(4, 1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell, gates


_OWN_KERNELS = {"aten::_thnn_fused_lstm_cell": _lstm_cell}
_LIBRARY = torch.library.Library("_", "IMPL")
_LIBRARY.fallback(lambda func, *args, **named: _compute(func, args, named), "PrivateUse1")


def _unwrap(value: Any) -> Any:
    return value.values if isinstance(value, FakeDeviceTensor) else value


def _check_devices(name: str, tensors: list[Tensor]) -> None:
    """Refuse mixed devices, except for scalars, indices of fake tensors, and copies."""
    others = [tensor for tensor in tensors if not isinstance(tensor, FakeDeviceTensor)]
    if name == "aten::copy_" or all(other.dim() == 0 for other in others):
        return
    if (
        name in _INDEXED
        and isinstance(tensors[0], FakeDeviceTensor)
        and not any(o.is_floating_point() for o in others)
    ):
        return
    raise RuntimeError(f"{name}: tensors of two devices")


class _FakeDeviceMode(TorchFunctionMode):
    """Lets tensors be created on :data:`FAKE_DEVICE` and moved to it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is Tensor.to and any(isinstance(arg, torch.device) and arg == FAKE_DEVICE for arg in args):
            return to_fake_device(
                func(*(_CPU if isinstance(arg, torch.device) else arg for arg in args), **named)
            )
        if named.get("device") == FAKE_DEVICE and not any(isinstance(arg, FakeDeviceTensor) for arg in args):
            del named["device"]
            return to_fake_device(func(*args, **named))
        return func(*args, **named)


def to_fake_device(tensor: Tensor) -> Tensor:
    """Return the tensor on the fake device."""
    return tensor if isinstance(tensor, FakeDeviceTensor) else FakeDeviceTensor(tensor.detach())


@contextmanager
def fake_device() -> Iterator[None]:
    """Make the fake device available.

    Autocast does not support it and is disabled; inference mode is replaced, as it would not track its views.
    """
    with pytest.MonkeyPatch.context() as patch, _FakeDeviceMode():
        patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
        patch.setattr(torch.inference_mode, "__enter__", torch.no_grad.__enter__)
        patch.setattr(torch.inference_mode, "__exit__", torch.no_grad.__exit__)
        yield
