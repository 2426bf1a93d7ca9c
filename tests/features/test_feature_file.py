from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from capvid.backbones.catalog import StreamHeader
from capvid.errors import FeatureFileError, FeatureMismatchError
from capvid.features.feature_file import FeatureHeader, Features, load_features, save_features


def make_stream(**changes: Any) -> StreamHeader:
    values: dict[str, Any] = {
        "backbone": "googlenet",
        "layer": "pool5/7x7_s1",
        "width": 4,
        "weights_sha256": "ab",
    }
    return StreamHeader(**{**values, **changes})


def make_header(*streams: StreamHeader, **changes: Any) -> FeatureHeader:
    values: dict[str, Any] = {
        "sampling": "uniform:28",
        "reader": "decord",
        "dtype": "float16",
        "capvid_version": "0.1.0",
    }
    return FeatureHeader(streams=streams or (make_stream(),), **{**values, **changes})


def make_features(frames: int = 3, **changes: Any) -> Features:
    header = make_header(make_stream(), make_stream(layer="maps", locations=2, width=5), **changes)
    values = np.random.default_rng(0).random((frames, 14)).astype(np.float32)
    times = np.arange(frames) / 7
    streams = (values[:, :4], values[:, 4:].reshape(frames, 2, 5))
    return Features(header=header, streams=streams, times=times, video="video1")


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    features = make_features(dtype="float32")
    save_features(tmp_path / "deep" / "video1.safetensors", features)
    loaded = load_features(tmp_path / "deep" / "video1.safetensors")
    assert loaded.header == features.header
    assert loaded.video == "video1"
    for mine, theirs in zip(features.streams, loaded.streams, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert theirs.dtype == np.float32
    assert loaded.times is not None and features.times is not None
    np.testing.assert_array_equal(loaded.times, features.times)


def test_float16_is_stored_as_float16_and_rounds_as_it(tmp_path: Path) -> None:
    features = make_features()
    save_features(tmp_path / "v.safetensors", features)
    with safe_open(str(tmp_path / "v.safetensors"), framework="np") as handle:
        assert handle.get_tensor("stream0").dtype == np.float16
        assert handle.get_tensor("times").dtype == np.float64
    loaded = load_features(tmp_path / "v.safetensors").streams[0]
    np.testing.assert_array_equal(loaded, features.streams[0].astype(np.float16).astype(np.float32))
    assert not np.array_equal(loaded, features.streams[0])


def test_streams_are_laid_side_by_side() -> None:
    first, second = make_stream(), make_stream(backbone="resnet50", width=2)
    a, b = np.arange(8, dtype=np.float32).reshape(2, 4), -np.arange(4, dtype=np.float32).reshape(2, 2)
    both = Features(header=make_header(first, second), streams=(a, b), times=None, video="v")
    np.testing.assert_array_equal(both.concatenated(), [[0, 1, 2, 3, 0, -1], [4, 5, 6, 7, -2, -3]])
    assert both.header.width == 6


def test_maps_stand_beside_maps_of_their_size_only() -> None:
    maps, vectors = make_stream(locations=2, width=3), make_stream(backbone="resnet50", width=2)
    a, b = np.zeros((4, 2, 3), np.float32), np.ones((4, 2), np.float32)
    both = Features(header=make_header(maps, maps), streams=(a, a + 1), times=None, video="v")
    assert both.concatenated().shape == (4, 2, 6)
    mixed = Features(header=make_header(maps, vectors), streams=(a, b), times=None, video="v")
    expected = r"googlenet maps of 2 locations, resnet50 one vector per frame\); extract layers that all"
    with pytest.raises(FeatureFileError, match=expected):
        mixed.concatenated()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"backbone": "resnet50"}, "backbone: trained on googlenet, got resnet50"),
        ({"layer": "fc7"}, "layer: trained on pool5/7x7_s1, got fc7"),
        ({"width": 5}, "width: trained on 4, got 5"),
        ({"locations": 49}, "locations: trained on none, got 49"),
        ({"weights_sha256": "cd"}, "weights_sha256: trained on ab, got cd"),
    ],
)
def test_a_stream_that_differs_is_named_by_field(change: dict[str, Any], expected: str) -> None:
    trained, got = make_header(), make_header(make_stream(**change))
    assert trained.mismatches(got) == [expected]
    with pytest.raises(FeatureMismatchError, match=expected.replace("/", ".")):
        trained.require_match(got)


@pytest.mark.parametrize("field", ["backbone", "layer", "weights_sha256", "preprocess"])
def test_what_is_unknown_on_either_side_is_no_mismatch(field: str) -> None:
    known, unknown = make_header(make_stream(preprocess="a")), make_header(make_stream(**{field: None}))
    assert known.mismatches(unknown) == []
    assert unknown.mismatches(known) == []


def test_version_reader_and_dtype_never_differ_and_sampling_only_if_known() -> None:
    trained = make_header()
    assert trained.mismatches(make_header(reader="pyav", dtype="float32", capvid_version="9")) == []
    assert trained.mismatches(make_header(sampling=None)) == []
    assert trained.mismatches(make_header(sampling="uniform:8")) == [
        "sampling: trained on uniform:28, got uniform:8"
    ]


