"""A run over many inputs: its input set, progress, summary and exit code, and its results in shards."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from capvid.cli._options import InputOptions, RuntimeOptions, ShardingOptions
from capvid.cli._terminal import debugging, print_line
from capvid.errors import (
    ANSWER_OUTCOMES,
    CapvidError,
    FeatureFileError,
    RunError,
    UsageError,
    VideoError,
    is_disk_full,
)
from capvid.utils.escaping import terminal
from capvid.utils.validation import limits

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from capvid.distributed.jobs import Job
    from capvid.features.extraction import ExtractionResult
    from capvid.output.results import CaptionResult
    from capvid.output.shards import Row
    from capvid.utils.storage import VideoPath
    from capvid.video.input_set import OnError, VideoInput

SOME_FAILED = 3  # exit code
RESUMABLE = "; the same command goes on from there"
MAX_SHARDS = 1_000_000
VIDEOS_PER_FILE = {"captions": 1000, "features": 100}
NAMED = 3  # captions of low confidence that the summary names


_R = TypeVar("_R", "CaptionResult", "ExtractionResult", "Row")


def training_bar(console: Console, note: str) -> Progress:
    """Return a progress bar for training, on a terminal only; ``note`` formats the fields of its task."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn(note),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def batch_bar() -> Progress:
    """Return a progress bar for a batch, with the time left by the inputs that are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    class TimeLeft(ProgressColumn):
        """Average seconds per finished input, times those left; rich's estimate needs an even pace."""

        def render(self, task: Task) -> Text:
            if not task.completed or task.total is None:
                return Text("-:--:-- left")
            seconds = int((task.elapsed or 0) / task.completed * (task.total - task.completed))
            return Text(f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left")

    console = Console(stderr=True)
    columns: list[ProgressColumn] = [MofNCompleteColumn(), TimeLeft()]
    if console.width >= 60:
        note = TextColumn(
            "{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
        )
        # the brackets show the bar's length without colours
        bar = [TextColumn("{task.description} ["), BarColumn(bar_width=20), TextColumn("]")]
        columns = [MofNCompleteColumn(), *bar, TimeLeft(), note]
    return Progress(*columns, console=console, transient=True, redirect_stdout=False)


@dataclass
class Batch:
    """The state of one run over many inputs: counts, the progress bar, and lines on stderr.

    Attributes:
        verb: past participle for the summary ("captioned").
        many: whether there are several inputs; a single one gets neither bar nor summary.
        interrupted: suffix of the interrupt message.
        dry_run: whether nothing is done, only counted.
        advice: function that says what may do better than the captioner, if captions are of low confidence.
    """

    verb: str
    many: bool
    done: int = 0
    skipped: int = 0
    low_confidence: int = 0
    interrupted: str = ""
    dry_run: bool = False
    advice: Callable[[], str] | None = None
    errors: list[CapvidError] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    _flagged: list[str] = field(default_factory=list)  # the first ones of low confidence
    _flagged_segments: str = ""  # of the last one
    _mismatches: Counter[str] = field(default_factory=Counter)  # reasons why features do not fit
    _decoded: int = 0
    _progress: Progress | None = None

    def run(
        self,
        results: Generator[_R, None, None],
        write: Callable[[_R], CapvidError | None],
        *,
        total: int | None,
        fail_fast: bool,
    ) -> None:
        """Write results as they come, and report failures.

        Args:
            results: results, closed at the end.
            write: function that writes a result and counts it, or returns the error of its input.
            total: number of inputs, if known.
            fail_fast: whether to stop at the first failure.
        """
        with closing(results), self.progress(total):
            for result in results:
                error = write(result)
                self.advance()
                if result.lost:
                    what = "1 frame" if result.lost == 1 else f"{result.lost} frames"
                    self.say(f"warning: {result.path}: {what} could not be decoded; the others were used")
                if error is not None:
                    self.failed(error)
                    if fail_fast:
                        return

    def failed(self, error: CapvidError) -> None:
        """Count a failed input and print why on one line, after the traceback of a bug when debugging.

        Features that a captioner does not take are all alike, so the reason is printed once.
        """
        self.errors.append(error)
        if error.kind == "feature-mismatch" and error.__cause__ is not None:
            self._mismatches[str(error.__cause__)] += 1
            if self._mismatches[str(error.__cause__)] > 1:
                return
        if error.trace and debugging.get():
            for line in error.trace.splitlines():
                self.say(line)
        self.say(f"error: {error}")

    def say(self, line: str) -> None:
        """Print one line on stderr, above the progress bar if there is one."""
        if self._progress is None:
            with suppress(OSError):  # nobody listens any more: no reason to stop
                print_line(line, err=True)
        else:
            self._progress.console.print(terminal(line), markup=False, highlight=False, soft_wrap=True)

    def flag(self, path: VideoPath | str, segments: str = "") -> None:
        """Count a caption of low confidence; ``segments`` says how many of its segments are concerned."""
        self.low_confidence += 1
        self._flagged_segments = segments
        if self.low_confidence <= NAMED:
            self._flagged.append(f"{path} ({segments})" if segments else str(path))

    def decoded(self, path: VideoPath) -> None:
        """Show that an input has been decoded."""
        self._decoded += 1
        if self._progress is not None:
            note = f"{self._decoded} decoded, last {terminal(path.name)}"
            self._progress.update(self._progress.task_ids[0], note=note)

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Show what is going on, on a terminal, until the block ends."""
        if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
            yield
            return
        sys.stderr.write(f"{what} ...\r")  # the bar of a download overwrites it
        sys.stderr.flush()
        try:
            yield
        finally:
            sys.stderr.write("\x1b[2K")
            sys.stderr.flush()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar away while the block writes to the same terminal."""
        progress = self._progress if sys.stdout.isatty() else None
        if progress is not None:
            progress.stop()
        yield
        if progress is not None:
            progress.start()

    def advance(self) -> None:
        """Move the progress bar by one input."""
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0])

    @contextmanager
    def progress(self, total: int | None) -> Iterator[None]:
        """Show a bar on a terminal while the block runs; report the number of inputs done on an interrupt."""
        try:
            if not self.many or not sys.stderr.isatty():
                yield
                return
            with batch_bar() as self._progress:
                self._progress.add_task(self.verb, total=total, note="")
                try:
                    yield
                finally:
                    self._progress = None
        except KeyboardInterrupt:
            of = "" if total is None else f" of {total}"
            self.say(f"interrupted: {self.done}{of} {self.verb}{self.interrupted}")
            raise

    def finish(self) -> None:
        """Print the summary of a batch and exit if the exit code is not 0.

        Raises:
            typer.Exit: an input failed.
        """
        self.summarise()
        if self.errors:
            raise typer.Exit(self.exit_code)

    def summarise(self) -> None:
        """Print the summary of a batch."""
        if others := self._mismatches.total() - len(self._mismatches):
            self.say(f"error: {others} more feature files do not fit for the same reason")
        if self.many:
            skipped = f", {self.skipped} skipped (already done)" if self.skipped else ""
            failed = f", {len(self.errors)} failed{self._answers()}" if self.errors else ""
            seconds = time.monotonic() - self.begun
            speed = (
                f" in {seconds:.1f} s ({self.done / seconds:.1f} a second)"
                if self.done and not self.dry_run
                else ""
            )
            flagged = f", {self.low_confidence} of low confidence" if self.low_confidence else ""
            self.say(f"{self.done} {self.verb}{speed}{skipped}{failed}{flagged}")
            if self._flagged:
                more = self.low_confidence - len(self._flagged)
                rest = f" and {more} more, see low_confidence in csv and json" if more else ""
                self.say(f"note: low confidence: {', '.join(self._flagged)}{rest}")
        elif self.low_confidence:
            segments = self._flagged_segments
            which = f"{segments}, see low_confidence in csv" if segments else "this caption may well be wrong"
            self.say(f"note: low confidence: {which}")
        if self.low_confidence and self.advice is not None and (advice := self.advice()):
            self.say(f"note: {advice}")

    def _answers(self) -> str:
        """Return how many failures of each kind are answers of a chat model, in parentheses."""
        counts = Counter(error.kind for error in self.errors)
        texts = {text: counts[f"answer-{outcome}"] for outcome, text in ANSWER_OUTCOMES.items()}
        named = [f"{count} {text}" for text, count in texts.items() if count]
        return f" ({', '.join(named)})" if named else ""

    @property
    def exit_code(self) -> int:
        """0 if all inputs are done, 3 if some failed; if nothing could be done that of the error."""
        if not self.errors:
            return 0
        if self.done or self.skipped:
            return SOME_FAILED
        return self.errors[0].exit_code if len(self.errors) == 1 else 1


