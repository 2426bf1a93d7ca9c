"""The frames that come are the frames asked for, also where decord's own random access gives others."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from capvid.errors import TruncatedVideoError, UnsupportedCodecError, VideoError
from capvid.video.sampling import UniformSampling
from capvid.video.source import open_video, read_frames

COUNT, BITS = 120, 8
OPEN = "open-gop=1:bframes=8:b-adapt=0:keyint=24:min-keyint=24:scenecut=0"
STREAMS = {
    "closed.mp4": ("libx264", {}),
    "open.mp4": ("libx264", {"x264-params": OPEN}),
    "open.mkv": ("libx264", {"x264-params": OPEN}),
    "refresh.mkv": ("libx264", {"x264-params": "intra-refresh=1:bframes=2:keyint=24"}),
    "no_times.avi": ("libx264", {}),
    "some_times.avi": ("mpeg4", {"bf": "2"}),
    "mpeg2.mkv": ("mpeg2video", {"bf": "2"}),
    "asf.wmv": ("wmv2", {}),
    "flash.flv": ("libx264", {}),
}


def write(path: Path, codec: str, options: dict[str, str]) -> Path:
    """Write frames whose upper half is the frame's number in binary, bright for 1."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 12 * BITS, 64, "yuv420p", 24
        for number in range(COUNT):
            picture = np.full((64, 12 * BITS, 3), 90, np.uint8)
            for bit in range(BITS):
                picture[:32, 12 * bit : 12 * bit + 12] = 220 if number >> bit & 1 else 30
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 25)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def numbers(frames: np.ndarray) -> list[int]:
    cells = frames[:, 4:28].reshape(len(frames), 24, BITS, 12, 3)[:, :, :, 3:9].mean(axis=(1, 3, 4))
    return ((cells > 125) @ (1 << np.arange(BITS))).tolist()


@pytest.mark.parametrize("name", STREAMS)
def test_frames_are_exact(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, *STREAMS[name])
    with open_video(path) as source:
        assert source.info.num_frames == COUNT
        assert numbers(source.read(range(COUNT))) == list(range(COUNT))
        for seed, size in enumerate((1, 3, 10, 40)):  # unordered, with repetitions, again and again
            asked = np.random.default_rng(seed).integers(0, COUNT, size).tolist()
            assert numbers(source.read(asked)) == asked
    sampled = read_frames(path, UniformSampling(12))
    assert numbers(sampled.frames) == list(range(4, COUNT, 10)) or numbers(sampled.frames) == list(
        range(5, COUNT, 10)
    )
    steps = np.diff(sampled.times)
    np.testing.assert_allclose(steps, 0.4, atol=2e-3)


@pytest.mark.parametrize("cut", [7, 30])
def test_frames_before_the_edit_list_are_left_out(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "v.mp4", "libx264", {})
    content = bytearray(path.read_bytes())
    at = content.find(b"elst") + 12
    scale = struct.unpack_from(">I", content, content.find(b"mdhd") + 16)[0]
    duration, start = struct.unpack_from(">Ii", content, at)
    struct.pack_into(">Ii", content, at, duration - cut * 40, start + cut * scale // 25)
    path.write_bytes(content)
    with open_video(path) as source:
        assert len(source.frame_times()) == COUNT - cut == source.info.num_frames
        assert source.frame_times()[0] == pytest.approx(0, abs=1e-3)
        assert numbers(source.read(range(COUNT - cut))) == list(range(cut, COUNT))


def test_rotated_pictures_come_upright(tmp_path: Path) -> None:
    path = write(tmp_path / "v.mp4", "libx264", {})
    content = bytearray(path.read_bytes())
    quarter_turn = struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30)  # clockwise
    at = content.find(b"tkhd") + 44
    content[at : at + 36] = quarter_turn
    path.write_bytes(content)
    with open_video(path) as source:
        assert (source.info.width, source.info.height) == (64, 12 * BITS)
        stored = np.stack([np.rot90(frame) for frame in source.read([9, 77])])
    assert numbers(stored) == [9, 77]


def test_an_index_outside_the_video(tmp_path: Path) -> None:
    with open_video(write(tmp_path / "v.mp4", "libx264", {})) as source:
        for index in (-1, COUNT):
            with pytest.raises(IndexError):
                source.read([0, index])


def test_a_colon_in_a_name_is_no_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "v.mp4", "libx264", {}).rename(tmp_path / "at 10:30.mp4")
    monkeypatch.chdir(tmp_path)
    assert len(read_frames("at 10:30.mp4", UniformSampling(3)).frames) == 3


@pytest.mark.parametrize("name", ["v.mkv", "v.avi", "front.mp4", "v.mp4"])
def test_half_a_file_is_not_taken_for_a_shorter_video(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    options = {"movflags": "faststart"} if name == "front.mp4" else {}
    whole = write(tmp_path / f"whole-{name}", "libx264", {})
    if options:
        with av.open(str(whole)) as old, av.open(str(path), "w", options=options) as new:
            stream = new.add_stream_from_template(old.streams.video[0])
            for packet in old.demux(video=0):
                if packet.dts is not None:
                    packet.stream = stream
                    new.mux(packet)
        whole = path
    assert len(read_frames(whole, UniformSampling(3)).frames) == 3
    content = whole.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(TruncatedVideoError, match=r"bytes too early|before its index"):
        read_frames(path, UniformSampling(3))


def test_a_transport_stream_is_refused_with_a_remedy(tmp_path: Path) -> None:
    path = write(tmp_path / "v.ts", "mpeg2video", {})
    with pytest.raises(UnsupportedCodecError, match="-c copy"):
        open_video(path)


@pytest.mark.shared
def test_real_clips_give_the_frames_that_pyav_gives(shared_data: Path) -> None:
    clips = sorted(p for p in (shared_data / "data" / "clips").iterdir() if p.suffix != ".jsonl")
    compared = 0
    for clip in clips:
        try:
            with open_video(clip) as source:
                count = source.info.num_frames
                asked = UniformSampling(12).choose(source.frame_times()).tolist()
                frames = source.read(asked)
        except VideoError:
            continue
        places = dict(zip(asked, frames, strict=True))
        with av.open(str(clip)) as container:
            seen = 0
            for index, frame in enumerate(container.decode(container.streams.best("video"))):
                seen += 1
                if index in places:
                    truth = frame.to_ndarray(format="rgb24").astype(np.int16)
                    # the 10-bit clips are rounded differently, by 3 to 4 levels on average
                    assert np.abs(places[index] - truth).mean() < (5 if "10bits" in clip.name else 0.5), clip
        assert seen == count, clip
        compared += 1
    assert compared >= len(clips) - 2
