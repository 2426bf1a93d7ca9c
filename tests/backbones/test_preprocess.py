from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from capvid.backbones.catalog import Preprocess, backbone_entry
from capvid.backbones.preprocessing import prepare, shrink
from capvid.errors import UsageError

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


def describe(**values: Any) -> str:
    return dataclasses.replace(backbone_entry("googlenet"), preprocess=how(**values)).describe_input()


def linear(x: np.ndarray) -> np.ndarray:
    return np.clip(1 - x, 0, None)


def cubic(x: np.ndarray) -> np.ndarray:
    """Keys (1981) with a = -0.5."""
    near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


Kernel = Callable[[np.ndarray], np.ndarray]


def kernel_weights(length: int, target: int, kernel: Kernel) -> np.ndarray:
    """Weights (target, length) of resizing with antialiasing."""
    ratio = length / target
    centres = (np.arange(target) + 0.5) * ratio
    distance = np.abs(np.arange(length) + 0.5 - centres[:, None]) / max(ratio, 1.0)
    weights = kernel(distance)
    return weights / weights.sum(axis=1, keepdims=True)


def squashed(frames: np.ndarray, height: int, width: int, kernel: Kernel = linear) -> np.ndarray:
    """Frames (T, H, W, 3) to (T, height, width, 3), in float64."""
    rows = kernel_weights(frames.shape[1], height, kernel)
    columns = kernel_weights(frames.shape[2], width, kernel)
    return np.einsum("yh,thwc,xw->tyxc", rows, frames.astype(np.float64), columns)


def pictures(height: int, width: int, *, low: int = 50) -> np.ndarray:
    return np.random.default_rng(height).integers(low, 256, (2, height, width, 3), dtype=np.uint8)


def agree(found: np.ndarray, expected: np.ndarray, within: float = 1.01) -> bool:
    assert found.dtype == np.uint8 and found.flags.c_contiguous
    return found.shape == expected.shape and bool(np.abs(found - expected).max() < within)


@pytest.mark.parametrize(("height", "width"), [(60, 90), (31, 17), (10, 12), (16, 22)])
def test_squashed(height: int, width: int) -> None:
    frames = pictures(height, width)
    assert agree(prepare(frames, how(size=(16, 22))), squashed(frames, 16, 22))
    frames = 90 + frames // 4  # so that nothing overshoots 0 to 255 between two passes
    cubically = prepare(frames, how(size=(16, 22), interpolation="bicubic"))
    assert agree(cubically, squashed(frames, 16, 22, cubic), 1.3)
    assert np.abs(cubically - squashed(frames, 16, 22)).max() > 2 or (height, width) == (16, 22)


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


@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(60, 100, (32, 53)), (100, 60, (53, 32)), (20, 31, (32, 49)), (32, 32, (32, 32))],
)
def test_others_are_resized_and_cropped(height: int, width: int, size: tuple[int, int]) -> None:
    frames = pictures(height, width)
    plain = how(resize=32, crop=28)
    top, left = (size[0] - 28) // 2, (size[1] - 28) // 2
    found = prepare(frames, plain)
    assert agree(found, squashed(frames, *size)[:, top : top + 28, left : left + 28], 1.3)


def test_borders_are_cut_before_resizing() -> None:
    frames = pictures(60, 100)
    boxed = np.pad(frames, ((0, 0), (12, 12), (0, 0), (0, 0)))
    plain = prepare(frames, how(resize=32, crop=28))
    assert (prepare(boxed, how(resize=32, crop=28, trim=True)) == plain).all()


def test_a_view_of_part_of_the_frames() -> None:
    frames = pictures(60, 100)
    plain = how(resize=32, crop=28)
    assert (prepare(frames[:, ::2, 3:90], plain) == prepare(frames[:, ::2, 3:90].copy(), plain)).all()


def test_in_words() -> None:
    assert describe(size=(128, 176), trim=True, aspects=(1.0, 1.78)) == (
        "black borders cut, cut to an aspect of 1 to 1.78, squashed to 128 x 176 bilinear, "
        "RGB / 255 minus (0.5, 0.4, 0.3), over (0.2, 0.2, 0.3)"
    )
    assert describe(size=(8, 9), scale=1.0, std=(1.0, 1.0, 1.0)) == (
        "squashed to 8 x 9 bilinear, RGB minus (0.5, 0.4, 0.3)"
    )
    description = describe(resize=32, crop=28, trim=True)
    assert description.startswith("black borders cut, short side 32 bilinear")


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
        {"size": (16, 22), "interpolation": "nearest"},
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
    with pytest.raises(UsageError, match=r"not a file of models \(preprocess: needs size, or resize"):
        backbone_entry("small")


@pytest.mark.slow
@pytest.mark.parametrize(("height", "width", "factor"), [(1080, 1920, 1), (1440, 2560, 2), (4320, 7680, 6)])
def test_large_frames_are_averaged(height: int, width: int, factor: int) -> None:
    frame = np.random.default_rng(1).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    frames = np.broadcast_to(frame.repeat(8, 0).repeat(8, 1), (1, height, width, 3))
    shrunk = shrink(frames)
    blocks = frames[0].reshape(height // factor, factor, width // factor, factor, 3)
    np.testing.assert_allclose(shrunk[0], blocks.mean((1, 3)), atol=0.5001)
