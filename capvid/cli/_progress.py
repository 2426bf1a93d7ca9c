"""Progress, summary and exit code of a run over many inputs; checks of output paths."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from capvid.cli._terminal import debugging, print_line
from capvid.errors import CapvidError, FeatureFileError, RunError, UsageError, is_disk_full
from capvid.utils.escaping import terminal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from capvid.utils.storage import VideoPath


SOME_FAILED = 3
GOES_ON = "; the same command goes on from there"


def training_bar(console: Console, note: str) -> Progress:
    """A bar for training, on a terminal only; ``note`` is what it says of the task's fields beside it."""
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


@dataclass
class Batch:
    """The state of one run over many inputs: counts, the progress bar, and lines on stderr.

    Attributes:
        verb: what is done with an input, for the summary ("captioned").
        many: whether there are several inputs; a single one gets neither bar nor summary.
        interrupted: what is to be known after Ctrl-C, beside how many were done.
    """

    verb: str
    many: bool
    done: int = 0
    skipped: int = 0
    generic: int = 0
    interrupted: str = ""
    errors: list[CapvidError] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    _progress: Progress | None = None

    def failed(self, error: CapvidError) -> None:
        """Count a failed input and say why on one line, after the traceback of a bug when debugging."""
        self.errors.append(error)
        if error.trace and debugging.get():
            for line in error.trace.splitlines():
                self.say(line)
        self.say(f"error: {error}")

    def lost(self, path: VideoPath | str, frames: int) -> None:
        """Say that so many frames of an input could not be decoded, if there are any."""
        if frames:
            what = "1 frame" if frames == 1 else f"{frames} frames"
            self.say(f"warning: {path}: {what} could not be decoded; the others were used")

    def say(self, line: str) -> None:
        """Print one line on stderr, above the progress bar if there is one."""
        if self._progress is None:
            with suppress(OSError):  # nobody listens any more: no reason to stop
                print_line(line, err=True)
        else:
            self._progress.console.print(terminal(line), markup=False, highlight=False, soft_wrap=True)

    def advance(self) -> None:
        """Move the progress bar by one input."""
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0])

    @contextmanager
    def progress(self, total: int | None, *, data_on_stdout: bool) -> Iterator[None]:
        """Show a bar on stderr while the block runs, and say how far it came if it is interrupted.

        The bar is only on a terminal, and not where the data themselves go there line by line.
        """
        try:
            with self._bar(total, shown=not (data_on_stdout and sys.stdout.isatty())):
                yield
        except KeyboardInterrupt:
            of = "" if total is None else f" of {total}"
            self.say(f"interrupted: {self.done}{of} {self.verb}{self.interrupted}")
            raise

    @contextmanager
    def _bar(self, total: int | None, *, shown: bool) -> Iterator[None]:
        if not shown or not self.many or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, redirect_stdout=False) as self._progress:
            self._progress.add_task(self.verb, total=total)
            try:
                yield
            finally:
                self._progress = None

    def finish(self) -> None:
        """Print the summary of a batch and leave with the exit code if it is not 0.

        Raises:
            typer.Exit: something failed.
        """
        self.summarise()
        if self.exit_code:
            raise typer.Exit(self.exit_code)

    def summarise(self) -> None:
        """Print the summary of a batch."""
        if self.many:
            skipped = f", {self.skipped} skipped (already done)" if self.skipped else ""
            failed = f", {len(self.errors)} failed" if self.errors else ""
            seconds = time.monotonic() - self.begun
            speed = f" in {seconds:.1f} s ({self.done / seconds:.1f} a second)" if self.done else ""
            generic = f", {self.generic} likely generic" if self.generic else ""
            self.say(f"{self.done} {self.verb}{speed}{skipped}{failed}{generic}")
        elif self.generic:
            self.say("note: likely generic: such a caption fits many videos")

    @property
    def exit_code(self) -> int:
        """0 all done, 3 some inputs failed; if nothing could be done that of the error."""
        if not self.errors:
            return 0
        if self.done or self.skipped:
            return SOME_FAILED
        return self.errors[0].exit_code if len(self.errors) == 1 else 1


def check_writable_file(path: Path) -> None:
    """See that a file can be put at the path, before any work is done.

    Raises:
        UsageError: it cannot.
    """
    if path.is_dir():
        raise UsageError(f"{path}: is a folder", remedy="give the name of a file, or use --output-dir")
    if path.exists() and not path.is_file():  # a device or a pipe would be replaced by a file
        raise UsageError(f"{path}: is not a regular file", remedy="leave out -o to write to stdout")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}", remedy="make the folder first")
    _check_writable(path.parent)


def check_writable_folder(path: Path) -> None:
    """Make the folder if need be and see that files can be written in it, before any work is done.

    Raises:
        UsageError: they cannot.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UsageError(f"{path}: is a file, not a folder") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be made ({error.strerror})") from error
    _check_writable(path)


def _check_writable(folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror})") from error


@contextmanager
def output_file(path: VideoPath, folder: Path) -> Iterator[None]:
    """Turn a failure to write the file of one input into that input's error.

    Args:
        path: path or address of the input.
        folder: output folder of the run.

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
        try:
            check_writable_folder(folder)
        except UsageError as unusable:
            raise RunError(unusable.message) from error
        raise CapvidError(f"{path}: its output cannot be written to {folder} ({reason})") from error
