"""A failing input does not affect the captions of the others."""

from __future__ import annotations

import csv
import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import misbehaving
import numpy as np
import pytest
import torch
from odd_files import make_broken_files
from pyarrow import parquet
from safetensors.numpy import load_file, save_file
from toy import Run, capvid, save_toy_captioner, write_images, write_video

from capvid import pipeline
from capvid.backbones.backbone import Backbone
from capvid.cli.app import main
from capvid.decoding import caption_generator
from capvid.errors import RemoteError, RunError, input_error
from capvid.features import extraction, feature_file, prefetch
from capvid.output import manifest, report, shards, writers
from capvid.output.shards import JsonLines
from capvid.pipeline import CaptionPipeline
from capvid.utils.files import MANIFEST
from capvid.video.segmentation import EqualSegments

__all__ = ["capvid"]

Patch = pytest.MonkeyPatch
SLOW = pytest.mark.slow
GOOD, BAD = 10, 36
WHITE = 250  # mean brightness above which frames belong to the bad clip
BAD_FRAMES = 2  # frames of the bad clip; the others have at least four


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a captioner with random weights on a backbone without a network."""
    folder = tmp_path_factory.mktemp("model")
    save_toy_captioner(folder, backbone="colour-grid")
    return folder


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three clips, of which the tests let ``bad`` fail."""
    folder = tmp_path_factory.mktemp("clips")
    write_video(folder / "a.mp4", seed=1)
    write_images(folder / "bad.mp4", [np.full((48, 64, 3), 255, np.uint8)] * BAD_FRAMES)
    write_video(folder / "c.mp4", seed=2)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path, clips: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the records of an undisturbed run, by option and clip name."""
    records = {}
    for option in ("", "--segments=2"):
        out = tmp_path_factory.mktemp("expected") / "out.jsonl"
        assert (
            main(["caption", str(clips), "--model", str(model), "-o", str(out), *filter(None, [option])]) == 0
        )
        records[option] = index_by_name(out.read_text())
    return records


def index_by_name(text: str) -> dict[str, Any]:
    """Parse JSON Lines records; map each clip name to its record."""
    records = [json.loads(line) for line in text.splitlines()]
    return {Path(record["video"]).stem: record for record in records}


def failing(function: Callable[..., Any], is_bad: Callable[..., bool]) -> Callable[..., Any]:
    """Return the function, modified to raise if ``is_bad`` holds for its arguments."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if is_bad(*args, **kwargs):
            raise ValueError("boom")
        return function(*args, **kwargs)

    return replacement


def is_bad_path(*args: Any, **kwargs: Any) -> bool:
    """Whether an argument is the bad clip, its features, or a successful result of either."""
    values = [*args, *kwargs.values()]
    failed = any(getattr(value, "status", "ok") != "ok" for value in values)
    return not failed and any("bad" in str(getattr(value, "path", value))[-20:] for value in values)


def is_bad_mask(
    captioner: object, features: torch.Tensor, mask: torch.Tensor, *arguments: Any, **options: Any
) -> bool:
    return bool((mask.sum(1) == BAD_FRAMES).any())


def is_bad_batch(backbone: Backbone, crops: np.ndarray, together: int) -> bool:
    return bool((crops.reshape(len(crops), -1).mean(1) > WHITE).any())


STAGES: dict[str, tuple[object, str, Callable[..., bool]]] = {
    "crops": (extraction._Stream, "put", lambda self, crops: is_bad_batch(self.backbone, crops, 0)),
    "backbone": (Backbone, "_run", is_bad_batch),
    "features": (extraction, "Features", lambda **metadata: metadata["video"] == "bad"),
    "segments": (feature_file.Features, "concatenated", lambda self: self.video == "bad"),
    "search": (caption_generator, "decode", is_bad_mask),
    "rescoring": (caption_generator, "rescore", is_bad_mask),
    "result": (CaptionPipeline, "_result", is_bad_path),
    "record": (writers, "make_record", is_bad_path),
}

DEFAULT_STAGES = ("crops", "backbone", "search", "record")


