"""Output formats: one function per format, which renders results one by one.

A new format is a new module in this package with a function under ``@FORMATS.register(name)``. ``--help``
imports the modules here, so import heavy libraries inside functions.
"""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, TextIO

from capvid.errors import DataError
from capvid.output.results import make_record
from capvid.utils.escaping import json_text, srt_text, table_cell, terminal, vtt_text
from capvid.utils.registry import Registry

if TYPE_CHECKING:
    from capvid.output.results import CaptionResult

COLUMNS = (
    "video",
    "start",
    "end",
    "caption",
    "logprob",
    "confidence",
    "low_confidence",
    "status",
    "error",
)
MAX_CUE = 7.0  # seconds that a subtitle is shown, by the conventions of broadcasters
LINE_WIDTH = 42  # characters
_CUE_LINES = 2
Render = Callable[["CaptionResult", "Document"], str]


@dataclass(frozen=True)
class OutputFormat:
    """Output format of captions.

    Attributes:
        extension: name of the format and extension of its files, without the dot.
        render: function that returns the text of a result, as it follows those already in the document.
        head: text before the first result.
        tail: function that returns the text after the last result.
        records_errors: whether a failed input leaves a record in the output.
        records_attention: whether the format can hold attention.
        single: whether a document holds one video only.
    """

    extension: str
    render: Render
    _: KW_ONLY
    head: str = ""
    tail: Callable[[Document], str] = lambda _: ""
    records_errors: bool = False
    records_attention: bool = False
    single: bool = False


FORMATS = Registry("output format", "capvid.output.writers", OutputFormat)


@dataclass(kw_only=True, eq=False)
class Document:
    """Results as text on a stream; a context manager that begins and ends the document.

    Args:
        form: format of the document.
        stream: stream that is flushed after every result and not closed.
        many: whether the document takes the results of several inputs, or of exactly one.
        settings: everything besides the model that the captions depend on, for records.
        attention: whether records include the attention traces of the results.
        max_cue: seconds that a subtitle is shown at most; 0 shows it for the complete segment.
        line_width: characters of a line of a subtitle; 0 does not break lines.

    Attributes:
        empty: whether no result has been written.
    """

    form: OutputFormat
    stream: TextIO
    many: bool
    settings: Mapping[str, Any]
    attention: bool = False
    max_cue: float = MAX_CUE
    line_width: int = LINE_WIDTH
    empty: bool = True

    def render(self, result: CaptionResult) -> str:
        """Return the text of one result."""
        text = self.form.render(result, self)
        text.encode("utf-8")  # otherwise one word could make the whole document unwritable
        return text

    def append(self, text: str) -> None:
        """Write a rendered result and flush the stream."""
        self.stream.write(text)
        self.stream.flush()
        self.empty = self.empty and not text

    def __enter__(self) -> Document:
        self.stream.write(self.form.head)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):  # an interrupted document is ended, a broken stream left alone
            self.stream.write(self.form.tail(self))
            self.stream.flush()


@FORMATS.register("txt")
def text_lines(result: CaptionResult, document: Document) -> str:
    """Return plain captions, one per line.

    With several inputs, each follows its path and a tab; a third column says why a video has no caption, or
    that its caption is flagged.
    """
    if not document.many:
        return "".join([f"{terminal(caption.text)}\n" for caption in result.captions])
    path = terminal(result.path)
    if result.error is not None:
        return f"{path}\t\terror: {terminal(str(result.error))}\n"
    flag = "\tlow confidence" if result.low_confidence else ""
    return "".join([f"{path}\t{terminal(caption.text)}{flag}\n" for caption in result.captions])


def _end_of_list(document: Document) -> str:
    if not document.many:
        return ""
    return "[]\n" if document.empty else "\n]\n"


@FORMATS.register("json", tail=_end_of_list, records_errors=True, records_attention=True)
def json_document(result: CaptionResult, document: Document) -> str:
    """Return one record, indented: the document of one input, or an item of its list."""
    text = json_text(make_record(result, document.settings, attention=document.attention), indent=2)
    return f"{'[' if document.empty else ','}\n{text}" if document.many else f"{text}\n"


