from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from capvid.backbones.catalog import StreamHeader
from capvid.errors import FeatureFileError, UsageError
from capvid.features.feature_file import FeatureHeader, Features, save_features
from capvid.features.feature_store import FeatureStore


def write_packed(
    path: Path, lengths: dict[str, int], *, width: int = 3, scale: bool = True, **metadata: str
) -> Path:
    tensors: dict[str, np.ndarray] = {
        video: (np.arange(frames * width).reshape(frames, width) % 251).astype(np.uint8)
        for video, frames in lengths.items()
    }
    if scale:
        tensors["scale"] = np.linspace(0.5, 1.5, width, dtype=np.float32)
    save_file(tensors, path, metadata=metadata or None)
    return path


def write_folder(path: Path, lengths: dict[str, int], *, sampling: str = "uniform:4", **stream: Any) -> Path:
    values: dict[str, Any] = {"backbone": "resnet50", "layer": "pool5", "width": 2}
    header = FeatureHeader(
        streams=(StreamHeader(**{**values, **stream}),),
        sampling=sampling,
        reader="decord",
        dtype="float32",
        capvid_version="0.1.0",
    )
    for video, frames in lengths.items():
        array = np.full((frames, header.width), frames, np.float32)
        features = Features(header=header, streams=(array,), times=np.arange(frames) / 2, video=video)
        save_features(path / f"{video}.safetensors", features)
    return path


def test_metadata_of_a_packed_file_and_multiplication_by_scale(tmp_path: Path) -> None:
    packed = write_packed(
        tmp_path / "p.safetensors",
        {"a": 2, "b": 1},
        backbone="bvlc_googlenet",
        layer="pool5/7x7_s1",
        dequantise="tensor.float() * scale",
    )
    store = FeatureStore([packed])
    assert store.ids() == ["a", "b"]
    assert "a" in store and "scale" not in store and len(store) == 2
    assert store.header.streams == (StreamHeader(backbone="googlenet", layer="pool5/7x7_s1", width=3),)
    assert store.header.sampling is None
    features = store.get("a")
    np.testing.assert_allclose(features.streams[0], [[0, 1, 3], [1.5, 4, 7.5]])
    assert features.streams[0].dtype == np.float32
    assert features.times is None and features.video == "a"


def test_fragment_supplies_what_the_metadata_lacks(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "x3d.safetensors", {"a": 2})
    store = FeatureStore([f"{packed}#backbone=x3d-xs&layer=conv5&dequantise=scale*u**2"])
    assert store.header.streams == (StreamHeader(backbone="x3d-xs", layer="conv5", width=3),)
    np.testing.assert_allclose(store.get("a").streams[0], [[0, 1, 6], [4.5, 16, 37.5]])


def test_without_scale_the_numbers_are_taken_as_they_are(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "p.safetensors", {"a": 2}, scale=False)
    store = FeatureStore([packed])
    np.testing.assert_array_equal(store.get("a").streams[0], [[0, 1, 2], [3, 4, 5]])
    with pytest.raises(FeatureFileError, match="needs a tensor named scale"):
        FeatureStore([f"{packed}#dequantise=scale*u"])


def test_fragment_that_contradicts_the_file(tmp_path: Path) -> None:
    packed = write_packed(
        tmp_path / "p.safetensors", {"a": 2}, backbone="bvlc_googlenet", dequantise="scale*u"
    )
    assert FeatureStore([f"{packed}#backbone=googlenet"]).header.streams[0].backbone == "googlenet"
    with pytest.raises(FeatureFileError, match="backbone is 'bvlc_googlenet' in the file and 'resnet50'"):
        FeatureStore([f"{packed}#backbone=resnet50"])
    with pytest.raises(FeatureFileError, match="dequantise is"):
        FeatureStore([f"{packed}#dequantise=scale*u**2"])


@pytest.mark.parametrize("fragment", ["colour=red", "backbone", "layer="])
def test_fragment_that_is_not_understood(tmp_path: Path, fragment: str) -> None:
    packed = write_packed(tmp_path / "p.safetensors", {"a": 2})
    with pytest.raises(UsageError, match="is not valid"):
        FeatureStore([f"{packed}#{fragment}"])


