"""What ``capvid train`` shows at its end, on stdout: the epochs, their curve, and the test scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from capvid.training.evaluate import Evaluation
    from capvid.training.progress import EpochResult

ROWS = 20  # of epochs at most
WIDTH = 72  # columns at least, so that no number is cut off on a narrow terminal
_CELLS = 30  # of the curve at most
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"


def conclude(folder: Path, *, title: str, plot: Path | None) -> None:
    """Write the model card of the run in ``folder``, draw the run into ``plot``, and print what it gave."""
    from capvid.files import atomic_write_text
    from capvid.publish import CARD, load_run, model_card
    from capvid.training.evaluate import Evaluation
    from capvid.training.plot import save_plot
    from capvid.training.progress import EpochResult

    run = load_run(folder)
    atomic_write_text(folder / CARD, model_card(run))
    info = run.checkpoint.info
    best = EpochResult(info["epoch"], 0.0, info["val_cider"], True, 0.0, 0.0, {})
    if plot is not None:
        save_plot(plot, run.epochs, best, title=title)
    print_summary(run.epochs, best, Evaluation(**run.test) if run.test else None)


def print_summary(
    rows: Sequence[Mapping[str, Any]],
    best: EpochResult,
    test: Evaluation | None,
    console: Console | None = None,
) -> None:
    """Print what a run gave; scores are times 100, as papers print them.

    Args:
        rows: what ``metrics.jsonl`` says of each epoch.
        best: the best of them, or what a captioner scored before it was fine-tuned.
        test: of the test split, if there is one.
        console: where to; ``None`` is stdout.
    """
    from rich.console import Console
    from rich.table import Table

    out = console or Console(highlight=False)
    out.width = max(out.width, WIDTH)
    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("epoch", "loss", "val CIDEr-D", "", "captions/s", "seconds"):
        table.add_column(name, justify="right")
    if best.epoch == 0:  # before fine-tuning
        table.add_row("0", "", f"{100 * best.cider:.1f}", "*", "", "")
    shown = kept_rows(rows, best.epoch)
    for row in shown:
        table.add_row(
            str(row["epoch"]),
            f"{row['loss']:.3f}",
            f"{100 * row['val_cider']:.1f}",
            "*" if row["epoch"] == best.epoch else "",
            f"{row['captions_per_second']:.0f}",
            f"{row['seconds']:.1f}",
        )
    out.print(table)
    if len(shown) < len(rows):
        out.print(f"{len(rows) - len(shown)} of {len(rows)} epochs are not shown")
    values = [100 * row["val_cider"] for row in rows]
    if len(values) > 1:
        curve = sparkline(values, _BLOCKS if out.encoding.startswith("utf") else _ASCII)
        out.print(f"val CIDEr-D {curve} {min(values):.1f} to {max(values):.1f}", soft_wrap=True)
    out.print(f"* best: epoch {best.epoch}; scores are times 100")
    if test is not None:
        _print_test(out, test)


def kept_rows(rows: Sequence[Mapping[str, Any]], best: int) -> list[Mapping[str, Any]]:
    """At most :data:`ROWS` of the epochs, evenly spread; the first, the last and the best are among them."""
    if len(rows) <= ROWS:
        return list(rows)
    places = {round(n * (len(rows) - 1) / (ROWS - 2)) for n in range(ROWS - 1)}
    return [row for place, row in enumerate(rows) if place in places or row["epoch"] == best]


def sparkline(values: Sequence[float], levels: str) -> str:
    """Values as signs of growing height; of many, the greatest of neighbours stands for them."""
    count = min(len(values), _CELLS)
    bounds = [n * len(values) // count for n in range(count + 1)]
    peaks = [max(values[low:high]) for low, high in pairwise(bounds)]
    least, span = min(peaks), max(peaks) - min(peaks)
    top = len(levels) - 1
    return "".join(levels[round(top * (peak - least) / span) if span else top // 2] for peak in peaks)


def _print_test(out: Console, test: Evaluation) -> None:
    """Print the scores on the test split, those of repetition below the others."""
    from rich.table import Table

    repeated = [name for name in test.scores if name.startswith("R@")]
    others = [name for name in test.scores if name not in repeated]
    out.print("\ntest split")
    for names in filter(None, (others, repeated)):
        table = Table(box=None, pad_edge=False, header_style="")
        for name in names:
            table.add_column(name, justify="right")
        table.add_row(*(f"{100 * test.scores[name]:.{2 if repeated else 1}f}" for name in names))
        out.print(table)
    distinct = len({str(caption) for caption in test.captions.values()})
    out.print(f"{distinct} distinct among {len(test.captions)} captions")
