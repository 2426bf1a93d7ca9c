"""A reader of WebDataset feature shards."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from capvid.features.feature_file import Features, load_features


def read_webdataset(data: bytes) -> Iterator[tuple[dict[str, Any], Features | None]]:
    """Yield the record and the features of each video in the bytes of a WebDataset shard."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    for name, content in members.items():
        if name.endswith(".json"):
            features = members.get(f"{name.removesuffix('.json')}.safetensors")
            yield json.loads(content), None if features is None else features_from_bytes(features)


def features_from_bytes(data: bytes) -> Features:
    """Read the bytes of a feature file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "features.safetensors"
        path.write_bytes(data)
        return load_features(path)
