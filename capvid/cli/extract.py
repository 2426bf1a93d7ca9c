"""``capvid extract``: videos into files of features."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capvid.cli import common, completion
from capvid.cli.given import Shard, read_given
from capvid.cli.scale import Engine, EngineOption, RayAddress, RetryFailed, Scale, VideosPerFile, run_sharded
from capvid.errors import UsageError

if TYPE_CHECKING:
    from capvid.engine.jobs import Job
    from capvid.features.ahead import Variants
    from capvid.features.backbones import Backbone
    from capvid.features.extract import ExtractionResult
    from capvid.storage import VideoPath
    from capvid.video.inputs import VideoInput
    from capvid.video.sampling import Sampling


class Format(str, Enum):
    """The formats of ``--format``."""

    safetensors = "safetensors"
    webdataset = "webdataset"
    parquet = "parquet"


def extract(
    inputs: common.Inputs = None,
    from_file: common.FromFile = None,
    column: common.Column = None,
    *,
    backbone: Annotated[
        list[str],
        typer.Option(
            show_default=False,
            help="Name of a backbone; again for further streams.",
            autocompletion=completion.backbones,
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR|URL",
            show_default=False,
            help="Folder for the files of features; a folder or an address for shards.",
        ),
    ],
    form: Annotated[
        Format | None,
        typer.Option(
            "--format",
            show_default="safetensors; webdataset in shards",
            help="A file for each video, or shards: WebDataset's tar files of these, or Parquet.",
        ),
    ] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(show_default="the backbone's own", help="Layer to take, once per backbone."),
    ] = None,
    weights: common.Weights = None,
    frames: Annotated[
        int | None,
        typer.Option(
            min=1, max=common.MAX_FRAMES, show_default="28", help="Frames per video, spread evenly over it."
        ),
    ] = None,
    sampling: Annotated[
        str | None,
        typer.Option(
            show_default="uniform:28",
            help="Which frames: uniform:28, at a rate (fps:2), or the middles of windows of neighbouring"
            " frames (windows:16/6: 16 frames, every 6).",
        ),
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Leave out black, flat and repeated ones of these frames.")
    ] = False,
    views: Annotated[
        int,
        typer.Option(
            min=0,
            max=common.MAX_VIEWS,
            help="Augmented views of each video besides, for training: KEY@1.safetensors and so on, in which"
            " every frame is seen in part, mirrored or not, in other light and colours.",
        ),
    ] = 0,
    precision: Annotated[
        str,
        typer.Option(
            help="auto, fp32, fp16 or bf16: auto takes fp16 where that is fast and safe.",
            autocompletion=completion.precisions,
        ),
    ] = "auto",
    device: common.Device = "auto",
    workers: common.Workers = None,
    timeout: common.Timeout = 600,
    batch_size: Annotated[
        int, typer.Option(min=1, max=common.MAX_BATCH, help="Frames gathered for a backbone.")
    ] = 32,
    recursive: common.Recursive = True,
    overwrite: common.Overwrite = False,
    fail_fast: common.FailFast = False,
    shard: Shard = None,
    engine: EngineOption = Engine.local,
    ray_address: RayAddress = None,
    videos_per_file: VideosPerFile = None,
    retry_failed: RetryFailed = False,
) -> None:
    """Turn videos into files of features.

    Each video, given, in a folder, or matched by a pattern ('clips/**/*.mp4'), gets one file
    (.safetensors), written as soon as it is ready. A video whose features are there, made with the same
    backbones, layers, weights and frames, is skipped; features made otherwise are made anew. A video counts
    once, with all its views.

    With --format webdataset or parquet, --videos-per-file or --engine ray, or where -o is an address,
    features go into shards: files with many videos each, which also say what failed. What is in them already
    is skipped.
    """
    if layer and len(layer) != len(backbone):
        raise UsageError(
            f"{len(layer)} layers for {len(backbone)} backbones",
            remedy="give --layer once for each --backbone",
        )
    if weights and len(backbone) > 1 and not weights.is_dir():
        raise UsageError(
            "one file of --weights for several backbones",
            remedy="put their files into a folder and give that",
        )
    if views:
        _check_single_frames(backbone)
    chosen = read_sampling(sampling, frames=frames, clean=clean)
    given = read_given(inputs, from_file, column=column, shard=shard, timeout=timeout or None)
    scale = Scale(
        engine=engine,
        ray_address=ray_address,
        per_file=videos_per_file,
        retry_failed=retry_failed,
        device=device,
        workers=workers,
        timeout=timeout or None,
        recursive=recursive,
        overwrite=overwrite,
        fail_fast=fail_fast,
    )
    sharded = scale.wants_shards(output, form and form.value)
    batch = common.Batch(verb="extracted", many=given.many or sharded)
    load = partial(_load, backbone, layer, weights, precision)
    if sharded:
        if form is Format.safetensors or views:
            raise UsageError(
                "shards take neither --format safetensors nor --views", remedy="use webdataset or parquet"
            )
        shard_form = form.value if form else Format.webdataset.value
        run_sharded(
            lambda: _job(load(scale.loads_on), chosen, batch_size), given, batch, output, shard_form, scale
        )
        batch.finish()
        return
    videos = given.videos(batch, recursive=recursive, fail_fast=fail_fast)
    if not videos:
        batch.finish()
    _check_names(videos, views)
    from capvid.storage import Storage

    folder = Storage(output).local
    assert folder is not None  # else there are shards
    common.check_writable_folder(folder)
    extract_into(
        folder,
        videos,
        load(device),
        chosen,
        batch,
        workers=workers or common.default_workers(),
        timeout=timeout or None,
        batch_size=batch_size,
        views=views,
        overwrite=overwrite,
        fail_fast=fail_fast,
    )
    batch.finish()


def _load(
    names: Sequence[str], layers: Sequence[str] | None, weights: Path | None, precision: str, device: str
) -> list[Backbone]:
    """Load the backbones, each with its layer."""
    from capvid.device import resolve_device
    from capvid.features.backbones import load_backbone

    place = resolve_device(device)
    return [
        load_backbone(
            name,
            layer=layers[number] if layers else None,
            weights=weights,
            device=place,
            precision=precision,
        )
        for number, name in enumerate(names)
    ]


def _job(backbones: Sequence[Backbone], sampling: Sampling, batch_size: int) -> Job:
    """The job of extraction for shards."""
    from capvid.engine.jobs import ExtractJob

    return ExtractJob(backbones=backbones, sampling=sampling, batch_size=batch_size)


def read_sampling(text: str | None, *, frames: int | None, clean: bool) -> Sampling:
    """Read which frames to take: ``text``, or so many ``frames``, 28 if neither is given.

    Raises:
        UsageError: both ``--frames`` and ``--sampling``, or a sampling that is not understood.
    """
    from capvid.video.sampling import parse_sampling

    if text is not None and frames is not None:
        raise UsageError("--frames and --sampling exclude each other", remedy="give one of them")
    text = text or f"uniform:{frames or 28}"
    return parse_sampling(text if not clean or text.endswith("+clean") else f"{text}+clean")


def _check_single_frames(backbones: Sequence[str]) -> None:
    """Raise UsageError if a backbone sees clips, whose frames would each be seen in another way."""
    from capvid.features.registry import backbone_entry

    for name in backbones:
        if clip := backbone_entry(name).clip:
            raise UsageError(
                f"{name} sees clips of {clip.frames} frames, and --views are of single frames",
                remedy="leave out --views, or that backbone",
            )


def _check_names(videos: Sequence[VideoInput], views: int) -> None:
    """Raise UsageError if a video has the name of a view of another."""
    from capvid.features.views import view_key

    names = {view_key(video.key, number): video for video in videos for number in range(1, views + 1)}
    for video in videos:
        if other := names.get(video.key):
            raise UsageError(
                f"{video.path}: its features would have the name of a view of {other.path}",
                remedy="rename the video, or extract it into another folder",
            )


@dataclass(frozen=True)
class _Todo:
    """What is extracted of a video: its ``variants``, and the files that these go to."""

    path: VideoPath
    key: str
    variants: Variants
    targets: tuple[Path, ...]

    @classmethod
    def of(cls, video: VideoInput, folder: Path, views: int) -> _Todo:
        """Everything: the video as it is, and so many views."""
        from capvid.features.augment import Augmentation
        from capvid.features.views import view_key

        numbers = range(1, views + 1)
        keys = [video.key, *(view_key(video.key, number) for number in numbers)]
        variants = (None, *(Augmentation(number, video.key) for number in numbers))
        return cls(video.path, video.key, variants, tuple(folder / f"{key}.safetensors" for key in keys))

    def rest(self, backbones: Sequence[Backbone], sampling: Sampling) -> _Todo:
        """What is not done yet."""
        left = [n for n, path in enumerate(self.targets) if not _is_done(path, backbones, sampling)]
        return replace(
            self,
            variants=tuple(self.variants[n] for n in left),
            targets=tuple(self.targets[n] for n in left),
        )


def extract_into(
    folder: Path,
    videos: Sequence[VideoInput],
    backbones: Sequence[Backbone],
    sampling: Sampling,
    batch: common.Batch,
    *,
    workers: int,
    timeout: float | None = 600,
    batch_size: int = 32,
    views: int = 0,
    overwrite: bool = False,
    fail_fast: bool = False,
) -> None:
    """Extract what is not done yet, each video into its files as it comes; ``batch`` counts videos.

    Args:
        folder: for the files, named by the videos' keys and those of their views.
        videos: what to extract.
        backbones: one stream each.
        sampling: which frames to take.
        batch: is told what is done and what fails.
        workers: processes that decode.
        timeout: seconds after which a file is given up; None waits for ever.
        batch_size: frames gathered for a backbone.
        views: augmented views of each video, beside itself.
        overwrite: also do what is done.
        fail_fast: stop at the first video that fails.
    """
    from capvid.features.extract import extract_features
    from capvid.features.file import save_features
    from capvid.files import remove_leftovers
    from capvid.isolation import input_error

    batch.interrupted = common.GOES_ON
    jobs = [_Todo.of(video, folder, views) for video in videos]
    rests = jobs if overwrite else [job.rest(backbones, sampling) for job in jobs]
    todo = {job.path: job for job in rests if job.targets}
    batch.skipped = len(videos) - len(todo)
    remove_leftovers(path for job in jobs for path in job.targets)

    def extracted() -> Generator[ExtractionResult, None, None]:
        yield from extract_features(
            todo.values(), backbones, sampling, workers=workers, batch_size=batch_size, timeout=timeout
        )

    with closing(extracted()) as results, batch.progress(len(todo), data_on_stdout=False):
        for result in results:
            batch.advance()
            batch.lost(result.path, result.lost)
            try:
                if result.error is not None or result.features is None:
                    raise result.error or UsageError(f"{result.path}: no features")
                made = (result.features, *result.further)
                with common.output_file(result.path, folder):
                    for path, features in zip(todo[result.path].targets, made, strict=True):
                        save_features(path, features)
                batch.done += 1
            except Exception as cause:
                batch.failed(input_error(result.path, cause))
                if fail_fast:
                    return


def _is_done(path: Path, backbones: Sequence[Backbone], sampling: Sampling) -> bool:
    """Whether the file holds whole features made with these backbones and this sampling."""
    from capvid.features.file import load_header

    try:
        header = load_header(path)
    except Exception:  # whatever is wrong with the file, it will be replaced
        return False
    return header.streams == tuple(b.header for b in backbones) and header.sampling == sampling.spec()
