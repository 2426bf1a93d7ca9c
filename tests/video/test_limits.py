"""Hostile files: each costs one typed error, and neither memory nor time."""

from __future__ import annotations

import io
import os
import random
import struct
import threading
import zipfile
import zlib
from fractions import Fraction
from pathlib import Path

import av
import calls
import numpy as np
import pytest
from make_video import numbers, write_numbers, write_video
from PIL import Image
from toy import Run, Toy, capvid, toy, toy_files

from capvid.errors import DataError, UsageError, VideoError
from capvid.features.prefetch import decode_video, read_timeline
from capvid.video import container_kind
from capvid.video.frame_sampling import (
    ChosenTimes,
    RateSampling,
    Sampling,
    UniformSampling,
    nearest,
    parse_sampling,
)
from capvid.video.image_reader import decode_image
from capvid.video.input_set import find_videos
from capvid.video.probe import ffmpeg_log, open_container
from capvid.video.readers import open_video, read_frames
from capvid.video.segmentation import AutoSegments, EqualSegments, parse_segments
from capvid.video.worker_pool import Worker, WorkerPool

__all__ = ["capvid", "toy", "toy_files"]


def write_far(path: Path, last: float) -> Path:
    """Write an MKV of 6 frames whose last one is shown at ``last`` seconds."""
    source = write_video(path.with_name("near.mkv"), codec="mpeg4", frames=6)
    with av.open(str(source)) as old, av.open(str(path), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        packets = [packet for packet in old.demux(video=0) if packet.dts is not None]
        for number, packet in enumerate(packets):
            packet.stream, packet.time_base = stream, Fraction(1, 1000)
            packet.pts = packet.dts = number * 100 if number < 5 else int(last * 1000)
            new.mux(packet)
    source.unlink()
    return path


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.mark.parametrize("last", [1e9, 1e12])
def test_a_timestamp_far_away_costs_nothing(tmp_path: Path, last: float) -> None:
    path = write_far(tmp_path / "far.mkv", last)
    times, duration, _ = read_timeline(path, "auto")
    assert len(times) == 6 and duration > 0.9 * last
    near = ChosenTimes((0.0, last / 2, last), UniformSampling(3))
    for sampling in (RateSampling(2), RateSampling(1000), UniformSampling(4), parse_sampling("windows:2/1")):
        assert sampling.choose(times)[-1] == 5
    assert len(near.choose(times)) <= 3
    for cut in (AutoSegments(), EqualSegments(3)):
        chosen = cut.choose(path, times, duration, RateSampling(2))
        features = np.eye(len(chosen), 8, dtype=np.float32)
        spans = cut.spans(path, features, times[chosen], duration)
        assert 1 <= len(spans) <= 6 and spans[-1][1] == duration


@pytest.mark.slow
def test_far_timestamps_in_a_batch(capvid: Run, toy: Toy, tmp_path: Path) -> None:
    far = write_far(tmp_path / "far.mkv", 1e12)
    good = write_video(tmp_path / "good.mp4")
    code, out, err = capvid(
        "caption", far, good, "--model", toy.model, "--segments", "auto", "--format", "json"
    )
    assert (code, out.count('"status": "ok"') + out.count('"status":"ok"')) == (0, 2), err
    code, _, err = capvid(
        "extract", far, good, "--backbone", "toy", "--sampling", "fps:2", "-o", tmp_path / "features"
    )
    assert code == 0, err
    assert sorted(path.stem for path in (tmp_path / "features").glob("*.safetensors")) == ["far", "good"]


def test_sparse_parts_choose_what_all_parts_would() -> None:
    generator = random.Random(0)
    for _ in range(300):
        count = generator.randint(2, 12)
        steps = [generator.choice([0.0, 0.04, 0.1, 3.0, 50.0, 2000.0]) for _ in range(count)]
        times = np.cumsum(steps).astype(np.float32).astype(np.float64) - generator.choice([0.0, 0.5])
        rate = generator.choice([0.5, 2.0, 25.0, 7.3])
        duration = float(times[-1] + np.median(np.diff(times))) - float(times[0])
        if not duration:
            continue
        parts, length = max(1, int(duration * rate + 0.5)), min(1 / rate, duration)
        dense = nearest(times[0] + (np.arange(parts) + 0.5) * length, times)
        np.testing.assert_array_equal(RateSampling(rate).choose(times), dense)


@pytest.mark.parametrize("times", [[], [0.0], [0.0] * 6, [-5.0, -5.0, 0.0], [0.0, 1e28]])
@pytest.mark.parametrize(
    "sampling", [RateSampling(2), UniformSampling(4), parse_sampling("windows:1/100000")]
)
def test_odd_times(times: list[float], sampling: Sampling) -> None:
    chosen = sampling.choose(np.array(times))
    assert len(chosen) <= len(times) and bool(len(chosen)) == bool(times)


def test_a_video_without_length(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", frames=1)
    with open_video(path) as source:
        info, times = source.info, source.frame_times()
    assert (info.duration, info.fps, len(times)) == (0.0, 0.0, 1)
    for cut in (AutoSegments(), EqualSegments(3)):
        assert cut.choose(path, times, 0.0, RateSampling(2)).tolist() == [0]
        assert cut.spans(path, np.ones((1, 8)), times, 0.0) == [(0.0, 0.0)]


def test_stamps_that_would_overflow_are_taken_for_none(tmp_path: Path) -> None:
    path = write_far(tmp_path / "far.mkv", 4e15)
    with open_video(path) as source:
        times = source.frame_times()
    assert len(times) == 6 and np.isfinite(times).all() and (np.diff(times) >= 0).all()


@pytest.mark.parametrize("name", ["v.mp4", "v.mkv", "v.ts", "v.avi", "v.gif", "v.h264"])
@pytest.mark.parametrize("reader", ["auto", "decord"])
def test_frames_beyond_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reader: str
) -> None:
    codec, pixels = ("gif", "rgb8") if name == "v.gif" else ("libx264", "yuv420p")
    path = write_numbers(tmp_path / name, codec, frames=4, gop=None, pixels=pixels)
    monkeypatch.setenv("CAPVID_LIMIT_FRAME_PIXELS", "6144")
    assert reader == "decord" or len(read_frames(path, UniformSampling(2)).frames) == 2
    monkeypatch.setenv("CAPVID_LIMIT_FRAME_PIXELS", "6143")
    with pytest.raises(VideoError, match=r"96 x 64 pixels.* limit of 6143; raise|decord loses frames"):
        read_frames(path, UniformSampling(2), reader=reader)


def test_a_gif_bomb_is_refused_undecoded(tmp_path: Path) -> None:
    """Its one image is far too short, so that decoding it would give another error."""
    path = tmp_path / "bomb.gif"
    descriptor = struct.pack("<4H", 0, 0, 16000, 16000)
    path.write_bytes(
        b"GIF89a" + struct.pack("<2H3B", 16000, 16000, 0xF0, 0, 0) + bytes(6)
        + (b"," + descriptor + b"\0" + bytes([2, 2, 0x4C, 1, 0])) * 2 + b";"
    )  # fmt: skip
    with pytest.raises(VideoError, match="16000 x 16000 pixels, more than the limit"):
        open_video(path)


def test_a_size_that_grows_in_the_midst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = write_numbers(tmp_path / "a.ts", frames=30, size=(96, 64))
    large = write_numbers(tmp_path / "b.ts", frames=30, size=(640, 480))
    path = tmp_path / "v.ts"
    path.write_bytes(small.read_bytes() + large.read_bytes())
    monkeypatch.setenv("CAPVID_LIMIT_FRAME_PIXELS", "6144")
    found = read_frames(path, UniformSampling(200))
    assert numbers(found.frames)[:20] == list(range(20)) and found.info.num_frames <= 32


def test_frames_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_numbers(tmp_path / "v.mp4", frames=30)
    monkeypatch.setenv("CAPVID_LIMIT_VIDEO_FRAMES", "20")
    for reader in ("pyav", "decord"):
        with pytest.raises(VideoError, match="over 20 frames, more than the limit"):
            open_video(path, reader=reader)


def png_header(width: int, height: int) -> bytes:
    """Write the beginning of a PNG of that size, and a little data."""
    chunks = [
        (b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(99))),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def test_images_beyond_the_limit(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    small = io.BytesIO()
    Image.new("RGB", (16, 12)).save(small, "PNG")
    path = tmp_path / "images.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/0.png", png_header(13000, 13000))
        file.writestr("b/0.png", small.getvalue())
        file.writestr("b/1.png", png_header(8000, 8000))  # within the limit, but not of the first one's size
    with pytest.raises(VideoError, match=r"a/0\.png has 13000 x 13000 pixels, more than the limit"):
        open_video(path / "a")
    with open_video(path / "b") as source, pytest.raises(VideoError, match="does not have the size"):
        source.read([1])
    with pytest.raises(ValueError, match="limit"):
        decode_image(lambda: png_header(30000, 30000))
    assert not recwarn.list and Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_that_lie_about_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: int
) -> None:
    monkeypatch.setenv("CAPVID_LIMIT_MEMBER_BYTES", "1e6")
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("a/0.png", bytes(3_000_000))
    with pytest.raises(VideoError, match=r"a/0\.png has 3000000 bytes, more than the limit"):
        open_video(path / "a")
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\x01\x02") + 24
    data[at : at + 4] = struct.pack("<I", 1000)
    path.write_bytes(data)
    with pytest.raises(VideoError, match=r"a/0\.png cannot be decoded"):
        open_video(path / "a")