def print_plan(
    batch: Batch,
    videos: Iterable[VideoInput],
    output_of: Callable[[VideoPath], Path | None] = lambda path: None,
    *,
    is_done: Callable[[VideoPath], bool] = lambda path: False,
) -> None:
    """Print what a run would do with each input, and finish the batch.

    A line has ``todo`` or ``done``, the input and, if it has one of its own, its output.
    """
    from capvid.video.image_reader import archive_of

    for video in videos:
        path = video.path
        try:
            if isinstance(path, Path) and not path.exists() and archive_of(path) is None:
                raise VideoError(path, "no such file", remedy="check the name", kind="missing")
            done = is_done(path)
        except CapvidError as error:
            batch.failed(error)
            continue
        batch.skipped += done
        batch.done += not done
        cells = "done" if done else "todo", path, output_of(path)
        typer.echo("\t".join(terminal(str(cell)) for cell in cells if cell))
    batch.finish()


# Inputs


@dataclass(frozen=True, kw_only=True)
class InputSet:
    """The inputs of a command.

    Attributes:
        options: arguments, list file, and how folders are searched.
        many: whether this is a batch: several inputs, a list, a pattern, a folder or an archive.
        text: the list, if it came from stdin.
        part: number of the part of the inputs to work on, and number of parts; None takes all.
        timeout: seconds for fetching the list, and for each request when inputs are listed; None disables it.
        others: what is read besides, such as a file of segments.
        features: whether a folder without videos stands for its feature files.
    """

    options: InputOptions
    many: bool
    text: bytes | None
    part: tuple[int, int] | None
    timeout: float | None
    others: tuple[str, ...] = ()
    features: bool = False

    @property
    def named(self) -> list[str]:
        """Paths and addresses of everything that is read and that the command line names."""
        listed = [] if self.options.from_file in (None, "-") else [str(self.options.from_file)]
        return [*(self.options.inputs or []), *listed, *self.others]

    def videos(self, batch: Batch, *, lazily: bool = False) -> Iterable[VideoInput]:
        """Return the videos that the inputs stand for; an input that gives none counts as failed.

        Args:
            batch: the run that counts failures.
            lazily: whether to search during iteration, in constant memory.

        Raises:
            CapvidError: the first failure, with ``fail_fast``.
        """
        return self.search(None if self.options.fail_fast else batch.failed, lazily=lazily)

    def search(self, on_error: OnError | None, *, lazily: bool) -> Iterable[VideoInput]:
        """Return the videos; ``on_error`` is called with the errors of inputs, None raises the first."""
        from capvid.video.input_set import find_videos, in_part, iter_videos

        part, search = self.part, iter_videos if lazily else find_videos
        videos = search(
            self.options.inputs or [],
            listed=() if self.options.from_file is None else self._listed(self.options.from_file, on_error),
            recursive=self.options.recursive,
            features=self.features,
            on_error=on_error,
            timeout=self.timeout,
        )
        return videos if part is None else (video for video in videos if in_part(video.path, *part))

    def _listed(self, source: str, on_error: OnError | None) -> Iterator[VideoPath]:
        """Yield the entries of the list; an empty list counts as failed."""
        from capvid.utils.storage import parse_path
        from capvid.video.input_lists import read_list, read_piped

        entries = (
            read_list(parse_path(source), self.options.column, timeout=self.timeout)
            if self.text is None
            else read_piped(self.text, self.options.column)
        )
        empty = True
        for entry in entries:
            empty = False
            yield entry
        if empty:
            error = CapvidError(f"{source}: there is no path in this list")
            if on_error is None:
                raise error
            on_error(error)


