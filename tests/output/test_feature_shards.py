from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from webdataset_reader import read_webdataset

from capvid.backbones.catalog import StreamHeader
from capvid.errors import CapvidError, DataError, FeatureFileError, VideoError
from capvid.features.extraction import ExtractionResult
from capvid.features.feature_file import (
    FeatureHeader,
    Features,
    features_to_bytes,
    load_features,
    save_features,
)
from capvid.output.shards import ParquetFeatures, Row, ShardFolder, ShardFormat, WebDataset, features_row
from capvid.utils.storage import Blob
from capvid.video.input_set import identity

parquet = pytest.importorskip("pyarrow.parquet")

VECTORS = StreamHeader(backbone="a", layer="x", width=4)
MAPS = StreamHeader(backbone="b", layer="y", width=3, locations=2)


def features(name: str, frames: int = 5, *, times: bool = True) -> Features:
    generator = np.random.default_rng(frames)
    shapes = [(frames, 4), (frames, 2, 3)]
    streams = [generator.normal(size=shape).astype(np.float16).astype(np.float32) for shape in shapes]
    header = FeatureHeader(
        streams=(VECTORS, MAPS), sampling="uniform:5", reader="pyav", dtype="float16", capvid_version="1"
    )
    return Features(
        header=header,
        streams=tuple(streams),
        times=np.arange(frames) / 3 if times else None,
        video=name,
        duration=frames / 3,
    )


def result(name: str, frames: int = 5, *, ok: bool = True) -> ExtractionResult:
    path = Blob(f"s3://b/{name}.mp4")
    error = None if ok else VideoError(path, "there is nothing at this address", kind="missing")
    return ExtractionResult(
        path=path, features=features(name, frames) if ok else None, error=error, name=name, lost=frames
    )


def rows() -> list[Row]:
    names = ["a", "deep/é 'q'", "b"]
    return [features_row(result(name, 3 + n, ok=name != "b")) for n, name in enumerate(names)]


def folder_of(path: Path, form: type[ShardFormat] = WebDataset) -> ShardFolder:
    return ShardFolder(str(path), kind="features", form=form(), head={})


def same(one: Features, other: Features) -> None:
    assert (one.header, one.video, one.view) == (other.header, other.video, other.view)
    assert one.duration == pytest.approx(other.duration, abs=1e-6)
    np.testing.assert_array_equal(one.times, other.times)
    for mine, theirs in zip(one.streams, other.streams, strict=True):
        assert mine.dtype == theirs.dtype == np.float32
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("times", [True, False])
def test_bytes_are_those_of_the_file(tmp_path: Path, times: bool) -> None:
    made = features("a", times=times)
    save_features(tmp_path / "a.safetensors", made)
    assert features_to_bytes(made) == (tmp_path / "a.safetensors").read_bytes()
    loaded = load_features(tmp_path / "a.safetensors")
    if times:
        same(loaded, made)
    assert (loaded.times is None) is not times
    np.testing.assert_array_equal(loaded.streams[1], made.streams[1])


@pytest.mark.parametrize("wrong", ["empty", "cut", "text", "bare", "long"])
def test_bytes_that_are_no_features(wrong: str, tmp_path: Path) -> None:
    from safetensors.numpy import save

    data = features_to_bytes(features("a"))
    data = {
        "empty": b"",
        "cut": data[:-7],
        "text": b"no features at all",
        "bare": save({"stream0": np.zeros((2, 4), np.float32)}),
        "long": b"\xff" * 8 + data[8:],
    }[wrong]
    (tmp_path / "clip.safetensors").write_bytes(data)
    with pytest.raises(FeatureFileError, match=r"clip\.safetensors: "):
        load_features(tmp_path / "clip.safetensors")


def test_a_header_whose_streams_are_not_there(tmp_path: Path) -> None:
    from safetensors.numpy import load, save

    data = features_to_bytes(features("a"))
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    tensors = load(data)
    del tensors["stream1"]
    (tmp_path / "clip.safetensors").write_bytes(save(tensors, metadata=metadata))
    with pytest.raises(FeatureFileError, match="stream1 cannot be read"):
        load_features(tmp_path / "clip.safetensors")


def test_a_tar_file_holds_the_files_of_features(tmp_path: Path) -> None:
    name = folder_of(tmp_path).write(rows())
    with tarfile.open(tmp_path / name) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    found = {p.relative_to(tmp_path / "unpacked").as_posix(): p for p in (tmp_path / "unpacked").rglob("*.*")}
    assert sorted(found) == sorted(
        ["a.json", "a.safetensors", "b.json", "deep/é 'q'.json", "deep/é 'q'.safetensors"]
    )
    for key, frames in (("a", 3), ("deep/é 'q'", 4)):
        assert found[f"{key}.safetensors"].read_bytes() == features_to_bytes(features(key, frames))
    assert json.loads(found["b.json"].read_bytes()) == {
        "video": "s3://b/b.mp4",
        "status": "error",
        "duration": None,
        "error": {
            "kind": "missing",
            "message": "s3://b/b.mp4: there is nothing at this address",
            "remedy": "",
        },
    }
    records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_bytes().splitlines()]
    assert records == [each.record for each in rows()]
    assert (tmp_path / folder_of(tmp_path).write(rows())).read_bytes() == (tmp_path / name).read_bytes()


