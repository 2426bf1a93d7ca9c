"""What a person reviews: an HTML page of results, and charts of attention in a terminal.

The page is one file that fetches nothing. Each entry holds the JSON record of its video, which the page
corrects and downloads. Results are written to a temporary file as they come, so that
memory does not grow, and the file is renamed at the end, also when a run is interrupted.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np

from capvid.output.results import CaptionResult, Segment, make_record
from capvid.utils.escaping import json_text, json_value, terminal, utf8_text
from capvid.utils.files import atomic_path, remove_leftovers

if TYPE_CHECKING:
    from capvid.decoding.caption_generator import Caption

COLUMNS = 60  # per segment; neighbouring frames share a column where there are more
PICTURES = 2400  # per video, all segments together
LEAST = 4  # thumbnails of a segment, however many segments there are
LONG = 12  # segments; of more, an open video shows its time line and segments, but no paragraph
SCALE = 10_000  # weights are integers in units of 1 / SCALE

_TEMPLATES = Path(__file__).resolve().with_name("page")
_COUNTS_BYTES = 200  # reserved at the top for the counts, which are known at the end
_DECIMALS = 3


class Report:
    """HTML page; a context manager that results are added to.

    If the block raises, the page keeps the results added so far and says that it is incomplete. A page
    without results, or one that could not be written, is discarded, and the file at ``path`` stays.

    Args:
        path: file to write; a symbolic link is followed.
        model: captioner as ``name@revision``.
        settings: everything else that the captions depend on.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, *, model: str, settings: Mapping[str, Any]) -> None:
        self.path = path.resolve()
        self.model = model
        self.settings = settings
        self._broken = False
        self._state = (0, 0, 0, 0)  # end of the last complete result; videos captioned, failed, doubtful
        self._digest = hashlib.sha256()  # of the results, to which the browser's copy of the edits belongs

    def __enter__(self) -> Report:
        self._start = time.monotonic()
        remove_leftovers([self.path])
        html, style, *scripts = (
            (_TEMPLATES / name).read_text(encoding="utf-8")
            for name in ("report.html", "report.css", "figure.js", "review.js", "list.js")
        )
        script = f'"use strict";\n(() => {{\n{"".join(scripts)}}})();\n'
        allowed = [
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in (style, script)
        ]
        name, _, revision = self.model.partition("@")
        values = {
            # The browser fetches nothing, and uses no other style and script.
            "policy": f"default-src 'none'; style-src {allowed[0]}; script-src {allowed[1]}; "
            "img-src data:; base-uri 'none'; form-action 'none'",
            "style": style,
            "script": script,
            "model": escape(utf8_text(name)),
            "revision": escape(utf8_text(revision)),
            "settings": "".join(
                f"<div><dt>{escape(option.replace('_', ' '))}</dt>"
                f"<dd>{escape(utf8_text(str(value)))}</dd></div>"
                for option, value in self.settings.items()
            ),
        }
        before, after = (Template(part).substitute(values) for part in html.split("$counts"))
        with ExitStack() as stack:
            temporary = stack.enter_context(atomic_path(self.path))
            self._stream = stack.enter_context(temporary.open("wb"))
            self._counts_offset = self._write(before)
            self._state = (self._write(" " * _COUNTS_BYTES + after), 0, 0, 0)
            self._stack = stack.pop_all()
        return self

    def add(self, result: CaptionResult) -> None:
        """Add one result, with its traces and thumbnails if it has any.

        Raises:
            OSError: the result cannot be written.
        """
        _, captioned, failed, doubtful = self._state
        article = _article(captioned + failed, result, json_text(make_record(result, self.settings)))
        end = self._write(article)
        ok = result.error is None
        self._digest.update(article.encode("utf-8", "replace"))
        self._state = (end, captioned + ok, failed + (not ok), doubtful + result.low_confidence)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        end, captioned, failed, doubtful = self._state
        if self._broken or (error is not None and not captioned + failed):
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            self._stream.seek(end)
            self._stream.truncate()  # an interrupt may have come in the middle of a result
            self._write(f'<data id="digest" value="{self._digest.hexdigest()}"></data>\n')
            self._write("</main>\n</body>\n</html>\n")
            counts = f"{captioned} captioned" + (f", {failed} failed" if failed else "")
            counts += f", {doubtful} of low confidence" if doubtful else ""
            counts += f" in {time.monotonic() - self._start:.1f} s"
            counts += "; stopped before the end" if error is not None else ""
            self._stream.seek(self._counts_offset)
            self._write(counts)

    def _write(self, text: str) -> int:
        """Write text and return the offset of its end."""
        try:
            self._stream.write(text.encode("utf-8", "replace"))
            self._stream.flush()
            return self._stream.tell()
        except OSError:
            self._broken = True
            raise


