"""``capvid extract``: videos into files of features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from capvid.cli._batch import (
    RESUMABLE,
    Batch,
    check_writable_folder,
    output_file,
    print_plan,
    read_inputs,
    run_sharded,
    wants_shards,
)
from capvid.cli._options import (
    MAX_BATCH,
    MAX_FRAMES,
    MAX_VIEWS,
    InputOptions,
    RuntimeOptions,
    ShardingOptions,
    complete_backbone,
    complete_precision,
    option_group,
)
from capvid.errors import CapvidError, UsageError, input_error

if TYPE_CHECKING:
    from capvid.backbones.backbone import Backbone
    from capvid.features.extraction import ExtractionResult
    from capvid.features.prefetch import Variants
    from capvid.utils.storage import VideoPath
    from capvid.video.frame_sampling import Sampling
    from capvid.video.input_set import VideoInput


Format = Literal["safetensors", "webdataset", "parquet"]


@option_group("inputs", InputOptions)
@option_group("sharding", ShardingOptions)
@option_group("runtime", RuntimeOptions)
def extract(
    *,
    backbone: list[str] = typer.Option(
        ...,
        show_default=False,
        help="Name of a backbone; repeat it for further streams.",
        autocompletion=complete_backbone,
    ),
    output: str = typer.Option(
        ...,
        "-o",
        "--output",
        metavar="DIR|URL",
        show_default=False,
        help="Folder for the feature files; a folder or an address for shards.",
    ),
    form: Format | None = typer.Option(
        None,
        "--format",
        show_default="safetensors; webdataset in shards",
        help="A file for each video, or shards: tar files of these (WebDataset), or Parquet.",
    ),
    layer: list[str] | None = typer.Option(
        None, show_default="the backbone's own", help="Layer to take, once per backbone."
    ),
    weights: Path | None = typer.Option(None, help="The backbone's weights: a file, or its folder."),
    frames: int | None = typer.Option(
        None, min=1, max=MAX_FRAMES, show_default="28", help="Frames per video, evenly spaced."
    ),
    sampling: str | None = typer.Option(
        None,
        show_default="uniform:28",
        help="Which frames: uniform:28, at a rate (fps:2), or the middles of windows of neighbouring"
        " frames (windows:16/6: 16 frames, every 6).",
    ),
    clean: bool = typer.Option(False, "--clean", help="Leave out black, flat and repeated frames."),
    views: int = typer.Option(
        0,
        min=0,
        max=MAX_VIEWS,
        help="Augmented views of each video, for training (KEY@1.safetensors, ...): random crops,"
        " flips and colours.",
    ),
    precision: str = typer.Option(
        "auto",
        help="auto, fp32, fp16 or bf16: auto takes fp16 where that is fast and safe.",
        autocompletion=complete_precision,
    ),
    batch_size: int = typer.Option(
        32, min=1, max=MAX_BATCH, help="Frames that the backbone computes together."
    ),
    runtime: RuntimeOptions,
    inputs: InputOptions,
    sharding: ShardingOptions,
) -> None:
    """Turn videos into files of features.

    Each video, given, in a folder, or matched by a pattern ('clips/**/*.mp4'), gets one file
    (.safetensors), written as soon as it is ready. A video whose features are there, made with the same
    backbones, layers, weights and frames, is skipped; other features are replaced. A video counts
    once, with all its views.

    With --format webdataset or parquet, --videos-per-file or --engine ray, or where -o is an address,
    features go into shards: files with many videos each, which also record what failed. What is in them
    already is skipped.
    """
    if layer and len(layer) != len(backbone):
        problem = f"{len(layer)} layers for {len(backbone)} backbones"
        raise UsageError(problem, remedy="give --layer once for each --backbone")
    if weights and len(backbone) > 1 and not weights.is_dir():
        problem = "one file of --weights for several backbones"
        raise UsageError(problem, remedy="put their files into a folder and give that")
    if views:
        from capvid.backbones.catalog import backbone_entry

        for name in backbone:
            if clip := backbone_entry(name).clip:  # its frames would each be augmented differently
                problem = f"{name} sees clips of {clip.frames} frames, and --views are of single frames"
                raise UsageError(problem, remedy="leave out --views, or that backbone")
    chosen = read_sampling(sampling, frames=frames, clean=clean)
    input_set = read_inputs(inputs, timeout=runtime.timeout or None)
    sharded = wants_shards(sharding, output, form)
    batch = Batch(verb="extracted", many=input_set.many or sharded)
    if inputs.dry_run:
        batch = Batch(verb="to extract", many=batch.many, dry_run=True)

    def load_backbones(device: str) -> list[Backbone]:
        from capvid.backbones.backbone import load_backbone
        from capvid.utils.device import resolve_device

        return [
            load_backbone(
                name,
                layer=layer[number] if layer else None,
                weights=weights,
                device=resolve_device(device),
                precision=precision,
            )
            for number, name in enumerate(backbone)
        ]

    if sharded:
        from capvid.distributed.jobs import ExtractJob

        if form == "safetensors" or views:
            problem = "shards take neither --format safetensors nor --views"
            raise UsageError(problem, remedy="use webdataset or parquet")
        run_sharded(
            lambda device: ExtractJob(
                backbones=load_backbones(device), sampling=chosen, batch_size=batch_size
            ),
            input_set,
            batch,
            output,
            form or "webdataset",
            (runtime, sharding),
        )
        return
    videos = list(input_set.videos(batch))
    if not videos:
        batch.finish()
        return
    from capvid.features.feature_store import view_key
    from capvid.utils.output_check import check_outputs
    from capvid.utils.storage import Storage

    view_keys = {view_key(video.key, number): video for video in videos for number in range(1, views + 1)}
    for video in videos:
        if other := view_keys.get(video.key):
            problem = f"{video.path}: its features would have the name of a view of {other.path}"
            raise UsageError(problem, remedy="rename the video, or extract it into another folder")
    folder = Storage(output).local
    assert folder is not None  # otherwise there are shards
    if not inputs.dry_run:
        check_writable_folder(folder)
    jobs = [ExtractionJob.of(video, folder, views) for video in videos]
    targets = [("-o", path) for job in jobs for path in job.targets]
    check_outputs(targets, [*input_set.named, *(video.path for video in videos)], kind="features")
    if inputs.dry_run:
        by_path = {job.path: job for job in jobs}
        can_be_done = folder.is_dir() and not inputs.overwrite
        loaded = load_backbones(runtime.device) if can_be_done else []
        print_plan(
            batch,
            videos,
            lambda path: by_path[path].targets[0],
            is_done=lambda path: can_be_done and not by_path[path].rest(loaded, chosen).targets,
        )
        return
    backbones = load_backbones(runtime.device)
    extract_into(jobs, backbones, chosen, batch, runtime, batch_size=batch_size, inputs=inputs)
    batch.finish()


def read_sampling(text: str | None, *, frames: int | None, clean: bool) -> Sampling:
    """Return the sampling that ``text`` describes, or uniform sampling of ``frames`` frames, 28 by default.

    Raises:
        UsageError: both ``--frames`` and ``--sampling``, or a sampling that is not understood.
    """
    from capvid.video.frame_sampling import parse_sampling

    if text is not None and frames is not None:
        raise UsageError("--frames and --sampling exclude each other", remedy="give one of them")
    text = text or f"uniform:{frames or 28}"
    return parse_sampling(text if not clean or text.endswith("+clean") else f"{text}+clean")


@dataclass(frozen=True)
class ExtractionJob:
    """What to extract of a video: its ``variants``, and their files in a folder."""

    path: VideoPath
    key: str
    folder: Path
    variants: Variants
    targets: tuple[Path, ...]

    @classmethod
    def of(cls, video: VideoInput, folder: Path, views: int = 0) -> ExtractionJob:
        """Return the job for a video and its augmented views."""
        from capvid.features.augmentation import Augmentation
        from capvid.features.feature_store import view_key

        numbers = range(1, views + 1)
        keys = [video.key, *(view_key(video.key, number) for number in numbers)]
        variants = (None, *(Augmentation(number, video.key) for number in numbers))
        targets = tuple(folder / f"{key}.safetensors" for key in keys)
        return cls(video.path, video.key, folder, variants, targets)

    def rest(self, backbones: Sequence[Backbone], sampling: Sampling) -> ExtractionJob:
        """Return the job without the files that hold features of these backbones and sampling."""
        from capvid.features.feature_file import load_header

        streams, left = tuple(backbone.header for backbone in backbones), []
        for number, path in enumerate(self.targets):
            try:
                header = load_header(path)
            except Exception:  # whatever is wrong with the file, it will be replaced
                left.append(number)
                continue
            if header.streams != streams or header.sampling != sampling.spec():
                left.append(number)
        return replace(
            self,
            variants=tuple(self.variants[number] for number in left),
            targets=tuple(self.targets[number] for number in left),
        )


def extract_into(
    jobs: Sequence[ExtractionJob],
    backbones: Sequence[Backbone],
    sampling: Sampling,
    batch: Batch,
    runtime: RuntimeOptions,
    *,
    batch_size: int = 32,
    inputs: InputOptions | None = None,
) -> None:
    """Extract what is not done yet, each video into its files as it comes; ``batch`` counts videos."""
    from capvid.features import extraction
    from capvid.features.feature_file import save_features
    from capvid.utils.files import remove_leftovers

    inputs = inputs or InputOptions()
    batch.interrupted = RESUMABLE
    rests = jobs if inputs.overwrite else [job.rest(backbones, sampling) for job in jobs]
    todo = {job.path: job for job in rests if job.targets}
    batch.skipped = len(jobs) - len(todo)
    remove_leftovers(path for job in jobs for path in job.targets)
    results = extraction.extract(
        todo.values(),
        backbones,
        sampling,
        workers=runtime.num_workers,
        batch_size=batch_size,
        timeout=runtime.timeout or None,
        reader=runtime.reader,
    )

    def write(result: ExtractionResult) -> CapvidError | None:
        job = todo[result.path]
        try:
            if result.error is not None or result.features is None:
                raise result.error or UsageError(f"{result.path}: no features")
            with output_file(result.path, job.folder):
                for path, features in zip(job.targets, (result.features, *result.further), strict=True):
                    save_features(path, features)
        except Exception as cause:
            return input_error(result.path, cause)
        batch.done += 1
        return None

    batch.run(results, write, total=len(todo), fail_fast=inputs.fail_fast)
