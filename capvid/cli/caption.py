"""``capvid caption``: videos into sentences."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from copy import copy
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar

import typer

from capvid.cli import common, completion
from capvid.cli.given import Shard, read_given
from capvid.cli.looking import check_report, looking
from capvid.cli.scale import Engine, EngineOption, RayAddress, RetryFailed, Scale, VideosPerFile, run_sharded
from capvid.errors import UsageError

if TYPE_CHECKING:
    from capvid.engine.jobs import Job
    from capvid.output import Writer
    from capvid.pipeline import CaptionPipeline
    from capvid.results import CaptionResult
    from capvid.storage import VideoPath
    from capvid.video.inputs import VideoInput

    Look = Callable[[CaptionResult], list[str]]
    Commit = Callable[[], object]
    Prepare = Callable[[CaptionResult], Commit]

_T = TypeVar("_T")


class Format(str, Enum):
    """The formats of ``--format``."""

    txt = "txt"
    json = "json"
    jsonl = "jsonl"
    srt = "srt"
    vtt = "vtt"
    tsv = "tsv"
    csv = "csv"
    parquet = "parquet"


def caption(
    inputs: common.Inputs = None,
    from_file: common.FromFile = None,
    column: common.Column = None,
    model: Annotated[
        str | None,
        typer.Option(
            show_default="the one that comes with capvid",
            autocompletion=completion.captioners,
            help="Name of a trained captioner (see capvid models), the folder of one, or "
            "OWNER/NAME[@REVISION] on the Hugging Face Hub, which stays at the commit of its first download.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", show_default=False, help="One file for everything.")
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|URL",
            show_default=False,
            help="Folder that takes one file per video; a folder or an address that takes shards.",
        ),
    ] = None,
    form: Annotated[
        Format | None,
        typer.Option("--format", show_default="by the name of -o, else txt", help="Format of the output."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            show_default=False,
            help="Besides, a page to look at: frames, captions, and what each word looked at. Videos that "
            "--output-dir skips are captioned again for it; their files stay as they are.",
        ),
    ] = None,
    attention: Annotated[
        bool,
        typer.Option(
            "--attention",
            help="What each word looked at: in json and jsonl the weights of the frames, otherwise a small "
            "chart for each word on stderr.",
        ),
    ] = False,
    segments: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|N|auto",
            show_default="none; auto for captioners of paragraphs",
            help="A sentence for each segment: of a file (JSON or CSV of start,end in seconds), of so many "
            "equal ones, or of those between which the picture changes.",
        ),
    ] = None,
    beam: Annotated[
        int, typer.Option(min=1, max=common.MAX_BEAM, help="Width of the beam search; 1 is greedy.")
    ] = 5,
    num_captions: Annotated[
        int, typer.Option(min=1, max=common.MAX_CAPTIONS, help="Captions per video, best first.")
    ] = 1,
    max_length: Annotated[int, typer.Option(min=1, max=common.MAX_WORDS, help="Words at most.")] = 20,
    min_length: Annotated[int, typer.Option(min=0, max=common.MAX_WORDS, help="Words at least.")] = 0,
    specificity: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=common.MAX_WEIGHT,
            callback=common.refuse_nan,
            show_default="as in training",
            help="Of what the beams found, prefer what fits this video more than any; 0 takes the likeliest.",
        ),
    ] = None,
    no_repeat_ngram: Annotated[
        int,
        typer.Option(
            min=0, max=common.MAX_WORDS, help="No sequence of so many words twice in a caption; 0 allows it."
        ),
    ] = 0,
    no_repeat_words: Annotated[
        bool | None,
        typer.Option(
            "--no-repeat-words/--repeat-words",
            show_default="as in training",
            help="No word twice in a caption but 'a', 'the', 'is', 'in' and their like.",
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            min=0,
            max=common.MAX_WEIGHT,
            callback=common.refuse_nan,
            help="Draw words at random, the more freely the higher; 0 searches.",
        ),
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            callback=common.refuse_nan,
            help="Draw from the likeliest words of this probability only.",
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=common.MAX_SEED, help="Of the drawing.")] = 0,
    weights: common.Weights = None,
    device: common.Device = "auto",
    workers: common.Workers = None,
    timeout: common.Timeout = 600,
    batch_size: Annotated[
        int,
        typer.Option(
            min=1,
            max=common.MAX_BATCH,
            help="Videos captioned together; of files of vectors 8 times as many.",
        ),
    ] = 8,
    recursive: common.Recursive = True,
    overwrite: common.Overwrite = False,
    fail_fast: common.FailFast = False,
    shard: Shard = None,
    engine: EngineOption = Engine.local,
    ray_address: RayAddress = None,
    videos_per_file: VideosPerFile = None,
    retry_failed: RetryFailed = False,
) -> None:
    """Caption videos.

    An input is a video, a folder of videos, a pattern ('clips/**/*.mp4'), a zip file with a folder of
    pictures for each video, a tar file of videos, a file of features (.safetensors), or the address of any
    of these but zip files (s3://, gs://, https://). One file and no -o prints the caption. Several inputs, a
    list or a pattern print a line each: path, tab, caption.

    With --output-dir each video gets a file of its own, written as soon as it is ready. A manifest in the
    folder says what became of each; what is there already, from the same video by the same model with the
    same settings, is skipped, and what failed is tried again.
    With -o the file is replaced when all is done.

    With --format parquet, --videos-per-file or --engine ray, or where --output-dir is an address, captions go
    into shards: files of JSON lines or Parquet with many videos each, those that failed included. What is in
    them already is skipped.
    """
    if output and output_dir:
        raise UsageError("-o and --output-dir exclude each other", remedy="give one of them")
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
    sharded = scale.wants_shards(output_dir, form and form.value)
    batch = common.Batch(verb="captioned", many=given.many or sharded)
    if output:
        common.check_writable_file(output)
    if report:
        check_report(report, output)
    options: dict[str, Any] = {
        "weights": weights,
        "batch_size": batch_size,
        "workers": workers or common.default_workers(),
        "timeout": timeout or None,
        "segments": segments,
        "attention": attention or report is not None,
        "pictures": report is not None,
        "beam_size": beam,
        "num_captions": num_captions,
        "max_length": max_length,
        "min_length": min_length,
        "specificity": specificity,
        "no_repeat_ngram": no_repeat_ngram,
        "no_repeat_words": no_repeat_words,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
    }
    how: _How
    if sharded:
        assert output_dir is not None
        _check_sharded(form, output=output, report=report)
        make_job = partial(_job, model, scale.loads_on, options, attention)
        run_sharded(make_job, given, batch, output_dir, form.value if form else "jsonl", scale)
        batch.finish()
        return
    videos = given.videos(batch, recursive=recursive, fail_fast=fail_fast)
    if not videos:
        batch.finish()
    from capvid.loading import load
    from capvid.output import WRITERS
    from capvid.storage import Storage

    suffix = output.suffix[1:].lower() if output else ""
    writer = WRITERS[form.value if form else suffix if suffix in WRITERS else "txt"]
    if writer.single and batch.many and not output_dir:
        raise UsageError(
            f"{writer.extension} holds the subtitles of one video", remedy="give --output-dir for several"
        )
    pipeline = load(model, device=device, **options)
    folder = None if output_dir is None else Storage(output_dir).local
    if folder:
        common.check_writable_folder(folder)
    recorded = attention and writer.records_attention
    with looking(pipeline, batch, report=report, charts=attention and not recorded) as look:
        how = {"look": look, "attention": recorded, "fail_fast": fail_fast}
        if folder:
            again = report is not None
            _into_folder(pipeline, videos, batch, folder, writer, overwrite=overwrite, again=again, **how)
        elif output:
            _into_file(pipeline, videos, batch, output, writer, **how)
        else:
            with writer(
                stream=sys.stdout, many=batch.many, settings=pipeline.settings, attention=recorded
            ) as out:
                _run(pipeline, videos, batch, _to_stream(out), look, data_on_stdout=True, fail_fast=fail_fast)
    batch.finish()


def _check_sharded(form: Format | None, *, output: Path | None, report: Path | None) -> None:
    """Raise UsageError for options that do not go with shards."""
    if output or report:
        raise UsageError("shards take neither -o nor --report", remedy="leave it out")
    if form not in (None, Format.jsonl, Format.parquet):
        raise UsageError(f"there are no shards of {form.value}", remedy="use --format jsonl or parquet")


def _job(model: str | None, device: str, options: dict[str, Any], attention: bool) -> Job:
    """The job of captioning for shards."""
    from capvid.engine.jobs import CaptionJob
    from capvid.loading import load

    return CaptionJob(pipeline=load(model, device=device, **options), attention=attention)


class _How(TypedDict):
    """What is done with every result, wherever its captions go, and whether to stop at one that failed."""

    look: Look
    attention: bool
    fail_fast: bool


def _run(
    pipeline: CaptionPipeline,
    videos: Sequence[VideoInput],
    batch: common.Batch,
    prepare: Prepare,
    look: Look,
    *,
    data_on_stdout: bool = False,
    fail_fast: bool,
) -> None:
    """Caption the videos, handing each result to ``prepare`` and ``look`` as it comes and counting it."""
    paths = [video.path for video in videos]
    with (
        closing(pipeline.stream(paths)) as results,
        batch.progress(len(paths), data_on_stdout=data_on_stdout),
    ):
        for result in results:
            result = _deliver(result, batch, prepare, look)
            batch.advance()
            batch.lost(result.path, result.lost)
            if result.error is None:
                continue
            batch.failed(result.error)
            if fail_fast:
                return


def _deliver(result: CaptionResult, batch: common.Batch, prepare: Prepare, look: Look) -> CaptionResult:
    """Write a result, or its error in its place if it cannot be written; return what was written.

    Args:
        result: the result.
        batch: counts it if it is good.
        prepare: does what may fail for this result alone, and returns what writes it to a shared stream.
        look: adds the result to the page and returns its chart.
    """
    from capvid.isolation import input_error

    good = result.error is None
    batch.done += good  # before it is written: what a reader has seen is counted
    commit: Commit | None
    try:
        generic = any(segment.captions[0].generic for segment in result.segments)
        commit, lines = prepare(result), look(result)
        batch.generic += generic
    except Exception as cause:
        error = input_error(result.path, cause)
        batch.done -= good
        result = result.failed(error) if good else result
        commit, lines = _attempt(prepare, result), _attempt(look, result) or []
    if commit is not None:
        commit()
    for line in lines:
        batch.say(line)
    return result


def _attempt(step: Callable[[CaptionResult], _T], failed: CaptionResult) -> _T | None:
    """Record a failed input; None where its record cannot be written either, and stderr alone has it."""
    from capvid.isolation import input_error

    try:
        return step(failed)
    except Exception as cause:
        input_error(failed.path, cause)
        return None


def _to_stream(out: Writer) -> Prepare:
    """Return a function that renders a result completely before any of it is written to the stream."""

    def prepare(result: CaptionResult) -> Commit:
        draft, text = copy(out), io.StringIO()
        draft.stream = text
        draft.write(result)
        text.getvalue().encode("utf-8")  # else one word could make the file of all results unwritable

        def commit() -> None:
            stream = out.stream
            vars(out).update(vars(draft))
            out.stream = stream
            stream.write(text.getvalue())
            stream.flush()

        return commit

    return prepare


def _into_file(
    pipeline: CaptionPipeline,
    videos: Sequence[VideoInput],
    batch: common.Batch,
    path: Path,
    writer: type[Writer],
    *,
    look: Look,
    attention: bool,
    fail_fast: bool,
) -> None:
    """All results into one file, which is replaced at the end unless there is nothing to put into it."""
    from capvid.files import atomic_write_text

    batch.interrupted = f"; {path} was not written"
    text = io.StringIO()
    with writer(stream=text, many=batch.many, settings=pipeline.settings, attention=attention) as out:
        _run(pipeline, videos, batch, _to_stream(out), look, fail_fast=fail_fast)
    if batch.done or writer.records_errors:
        atomic_write_text(path.resolve(), text.getvalue())  # a link stays one


def _into_folder(
    pipeline: CaptionPipeline,
    videos: Sequence[VideoInput],
    batch: common.Batch,
    folder: Path,
    writer: type[Writer],
    *,
    overwrite: bool,
    again: bool,
    look: Look,
    attention: bool,
    fail_fast: bool,
) -> None:
    """Each result into its own file, written as it comes; what is already there is skipped.

    With ``again`` the latter is captioned as well, for ``look`` alone.
    """
    from capvid.files import MANIFEST, atomic_write_text, remove_leftovers
    from capvid.output.manifest import Manifest

    batch.interrupted = common.GOES_ON
    names = {video.path: f"{video.key}.{writer.extension}" for video in videos}
    for path, name in names.items():
        if name == MANIFEST:  # what the manifest itself is called
            names[path] = f"{path.name}.{writer.extension}"
    remove_leftovers([folder / MANIFEST, *(folder / name for name in names.values())])
    settings = {**pipeline.settings, **({"attention": True} if attention else {})}
    with Manifest(folder, model=pipeline.model, settings=settings) as manifest:

        def is_done(path: VideoPath) -> bool:
            try:
                return manifest.is_done(path, names[path])
            except Exception:  # captioning it will show what is wrong with it
                return False

        def prepare(result: CaptionResult) -> Commit:
            if result.path not in kept:
                with common.output_file(result.path, folder):
                    write(result)
            return lambda: None

        def write(result: CaptionResult) -> None:
            if result.error is None or writer.records_errors:
                text = io.StringIO()
                with writer(stream=text, many=False, settings=pipeline.settings, attention=attention) as out:
                    out.write(result)
                atomic_write_text(folder / names[result.path], text.getvalue())
            manifest.note(result, names[result.path])

        kept = {video.path for video in videos if not overwrite and is_done(video.path)}
        todo = [video for video in videos if again or video.path not in kept]
        batch.skipped = len(videos) - len(todo)
        if again and kept:
            batch.say(f"note: {len(kept)} done already: captioned again for the page, their files stay")
        _run(pipeline, todo, batch, prepare, look, fail_fast=fail_fast)
