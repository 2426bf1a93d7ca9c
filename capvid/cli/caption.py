"""``capvid caption``: videos into sentences."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from copy import copy
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from capvid.cli import _completion as completion
from capvid.cli._inputs import read_inputs
from capvid.cli._options import MAX_BATCH, InputOptions, RuntimeOptions, ShardingOptions, option_group
from capvid.cli._progress import (
    GOES_ON,
    Batch,
    check_writable_file,
    check_writable_folder,
    output_file,
)
from capvid.cli._sharded import run_sharded, wants_shards
from capvid.cli._views import Views, check_report
from capvid.decoding.decoding_options import DecodingOptions
from capvid.errors import UsageError, input_error
from capvid.output.writers import FORMATS

if TYPE_CHECKING:
    from capvid.output.manifest import Manifest
    from capvid.output.results import CaptionResult
    from capvid.output.writers import Writer
    from capvid.pipeline import CaptionPipeline
    from capvid.utils.storage import VideoPath
    from capvid.video.input_set import VideoInput


_T = TypeVar("_T")


if TYPE_CHECKING:
    Format = Enum
else:  # parquet is a format of shards only
    Format = Enum("Format", [(name, name) for name in (*FORMATS, "parquet")], type=str)


@option_group("inputs", InputOptions)
@option_group("sharding", ShardingOptions)
@option_group("runtime", RuntimeOptions)
@option_group(
    "decoding",
    DecodingOptions,
    names={"beam_size": "beam", "length_penalty": "", "trace": ""},
    trained=("specificity", "no_repeat_words"),
)
def caption(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            show_default="the bundled one",
            autocompletion=completion.captioners,
            help="Name of a trained captioner (see capvid models), the folder of one, or "
            "OWNER/NAME[@REVISION] on the Hugging Face Hub, pinned to the commit of its first download.",
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
            help="Folder for one file per video; a folder or an address for shards.",
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
            help="Also write a page with frames, captions and each word's attention. Videos that "
            "--output-dir skips are captioned again for it; their files stay as they are.",
        ),
    ] = None,
    attention: Annotated[
        bool,
        typer.Option(
            "--attention",
            help="Attention of each word: the weights of the frames in json and jsonl, otherwise a small "
            "chart for each word on stderr.",
        ),
    ] = False,
    segments: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|N|auto",
            show_default="none; auto for captioners of paragraphs",
            help="One sentence per segment: those of a file (JSON or CSV of start,end in seconds), N equal "
            "ones, or auto to cut where the content changes.",
        ),
    ] = None,
    decoding: dict[str, Any],
    weights: Annotated[
        Path | None, typer.Option(show_default=False, help="The backbone's weights: a file, or its folder.")
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_BATCH, help="Videos captioned together; 8 times as many files of vectors."
        ),
    ] = 8,
    runtime: RuntimeOptions,
    inputs: InputOptions,
    sharding: ShardingOptions,
) -> None:
    """Caption videos.

    An input is a video, a folder of videos, a pattern ('clips/**/*.mp4'), a zip file with a folder of
    images for each video, a tar file of videos, a feature file (.safetensors), or the address of any
    of these but zip files (s3://, gs://, https://). One file and no -o prints the caption. Several inputs, a
    list or a pattern print a line each: path, tab, caption.

    With --output-dir each video gets a file of its own, written as soon as it is ready. A manifest in the
    folder records what became of each; what is there already, from the same video by the same model with the
    same settings, is skipped, and what failed is tried again.
    With -o the file is replaced when all is done.

    With --format parquet, --videos-per-file or --engine ray, or where --output-dir is an address, captions go
    into shards: files of JSON lines or Parquet with many videos each, those that failed included. What is in
    them already is skipped.
    """
    if output and output_dir:
        raise UsageError("-o and --output-dir exclude each other", remedy="give one of them")
    input_set = read_inputs(inputs, timeout=runtime.seconds)
    sharded = wants_shards(sharding, output_dir, form and form.value)
    batch = Batch(verb="captioned", many=input_set.many or sharded)
    if output:
        check_writable_file(output)
    if report:
        check_report(report, output)

    def load_pipeline(device: str) -> CaptionPipeline:
        from capvid.pipeline import load

        return load(
            model,
            device=device,
            weights=weights,
            batch_size=batch_size,
            workers=runtime.num_workers,
            timeout=runtime.seconds,
            reader=runtime.reader,
            segments=segments,
            attention=attention or report is not None,
            pictures=report is not None,
            **decoding,
        )

    if sharded:
        from capvid.distributed.jobs import CaptionJob

        if output or report:
            raise UsageError("shards take neither -o nor --report", remedy="leave it out")
        if form is not None and form.value not in ("jsonl", "parquet"):
            raise UsageError(f"there are no shards of {form.value}", remedy="use --format jsonl or parquet")
        assert output_dir is not None
        run_sharded(
            lambda device: CaptionJob(pipeline=load_pipeline(device), attention=attention),
            input_set,
            batch,
            output_dir,
            form.value if form else "jsonl",
            (runtime, sharding),
        )
        batch.finish()
        return
    videos = input_set.find(batch)
    if not videos:
        batch.finish()
    from capvid.utils.storage import Storage

    suffix = output.suffix[1:].lower() if output else ""
    writer = FORMATS[form.value if form else suffix if suffix in FORMATS else "txt"]
    if writer.single and batch.many and not output_dir:
        raise UsageError(
            f"{writer.extension} holds the subtitles of one video", remedy="give --output-dir for several"
        )
    pipeline = load_pipeline(runtime.device)
    folder = None if output_dir is None else Storage(output_dir).local
    if folder:
        check_writable_folder(folder)
    records = attention and writer.records_attention
    with Views(pipeline, report=report, charts=attention and not records, named=batch.many) as views:
        run = _Run(pipeline, batch, views, fail_fast=inputs.fail_fast)
        settings: dict[str, Any] = {"settings": pipeline.settings, "attention": records}
        if folder:
            _caption_into_folder(run, videos, folder, writer, settings, overwrite=inputs.overwrite)
        elif output:
            _caption_into_file(run, videos, output, writer, settings)
        else:
            with writer(stream=sys.stdout, many=batch.many, **settings) as out:
                run.caption(videos, _Stream(out), data_on_stdout=True)
    batch.finish()


class _Run:
    """Captions videos one after the other; each result is shown, written and counted."""

    def __init__(self, pipeline: CaptionPipeline, batch: Batch, views: Views, *, fail_fast: bool) -> None:
        self.pipeline = pipeline
        self.batch = batch
        self.views = views
        self.fail_fast = fail_fast

    def caption(
        self, videos: Sequence[VideoInput], target: _Stream | _Folder, *, data_on_stdout: bool = False
    ) -> None:
        """Caption videos and write each result to the target as soon as it is there."""
        batch, paths = self.batch, [video.path for video in videos]
        with (
            closing(self.pipeline.stream(paths)) as results,
            batch.progress(len(paths), data_on_stdout=data_on_stdout),
        ):
            for result in results:
                result = self._write(result, target)
                batch.advance()
                batch.lost(result.path, result.lost)
                if result.error is not None:
                    batch.failed(result.error)
                    if self.fail_fast:
                        return

    def _write(self, result: CaptionResult, target: _Stream | _Folder) -> CaptionResult:
        """Write a result, or an error in its place if it cannot be written; return what was written."""
        batch, good = self.batch, result.error is None
        batch.done += good  # before it is written: what a reader has seen is counted
        try:
            generic = any(segment.captions[0].generic for segment in result.segments)
            text, lines = target.render(result), self.views.show(result)
            batch.generic += generic
        except Exception as cause:
            error = input_error(result.path, cause)
            batch.done -= good
            result = result.failed(error) if good else result
            text, lines = _attempt(target.render, result) or "", _attempt(self.views.show, result) or []
        target.append(text)
        for line in lines:
            batch.say(line)
        return result


def _attempt(record: Callable[[CaptionResult], _T], failed: CaptionResult) -> _T | None:
    """Record a failed input; return None if that fails as well, and stderr alone has the error."""
    try:
        return record(failed)
    except Exception as cause:
        input_error(failed.path, cause)
        return None


class _Stream:
    """A document on a stream that takes the results of all videos."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self._draft = writer

    def render(self, result: CaptionResult) -> str:
        """Render a result completely before any of it is written."""
        self._draft = self.writer  # until the result is rendered
        draft, text = copy(self.writer), io.StringIO()
        draft.stream = text
        draft.write(result)
        text.getvalue().encode("utf-8")  # otherwise one word could make the whole document unwritable
        self._draft = draft
        return text.getvalue()

    def append(self, text: str) -> None:
        """Write a rendered result."""
        stream = self.writer.stream
        vars(self.writer).update(vars(self._draft))
        self.writer.stream = stream
        stream.write(text)
        stream.flush()


class _Folder:
    """A folder that takes a file for each video, with a manifest of what became of them."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        writer: type[Writer],
        settings: dict[str, Any],
        names: dict[VideoPath, str],
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.writer = writer
        self.settings = settings
        self.names = names
        self.kept: set[VideoPath] = set()  # videos that are captioned again for the page only

    def render(self, result: CaptionResult) -> str:
        """Write a result's file, and its line in the manifest."""
        from capvid.utils.files import atomic_write_text

        if result.path in self.kept:
            return ""
        name = self.names[result.path]
        with output_file(result.path, self.folder):
            if result.error is None or self.writer.records_errors:
                text = io.StringIO()
                with self.writer(stream=text, many=False, **self.settings) as out:
                    out.write(result)
                atomic_write_text(self.folder / name, text.getvalue())
            self.manifest.note(result, name)
        return ""

    def append(self, text: str) -> None:
        """Do nothing: the file is written already."""


def _caption_into_file(
    run: _Run, videos: Sequence[VideoInput], path: Path, writer: type[Writer], settings: dict[str, Any]
) -> None:
    """Write all results to one file, which is replaced at the end unless there is nothing to write."""
    from capvid.utils.files import atomic_write_text

    run.batch.interrupted = f"; {path} was not written"
    text = io.StringIO()
    with writer(stream=text, many=run.batch.many, **settings) as out:
        run.caption(videos, _Stream(out))
    if run.batch.done or writer.records_errors:
        atomic_write_text(path.resolve(), text.getvalue())  # a link stays one


def _caption_into_folder(
    run: _Run,
    videos: Sequence[VideoInput],
    folder: Path,
    writer: type[Writer],
    settings: dict[str, Any],
    *,
    overwrite: bool,
) -> None:
    """Write each result to its own file; skip what is done, unless a page needs it again."""
    from capvid.output.manifest import Manifest
    from capvid.utils.files import MANIFEST, remove_leftovers

    batch, pipeline = run.batch, run.pipeline
    batch.interrupted = GOES_ON
    names = {video.path: f"{video.key}.{writer.extension}" for video in videos}
    for path, name in names.items():
        if name == MANIFEST:
            names[path] = f"{path.name}.{writer.extension}"
    remove_leftovers([folder / MANIFEST, *(folder / name for name in names.values())])
    attention = {"attention": True} if settings["attention"] else {}
    with Manifest(folder, model=pipeline.model, settings={**pipeline.settings, **attention}) as manifest:
        target = _Folder(folder, manifest, writer, settings, names)
        for path, name in names.items():
            with suppress(Exception):  # captioning it shows what is wrong with it
                if not overwrite and manifest.is_done(path, name):
                    target.kept.add(path)
        again = run.views.has_page
        todo = [video for video in videos if again or video.path not in target.kept]
        batch.skipped = len(videos) - len(todo)
        if again and target.kept:
            batch.say(
                f"note: {len(target.kept)} done already: captioned again for the page, their files stay"
            )
        run.caption(todo, target)
