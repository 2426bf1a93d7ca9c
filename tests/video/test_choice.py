"""Which reader is taken, and what is refused before any reader is let loose on it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from make_video import numbers, write_numbers, write_sound
from PIL import Image

from capvid.errors import TruncatedVideoError, VideoError
from capvid.video import readers as choice
from capvid.video.frame_sampling import UniformSampling
from capvid.video.readers import open_video, read_frames


@pytest.mark.parametrize(
    ("name", "codec", "reader", "why"),
    [
        ("v.mp4", "libx264", "pyav", "default"),
        ("v.mkv", "libvpx-vp9", "pyav", "default"),
        ("v.ts", "mpeg2video", "pyav", "decord cannot read mpeg-ts reliably"),
        ("v.mpg", "mpeg2video", "pyav", "decord cannot read mpeg-ps reliably"),
        ("v.mkv", "libsvtav1", "pyav", "decord cannot decode av1"),
    ],
)
def test_the_reader_that_suits(tmp_path: Path, name: str, codec: str, reader: str, why: str) -> None:
    path = write_numbers(tmp_path / name, codec, frames=30)
    with open_video(path) as source:
        assert (source.info.reader, source.info.why) == (reader, why)


def test_where_pyav_cannot_open_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, kind: str) -> None:
        raise TruncatedVideoError(path, "PyAV's own words")

    path = write_numbers(tmp_path / "v.mp4")
    other = write_numbers(tmp_path / "v.ts")
    (tmp_path / "cut.mkv").write_bytes(write_numbers(tmp_path / "v.mkv").read_bytes()[:300])
    monkeypatch.setattr(choice, "scan", refuse)
    sampled = read_frames(path, UniformSampling(3))
    assert (sampled.info.reader, sampled.info.why) == ("decord", "PyAV cannot open it")
    assert numbers(sampled.frames) == [20, 60, 100]
    for bad in (other, tmp_path / "cut.mkv"):
        with pytest.raises(TruncatedVideoError, match="PyAV's own words"):
            open_video(bad)


def test_without_decord(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_numbers(tmp_path / "v.mp4")
    monkeypatch.setitem(sys.modules, "decord", None)
    assert numbers(read_frames(path, UniformSampling(3)).frames) == [20, 60, 100]
    with pytest.raises(VideoError, match="pip install decord"):
        open_video(path, reader="decord")
    with pytest.raises(VideoError, match="has sound, but no video"):
        open_video(write_sound(tmp_path / "sound.mp4"))


def test_animations(tmp_path: Path) -> None:
    pictures = [Image.fromarray(np.full((48, 64, 3), 30 + 20 * n, np.uint8)) for n in range(8)]
    for name in ("a.gif", "a.webp"):
        pictures[0].save(tmp_path / name, save_all=True, append_images=pictures[1:], duration=100)
        sampled = read_frames(tmp_path / name, UniformSampling(8))
        assert sampled.frames.mean((1, 2, 3)).round(-1).tolist() == [30 + 20 * n for n in range(8)]
        np.testing.assert_allclose(sampled.times, np.arange(8) / 10, atol=1e-6)
    pictures[2].save(tmp_path / "still.webp")
    assert len(read_frames(tmp_path / "still.webp", UniformSampling(8)).frames) == 1


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def make_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("reader", ["decord", "pyav", "auto"])
@pytest.mark.parametrize(
    ("make", "message"), [(make_pipe, "is a pipe"), (make_socket, "is a pipe"), (make_loop, "circular")]
)
@pytest.mark.timeout(20)
def test_what_is_no_file(tmp_path: Path, make: object, message: str, reader: str) -> None:
    path = tmp_path / "v.mp4"
    assert callable(make)
    make(path)
    with pytest.raises(VideoError, match=message) as error:
        open_video(path, reader=reader)
    assert type(error.value) is VideoError and error.value.remedy


def test_what_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_numbers(tmp_path / "v.mp4", frames=3)
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as one who may read everything
    with pytest.raises(VideoError, match="cannot be read by this user"):
        open_video(path)


def test_what_is_not_there(tmp_path: Path) -> None:
    file = write_numbers(tmp_path / "v.mp4", frames=3)
    (tmp_path / "dangling.mp4").symlink_to(tmp_path / "gone.mp4")
    for path in (tmp_path / "gone.mp4", tmp_path / "dangling.mp4", file / "below.mp4"):
        with pytest.raises(VideoError):
            open_video(path)


def test_nothing_is_printed_by_pyav_after_the_readers(tmp_path: Path) -> None:
    """Not even at the end of the process, where logging is taken apart."""
    path = write_numbers(tmp_path / "v.mp4", container={"movflags": "faststart"}, noise=60)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    code = (
        "from capvid.video.readers import read_frames\n"
        "from capvid.video.frame_sampling import UniformSampling\n"
        f"print(len(read_frames({str(path)!r}, UniformSampling(4)).frames))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("4\n", "")
