"""A toy distillation: small images of two colours, and their colours as the teacher."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import torch
from distillation.distiller import DistilInputs, make_distiller
from distillation.recipe import DistilRecipe, distil_recipe
from PIL import Image

from capvid.datasets.dataset import CaptionedVideo

CPU = torch.device("cpu")
COLOURS = {"red": (220, 40, 30), "green": (30, 200, 60), "blue": (40, 60, 220), "grey": (128, 128, 128)}


class StoppedError(Exception):
    """Raised to interrupt a run."""


class Silent:
    """A reporter that keeps the epochs' records."""

    def __init__(self) -> None:
        self.records: list[dict] = []

    def started(self, **_: object) -> None: ...

    def stepped(self, **_: object) -> None: ...

    def finished_epoch(self, record: dict) -> None:
        self.records.append(record)


class Stopping(Silent):
    """A reporter that ends the run after its second epoch."""

    def finished_epoch(self, record: dict) -> None:
        if record["epoch"] == 2:
            raise StoppedError


def two_colour_image(seed: int) -> bytes:
    """Return a PNG image of two colours."""
    generator = np.random.default_rng(seed)
    colours = list(COLOURS.values())
    image = np.empty((48, 64, 3), np.uint8)
    image[:, :32], image[:, 32:] = colours[seed % 4], colours[generator.integers(4)]
    image[generator.integers(8) :: 9] //= 2
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def toy_inputs(tmp_path: Path) -> DistilInputs:
    """32 images of 8 videos in a zip file, 8 without a video in a folder; the last two videos validate."""
    with zipfile.ZipFile(tmp_path / "frames.zip", "w") as archive:
        for number in range(32):
            archive.writestr(f"video{number // 4}/{number % 4:03}.png", two_colour_image(number))
    (tmp_path / "photos" / "set").mkdir(parents=True)
    for number in range(8):
        (tmp_path / "photos" / "set" / f"{number}.png").write_bytes(two_colour_image(100 + number))
    videos = [
        CaptionedVideo(f"video{n}", "val" if n >= 6 else "train", (f"a {name} thing", "something moves"))
        for n, name in enumerate([*COLOURS, *COLOURS])
    ]
    return DistilInputs(images=[tmp_path / "frames.zip", tmp_path / "photos"], videos=videos, workers=1)


def recipe(*, begin: str | None = None, **training: object) -> DistilRecipe:
    """Colours as the teacher: it needs no weights."""
    table = {"epochs": 3, "batch_size": 8, "words": 4, "precision": "fp32", "average": 0.5, **training}
    values = {"backbone": "capvid-small", "teachers": {"colour-grid": {"layer": "grid"}}, "training": table}
    return distil_recipe("toy", values | ({"begin": begin} if begin else {}))


def run(recipe: DistilRecipe, inputs: DistilInputs, folder: Path, *, resume: bool = False) -> list[dict]:
    reporter = Silent()
    make_distiller(recipe, inputs, folder=folder, device=CPU, reporter=reporter, resume=resume).run()
    return reporter.records
