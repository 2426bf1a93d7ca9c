"""Malformed annotations, predictions, lists and archives."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from capvid.datasets.dataset import load_data
from capvid.errors import CapvidError, DataError, UsageError, VideoError
from capvid.scoring.predictions import read_predictions
from capvid.scoring.references import read_references
from capvid.video.input_lists import members, read_list
from capvid.video.input_set import find_videos

VALUES = ["null", "7", "1e999", "NaN", '"\\ud800"', "[]", "{}", "[[" * 900 + "]]" * 900, "1" * 5000, "true"]


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_pipes_devices_and_missing_files_are_rejected(pipe: Path) -> None:
    for path in (pipe, Path("/dev/zero"), pipe.parent / "missing"):
        for read in (read_predictions, read_references, lambda path: load_data([f"jsonl:{path}"])):
            with pytest.raises(DataError, match=str(path)):
                read(path)
    with pytest.raises(UsageError, match="use --from-file -"):
        list(read_list(pipe))


@pytest.mark.parametrize("value", VALUES)
def test_wrong_types_in_any_field_raise_errors_that_name_the_file(tmp_path: Path, value: str) -> None:
    path = tmp_path / "x.json"
    for text in (
        value,
        f'{{"id": {value}, "captions": ["a"]}}',
        f'{{"id": "v", "captions": {value}}}',
        f'{{"id": "v", "captions": [{value}]}}',
        f'{{"id": "v", "split": {value}, "captions": ["a"]}}',
        f'{{"id": "v", "segments": {value}, "paragraphs": [["a"]]}}',
        f'{{"id": "v", "segments": [{{"start": {value}, "end": 9}}], "paragraphs": {value}}}',
        f'[{{"image_id": {value}, "caption": {value}}}]',
        f'{{"images": {value}, "annotations": [{value}]}}',
        f'{{"images": [{{"id": {value}}}], "annotations": [{{"image_id": {value}, "caption": {value}}}]}}',
        f'{{"v": {value}}}',
        f'{{"v": {{"sentences": {value}, "timestamps": [{value}]}}}}',
    ):
        path.write_text(text)
        for paragraphs in (False, True):
            for read in (read_predictions, read_references):
                try:
                    read(path, paragraphs=paragraphs)
                except CapvidError as error:
                    assert "x.json" in str(error)
        for kind in ("jsonl", "coco"):
            try:
                load_data([f"{kind}:{path}"])
            except CapvidError as error:
                assert "x.json" in str(error)


def test_id_with_an_unpaired_surrogate_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"id": "\\ud800", "captions": ["a"]}\n')
    with pytest.raises(DataError, match="line 1: an unpaired surrogate"):
        load_data([f"jsonl:{tmp_path}/x.jsonl"])


def test_text_beyond_the_size_limit_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPVID_LIMIT_TEXT_BYTES", "1e6")
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(json.dumps({"v": " " * 3_000_000}).encode()))
    for read in (read_predictions, read_references, lambda path: load_data([f"jsonl:{path}"])):
        with pytest.raises(DataError, match="limit of 1000000 bytes"):
            read(path)


def test_invalid_input_lists_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes(b"a.mp4\n" + b"x" * 200_000)
    with pytest.raises(UsageError, match="line 2: longer than any path"):
        list(read_list(path))
    path = tmp_path / "list.csv"
    for data in (b"video\n" + b"x" * 200_000, b"video\n" + b"a," * 1_000_000):
        path.write_bytes(data)
        with pytest.raises(UsageError, match=r"line \d: not CSV"):
            list(read_list(path))
    path = tmp_path / "list.parquet"
    for data in (b"", b"PAR1", b"PAR1" + b"\xff" * 100 + b"PAR1"):
        path.write_bytes(data)
        with pytest.raises(UsageError, match="not Parquet"):
            list(read_list(path))


@pytest.mark.parametrize(
    "headers",
    [
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9" * 30},
        {"GNU.sparse.map": "x,y,z"},
        {"GNU.sparse.size": "abc", "GNU.sparse.numblocks": "1"},
        {"size": "-5"},
        {"size": "x"},
        {"comment": "x" * 3_000_000},
    ],
)
def test_malformed_tar_headers_do_not_crash(tmp_path: Path, headers: dict[str, str]) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("a.mp4")
        member.size, member.pax_headers = 2_000_000, headers
        tar.addfile(member, io.BytesIO(b"7" * 2_000_000))
    try:
        list(members(path))
    except VideoError as error:
        assert "is not a tar archive that can be read" in str(error)


def test_pipe_named_like_an_archive_is_reported(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.tar")
    failures: list[str] = []
    assert find_videos([tmp_path], on_error=lambda error: failures.append(str(error))) == []
    assert "not a regular file" in failures[0]
