"""Inputs and outputs on an S3-compatible server that fails intermittently."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import FlakyS3
from toy import Run, Toy

from capvid.utils import storage

parquet = pytest.importorskip("pyarrow.parquet")
s3fs = pytest.importorskip("s3fs")

pytestmark = pytest.mark.slow

VIDEOS = "s3://bucket/videos"


@pytest.fixture(scope="module")
def server(video_files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlakyS3]:
    """Start a server with three videos, one of them in a folder, an archive of two and a broken file."""
    s3 = FlakyS3()
    s3.ask("PUT", "/bucket")
    for name, data in bucket_content(video_files).items():
        s3.ask("PUT", f"/bucket/videos/{name}", data)
    yield s3
    s3.close()


def bucket_content(video_files: list[Path]) -> dict[str, bytes]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, video in (("x/3.mp4", video_files[3]), ("4 é.mp4", video_files[4])):
            tar.add(video, name)
    return {
        "0.mp4": video_files[0].read_bytes(),
        "a b/it's #1?.mp4": video_files[1].read_bytes(),
        "broken.mp4": b"plain text, long enough for its format to be probed" * 9,
        "more.tar": buffer.getvalue(),
        "é.mp4": video_files[2].read_bytes(),
    }


@pytest.fixture
def s3(server: FlakyS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyS3]:
    """Put the server's credentials in the environment and let every fifth request fail."""
    for name in [name for name in os.environ if name.startswith("AWS_") or "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    server.every, server.cut, server.failed = 5, 4, 0
    monkeypatch.setattr(storage, "_PAUSE", 0.001)
    clear_credential_cache()
    yield server
    clear_credential_cache()


def clear_credential_cache() -> None:
    """Clear the cached filesystems, so that credentials are read again."""
    storage.filesystem.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def local(video_files: list[Path], tmp_path: Path) -> Path:
    """Write the same files to a local folder."""
    for name, data in bucket_content(video_files).items():
        (tmp_path / "videos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "videos" / name).write_bytes(data)
    return tmp_path / "videos"


def read_records(s3: FlakyS3, prefix: str) -> list[dict[str, Any]]:
    names = [name for name in s3.names("bucket", prefix) if name.endswith(".jsonl")]
    return [json.loads(line) for name in names for line in s3.ask("GET", f"/bucket/{name}").splitlines()]


def with_bucket_address(record: dict[str, Any], folder: str) -> str:
    """Return the JSON of a record with the local folder replaced by the bucket's address."""
    return json.dumps(record, sort_keys=True).replace(json.dumps(folder)[1:-1], json.dumps(VIDEOS)[1:-1])


def test_captions_equal_those_of_local_files(capvid: Run, toy: Toy, s3: FlakyS3, local: Path) -> None:
    options = ["--model", toy.model, "--workers", 1]
    command = ["caption", VIDEOS, *options, "--output-dir", "s3://bucket/captions"]
    code, out, err = capvid(*command, "--videos-per-file", 2)
    stderr_lines = err.splitlines()
    assert (code, out, stderr_lines[-1], len(stderr_lines)) == (3, "", "5 captioned, 1 failed", 2)
    assert stderr_lines[0].startswith(f"error: {VIDEOS}/broken.mp4: ")
    assert s3.failed > 5
    names = s3.names("bucket", "captions/")
    assert len(names) == 4 and "captions/capvid-shards.json" in names
    code, _, err = capvid(
        "caption", local, *options, "--format", "jsonl", "--output-dir", local.parent / "out"
    )
    assert code == 3
    expected = [
        json.loads(line)
        for path in (local.parent / "out").rglob("*.jsonl")
        if path.name != "capvid-manifest.jsonl"
        for line in path.read_bytes().splitlines()
    ]
    records = read_records(s3, "captions/")
    assert sorted(with_bucket_address(record, str(local)) for record in expected) == sorted(
        json.dumps(record, sort_keys=True) for record in records
    )
    assert sorted(record["video"] for record in records) == [
        f"{VIDEOS}/{name}"
        for name in (
            "0.mp4",
            "a b/it's #1?.mp4",
            "broken.mp4",
            "more.tar/4 é.mp4",
            "more.tar/x/3.mp4",
            "é.mp4",
        )
    ]
    assert len({record["captions"][0]["text"] for record in records if record["captions"]}) > 1
    objects = {name: s3.ask("GET", f"/bucket/{name}") for name in names}
    assert capvid(*command) == (0, "", "0 captioned, 6 skipped (already done)\n")
    assert {name: s3.ask("GET", f"/bucket/{name}") for name in s3.names("bucket", "captions/")} == objects
    code, _, err = capvid(*command, "--retry-failed")
    assert (code, err.splitlines()[-1]) == (3, "0 captioned, 5 skipped (already done), 1 failed")
    assert len(read_records(s3, "captions/")) == 6


def test_parquet_of_a_list_with_a_missing_object(capvid: Run, toy: Toy, s3: FlakyS3, tmp_path: Path) -> None:
    names = ["0.mp4", "gone.mp4", "é.mp4"]
    list_text = "video,n\n" + "".join(f"{VIDEOS}/{name},1\n" for name in names)
    s3.ask("PUT", "/bucket/list.csv", list_text.encode())
    out = "s3://bucket/parquet"
    command = ["caption", "--from-file", "s3://bucket/list.csv", "--model", toy.model, "--workers", 1]
    command += ["--format", "parquet", "--output-dir", out]
    code, _, err = capvid(*command)
    assert (code, err.splitlines()) == (
        3,
        [f"error: {VIDEOS}/gone.mp4: there is nothing at this address", "2 captioned, 1 failed"],
    )
    (name,) = [name for name in s3.names("bucket", "parquet/") if name.endswith(".parquet")]
    (tmp_path / "x.parquet").write_bytes(s3.ask("GET", f"/bucket/{name}"))
    rows = parquet.read_table(tmp_path / "x.parquet").to_pylist()
    assert {row["video"]: row["status"] for row in rows} == {
        f"{VIDEOS}/{name}": "error" if name == "gone.mp4" else "ok" for name in names
    }
    (gone,) = [row for row in rows if row["status"] == "error"]
    assert gone["error"] == {
        "kind": "missing",
        "message": f"{VIDEOS}/gone.mp4: there is nothing at this address",
        "remedy": "",
    }
    texts = {row["video"]: row["captions"][0]["text"] for row in rows if row["captions"]}
    code, stdout, _ = capvid("caption", f"{VIDEOS}/é.mp4", "--model", toy.model)
    assert (code, stdout) == (0, texts[f"{VIDEOS}/é.mp4"] + "\n")
    assert capvid(*command) == (0, "", "0 captioned, 3 skipped (already done)\n")


def test_features_equal_those_of_local_files(capvid: Run, s3: FlakyS3, local: Path) -> None:
    options = ["--backbone", "colour-grid", "--frames", 3, "--workers", 1]
    code, _, err = capvid("extract", VIDEOS, *options, "-o", "s3://bucket/features")
    assert (code, err.splitlines()[-1]) == (3, "5 extracted, 1 failed")
    assert capvid("extract", local, *options, "-o", local.parent / "out")[0] == 3
    (name,) = [name for name in s3.names("bucket", "features/") if name.endswith(".tar")]
    with tarfile.open(fileobj=io.BytesIO(s3.ask("GET", f"/bucket/{name}"))) as tar:
        tar.extractall(local.parent / "unpacked", filter="data")
    uploaded, expected = (
        {p.relative_to(local.parent / top).as_posix(): p.read_bytes() for p in sorted(files)}
        for top, files in (
            ("unpacked", (local.parent / "unpacked").rglob("*.safetensors")),
            ("out", (local.parent / "out").rglob("*.safetensors")),
        )
    )
    assert uploaded == expected and len(uploaded) == 5
    code, _, err = capvid("extract", VIDEOS, *options, "-o", "s3://bucket/features")
    assert (code, err) == (0, "0 extracted, 6 skipped (already done)\n")


def test_denied_requests_print_one_error_line(
    capvid: Run, toy: Toy, s3: FlakyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    s3.every = 0
    options = ["--model", toy.model, "--output-dir"]

    def one_line(*arguments: object) -> str:
        start = time.monotonic()
        code, out, err = capvid(*arguments)
        assert (code, out, err.count("\n")) == (1, "", 1), err
        assert time.monotonic() - start < 8
        return err

    message = one_line("caption", VIDEOS, *options, "s3://no-bucket/x")
    assert message.startswith("error: s3://no-bucket/x/capvid-shards.json: cannot be written (")
    code, _, err = capvid("caption", "s3://bucket/nothing/", *options, "s3://bucket/other")
    assert (code, err.splitlines()[0]) == (1, "error: s3://bucket/nothing/: there is nothing at this address")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    clear_credential_cache()
    message = one_line("caption", VIDEOS, *options, "s3://bucket/captions")
    assert "s3://bucket/captions: cannot be listed (" in message and "credentials" in message
    message = one_line("caption", f"{VIDEOS}/0.mp4", "--model", toy.model)
    assert message.startswith(f"error: {VIDEOS}/0.mp4: cannot be read (Forbidden); see the address")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    clear_credential_cache()
    assert "Unable to locate credentials" in one_line("caption", VIDEOS, *options, "s3://bucket/captions")


def test_unreachable_server_is_an_error(
    capvid: Run, toy: Toy, s3: FlakyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    clear_credential_cache()
    start = time.monotonic()
    code, out, err = capvid("extract", VIDEOS, "--backbone", "colour-grid", "-o", "s3://bucket/features")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: s3://bucket/features: cannot be listed (Could not connect")
    code, out, err = capvid("extract", VIDEOS, "--backbone", "colour-grid", "-o", "features-of-nothing")
    assert (code, out) == (1, "")
    assert time.monotonic() - start < 10
