"""Videos kept as pictures in a zip file."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from capvid.errors import CapvidError, TruncatedVideoError, VideoError
from capvid.video import READER_NAMES
from capvid.video.frame_sampling import UniformSampling, Windows
from capvid.video.input_set import find_videos
from capvid.video.readers import open_video, read_frames


def png(value: int, size: tuple[int, int] = (16, 12)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (value, 2 * value, 0)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "some frames.zip"
    with zipfile.ZipFile(path, "w") as file:
        for number in (3, 1, 0, 2):
            file.writestr(f"video1/{number:03}.png", png(10 * number))
        file.writestr("deep/vidéo 2/a.PNG", png(7))
        file.writestr("video1/notes.txt", "not a picture")
        file.writestr("top.png", png(1))
    return path


def test_a_zip_file_stands_for_its_folders(archive: Path) -> None:
    found = find_videos([archive])
    assert [video.key for video in found] == ["deep/vidéo 2", "video1"]
    assert found[1].path == archive / "video1"


@pytest.mark.parametrize("reader", READER_NAMES)
def test_every_reader_opens_images(archive: Path, reader: str) -> None:
    with open_video(archive / "video1", reader=reader) as source:
        assert (source.info.reader, source.info.num_frames) == ("images", 4)
    assert len(read_frames(archive / "video1", UniformSampling(2), reader=reader).frames) == 2


def test_frames_come_in_the_order_of_names(archive: Path) -> None:
    with open_video(archive / "video1") as source:
        assert (source.info.num_frames, source.info.width, source.info.height) == (4, 16, 12)
        assert source.info.reader == "images"
        np.testing.assert_array_equal(source.frame_times(), [0, 2, 4, 6])
        frames = source.read([3, 0, 2])
    np.testing.assert_array_equal(frames[:, 5, 5], [[30, 60, 0], [0, 0, 0], [20, 40, 0]])


def test_sampling_and_windows_see_stills(archive: Path) -> None:
    """A window around a still repeats it: its neighbours are other scenes, not motion."""
    window = Windows(offsets=(-0.6, -0.2, 0.2, 0.6))
    sampled = read_frames(archive / "video1", UniformSampling(2), windows=[window])
    values = sampled.frames[:, 0, 0, 0]
    np.testing.assert_array_equal(values, [10, 30])
    np.testing.assert_array_equal(sampled.windows[0][:, :, 0, 0, 0], np.repeat(values[:, None], 4, 1))


def test_what_is_wrong_is_named(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(VideoError, match="not a folder of images"):
        open_video(archive / "video9")
    bad = tmp_path / "bad.zip"
    bad.write_bytes(b"PK not really")
    with pytest.raises(VideoError, match="not a zip file"):
        find_videos([bad])
    with zipfile.ZipFile(tmp_path / "none.zip", "w") as file:
        file.writestr("readme.txt", "nothing")
    with pytest.raises(CapvidError, match="no folders of images"):
        find_videos([tmp_path / "none.zip"])
    with zipfile.ZipFile(tmp_path / "mixed.zip", "w") as file:
        file.writestr("a/0.png", png(1))
        file.writestr("a/1.png", png(1, (8, 8)))
        file.writestr("b/0.png", png(1))
        file.writestr("b/1.png", png(1)[:40])
    with (
        open_video(tmp_path / "mixed.zip" / "a") as source,
        pytest.raises(VideoError, match="does not have the size"),
    ):
        source.read([0, 1])
    with (
        open_video(tmp_path / "mixed.zip" / "b") as source,
        pytest.raises(TruncatedVideoError, match=r"b/1\.png"),
    ):
        source.read([1])


def test_names_that_lead_out_of_the_zip_file_are_passed_over(tmp_path: Path) -> None:
    """Outputs are named by the folders: none may land outside the output folder."""
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as file:
        for name in ("../../out/0.png", "/abs/0.png", "a/../../b/0.png", "./c//d/0.png"):
            file.writestr(name, png(3))
    found = find_videos([tmp_path / "evil.zip"])
    assert [video.key for video in found] == ["c/d"]
    with open_video(found[0].path) as source:
        assert source.read([0]).shape == (1, 12, 16, 3)


def test_any_kind_of_broken_picture_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/0.png", bytes(5000) + png(9))
    data = bytearray(path.read_bytes())
    data[60:70] = b"\xff" * 10  # the compressed data, not the directory
    path.write_bytes(data)
    with pytest.raises(TruncatedVideoError, match=r"a/0\.png cannot be decoded"):
        open_video(path / "a")