def test_unknown_dequantisation_is_not_guessed(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "p.safetensors", {"a": 2}, dequantise="exp(u)")
    with pytest.raises(FeatureFileError, match=r"dequantise 'exp\(u\)' is not known"):
        FeatureStore([packed])


def test_a_hash_in_a_file_name_is_part_of_the_name(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "take #2.safetensors", {"a": 2})
    assert FeatureStore([packed]).ids() == ["a"]
    assert FeatureStore([f"{packed}#layer=x"]).header.streams[0].layer == "x"


def test_sources_with_the_same_videos_are_streams_and_others_extend(tmp_path: Path) -> None:
    google = {"backbone": "googlenet", "layer": "pool5/7x7_s1"}
    sources: list[Path | str] = []
    for split, lengths in (("train", {"a": 2, "b": 4}), ("val", {"c": 1})):
        sources.append(write_packed(tmp_path / f"g-{split}.safetensors", lengths, **google))
        packed = write_packed(tmp_path / f"x-{split}.safetensors", lengths, width=2)
        sources.append(f"{packed}#backbone=x3d-xs")
    store = FeatureStore(sources)
    assert store.ids() == ["a", "b", "c"]
    assert [stream.width for stream in store.header.streams] == [3, 2]
    assert [stream.backbone for stream in store.header.streams] == ["googlenet", "x3d-xs"]
    assert store.get("b").concatenated().shape == (4, 5)
    np.testing.assert_allclose(store.get("a").concatenated(), [[0, 1, 3, 0, 1.5], [1.5, 4, 7.5, 1, 4.5]])


def test_a_folder_and_a_packed_file_together_keep_times_and_sampling(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "resnet", {"a": 2, "b": 3})
    packed = write_packed(tmp_path / "p.safetensors", {"a": 2, "b": 3}, backbone="googlenet")
    store = FeatureStore([packed, folder])
    assert store.header.sampling == "uniform:4"
    features = store.get("b")
    assert [stream.shape for stream in features.streams] == [(3, 3), (3, 2)]
    np.testing.assert_array_equal(features.times, [0, 0.5, 1])
    assert (features.streams[1] == 3).all()


def test_ids_in_folders_below_and_hidden_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "features", {"b": 2, "a.mp4": 2, "day1/a": 3})
    (folder / ".half.safetensors").write_bytes(b"not yet")
    assert sorted(FeatureStore([folder]).ids()) == ["a.mp4", "b", "day1/a"]
    assert FeatureStore([folder / "b.safetensors"]).ids() == ["b"]


def test_streams_of_different_lengths_name_video_and_lengths(tmp_path: Path) -> None:
    first = write_packed(tmp_path / "p.safetensors", {"a": 2, "b": 3}, backbone="googlenet")
    second = write_packed(tmp_path / "q.safetensors", {"a": 2, "b": 5}, backbone="x3d-xs")
    with pytest.raises(
        FeatureFileError, match=r"b: streams of different lengths \(3 in .*p.safetensors, 5 in"
    ):
        FeatureStore([first, second])


def test_videos_with_other_streams_are_named(tmp_path: Path) -> None:
    wide = write_packed(tmp_path / "wide.safetensors", {"a": 2})
    narrow = write_packed(tmp_path / "narrow.safetensors", {"b": 2}, width=2)
    with pytest.raises(FeatureFileError, match=r"of a and b .*width: a has 3, got 2"):
        FeatureStore([wide, narrow])
    more = write_packed(tmp_path / "more.safetensors", {"a": 2}, width=4)
    also = write_packed(tmp_path / "also.safetensors", {"b": 2})
    with pytest.raises(FeatureFileError, match="of a and b"):
        FeatureStore([wide, more, also])


def test_the_same_layer_twice_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "one", {"a": 2})
    again = write_folder(tmp_path / "two", {"a": 2})
    with pytest.raises(FeatureFileError, match=r"a: the same backbone and layer is in .*one and in .*two"):
        FeatureStore([folder, again])