def test_an_alias_is_the_same_backbone() -> None:
    assert make_header().mismatches(make_header(make_stream(backbone="bvlc_googlenet"))) == []


def test_the_number_of_streams_counts() -> None:
    found = make_header().mismatches(make_header(make_stream(), make_stream(backbone="resnet50")))
    assert found == ["streams: trained on 1 (googlenet), got 2 (googlenet + resnet50)"]


def test_which_of_several_streams_differs_is_said() -> None:
    trained = make_header(make_stream(), make_stream(backbone="resnet50", layer="pool5"))
    got = make_header(make_stream(), make_stream(backbone="resnet50", layer="pool4"))
    assert trained.mismatches(got) == ["stream 2 layer: trained on pool5, got pool4"]


def test_a_header_survives_json() -> None:
    header = make_header(make_stream(), make_stream(locations=49), sampling=None)
    assert FeatureHeader.from_json(header.to_json()) == header


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format_version": 1, "streams": [], "dtype": "float16"}'])
def test_a_broken_header_is_a_feature_file_error(text: str) -> None:
    with pytest.raises(FeatureFileError, match="header is not valid"):
        FeatureHeader.from_json(text)


def test_a_header_of_a_later_format_says_so() -> None:
    later = json.dumps({**json.loads(make_header().to_json()), "format_version": 2})
    with pytest.raises(FeatureFileError, match="of format 2"):
        FeatureHeader.from_json(later)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FeatureFileError, match=r"v\.safetensors: no such feature file"):
        load_features(tmp_path / "v.safetensors")


@pytest.mark.parametrize("kept", [0, 7, 200, -1])
def test_truncated_file(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "v.safetensors"
    save_features(path, make_features())
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(FeatureFileError, match="not a readable safetensors file"):
        load_features(path)


def test_safetensors_without_header(tmp_path: Path) -> None:
    save_file(
        {"stream0": np.zeros((2, 4), np.float32)}, tmp_path / "v.safetensors", metadata={"by": "others"}
    )
    with pytest.raises(FeatureFileError, match="without capvid's header") as caught:
        load_features(tmp_path / "v.safetensors")
    assert "extract the features with capvid" in caught.value.remedy


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"other": np.zeros((2, 4), np.float32)}, "cannot be read"),
        ({"stream0": np.zeros((2, 5), np.float32)}, r"shape \(2, 5\), expected \(T, 4\)"),
        ({"stream0": np.zeros((0, 4), np.float32)}, r"shape \(0, 4\)"),
        ({"stream0": np.full((2, 4), np.nan, np.float32)}, "not finite"),
        ({"stream0": np.zeros((2, 4), np.float32), "times": np.zeros(3)}, "different lengths"),
    ],
)
def test_tensors_that_do_not_fit_the_header(tmp_path: Path, tensors: dict[str, Any], expected: str) -> None:
    save_file(tensors, tmp_path / "v.safetensors", metadata={"capvid": make_header().to_json()})
    with pytest.raises(FeatureFileError, match=expected) as caught:
        load_features(tmp_path / "v.safetensors")
    assert "v.safetensors" in str(caught.value)


def test_values_beyond_float16_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    features = make_features()
    large = dataclasses.replace(features, streams=(features.streams[0] + 70_000, features.streams[1]))
    with pytest.raises(FeatureFileError, match="float16 cannot hold"):
        save_features(tmp_path / "v.safetensors", large)
    assert list(tmp_path.iterdir()) == []
    as_float32 = dataclasses.replace(large, header=dataclasses.replace(large.header, dtype="float32"))
    save_features(tmp_path / "v.safetensors", as_float32)
    assert load_features(tmp_path / "v.safetensors").streams[0].min() >= 70_000


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(FeatureFileError, match="cannot be written"):
        save_features(tmp_path / "taken" / "v.safetensors", make_features())


@pytest.mark.slow
def test_the_same_features_make_the_same_file(tmp_path: Path) -> None:
    """In every process: the order of hashes is not the same in all of them."""
    script = """
import sys
import numpy as np
from capvid.features.feature_file import FeatureHeader, Features, StreamHeader, save_features
streams = tuple(StreamHeader(backbone=name, layer="l", width=3) for name in ("a", "b"))
header = FeatureHeader(streams=streams, sampling="uniform:2", reader="r", dtype="float16", capvid_version="0")
arrays = tuple(np.ones((2, 3), np.float32) for _ in streams)
save_features(sys.argv[1], Features(header=header, streams=arrays, times=np.arange(2.0), video="v"))
"""
    written = set()
    for number in range(6):
        path = tmp_path / f"{number}.safetensors"
        subprocess.run([sys.executable, "-c", script, str(path)], check=True)
        written.add(path.read_bytes())
    assert len(written) == 1
    assert load_features(path).video == "v"
