"""``capvid info``: properties of a video and its sampled frames."""

from __future__ import annotations

from pathlib import Path

import typer

from capvid.cli._options import Reader, complete_captioner
from capvid.cli._terminal import print_line


def info(
    video: Path = typer.Argument(..., metavar="VIDEO", show_default=False),
    model: str | None = typer.Option(
        None,
        show_default="the default one",
        autocompletion=complete_captioner,
        metavar="NAME",
        help="Captioner whose frames to show.",
    ),
    sampling: str | None = typer.Option(
        None,
        metavar="SAMPLING",
        show_default="as in training",
        help="Frame sampling: uniform:N, fps:R or windows:SIZE/STRIDE.",
    ),
    reader: Reader = typer.Option(
        Reader.auto, help="Video reader; auto takes PyAV, and decord where that fails."
    ),
) -> None:
    """Show the properties of a video, and the frames that a captioner looks at."""
    from capvid.backbones.catalog import default_captioners
    from capvid.features.prefetch import decode_video
    from capvid.pipeline import load
    from capvid.video.frame_sampling import ChosenTimes
    from capvid.video.readers import open_video

    with open_video(video, reader=reader.value) as source:
        properties, times = source.info, source.frame_times()
    # its backbones, which may need a download, do not matter here
    pipeline = load(model or default_captioners()[0], device="cpu", sampling=sampling)
    chosen = pipeline.sampling
    if pipeline.segments is not None:
        indices = pipeline.segments.choose(video, times, properties.duration, chosen)
        chosen = ChosenTimes(tuple(times[indices].tolist()), chosen)
    sampled = decode_video(video, chosen, (), reader.value).times
    if pipeline.segments is None:
        sampled = sampled[pipeline.generator.frames(len(sampled))]
    rows = {
        "video": str(video),
        "reader": f"{properties.reader} ({properties.why})",
        "codec": properties.codec,
        "size": f"{properties.width} x {properties.height}",
        "duration": f"{properties.duration:.3f} s",
        "frames": f"{properties.num_frames} ({properties.fps:.3f} per second on average)",
        "model": pipeline.model,
        "sampling": pipeline.sampling.spec(),
        **({} if pipeline.segments is None else {"segments": pipeline.segments.spec}),
    }
    if times[0] > 0.0005:
        rows["start"] = f"the first frame is shown at {times[0]:.3f} s"
    if properties.aspect != 1:
        rows["pixels"] = f"{properties.aspect.numerator}:{properties.aspect.denominator}, made square"
    if properties.mirrored:
        rows["mirrored"] = "top to bottom, before any rotation"
    if properties.rotation:
        rows["rotation"] = f"turned by {properties.rotation} degrees clockwise"
    if properties.clean_aperture:
        rows["aperture"] = "{} x {} of the stored frame, not applied".format(*properties.clean_aperture)
    if properties.color:
        rows["color"] = properties.color
    if properties.lost:
        rows["lost"] = f"{properties.lost} frames that cannot be decoded"
    for name, value in rows.items():
        print_line(f"{name + ':':<10} {value}")
    print_line("sampled:")
    for index, time in zip(times.searchsorted(sampled), sampled, strict=True):
        print_line(f"  frame {index:>6}  at {time:.3f} s")