def test_shards_are_read_again(tmp_path: Path) -> None:
    data = WebDataset().encode(rows())
    found = list(read_webdataset(data))
    assert [record for record, _ in found] == [each.record for each in rows()]
    assert found[2][1] is None
    for (_, one), (name, frames) in zip(found, [("a", 3), ("deep/é 'q'", 4)], strict=False):
        assert one is not None
        same(one, features(name, frames))
    for wrong in (b"no archive", data[:700], data[:-12000]):
        with pytest.raises(ValueError, match="damaged tar file"):
            WebDataset().index_of(wrong)


def test_parquet_holds_the_numbers(tmp_path: Path) -> None:
    found = parquet.read_table(tmp_path / folder_of(tmp_path, ParquetFeatures).write(rows())).to_pylist()
    assert [(each["video"], each["status"]) for each in found] == [
        (each.video, each.record["status"]) for each in rows()
    ]
    for each, (name, frames) in zip(found, [("a", 3), ("deep/é 'q'", 4)], strict=False):
        made = features(name, frames)
        assert FeatureHeader.from_json(each["header"]) == made.header
        assert each["duration"] == made.duration
        np.testing.assert_array_equal(each["times"], made.times)
        for stream, expected in zip(each["streams"], made.streams, strict=True):
            values = np.array(stream["values"], np.float32).reshape(stream["shape"])
            np.testing.assert_array_equal(values, expected)
    assert found[2]["streams"] is None and found[2]["error"]["kind"] == "missing"


@pytest.mark.parametrize("form", [WebDataset, ParquetFeatures])
def test_what_failed_is_taken_out_to_be_tried_again(tmp_path: Path, form: type[ShardFormat]) -> None:
    folder = folder_of(tmp_path, form)
    mixed = folder.write(rows())
    failed = folder.write([features_row(result("c", ok=False))])
    assert len(folder.done()) == 4
    found = folder.done(retry_failed=True)
    assert len(found) == 2 and identity("s3://b/deep/é 'q'.mp4") in found
    assert folder.shards() == [mixed] and not [name for name in folder.storage.names() if failed in name]
    again = folder_of(tmp_path / "again", form)
    kept = again.write(rows()[:2])
    if form is ParquetFeatures:
        assert parquet.read_table(tmp_path / mixed).equals(parquet.read_table(tmp_path / "again" / kept))
        return
    for extension in ("", ".jsonl"):
        assert folder.storage.read(mixed + extension) == again.storage.read(kept + extension)


def test_a_tar_file_without_the_file_beside_it(tmp_path: Path) -> None:
    """A run ended between the two."""
    folder = folder_of(tmp_path)
    name = folder.write(rows())
    (tmp_path / f"{name}.jsonl").unlink()
    assert len(folder.done()) == 3
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:700])
    with pytest.raises(DataError, match=f"{name}: not a shard of capvid"):
        folder.done()
    (tmp_path / f"{name}.jsonl").write_text('{"no": "record"}\n')
    with pytest.raises(DataError, match=f"{name}: not a shard of capvid"):
        folder.done()


def test_names_that_are_no_text() -> None:
    path = Path("\udcff.mp4")
    error = VideoError(path, "there is no such file", kind="missing")
    failed = features_row(ExtractionResult(path=path, features=None, error=error, name="\udcff"))
    made = features_row(ExtractionResult(path=path, features=features("\udcff"), error=None, name="\udcff"))
    for form in (WebDataset(), ParquetFeatures()):
        assert form.encode([failed]) and form.encode([made])
    ((record, one),) = read_webdataset(WebDataset().encode([made]))
    assert record["video"] == "\\xff.mp4" and one is not None and one.video == "\udcff"
    ((record, _),) = read_webdataset(WebDataset().encode([failed]))
    assert record["error"]["message"] == "\\xff.mp4: there is no such file"


def test_errors_in_rows_are_on_one_line() -> None:
    error = CapvidError("two\nlines", remedy="do\nthis")
    row = features_row(ExtractionResult(path=Path("a\nb.mp4"), features=None, error=error, name="a"))
    assert row.error == "two lines; do this"
    data = WebDataset().encode([row])
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["a.json"]
    assert WebDataset().index_of(data).count(b"\n") == 1
