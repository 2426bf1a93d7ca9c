"""The frames that come are the frames asked for, with every reader, codec and container."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from make_video import BITS, numbers, turn, write_numbers

from capvid.errors import VideoError
from capvid.video.frame_sampling import UniformSampling
from capvid.video.pyav_reader import PyAVSource
from capvid.video.readers import open_video, read_frames

COUNT = 120
OPEN = "open-gop=1:bframes=8:b-adapt=0:keyint=24:min-keyint=24:scenecut=0"
QUIET = {"x265-params": "log-level=none"}
STREAMS: dict[str, tuple[str, dict[str, str], str]] = {
    "closed.mp4": ("libx264", {}, "yuv420p"),
    "10bit.mp4": ("libx264", {}, "yuv420p10le"),
    "open.mp4": ("libx264", {"x264-params": OPEN}, "yuv420p"),
    "open.mkv": ("libx264", {"x264-params": OPEN}, "yuv420p"),
    "refresh.mkv": ("libx264", {"x264-params": "intra-refresh=1:bframes=2:keyint=24"}, "yuv420p"),
    "no_times.avi": ("libx264", {}, "yuv420p"),
    "some_times.avi": ("mpeg4", {"bf": "2"}, "yuv420p"),
    "times.avi": ("mpeg4", {}, "yuv420p"),
    "pictures.avi": ("mjpeg", {}, "yuvj420p"),
    "mpeg4.mp4": ("mpeg4", {"bf": "2"}, "yuv420p"),
    "mpeg2.mkv": ("mpeg2video", {"bf": "2"}, "yuv420p"),
    "mpeg2.mpg": ("mpeg2video", {"bf": "2"}, "yuv420p"),
    "mpeg1.mpg": ("mpeg1video", {"bf": "2"}, "yuv420p"),
    "mpeg2.ts": ("mpeg2video", {"bf": "2"}, "yuv420p"),
    "h264.ts": ("libx264", {}, "yuv420p"),
    "hevc.mp4": ("libx265", QUIET, "yuv420p"),
    "hevc10.mkv": ("libx265", QUIET, "yuv420p10le"),
    "vp8.webm": ("libvpx", {"auto-alt-ref": "1", "lag-in-frames": "12"}, "yuv420p"),
    "vp9.webm": ("libvpx-vp9", {"auto-alt-ref": "1", "lag-in-frames": "12", "cpu-used": "8"}, "yuv420p"),
    "av1.mkv": ("libsvtav1", {"preset": "12"}, "yuv420p"),
    "av1.mp4": ("libsvtav1", {"preset": "12"}, "yuv420p"),
    "asf.wmv": ("wmv2", {}, "yuv420p"),
    "flash.flv": ("libx264", {}, "yuv420p"),
    "animated.gif": ("gif", {}, "rgb8"),
    "raw.h264": ("libx264", {}, "yuv420p"),
    "parts.mp4": ("libx264", {}, "yuv420p"),
}
NOT_DECORD = {"mpeg2.ts", "h264.ts", "av1.mkv", "av1.mp4", "animated.gif", "raw.h264"}
READERS = [(name, reader) for name in STREAMS for reader in ("decord", "pyav", "auto")]


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every codec and container that can be written here, each with ``COUNT`` numbered frames."""
    folder = tmp_path_factory.mktemp("videos")
    found = {}
    for name, (codec, options, pixels) in STREAMS.items():
        try:
            av.Codec(codec, "w")
        except ValueError:  # not in this build
            continue
        container = {"movflags": "frag_keyframe+empty_moov"} if name == "parts.mp4" else None
        found[name] = write_numbers(folder / name, codec, options, pixels=pixels, container=container)
    return found


@pytest.fixture
def path(videos: dict[str, Path], name: str) -> Path:
    if name not in videos:
        pytest.skip("no encoder for it here")
    return videos[name]


@pytest.mark.parametrize(("name", "reader"), READERS)
def test_frames_are_exact(path: Path, name: str, reader: str) -> None:
    if reader == "decord" and name in NOT_DECORD:
        with pytest.raises(Exception, match=path.name):
            open_video(path, reader=reader)
        return
    with open_video(path, reader=reader) as source:
        assert source.info.num_frames == COUNT
        assert source.info.lost == 0
        if reader == "auto":
            assert source.info.reader == "pyav"
        assert numbers(source.read(range(COUNT))) == list(range(COUNT))
        for seed, size in enumerate((1, 3, 10, 40)):  # unordered, with repetitions, again and again
            asked = np.random.default_rng(seed).integers(0, COUNT, size).tolist()
            assert numbers(source.read(asked)) == asked
    sampled = read_frames(path, UniformSampling(12), reader=reader)
    assert numbers(sampled.frames) == list(range(4, COUNT, 10)) or numbers(sampled.frames) == list(
        range(5, COUNT, 10)
    )
    np.testing.assert_allclose(np.diff(sampled.times), 0.4, atol=2e-3)