def check_only_bad_failed(
    run: tuple[int, str, str], records: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Check that only the bad clip failed, with an internal error, and the others match ``expected``."""
    code, _, stderr = run
    assert code == 3, stderr
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "bad.mp4: internal error: ValueError: boom; please report" in errors[0]
    assert "Traceback" not in stderr
    assert {name: records[name] for name in ("a", "c")} == {name: expected[name] for name in ("a", "c")}
    if "bad" in records:
        assert (records["bad"]["status"], records["bad"]["error"]["kind"]) == ("error", "internal")
        assert records["bad"]["captions"] == [] and records["bad"]["video"].endswith("bad.mp4")


@pytest.mark.parametrize(
    "stage",
    [name if name in DEFAULT_STAGES else pytest.param(name, marks=pytest.mark.slow) for name in STAGES],
)
def test_failure_in_each_stage(
    stage: str, model: Path, clips: Path, expected: dict[str, Any], capvid: Run, monkeypatch: Patch
) -> None:
    owner, name, is_bad = STAGES[stage]
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), is_bad))
    run = capvid("caption", clips, "--workers", 1, "--model", model, "--format", "jsonl")
    records = index_by_name(run[1])
    assert len(records) == 3
    check_only_bad_failed(run, records, expected[""])


def test_exception_in_a_worker(
    model: Path, clips: Path, expected: dict[str, Any], capvid: Run, monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prefetch, "decode_video", misbehaving.decode)
    (tmp_path / "raises.mp4").symlink_to(clips / "bad.mp4")
    inputs = [clips / "a.mp4", tmp_path / "raises.mp4", clips / "c.mp4"]
    code, out, stderr = capvid(
        "caption", *inputs, "--workers", 1, "--model", model, "--format", "jsonl", "--debug"
    )
    assert code == 3
    assert "raises.mp4: internal error: ValueError: boom; please report; --debug" in stderr
    assert 'misbehaving.py", line' in stderr and 'raise ValueError("boom")\nValueError: boom\n' in stderr
    assert {name: index_by_name(out)[name] for name in "ac"} == {name: expected[""][name] for name in "ac"}


@pytest.mark.parametrize("step", ["choose", "spans"])
def test_failure_in_segmentation(
    step: str, model: Path, clips: Path, expected: dict[str, Any], capvid: Run, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(EqualSegments, step, failing(getattr(EqualSegments, step), is_bad_path))
    run = capvid("caption", clips, "--workers", 1, "--model", model, "--format", "jsonl", "--segments", 2)
    check_only_bad_failed(run, index_by_name(run[1]), expected["--segments=2"])


def test_failures_in_a_single_output_file(
    model: Path, clips: Path, expected: dict[str, Any], capvid: Run, monkeypatch: Patch, tmp_path: Path
) -> None:
    """The first input fails after the file was started; a failure in the report is also in the file."""
    monkeypatch.setattr(
        report, "_article", failing(report._article, lambda _, result, record: is_bad_path(result))
    )
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    inputs = [clips / "bad.mp4", clips / "a.mp4", clips / "c.mp4"]
    run = capvid("caption", *inputs, "--workers", 1, "--model", model, "-o", out, "--report", page)
    records = json.loads(out.read_text())
    assert [record["status"] for record in records] == ["error", "ok", "ok"]
    check_only_bad_failed(run, index_by_name("\n".join(map(json.dumps, records))), expected[""])
    assert "2 captioned, 1 failed" in page.read_text()
    assert page.read_text().count('<article class="video') == 3


@pytest.mark.slow
@pytest.mark.parametrize("step", ["manifest", "file"])
def test_failures_with_one_output_file_per_video(
    step: str,
    model: Path,
    clips: Path,
    expected: dict[str, Any],
    capvid: Run,
    monkeypatch: Patch,
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    if step == "manifest":
        monkeypatch.setattr(manifest.Manifest, "note", failing(manifest.Manifest.note, is_bad_path))
    else:
        monkeypatch.setattr(writers, "make_record", failing(writers.make_record, is_bad_path))
    run = capvid("caption", clips, "--workers", 1, "--model", model, "--format", "json", "--output-dir", out)
    check_only_bad_failed(
        run, {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}, expected[""]
    )
    lines = [json.loads(line) for line in (out / MANIFEST).read_text().splitlines()]
    assert {line["output"]: line["status"] for line in lines} == {
        "a.json": "ok",
        "bad.json": "error",
        "c.json": "ok",
    }
    monkeypatch.undo()
    code, _, stderr = capvid(
        "caption", clips, "--workers", 1, "--model", model, "--format", "json", "--output-dir", out
    )
    assert (code, stderr) == (0, "1 captioned, 2 skipped (already done)\n")


def test_unwritable_output_file(model: Path, clips: Path, capvid: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").mkdir()
    code, _, stderr = capvid("caption", clips, "--workers", 1, "--model", model, "--output-dir", tmp_path)
    assert code == 3
    assert f"bad.mp4: its output cannot be written to {tmp_path} (Is a directory)\n" in stderr
    assert (tmp_path / "a.txt").is_file() and (tmp_path / "c.txt").is_file()


@pytest.mark.parametrize("form", ["txt", "json"])
def test_full_disk_stops_the_run(
    form: str, model: Path, clips: Path, capvid: Run, monkeypatch: Patch, tmp_path: Path
) -> None:
    def fail(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("capvid.output.manifest.atomic_write_text", fail)
    code, _, stderr = capvid(
        "caption", clips, "--workers", 1, "--model", model, "--format", form, "--output-dir", tmp_path
    )
    assert (code, stderr) == (1, f"error: {tmp_path}: No space left on device\n")


@pytest.mark.parametrize("step", ["record", "encoding"])
def test_failures_in_shards(
    step: str,
    model: Path,
    clips: Path,
    expected: dict[str, Any],
    capvid: Run,
    monkeypatch: Patch,
    tmp_path: Path,
) -> None:
    if step == "record":
        monkeypatch.setattr(shards, "make_record", failing(shards.make_record, is_bad_path))
    else:
        bad = lambda self, shard_rows: any("bad" in row.video and not row.error for row in shard_rows)  # noqa: E731
        monkeypatch.setattr(JsonLines, "encode", failing(JsonLines.encode, bad))
    run = capvid(
        "caption", clips, "--workers", 1, "--model", model, "--output-dir", tmp_path, "--videos-per-file", 8
    )
    (shard,) = tmp_path.glob("captions-*.jsonl")
    records = index_by_name(shard.read_text())
    assert len(records) == 3
    for name in "ac":
        records[name]["settings"].pop("attention", None)
    check_only_bad_failed(run, records, expected[""])


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_failures_in_extraction(
    sharded: bool, clips: Path, capvid: Run, monkeypatch: Patch, tmp_path: Path
) -> None:
    options = ["extract", clips, "--backbone", "colour-grid", "--frames", 4, "--workers", 1]
    options += ["--videos-per-file", 1] if sharded else []
    assert capvid(*options, "-o", tmp_path / "expected")[0] == 0
    bad = lambda features, **kwargs: features.video == "bad"  # noqa: E731
    for module in (feature_file, shards):
        monkeypatch.setattr(module, "features_to_bytes", failing(feature_file.features_to_bytes, bad))
    code, _, stderr = capvid(*options, "-o", tmp_path / "actual", "--debug")
    assert code == 3
    assert "bad.mp4: internal error: ValueError: boom; please report" in stderr
    assert 'raise ValueError("boom")' in stderr
    assert stderr.endswith("2 extracted, 1 failed\n")
    kind = "*.tar" if sharded else "*.safetensors"
    expected, actual = (
        {p.name: p.read_bytes() for p in (tmp_path / folder).glob(kind)} for folder in ("expected", "actual")
    )
    assert sum(expected.get(name) == content for name, content in actual.items()) == 2
    assert len(actual) == (3 if sharded else 2)


@pytest.mark.slow
def test_failures_in_feature_files(
    clips: Path, model: Path, capvid: Run, monkeypatch: Patch, tmp_path: Path
) -> None:
    extract = ["extract", clips, "--backbone", "colour-grid", "--frames", 4, "--workers", 1]
    assert capvid(*extract, "-o", tmp_path)[0] == 0
    inputs = [*sorted(tmp_path.glob("*.safetensors")), clips / "a.mp4"]
    arguments = ["caption", *inputs, "--workers", 1, "--model", model, "--format", "csv"]
    _, undisturbed, _ = capvid(*arguments)
    for owner, name in ((pipeline, "load_features"), (feature_file.FeatureHeader, "require_match")):
        calls = iter([False, True] + 10 * [False])  # the second input fails
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(getattr(owner, name), lambda *_, calls=calls: next(calls)))
            code, out, stderr = capvid(*arguments)
        assert code == 3
        assert "bad.safetensors: internal error: ValueError: boom" in stderr
        lines = [line for line in out.splitlines() if ",error," not in line]
        assert lines == [line for line in undisturbed.splitlines() if "bad.saf" not in line]


def test_features_without_duration_give_no_subtitles(
    clips: Path, model: Path, capvid: Run, tmp_path: Path
) -> None:
    features = tmp_path / "features"
    extract = ["extract", clips, "--backbone", "colour-grid", "--frames", 4, "--workers", 1]
    assert capvid(*extract, "-o", features)[0] == 0
    from safetensors import safe_open

    with safe_open(features / "bad.safetensors", "np") as opened:
        metadata = opened.metadata()
    header = json.loads(metadata[feature_file.HEADER_KEY])
    header.pop("duration")
    tensors = {
        name: array for name, array in load_file(features / "bad.safetensors").items() if name != "times"
    }
    save_file(tensors, features / "bad.safetensors", {feature_file.HEADER_KEY: json.dumps(header)})
    inputs = sorted(features.glob("*.safetensors"))
    out = tmp_path / "out"
    code, _, stderr = capvid(
        "caption", *inputs, "--workers", 1, "--model", model, "--format", "srt", "--output-dir", out
    )
    assert code == 3
    assert "bad.safetensors: subtitles need times" in stderr and "2 captioned, 1 failed" in stderr
    assert {path.name for path in out.glob("*.srt")} == {"a.srt", "c.srt"}


def test_out_of_device_memory_stops_the_run(
    model: Path, clips: Path, capvid: Run, monkeypatch: Patch
) -> None:
    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("capvid.decoding.caption_generator.decode", fail)
    code, out, stderr = capvid("caption", clips, "--model", model)
    assert (code, out) == (1, "")
    problem = "error: cpu has too little memory to caption one video"
    assert stderr == f"{problem}; use fewer --max-frames, or --device cpu\n"


def test_input_error_classifies_exceptions() -> None:
    for cause in (BrokenPipeError(32, "x"), OSError(28, "full"), OSError(30, "read-only"), RunError("x")):
        with pytest.raises(type(cause)):
            input_error("v.mp4", cause)
    for memory in (MemoryError(), RemoteError.of(MemoryError("x"))):
        assert str(input_error("v.mp4", memory)).startswith("v.mp4: too little memory")
    error = input_error("v.mp4", KeyError("x"))
    assert error.kind == "internal"
    assert str(error).startswith("v.mp4: internal error: KeyError: 'x'; please report")


def test_deleted_working_directory(model: Path, capvid: Run, monkeypatch: Patch, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    for command in (
        ["caption", "v.mp4", "--model", model],
        ["extract", "v.mp4", "--backbone", "x", "-o", "y"],
    ):
        code, out, stderr = capvid(*command)
        assert (code, out) == (1, "")
        assert stderr == (
            "error: the working directory cannot be used (No such file or directory); change to another one\n"
        )


def make_bad_inputs(folder: Path) -> list[Path]:
    """Write inputs that cannot be captioned with ``misbehaving.decode``; return the feature files."""
    make_broken_files(folder)
    (folder / "loop.mp4").symlink_to("loop.mp4")
    (folder / "to nowhere.mp4").symlink_to("nowhere.mp4")
    os.mkfifo(folder / "pipe.mp4")
    with socket.socket(socket.AF_UNIX) as listener, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # the path of a socket must be short
        listener.bind("socket.mp4")
    for name in (os.fsdecode(b"caf\xe9.mp4"), "new\nline.mp4"):
        (folder / name).write_text("not a video\n" * 50)
    for name in ("raises.mp4", "runs out of memory.mp4", "killed.mp4"):
        write_video(folder / name, seed=1, frames=4)
    header = {
        "streams": [],
        "sampling": "uniform:4",
        "reader": None,
        "dtype": "float16",
        "capvid_version": "0",
    }
    array = {"stream0": np.zeros((4, 8), np.float16)}
    (folder / "empty.safetensors").touch()
    (folder / "text.safetensors").write_text("not features\n" * 50)
    (folder / "giant.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    save_file(array, folder / "no header.safetensors")
    save_file(array, folder / "list.safetensors", {feature_file.HEADER_KEY: "[1]"})
    save_file(array, folder / "other.safetensors", {feature_file.HEADER_KEY: json.dumps(header)})
    stream = {"backbone": "toy", "layer": "embedding", "width": 8}
    for name, value in (("duration.safetensors", "abc"), ("long.safetensors", 1e308)):
        metadata = {**header, "format_version": 1, "streams": [stream], "duration": value}
        save_file(array, folder / name, {feature_file.HEADER_KEY: json.dumps(metadata)})
    os.mkfifo(folder / "pipe.safetensors")
    size = struct.pack("<2H", 16000, 16000)
    image = b"," + bytes(4) + size + b"\0" + bytes([2, 2, 0x4C, 1, 0])
    (folder / "bomb.gif").write_bytes(b"GIF89a" + size + b"\xf0\0\0" + bytes(6) + image * 2 + b";")
    session = b"G\nv=0\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n".ljust(188) + b"G\n" * 9
    (folder / "session.ts").write_bytes(session)
    with (folder / "sparse index.mp4").open("wb") as sparse:
        sparse.write(struct.pack(">I4sIII", 20, b"ftyp", 0, 0, 0))
        sparse.write(struct.pack(">I4sQ", 1, b"moov", 40 << 30))
        sparse.truncate((40 << 30) + 20)
    return sorted(folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Write bad inputs among ten good clips; return the folder and its feature files."""
    folder = tmp_path_factory.mktemp("mixed")
    features = make_bad_inputs(folder)
    assert len(list(folder.iterdir())) == BAD
    for number in range(GOOD):
        write_video(folder / f"good {number}.mp4", seed=number, frames=4 + number)
    return folder, features


@pytest.mark.skipif(os.name != "posix", reason="needs FIFOs, sockets and symlinks")
@pytest.mark.parametrize(
    "form",
    [
        "txt",
        "shards",
        *(pytest.param(form, marks=SLOW) for form in ("json", "csv", "srt", "parquet")),
    ],
)
def test_many_bad_inputs_among_good_clips(
    form: str, mixed: tuple[Path, list[Path]], model: Path, capvid: Run, monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prefetch, "decode_video", misbehaving.decode)
    folder, features = mixed
    options: list[object] = ["--format", form]
    if form in ("srt", "parquet"):
        options += ["--output-dir", tmp_path]
    if form == "shards":
        options = ["--output-dir", tmp_path, "--videos-per-file", 7]
    code, out, stderr = capvid("caption", folder, *features, "--workers", 1, "--model", model, *options)
    assert code == 3
    lines = stderr.splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == BAD, stderr
    assert lines[-1] == f"{GOOD} captioned, {BAD} failed"
    assert len(lines) == BAD + 1, stderr

    records = None
    if form == "txt":
        captions = [line.partition("\t")[0] for line in out.splitlines() if "\t\terror: " not in line]
        assert out.count("\t\terror: ") == BAD
    elif form == "csv":
        rows = list(csv.DictReader(out.splitlines()))
        captions = [row["video"] for row in rows if row["status"] == "ok"]
        assert len([row for row in rows if row["error"]]) == BAD
    elif form == "srt":
        captions = [path.name for path in tmp_path.glob("*.srt")]
        assert all(path.read_text().startswith("1\n00:00:00,000 --> ") for path in tmp_path.glob("*.srt"))
    elif form == "json":
        records = json.loads(out)
    elif form == "shards":
        records = [json.loads(line) for path in tmp_path.glob("captions-*.jsonl") for line in path.open()]
    else:
        records = [r for path in tmp_path.glob("*.parquet") for r in parquet.read_table(path).to_pylist()]
    if records is not None:
        captions = [record["video"] for record in records if record["status"] == "ok"]
        failed = [record for record in records if record["status"] == "error"]
        assert len(failed) == BAD and all(record["error"]["message"] for record in failed)
    assert sorted(Path(name).stem for name in captions) == [f"good {number}" for number in range(GOOD)]
