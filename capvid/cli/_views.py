"""The page of ``capvid caption --report`` and the charts of ``--attention``."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from capvid.cli._progress import check_writable_file
from capvid.errors import RunError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

    from capvid.output.results import CaptionResult
    from capvid.pipeline import CaptionPipeline


def check_report(path: Path, output: Path | None) -> None:
    """Check that the page can be written, before any work is done.

    Raises:
        UsageError: it cannot, or its name may be that of something else.
    """
    if path.suffix.lower() not in (".html", ".htm"):  # a video, say, would be replaced
        raise UsageError(f"{path}: not the name of a page", remedy="give --report a name that ends in .html")
    if output is not None and output.resolve() == path.resolve():
        raise UsageError(f"{path}: the captions go there", remedy="give -o and --report two names")
    check_writable_file(path)


class Views:
    """Shows results beside the captions: on the page, and as charts on stderr.

    Args:
        pipeline: the pipeline that captions.
        report: path of the page; None for none.
        charts: whether to draw charts.
        named: whether charts name their video.
    """

    def __init__(self, pipeline: CaptionPipeline, *, report: Path | None, charts: bool, named: bool) -> None:
        self._pipeline = pipeline
        self._report = report
        self._charts = charts
        self._named = named
        self._stack = ExitStack()
        self._noted = False  # that the captioner has no attention

    def __enter__(self) -> Self:
        if self._report is not None:
            from capvid.output.report import Report

            page = Report(self._report, model=self._pipeline.model, settings=self._pipeline.settings)
            self._page = self._stack.enter_context(page)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    @property
    def has_page(self) -> bool:
        """Whether results go to a page."""
        return self._report is not None

    def show(self, result: CaptionResult) -> list[str]:
        """Add a result to the page, and return its charts as lines for stderr.

        Raises:
            RunError: the page cannot be written, which concerns every input.
        """
        lines: list[str] = []
        if self._charts:
            from capvid.output.attention_chart import attention_lines, levels_for

            levels = levels_for(sys.stderr.encoding)
            lines = attention_lines(result, width=_width(), levels=levels, named=self._named)
            if result.error is None and not lines and not self._noted:
                self._noted = True
                lines = [f"note: {result.model} has no attention over frames to show"]
        if self._report is not None:
            try:
                self._page.add(result)
            except OSError as error:
                if error.errno is None:  # not by the system: an image that Pillow does not know
                    raise
                raise RunError(f"{self._report}: {error.strerror}") from error
        return lines


def _width() -> int:
    """Return the columns of the terminal that stderr is; otherwise ``COLUMNS``, or 80."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # no terminal, or a stream that is no file
        return shutil.get_terminal_size().columns
