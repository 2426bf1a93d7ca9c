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
from capvid.errors import UsageError

if TYPE_CHECKING:
    from capvid.pipeline import CaptionPipeline
    from capvid.results import CaptionResult

    Write = Callable[[CaptionResult], None]


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
) -> Iterator[Write]:
    """Yield a function that takes each result as it comes, for the page and the charts, if they are wanted.

    Raises:
        OSError: the page cannot be written.
    """
    from capvid.output import Report

    with ExitStack() as stack:
        takers: list[Write] = []
        if report is not None:
            page = stack.enter_context(Report(report, model=pipeline.model, settings=pipeline.settings))
            takers.append(page.add)
        if charts:
            takers.append(_Charts(batch))

        def look(result: CaptionResult) -> None:
            for take in takers:
                take(result)

        yield look


class _Charts:
    """Prints charts of what each word looked at on stderr; once says that a captioner has none."""

    def __init__(self, batch: common.Batch) -> None:
        from capvid.output.sparklines import levels_for

        self._batch = batch
        self._levels = levels_for(sys.stderr.encoding)
        self._none_said = False

    def __call__(self, result: CaptionResult) -> None:
        from capvid.output.sparklines import attention_lines

        lines = attention_lines(result, width=_width(), levels=self._levels, named=self._batch.many)
        for line in lines:
            self._batch.say(line)
        if result.error is None and not lines and not self._none_said:
            self._none_said = True
            self._batch.say(f"note: {result.model} has no attention over frames to show")


def _width() -> int:
    """Columns of the terminal that stderr is; otherwise what ``COLUMNS`` says, or 80."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # no terminal, or a stream that is no file
        return shutil.get_terminal_size().columns
