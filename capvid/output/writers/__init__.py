"""Output formats: one writer class per format, writing results to a stream as they come.

A new format is a new module in this package with a :class:`Writer` registered in :data:`FORMATS`. ``--help``
imports the modules here, so import heavy libraries inside functions.
"""

from __future__ import annotations

import csv
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from capvid.errors import DataError
from capvid.output.results import make_record
from capvid.utils.escaping import json_text, srt_text, table_cell, terminal, vtt_text
from capvid.utils.registry import Registry

if TYPE_CHECKING:
    from capvid.output.results import CaptionResult


COLUMNS = ("video", "start", "end", "caption", "logprob")


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
    """

    extension: ClassVar[str]
    records_errors: ClassVar[bool] = False
    records_attention: ClassVar[bool] = False
    single: ClassVar[bool] = False

    stream: TextIO
    many: bool
    settings: Mapping[str, Any]
    attention: bool = False

    def begin(self) -> None:  # noqa: B027 - optional
        """Write what precedes the first result."""

    @abstractmethod
    def write(self, result: CaptionResult) -> None:
        """Write one result and flush the stream."""

    def end(self) -> None:  # noqa: B027 - optional
        """Write what follows the last result."""

    def __enter__(self) -> Writer:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, OSError):  # an interrupted document is ended, a broken stream left alone
            self.end()
            self.stream.flush()


FORMATS: Registry[type[Writer]] = Registry("output format", "capvid.output.writers")


@FORMATS.register("txt")
class TextWriter(Writer):
    """Plain captions, one per line; with several inputs each after its path and a tab."""

    extension = "txt"

    def write(self, result: CaptionResult) -> None:
        """Write the captions of one result; nothing for one that failed."""
        path = f"{terminal(result.path)}\t" if self.many else ""
        self.stream.write("".join(f"{path}{terminal(caption.text)}\n" for caption in result.captions))
        self.stream.flush()


@FORMATS.register("json")
class JsonWriter(Writer):
    """One JSON document: the record of one input, or a list of records."""

    extension = "json"
    records_errors = True
    records_attention = True
    separator = "["

    def write(self, result: CaptionResult) -> None:
        """Write one record, indented."""
        text = json_text(make_record(result, self.settings, attention=self.attention), indent=2)
        self.stream.write(f"{self.separator}\n{text}" if self.many else f"{text}\n")
        self.separator = ","
        self.stream.flush()

    def end(self) -> None:
        """Close the list."""
        if self.many:
            self.stream.write("[]\n" if self.separator == "[" else "\n]\n")


@FORMATS.register("jsonl")
class JsonLinesWriter(Writer):
    """One JSON record per line."""

    extension = "jsonl"
    records_errors = True
    records_attention = True

    def write(self, result: CaptionResult) -> None:
        """Write one record."""
        self.stream.write(json_text(make_record(result, self.settings, attention=self.attention)) + "\n")
        self.stream.flush()


class SubtitleWriter(Writer):
    """The best captions as subtitles: a cue for each segment, or one for the complete video."""

    single = True
    decimal_mark: ClassVar[str]

    @staticmethod
    @abstractmethod
    def escape(text: str) -> str:
        """Return the text of a cue."""

    def write(self, result: CaptionResult) -> None:
        """Write the cues; nothing for a video that failed.

        Raises:
            DataError: the duration of the video is unknown.
        """
        for number, segment in enumerate(result.segments, 1):
            if segment.end is None or not math.isfinite(1000 * segment.end):
                raise DataError(
                    f"{result.path}: subtitles need times, and these features have none",
                    remedy="give the video, or choose another --format",
                )
            times = f"{self._timestamp(segment.start)} --> {self._timestamp(segment.end)}"
            self.stream.write(f"{number}\n{times}\n{self.escape(segment.captions[0].text)}\n\n")
        self.stream.flush()

    def _timestamp(self, time: float) -> str:
        seconds, milliseconds = divmod(round(1000 * time), 1000)
        minutes, seconds = divmod(seconds, 60)
        return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}{self.decimal_mark}{milliseconds:03}"


@FORMATS.register("srt")
class SubRipWriter(SubtitleWriter):
    """SubRip subtitles."""

    extension = "srt"
    decimal_mark = ","
    escape = staticmethod(srt_text)


@FORMATS.register("vtt")
class WebVttWriter(SubtitleWriter):
    """WebVTT subtitles."""

    extension = "vtt"
    decimal_mark = "."
    escape = staticmethod(vtt_text)

    def begin(self) -> None:
        """Write the signature of the format."""
        self.stream.write("WEBVTT\n\n")


@FORMATS.register("tsv")
class TsvWriter(Writer):
    """Table of captions, one row each, the best of a segment first; cells separated by tabs, unquoted."""

    extension = "tsv"

    def begin(self) -> None:
        """Write the column names."""
        self._write_row(COLUMNS)

    def write(self, result: CaptionResult) -> None:
        """Write a row for each caption; none for a video that failed."""
        for segment in result.segments:
            start, end = f"{segment.start:.3f}", "" if segment.end is None else f"{segment.end:.3f}"
            for caption in segment.captions:
                logprob = f"{caption.logprob:.6f}" if math.isfinite(caption.logprob) else ""
                self._write_row([table_cell(result.path), start, end, table_cell(caption.text), logprob])
        self.stream.flush()

    def _write_row(self, cells: Sequence[str]) -> None:
        self.stream.write("\t".join(cells) + "\n")


@FORMATS.register("csv")
class CsvWriter(TsvWriter):
    """The same table as CSV."""

    extension = "csv"

    def _write_row(self, cells: Sequence[str]) -> None:
        csv.writer(self.stream, lineterminator="\n").writerow(cells)
