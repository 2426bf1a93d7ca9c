"""Frames planned from an MP4's index are those planned from all its packets."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
from make_video import numbers, write_numbers

from capvid.errors import VideoError
from capvid.video import probe
from capvid.video.container_kind import kind_of
from capvid.video.frame_sampling import UniformSampling
from capvid.video.probe import scan
from capvid.video.readers import open_video, read_frames

COUNT = 120


@pytest.fixture(autouse=True)
def indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe the index of small files as well."""
    monkeypatch.setattr(probe, "_MIN_INDEXED", 0)


def reading_all(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Note the files of which all packets are read."""
    paths: list[Path] = []
    read = probe._read_packets

    def noted(path: Path, *arguments: object) -> object:
        paths.append(path)
        return read(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(probe, "_read_packets", noted)
    return paths


def assert_same(path: Path) -> None:
    index, packets = scan(path, "mp4"), scan(path, "mp4", trust=False)
    assert index.pts is not None and packets.pts is not None
    for one, other in ((index.pts, packets.pts), (index.visible, packets.visible)):
        assert np.array_equal(one, other), path.name
    assert np.array_equal(index.times(), packets.times())
    assert not (index.keys & ~packets.keys).any()  # a parser may find further ones
    assert index.expected == packets.expected


@pytest.mark.parametrize("codec", ["libx264", "libx265", "mpeg4"])
@pytest.mark.parametrize("flags", ["", "faststart", "negative_cts_offsets"])
def test_the_index_gives_the_same_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, flags: str
) -> None:
    path = write_numbers(tmp_path / "v.mp4", codec, container={"movflags": flags} if flags else {})
    assert_same(path)
    paths = reading_all(monkeypatch)
    with open_video(path) as source:
        assert numbers(source.read([3, 60, 119])) == [3, 60, 119]
        assert not source.info.lost
    assert not paths


def test_fragments_have_no_complete_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_numbers(tmp_path / "v.mp4", container={"movflags": "frag_keyframe+empty_moov"})
    paths = reading_all(monkeypatch)
    with open_video(path) as source:
        assert numbers(source.read([3, 60])) == [3, 60]
    assert paths == [path]


def test_damage_is_found_while_decoding(tmp_path: Path) -> None:
    path = write_numbers(tmp_path / "v.mp4", noise=60, container={"movflags": "faststart"})
    content = bytearray(path.read_bytes())
    start, end = len(content) // 2, len(content) * 6 // 10
    content[start:end] = bytes(end - start)
    path.write_bytes(content)
    assert not scan(path, "mp4").damaged
    sampled = read_frames(path, UniformSampling(COUNT))
    assert numbers(sampled.frames) == np.round(sampled.times * 25).tolist()
    assert sampled.info.lost + len(sampled.frames) == COUNT
    assert sampled.info.why == "the file is damaged"


@pytest.mark.parametrize("box", [b"ctts", b"stsz", b"stts"])
def test_a_damaged_index_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, box: bytes) -> None:
    content = bytearray(write_numbers(tmp_path / "v.mp4").read_bytes())
    at = content.find(box)
    generator = np.random.default_rng(0)
    for _ in range(20):
        mutant = content.copy()
        mutant[at + 4 + generator.integers(60)] ^= 1 << generator.integers(8)
        (tmp_path / "w.mp4").write_bytes(mutant)
        try:
            index = scan(tmp_path / "w.mp4", "mp4")
        except VideoError:
            continue
        packets = scan(tmp_path / "w.mp4", "mp4", trust=False)
        assert np.array_equal(index.times()[:8], packets.times()[:8])


@pytest.mark.slow
@pytest.mark.shared
def test_the_index_of_real_files_gives_the_same_plan(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, used = reading_all(monkeypatch), 0
    for path in sorted([*(shared_data / "media").iterdir(), *(shared_data / "data" / "clips").iterdir()]):
        try:
            kind = kind_of(path)
            if kind != "mp4" or "corrupted" in path.name:
                continue
            scan(path, kind)
        except VideoError:
            continue
        if path not in paths:
            assert_same(path)
            used += 1
    assert used == 67


@pytest.mark.slow
def test_bytes_read_of_a_long_file(tmp_path: Path) -> None:
    """The plan of a file of 10 minutes needs its index and the first packets."""
    path = write_numbers(tmp_path / "v.mp4", "mpeg4", frames=300, bits=16, size=(320, 240), noise=200)
    long = tmp_path / "long.mp4"
    with av.open(str(path)) as old, av.open(str(long), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        packets = [packet for packet in old.demux(video=0) if packet.size]
        data = [(bytes(packet), packet.is_keyframe) for packet in packets]
        step = packets[1].dts - packets[0].dts
        for number in range(15_000):
            content, is_key = data[number % len(data)]
            packet = av.Packet(content)
            packet.stream, packet.time_base = stream, packets[0].time_base
            packet.pts = packet.dts = number * step
            packet.is_keyframe = is_key
            new.mux(packet)
    before = bytes_read()
    index = scan(long, "mp4")
    planned = bytes_read() - before
    packets_plan = scan(long, "mp4", trust=False)
    scanned = bytes_read() - before - planned
    assert np.array_equal(index.times(), packets_plan.times())
    assert planned * 10 < scanned


def bytes_read() -> int:
    """Return the bytes that this process has read, of the file system or its cache."""
    try:
        return int(Path("/proc/self/io").read_text().split()[1])
    except OSError:
        pytest.skip("this system does not count the bytes that a process reads")
