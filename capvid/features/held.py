"""The bytes of a safetensors file that is in memory, read without writing them to a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import numpy as np


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
        self._metadata = json.loads(data[8 : 8 + length]).get("__metadata__")

    def metadata(self) -> Mapping[str, str] | None:
        """What the header says beside the tensors."""
        return self._metadata

    def keys(self) -> Iterable[str]:
        """Names of the tensors."""
        return self._tensors.keys()

    def get_tensor(self, name: str) -> np.ndarray:
        """Give a tensor."""
        return self._tensors[name]
