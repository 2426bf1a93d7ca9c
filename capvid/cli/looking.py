"""What ``capvid caption`` shows besides captions: the page of ``--report``, the charts of ``--attention``."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from capvid.cli import common
from capvid.errors import RunError, UsageError

if TYPE_CHECKING:
    from capvid.output import Report
    from capvid.pipeline import CaptionPipeline
    from capvid.results import CaptionResult

    Look = Callable[[CaptionResult], list[str]]


def check_report(path: Path, output: Path | None) -> None:
    """See that the page can be put at the path, before any work is done.

    Raises:
        UsageError: it cannot, or the name may be that of something else.
    """
    if path.suffix.lower() not in (".html", ".htm"):  # of a video, say, that would be replaced
        raise UsageError(f"{path}: not the name of a page", remedy="give --report a name that ends in .html")
    if output is not None and output.resolve() == path.resolve():
        raise UsageError(f"{path}: the captions go there", remedy="give -o and --report two names")
    common.check_writable_file(path)


@contextmanager
def looking(
    pipeline: CaptionPipeline, batch: common.Batch, *, report: Path | None, charts: bool
) -> Iterator[Look]:
    """Yield a function that adds a result to the page and returns its chart as lines for stderr.

    Raises:
        OSError: the page cannot be written.
    """
    from capvid.output import Report

    with ExitStack() as stack:
        page = draw = None
        if report is not None:
            page = stack.enter_context(Report(report, model=pipeline.model, settings=pipeline.settings))
        if charts:
            draw = _Charts(batch)

        def look(result: CaptionResult) -> list[str]:
            lines = [] if draw is None else draw(result)
            if page is not None:
                _add(page, result)
            return lines

        yield look


def _add(page: Report, result: CaptionResult) -> None:
    """Add a result to the page.

    Raises:
        RunError: the page cannot be written, which concerns every input.
    """
    try:
        page.add(result)
    except OSError as error:
        if error.errno is None:  # not by the system: an image that Pillow does not know
            raise
        raise RunError(f"{page.path}: {error.strerror}") from error


class _Charts:
    """Charts of what each word looked at, for stderr; once says that a captioner has none."""

    def __init__(self, batch: common.Batch) -> None:
        from capvid.output.sparklines import levels_for

        self._batch = batch
        self._levels = levels_for(sys.stderr.encoding)
        self._none_said = False

    def __call__(self, result: CaptionResult) -> list[str]:
        from capvid.output.sparklines import attention_lines

        lines = attention_lines(result, width=_width(), levels=self._levels, named=self._batch.many)
        if result.error is None and not lines and not self._none_said:
            self._none_said = True
            lines = [f"note: {result.model} has no attention over frames to show"]
        return lines


def _width() -> int:
    """Columns of the terminal that stderr is; otherwise what ``COLUMNS`` says, or 80."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # no terminal, or a stream that is no file
        return shutil.get_terminal_size().columns
