"""``capvid info``: what the reader sees in a video."""

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
        seen, times = source.info, source.frame_times()
    chosen = sampling.choose(times)
    rows = {
        "video": str(video),
        "reader": f"{seen.reader} ({seen.why})",
        "codec": seen.codec,
        "size": f"{seen.width} x {seen.height}",
        "duration": f"{seen.duration:.3f} s",
        "frames": f"{seen.num_frames} ({seen.fps:.3f} per second on average)",
        "sampling": sampling.spec(),
    }
    if seen.rotation:
        rows["rotation"] = f"turned by {seen.rotation} degrees clockwise"
    if seen.lost:
        rows["lost"] = f"{seen.lost} frames that cannot be decoded"
    for name, value in rows.items():
        print_line(f"{name + ':':<10} {value}")
    print_line("sampled:")
    for index in chosen:
        print_line(f"  frame {int(index):>6}  at {float(times[index]):.3f} s")
