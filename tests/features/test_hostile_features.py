"""Feature files whose header or tensors are not what they should be."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save
from safetensors.torch import save_file

from capvid.errors import FeatureFileError
from capvid.features.feature_file import load_features, load_header, load_times
from capvid.features.feature_store import FeatureStore

STREAM: dict[str, Any] = {"backbone": "a", "layer": "x", "width": 4}
HEADER: dict[str, Any] = {
    "format_version": 1,
    "streams": [STREAM],
    "sampling": "frames:3",
    "reader": "pyav",
    "dtype": "float16",
    "capvid_version": "1",
    "video": "v",
}
FRAMES = np.ones((3, 4), np.float16)


def feature_file(
    path: Path, header: Any = HEADER, frames: np.ndarray = FRAMES, **tensors: np.ndarray
) -> Path:
    text = header if isinstance(header, str) else json.dumps(header)
    path.write_bytes(save({"stream0": frames, **tensors}, metadata={"capvid": text}))
    return path


def test_the_file_that_the_others_are_made_from(tmp_path: Path) -> None:
    path = feature_file(tmp_path / "v.safetensors", times=np.array([0.0, 1, 2]))
    assert len(load_features(path)) == 3
    assert FeatureStore([path]).ids() == ["v"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("duration", value) for value in ("abc", [1], float("nan"), 1e308, -5, True, {}, 10**400)),
        *(("view", value) for value in ("1", 1.5, -1, True, None, 10**30)),
        *(("video", value) for value in (7, None, ["v"], "a\nb", "\ud800", "\x1b[2J")),
        ("sampling", 3),
        ("reader", []),
        ("dtype", None),
        ("capvid_version", {}),
        *(("streams", value) for value in (None, [], {}, "x", [STREAM] * 5000)),
    ],
)
def test_a_field_of_the_header_that_is_wrong(tmp_path: Path, field: str, value: object) -> None:
    path = feature_file(tmp_path / "v.safetensors", HEADER | {field: value})
    with pytest.raises(FeatureFileError) as raised:
        load_features(path)
    assert str(path) in str(raised.value) and field in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("width", "4"),
        ("width", 4.0),
        ("width", -4),
        ("width", True),
        ("locations", 0),
        ("layer", 1),
        ("x", 1),
    ],
)
def test_a_field_of_a_stream_that_is_wrong(tmp_path: Path, field: str, value: object) -> None:
    path = feature_file(tmp_path / "v.safetensors", HEADER | {"streams": [STREAM | {field: value}]})
    for read in (load_features, load_header, lambda path: FeatureStore([path])):
        with pytest.raises(FeatureFileError, match=field):
            read(path)


@pytest.mark.parametrize("header", ["", "[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, "[]", "7", "null"])
def test_a_header_that_is_no_object(tmp_path: Path, header: str) -> None:
    path = feature_file(tmp_path / "v.safetensors", header)
    with pytest.raises(FeatureFileError, match="header"):
        load_features(path)


@pytest.mark.parametrize(
    "frames",
    [
        np.array(1.0, np.float16),
        np.ones((0, 4), np.float16),
        np.ones((3, 5), np.float16),
        np.ones((3, 4, 1), np.float16),
        np.ones((3, 4), np.bool_),
        np.ones((3, 4), np.int8),
        np.ones((3, 4), np.float64),
        np.full((3, 4), np.nan, np.float16),
    ],
)
def test_a_stream_of_another_kind(tmp_path: Path, frames: np.ndarray) -> None:
    path = feature_file(tmp_path / "v.safetensors", frames=frames)
    with pytest.raises(FeatureFileError, match=r"v\.safetensors"):
        load_features(path)
    with pytest.raises(FeatureFileError, match=r"v\.safetensors"):
        FeatureStore([path]).get("v")


def test_a_stream_in_bfloat16(tmp_path: Path) -> None:
    path = tmp_path / "v.safetensors"
    save_file({"stream0": torch.ones(3, 4, dtype=torch.bfloat16)}, path, {"capvid": json.dumps(HEADER)})
    with pytest.raises(FeatureFileError, match="stream0 is BF16, expected F16 or F32"):
        load_features(path)


@pytest.mark.parametrize(
    "times",
    [
        np.array([0.0, 2, 1]),
        np.array([0.0, np.nan, 1]),
        np.array([0.0, 1, np.inf]),
        np.array([0.0, 1, 1e300]),
        np.array([0.0, 1]),
        np.array([[0.0, 1, 2]]),
        np.array(0.0),
        np.array([0, 1, 2]),
    ],
)
def test_times_that_are_none(tmp_path: Path, times: np.ndarray) -> None:
    path = feature_file(tmp_path / "v.safetensors", times=times)
    with pytest.raises(FeatureFileError, match="times"):
        load_features(path)
    if times.shape != (2,):
        with pytest.raises(FeatureFileError, match="times"):
            load_times(path)


def test_files_that_hold_no_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for data in (b"", struct.pack("<Q", 1 << 60), struct.pack("<Q", 4) + b"\xff\xfe{}", b"{}" * 99):
        path.write_bytes(data)
        with pytest.raises(FeatureFileError, match=r"x\.safetensors"):
            load_features(path)


def test_what_is_no_regular_file_or_too_large(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(FeatureFileError, match="not a regular file"):
        load_features(tmp_path / "pipe.safetensors")
    with (tmp_path / "sparse.safetensors").open("wb") as file:
        file.truncate(40 << 30)
    with pytest.raises(FeatureFileError, match="larger than the limit"):
        load_features(tmp_path / "sparse.safetensors")
    with pytest.raises(FeatureFileError, match="larger than the limit"):
        FeatureStore([tmp_path / "sparse.safetensors"])