def read_inputs(
    options: InputOptions,
    *,
    timeout: float | None,
    others: Iterable[str | Path | None] = (),
    features: bool = False,
) -> InputSet:
    """Check the input options of a command, and read a list on stdin.

    Args:
        options: the options.
        timeout: as for :class:`InputSet`.
        others: paths of what is read besides; what is no path, or None, is harmless.
        features: as for :class:`InputSet`.

    Raises:
        UsageError: no input, an unreadable list, or a part that does not exist.
    """
    from capvid.utils.storage import Blob, parse_path
    from capvid.video.input_set import EXTENSIONS, stands_for_many

    source, inputs, text = options.from_file, options.inputs or [], None
    part = None if options.shard is None else _read_part(options.shard)
    if "" in inputs:
        raise UsageError(
            "an INPUT is empty", remedy="give a video, a folder or an address, . for this folder"
        )
    if source is None and not inputs:
        raise UsageError("no input", remedy="give a video, a folder, or a list with --from-file")
    if source is None and options.column is not None:
        raise UsageError("--column is for --from-file", remedy="leave it out")
    if source == "-":
        text = sys.stdin.buffer.read(limits().list_bytes + 1)
        if len(text) > limits().list_bytes:
            raise UsageError(
                f"the list on stdin is larger than the limit of {limits().list_bytes} bytes",
                remedy="give it as a file",
            )
    elif source is not None:
        path = parse_path(source)
        if path.suffix.lower() in EXTENSIONS:
            raise UsageError(f"{source}: is a video, not a list of paths", remedy="leave out --from-file")
        if not isinstance(path, Blob):
            from capvid.video.input_lists import open_list

            open_list(path).close()
    many = source is not None or len(inputs) != 1 or stands_for_many(parse_path(inputs[0]))
    files = tuple(str(path) for path in others if path)
    return InputSet(
        options=options, many=many, text=text, part=part, timeout=timeout, others=files, features=features
    )


