from __future__ import annotations

import json
from pathlib import Path

from test_records import SETTINGS, result

from capvid.errors import VideoError
from capvid.output.manifest import Manifest
from capvid.utils.files import MANIFEST

MODEL = "m3@0123456789ab"


def video(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(b"x" * len(name))
    return path


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / MANIFEST).read_text().splitlines()]


def test_what_is_done_and_what_is_not(tmp_path: Path) -> None:
    good, bad = video(tmp_path, "b.mp4"), tmp_path / "a.mp4"
    failed = VideoError(bad, "no such file", kind="missing")
    with Manifest(tmp_path / MANIFEST, model=MODEL, settings=SETTINGS) as made:
        assert not made.is_done(good, "b.txt")
        made.note(result(path=good), "b.txt")
        made.note(result(path=bad, status="error", captions=(), error=failed), "a.txt")
        assert [line["output"] for line in lines(tmp_path)] == ["b.txt", "a.txt"]  # at once
    assert [line["output"] for line in lines(tmp_path)] == ["a.txt", "b.txt"]  # in order
    assert [line["error"] for line in lines(tmp_path)] == [str(failed), None]
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()

    again = Manifest(tmp_path / MANIFEST, model=MODEL, settings=SETTINGS)
    assert again.is_done(good, "b.txt") and not again.is_done(bad, "a.txt")
    assert not again.is_done(video(tmp_path, "c.mp4"), "b.txt")
    assert not Manifest(tmp_path / MANIFEST, model="m3@other", settings=SETTINGS).is_done(good, "b.txt")
    other = {**SETTINGS, "beam_size": 1}
    assert not Manifest(tmp_path / MANIFEST, model=MODEL, settings=other).is_done(good, "b.txt")
    good.write_bytes(b"another video")
    assert not again.is_done(good, "b.txt")
    good.unlink()
    assert not again.is_done(good, "b.txt")


def test_a_line_that_was_cut_short_is_one_line_lost(tmp_path: Path) -> None:
    first, second = video(tmp_path, "a.mp4"), video(tmp_path, "b.mp4")
    made = Manifest(tmp_path / MANIFEST, model=MODEL, settings=SETTINGS)
    made.note(result(path=first), "a.txt")
    made.note(result(path=second), "b.txt")
    whole = (tmp_path / MANIFEST).read_bytes()
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    for cut in range(len(whole.splitlines()[0]) + 1, len(whole)):
        (tmp_path / MANIFEST).write_bytes(whole[:cut])
        with Manifest(tmp_path / MANIFEST, model=MODEL, settings=SETTINGS) as made:
            assert made.is_done(first, "a.txt")
            assert made.is_done(second, "b.txt") == (cut == len(whole) - 1)
            made.note(result(path=second), "b.txt")
        assert (tmp_path / MANIFEST).read_bytes() == whole


def test_lines_of_other_processes_stay(tmp_path: Path) -> None:
    with Manifest(tmp_path / MANIFEST, model=MODEL, settings=SETTINGS) as one:
        with Manifest(tmp_path / MANIFEST, model=MODEL, settings=SETTINGS) as two:
            two.note(result(path=video(tmp_path, "b.mp4")), "b.txt")
        one.note(result(path=video(tmp_path, "a.mp4")), "a.txt")
    assert [line["output"] for line in lines(tmp_path)] == ["a.txt", "b.txt"]
