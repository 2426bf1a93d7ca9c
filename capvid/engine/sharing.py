"""Objects with networks in them, taken apart so that processes of one machine share the weights' memory.

The tensors become arrays, which a Ray object store holds once for each machine, and which other processes see
in place; what is left is small.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = {torch.bfloat16: torch.int16}  # what numpy has no numbers for, as numbers of the same size


def take_apart(thing: Any) -> tuple[bytes, list[np.ndarray]]:
    """Give what is left of an object without its tensors, and these."""
    from ray import cloudpickle

    arrays: list[np.ndarray] = []
    places: dict[int, int] = {}
    kept: list[Tensor] = []  # while their numbers are in use

    class Pickler(cloudpickle.CloudPickler):
        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return None
            if id(value) not in places:
                places[id(value)] = len(arrays)
                kept.append(value)
                arrays.append(_as_array(value))
            order = _order(value)
            kind = (str(value.dtype).removeprefix("torch."), isinstance(value, nn.Parameter))
            return (places[id(value)], order, *kind)

    file = io.BytesIO()
    Pickler(file, protocol=5).dump(thing)
    return file.getvalue(), arrays


def put_together(rest: bytes, arrays: Sequence[np.ndarray]) -> Any:
    """Give the object; its tensors are on the CPU, need no gradient and share memory with ``arrays``."""
    made: dict[int, Tensor] = {}

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, key: Any) -> Any:
            number, order, dtype, parameter = key
            if number not in made:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the arrays cannot be written to; nobody does
                    tensor = torch.from_numpy(arrays[number])
                tensor = tensor.view(getattr(torch, dtype)).permute(np.argsort(order).tolist())
                made[number] = nn.Parameter(tensor, requires_grad=False) if parameter else tensor
            return made[number]

    return Unpickler(io.BytesIO(rest)).load()


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions as they lie in memory, the slowest first."""
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim]))


def _as_array(tensor: Tensor) -> np.ndarray:
    """The numbers as they lie in memory."""
    tensor = tensor.detach().cpu()
    tensor = tensor.permute(_order(tensor)).contiguous()
    return tensor.view(_PLAIN.get(tensor.dtype, tensor.dtype)).numpy()