def test_a_giant_directory_of_a_zip_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPVID_LIMIT_HEADER_BYTES", "4000")
    path = tmp_path / "many.zip"
    with zipfile.ZipFile(path, "w") as file:
        for number in range(100):
            file.writestr(f"a/{number}.png", b"")
    with pytest.raises(VideoError, match=r"directory has .* bytes"):
        find_videos([path])


def test_a_zip_file_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.zip")
    for path in (tmp_path / "pipe.zip", tmp_path / "pipe.zip" / "a"):
        with pytest.raises(VideoError):
            open_video(path)


def test_a_sparse_index(tmp_path: Path) -> None:
    path = tmp_path / "v.mp4"
    with path.open("wb") as file:
        file.write(struct.pack(">I4sIII", 20, b"ftyp", 0, 0, 0) + struct.pack(">I4sQ", 1, b"moov", 40 << 30))
        file.truncate((40 << 30) + 20)
    for reader in ("auto", "decord", "pyav"):
        with pytest.raises(VideoError, match=f"index .moov. has {40 << 30} bytes, more than the limit"):
            open_video(path, reader=reader)


def test_countless_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_kind, "_MAX_BOXES", 1000)
    path = tmp_path / "v.mp4"
    path.write_bytes(struct.pack(">I4s", 8, b"free") * 1001 + struct.pack(">I4s", 8, b"moov"))
    with pytest.raises(VideoError, match="before its index"):
        open_video(path)


