"""``capvid info``: properties of a video and its sampled frames."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capvid.cli._options import MAX_FRAMES, Reader
from capvid.cli._terminal import print_line


def info(
    video: Annotated[Path, typer.Argument(metavar="VIDEO", show_default=False)],
    frames: Annotated[
        int, typer.Option(min=1, max=MAX_FRAMES, help="Frames to choose, as caption and extract do.")
    ] = 28,
    reader: Annotated[
        Reader, typer.Option(help="Video reader; auto takes PyAV, and decord where that fails.")
    ] = (Reader.auto),
) -> None:
    """Show what the reader sees in a video.

    With the frames that would be taken, and their times.
    """
    from capvid.video.frame_sampling import UniformSampling
    from capvid.video.readers import open_video

    sampling = UniformSampling(frames)
    with open_video(video, reader=reader.value) as source:
        properties, times = source.info, source.frame_times()
    chosen = sampling.choose(times)
    rows = {
        "video": str(video),
        "reader": f"{properties.reader} ({properties.why})",
        "codec": properties.codec,
        "size": f"{properties.width} x {properties.height}",
        "duration": f"{properties.duration:.3f} s",
        "frames": f"{properties.num_frames} ({properties.fps:.3f} per second on average)",
        "sampling": sampling.spec(),
    }
    if properties.rotation:
        rows["rotation"] = f"turned by {properties.rotation} degrees clockwise"
    if properties.lost:
        rows["lost"] = f"{properties.lost} frames that cannot be decoded"
    for name, value in rows.items():
        print_line(f"{name + ':':<10} {value}")
    print_line("sampled:")
    for index in chosen:
        print_line(f"  frame {int(index):>6}  at {float(times[index]):.3f} s")
