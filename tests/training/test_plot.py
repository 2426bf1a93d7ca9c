from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from capvid.errors import UsageError
from capvid.training.reporters import SUFFIXES, draw, save_plot


def epoch_rows(count: int) -> list[dict[str, Any]]:
    """Return epochs of which the third last is the best."""
    return [
        {"epoch": n, "loss": 4 / n, "val_cider": 0.3 - 0.02 * abs(n - max(1, count - 2))}
        for n in range(1, count + 1)
    ]


def best_epoch(rows: list[dict[str, Any]]) -> tuple[int, float]:
    row = max(rows, key=lambda row: row["val_cider"])
    return row["epoch"], row["val_cider"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 7, 100])
def test_plot_shows_curves_and_the_best_epoch(tmp_path: Path, count: int) -> None:
    rows = epoch_rows(count)
    best = best_epoch(rows)
    figure = draw(rows, best, title="m3-small")
    upper, lower = figure.axes
    epochs = [row["epoch"] for row in rows]
    assert upper.lines[0].get_xydata().tolist() == [[row["epoch"], row["loss"]] for row in rows]
    assert list(lower.lines[0].get_xdata()) == epochs
    assert lower.lines[0].get_ydata() == pytest.approx([100 * row["val_cider"] for row in rows])
    (star,) = (line for line in lower.lines if line.get_marker() == "*")
    assert star.get_xydata().tolist() == [[best[0], 100 * best[1]]]
    assert (upper.get_ylabel(), lower.get_xlabel(), upper.get_title()) == (
        "training loss",
        "epoch",
        "m3-small",
    )
    assert upper.lines[0].get_color() != lower.lines[0].get_color()
    ticks = [tick for tick in lower.get_xticks() if np.diff(lower.get_xlim()) and tick == round(tick)]
    assert len(ticks) == len(lower.get_xticks()) >= 1  # ticks at whole epochs

    save_plot(tmp_path / "run.png", rows, best, title="m3-small")
    with Image.open(tmp_path / "run.png") as image:
        assert image.size == (1200, 675)
        pixels = np.asarray(image.convert("RGB"))
    figure.savefig(tmp_path / "again.png")  # computes the layout
    x, y = lower.transData.transform((best[0], 100 * best[1]))
    expected = [round(255 * channel) for channel in to_rgb(lower.lines[0].get_color())]
    assert pixels[674 - round(y), round(x)].tolist() == expected  # the star covers that pixel
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_plot_of_fine_tuning_without_improvement(tmp_path: Path) -> None:
    """The best epoch is 0, before fine-tuning, and the curve starts there."""
    figure = draw(epoch_rows(2), (0, 0.5), title="")
    upper, lower = figure.axes
    assert list(lower.lines[0].get_xdata()) == [0, 1, 2] and lower.lines[0].get_ydata()[0] == 50
    assert list(upper.lines[0].get_xdata()) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".PNG", ".pdf", ".svg"])
def test_image_formats(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "new folder" / f"run{suffix}"
    save_plot(path, epoch_rows(3), best_epoch(epoch_rows(3)), title="é $ & <m3>")
    magic = {".PNG": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}[suffix]
    assert path.read_bytes().startswith(magic)


def test_suffixes_are_known_to_matplotlib() -> None:
    figure = draw(epoch_rows(1), best_epoch(epoch_rows(1)), title="")
    assert {suffix[1:] for suffix in SUFFIXES} <= set(figure.canvas.get_supported_filetypes())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run.docx", r"run\.docx: no image format has the suffix '\.docx'; choose \.eps, .*\.png"),
        ("run", "no image format has the suffix ''"),
        ("folder.png", r"folder\.png: is a folder; give the name of a file"),
    ],
)
def test_invalid_plot_paths(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UsageError, match=message):
        save_plot(tmp_path / name, epoch_rows(1), best_epoch(epoch_rows(1)), title="")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]
