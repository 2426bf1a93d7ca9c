"""The bytes of a safetensors file that is in memory, read without writing them to a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from capvid.parsing import parse_json


class HeldSlice:
    """A tensor's entry in the header."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self._entry = entry

    def get_dtype(self) -> str:
        """Return the dtype as safetensors calls it, such as ``F16``."""
        return str(self._entry["dtype"])

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._entry["shape"])


class HeldFile:
    """What has the methods of a safetensors file that is open.

    Args:
        data: its bytes.

    Raises:
        SafetensorError: they are not those of a whole file.
    """

    def __init__(self, data: bytes) -> None:
        from safetensors.numpy import load

        self._tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        header = parse_json(data[8 : 8 + length])
        self._metadata = header.pop("__metadata__", None)
        self._header = header

    def metadata(self) -> Mapping[str, str] | None:
        """What the header says beside the tensors."""
        return self._metadata

    def keys(self) -> Iterable[str]:
        """Names of the tensors."""
        return self._tensors.keys()

    def get_slice(self, name: str) -> HeldSlice:
        """Give what the header says of a tensor."""
        return HeldSlice(self._header[name])

    def get_tensor(self, name: str) -> np.ndarray:
        """Give a tensor."""
        return self._tensors[name]
