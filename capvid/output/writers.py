"""Writers: one class per format, each writing results to a stream as they come."""

from __future__ import annotations

import csv
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from capvid.errors import DataError
from capvid.escaping import json_text, srt_text, table_cell, terminal, vtt_text
from capvid.output.records import make_record

if TYPE_CHECKING:
    from capvid.results import CaptionResult


COLUMNS = ("video", "start", "end", "caption", "logprob")
_DECIMALS = 6


class Writer(ABC):
    """Writes results to a text stream; a context manager, so that a document is begun and ended.

    Args:
        stream: where to write; it is flushed after every result and not closed.
        many: whether the stream takes the results of several inputs, or of exactly one.
        settings: what captions depend on besides the model, for the records.
        attention: whether records say what the captioner looked at, which results then have as traces.

    Attributes:
        extension: of file names in this format, without the dot.
        records_errors: whether a failed input leaves something in the output.
        records_attention: whether this format can say what the captioner looked at.
        single: whether a document holds one video only.
    """

    extension: ClassVar[str]
    records_errors: ClassVar[bool]
    records_attention: ClassVar[bool] = False
    single: ClassVar[bool] = False

    def __init__(
        self, *, stream: TextIO, many: bool, settings: Mapping[str, Any], attention: bool = False
    ) -> None:
        self.stream = stream
        self.many = many
        self.settings = settings
        self.attention = attention

    @abstractmethod
    def write(self, result: CaptionResult) -> None:
        """Write one result."""

    def begin(self) -> None:  # noqa: B027 - most formats need none
        """Write what comes before the first result."""

    def end(self) -> None:  # noqa: B027
        """Write what comes after the last result."""

    def __enter__(self) -> Writer:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, OSError):  # an interrupted document is ended, a broken stream left alone
            self.end()
            self.stream.flush()

    def _put(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


class TextWriter(Writer):
    """Plain captions, one per line; with several inputs each after its path and a tab."""

    extension = "txt"
    records_errors = False

    def write(self, result: CaptionResult) -> None:
        """Write the captions of one result; nothing for one that failed."""
        before = f"{terminal(result.path)}\t" if self.many else ""
        self._put("".join(f"{before}{terminal(caption.text)}\n" for caption in result.captions))


class RecordWriter(Writer):
    """Writes the records that :func:`make_record` makes."""

    records_errors = True
    records_attention = True

    def _record(self, result: CaptionResult, *, indent: int | None) -> str:
        record = make_record(result, self.settings, attention=self.attention)
        return json_text(record, indent=indent)


class JsonLinesWriter(RecordWriter):
    """One record per line."""

    extension = "jsonl"

    def write(self, result: CaptionResult) -> None:
        """Write one record."""
        self._put(self._record(result, indent=None) + "\n")


class JsonWriter(RecordWriter):
    """One JSON document: the record of one input, a list of records for several."""

    extension = "json"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._separator = ""

    def begin(self) -> None:
        """Open the list."""
        if self.many:
            self.stream.write("[")

    def write(self, result: CaptionResult) -> None:
        """Write one record, indented."""
        text = self._record(result, indent=2)
        if not self.many:
            self._put(text + "\n")
            return
        self._put(self._separator + "\n" + text)
        self._separator = ","

    def end(self) -> None:
        """Close the list."""
        if self.many:
            self.stream.write("\n]\n" if self._separator else "]\n")


class CsvWriter(Writer):
    """A table with a row for each caption of each segment: of which video, from when to when, and how likely.

    Captions of one segment come best first.
    """

    extension = "csv"
    records_errors = False

    def begin(self) -> None:
        """Write the names of the columns."""
        self._row(COLUMNS)

    def write(self, result: CaptionResult) -> None:
        """Write a row for each caption; none for a video that failed."""
        for segment in result.segments:
            start, end = f"{segment.start:.3f}", "" if segment.end is None else f"{segment.end:.3f}"
            for caption in segment.captions:
                likely = f"{caption.logprob:.{_DECIMALS}f}" if math.isfinite(caption.logprob) else ""
                self._row([table_cell(result.path), start, end, table_cell(caption.text), likely])
        self.stream.flush()

    def _row(self, cells: Sequence[str]) -> None:
        csv.writer(self.stream, lineterminator="\n").writerow(cells)


class TsvWriter(CsvWriter):
    """The same with tabs between the columns and no quotes."""

    extension = "tsv"

    def _row(self, cells: Sequence[str]) -> None:
        self.stream.write("\t".join(cells) + "\n")


class SubtitleWriter(Writer):
    """The best captions as subtitles: a cue for each segment, or one over the whole video."""

    records_errors = False
    single = True
    point: ClassVar[str]  # before the milliseconds

    def write(self, result: CaptionResult) -> None:
        """Write the cues; nothing for a video that failed.

        Raises:
            DataError: it is not known how long the video is.
        """
        for number, segment in enumerate(result.segments, 1):
            if segment.end is None or not math.isfinite(1000 * segment.end):
                raise DataError(
                    f"{result.path}: subtitles need times, and these features have none",
                    remedy="give the video, or choose another --format",
                )
            times = f"{self._time(segment.start)} --> {self._time(segment.end)}"
            self.stream.write(f"{number}\n{times}\n{self._escaped(segment.captions[0].text)}\n\n")
        self.stream.flush()

    def _time(self, seconds: float) -> str:
        whole, milliseconds = divmod(round(1000 * seconds), 1000)
        minutes, second = divmod(whole, 60)
        return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}{self.point}{milliseconds:03}"

    @abstractmethod
    def _escaped(self, text: str) -> str:
        """Return the text of a cue."""


class SubRipWriter(SubtitleWriter):
    """SubRip."""

    extension = "srt"
    point = ","

    def _escaped(self, text: str) -> str:
        return srt_text(text)


class WebVttWriter(SubtitleWriter):
    """WebVTT."""

    extension = "vtt"
    point = "."

    def begin(self) -> None:
        """Write what tells the format."""
        self.stream.write("WEBVTT\n\n")

    def _escaped(self, text: str) -> str:
        return vtt_text(text)


WRITERS: dict[str, type[Writer]] = {
    writer.extension: writer
    for writer in (
        TextWriter,
        JsonWriter,
        JsonLinesWriter,
        SubRipWriter,
        WebVttWriter,
        TsvWriter,
        CsvWriter,
    )
}