@FORMATS.register("jsonl", records_errors=True, records_attention=True)
def json_line(result: CaptionResult, document: Document) -> str:
    """Return one record on a line."""
    return json_text(make_record(result, document.settings, attention=document.attention)) + "\n"


def _cues(result: CaptionResult, document: Document, escape: Callable[[str], str], decimal_mark: str) -> str:
    """Return the best captions as subtitles, of the complete video or of each segment.

    A caption of more than two lines becomes several cues, which share the segment's time by their length.

    Raises:
        DataError: the duration of the video is unknown.
    """
    cues: list[str] = []
    for segment in result.segments:
        if segment.end is None or not math.isfinite(1000 * segment.end):
            raise DataError(
                f"{result.path}: subtitles need times, and these features have none",
                remedy="give the video, or choose another --format",
            )
        lines = _subtitle_lines(terminal(segment.captions[0].text), document.line_width)
        pages = [lines[first : first + _CUE_LINES] for first in range(0, len(lines), _CUE_LINES)]
        per_character = (segment.end - segment.start) / max(1, sum(map(len, lines)))
        start = segment.start
        for page in pages:
            last = page is pages[-1]
            following = segment.end if last else start + per_character * sum(map(len, page))
            end = min(following, start + document.max_cue) if document.max_cue else following
            # A cue that ends when it begins is none; WebVTT forbids it.
            milliseconds = round(1000 * start), max(round(1000 * end), round(1000 * start) + 1)
            times = " --> ".join(_cue_time(each, decimal_mark) for each in milliseconds)
            text = "\n".join(map(escape, page))
            cues.append(f"{len(cues) + 1}\n{times}\n{text}\n\n")
            start = following
    return "".join(cues)


def _subtitle_lines(text: str, width: int) -> list[str]:
    """Break a text into lines, of similar length if there are two."""
    lines = textwrap.wrap(text, width) if width else [text]
    if len(lines) == 2:
        narrower = (textwrap.wrap(text, each) for each in range(max(1, len(text) // 2), width + 1))
        lines = next(broken for broken in narrower if len(broken) == 2)
    # Spaces may stay where a long word is broken, and an empty line would end the cue.
    return [line.strip() for line in lines if line.strip()] or [""]


def _cue_time(milliseconds: int, decimal_mark: str) -> str:
    seconds, milliseconds = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}{decimal_mark}{milliseconds:03}"


@FORMATS.register("srt", single=True)
def subrip(result: CaptionResult, document: Document) -> str:
    """Return SubRip subtitles."""
    return _cues(result, document, srt_text, ",")


@FORMATS.register("vtt", single=True, head="WEBVTT\n\n")
def webvtt(result: CaptionResult, document: Document) -> str:
    """Return WebVTT subtitles."""
    return _cues(result, document, vtt_text, ".")


def _rows(result: CaptionResult) -> list[list[str]]:
    """Return a row of cells for each caption, the best of a segment first; one row for a failed input."""
    path = table_cell(result.path)
    if result.error is not None:
        return [[path, "", "", "", "", "", "", result.status, table_cell(str(result.error))]]
    rows = []
    for segment in result.segments:
        start, end = f"{segment.start:.3f}", "" if segment.end is None else f"{segment.end:.3f}"
        for caption in segment.captions:
            logprob = f"{caption.logprob:.6f}" if math.isfinite(caption.logprob) else ""
            flag = "" if caption.confidence is None else str(caption.low_confidence).lower()
            confidence = "" if caption.confidence is None else f"{caption.confidence:.3f}"
            text = table_cell(caption.text)
            rows.append([path, start, end, text, logprob, confidence, flag, result.status, ""])
    return rows


@FORMATS.register("tsv", head="\t".join(COLUMNS) + "\n", records_errors=True)
def tab_separated(result: CaptionResult, document: Document) -> str:
    """Return a table of captions, whose cells are unquoted."""
    return "".join(["\t".join(row) + "\n" for row in _rows(result)])


@FORMATS.register("csv", head=",".join(COLUMNS) + "\n", records_errors=True)
def comma_separated(result: CaptionResult, document: Document) -> str:
    """Return the same table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(_rows(result))
    return text.getvalue()
