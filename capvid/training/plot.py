"""A picture of a training run: loss and validation CIDEr-D over the epochs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capvid.errors import UsageError
from capvid.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from capvid.training.progress import EpochResult

SUFFIXES = (".eps", ".jpeg", ".jpg", ".pdf", ".png", ".ps", ".svg", ".tif", ".tiff", ".webp")
_SIZE, _DOTS = (8.0, 4.5), 150  # inches and dots per inch: 1200 x 675
_LOSS, _CIDER = "#0072B2", "#D55E00"  # of Okabe and Ito, told apart with any colour vision
_STEPS = [1, 2, 5, 10]  # between ticks, times a power of ten
_DOTTED = 40  # epochs up to which each has its dot


def check_plot(path: Path) -> None:
    """See that a picture can be drawn into such a file.

    Raises:
        UsageError: it is a folder, or its suffix is not known.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"{path}: no picture has the suffix {path.suffix!r}",
            remedy=f"choose {', '.join(SUFFIXES)}; .png, say",
        )
    if path.is_dir():
        raise UsageError(f"{path}: is a folder", remedy="give the name of a file")


def save_plot(path: Path, rows: Sequence[Mapping[str, Any]], best: EpochResult, *, title: str) -> None:
    """Draw a run into a file, whole or not at all.

    Args:
        path: the file; its suffix says what kind it is.
        rows: what ``metrics.jsonl`` says of each epoch.
        best: the best of them, or what a captioner scored before it was fine-tuned.
        title: what stands above.

    Raises:
        UsageError: the file cannot be a picture.
        OSError: it cannot be written.
    """
    check_plot(path)
    with _quiet(), atomic_path(path) as temporary:
        figure = draw(rows, best, title=title)
        figure.savefig(temporary, format=path.suffix[1:].lower())


def draw(rows: Sequence[Mapping[str, Any]], best: EpochResult, *, title: str) -> Figure:
    """Draw a run as a figure of two panels; CIDEr-D is times 100, as papers print it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    epochs = [row["epoch"] for row in rows]
    scored = [(best.epoch, best.cider)] if best.epoch == 0 else []  # before fine-tuning
    scored += [(row["epoch"], row["val_cider"]) for row in rows]
    figure = Figure(figsize=_SIZE, dpi=_DOTS, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    dot = "o" if len(scored) <= _DOTTED else ""
    upper.plot(epochs, [row["loss"] for row in rows], color=_LOSS, marker=dot, markersize=4)
    lower.plot(
        [epoch for epoch, _ in scored],
        [100 * cider for _, cider in scored],
        color=_CIDER,
        marker=dot,
        markersize=4,
    )
    said = f"best: epoch {best.epoch}, {100 * best.cider:.1f}"
    lower.plot(
        [best.epoch],
        [100 * best.cider],
        linestyle="",
        marker="*",
        markersize=15,
        markerfacecolor=_CIDER,
        markeredgecolor="black",
        label=said,
    )
    for panel in (upper, lower):
        panel.axvline(best.epoch, color="0.6", linestyle="--", linewidth=1, zorder=0)
        panel.grid(axis="y", color="0.9")
        panel.spines[["top", "right"]].set_visible(False)
        panel.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
        panel.margins(x=0.03, y=0.12)
    upper.set_ylabel("training loss", color=_LOSS)
    lower.set_ylabel("val CIDEr-D (times 100)", color=_CIDER)
    lower.set_xlabel("epoch")
    lower.xaxis.set_major_locator(MaxNLocator(12, steps=_STEPS, integer=True, min_n_ticks=1))
    if len(scored) == 1:
        lower.set_xlim(scored[0][0] - 0.5, scored[0][0] + 0.5)
    lower.legend(loc="best")
    upper.set_title(title)
    return figure


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep matplotlib from telling that it looks for fonts, which it does once on every machine."""
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