@pytest.mark.parametrize("name", [name for name in STREAMS if name not in NOT_DECORD])
def test_both_readers_give_the_same(path: Path, name: str) -> None:
    with open_video(path, reader="decord") as one, open_video(path, reader="pyav") as other:
        np.testing.assert_allclose(one.frame_times(), other.frame_times(), rtol=0, atol=1e-6)
        assert one.info.codec in (other.info.codec, "unknown")
        assert one.info.duration == pytest.approx(other.info.duration, abs=1e-5)
        asked = [0, 7, 50, COUNT - 1]
        difference = np.abs(one.read(asked).astype(int) - other.read(asked))
    # pictures of more than 8 bits are rounded differently
    assert difference.mean() <= (5 if "10" in name else 0.5), difference.mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_each_frame_alone_is_that_of_decoding_all(path: Path, name: str) -> None:
    """Whatever way the reader takes to a frame: every level of every pixel is the same."""
    with av.open(str(path)) as container:
        truth = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    asked = np.random.default_rng(1).permutation(COUNT)[:40].tolist()
    with open_video(path, reader="pyav") as source:
        for index in asked:
            assert (source.read([index])[0] == truth[index]).all(), index


@pytest.mark.parametrize("name", ["closed.mp4", "hevc.mp4", "vp8.webm", "vp9.webm", "av1.mkv", "mpeg2.mkv"])
def test_jumps_are_made_where_they_are_safe(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = count_packets(monkeypatch)
    with open_video(path, reader="pyav") as source:
        assert numbers(source.read([COUNT - 2])) == [COUNT - 2]
        assert len(decoded) < 60
        assert numbers(source.read([75])) == [75]  # back again
        assert len(decoded) < 110


def count_packets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from capvid.video.pyav_reader import Decoder

    decoded: list[int] = []
    step = Decoder.step

    def counted(self: Decoder) -> list[object] | None:
        frames = step(self)
        decoded.append(self.number)
        return frames

    monkeypatch.setattr(Decoder, "step", counted)
    return decoded


@pytest.mark.slow
@pytest.mark.parametrize("open_gop", [False, True])
def test_a_long_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_gop: bool) -> None:
    count, bits = 4000, 12
    options = {"preset": "ultrafast", **({"x264-params": OPEN} if open_gop else {})}
    path = write_numbers(tmp_path / "v.mkv", "libx264", options, frames=count, bits=bits, gop=50)
    sampling = UniformSampling(28)
    decord = read_frames(path, sampling, reader="decord")
    decoded = count_packets(monkeypatch)
    sampled = read_frames(path, sampling)
    assert sampled.info.reader == "pyav"
    np.testing.assert_allclose(sampled.times, decord.times, rtol=1e-6)  # decord's are float32
    assert (sampled.frames == decord.frames).all()
    assert numbers(sampled.frames, bits) == np.round(sampled.times * 25).tolist()
    if not open_gop:
        assert len(decoded) < 28 * 60


