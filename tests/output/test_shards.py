from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from capvid.errors import DataError, UsageError
from capvid.output.shards import HEAD, JsonLines, ParquetCaptions, Row, ShardFolder, ShardFormat
from capvid.utils.storage import Storage
from capvid.video.input_set import identity

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

FORMS = [JsonLines, ParquetCaptions]


@pytest.fixture(params=["path", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder of this machine, and one at an address."""
    fsspec.filesystem("memory").store.clear()
    yield str(tmp_path / "out") if request.param == "path" else "memory://b/out"
    fsspec.filesystem("memory").store.clear()


def row(video: str, *, ok: bool = True, segments: bool = False) -> Row:
    words = [{"word": "a", "logprob": -0.5, "attention": [0.25, 0.75]}, {"word": "cat", "logprob": -1.0}]
    caption = {"text": "a cat", "logprob": -1.5, "mean_logprob": -0.75, "confidence": 0.25, "words": words}
    caption["times"] = [0.0, 0.5]
    record: dict[str, Any] = {
        "schema_version": 1,
        "video": video,
        "status": "ok" if ok else "error",
        "model": {"name": "m3", "revision": None},
        "settings": {"beam_size": 5, "sampling": "uniform:4"},
        "duration": 1.25 if ok else None,
        "captions": [caption] if ok else [],
        "error": None if ok else {"kind": "missing", "message": f"{video}: é", "remedy": ""},
    }
    if segments:
        segment = {"start": 0.0, "end": 1.25, "caption": "a cat", "captions": [caption]}
        record["segments"] = [{**segment, "memory_change": [0.5]}, segment]
    return Row(video=video, record=record, error=None if ok else "it failed")


def folder_of(place: str, form: type[ShardFormat] = JsonLines, **head: object) -> ShardFolder:
    return ShardFolder(place, kind="captions", form=form(), head={"model": "m", "beam": (1, 2), **head})


def full(value: Any) -> Any:
    """A value without what is None, as Parquet has no absent fields."""
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items() if item is not None}
    return [full(item) for item in value] if isinstance(value, list) else value


def done(folder: ShardFolder, videos: list[str], **how: bool) -> list[str]:
    digests = folder.done(**how)
    return [video for video in videos if identity(video) in digests]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_is_done(place: str, form: type[ShardFormat]) -> None:
    folder = folder_of(place, form)
    folder.begin(overwrite=False)
    names = ["b.mp4", "s3://b/é 'x'.mp4", "new\nline \u2028.mp4", "a.mp4", "gone.mp4"]
    assert done(folder, names) == []
    name = folder.write([row(names[0]), row(names[1], ok=False), row(names[2], segments=True)])
    again = folder.write([row(names[3])])
    assert sorted(folder.shards()) == sorted([name, again])
    assert done(folder, names) == names[:4]
    assert len(folder.done()) == 4
    assert done(folder_of(place, form), names) == names[:4]
    assert folder.write([row(names[2]), row(names[0]), row(names[1])]) == name  # named by its videos
    assert len(folder.shards()) == 2


def test_jsonl_says_what_the_records_say(tmp_path: Path) -> None:
    rows = [row("b.mp4"), row("a é.mp4", ok=False), row("c.mp4", segments=True)]
    folder = folder_of(str(tmp_path))
    text = (tmp_path / folder.write(rows)).read_text(encoding="utf-8")
    assert text == "".join(json.dumps(each.record, ensure_ascii=False) + "\n" for each in rows)


def test_parquet_says_what_the_records_say(tmp_path: Path) -> None:
    rows = [row("b.mp4"), row("a é.mp4", ok=False), row("c.mp4", segments=True)]
    found = parquet.read_table(tmp_path / folder_of(str(tmp_path), ParquetCaptions).write(rows)).to_pylist()
    for each in found:
        each["settings"] = json.loads(each["settings"])
    assert full(found) == [full(each.record) for each in rows]


@pytest.mark.parametrize("form", FORMS)
def test_what_failed_is_taken_out_to_be_tried_again(place: str, form: type[ShardFormat]) -> None:
    folder = folder_of(place, form)
    mixed = folder.write([row("a.mp4"), row("b.mp4", ok=False), row("c.mp4")])
    failed = folder.write([row("d.mp4", ok=False), row("e.mp4", ok=False)])
    whole = folder.write([row("f.mp4")])
    before = folder.storage.read(whole)
    names = [f"{letter}.mp4" for letter in "abcdef"]
    assert done(folder, names) == names
    assert done(folder, names, retry_failed=True) == ["a.mp4", "c.mp4", "f.mp4"]
    assert sorted(folder.shards()) == sorted([mixed, whole]) and failed not in folder.storage.names()
    assert folder.storage.read(whole) == before
    assert done(folder, names) == ["a.mp4", "c.mp4", "f.mp4"]
    folder.write([row("b.mp4"), row("d.mp4"), row("e.mp4", ok=False)])
    assert done(folder, names) == names


@pytest.mark.parametrize("form", FORMS)
def test_shards_that_another_run_removes_meanwhile(
    tmp_path: Path, form: type[ShardFormat], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(str(tmp_path), form)
    name = folder.write([row("a.mp4", ok=False)])
    kept = folder.write([row("b.mp4"), row("c.mp4", ok=False)])
    monkeypatch.setattr(ShardFolder, "shards", lambda self: [name, kept])
    (tmp_path / name).unlink()
    assert done(folder, ["a.mp4", "b.mp4", "c.mp4"], retry_failed=True) == ["b.mp4"]
    (tmp_path / kept).unlink()
    assert len(folder.done(retry_failed=True)) == 0


def test_a_folder_belongs_to_one_model_and_its_settings(place: str) -> None:
    folder_of(place).begin(overwrite=False)
    folder = folder_of(place)
    folder.begin(overwrite=False)
    folder.check()
    folder.write([row("a.mp4")])
    for other, said in (
        (folder_of(place, model="n"), "model"),
        (folder_of(place, more=1, beam=3), "beam, more"),
        (folder_of(place, ParquetCaptions), "format"),
    ):
        with pytest.raises(UsageError) as raised:
            other.begin(overwrite=False)
        assert str(raised.value) == (
            f"{place}: holds shards that were made otherwise ({said}); choose another folder, or --overwrite"
        )
        with pytest.raises(UsageError, match="is not the same folder on"):
            other.check()
    assert len(folder.done()) == 1
    other.begin(overwrite=True)
    other.check()
    assert other.storage.names() == [HEAD] and len(other.done()) == 0


def test_other_files_stay(tmp_path: Path) -> None:
    folder = folder_of(str(tmp_path))
    names = ["captions.jsonl", "captions-12.jsonl", "notes.txt", "captions-0123456789abcdef.jsonl.bak~"]
    for name in names:
        (tmp_path / name).write_text("mine")
    folder.write([row("a.mp4")])
    assert len(folder.done()) == 1
    folder.begin(overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, HEAD])


@pytest.mark.parametrize("content", [b"no json\n", b"[1]\n", b'{"video": "a"}\n', b"\xff\n"])
def test_files_that_are_no_shards(place: str, content: bytes) -> None:
    folder = folder_of(place)
    folder.storage.write("captions-0123456789abcdef.jsonl", content)
    with pytest.raises(DataError, match=r"0123456789abcdef.jsonl: not a shard of capvid; move it elsewhere"):
        folder.done()
    folder.storage.write(HEAD, content)
    with pytest.raises((DataError, UsageError)):
        folder.begin(overwrite=False)


@pytest.mark.parametrize("wrong", ["cut", "columns"])
def test_files_that_are_no_shards_of_parquet(place: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capvid.utils.storage.time.sleep", lambda seconds: pytest.fail("tried again"))
    folder = folder_of(place, ParquetCaptions)
    data = ParquetCaptions().encode([row("a.mp4")])
    if wrong == "columns":
        sink = pa.BufferOutputStream()
        parquet.write_table(pa.table({"video": ["a.mp4"]}), sink)
        data = sink.getvalue().to_pybytes()
    folder.storage.write("captions-0123456789abcdef.parquet", data if wrong == "columns" else data[:-9])
    with pytest.raises(DataError, match=r"0123456789abcdef.parquet: not a shard of capvid"):
        folder.done()


def test_a_folder_whose_name_looks_like_a_partition(tmp_path: Path) -> None:
    folder = folder_of(str(tmp_path / "video=3"), ParquetCaptions)
    folder.write([row("a.mp4")])
    assert done(folder, ["a.mp4", "3"]) == ["a.mp4"]


def test_nothing_is_left_when_a_shard_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(Exception, match=r"cannot be written \(No space left on device\)"):
        Storage(tmp_path).write("x", bytes(100))
    assert list(tmp_path.iterdir()) == []
