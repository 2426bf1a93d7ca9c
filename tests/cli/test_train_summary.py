from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toy import Run

from capvid.cli.train import ROWS, kept_rows, print_summary, sparkline
from capvid.training.runs import TrainingResult

SIZES = ["embedding=12", "hidden=16", "attention=8", "projection=16", "output=16", "memory_rows=4"]
SETTINGS = [
    *(f"model.{size}" for size in SIZES),
    "model.memory_width=8",
    "data.min_count=1",
    "training.epochs=7",
    "training.patience=9",
    "training.batch_size=2",
    "training.learning_rate=0.02",
]
CAPTIONS = [
    "a dog runs very fast",
    "the cat sings",
    "some men cook rice",
    "a ball is red and round",
    "two women jump",
    "the girl is reading",
]


@pytest.fixture
def command(tmp_path: Path) -> list[object]:
    """Return a training command on random features, with a test split."""
    generator = torch.Generator().manual_seed(5)
    tensors, lines = {}, []
    for n, caption in enumerate(CAPTIONS):
        frames = torch.randn(3, 12, generator=generator)
        for split in ("train", "val", "test"):  # same features, so that the scores are not all zero
            tensors[f"{split}{n}"] = frames.clone()
            lines.append(json.dumps({"id": f"{split}{n}", "split": split, "captions": [caption]}))
    save_file(tensors, tmp_path / "f.safetensors")
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    sets = [part for setting in SETTINGS for part in ("--set", setting)]
    files = ["--data", tmp_path / "data.jsonl", "--features", tmp_path / "f.safetensors"]
    return ["train", "m3-small", *files, "-o", tmp_path / "run", "--device", "cpu", *sets]


@pytest.mark.slow
def test_summary_after_training(
    capvid: Run, command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    run = tmp_path / "run"
    code, out, err = capvid(*command)
    assert code == 0, err
    assert err.splitlines()[-1].startswith(f"saved in {run / 'best'}, after ")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 60 and "\x1b" not in out
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len({row["val_cider"] for row in log}) > 3
    best = json.loads((run / "run.json").read_text())["best"]["epoch"]
    assert lines[0].split() == ["epoch", "loss", "val", "CIDEr-D", "captions/s", "seconds"]
    for line, row in zip(lines[1:8], log, strict=True):
        mark = ["*"] if row["epoch"] == best else []
        numbers = [f"{100 * row['val_cider']:.1f}", *mark, f"{row['captions_per_second']:.0f}"]
        assert line.split() == [
            str(row["epoch"]),
            f"{row['loss']:.3f}",
            *numbers,
            f"{row['seconds']:.1f}",
        ]
    assert lines[8].startswith("val CIDEr-D ") and lines[9].startswith(f"* best: epoch {best};")
    test = json.loads((run / "test.json").read_text())
    heading = lines.index("test split")
    assert lines[heading + 1].split() == ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE_L", "CIDEr-D"]
    assert lines[heading + 2].split() == [f"{100 * score:.1f}" for score in test["scores"].values()]
    assert lines[heading + 3] == f"{len(set(test['captions'].values()))} distinct among 6 captions"

    events = EventAccumulator(str(run / "events")).Reload()
    ciders = [event.value for event in events.Scalars("epochs/val_cider")]
    assert ciders == pytest.approx([row["val_cider"] for row in log], rel=1e-6)

    code, resumed_out, err = capvid(*command, "--resume", "--plot", tmp_path / "plots" / "a.png")
    assert (code, resumed_out) == (0, out), err  # training had finished
    with Image.open(tmp_path / "plots" / "a.png") as plot:
        assert plot.size == (1200, 675) and len(plot.convert("RGB").getcolors(1 << 20)) > 10


def test_invalid_plot_paths_are_refused_before_training(
    capvid: Run, command: list[object], tmp_path: Path
) -> None:
    code, _, err = capvid(*command, "--plot", tmp_path / "run.xls")
    assert code == 2 and err.startswith(f"error: {tmp_path}/run.xls: no image format has the suffix '.xls'")
    code, _, err = capvid(*command, "--plot", tmp_path / "data.jsonl" / "a.png")
    assert code == 2 and f"{tmp_path}/data.jsonl: is a file, not a folder" in err
    assert not (tmp_path / "run").exists()


def summary_lines(
    count: int, best: int, scores: dict[str, float] | None = None, *, width: int = 60
) -> list[str]:
    rows = [
        {"epoch": n, "loss": 2.5, "val_cider": n / 100, "seconds": 1.25, "captions_per_second": 99.6}
        for n in range(1, count + 1)
    ]
    console = Console(width=width, highlight=False)
    result = TrainingResult(
        folder=Path("run"),
        epoch=best,
        val_cider=best / 100 or 0.4,
        epochs=rows,
        scores=scores or {},
        captions={"a": ["x", "y"], "b": ["x", "y"]},
    )
    with console.capture() as caught:
        print_summary(result, console)
    lines = caught.get().splitlines()
    assert max(map(len, lines)) <= width
    return lines


def test_long_runs_show_selected_epochs() -> None:
    lines = summary_lines(1000, 77)
    epochs = [int(line.split()[0]) for line in lines if line.endswith(" 1.2")]
    assert len(epochs) == ROWS and {1, 77, 1000} <= set(epochs) and epochs == sorted(epochs)
    assert "980 of 1000 epochs are not shown" in lines
    assert [line.split()[0] for line in lines if "*" in line] == ["77", "*"]
    for count in (1, 2, 19, 20, 21, 22, 40):
        for best in (1, (count + 1) // 2, count):
            kept_epochs = [row["epoch"] for row in kept_rows([{"epoch": n + 1} for n in range(count)], best)]
            assert {1, best, count} <= set(kept_epochs)
            assert len(kept_epochs) == count if count <= ROWS else len(kept_epochs) in (ROWS - 1, ROWS)


def test_single_epoch_has_no_sparkline_and_epoch_0_is_shown() -> None:
    assert [line.split()[0] for line in summary_lines(1, 1)] == ["epoch", "1", "*"]
    lines = summary_lines(2, 0)
    assert lines[1].split() == ["0", "40.0", "*"] and "* best: epoch 0; scores are times 100" in lines


def test_paragraph_scores_have_two_decimals() -> None:
    names = ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE_L", "CIDEr-D", "R@1", "R@2", "R@3", "R@4"]
    scores = {name: (n + 1) / 80 for n, name in enumerate(names)}
    lines = summary_lines(2, 2, {**scores, "CIDEr-D": 10.0})
    assert lines[-5].split() == names[:6] and lines[-3].split() == names[6:]
    assert lines[-4].split()[:2] == ["1.25", "2.50"] and lines[-4].split()[-1] == "1000.00"
    assert lines[-2].split() == ["8.75", "10.00", "11.25", "12.50"]
    assert lines[-1] == "1 distinct among 2 captions"


def test_sparkline_keeps_peaks() -> None:
    assert sparkline([0, 1, 2, 3], "abcd") == "abcd"
    assert sparkline([0.5, 0.5], "abc") == "bb"
    peaked = [1.0] * 60
    peaked[41] = 9.0
    assert sparkline(peaked, "ab") == "a" * 20 + "b" + "a" * 9  # the peak is not lost
