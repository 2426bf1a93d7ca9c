"""Output formats: one writer class per format, rendering results one by one.

A new format is a new module in this package with a :class:`Writer` registered in :data:`FORMATS`. ``--help``
imports the modules here, so import heavy libraries inside functions.
"""

from __future__ import annotations

import csv
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from capvid.errors import DataError
from capvid.output.results import make_record
from capvid.utils.escaping import json_text, srt_text, table_cell, terminal, vtt_text
from capvid.utils.registry import Registry

if TYPE_CHECKING:
    from capvid.output.results import CaptionResult


@dataclass(kw_only=True, eq=False)
class Writer(ABC):
    """Writer of results to a text stream; a context manager that begins and ends the document.

    Args:
        stream: stream that is flushed after every result and not closed.
        many: whether the stream takes the results of several inputs, or of exactly one.
        settings: everything besides the model that the captions depend on, for records.
        attention: whether records include the attention traces of the results.

    Attributes:
        extension: extension of file names, without the dot.
        records_errors: whether a failed input leaves a record in the output.
        records_attention: whether the format can hold attention.
        single: whether a document holds one video only.
        head: text before the first result.
        empty: whether no result has been written.
    """

    extension: ClassVar[str]
    records_errors: ClassVar[bool] = False
    records_attention: ClassVar[bool] = False
    single: ClassVar[bool] = False
    head: ClassVar[str] = ""

    stream: TextIO
    many: bool
    settings: Mapping[str, Any]
    attention: bool = False
    empty: bool = True

    @abstractmethod
    def render(self, result: CaptionResult) -> str:
        """Return the text of one result, as it follows those already written."""

    def append(self, text: str) -> None:
        """Write a rendered result and flush the stream."""
        self.stream.write(text)
        self.stream.flush()
        self.empty = self.empty and not text

    def write(self, result: CaptionResult) -> None:
        """Render one result completely, then write it."""
        self.append(self.render(result))

    def tail(self) -> str:
        """Return the text after the last result."""
        return ""

    def __enter__(self) -> Writer:
        self.stream.write(self.head)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):  # an interrupted document is ended, a broken stream left alone
            self.stream.write(self.tail())
            self.stream.flush()


FORMATS: Registry[type[Writer]] = Registry("output format", "capvid.output.writers")


@FORMATS.register("txt")
class TextWriter(Writer):
    """Plain captions, one per line; with several inputs each after its path and a tab."""

    extension = "txt"

    def render(self, result: CaptionResult) -> str:
        """Return the captions of one result; nothing for one that failed."""
        path = f"{terminal(result.path)}\t" if self.many else ""
        return "".join([f"{path}{terminal(caption.text)}\n" for caption in result.captions])


@FORMATS.register("json")
class JsonWriter(Writer):
    """One JSON document: the record of one input, or a list of records."""

    extension = "json"
    records_errors = True
    records_attention = True

    def render(self, result: CaptionResult) -> str:
        """Return one record, indented."""
        text = json_text(make_record(result, self.settings, attention=self.attention), indent=2)
        return f"{'[' if self.empty else ','}\n{text}" if self.many else f"{text}\n"

    def tail(self) -> str:
        """Return the end of the list."""
        return ("[]\n" if self.empty else "\n]\n") if self.many else ""


@FORMATS.register("jsonl")
class JsonLinesWriter(Writer):
    """One JSON record per line."""

    extension = "jsonl"
    records_errors = True
    records_attention = True

    def render(self, result: CaptionResult) -> str:
        """Return one record."""
        return json_text(make_record(result, self.settings, attention=self.attention)) + "\n"


@FORMATS.register("srt")
class SubRipWriter(Writer):
    """The best captions as SubRip subtitles: a cue for each segment, or one for the complete video."""

    extension = "srt"
    single = True
    decimal_mark: ClassVar[str] = ","
    escape = staticmethod(srt_text)

    def render(self, result: CaptionResult) -> str:
        """Return the cues; nothing for a video that failed.

        Raises:
            DataError: the duration of the video is unknown.
        """
        cues = []
        for number, segment in enumerate(result.segments, 1):
            if segment.end is None or not math.isfinite(1000 * segment.end):
                raise DataError(
                    f"{result.path}: subtitles need times, and these features have none",
                    remedy="give the video, or choose another --format",
                )
            times = f"{self._timestamp(segment.start)} --> {self._timestamp(segment.end)}"
            cues.append(f"{number}\n{times}\n{self.escape(segment.captions[0].text)}\n\n")
        return "".join(cues)

    def _timestamp(self, time: float) -> str:
        seconds, milliseconds = divmod(round(1000 * time), 1000)
        minutes, seconds = divmod(seconds, 60)
        return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}{self.decimal_mark}{milliseconds:03}"


@FORMATS.register("vtt")
class WebVttWriter(SubRipWriter):
    """The same cues as WebVTT subtitles."""

    extension = "vtt"
    head = "WEBVTT\n\n"
    decimal_mark = "."
    escape = staticmethod(vtt_text)


@FORMATS.register("tsv")
class TsvWriter(Writer):
    """Table of captions, one row each, the best of a segment first; cells separated by tabs, unquoted."""

    extension = "tsv"
    head = "video\tstart\tend\tcaption\tlogprob\n"

    def render(self, result: CaptionResult) -> str:
        """Return a row for each caption; none for a video that failed."""
        rows = []
        for segment in result.segments:
            start, end = f"{segment.start:.3f}", "" if segment.end is None else f"{segment.end:.3f}"
            for caption in segment.captions:
                logprob = f"{caption.logprob:.6f}" if math.isfinite(caption.logprob) else ""
                rows.append([table_cell(result.path), start, end, table_cell(caption.text), logprob])
        return self._table(rows)

    def _table(self, rows: list[list[str]]) -> str:
        return "".join(["\t".join(row) + "\n" for row in rows])


@FORMATS.register("csv")
class CsvWriter(TsvWriter):
    """The same table as CSV."""

    extension = "csv"
    head = "video,start,end,caption,logprob\n"

    def _table(self, rows: list[list[str]]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue()
