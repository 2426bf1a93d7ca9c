"""What can be had from damaged files: only right frames, always the same, and how many are lost."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
from make_video import numbers, write_numbers, write_video

from capvid.errors import TruncatedVideoError, VideoError
from capvid.video.frame_sampling import UniformSampling
from capvid.video.readers import SampledFrames, open_video, read_frames

COUNT = 120
ALL = UniformSampling(COUNT)
FRONT = {"movflags": "faststart"}
STREAMS: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "h264.mp4": ("libx264", {}, FRONT),
    "hevc.mp4": ("libx265", {"x265-params": "log-level=none"}, FRONT),
    "parts.mp4": ("libx264", {}, {"movflags": "frag_keyframe+empty_moov"}),
    "h264.mkv": ("libx264", {}, {}),
    "vp9.webm": ("libvpx-vp9", {"cpu-used": "8"}, {}),
    "h264.avi": ("libx264", {}, {}),
    "mpeg4.avi": ("mpeg4", {}, {}),
    "h264.ts": ("libx264", {}, {}),
    "mpeg2.ts": ("mpeg2video", {}, {}),
    "mpeg2.mpg": ("mpeg2video", {}, {}),
}
UNKNOWN = {"parts.mp4", "h264.ts", "mpeg2.ts", "mpeg2.mpg"}  # nothing says how long they were


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    return {
        name: write_numbers(folder / name, codec, options, container=container, noise=60).read_bytes()
        for name, (codec, options, container) in STREAMS.items()
    }


def check(path: Path, reader: str = "auto") -> tuple[list[int], SampledFrames]:
    """Read all frames there are, twice: each shows the number that its time says."""
    sampled, again = (read_frames(path, ALL, reader=reader) for _ in range(2))
    found = numbers(sampled.frames)
    assert found == np.round(sampled.times * 25).tolist()
    assert found == sorted(set(found))
    assert (sampled.frames == again.frames).all() and (sampled.times == again.times).all()
    assert sampled.info == again.info
    assert sampled.info.num_frames == len(found)
    return found, sampled


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", STREAMS)
def test_truncated(
    tmp_path: Path, videos: dict[str, bytes], name: str, share: float, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(videos[name][: int(len(videos[name]) * share)])
    capfd.readouterr()
    try:
        found, sampled = check(path)
    except TruncatedVideoError:
        assert share == 0.1  # not even the first picture is whole
        return
    finally:
        assert capfd.readouterr() == ("", "")
    assert sampled.info.reader == "pyav"
    assert len(found) >= (share - 0.4) * COUNT
    # the end may lack some that came before others in the order of decoding
    assert found[: len(found) - 8] == list(range(len(found) - 8)) or len(found) < 8
    if name in UNKNOWN:
        assert sampled.info.lost + len(found) <= COUNT
    else:
        assert sampled.info.lost + len(found) == COUNT
        assert sampled.info.why == "the file is damaged"


@pytest.mark.slow
@pytest.mark.parametrize("fill", ["zeros", "noise"])
@pytest.mark.parametrize("name", STREAMS)
def test_a_hole(
    tmp_path: Path, videos: dict[str, bytes], name: str, fill: str, capfd: pytest.CaptureFixture[str]
) -> None:
    content = bytearray(videos[name])
    middle, length = len(content) // 2, len(content) // 20
    noise = np.random.default_rng(2).integers(0, 256, length, dtype=np.uint8).tobytes()
    content[middle : middle + length] = bytes(length) if fill == "zeros" else noise
    path = tmp_path / name
    path.write_bytes(content)
    capfd.readouterr()
    found, sampled = check(path)
    assert capfd.readouterr() == ("", "")
    assert sampled.info.lost > 0
    assert found[:12] == list(range(12))  # the middle of the data is not that of the time
    if name == "parts.mp4":  # of what is behind the hole nothing can be found
        return
    # of MPEG's program streams packets that are missing as a whole are not known
    assert sampled.info.lost + len(found) == COUNT or (name == "mpeg2.mpg" and len(found) > COUNT // 2)
    assert found[-1] == COUNT - 1


def test_a_gap_between_times_is_no_damage(tmp_path: Path) -> None:
    times = [*np.arange(20) / 25, *(2 + np.arange(20) / 25), *(4 + np.arange(20) / 10)]
    path = write_video(tmp_path / "v.ts", times=times, frames=60)
    whole = write_numbers(tmp_path / "v.mpg", "mpeg2video", frames=60)  # its writer leaves a gap
    for intact in (path, whole):
        with open_video(intact) as source:
            assert (source.info.lost, len(source.frame_times())) == (0, 60), intact.name


@pytest.mark.parametrize("name", ["h264.mp4", "h264.mkv", "hevc.mp4"])
def test_a_scratch_is_seen_by_pyav(tmp_path: Path, videos: dict[str, bytes], name: str) -> None:
    content = bytearray(videos[name])
    middle = len(content) // 2
    content[middle : middle + 24] = bytes(24)
    path = tmp_path / name
    path.write_bytes(content)
    found, sampled = check(path, reader="pyav")
    assert sampled.info.lost + len(found) == COUNT
    assert found[:12] == list(range(12)) and found[-1] == COUNT - 1


@pytest.mark.parametrize("name", ["h264.mp4", "h264.mkv", "h264.avi"])
def test_decord_asked_for_refuses_half_a_file(tmp_path: Path, videos: dict[str, bytes], name: str) -> None:
    path = tmp_path / name
    path.write_bytes(videos[name][: len(videos[name]) // 2])
    with pytest.raises(TruncatedVideoError, match="bytes too early"):
        read_frames(path, ALL, reader="decord")


@pytest.mark.parametrize("reader", ["decord", "pyav", "auto"])
def test_an_index_at_the_end_is_lost_with_it(tmp_path: Path, reader: str) -> None:
    path = write_numbers(tmp_path / "v.mp4")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(TruncatedVideoError, match="before its index"):
        read_frames(path, ALL, reader=reader)


def test_frames_are_chosen_again_from_those_that_are_there(tmp_path: Path, videos: dict[str, bytes]) -> None:
    """Damage that shows only in decoding, to decord and to PyAV."""
    path = tmp_path / "v.mp4"
    content = bytearray(videos["hevc.mp4"])
    start, end = len(content) // 2, len(content) * 7 // 10
    content[start:end] = bytes(end - start)
    path.write_bytes(content)
    for reader in ("decord", "pyav"):
        # decord decodes ahead, and may see it when it opens the file
        with pytest.raises(VideoError), open_video(path, reader=reader) as source:
            source.read(range(COUNT))
    sampled = read_frames(path, UniformSampling(10))
    assert 7 <= len(sampled.frames) <= 10  # moments within the hole share a frame beside it
    assert numbers(sampled.frames) == np.round(sampled.times * 25).tolist()
    assert (sampled.info.reader, sampled.info.why) == ("pyav", "the file is damaged")
    assert sampled.info.lost == COUNT - sampled.info.num_frames > 0


@pytest.mark.parametrize("name", STREAMS)
def test_whole_files_lose_nothing(tmp_path: Path, videos: dict[str, bytes], name: str) -> None:
    path = tmp_path / name
    path.write_bytes(videos[name])
    for reader in ("pyav", "auto"):
        found, sampled = check(path, reader=reader)
        assert (found, sampled.info.lost) == (list(range(COUNT)), 0)


def test_packets_that_are_left_out_on_purpose_are_not_lost(tmp_path: Path) -> None:
    """A recording with pauses: long steps between times, and no damage."""
    path = tmp_path / "v.mkv"
    whole = write_numbers(tmp_path / "whole.mkv", "mpeg4", gop=1)
    with av.open(str(whole)) as old, av.open(str(path), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        for number, packet in enumerate(old.demux(video=0)):
            if packet.dts is not None and number % 40 < 20:
                packet.stream = stream
                new.mux(packet)
    found, sampled = check(path, reader="pyav")
    assert found == [number for number in range(COUNT) if number % 40 < 20]
    assert sampled.info.lost == 0


@pytest.mark.shared
@pytest.mark.parametrize("reader", ["auto", "pyav", "decord"])
def test_what_leads_a_library_astray_is_an_error_of_that_file(shared_data: Path, reader: str) -> None:
    """Streams that appear late, equal times, and no times at all; found by mutating real files."""
    paths = sorted((shared_data / "media" / "fuzz").iterdir())
    assert len(paths) == 7
    for path in paths:
        try:
            with open_video(path, reader=reader) as source:
                assert source.read([0]).shape[0] == 1
        except VideoError as error:
            assert path.name in str(error) and "internal" not in str(error)
