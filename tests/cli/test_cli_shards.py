"""Sharded runs on one machine: shard formats, splitting the inputs, and resuming."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from shard_records import index_by_video, read_jsonl_shards
from toy import Run, Toy

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

FEATURES = ["--backbone", "colour-grid", "--frames", 2, "--workers", 1]


@pytest.fixture(scope="module")
def folder(video_files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write five videos, two of the same name in different folders, and a broken file."""
    inputs = tmp_path_factory.mktemp("inputs")
    for number, name in enumerate(("a/v.mp4", "b/v.mp4", "it's é.mp4", "x.y.mp4", "z.mp4")):
        (inputs / name).parent.mkdir(exist_ok=True)
        shutil.copy(video_files[number], inputs / name)
    (inputs / "broken.mp4").write_bytes(b"plain text, long enough for its format to be probed" * 9)
    return inputs


@pytest.fixture(scope="module")
def records(folder: Path, toy_files: Toy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Map each video to its record from a run without shards."""
    from capvid.cli.app import main

    out = tmp_path_factory.mktemp("plain") / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAPVID_MODELS", str(toy_files.models))
        patch.setenv("CAPVID_WEIGHTS", str(toy_files.weights))
        assert main(["caption", str(folder), "--model", str(toy_files.model), "-o", str(out)]) == 3
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 6
    return {record["video"]: record for record in rows}


def parquet_records(out: Path) -> list[dict[str, Any]]:
    """Return the records of all Parquet shards."""
    loaded = [row for path in sorted(out.glob("*.parquet")) for row in parquet.read_table(path).to_pylist()]
    return [{**row, "settings": json.loads(row["settings"])} if "settings" in row else row for row in loaded]


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def tar_members(out: Path) -> dict[str, bytes]:
    """Return the contents of all tar members by name."""
    contents: dict[str, bytes] = {}
    for path in sorted(out.glob("features-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                assert member.name not in contents
                file = tar.extractfile(member)
                contents[member.name] = file.read() if file else b""
    return contents


def test_jsonl_shards_and_their_reuse(
    capvid: Run, toy: Toy, folder: Path, records: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ["caption", folder, "--model", toy.model, "--output-dir", out, "--videos-per-file", 2]
    code, stdout, err = capvid(*command)
    assert (code, stdout, err.count("\n")) == (3, "", 2)
    assert err.splitlines()[-1] == "5 captioned, 1 failed"
    assert [len(path.read_bytes().splitlines()) for path in sorted(out.glob("*.jsonl"))] == [2, 2, 2]
    assert index_by_video(read_jsonl_shards(out)) == records
    files = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()}
    assert capvid(*command) == (0, "", "0 captioned, 6 skipped (already done)\n")
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()} == files
    code, _, err = capvid(*command, "--retry-failed")
    assert (code, err.splitlines()[-1]) == (3, "0 captioned, 5 skipped (already done), 1 failed")
    assert index_by_video(read_jsonl_shards(out)) == records
    code, _, err = capvid(*command, "--beam", 2)
    assert (code, err) == (
        2,
        f"error: {out}: holds shards that were made otherwise (settings); choose another folder, or "
        "--overwrite\n",
    )
    code, _, err = capvid(*command[:-1], 100, "--beam", 2, "--overwrite")
    assert (code, err.splitlines()[-1]) == (3, "5 captioned, 1 failed")
    assert len(list(out.glob("*.jsonl"))) == 1
    assert {record["settings"]["beam_size"] for record in read_jsonl_shards(out)} == {2}


@pytest.mark.slow
def test_parquet_shards_from_lists_of_videos(
    capvid: Run, toy: Toy, folder: Path, records: dict[str, Any], tmp_path: Path
) -> None:
    videos = [*records, next(iter(records))]  # one is listed twice
    with (tmp_path / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "clip"], *([n, video] for n, video in enumerate(videos))])
    parquet.write_table(pa.table({"clip": videos}), tmp_path / "list.parquet")
    (tmp_path / "list.txt").write_text("".join(f"{video}\n" for video in videos))
    command = ["caption", "--model", toy.model, "--format", "parquet", "--output-dir", tmp_path / "out"]
    code, _, err = capvid(*command, "--from-file", tmp_path / "list.csv", "--column", "clip")
    assert (code, err.splitlines()[-1]) == (3, "5 captioned, 1 failed")
    expected = {video: without_nulls(record) for video, record in records.items()}
    assert {
        video: without_nulls(row) for video, row in index_by_video(parquet_records(tmp_path / "out")).items()
    } == expected
    for name, more in (("list.parquet", ["--column", "clip"]), ("list.txt", [])):
        code, _, err = capvid(*command, "--from-file", tmp_path / name, *more)
        assert (code, err) == (0, "0 captioned, 6 skipped (already done)\n")
    code, _, err = capvid(*command, "--from-file", tmp_path / "list.csv")
    assert (code, err.count("\n")) == (2, 1) and "no column named video, path, url" in err


@pytest.mark.slow
def test_input_shards_in_one_folder_cover_all_videos(
    capvid: Run, toy: Toy, folder: Path, records: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ["caption", folder, "--model", toy.model, "--output-dir", out, "--videos-per-file", 2]
    sizes = []
    for number in (2, 1, 3):
        before = len(read_jsonl_shards(out))
        assert capvid(*command, "--shard", f"{number}/3")[0] in (0, 1, 3)  # 1 if all its videos are broken
        sizes.append(len(read_jsonl_shards(out)) - before)
        assert capvid(*command, "--shard", f"{number}/3")[0] == 0
    assert sum(sizes) == 6  # a video's shard depends on its path, and so on tmp_path
    assert index_by_video(read_jsonl_shards(out)) == records
    assert capvid(*command) == (0, "", "0 captioned, 6 skipped (already done)\n")
    code, _, err = capvid(*command, "--shard", "1/3", "--overwrite")
    assert (code, err.count("\n")) == (2, 1) and "--overwrite would remove the shards of all parts" in err
    assert index_by_video(read_jsonl_shards(out)) == records


@pytest.mark.slow
def test_input_shards_with_one_file_per_video(
    capvid: Run, toy: Toy, folder: Path, records: dict[str, Any], tmp_path: Path
) -> None:
    command = ["caption", folder, "--model", toy.model, "--format", "json"]
    for number in (1, 2):
        assert capvid(*command, "--output-dir", tmp_path / "out", "--shard", f"{number}/2")[0] in (0, 1, 3)
    loaded = [json.loads(path.read_bytes()) for path in (tmp_path / "out").rglob("*.json")]
    assert index_by_video(loaded) == records


@pytest.mark.slow
def test_feature_shards_hold_the_same_files_as_extract(capvid: Run, folder: Path, tmp_path: Path) -> None:
    command = ["extract", folder, *FEATURES, "-o"]
    assert capvid(*command, tmp_path / "plain")[0] == 3
    plain = {
        path.relative_to(tmp_path / "plain").as_posix(): path.read_bytes()
        for path in (tmp_path / "plain").rglob("*.safetensors")
    }
    for number in (1, 2, 3):
        code, _, _ = capvid(*command, tmp_path / "tar", "--shard", f"{number}/3", "--videos-per-file", 2)
        assert code in (0, 1, 3)
        assert capvid(*command, tmp_path / "parts", "--shard", f"{number}/3")[0] in (0, 1, 3)
    assert {
        path.relative_to(tmp_path / "parts").as_posix(): path.read_bytes()
        for path in (tmp_path / "parts").rglob("*.safetensors")
    } == plain
    members_by_name = tar_members(tmp_path / "tar")
    assert len([name for name in members_by_name if name.endswith(".json")]) == 6
    feature_members = {name: data for name, data in members_by_name.items() if name.endswith(".safetensors")}
    assert set(feature_members) == {
        name.replace("x.y", "x_y") for name in plain
    }  # WebDataset loaders cut names at the first dot
    assert {name: data for name, data in feature_members.items() if "x_y" not in name} == {
        name: data for name, data in plain.items() if "x.y" not in name
    }
    code, _, err = capvid(*command, tmp_path / "tar", "--format", "webdataset")
    assert (code, err) == (0, "0 extracted, 6 skipped (already done)\n")


@pytest.mark.slow
def test_feature_values_in_parquet(capvid: Run, folder: Path, tmp_path: Path) -> None:
    import numpy as np

    from capvid.features.feature_file import load_features

    video = folder / "z.mp4"
    assert capvid("extract", video, *FEATURES, "-o", tmp_path)[0] == 0
    out = f"file://{tmp_path}/with%20blank"
    assert capvid("extract", video, *FEATURES, "-o", out, "--format", "parquet") == (0, "", "1 extracted\n")
    (row,) = parquet_records(tmp_path / "with blank")
    features = load_features(tmp_path / "z.safetensors")
    values = np.array(row["streams"][0]["values"], np.float32).reshape(row["streams"][0]["shape"])
    np.testing.assert_array_equal(values, features.streams[0])
    assert (row["video"], row["times"]) == (str(video), list(features.times))


@pytest.mark.slow
def test_archive_members_and_file_urls(
    capvid: Run, toy: Toy, folder: Path, records: dict[str, Any], tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "in.tar", "w") as tar:
        for name in ("a/v.mp4", "broken.mp4", "z.mp4"):
            tar.add(folder / name, name)
    command = ["caption", tmp_path / "in.tar", "--model", toy.model, "--output-dir", tmp_path / "out"]
    code, _, err = capvid(*command, "--videos-per-file", 100)
    assert code == 3
    assert err.splitlines()[0].startswith(f"error: {tmp_path / 'in.tar'}/broken.mp4: ")
    assert "/proc/" not in err
    archive_records = index_by_video(read_jsonl_shards(tmp_path / "out"))
    assert list(archive_records) == [
        f"{tmp_path / 'in.tar'}/{name}" for name in ("a/v.mp4", "broken.mp4", "z.mp4")
    ]
    for video, record in archive_records.items():
        expected = records[video.replace(str(tmp_path / "in.tar"), str(folder))]
        assert (record["captions"], record["duration"]) == (expected["captions"], expected["duration"])
    text = records[str(folder / "z.mp4")]["captions"][0]["text"]
    assert capvid("caption", f"file://{folder}/z.mp4", "--model", toy.model) == (0, f"{text}\n", "")


@pytest.mark.slow
def test_undecodable_names_in_shards(capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path) -> None:
    videos = tmp_path / "videos"
    videos.mkdir()
    for name in (b"good \xff.mp4", b"good \xfe.mp4"):
        shutil.copy(video_files[0], os.fsencode(videos) + b"/" + name)
    (videos / os.fsdecode(b"bad \xff.mp4")).write_bytes(b"not a video " * 99)
    for form in ("jsonl", "parquet"):
        command = ["caption", videos, "--model", toy.model, "--output-dir", tmp_path / form, "--format", form]
        code, _, err = capvid(*command, "--videos-per-file", 10)
        assert (code, err.splitlines()[-1]) == (3, "2 captioned, 1 failed")
        loaded = read_jsonl_shards(tmp_path / form) if form == "jsonl" else parquet_records(tmp_path / form)
        expected = [f"{videos}/{name}.mp4" for name in ("bad \\xff", "good \\xfe", "good \\xff")]
        assert sorted(record["video"] for record in loaded) == expected
        assert capvid(*command, "--videos-per-file", 10)[2] == "0 captioned, 3 skipped (already done)\n"
    code, _, err = capvid("extract", videos, *FEATURES, "-o", tmp_path / "f", "--format", "webdataset")
    assert (code, err.splitlines()[-1]) == (3, "2 extracted, 1 failed")


def test_fail_fast_with_shards(capvid: Run, folder: Path, tmp_path: Path) -> None:
    command = ["extract", folder / "broken.mp4", folder / "z.mp4", *FEATURES, "-o", tmp_path]
    command += ["--format", "webdataset", "--fail-fast"]
    code, _, err = capvid(*command)
    assert (code, err.splitlines()[-1]) == (1, "0 extracted, 1 failed")
    assert list(tar_members(tmp_path)) == ["broken.json"]
    assert capvid(*command)[2] == "1 extracted, 1 skipped (already done)\n"
    code, _, err = capvid(
        "extract", "memory://nothing/*.mp4", folder, *FEATURES, "-o", tmp_path, "--fail-fast"
    )
    assert (code, err.count("\n")) == (1, 1) and "no video matches it" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ray-address", "auto"], "--ray-address is for --engine ray"),
        (["--format", "srt", "--videos-per-file", 2], "there are no shards of srt"),
        (["--format", "parquet", "-o", "x.parquet"], "shards need a folder or an address"),
        (["--retry-failed"], "shards need a folder or an address"),
        (["--videos-per-file", 2, "--output-dir", "d", "--report", "r.html"], "shards take neither -o nor"),
        (["--output-dir", "d", "-o", "x"], "-o, --output-dir and --sidecar exclude each other"),
        (["--shard", "0/3"], "--shard 0/3: there is no such part; give one of 1/3 to 3/3"),
        (["--shard", "1/0"], "--shard 1/0: not understood; write it as 2/8"),
        (["--shard", "4/3"], "--shard 4/3: there is no such part"),
        (["--shard", "x"], "--shard x: not understood; write it as 2/8"),
        (["--shard", "1/"], "--shard 1/: not understood"),
        (["--shard", "-1/2"], "--shard -1/2: not understood"),
        (["--column", "video"], "--column is for --from-file"),
        (["--output-dir", "nonsense://x/y"], "nonsense:// is no address that can be read"),
    ],
)
def test_conflicting_shard_options(
    capvid: Run,
    toy: Toy,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[object],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    output_options = (
        [] if {"--output-dir", "-o", "--retry-failed"} & set(map(str, options)) else ["--output-dir", "out"]
    )
    code, out, err = capvid("caption", folder, "--model", toy.model, *options, *output_options)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_ray_engine_without_ray_installed(
    capvid: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *arguments: None if name == "ray" else find_spec(name, *arguments),
    )
    command = ["extract", folder, "--backbone", "colour-grid", "-o", tmp_path / "out", "--engine", "ray"]
    assert capvid(*command) == (2, "", "error: --engine ray needs Ray Data; pip install 'capvid[ray]'\n")
    monkeypatch.undo()
    code, _, err = capvid(*command, "--workers", 2)
    assert (code, err) == (
        2,
        "error: --workers is for --engine local; leave it out: Ray shares out the cores\n",
    )
    assert (
        capvid(*command, "--device", "mps")[2]
        == "error: --device mps with --engine ray; use auto, cpu or cuda\n"
    )
    assert not (tmp_path / "out").exists()


PROGRAM_WITHOUT_OPTIONAL_LIBRARIES = """
import sys

for name in ("ray", "pyarrow", "s3fs", "gcsfs", "aiohttp"):
    sys.modules[name] = None  # as if it were not installed
import pkgutil, importlib
import capvid
from capvid.cli.app import main

for module in pkgutil.walk_packages(capvid.__path__, "capvid."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
inputs, out, listed = sys.argv[1:]
how = ["--backbone", "colour-grid", "--frames", "2", "--workers", "1", "-o", out]
codes = [
    main(["extract", inputs, *how]),
    main(["extract", inputs, *how, "--format", "webdataset"]),
    main(["extract", inputs, *how, "--format", "parquet"]),
    main(["extract", "s3://bucket/videos", *how]),
    main(["extract", "--from-file", listed, *how]),
]
print(codes)
"""


@pytest.mark.slow
def test_optional_libraries_are_needed_only_by_their_features(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "list.parquet").touch()
    arguments = [folder / "z.mp4", tmp_path / "out", tmp_path / "list.parquet"]
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM_WITHOUT_OPTIONAL_LIBRARIES, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert completed.stdout == "[0, 0, 2, 2, 2]\n", completed.stderr
    error_lines = [line for line in completed.stderr.splitlines() if "pip install" in line]
    extras = [line.rpartition("; pip install ")[2] for line in error_lines]
    assert extras == ["'capvid[parquet]'", "'capvid[remote]'", "'capvid[parquet]'"]
    assert [line.split(" needs ")[0] for line in error_lines] == [
        "error: Parquet",
        "error: s3://",
        "error: Parquet",
    ]