def _article(number: int, result: CaptionResult, record: str) -> str:
    """Return one entry of the list, with its JSON record and the data that the script unfolds."""
    name = escape(utf8_text(result.path))
    # Between single quotes, so that the double quotes of JSON need no escaping.
    record = escape(record, quote=False).replace("'", "&#39;")
    if result.error is not None:
        message, remedy = (
            escape(" ".join(utf8_text(text).split())) for text in (result.error.message, result.error.remedy)
        )
        return (
            f'<article class="video failed" data-number="{number}" data-record=\'{record}\'>\n'
            f'<div class="top"><div class="poster"></div><div><h2 class="name"><bdi>{name}</bdi></h2>'
            f'<p class="error"><strong>failed</strong> <bdi>{message}</bdi>'
            f"{f'; <bdi>{remedy}</bdi>' if remedy else ''}</p></div></div>\n</article>\n"
        )
    best = result.captions[0]
    text = escape(utf8_text(best.text)) or "(no words)"
    confidences = [
        segment.captions[0].confidence
        for segment in result.segments
        if segment.captions[0].confidence is not None
    ]
    confidence = f"{min(confidences):.4f}" if confidences else ""  # a video is as good as its worst segment
    low = result.low_confidence
    doubtful = f"{result.num_low_confidence} of " if result.paragraph else ""
    facts = [
        *([] if result.duration is None else [_duration(result.duration)]),
        *([f"{len(result.segments)} segments"] if result.paragraph else []),
        *([f"{'lowest ' * result.paragraph}confidence {min(confidences):.2f}"] if confidences else []),
        *([f'<strong class="low">{doubtful}low confidence</strong>'] if low else []),
        *([f"{result.lost} frame{'s' * (result.lost > 1)} lost"] if result.lost else []),
    ]
    data = _video_data(result)
    poster = '<div class="poster"></div>'
    if result.thumbnails:
        width, height = data["size"]
        when = "" if result.times is None else f" at {result.times[data['poster']]:.1f} s"
        poster = (
            f'<img class="poster" src="{_data_uri(result.thumbnails[data["poster"]])}" alt="Frame{when}" '
            f'width="{width}" height="{height}" loading="lazy" decoding="async">'
        )
    # In ASCII without these characters, nothing in the data can end the script element or begin a comment.
    safe = json.dumps(json_value(data), separators=(",", ":"), allow_nan=False)
    safe = safe.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    is_long = result.paragraph and len(result.segments) > LONG
    kinds = f"video{' low-confidence' * low}{' segmented' * result.paragraph}{' long' * is_long}"
    return (
        f'<article class="{kinds}" data-number="{number}" '
        f'data-likely="{best.mean_logprob:.4f}" data-confidence="{confidence}" data-record=\'{record}\'>\n'
        f'<div class="top">{poster}<div><h2 class="name">'
        f'<button type="button" class="opener" aria-expanded="false" aria-controls="body{number}">'
        f'<bdi>{name}</bdi></button></h2><p class="caption"><bdi>{text}</bdi></p>{_time_line(result)}'
        f'<div class="review"><p class="facts">{" · ".join(facts)}</p></div></div></div>\n'
        f'<div class="body" id="body{number}" hidden></div>\n'
        f'<script type="application/json">{safe}</script>\n</article>\n'
    )