def _read_part(text: str) -> tuple[int, int]:
    """Parse the part of the inputs to work on, such as ``2/8``: its number, and the number of parts.

    Raises:
        UsageError: there is no such part.
    """
    match = re.fullmatch("([0-9]{1,7})/(0*[1-9][0-9]{0,6})", text)
    if match is None:
        raise UsageError(
            f"--shard {text}: not understood", remedy="write it as 2/8, the second of eight parts"
        )
    number, parts = map(int, match.groups())
    if parts > MAX_SHARDS:
        raise UsageError(f"--shard {text}: too many parts", remedy=f"use at most {MAX_SHARDS}")
    if not 1 <= number <= parts:
        remedy = f"give one of 1/{match[2]} to {match[2]}/{match[2]}"
        raise UsageError(f"--shard {text}: there is no such part", remedy=remedy)
    return number, parts


# Outputs


def check_writable_file(path: Path) -> None:
    """Check that a file can be written at the path, before any work is done.

    Raises:
        UsageError: it cannot.
    """
    if path.is_dir():
        raise UsageError(f"{path}: is a folder", remedy="give the name of a file, or use --output-dir")
    if path.exists() and not path.is_file():  # a device or a pipe would be replaced by a file
        raise UsageError(f"{path}: is not a regular file", remedy="leave out -o to write to stdout")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}", remedy="make the folder first")
    check_writable_folder(path.parent)


