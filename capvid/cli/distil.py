"""``capvid train`` for a recipe that trains a backbone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capvid.cli.common import training_bar
from capvid.errors import UsageError
from capvid.escaping import terminal

if TYPE_CHECKING:
    from capvid.training.distil.recipe import DistilRecipe


def distil(
    recipe: DistilRecipe,
    *,
    pictures: Sequence[Path],
    data: Sequence[str],
    features: Sequence[str],
    folder: Path,
    weights: Path | None,
    device: str,
    resume: bool,
    overwrite: bool,
) -> None:
    """Train a backbone, with a bar on a terminal and one line per epoch anywhere, on stderr.

    Raises:
        UsageError: no pictures, or a run in the folder that is neither resumed nor to be replaced.
        CapvidError: the pictures, teachers or data cannot be used.
    """
    if not pictures:
        raise UsageError(f"{recipe.name} trains a backbone: it needs --pictures")
    if (folder / "state.safetensors").exists() and not (resume or overwrite):
        raise UsageError(
            f"{folder}: holds a training run already", remedy="--resume it, choose another -o or --overwrite"
        )
    from capvid.data.captions import load_captions
    from capvid.device import resolve_device
    from capvid.features.store import FeatureStore
    from capvid.training.distil.run import DistilInputs, make_distiller

    inputs = DistilInputs(
        pictures=pictures,
        videos=load_captions(data),
        features=[FeatureStore([source]) for source in features],
        weights=weights,
    )
    with _Progress(recipe.training.epochs) as reporter:
        distiller = make_distiller(
            recipe,
            inputs,
            folder=folder,
            device=resolve_device(device),
            reporter=reporter,
            progress=reporter.preparing,
            resume=resume,
        )
        distiller.run()
    line = f"saved as {folder / distiller.entry.file}"
    reporter.console.print(terminal(line), markup=False, soft_wrap=True)


class _Progress:
    """Distillation on the terminal."""

    def __init__(self, epochs: int) -> None:
        from rich.console import Console

        self.epochs = epochs
        self.batches = 0
        self.begun = time.monotonic()
        self.console = Console(stderr=True, highlight=False)
        self.bar = training_bar(self.console, "{task.fields[note]}")
        self.task = self.bar.add_task("reading", total=None, note="")

    def __enter__(self) -> _Progress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def preparing(self, what: str, done: int, total: int) -> None:
        """Pictures are decoded, or seen by a teacher."""
        self.bar.update(self.task, description=f"preparing {what}", completed=done, total=total)
        if done == total:
            self.console.print(
                f"{what}: {total} pictures, {time.monotonic() - self.begun:.0f} s since the start",
                soft_wrap=True,
            )

    def started(self, *, pictures: int, validation: int, batches: int, epoch: int) -> None:
        """Say what there is to learn from."""
        self.batches = batches
        self.bar.reset(self.task, total=batches * self.epochs, completed=(epoch - 1) * batches)
        self.console.print(
            f"{pictures} pictures to learn from, {validation} to validate on; from epoch {epoch}",
            soft_wrap=True,
        )

    def stepped(self, *, epoch: int, batch: int, loss: float, pictures_per_second: float) -> None:
        """Move the bar."""
        self.bar.update(
            self.task,
            completed=(epoch - 1) * self.batches + batch,
            description=f"epoch {epoch}/{self.epochs}",
            note=f"loss {loss:.3f}  {pictures_per_second:.0f} pictures/s",
        )

    def finished_epoch(self, record: Mapping[str, Any]) -> None:
        """Print the epoch's line: errors are shares of what telling the mean would give."""
        parts = "  ".join(f"{name} {value:.3f}" for name, value in record.items() if name.startswith("val_"))
        self.console.print(
            f"epoch {record['epoch']:3d}  loss {record['loss']:.3f}  {parts}  {record['seconds']:.0f} s",
            soft_wrap=True,
        )