SESSION = b"\nv=0\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"


def test_text_with_sync_bytes_is_no_transport_stream(tmp_path: Path) -> None:
    text = b"G" + SESSION
    text += b"x" * (188 - len(text)) + b"G" + b"x" * 5000
    path = tmp_path / "v.ts"
    path.write_bytes(text)
    with pytest.raises(VideoError, match=r"not a video|image"):
        open_video(path)
    path.write_bytes(text[:188] + b"Gxxx")  # too short to tell
    with pytest.raises(VideoError):
        open_video(path)
    damaged = bytearray(write_numbers(tmp_path / "w.ts", "mpeg2video").read_bytes())
    damaged[188 * 3 : 188 * 6] = bytes(188 * 3)
    path.write_bytes(damaged)
    assert open_video(path).info.num_frames > 60


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("v.sdp", SESSION),
        ("v.m3u8", b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nother.mp4\n#EXT-X-ENDLIST\n"),
        ("v.ffconcat", b"ffconcat version 1.0\nfile other.mp4\n"),
        ("%d.jpg", b"\xff\xd8\xff\xe0"),
    ],
)
def test_ffmpeg_opens_no_other_file(tmp_path: Path, name: str, text: bytes) -> None:
    """Not even if the file's kind is not recognised before, as in this test."""
    write_numbers(tmp_path / "other.mp4", frames=3)
    Image.new("RGB", (64, 48)).save(tmp_path / "0.jpg")
    (tmp_path / name).write_bytes(text)
    with pytest.raises(VideoError, match=r"not a video|image"):
        open_video(tmp_path / name)
    with ffmpeg_log(), pytest.raises(VideoError):
        open_container(tmp_path / name, None)


def test_a_name_with_a_pattern_means_itself(tmp_path: Path) -> None:
    for number in range(3):
        Image.new("RGB", (64, 48), (100 * number, 0, 0)).save(tmp_path / f"{number}.webp")
    Image.new("RGB", (64, 48), (0, 255, 0)).save(tmp_path / "%d.webp")
    frames = read_frames(tmp_path / "%d.webp", UniformSampling(5)).frames
    assert len(frames) == 1 and frames[0, 0, 0, 1] > 200


