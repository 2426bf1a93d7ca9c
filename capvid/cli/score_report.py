"""What ``capvid score`` puts out: a table, a JSON report, a file with each video's scores."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capvid import __version__
from capvid.escaping import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from capvid.data.scored import Said, Wanted
    from capvid.metrics.compare import Comparison
    from capvid.metrics.scoring import Scores, Texts

MOST = 10  # videos whose captions are shown side by side
WIDTH = 60  # columns of the tables at most


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What was scored, how, and with what result.

    Attributes:
        paths: of the predictions, and of those they are compared with.
        wanted: the references as they were given.
        said: what is in the files of predictions.
        texts: what was scored of the first.
        scores: of the first.
        comparison: with the second, if there is one.
        tokenizer: its name.
        meteor_engine: its name.
        missing: what became of videos without a prediction.
    """

    paths: list[str]
    wanted: Wanted
    said: list[Said]
    texts: Texts
    scores: Scores
    comparison: Comparison | None
    tokenizer: str
    meteor_engine: str
    missing: str

    def caption(self, which: int, video: str) -> str:
        """What the first or second said of a video."""
        return " ".join(self.said[which].sentences.get(video, []))


def report(scored: Scored) -> dict[str, Any]:
    """Everything about the scores, as JSON has it."""
    versions = {"capvid": __version__, "python": platform.python_version()}
    if scored.tokenizer == "ptb" or ("METEOR" in scored.scores.corpus and scored.meteor_engine == "java"):
        from capvid.metrics.ptb_java import java_version

        versions["java"] = java_version()
    found: dict[str, Any] = {
        "predictions": scored.paths[0],
        "references": scored.wanted.names,
        "scores": scored.scores.corpus,
        "left_out": scored.scores.left_out,
        "tokenizer": scored.tokenizer,
        "missing": scored.missing,
        "versions": versions,
        "counts": {
            "videos": len(scored.texts.references),
            "references": sum(map(len, scored.texts.references.values())),
            "missing": len(scored.said[0].missing),
            "extra": len(scored.said[0].extra),
        },
    }
    if "METEOR" in scored.scores.corpus:
        found["meteor_engine"] = scored.meteor_engine
    if scored.comparison is not None:
        found["compare"] = _comparison(scored, scored.comparison)
    return found


def _comparison(scored: Scored, comparison: Comparison) -> dict[str, Any]:
    from capvid.metrics.compare import SAMPLES, SEED

    return {
        "predictions": scored.paths[1],
        "scores": comparison.second.corpus,
        "differences": {name: asdict(one) for name, one in comparison.differences.items()},
        "samples": SAMPLES,
        "seed": SEED,
        "by": comparison.by,
        "videos": [
            {
                "video": video,
                "difference": comparison.videos[video],
                "caption": scored.caption(0, video),
                "other": scored.caption(1, video),
            }
            for video in _most(comparison)
        ],
    }


def _most(comparison: Comparison) -> list[str]:
    """The videos that differ most, of those that differ."""
    return [video for video, difference in comparison.videos.items() if difference][:MOST]


def write_videos(path: Path, scored: Scored) -> None:
    """Write video, caption and scores of each video.

    Raises:
        UsageError: the suffix is of no format.
        OSError: the file cannot be written.
    """
    from capvid.output.scores import write_scores

    rows = (
        {"video": video, "caption": scored.caption(0, video), **values}
        for video, values in scored.scores.per_video.items()
    )
    write_scores(path, rows, ["video", "caption", *scored.scores.corpus])


def print_report(scored: Scored, console: Console | None = None) -> None:
    """Print the scores times 100, as papers print them.

    Args:
        scored: the result.
        console: where to; ``None`` is stdout.
    """
    from rich.console import Console

    out = console or Console(highlight=False, emoji=False)
    count = len(scored.texts.references)
    references = sum(map(len, scored.texts.references.values()))
    if scored.comparison is None:
        names = list(scored.scores.corpus)
        repeated = [name for name in names if name.startswith("R@")]
        for part in ([name for name in names if name not in repeated], repeated):
            if part:
                _table(out, part, [[f"{100 * scored.scores.corpus[name]:.1f}" for name in part]])
    else:
        _print_comparison(out, scored, scored.comparison)
    videos = "1 video" if count == 1 else f"{count} videos"
    out.print(f"{videos}, {references} references; scores are times 100", soft_wrap=True)


def _print_comparison(out: Console, scored: Scored, comparison: Comparison) -> None:
    rows = []
    for name, one in comparison.differences.items():
        first, second = (100 * scores.corpus[name] for scores in (comparison.first, comparison.second))
        interval = f"{100 * one.low:+.1f} to {100 * one.high:+.1f}"
        rows.append(
            [name, f"{first:.1f}", f"{second:.1f}", f"{100 * one.difference:+.1f}", interval, f"{one.p:.3f}"]
        )
    for letter, path in zip("AB", scored.paths, strict=True):
        out.print(terminal(f"{letter}: {path}"), markup=False, soft_wrap=True)
    _table(out, ["", "A", "B", "A - B", "95 % interval", "p"], rows)
    most = _most(comparison)
    if most:
        out.print(f"The videos that differ most in {comparison.by}:")
    for video in most:
        out.print(terminal(f"{100 * comparison.videos[video]:+.1f} {video}"), markup=False, soft_wrap=True)
        for which, letter in enumerate("AB"):
            out.print(terminal(f"  {letter}: {scored.caption(which, video)}"), markup=False, soft_wrap=True)


def _table(out: Console, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 1 if len(head) > 6 else 2, 0, 0))
    for place, name in enumerate(head):
        table.add_column(name, justify="left" if place == 0 and not name else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out.print(table, width=max(out.width, WIDTH))
