from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from make_video import frame_number, write_sound, write_video

from capvid.errors import TruncatedVideoError, UsageError, VideoError
from capvid.video.decord_reader import repair_times
from capvid.video.frame_sampling import UniformSampling
from capvid.video.readers import open_video, read_frames

FORMATS = [
    ("a.mp4", "libx264"),
    ("b.mkv", "libx264"),
    ("c.avi", "mpeg4"),
    ("d.mp4", "mpeg4"),
    ("e.webm", "libvpx-vp9"),
]


both = pytest.mark.parametrize("reader", ["decord", "pyav"])


@both
@pytest.mark.parametrize(("name", "codec"), FORMATS)
def test_the_frames_asked_for_are_the_frames_that_come(
    tmp_path: Path, name: str, codec: str, reader: str
) -> None:
    path = write_video(tmp_path / name, codec=codec)
    with open_video(path, reader=reader) as source:
        assert (source.info.reader, source.info.why) == (reader, "requested")
        assert source.info.num_frames == 40
        assert (source.info.width, source.info.height) == (64, 48)
        asked = [31, 3, 3, 0, 39, 17]
        frames = source.read(asked)
    assert frames.shape == (6, 48, 64, 3)
    assert frames.dtype == np.uint8
    assert [frame_number(frame) for frame in frames] == [n % 10 for n in asked]


@both
@pytest.mark.parametrize(("name", "codec"), FORMATS)
def test_times_and_duration(tmp_path: Path, name: str, codec: str, reader: str) -> None:
    with open_video(write_video(tmp_path / name, codec=codec), reader=reader) as source:
        times, info = source.frame_times(), source.info
    np.testing.assert_allclose(times - times[0], np.arange(40) / 10, atol=2e-3)
    assert info.duration == pytest.approx(4.0, abs=0.01)
    assert info.fps == pytest.approx(10, abs=0.03)
    assert info.codec == {"libx264": "h264", "mpeg4": "mpeg4", "libvpx-vp9": "vp9"}[codec]


@both
def test_variable_frame_rate(tmp_path: Path, reader: str) -> None:
    times = [n * 0.05 for n in range(30)] + [1.5 + n * 0.5 for n in range(10)]
    path = write_video(tmp_path / "v.mkv", times=times)
    sampled = read_frames(path, UniformSampling(8), reader=reader)
    np.testing.assert_allclose(sampled.times, [times[n] for n in sampled_numbers(times, 8)], atol=2e-3)
    assert [frame_number(f) for f in sampled.frames] == [n % 10 for n in sampled_numbers(times, 8)]


def sampled_numbers(times: list[float], count: int) -> list[int]:
    """Nearest frames to the middles of slices, by plain search."""
    end = times[-1] + float(np.median(np.diff(times)))
    middles = [times[0] + (n + 0.5) * (end - times[0]) / count for n in range(count)]
    return sorted({min(range(len(times)), key=lambda n: (abs(times[n] - m), n)) for m in middles})


def test_a_sample_can_cross_processes_and_is_always_the_same(tmp_path: Path) -> None:
    path = write_video(tmp_path / "it's ünï & co.mp4")
    call = pickle.loads(pickle.dumps((read_frames, (path, UniformSampling(5)))))
    one, two = call[0](*call[1]), pickle.loads(pickle.dumps(read_frames(path, UniformSampling(5))))
    assert (one.frames == two.frames).all()
    assert one.times.tolist() == two.times.tolist() == pytest.approx([0.4, 1.2, 2.0, 2.8, 3.6])
    assert [frame_number(f) for f in one.frames] == [4, 2, 0, 8, 6]


@both
def test_a_closed_source_reads_no_more(tmp_path: Path, reader: str) -> None:
    source = open_video(write_video(tmp_path / "v.mp4"), reader=reader)
    source.close()
    source.close()
    with pytest.raises(VideoError, match="closed"):
        source.read([0, 1])


def damaged(folder: Path) -> dict[str, tuple[Path, str]]:
    good = write_video(folder / "good.mp4").read_bytes()
    files: dict[str, tuple[bytes, str]] = {
        "empty.mp4": (b"", "empty"),
        "text.mp4": (b"hello, this is text\n" * 50, "not-a-video"),
        "half.mp4": (good[: len(good) // 2], "truncated"),
        "tail.mp4": (good[:40], "truncated"),
    }
    for name, (content, _) in files.items():
        (folder / name).write_bytes(content)
    found: dict[str, tuple[Path, str]] = {name: (folder / name, kind) for name, (_, kind) in files.items()}
    found["none"] = (folder / "none.mp4", "missing")
    found["sound"] = (write_sound(folder / "sound.mp4"), "no-video-stream")
    found["folder"] = (folder, "unreadable")
    return found


@pytest.mark.parametrize("reader", ["decord", "pyav", "auto"])
@pytest.mark.parametrize("name", ["empty.mp4", "text.mp4", "half.mp4", "tail.mp4", "none", "sound", "folder"])
def test_what_cannot_be_read_says_why_on_one_line(
    tmp_path: Path, name: str, reader: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path, kind = damaged(tmp_path)[name]
    capfd.readouterr()
    with pytest.raises(VideoError) as error:
        read_frames(path, UniformSampling(4), reader=reader)
    assert error.value.kind == kind
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("reader", ["decord", "pyav", "auto"])
def test_damaged_data_behind_an_intact_index(tmp_path: Path, reader: str) -> None:
    path = write_video(tmp_path / "v.mp4", frames=60, size=(320, 240))
    content = bytearray(path.read_bytes())
    start = content.find(b"mdat") + 8
    end = content.find(b"moov")
    content[start:end] = b"\xff" * (end - start)
    path.write_bytes(content)
    with pytest.raises(TruncatedVideoError):
        read_frames(path, UniformSampling(4), reader=reader)


def test_no_such_reader(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such reader"):
        open_video(write_video(tmp_path / "v.mp4"), reader="cinema")


def test_times_that_the_container_leaves_out() -> None:
    spans = np.array([[-3.7e17, -3.7e17], [0.0, 0.04], [0.2, 0.24]])
    assert repair_times(spans, 25.0).tolist() == pytest.approx([0, 0.04, 0.08])
    assert repair_times(spans, -1.0).tolist() == pytest.approx([0, 0.04, 0.08])
    assert repair_times(spans[1:] + 3, 25.0).tolist() == pytest.approx([3.0, 3.2])


@pytest.mark.slow
@pytest.mark.shared
def test_real_clips_give_frames(shared_data: Path) -> None:
    clips = sorted(p for p in (shared_data / "data" / "clips").iterdir() if p.suffix != ".jsonl")
    readers = {}
    for clip in clips:
        sampled = read_frames(clip, UniformSampling(6))
        assert len(sampled.frames) == 6
        assert sampled.frames.std() > 5  # a picture
        assert (np.diff(sampled.times) > 0).all()
        assert 0 <= sampled.times[0] < sampled.times[-1] < sampled.info.duration + 1
        assert sampled.info.reader == "pyav"
        if sampled.info.why != "default":
            readers[clip.name] = sampled.info.why, sampled.info.lost
    assert readers == {
        "av1_video.mkv": ("decord cannot decode av1", 0),
        "corrupted.mp4": ("the file is damaged", 21),
    }