def test_references_in_an_mp4_are_not_followed(tmp_path: Path) -> None:
    """Its data reference names another file instead of saying that the data are in this one."""
    other = write_numbers(tmp_path / "other.mp4", "mpeg4", frames=10, gop=1)
    data = bytearray(other.read_bytes())
    media = data.find(b"mdat") + 4
    data[media : data.find(b"moov") - 4] = bytes(data.find(b"moov") - 4 - media)
    name = b"other.mp4"
    absolute = str(other).encode() + b"\0" * (len(str(other)) % 2)
    alias = bytes(10) + bytes(28) + bytes(12) + bytes([len(name)]) + name.ljust(63, b"\0") + bytes(16)
    alias += struct.pack(">2H", 1, 1) + bytes(16) + struct.pack(">2H", 2, len(absolute)) + absolute
    alias += struct.pack(">2H", 0xFFFF, 0)
    at = data.find(b"dref") + 12
    assert data[at : at + 12] == struct.pack(">I4sI", 12, b"url ", 1)
    data[at : at + 12] = struct.pack(">I4sI", 12 + len(alias), b"alis", 0) + alias
    for box in (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"):
        start = data.find(box) - 4
        data[start : start + 4] = struct.pack(">I", struct.unpack_from(">I", data, start)[0] + len(alias))
    path = tmp_path / "v.mp4"
    path.write_bytes(data)
    with av.open(str(path), options={"enable_drefs": "1", "use_absolute_path": "1"}) as container:
        assert len(list(container.decode(video=0))) == 10  # the reference itself is good
    for reader in ("pyav", "decord"):
        with pytest.raises(VideoError):
            read_frames(path, UniformSampling(10), reader=reader)


def test_memory_that_runs_out_costs_a_file_and_a_process(
    tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPVID_LIMIT_WORKER_BYTES", "6e8")
    path = write_numbers(tmp_path / "v.mp4", frames=8, size=(640, 480))
    before = worker.call(calls.pid)
    with pytest.raises(VideoError, match=r"needs more memory.*600000000.*raise CAPVID_LIMIT_WORKER_BYTES"):
        worker.call(calls.read_hungrily, path)
    assert worker.call(calls.pid) != before
    assert len(worker.call(decode_video, path, UniformSampling(3), [], "auto").times) == 3
    worker.close()


def test_normal_work_stays_far_below_the_limit(tmp_path: Path, worker: Worker) -> None:
    path = write_numbers(tmp_path / "v.mp4", "mjpeg", frames=2, size=(1920, 1080), pixels="yuvj420p")
    for reader in ("pyav", "decord"):
        assert len(worker.call(decode_video, path, UniformSampling(3), [], reader).times) == 2
    status = Path(f"/proc/{worker.call(calls.pid)}/status")
    if status.exists():
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmPeak"))
        assert int(peak.split()[1]) < 2 << 20  # KiB
    worker.close()


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, 1e10])
def test_endless_timeouts(timeout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    with WorkerPool(1, timeout=timeout) as pool:
        assert pool.submit(calls.pid).result() > 0
    assert not failures


@pytest.mark.parametrize(
    ("workers", "timeout"), [(0, 1), (10**6, 1), (10**30, 1), (1, -1), (1, float("nan"))]
)
def test_pools_that_cannot_be(workers: int, timeout: float) -> None:
    with pytest.raises(UsageError, match=r"^(workers|timeout) must be"):
        WorkerPool(workers, timeout=timeout)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"v": ' * 5000,
        "[[0, 1e999]]",
        "[[NaN, 2]]",
        f"[[0, {'9' * 5000}]]",
        f'[["{":".join("9" * 400)}", 2]]',
        "start,end\n0," + "9" * 200_000,
        "start,end\n0,\0\n",
    ],
)
def test_odd_segments(tmp_path: Path, text: str) -> None:
    (tmp_path / "segments").write_text(text, encoding="utf-8")
    with pytest.raises(DataError):
        parse_segments(str(tmp_path / "segments"))


def test_segments_that_are_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for text in (str(tmp_path / "pipe"), "x" * 5000, "a\0b"):
        with pytest.raises(UsageError, match="no such file"):
            parse_segments(text)
    with pytest.raises(VideoError, match="no such file"):
        open_video("a\0b.mp4")
