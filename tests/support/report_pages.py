"""Caption results for HTML reports, and a parser of the reports."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from capvid.decoding.caption_generator import Caption, WordScore
from capvid.errors import VideoError
from capvid.features.prefetch import encode_jpegs
from capvid.output.report import Report
from capvid.output.results import CaptionResult, Segment
from capvid.pipeline import paragraph

SETTINGS = {"sampling": "uniform:28", "beam_size": 5, "length_penalty": 0.7}

MODEL = "m3@0123456789ab"


def pictures(count: int, *, seed: int = 0) -> tuple[bytes, ...]:
    return encode_jpegs(np.random.default_rng(seed).integers(0, 256, (count, 12, 16, 3), dtype=np.uint8))


def make_caption(*, frames: int = 4, words: str = "a dog runs", seed: int = 0, slots: int = 3) -> Caption:
    """Return a caption with random traces over ``frames`` frames and ``slots`` memory slots."""
    random = np.random.default_rng(seed)
    scores = tuple(WordScore(word=word, logprob=-random.random()) for word in words.split())
    rows = len(scores) + 1
    weights = random.dirichlet(np.ones(frames + 1), rows)
    traces = {
        "attention": weights[:, :-1],
        "blank": weights[:, -1:],
        "write_text": random.dirichlet(np.ones(slots), rows),
    }
    total = sum(score.logprob for score in scores) - random.random()
    return Caption(text=words, logprob=total, words=scores, traces=traces)


def video(*, frames: int = 4, seed: int = 0, with_pictures: bool = True, **changes: Any) -> CaptionResult:
    """Return the result of a video captioned as one segment, with every frame sampled."""
    captions = tuple(make_caption(frames=frames, seed=seed + more) for more in range(2))
    result = CaptionResult(
        path=Path("in/v.mp4"),
        status="ok",
        captions=captions,
        error=None,
        model=MODEL,
        duration=frames / 2,
        segments=(Segment(start=0.0, end=frames / 2, captions=captions, frames=np.arange(frames)),),
        times=np.arange(frames) / 2 + 1 / 3,
        thumbnails=pictures(frames, seed=seed) if with_pictures else (),
    )
    return replace(result, **changes)


def story(*, segments: int, frames: int = 3, layers: int = 2) -> CaptionResult:
    """Return the result of a video in segments, captioned with a memory."""
    results = [
        Segment(
            start=2.0 * at,
            end=2.0 * (at + 1),
            captions=(make_caption(frames=frames, seed=at),),
            frames=np.arange(frames) + frames * at,
            memory_change=tuple(np.random.default_rng(at).random(layers).tolist()),
        )
        for at in range(segments)
    ]
    segment_pictures = pictures(frames)
    return video(
        captions=(paragraph([result.captions[0] for result in results]),),
        segments=tuple(results),
        paragraph=True,
        times=np.arange(frames * segments) * 2 / frames,
        thumbnails=segment_pictures * segments,
        duration=2.0 * segments,
    )


def failure(name: str = "w.mp4", message: str = "no such file") -> CaptionResult:
    error = VideoError(name, message, remedy="check the name", kind="missing")
    return CaptionResult(path=Path(name), status="error", captions=(), error=error, model=MODEL)


class Page(HTMLParser):
    """The tags, texts, scripts and data of an HTML report."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: list[dict[str, Any]] = []  # of each video
        self.articles: list[str] = []  # text of each article
        self.records: list[str] = []  # JSON record of each article
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self._inside: list[str] = []
        self._id = ""
        self.ids: dict[str, str] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        attribute_values = dict(attributes)
        self.tags.append((tag, attribute_values))
        self._inside.append(f"json {tag}" if attribute_values.get("type") == "application/json" else tag)
        self._id = attribute_values.get("id") or ""
        if tag == "article":
            self.articles.append("")
            self.records.append(attribute_values["data-record"] or "")

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop().removeprefix("json ") != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self._inside[-1] if self._inside else ""
        if inside == "json script":
            self.data.append(json.loads(data))
        elif inside == "script":
            self.scripts.append(data)
        elif inside == "style":
            self.styles.append(data)
        elif "article" in self._inside:
            self.articles[-1] += data
        if self._id:
            self.ids[self._id] = " ".join((self.ids.get(self._id, "") + data).split())
            self._id = ""


def written(path: Path, *results: CaptionResult, settings: Mapping[str, Any] = SETTINGS) -> Page:
    with Report(path, model=MODEL, settings=settings) as report:
        for result in results:
            report.add(result)
    return Page(path.read_text(encoding="utf-8"))


def images(page: Page) -> list[bytes]:
    """Return all images of a page, in order."""
    encoded = re.findall(r"data:image/jpeg;base64,([A-Za-z0-9+/=]+)", page.text)
    return [base64.b64decode(data, validate=True) for data in encoded]
