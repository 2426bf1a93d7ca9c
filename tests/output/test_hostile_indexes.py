"""Manifests and shard indexes that another program wrote, or wrote on purpose."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from test_records import SETTINGS, result

from capvid.errors import CapvidError, DataError
from capvid.output.manifest import Manifest
from capvid.output.shards import HEAD, JsonLines, ParquetCaptions, ShardFolder, WebDataset
from capvid.utils.files import MANIFEST
from capvid.utils.storage import StorageError

MODEL = "m3@0123456789ab"
DEEP = b"[" * 100_000 + b"]" * 100_000
LINES = [
    b'{"output": "\\ud800", "status": "ok"}',
    DEEP,
    b'{"output": "a.txt", "status": ' + DEEP + b"}",
    b"\0\0\0",
    b"\xff\xfe",
    b'{"output": "a.txt", "status": []}',
    b'{"output": "a.txt", "status": null, "size": 1e999}',
    b'{"output": ["a.txt"], "status": "ok"}',
    b'{"output": "a.txt"}',
    b'{"output": "a.txt", "status": "ok"}',
    b"9" * 5000,
    b"[]",
    b"NaN",
]


@pytest.mark.parametrize("line", LINES)
def test_a_manifest_line_that_is_none(tmp_path: Path, line: bytes) -> None:
    video = tmp_path / "v.mp4"
    video.write_bytes(b"x")
    (tmp_path / "a.txt").touch()
    (tmp_path / "v.txt").touch()
    (tmp_path / MANIFEST).write_bytes(line + b"\n")
    with Manifest(tmp_path / MANIFEST, model=MODEL, settings=SETTINGS) as manifest:
        assert not manifest.is_done(video, "a.txt")
        manifest.note(result(path=video), "v.txt")
    assert Manifest(tmp_path / MANIFEST, model=MODEL, settings=SETTINGS).is_done(video, "v.txt")
    for row in (tmp_path / MANIFEST).read_bytes().splitlines():
        json.loads(row.decode("utf-8"))


@pytest.mark.parametrize("name", ["new\nline", "\u2028", "\x1b[2J", "\udcff", "=1", "\x85"])
def test_names_that_are_odd_are_done_once(tmp_path: Path, name: str) -> None:
    video = tmp_path / f"{name}.mp4"
    video.write_bytes(b"x")
    (tmp_path / f"{name}.txt").touch()
    failed = result(path=video, status="error", captions=(), error=CapvidError(f"{video}: \ud800"))
    with Manifest(tmp_path / MANIFEST, model=MODEL, settings=SETTINGS) as manifest:
        manifest.note(failed, "failed.txt")
        manifest.note(result(path=video), f"{name}.txt")
    again = Manifest(tmp_path / MANIFEST, model=MODEL, settings=SETTINGS)
    assert again.is_done(video, f"{name}.txt") and not again.is_done(video, "failed.txt")
    assert len((tmp_path / MANIFEST).read_bytes().decode().splitlines()) == 2


@pytest.mark.skipif(os.name != "posix", reason="FIFOs are made in another way")
@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_a_manifest_that_is_no_file(tmp_path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(tmp_path / MANIFEST)
    else:
        (tmp_path / MANIFEST).mkdir()
    with pytest.raises(OSError, match=r"not a regular file|directory"):
        Manifest(tmp_path / MANIFEST, model=MODEL, settings=SETTINGS)


@pytest.mark.parametrize("head", [DEEP, b'{"a": ' + DEEP + b"}", b"\0", b"[]", b"NaN", b"9" * 5000])
def test_an_index_of_shards_that_is_damaged(tmp_path: Path, head: bytes) -> None:
    (tmp_path / HEAD).write_bytes(head)
    folder = ShardFolder(str(tmp_path), kind="captions", form=JsonLines(), head={})
    with pytest.raises(DataError, match=f"{HEAD}: is damaged; delete it with the shards beside it"):
        folder.begin(overwrite=False)


@pytest.mark.parametrize(
    "line",
    [
        DEEP,
        b'{"video": ["a"], "status": "ok"}',
        b'{"video": null, "status": "ok"}',
        b'{"video": "a", "status": []}',
        b"3",
        b"9" * 5000,
    ],
)
@pytest.mark.parametrize("form", [JsonLines, WebDataset])
def test_shards_of_wrong_types(tmp_path: Path, line: bytes, form: type[JsonLines] | type[WebDataset]) -> None:
    folder = ShardFolder(str(tmp_path), kind="captions", form=form(), head={})
    name = f"captions-{'0' * 16}.{form.extension}"
    (tmp_path / name).write_bytes(line + b"\n")
    if form is WebDataset:
        (tmp_path / f"{name}.jsonl").write_bytes(line + b"\n")
    with pytest.raises(DataError, match="not a shard of capvid; move it elsewhere"):
        folder.done()


def test_a_tar_shard_that_its_index_contradicts(tmp_path: Path) -> None:
    folder = ShardFolder(str(tmp_path), kind="features", form=WebDataset(), head={})
    name = f"features-{'0' * 16}.tar"
    (tmp_path / name).write_bytes(b"no tar file")
    index = [{"video": "a", "status": "ok"}, {"video": "b", "status": "error"}]
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in index))
    with pytest.raises(DataError, match="not a shard of capvid"):
        folder.done(retry_failed=True)


def test_a_sparse_member_of_a_tar_shard_takes_no_memory(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("a.json")
        sparse = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "a.json"}
        member.pax_headers = {**sparse, "GNU.sparse.size": str(1 << 40), "GNU.sparse.map": "0,0"}
        tar.addfile(member)
    folder = ShardFolder(str(tmp_path), kind="features", form=WebDataset(), head={})
    (tmp_path / f"features-{'0' * 16}.tar").write_bytes(stream.getvalue())
    with pytest.raises(DataError, match="not a shard of capvid"):
        folder.done()


def test_a_parquet_shard_of_wrong_types(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    folder = ShardFolder(str(tmp_path), kind="captions", form=ParquetCaptions(), head={})
    table = pa.table({"video": [1, None], "status": ["ok", "ok"]})
    parquet.write_table(table, tmp_path / f"captions-{'0' * 16}.parquet")
    with pytest.raises(DataError, match="not a shard of capvid"):
        folder.done()


@pytest.mark.skipif(os.name != "posix", reason="FIFOs are made in another way")
def test_pipes_in_a_folder_of_shards(tmp_path: Path) -> None:
    folder = ShardFolder(str(tmp_path), kind="captions", form=JsonLines(), head={})
    os.mkfifo(tmp_path / f"captions-{'0' * 16}.jsonl")
    assert len(folder.done()) == 0  # not a file: no shard
    os.mkfifo(tmp_path / HEAD)
    with pytest.raises(StorageError, match=r"cannot be read \(not a regular file"):
        folder.begin(overwrite=False)