def _time_line(result: CaptionResult) -> str:
    """Return the segments of a video to scale, with their captions as tooltips; empty without times."""
    segments, duration = result.segments, result.duration
    if not result.paragraph or not duration or not math.isfinite(duration):
        return ""
    marks = []
    for segment in segments:
        best, end = segment.captions[0], duration if segment.end is None else segment.end
        title = escape(utf8_text(f"{_clock(segment.start)}\u2013{_clock(end)} {best.text}"))
        low = ' class="low"' if best.low_confidence else ""
        width = max(end - segment.start, duration / 2000)  # so that each can be seen
        mark = f'<rect{low} x="{segment.start:.3f}" width="{width:.3f}" height="1">'
        marks.append(f"{mark}<title>{title}</title></rect>")
    times = "".join(f"<span>{_clock(duration * quarter / 4)}</span>" for quarter in range(5))
    return (
        f'<div class="overview"><svg viewBox="0 0 {duration:.3f} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="Time line of {len(segments)} segments">{"".join(marks)}</svg>'
        f'<div class="axis" aria-hidden="true">{times}</div></div>'
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{_clock(seconds)}{' min' * (round(seconds) < 3600)}"


def _data_uri(thumbnail: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(thumbnail).decode('ascii')}"


def _video_data(result: CaptionResult) -> dict[str, Any]:
    """Return the data that the page unfolds when a video is opened.

    ``thumbnails`` maps frames to the images that segments show, except for the frame ``poster``, the middle
    one, which the page shows already.
    """
    per_segment = max(LEAST, PICTURES // max(1, len(result.segments)))
    segments = [_segment_data(result, segment, per_segment) for segment in result.segments]
    frames = {frame for segment in segments for frame in segment["thumbnails"] if frame is not None}
    poster = size = None
    if result.thumbnails:
        from PIL import Image

        poster = len(result.thumbnails) // 2
        with Image.open(io.BytesIO(result.thumbnails[poster])) as image:
            size = image.size
    return {
        "poster": poster,
        "size": size,
        "paragraph": result.paragraph,
        "thumbnails": {frame: _data_uri(result.thumbnails[frame]) for frame in sorted(frames - {poster})},
        "segments": segments,
    }


def _segment_data(result: CaptionResult, segment: Segment, max_thumbnails: int) -> dict[str, Any]:
    frames = segment.frames
    count = min(len(frames), COLUMNS)
    edges = np.linspace(0, len(frames), count, endpoint=False).astype(int)  # (C,), first frame of each column
    ends = np.append(edges[1:], len(frames))
    thumbnails: list[int | None] = [None] * count
    if result.thumbnails and count:
        for column in np.linspace(0, count - 1, min(count, max_thumbnails)).round().astype(int):
            thumbnails[column] = int(frames[(edges[column] + ends[column] - 1) // 2])
    data: dict[str, Any] = {
        "start": round(segment.start, _DECIMALS),
        "end": None if segment.end is None else round(segment.end, _DECIMALS),
        "times": None if result.times is None else _rounded(result.times[frames[edges]]),
        "thumbnails": thumbnails,
        "captions": [_caption_data(caption, edges) for caption in segment.captions],
    }
    if count < len(frames):
        data["first"] = edges.tolist()
        if result.times is not None:
            data["until"] = _rounded(result.times[frames[ends - 1]])
    if segment.memory_change:
        data["change"] = [round(x, _DECIMALS) if math.isfinite(x) else None for x in segment.memory_change]
    return data


def _caption_data(caption: Caption, edges: np.ndarray) -> dict[str, Any]:
    """Return words with their log-probabilities, the end last, and traces in units of 1 / SCALE."""
    traces = {name: np.asarray(trace, dtype=float) for name, trace in (caption.traces or {}).items()}
    if "attention" in traces and len(edges):  # (L + 1, T) -> (L + 1, C)
        traces["attention"] = np.add.reduceat(traces["attention"], edges, axis=1)
    end_logprob = caption.logprob - sum(word.logprob for word in caption.words)
    return {
        "text": caption.text,
        "logprob": round(caption.logprob, _DECIMALS),
        "confidence": None if caption.confidence is None else round(caption.confidence, _DECIMALS),
        "low_confidence": caption.low_confidence,
        "words": [[word.word, round(word.logprob, _DECIMALS)] for word in caption.words]
        + [[None, round(end_logprob, _DECIMALS)]],
        "traces": {
            name: np.rint(np.nan_to_num(trace, posinf=0, neginf=0) * SCALE).astype(int).tolist()
            for name, trace in traces.items()
        },
    }


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), _DECIMALS) for value in values]


# Charts of attention. Array shapes: L words, T frames, C characters of a chart.

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#@"
END = "(end)"

_LONGEST_WORD = 18
_NARROWEST = 4  # characters of a chart, however narrow the terminal


def levels_for(encoding: str | None) -> str:
    """Return the characters for low to high weights that a stream of this encoding can show."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def attention_lines(
    result: CaptionResult, *, width: int, levels: str = BLOCKS, named: bool = False
) -> list[str]:
    """Return one line per word: the word, its chart over the frames, and where the weights peak.

    The charts of a caption share one scale, from zero to its largest weight. Captions of a video with several
    are headed by a line of their own.

    Args:
        result: result with traces; without attention traces there are no lines.
        width: maximum width in columns; frames that do not fit are averaged with their neighbours.
        levels: characters from low to high.
        named: whether to head single captions, too, because there are several videos.
    """
    lines = []
    named = named or result.paragraph or len(result.captions) > 1
    for segment in result.segments:
        times = None if result.times is None else result.times[segment.frames]
        span = ""
        if result.paragraph and segment.end is not None:
            span = f" {segment.start:.1f}-{segment.end:.1f}s"
        for caption in segment.captions:
            attention = (caption.traces or {}).get("attention")
            if attention is None:
                continue
            if named:
                lines.append(f"{terminal(result.path)}{span}: {terminal(caption.text)}")
            words = [*(terminal(each.word) for each in caption.words), END]
            weights = np.nan_to_num(attention, posinf=0, neginf=0)
            lines += _charts(words, weights, times, width=width, levels=levels)
    return lines


def _charts(
    words: Sequence[str], weights: np.ndarray, times: np.ndarray | None, *, width: int, levels: str
) -> list[str]:
    """Return a line for each word, from weights (L, T) over frames at ``times`` (T,)."""
    words = [word if len(word) <= _LONGEST_WORD else f"{word[: _LONGEST_WORD - 1]}~" for word in words]
    peaks = []
    for row in weights:
        frame = int(row.argmax()) if row.max(initial=0) else None
        if frame is None:
            peaks.append("-")
        else:
            when = f"frame {frame + 1}" if times is None else f"{times[frame]:.1f}s"
            peaks.append(f"{when} {row[frame]:4.0%}")
    word_width, peak_width = max(map(len, words)), max(map(len, peaks))
    columns = max(_NARROWEST, width - word_width - peak_width - 6)
    count = weights.shape[1]
    if count > columns:
        edges = np.linspace(0, count, columns, endpoint=False).astype(int)
        weights = np.add.reduceat(weights, edges, axis=1) / np.diff(np.append(edges, count))  # (L, C)
    heights = np.ceil(weights / (weights.max() or 1.0) * len(levels)).astype(int).clip(1) - 1
    return [
        f"  {word:<{word_width}}  {''.join(levels[height] for height in row)}  {peak:>{peak_width}}"
        for word, row, peak in zip(words, heights, peaks, strict=True)
    ]
