from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from capvid.errors import UsageError
from capvid.features.preprocess import prepare, resize_and_crop
from capvid.features.registry import Preprocess, backbone_entry

VALUES: dict[str, Any] = {"order": "RGB", "scale": 255.0, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.3)}
MODELS = """
[backbones.small]
kind = "grid"
source = "none"
licence = "none needed"
origin = "here"
description = "for a test"
default_layer = "grid"
layers = {{ grid = 192 }}

[backbones.small.preprocess]
order = "RGB"
scale = 255.0
mean = [0.5, 0.4, 0.3]
std = [0.2, 0.2, 0.3]
{more}
"""


def how(**values: Any) -> Preprocess:
    return Preprocess(**{**VALUES, **values})


def triangle(length: int, target: int) -> np.ndarray:
    """Weights (target, length) of bilinear resizing with antialiasing."""
    ratio = length / target
    centres = (np.arange(target) + 0.5) * ratio
    distance = np.abs(np.arange(length) + 0.5 - centres[:, None]) / max(ratio, 1.0)
    weights = np.clip(1 - distance, 0, None)
    return weights / weights.sum(axis=1, keepdims=True)


def squashed(frames: np.ndarray, height: int, width: int) -> np.ndarray:
    """Frames (T, H, W, 3) to (T, 3, height, width), in float64."""
    rows, columns = triangle(frames.shape[1], height), triangle(frames.shape[2], width)
    return np.einsum("yh,thwc,xw->tcyx", rows, frames.astype(np.float64), columns)


def pictures(height: int, width: int, *, low: int = 50) -> np.ndarray:
    return np.random.default_rng(height).integers(low, 256, (2, height, width, 3), dtype=np.uint8)


def agree(found: torch.Tensor, expected: np.ndarray) -> bool:
    assert found.dtype == torch.uint8 and found.is_contiguous()
    return found.shape == expected.shape and bool(np.abs(found.numpy() - expected).max() < 1.01)


@pytest.mark.parametrize(("height", "width"), [(60, 90), (31, 17), (10, 12), (16, 22)])
def test_squashed(height: int, width: int) -> None:
    frames = pictures(height, width)
    assert agree(prepare(frames, how(size=(16, 22))), squashed(frames, 16, 22))
    assert agree(prepare(torch.from_numpy(frames), how(size=(16, 22))), squashed(frames, 16, 22))


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [
        (40, 100, slice(0, 40), slice(14, 85)),  # 100 / 40 is more than 1.78: 71 columns
        (90, 40, slice(25, 65), slice(0, 40)),  # less than 1: 40 rows
        (60, 90, slice(0, 60), slice(0, 90)),
    ],
)
def test_cut_to_an_aspect(height: int, width: int, rows: slice, columns: slice) -> None:
    frames = pictures(height, width)
    found = prepare(frames, how(size=(16, 22), aspects=(1.0, 1.78)))
    assert agree(found, squashed(frames[:, rows, columns], 16, 22))


def test_trimmed_before_all_else() -> None:
    inside = pictures(60, 160)
    frames = np.pad(inside, ((0, 0), (15, 15), (6, 6), (0, 0)))  # 90 x 172
    trimmed = how(size=(16, 22), trim=True, aspects=(1.0, 2.0))
    assert agree(prepare(frames, trimmed), squashed(inside[:, :, 20:140], 16, 22))
    assert agree(prepare(frames, how(size=(16, 22))), squashed(frames, 16, 22))
    assert agree(prepare(inside, how(size=(16, 22), trim=True)), squashed(inside, 16, 22))


def test_others_are_resized_and_cropped() -> None:
    frames = pictures(60, 100)
    plain = how(resize=32, crop=28)
    assert torch.equal(prepare(frames, plain), resize_and_crop(frames, plain))
    boxed = np.pad(frames, ((0, 0), (12, 12), (0, 0), (0, 0)))
    assert torch.equal(prepare(boxed, how(resize=32, crop=28, trim=True)), resize_and_crop(frames, plain))


def test_in_words() -> None:
    assert how(size=(128, 176), trim=True, aspects=(1.0, 1.78)).describe() == (
        "black borders cut, cut to an aspect of 1 to 1.78, squashed to 128 x 176 bilinear, "
        "RGB / 255 minus (0.5, 0.4, 0.3), over (0.2, 0.2, 0.3)"
    )
    assert how(size=(8, 9), scale=1.0, std=(1.0, 1.0, 1.0)).describe() == (
        "squashed to 8 x 9 bilinear, RGB minus (0.5, 0.4, 0.3)"
    )
    assert (
        how(resize=32, crop=28, trim=True).describe().startswith("black borders cut, short side 32 bilinear")
    )


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"resize": 32},
        {"resize": 28, "crop": 32},
        {"size": (16, 22), "resize": 32, "crop": 28},
        {"size": (16,)},
        {"size": (0, 22)},
        {"size": (16, 22), "aspects": (1.78, 1.0)},
        {"size": (16, 22), "aspects": (0.0, 1.0)},
    ],
)
def test_sizes_that_cannot_be(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="preprocess: "):
        how(**values)


def test_read_from_a_file_of_models(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "models.toml"
    file.write_text(MODELS.format(more="size = [16, 22]\ntrim = true\naspects = [1, 1.78]"))
    monkeypatch.setenv("CAPVID_MODELS", str(file))
    found = backbone_entry("small").preprocess
    assert found == how(size=(16, 22), trim=True, aspects=(1.0, 1.78))
    assert hash(found) == hash(how(size=(16, 22), trim=True, aspects=(1.0, 1.78)))
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(MODELS.format(more="resize = 32"))
    monkeypatch.setenv("CAPVID_MODELS", str(wrong))
    with pytest.raises(UsageError, match=r"not a file of models \(preprocess: size is needed"):
        backbone_entry("small")
