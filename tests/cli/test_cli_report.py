"""``capvid caption`` with ``--report`` and ``--attention``."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import signal_at
from toy import Run, Toy, write_video

from capvid.pipeline import load
from capvid.utils.files import MANIFEST

DATA = re.compile(r'<script type="application/json">(.*?)</script>')


def report_videos(page: Path) -> list[dict[str, Any]]:
    """Return the embedded data of the videos on a report page."""
    return [json.loads(text) for text in DATA.findall(page.read_text(encoding="utf-8"))]


def report_captions(page: Path) -> list[str]:
    return [video["segments"][0]["captions"][0]["text"] for video in report_videos(page)]


def test_report_contains_captions_frames_and_attention(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path
) -> None:
    page = tmp_path / "p.html"
    command = ["caption", *video_files, tmp_path / "no.mp4", "--model", toy.model]
    expected = capvid(*command)
    assert capvid(*command, "--report", page) == expected
    results = list(load(toy.model, attention=True, thumbnails=True).stream(video_files))
    assert report_captions(page) == [result.captions[0].text for result in results]
    assert page.read_text(encoding="utf-8").count("data:image/jpeg") == sum(
        len(r.thumbnails) for r in results
    )
    for video, result in zip(report_videos(page), results, strict=True):
        (caption,) = video["segments"][0]["captions"]
        assert result.captions[0].traces is not None
        weights = np.array(caption["traces"]["attention"]) / 10_000
        np.testing.assert_allclose(weights, result.captions[0].traces["attention"], atol=0.51e-4)
    assert "no.mp4: no such file" in page.read_text(encoding="utf-8")
    assert "5 captioned, 1 failed in" in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_report_does_not_change_caption_files(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path
) -> None:
    command = ["caption", *video_files[:2], "--model", toy.model]
    page = tmp_path / "p.html"
    for form in ("json", "jsonl", "txt", "csv"):
        plain, with_report = tmp_path / f"one.{form}", tmp_path / f"other.{form}"
        assert (
            capvid(*command, "-o", plain)[0] == capvid(*command, "-o", with_report, "--report", page)[0] == 0
        )
        assert plain.read_bytes() == with_report.read_bytes()
        assert len(report_videos(page)) == 2


@pytest.mark.slow
def test_report_recaptions_finished_videos_keeping_files(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path
) -> None:
    videos = [shutil.copy(path, tmp_path / path.name) for path in video_files[:3]]
    out, page = tmp_path / "out", tmp_path / "p.html"
    command = ["caption", *videos, "--model", toy.model, "--output-dir", out]
    assert capvid(*command)[2] == "3 captioned\n"
    first_file = sorted(out.glob("*.txt"))[0]
    first_file.write_text("edited\n")
    manifest = (out / MANIFEST).read_bytes()
    code, _, err = capvid(*command, "--report", page)
    assert code == 0
    assert err.splitlines() == [
        "note: 3 done already: captioned again for the page, their files stay",
        "3 captioned",
    ]
    assert first_file.read_text() == "edited\n" and (out / MANIFEST).read_bytes() == manifest
    assert len(report_captions(page)) == 3
    first_file.unlink()
    code, _, err = capvid(*command, "--report", page)
    assert err.splitlines()[0].startswith("note: 2 done already")
    assert first_file.read_text() == report_captions(page)[0] + "\n" and len(report_captions(page)) == 3
    assert capvid(*command)[2] == "0 captioned, 3 skipped (already done)\n"


@pytest.mark.slow
def test_report_of_features_has_times_but_no_frames(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path
) -> None:
    capvid("extract", video_files[3], "--backbone", "toy", "--frames", 4, "-o", tmp_path)
    (features,) = tmp_path.glob("*.safetensors")
    page = tmp_path / "p.html"
    assert capvid("caption", features, "--model", toy.model, "--report", page)[0] == 0
    (video,) = report_videos(page)
    assert video["thumbnails"] == {} and len(video["segments"][0]["times"]) == 4


@pytest.mark.slow
def test_report_shows_segment_times(capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    command = [
        "caption",
        video_files[4],
        "--model",
        toy.model,
        "--segments",
        2,
        "--format",
        "json",
        "--attention",
    ]
    code, out, _ = capvid(*command, "--report", page)
    record = json.loads(out)
    (video,) = report_videos(page)
    assert code == 0 and video["paragraph"] and len(video["segments"]) == 2
    for reported, segment in zip(video["segments"], record["segments"], strict=True):
        (caption,) = segment["captions"]
        assert (reported["start"], reported["end"]) == pytest.approx(
            (segment["start"], segment["end"]), abs=1e-3
        )
        assert reported["times"] == pytest.approx(caption["times"], abs=1e-3)
        assert reported["captions"][0]["text"] == segment["caption"]
        assert all(segment["start"] <= time <= segment["end"] for time in caption["times"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "{tmp}/v.mp4"], "not the name of a page; give --report a name that ends in .html"),
        (["--report", "{tmp}/none/p.html"], "there is no folder"),
        (["--report", "{tmp}/p.html", "-o", "{tmp}/p.html", "--format", "txt"], "the captions go there"),
    ],
)
def test_invalid_report_paths_are_usage_errors(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path, arguments: list[str], message: str
) -> None:
    options = [option.replace("{tmp}", str(tmp_path)) for option in arguments]
    code, out, err = capvid("caption", video_files[0], "--model", toy.model, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.slow
def test_interrupted_run_writes_its_report(toy: Toy, tmp_path: Path) -> None:
    for number in range(40):
        write_video(tmp_path / f"{number:02}.mp4", seed=number)
    page = tmp_path / "p.html"
    arguments = ["caption", tmp_path, "--model", toy.model, "--batch-size", 1, "--report", page]
    command = signal_at.command(signal.SIGSTOP, "stdout", "\t", 2, *arguments)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal_at.wait_until_stopped(process)
    assert not page.exists()
    signal_at.interrupt_stopped(process)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr
    assert "stopped before the end" in page.read_text(encoding="utf-8")
    assert len(report_videos(page)) == len(stdout.splitlines()) == 2
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_attention_in_json_records(capvid: Run, toy: Toy, video_files: list[Path]) -> None:
    (result,) = load(toy.model, attention=True).stream([video_files[2]])
    command = ("caption", video_files[2], "--model", toy.model, "--format", "json")
    code, out, err = capvid(*command, "--attention")
    (caption,) = json.loads(out)["captions"]
    assert (code, err) == (0, "")
    assert result.times is not None and result.captions[0].traces is not None
    assert caption["times"] == [round(time, 6) for time in result.times.tolist()]
    weights = [word["attention"] for word in caption["words"]]
    np.testing.assert_allclose(weights, result.captions[0].traces["attention"][:-1], atol=0.51e-4)
    without = json.loads(capvid(*command)[1])
    del caption["times"]
    for word in caption["words"]:
        del word["attention"]
    assert without["captions"] == [caption]


@pytest.mark.slow
def test_attention_recaptions_only_if_files_change(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path
) -> None:
    command = ["caption", *video_files[:2], "--model", toy.model, "--output-dir"]
    skipped = "0 captioned, 2 skipped (already done)"
    assert capvid(*command, tmp_path / "t")[2] == "2 captioned\n"
    assert capvid(*command, tmp_path / "t", "--attention")[2].splitlines()[-1] == skipped
    json_command = [*command, tmp_path / "j", "--format", "json"]
    assert capvid(*json_command)[2] == "2 captioned\n"
    assert capvid(*json_command, "--attention") == (0, "", "2 captioned\n")
    for file in (tmp_path / "j").glob("*.json"):
        assert "attention" in json.loads(file.read_text())["captions"][0]["words"][0]
    assert capvid(*json_command, "--attention") == (0, "", f"{skipped}\n")


@pytest.mark.slow
def test_attention_charts_on_stderr(
    capvid: Run, toy: Toy, video_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    command = ["caption", video_files[2], "--model", toy.model]
    plain = capvid(*command)
    code, out, err = capvid(*command, "--attention")
    assert (code, out) == plain[:2]
    lines = err.splitlines()
    assert [line.split()[0] for line in lines] == [*out.split(), "(end)"]
    assert all(re.fullmatch(r"  \S+ +[▁▂▃▄▅▆▇█]{4}  +\d\.\ds +\d+%", line) for line in lines)
    several = capvid("caption", *video_files[:2], "--model", toy.model, "--attention")[2].splitlines()
    assert [line for line in several if not line.startswith("  ")] == [
        *(
            line.replace("\t", ": ")
            for line in capvid("caption", *video_files[:2], "--model", toy.model)[1].splitlines()
        ),
        "2 captioned",
    ]


def test_attention_charts_fall_back_to_ascii(
    capvid: Run, toy: Toy, video_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from capvid.cli.app import main

    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(["caption", str(video_files[2]), "--model", str(toy.model), "--attention"]) == 0
    stream.seek(0)
    assert re.match(r"  \S+ +[_.=+*#@-]{4}  ", stream.read())


@pytest.mark.slow
def test_captioner_without_attention_is_noted_once(
    capvid: Run, toy: Toy, video_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from capvid.captioners.m3 import SoftAttention

    advance = SoftAttention.advance
    monkeypatch.setattr(SoftAttention, "advance", lambda *arguments: (*advance(*arguments)[:2], {}))
    _, out, err = capvid("caption", *video_files[:3], "--model", toy.model, "--attention")
    assert len(out.splitlines()) == 3
    note, summary = err.splitlines()
    assert re.fullmatch(r"note: soft-attention@[0-9a-f]{12} has no attention over frames to show", note)
    assert summary == "3 captioned"
    code, out, _ = capvid("caption", video_files[0], "--model", toy.model, "--attention", "--format", "json")
    assert code == 0 and "attention" not in json.loads(out)["captions"][0]["words"][0]
