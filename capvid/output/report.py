"""An HTML page of results, to look at instead of read: frames, captions and what each word looked at.

The page is one file that fetches nothing. It is written to a temporary file as results come, so that memory
does not grow with them, and takes its place at the end, also that of a run which is interrupted.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from html import escape
from pathlib import Path
from string import Template
from types import TracebackType
from typing import TYPE_CHECKING, Any

from capvid.digests import shown
from capvid.escaping import json_value, utf8_text
from capvid.files import atomic_path, remove_leftovers
from capvid.output.report_data import picture_size, picture_uri, poster_of, video_data

if TYPE_CHECKING:
    from capvid.results import CaptionResult

_PAGE = Path(__file__).resolve().with_name("page")
_ROOM = 200  # bytes kept free at the top for what is known at the end


class Report:
    """The page; a context manager that results are added to.

    If its block raises, the page has the results added until then and says so. One that has none, or that
    could not be written, is thrown away, and what stood at ``path`` stays.

    Args:
        path: of the file; a link stays one.
        model: that captions, ``name@revision``.
        settings: what else captions depend on.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, *, model: str, settings: Mapping[str, Any]) -> None:
        self.path = path.resolve()
        self.model = model
        self.settings = settings
        self._broken = False
        self._whole = (0, 0, 0)  # bytes up to the last whole result, how many are done, how many failed

    def __enter__(self) -> Report:
        self._begun = time.monotonic()
        remove_leftovers([self.path])
        style = _text("report.css")
        script = f'"use strict";\n(() => {{\n{_text("figure.js")}\n{_text("list.js")}}})();\n'
        values = {
            "policy": _policy(style=style, script=script),
            "style": style,
            "script": script,
            "model": escape(utf8_text(self.model.partition("@")[0])),
            "revision": escape(utf8_text(self.model.partition("@")[2])),
            "settings": "".join(
                f"<div><dt>{escape(name.replace('_', ' '))}</dt>"
                f"<dd>{escape(utf8_text(str(value)))}</dd></div>"
                for name, value in self.settings.items()
            ),
        }
        before, after = (Template(part).substitute(values) for part in _text("report.html").split("$counts"))
        with ExitStack() as stack:
            temporary = stack.enter_context(atomic_path(self.path))
            self._stream = stack.enter_context(temporary.open("wb"))
            self._place = self._put(before)
            self._whole = (self._put(" " * _ROOM + after), 0, 0)
            self._stack = stack.pop_all()
        return self

    def add(self, result: CaptionResult) -> None:
        """Add one result, with its traces and pictures if it has any.

        Raises:
            OSError: it cannot be written.
        """
        _, done, failed = self._whole
        end = self._put(_article(done + failed, result))
        good = result.error is None
        self._whole = (end, done + good, failed + (not good))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _, done, failed = self._whole
        if self._broken or (error is not None and not done + failed):
            self._stack.__exit__(kind, error, trace)
        else:
            with self._stack:
                self._finish(stopped=error is not None)

    def _finish(self, *, stopped: bool) -> None:
        end, done, failed = self._whole
        self._stream.seek(end)
        self._stream.truncate()  # an interrupt may have come in the middle of a result
        self._put("</main>\n</body>\n</html>\n")
        said = f"{done} captioned" + (f", {failed} failed" if failed else "")
        said += f" in {time.monotonic() - self._begun:.1f} s"
        said += "; stopped before the end" if stopped else ""
        self._stream.seek(self._place)
        self._put(said)

    def _put(self, text: str) -> int:
        """Write text; returns the number of bytes up to its end."""
        try:
            self._stream.write(text.encode("utf-8", "replace"))
            self._stream.flush()
            return self._stream.tell()
        except OSError:
            self._broken = True
            raise


def _text(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _policy(*, style: str, script: str) -> str:
    """A Content-Security-Policy: nothing is fetched, only this style and this script are used."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    allowed = f"style-src {digest(style)}; script-src {digest(script)}; img-src data:"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _article(number: int, result: CaptionResult) -> str:
    """One video in the list; its details are data that the script unfolds."""
    name = escape(shown(result.path))
    if result.error is not None:
        message, remedy = (_line(text) for text in (result.error.message, result.error.remedy))
        return (
            f'<article class="video failed" data-number="{number}">\n'
            f'<div class="top"><div class="poster"></div><div><h2 class="name"><bdi>{name}</bdi></h2>'
            f'<p class="error"><strong>failed</strong> <bdi>{message}</bdi>'
            f"{f'; <bdi>{remedy}</bdi>' if remedy else ''}</p></div></div>\n</article>\n"
        )
    poster = poster_of(result)
    best = result.captions[0]
    text = escape(utf8_text(best.text)) or "(no words)"
    mean = best.mean_logprob
    facts = [
        *([] if result.duration is None else [_duration(result.duration)]),
        *([f"{len(result.segments)} segments"] if result.paragraph else []),
        f"log-probability {_number(best.logprob)}, {_number(mean)} per word",
        *(["likely generic"] if best.generic else []),
        *([f"{result.lost} frame{'s' * (result.lost > 1)} lost"] if result.lost else []),
    ]
    data = _safe_json(video_data(result, poster=poster))
    return (
        f'<article class="video" data-number="{number}" data-likely="{mean:.4f}">\n'
        f'<div class="top">{_poster(result, poster)}<div><h2 class="name">'
        f'<button type="button" class="opener" aria-expanded="false" aria-controls="body{number}">'
        f'<bdi>{name}</bdi></button></h2><p class="caption"><bdi>{text}</bdi></p>'
        f'<p class="facts">{" · ".join(facts)}</p></div></div>\n'
        f'<div class="body" id="body{number}" hidden></div>\n'
        f'<script type="application/json">{data}</script>\n</article>\n'
    )


def _poster(result: CaptionResult, frame: int | None) -> str:
    if frame is None:
        return '<div class="poster"></div>'
    width, height = picture_size(result.pictures[frame])
    when = "" if result.times is None else f" at {result.times[frame]:.1f} s"
    return (
        f'<img class="poster" src="{picture_uri(result.pictures[frame])}" alt="Frame{when}" '
        f'width="{width}" height="{height}" loading="lazy" decoding="async">'
    )


def _safe_json(data: Any) -> str:
    """JSON in ASCII that nothing in it can end, or turn into a comment, inside a script element."""
    text = json.dumps(json_value(data), separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _line(text: str) -> str:
    """A message as HTML, on one line, whatever bytes a file name in it has."""
    return escape(" ".join(shown(text).split()))


def _number(value: float) -> str:
    return f"{value:.2f}".replace("-", "\N{MINUS SIGN}")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02} min"