def check_writable_folder(path: Path) -> None:
    """Create the folder if necessary and check that files can be written in it, before any work is done.

    Raises:
        UsageError: they cannot.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UsageError(f"{path}: is a file, not a folder") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be made ({error.strerror})") from error
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error


@contextmanager
def output_file(path: VideoPath, folder: Path | None = None) -> Iterator[None]:
    """Turn a failure to write the file of one input into that input's error.

    Args:
        path: path or address of the input.
        folder: output folder of the run; None if files go into many folders.

    Raises:
        CapvidError: the file cannot be written.
        RunError: nothing can be written to the folder any more.
    """
    try:
        yield
    except (OSError, FeatureFileError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        reason = cause.strerror or cause
        if is_disk_full(cause):
            raise RunError(f"{cause.filename or folder}: {reason}") from error
        if folder is None:
            raise CapvidError(f"{path}: its output cannot be written ({reason})") from error
        try:
            check_writable_folder(folder)
        except UsageError as unusable:
            raise RunError(unusable.message) from error
        raise CapvidError(f"{path}: its output cannot be written to {folder} ({reason})") from error


# Sharded runs


def wants_shards(sharding: ShardingOptions, folder: str | None, form: str | None) -> bool:
    """Return whether results go into shards, which requires a folder.

    Raises:
        UsageError: options that exclude each other.
    """
    from capvid.utils.storage import Storage

    on_ray = sharding.engine == "ray"
    if sharding.ray_address and not on_ray:
        raise UsageError("--ray-address is for --engine ray", remedy="give that too, or leave it out")
    sharded = on_ray or sharding.videos_per_file is not None or sharding.retry_failed
    sharded = sharded or form in ("parquet", "webdataset")  # formats that exist as shards only
    sharded = sharded or (folder is not None and Storage(folder).local is None)
    if sharded and folder is None:
        raise UsageError("shards need a folder or an address that takes them", remedy="give --output-dir")
    return sharded


def run_sharded(
    make_job: Callable[[str], Job],
    inputs: InputSet,
    batch: Batch,
    folder: str,
    form: str,
    options: tuple[RuntimeOptions, ShardingOptions],
) -> None:
    """Run a job for all videos that are not in the shards yet, and finish the batch.

    Args:
        make_job: function that makes the job on a device.
        inputs: the videos.
        batch: state of the run.
        folder: path or address for the shards.
        form: name of the shards' format.
        options: how the run is computed.

    Raises:
        UsageError: the engine is missing, or the folder holds something else.
        CapvidError: an error that concerns all videos.
        typer.Exit: a video failed.
    """
    from capvid.output.shards import HEAD, SHARD_FORMATS, ShardFolder, shard_paths
    from capvid.utils.files import remove_leftovers
    from capvid.utils.output_check import check_outputs
    from capvid.utils.storage import Storage
    from capvid.video.input_set import identity

    runtime, sharding = options
    on_ray, overwrite = sharding.engine == "ray", inputs.options.overwrite
    if overwrite and inputs.part is not None:
        raise UsageError(
            "--overwrite would remove the shards of all parts",
            remedy="choose another folder, or empty it first",
        )
    if on_ray:
        _check_ray(runtime)
    local = Storage(folder).local
    if local is not None and not batch.dry_run:
        check_writable_folder(local)
        remove_leftovers([local / HEAD])
    outputs = [("--output-dir", path) for path in shard_paths(folder)]
    check_outputs(outputs, inputs.named, kind=None)
    if overwrite and len(outputs) > 1:  # they are removed
        found = inputs.search(lambda error: None, lazily=True)
        check_outputs(outputs, (video.path for video in found), kind=None)
    batch.interrupted = RESUMABLE
    with batch.stage("loading the model"):
        job = make_job("cpu" if on_ray else runtime.device)  # on Ray each actor moves its own networks
    shards = ShardFolder(folder, kind=job.kind, form=SHARD_FORMATS[f"{job.kind}/{form}"](), head=job.head)
    if batch.dry_run:
        shards.check_head(overwrite=overwrite)
        finished = None if overwrite else shards.done(retry_failed=sharding.retry_failed, dry_run=True)
        videos = (each for each in inputs.videos(batch, lazily=True) if not shards.holds(each.path))
        print_plan(batch, videos, is_done=lambda path: finished is not None and identity(path) in finished)
        return
    shards.begin(overwrite=overwrite)
    done = shards.done(retry_failed=sharding.retry_failed)

    def todo() -> Iterator[VideoInput]:
        for video in inputs.videos(batch, lazily=True):
            if shards.holds(video.path):
                continue
            if identity(video.path) in done:
                batch.skipped += 1
            else:
                yield video

    def count(row: Row) -> CapvidError | None:
        if row.error is None:
            batch.done += 1
            if row.low_confidence:
                batch.flag(row.video)
            return None
        error = CapvidError(row.error, kind=row.error_kind)
        error.trace = row.trace
        return error

    per_file = sharding.videos_per_file or VIDEOS_PER_FILE["features" if form == "webdataset" else job.kind]
    settings: dict[str, Any] = {"per_file": per_file, "timeout": runtime.timeout or None}
    if on_ray:
        from capvid.distributed.ray_engine import run_on_ray

        gpu = None if runtime.device == "auto" else runtime.device.startswith("cuda")
        rows = run_on_ray(job, shards, todo(), address=sharding.ray_address, gpu=gpu, **settings)
    else:
        from capvid.distributed.jobs import run_here

        rows = run_here(job, shards, todo(), workers=runtime.num_workers, **settings)
    batch.run(rows, count, total=None, fail_fast=inputs.options.fail_fast)
    batch.finish()


def _check_ray(runtime: RuntimeOptions) -> None:
    """Check that Ray is installed, before anything is loaded.

    Raises:
        UsageError: it is not, or options concern this machine alone.
    """
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise UsageError("--engine ray needs Ray Data", remedy="pip install 'capvid[ray]'")
    if runtime.workers is not None:
        raise UsageError("--workers is for --engine local", remedy="leave it out: Ray shares out the cores")
    if runtime.device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {runtime.device} with --engine ray", remedy="use auto, cpu or cuda")