@pytest.mark.parametrize("reader", ["decord", "pyav"])
@pytest.mark.parametrize("cut", [7, 30])
def test_frames_before_the_edit_list_are_left_out(tmp_path: Path, cut: int, reader: str) -> None:
    path = write_numbers(tmp_path / "v.mp4")
    content = bytearray(path.read_bytes())
    at = content.find(b"elst") + 12
    scale = struct.unpack_from(">I", content, content.find(b"mdhd") + 16)[0]
    duration, start = struct.unpack_from(">Ii", content, at)
    struct.pack_into(">Ii", content, at, duration - cut * 40, start + cut * scale // 25)
    path.write_bytes(content)
    with open_video(path, reader=reader) as source:
        assert len(source.frame_times()) == COUNT - cut == source.info.num_frames
        assert source.frame_times()[0] == pytest.approx(0, abs=1e-3)
        assert source.info.lost == 0
        assert numbers(source.read(range(COUNT - cut))) == list(range(cut, COUNT))
        assert numbers(source.read([60, 5])) == [cut + 60, cut + 5]


@pytest.mark.parametrize("reader", ["decord", "pyav"])
@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotated_pictures_come_upright(tmp_path: Path, degrees: int, reader: str) -> None:
    path = turn(write_numbers(tmp_path / "v.mp4"), degrees)
    with open_video(path, reader=reader) as source:
        width, height = (64, 12 * BITS) if degrees != 180 else (12 * BITS, 64)
        assert (source.info.width, source.info.height) == (width, height)
        assert source.info.rotation == degrees
        stored = np.stack([np.rot90(frame, degrees // 90) for frame in source.read([9, 77])])
    assert numbers(stored) == [9, 77]


def test_frames_hidden_by_the_edit_list_of_a_fragmented_file_are_left_out(tmp_path: Path) -> None:
    path = write_numbers(tmp_path / "v.mp4", container={"movflags": "frag_keyframe+delay_moov"})
    content = bytearray(path.read_bytes())
    at = content.find(b"elst") + 16
    struct.pack_into(">i", content, at, struct.unpack_from(">i", content, at)[0] + 7 * 12800 // 25)
    path.write_bytes(content)
    with open_video(path) as source:
        assert source.frame_times() == pytest.approx(np.arange(COUNT - 7) / 25)
        assert numbers(source.read([0, 80])) == [7, 87]


@pytest.mark.parametrize("name", ["v.mp4", "v.mkv", "v.ts"])
def test_time_zero_is_that_of_the_file(tmp_path: Path, name: str) -> None:
    """Sound from the start, images from 1.2 s on."""
    path = tmp_path / name
    with av.open(str(path), "w") as output:
        video, sound = output.add_stream("libx264", rate=25), output.add_stream("aac", rate=44100)
        video.width, video.height, video.pix_fmt = 96, 64, "yuv420p"
        for number in range(100):
            silence = av.AudioFrame.from_ndarray(
                np.zeros((2, 1024), np.float32), format="fltp", layout="stereo"
            )
            silence.rate, silence.pts = 44100, number * 1024
            output.mux(sound.encode(silence))
        for number in range(20):
            frame = av.VideoFrame.from_ndarray(np.full((64, 96, 3), 90, np.uint8), format="rgb24")
            frame.pts, frame.time_base = number + 30, Fraction(1, 25)
            output.mux(video.encode(frame))
        output.mux(video.encode())
        output.mux(sound.encode())
    for reader in ("pyav", "decord")[: 1 if name == "v.ts" else 2]:
        with open_video(path, reader=reader) as source:
            # the sound may begin one block of 1024 samples before its time 0
            assert source.frame_times() == pytest.approx(1.2 + np.arange(20) / 25, abs=0.024)
            assert source.info.duration == pytest.approx(2.0, abs=0.024)
            assert source.info.fps == pytest.approx(25, abs=0.1)


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_mirrored_pictures_come_as_they_are_shown(tmp_path: Path, degrees: int) -> None:
    path = turn(write_numbers(tmp_path / "v.mp4"), degrees, mirror=True)
    with open_video(path) as source:
        assert (source.info.rotation, source.info.mirrored) == (degrees, True)
        stored = np.stack([np.rot90(frame, degrees // 90)[::-1] for frame in source.read([9, 77])])
    assert numbers(stored) == [9, 77]
    with pytest.raises(VideoError, match="use the reader pyav"):
        open_video(path, reader="decord")


@pytest.mark.parametrize("name", ["v.mp4", "v.mkv", "v.ts"])
@pytest.mark.parametrize(("aspect", "shown"), [(Fraction(64, 45), 137), (Fraction(1, 2), 48)])
def test_pixels_become_square(tmp_path: Path, name: str, aspect: Fraction, shown: int) -> None:
    path = tmp_path / name
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        stream.codec_context.sample_aspect_ratio = aspect
        image = np.full((64, 96, 3), 30, np.uint8)
        image[:, 48:] = 220
        for _ in range(5):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        output.mux(stream.encode())
    with open_video(path) as source:
        assert (source.info.width, source.info.height, source.info.aspect) == (shown, 64, aspect)
        frame = source.read([3])[0]
    assert frame[:, : shown // 2 - 4].mean() < 60 and frame[:, shown // 2 + 4 :].mean() > 190


@pytest.mark.parametrize("reader", ["decord", "pyav"])
@pytest.mark.parametrize(("name", "codec"), [("v.mkv", "ffv1"), ("v.webm", "libvpx-vp9"), ("v.avi", "mpeg4")])
def test_odd_sizes(tmp_path: Path, name: str, codec: str, reader: str) -> None:
    path = write_numbers(tmp_path / name, codec, frames=20, bits=5, size=(65, 49))
    with open_video(path, reader=reader) as source:
        assert (source.info.width, source.info.height) == (65, 49)
        assert numbers(source.read([3, 17, 8]), 5) == [3, 17, 8]


@pytest.mark.parametrize("reader", ["decord", "pyav", "auto"])
@pytest.mark.parametrize("name", ["v.mp4", "v.avi", "v.mkv"])
def test_one_frame(tmp_path: Path, name: str, reader: str) -> None:
    path = write_numbers(tmp_path / name, frames=1)
    sampled = read_frames(path, UniformSampling(4), reader=reader)
    assert (numbers(sampled.frames), sampled.times.tolist(), sampled.info.lost) == ([0], [0], 0)


@pytest.mark.parametrize("space", ["bt709", "bt2020nc", "smpte170m"])
@pytest.mark.parametrize("pixels", ["yuv420p", "yuvj420p"])
def test_colours_are_the_same(tmp_path: Path, space: str, pixels: str) -> None:
    path = tmp_path / "v.mp4"
    picture = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=5, options={"colorspace": space, "crf": "10"})
        stream.width, stream.height, stream.pix_fmt = 64, 64, pixels
        container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    frames = [read_frames(path, UniformSampling(1), reader=reader).frames for reader in ("decord", "pyav")]
    assert np.abs(frames[0].astype(int) - frames[1]).mean() < 0.5


def test_a_change_of_size_within_the_video(tmp_path: Path) -> None:
    parts = [
        write_numbers(tmp_path / f"{width}.h264", frames=20, size=(width, 64), bits=5).read_bytes()
        for width in (60, 120)
    ]
    path = tmp_path / "v.h264"
    path.write_bytes(b"".join(parts))
    sampled = read_frames(path, UniformSampling(40))
    assert (sampled.info.reader, sampled.info.lost) == ("pyav", 0)
    assert sampled.frames.shape == (40, 64, 60, 3)
    assert numbers(sampled.frames[:20], 5) == list(range(20))
    wide = sampled.frames[20:, :, :30].repeat(2, axis=2)  # half the digits, each half as wide
    assert [number & 3 for number in numbers(wide, 5)] == [n & 3 for n in range(20)]


@pytest.mark.parametrize("reader", ["decord", "pyav"])
def test_an_index_outside_the_video(tmp_path: Path, reader: str) -> None:
    with open_video(write_numbers(tmp_path / "v.mp4"), reader=reader) as source:
        for index in (-1, COUNT):
            with pytest.raises(IndexError):
                source.read([0, index])
        assert source.read([]).shape == (0, 64, 12 * BITS, 3)


@pytest.mark.parametrize("reader", ["decord", "pyav", "auto"])
def test_a_colon_in_a_name_is_no_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    write_numbers(tmp_path / "v.mp4").rename(tmp_path / "at 10:30.mp4")
    monkeypatch.chdir(tmp_path)
    assert len(read_frames("at 10:30.mp4", UniformSampling(3), reader=reader).frames) == 3


def test_decord_names_the_other_reader_for_transport_streams(tmp_path: Path) -> None:
    path = write_numbers(tmp_path / "v.ts", "mpeg2video")
    with pytest.raises(VideoError, match="use the reader pyav"):
        open_video(path, reader="decord")


@pytest.mark.slow
@pytest.mark.shared
def test_real_clips_give_the_same_with_both_readers(shared_data: Path) -> None:
    clips = sorted(p for p in (shared_data / "data" / "clips").iterdir() if p.suffix != ".jsonl")
    refused = []
    for clip in clips:
        with open_video(clip, reader="pyav") as source:
            times = source.frame_times()
            asked = UniformSampling(12).choose(times).tolist()
            frames = source.read(asked)
            assert isinstance(source, PyAVSource)
            jumped = source.read(asked[::-1])[::-1]
        assert (jumped == frames).all(), clip
        try:
            with open_video(clip, reader="decord") as source:
                np.testing.assert_allclose(source.frame_times(), times, rtol=1e-6, err_msg=clip.name)
                same = source.read(asked)
        except (VideoError, AssertionError):
            refused.append(clip.name)
            continue
        # the 10-bit clips are rounded differently, by 3 to 4 levels on average
        assert mean_difference(frames, same) < (5 if "10bits" in clip.name else 0.01), clip
    anamorphic = ["demo.mp4", "video5344.mp4", "video7966.mp4"]
    assert refused == ["av1_video.mkv", "corrupted.mp4", *anamorphic]


def mean_difference(one: np.ndarray, other: np.ndarray) -> float:
    pairs: Sequence[tuple[np.ndarray, np.ndarray]] = list(zip(one, other, strict=True))
    return max(float(np.abs(a.astype(np.int16) - b).mean()) for a, b in pairs)
