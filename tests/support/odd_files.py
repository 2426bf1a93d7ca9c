"""A folder of broken and unusual files, and whether features can be extracted from each."""

from __future__ import annotations

import os
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
from make_video import write_sound, write_video

Files = dict[str, bool]
_FAST = {"preset": "ultrafast"}
_QUALITY = {"libx264": _FAST, "libx265": _FAST, "mpeg4": {"qmin": "8", "qmax": "8"}}


def _write_noise(
    path: Path, codec: str = "mpeg4", *, frames: int = 80, size: tuple[int, int] = (96, 64), **kind: str
) -> Path:
    """Write a video of moving noise, large enough to be damaged."""
    generator = np.random.default_rng(len(path.name))
    image = generator.integers(0, 255, (size[1], size[0], 3), np.uint8)
    options = {"g": "4", **_QUALITY.get(codec, {})}
    container_options = {"movflags": "faststart"} if path.suffix == ".mp4" else {}
    with av.open(str(path), "w", options=container_options) as container:
        stream = container.add_stream(codec, rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt = *size, kind.get("pixels", "yuv420p")
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(np.roll(image, 3 * number, 1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def make_broken_files(folder: Path) -> Files:
    """Write files that are not videos, or too damaged to read a frame."""
    existing = set(folder.iterdir())
    (folder / "empty.mp4").touch()
    (folder / "text.mp4").write_text("this is not a video\n" * 200, encoding="utf-8")
    (folder / "text.mkv").write_text("x" * 10, encoding="utf-8")
    for seed, name in enumerate(("random.mp4", "random.avi", "random.mkv", "random.ts")):
        (folder / name).write_bytes(np.random.default_rng(seed).bytes(50_000))
    (folder / "zeros.mp4").write_bytes(bytes(100_000))
    (folder / "one byte.mp4").write_bytes(b"\0")
    (folder / "box of a giant.mp4").write_bytes(b"\xff\xff\xff\xffftypisom" + bytes(64))
    (folder / "endless box.mp4").write_bytes((b"\0\0\0\x08free" * 3) + b"\0\0\0\x01mdat" + b"\xff" * 8)
    with zipfile.ZipFile(folder / "zip.mp4", "w") as archive:
        archive.writestr("a.txt", "no video")
    write_sound(folder / "sound.mp4")
    write_sound(folder / "sound.mkv")
    content = write_video(folder / "complete.mp4").read_bytes()
    (folder / "complete.mp4").unlink()
    (folder / "no index.mp4").write_bytes(content[: content.find(b"moov") - 4])
    return dict.fromkeys((path.name for path in set(folder.iterdir()) - existing), False)


def _write_truncated(folder: Path) -> Files:
    """Truncated files, and files with a hole in the middle."""
    readable: Files = {}
    for suffix in ("mp4", "mkv", "avi", "ts"):
        complete = _write_noise(folder / f"complete.{suffix}")
        content = complete.read_bytes()
        complete.unlink()
        for percent in (10, 50, 90):
            name = f"cut at {percent}.{suffix}"
            (folder / name).write_bytes(content[: len(content) * percent // 100])
            readable[name] = True
        middle = len(content) // 2
        hole = np.random.default_rng(1).bytes(len(content) // 20)
        (folder / f"hole.{suffix}").write_bytes(content[:middle] + hole + content[middle + len(hole) :])
        readable[f"hole.{suffix}"] = True
    return readable


def _write_unusual_formats(folder: Path) -> Files:
    """Write valid videos of unusual formats."""
    for name, codec in (
        ("vp8.webm", "libvpx"),
        ("vp9.webm", "libvpx-vp9"),
        ("mpeg1.mpg", "mpeg1video"),
        ("mpeg2.ts", "mpeg2video"),
        ("motion jpeg.avi", "mjpeg"),
        ("windows.wmv", "wmv2"),
        ("flash.flv", "flv"),
        ("hevc.mp4", "libx265"),
    ):
        _write_noise(folder / name, codec, frames=12, pixels="yuvj420p" if codec == "mjpeg" else "yuv420p")
    _write_noise(folder / "10 bits.mp4", "libx264", frames=12, pixels="yuv420p10le")
    _write_noise(folder / "10 bits.mkv", "libx265", frames=12, pixels="yuv420p10le")
    _write_noise(folder / "8K.mp4", "mjpeg", frames=2, size=(7680, 4320), pixels="yuvj420p")
    _write_noise(folder / "odd.mkv", "ffv1", frames=5, size=(65, 49))
    _write_noise(folder / "small.mkv", "ffv1", frames=5, size=(3, 2))
    _write_noise(folder / "animated.gif", "gif", frames=6, pixels="rgb8")
    _write_noise(folder / "one frame.mp4", frames=1)
    write_video(folder / "variable.mkv", times=[0, 0.1, 0.15, 2, 2.5, 7], frames=6)
    _write_noise(folder / "a matroska.mp4.mkv").rename(folder / "a matroska.mp4")
    _write_noise(folder / "an mp4.tmp.mp4").rename(folder / "an mp4.avi")
    readable = dict.fromkeys((path.name for path in folder.iterdir()), True)
    try:
        _write_noise(folder / "av1.mkv", "libsvtav1", frames=12)
        readable["av1.mkv"] = True
    except (av.FFmpegError, ValueError):  # this build of PyAV lacks the encoder
        (folder / "av1.mkv").unlink(missing_ok=True)
    content = bytearray(_write_noise(folder / "rotated.mp4").read_bytes())
    at = content.find(b"tkhd") + 44
    content[at : at + 36] = np.array([0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30], ">i4").tobytes()
    (folder / "rotated.mp4").write_bytes(content)
    content = bytearray(_write_noise(folder / "no size.mp4").read_bytes())
    for box, offset, length in ((b"tkhd", 80, 8), (b"mp4v", 28, 4)):
        at = content.find(box, content.find(b"moov")) + offset
        content[at : at + length] = bytes(length)
    (folder / "no size.mp4").write_bytes(content)
    return readable | {"rotated.mp4": True, "no size.mp4": True}


def _write_unusual_names(folder: Path) -> Files:
    """Write files with difficult names, and paths that are not regular files."""
    readable: Files = {}
    for name in (
        "  two  spaces .mp4",
        'it\'s "quoted".mp4',
        "new\nline.mp4",
        "🎬 film é ü 电影.mp4",
        "-rf.mp4",
        "$(echo) `x`; *.mp4",
        "100%s {}.mp4",
        "n" * 240 + ".mp4",
        "[b] at 10:30.mp4",
    ):
        _write_noise(folder / "plain.mp4", frames=5).rename(folder / name)
        readable[name] = True
    (folder / "is a folder.mp4").mkdir()
    _write_noise(folder / "is a folder.mp4" / "inside.mp4", frames=5)
    readable["is a folder.mp4/inside.mp4"] = True
    (folder / "loop.mp4").symlink_to("loop.mp4")
    (folder / "to nowhere.mp4").symlink_to("nowhere.mp4")
    (folder / "to above").symlink_to("..", target_is_directory=True)
    readable |= {"loop.mp4": False, "to nowhere.mp4": False}
    os.mkfifo(folder / "pipe.mp4")
    readable["pipe.mp4"] = False
    with socket.socket(socket.AF_UNIX) as listener:
        working_directory = Path.cwd()
        os.chdir(folder)  # the path of a socket must be short
        try:
            listener.bind("socket.mp4")
        finally:
            os.chdir(working_directory)
    readable["socket.mp4"] = False
    locked = _write_noise(folder / "locked.mp4", frames=5)
    locked.chmod(0)
    readable["locked.mp4"] = os.access(locked, os.R_OK)  # root may read everything
    return readable


def make_odd_files(folder: Path) -> Files:
    """Fill a folder with more than 60 files; map each name to whether features can be extracted."""
    readable: Files = {}
    writers: list[Callable[[Path], Files]] = [
        _write_unusual_formats,
        make_broken_files,
        _write_truncated,
        _write_unusual_names,
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for write in writers:
        readable |= write(folder)
    return readable
