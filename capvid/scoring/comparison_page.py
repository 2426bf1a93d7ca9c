"""HTML page of a comparison: the videos on which systems differ most, with frames.

The page is one file that fetches nothing and runs no script.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from capvid.features.prefetch import DecodeStage
from capvid.utils.escaping import utf8_text
from capvid.utils.files import atomic_write_text
from capvid.video.frame_sampling import UniformSampling
from capvid.video.input_set import find_videos
from capvid.video.worker_pool import WorkerPool

PAGE_VIDEOS = 100
FRAMES = 4  # per video
TIMEOUT = 60.0  # seconds for each video
_TEMPLATES = Path(__file__).resolve().parents[1] / "output" / "page"

Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # head and rows


@dataclass(frozen=True, kw_only=True)
class ComparedVideo:
    """Captions of one video.

    Attributes:
        name: id of the video.
        captions: letter of the system, score and caption, best first.
        references: reference captions.
        frames: JPEG files.
    """

    name: str
    captions: Sequence[tuple[str, float, str]]
    references: Sequence[str]
    frames: Sequence[bytes] = ()


def most_different(scores: Sequence[Mapping[str, Mapping[str, float]]], by: str) -> list[str]:
    """Return the videos whose scores differ most between systems, at most :data:`PAGE_VIDEOS`.

    Args:
        scores: scores by video and name, of each system.
        by: name of the score.
    """
    spread = {}
    for video in scores[0]:
        values = [one[video].get(by, 0.0) for one in scores]
        spread[video] = max(values) - min(values)
    ordered = sorted(spread, key=lambda video: -spread[video])
    return [video for video in ordered if spread[video] > 0][:PAGE_VIDEOS]


def read_thumbnails(paths: Mapping[str, Path]) -> tuple[dict[str, tuple[bytes, ...]], list[str]]:
    """Decode frames of videos.

    Args:
        paths: path of each video.

    Returns:
        Evenly spaced frames as JPEG files by video, and the videos that cannot be read.
    """
    stage = DecodeStage(views=(), sampling=UniformSampling(FRAMES), thumbnails=True)
    with WorkerPool(2, timeout=TIMEOUT) as pool:
        decoded = dict(zip(paths, stage.videos(pool, paths.values()), strict=True))
    frames = {name: video.decoded.thumbnails for name, video in decoded.items() if video.decoded}
    return frames, [name for name in paths if name not in frames]


def locate_videos(folder: Path) -> dict[str, Path]:
    """Return the videos of a folder, or of an archive, by key, the relative path without extension."""
    return {each.key: each.path for each in find_videos([folder]) if isinstance(each.path, Path)}


def write_page(
    path: Path,
    *,
    systems: Sequence[tuple[str, str]],
    tables: Iterable[Table],
    by: str,
    counts: str,
    videos: Sequence[ComparedVideo],
) -> None:
    """Write the page, replacing the file at once.

    Args:
        path: file to write.
        systems: letter and name of each system.
        tables: tables of scores.
        by: score in which videos differ.
        counts: numbers of videos and references.
        videos: the videos, the most different in front.

    Raises:
        OSError: the file cannot be written.
    """
    html, *styles = (
        (_TEMPLATES / name).read_text(encoding="utf-8")
        for name in ("comparison.html", "report.css", "comparison.css")
    )
    style = "".join(styles)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    top = max((score for video in videos for _, score, _ in video.captions), default=0.0)
    if videos:
        heading = f"The {len(videos)} videos that differ most in {by}" if len(videos) > 1 else "Video"
    else:
        heading = f"No video differs in {by}"
    text = Template(html).substitute(
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        "form-action 'none'",
        style=style,
        title=f"Comparison of {len(systems)} systems",
        counts=escape(counts),
        systems="".join(f"<div><dt>{letter}</dt><dd>{_bdi(name)}</dd></div>" for letter, name in systems),
        tables="".join(map(_table, tables)),
        heading=escape(heading),
        videos="".join(_article(video, by, top) for video in videos),
    )
    atomic_write_text(path.resolve(), text)


def _bdi(text: str) -> str:
    return f"<bdi>{escape(utf8_text(text))}</bdi>"


def _table(table: Table) -> str:
    head, rows = table
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide" tabindex="0"><table><tr>{cells}</tr>{body}</table></div>\n'


def _article(video: ComparedVideo, by: str, top: float) -> str:
    (best, high, _), *_, (worst, low, _) = video.captions
    images = "".join(map(_image, video.frames))
    film = f'<ol class="frames">{images}</ol>' if images else ""
    captions = "".join(
        f'<div><dt>{letter}</dt><dd class="score">{100 * score:.1f}</dd>'
        f'<dd><progress max="{max(top, 1e-9):.6f}" value="{score:.6f}" aria-hidden="true"></progress></dd>'
        f'<dd class="text">{_bdi(caption) if caption else "(no words)"}</dd></div>'
        for letter, score, caption in video.captions
    )
    references = "".join(f"<li>{_bdi(text)}</li>" for text in video.references)
    return (
        f'<article class="video compared"><h3 class="name">{_bdi(video.name)}</h3>'
        f'<p class="facts">{escape(by)} {100 * high:.1f} by {best}, {100 * low:.1f} by {worst}</p>\n'
        f'{film}<dl class="said">{captions}</dl>\n'
        f"<details><summary>{len(video.references)} references</summary><ul>{references}</ul></details>"
        "</article>\n"
    )


def _image(frame: bytes) -> str:
    from PIL import Image

    with Image.open(io.BytesIO(frame)) as image:
        width, height = image.size
    uri = f"data:image/jpeg;base64,{base64.b64encode(frame).decode('ascii')}"
    return f'<li><img src="{uri}" alt="" width="{width}" height="{height}" loading="lazy"></li>'
