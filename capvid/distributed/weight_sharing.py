"""Networks taken apart so that the processes of a machine share the memory of their weights.

Tensors become arrays, which a Ray object store holds once per machine and other processes see in place. The
rest of the pickle is small.
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

_AS_INTEGERS = {torch.bfloat16: torch.int16}  # dtypes that numpy lacks, as integers of the same size


def take_apart(value: Any) -> tuple[bytes, list[np.ndarray]]:
    """Return the pickle of a value without its tensors, and these as arrays in memory order."""
    from ray import cloudpickle

    arrays: list[np.ndarray] = []
    indices: dict[int, int] = {}
    tensors: list[Tensor] = []  # kept alive, so that no id is used twice

    class Pickler(cloudpickle.CloudPickler):
        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return None
            order = sorted(range(value.dim()), key=lambda dim: -value.stride()[dim])
            if id(value) not in indices:
                indices[id(value)] = len(arrays)
                tensors.append(value)
                data = value.detach().cpu().permute(order).contiguous()
                arrays.append(data.view(_AS_INTEGERS.get(data.dtype, data.dtype)).numpy())
            dtype = str(value.dtype).removeprefix("torch.")
            return indices[id(value)], order, dtype, isinstance(value, nn.Parameter)

    file = io.BytesIO()
    Pickler(file, protocol=5).dump(value)
    return file.getvalue(), arrays


def put_together(rest: bytes, arrays: Sequence[np.ndarray]) -> Any:
    """Return the value; its tensors are on the CPU, need no gradient and share memory with ``arrays``."""
    tensors: dict[int, Tensor] = {}

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, key: Any) -> Any:
            index, order, dtype, is_parameter = key
            if index not in tensors:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the arrays are read-only, and nobody writes to them
                    tensor = torch.from_numpy(arrays[index])
                tensor = tensor.view(getattr(torch, dtype)).permute(np.argsort(order).tolist())
                tensors[index] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            return tensors[index]

    return Unpickler(io.BytesIO(rest)).load()