def test_samplings_that_differ_are_refused(tmp_path: Path) -> None:
    one = write_folder(tmp_path / "one", {"a": 2})
    other = write_folder(tmp_path / "two", {"a": 2}, sampling="uniform:8", backbone="googlenet")
    with pytest.raises(FeatureFileError, match="a: streams sampled in different ways"):
        FeatureStore([one, other])


def test_sources_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "no.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(FeatureFileError, match="no such file or folder"):
        FeatureStore([tmp_path / "gone"])
    with pytest.raises(FeatureFileError, match="no feature files"):
        FeatureStore([tmp_path / "empty"])
    with pytest.raises(FeatureFileError, match="not a readable safetensors file"):
        FeatureStore([tmp_path / "no.safetensors"])
    with pytest.raises(UsageError, match="no features were given"):
        FeatureStore([])


def test_a_video_that_is_not_there(tmp_path: Path) -> None:
    store = FeatureStore([write_packed(tmp_path / "p.safetensors", {"a": 2})])
    with pytest.raises(FeatureFileError, match="no features of the video 'z'"):
        store.get("z")


def test_packed_maps_keep_their_locations(tmp_path: Path) -> None:
    maps = np.random.default_rng(0).random((2, 4, 3)).astype(np.float16)
    save_file({"a": maps}, tmp_path / "maps.safetensors")
    store = FeatureStore([tmp_path / "maps.safetensors"])
    assert store.header.streams[0].locations == 4
    np.testing.assert_array_equal(store.get("a").streams[0], maps.astype(np.float32))


@pytest.mark.shared
def test_packed_features_of_real_videos(shared_data: Path) -> None:
    folder = shared_data / "data" / "msrvtt-frames"
    google = folder / "googlenet_pool5-val.safetensors"
    x3d = folder / "x3d_xs_conv5-val.safetensors"
    store = FeatureStore([google, f"{x3d}#backbone=x3d-xs&layer=conv5&dequantise=scale*u**2"])
    assert len(store) == 244
    assert store.header.width == 1024 + 432
    with safe_open(str(google), "np") as g, safe_open(str(x3d), "np") as x:
        expected_google = g.get_tensor("video6513").astype(np.float32) * g.get_tensor("scale")
        expected_x3d = x.get_tensor("video6513").astype(np.float32) ** 2 * x.get_tensor("scale")
    expected = np.concatenate([expected_google, expected_x3d], axis=1)
    np.testing.assert_allclose(store.get("video6513").concatenated(), expected, rtol=1e-6)


def test_views_need_all_streams_of_their_video(tmp_path: Path) -> None:
    first = write_folder(tmp_path / "a", {"x": 4, "x@1": 4, "x@2": 4, "y": 5, "y@1": 5})
    second = write_folder(tmp_path / "b", {"x": 4, "x@1": 4, "y": 5}, backbone="googlenet")
    store = FeatureStore([first, second])
    assert store.ids() == ["x", "x@1", "y"] and store.incomplete == ["x@2", "y@1"]
    assert [stream.backbone for stream in store.header.streams] == ["resnet50", "googlenet"]
    assert FeatureStore([first]).incomplete == []
    with pytest.raises(FeatureFileError, match="streams of different lengths"):
        FeatureStore([first, write_folder(tmp_path / "c", {"x": 4, "x@1": 3, "y": 5}, backbone="googlenet")])


def test_views_may_lie_in_a_folder_of_their_own(tmp_path: Path) -> None:
    videos, views = write_folder(tmp_path / "a", {"x": 4}), write_folder(tmp_path / "b", {"x@1": 3})
    store = FeatureStore([videos, views])
    assert store.ids() == ["x", "x@1"] and store.get("x@1").streams[0].tolist() == [[3, 3]] * 3
    other = write_folder(tmp_path / "c", {"x@1": 3}, layer="other")
    with pytest.raises(FeatureFileError, match="x and x@1 are of different kinds"):
        FeatureStore([videos, other])
