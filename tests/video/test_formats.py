"""Files are read by what is in them, whatever their name is, or refused for the true reason."""

from __future__ import annotations

import csv
import io
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.bitstream import BitStreamFilterContext
from formats import FORMATS
from make_video import numbers, write_numbers
from PIL import Image

from capvid.errors import VideoError
from capvid.video.frame_sampling import UniformSampling
from capvid.video.readers import open_video, read_frames

with Path(__file__).with_name("media.tsv").open(encoding="utf-8") as table:
    MEDIA = list(csv.DictReader(table, delimiter="\t"))


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("row", MEDIA, ids=[row["file"] for row in MEDIA])
def test_real_files(shared_data: Path, row: dict[str, str]) -> None:
    """Values found by PyAV, ffprobe and torchcodec, or in the collection's description."""
    path = shared_data / "media" / row["file"]
    if row["kind"]:
        with pytest.raises(VideoError, match=row["reason"]) as caught:
            read_frames(path, UniformSampling(1))
        assert caught.value.kind == row["kind"]
        return
    with open_video(path) as source:
        times, info = source.frame_times(), source.info
        low, _, high = row["frames"].partition("-")
        assert int(low) <= len(times) == info.num_frames <= int(high or low)
    sampled = read_frames(path, UniformSampling(8))  # where decoding reveals damage, from what is intact
    assert len(sampled.times) == min(8, len(times))
    assert times[0] == pytest.approx(float(row["first"]), abs=1e-3)
    assert (info.width, info.height) == (int(row["width"]), int(row["height"]))
    assert (info.rotation, info.mirrored) == (int(row["rotation"]), bool(row["mirrored"]))
    assert info.aspect == Fraction(row["aspect"] or 1)
    assert (info.color.split() or ["SDR"])[0] == (row["transfer"] or "SDR")


@pytest.mark.parametrize(("name", "codec", "pixels", "size"), [case[1:] for case in FORMATS])
def test_containers_are_recognised_by_their_content(
    tmp_path: Path, name: str, codec: str, pixels: str, size: tuple[int, int] | None
) -> None:
    written = write_numbers(tmp_path / name, codec, frames=20, bits=5, pixels=pixels, size=size)
    path = written.rename(tmp_path / "without extension")
    with open_video(path) as source:
        times = source.frame_times()
        assert np.diff(times) == pytest.approx(0.04, abs=1e-3)
        assert times[0] == 0
        aspect = source.info.aspect  # DV's pixels are not square
        frames = source.read(range(len(times)))
    stored = frames[:, :, np.arange(round(frames.shape[2] / aspect)) * aspect.numerator // aspect.denominator]
    assert numbers(stored, 5) == list(range(20))


@pytest.mark.parametrize(
    ("encoder", "filters"),
    [
        ("libx264", "h264_metadata=aud=insert"),
        ("libx264", "h264_metadata=sei_user_data=086f3693-b7b3-4f2c-9653-21492feee5b8+first"),
        ("libx265", "hevc_metadata=aud=insert"),
    ],
)
def test_raw_streams_may_begin_with_other_units(tmp_path: Path, encoder: str, filters: str) -> None:
    whole = write_numbers(tmp_path / ("v.h264" if encoder == "libx264" else "v.hevc"), encoder, frames=20)
    path = tmp_path / "raw"
    with av.open(str(whole)) as container:
        stream = container.streams.video[0]
        context = BitStreamFilterContext(filters, stream)
        packets = [out for packet in container.demux(stream) for out in context.filter(packet) if out.size]
    path.write_bytes(b"".join(map(bytes, packets)))
    with open_video(path) as source:
        assert numbers(source.read(range(20))) == list(range(20))


@pytest.mark.shared
def test_raw_vvc(tmp_path: Path, shared_data: Path) -> None:
    path = tmp_path / "raw"
    with av.open(str(shared_data / "media" / "mp4ff__vvc_400kbps_2s.mp4")) as container:
        stream = container.streams.video[0]
        context = BitStreamFilterContext("vvc_mp4toannexb", stream)
        packets = [out for packet in container.demux(stream) for out in context.filter(packet) if out.size]
    path.write_bytes(b"".join(map(bytes, packets)))
    with open_video(path) as source:
        assert (source.info.codec, source.info.num_frames) == ("vvc", 50)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "AVIF", "BMP"])
def test_an_image_is_one_frame(tmp_path: Path, form: str) -> None:
    pixels = np.zeros((48, 64, 3), np.uint8)
    pixels[:, :32] = (200, 40, 60)
    exif = Image.Exif()
    exif[0x112] = 6  # to be turned by 90 degrees clockwise
    options = {} if form == "BMP" else {"exif": exif}
    Image.fromarray(pixels).save(tmp_path / "image", form, **options)
    sampled = read_frames(tmp_path / "image", UniformSampling(28))
    shown = pixels if form == "BMP" else np.rot90(pixels, -1)
    assert sampled.times.tolist() == [0]
    assert sampled.info.rotation == (0 if form == "BMP" else 90)
    assert np.abs(sampled.frames[0].astype(int) - shown).mean() < 8


def test_an_image_of_16_bits_keeps_its_levels(tmp_path: Path) -> None:
    Image.fromarray(np.full((8, 8), 0x8000, np.uint16)).save(tmp_path / "v.png")
    assert (read_frames(tmp_path / "v.png", UniformSampling(1)).frames == 0x80).all()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "AVIF"])
def test_a_damaged_image_is_an_error(tmp_path: Path, form: str) -> None:
    data = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(data, form)
    content = bytearray(data.getvalue())
    if form == "AVIF":
        at = content.find(b"mdat") + 4
        content[at : at + 40] = b"\xff" * 40
    else:
        content[len(content) // 2 :] = bytes(len(content) // 4)
    (tmp_path / "v").write_bytes(content)
    with pytest.raises(VideoError, match="image") as caught:
        open_video(tmp_path / "v")
    assert caught.value.kind == "truncated"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n", "run git lfs pull"),
        (b"\xef\xbb\xbf\r\n<!DOCTYPE html><html>", "web page"),
        (b"#EXTM3U\n#EXT-X-VERSION:3\nhttp://x/a.ts\n", "playlist"),
        ("\x1b[31mé colour\x1b[0m\n".encode() * 5000, "text file"),
        (b"PK\x03\x04" + bytes(100), "zip archive"),
        (b"%PDF-1.7\n\xff\xfe", "PDF"),
        (b"\0\0\0\x18styp" + bytes(16) + b"\0\0\0\x10moof" + bytes(8), "without its initialization segment"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "v.mp4"
    path.write_bytes(content)
    with pytest.raises(VideoError, match=words):
        open_video(path)


def test_the_parts_of_a_fragmented_file_are_named(tmp_path: Path) -> None:
    content = write_numbers(
        tmp_path / "v.mp4", container={"movflags": "frag_keyframe+empty_moov"}
    ).read_bytes()
    at = content.find(b"moof") - 4
    (tmp_path / "init.mp4").write_bytes(content[:at])
    (tmp_path / "segment.m4s").write_bytes(content[at:])
    for name, words in (("init.mp4", "without any media"), ("segment.m4s", "without its initialization")):
        with pytest.raises(VideoError, match=words) as caught:
            open_video(tmp_path / name)
        assert caught.value.kind == "incomplete"
