"""Untrusted checkpoints: each fault raises a CheckpointError that names it, with little memory used."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from capvid.backbones.catalog import BUNDLED as BUNDLED
from capvid.backbones.catalog import StreamHeader
from capvid.captioners.base import build, sketch
from capvid.captioners.checkpoint import CONFIG, CONFIG_BYTES, WEIGHTS, load_checkpoint, save_checkpoint
from capvid.errors import CheckpointError, UsageError
from capvid.features.feature_file import FeatureHeader
from capvid.text.vocabulary import Vocabulary, is_word

WORDS = ["a", "man", "dog", "runs", "eats", "sleeps"]
SIZES = {"vocabulary_size": 10, "feature_width": 5, "embedding": 4, "hidden": 6, "attention": 3, "output": 7}
HEADER = FeatureHeader(
    streams=(StreamHeader(backbone="toy", layer="embedding", width=5),),
    sampling="uniform:4",
    reader=None,
    dtype="float32",
    capvid_version="0",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    captioner = build("soft-attention", SIZES)
    save_checkpoint(tmp_path, captioner, Vocabulary(WORDS), HEADER, {"max_frames": 4})
    return tmp_path


def change_config(folder: Path, *path: Any, value: Any) -> None:
    """Set one value of the configuration."""
    record = json.loads((folder / CONFIG).read_text())
    part = record
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    (folder / CONFIG).write_text(json.dumps(record))


def error_message(folder: Path) -> str:
    """Load the checkpoint; return the error message and check the memory used."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes
    assert "\n" not in str(error.value)
    return str(error.value)


def test_intact_checkpoint_is_loaded(folder: Path) -> None:
    loaded = load_checkpoint(folder)
    stored = load_file(folder / WEIGHTS)
    for name, tensor in loaded.captioner.state_dict().items():
        assert torch.equal(tensor, stored[name])
    assert all(parameter.requires_grad for parameter in loaded.captioner.parameters())


FAULTS: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "vocabulary_size": (
        ("config", "vocabulary_size"),
        20_000_000,
        "captioner.json: config.vocabulary_size must be an integer between 4 and 1000000, got 20000000",
    ),
    "vocabulary_size other": (("config", "vocabulary_size"), 11, "config.vocabulary_size must be 10"),
    "feature_width": (("config", "feature_width"), 10**9, "config.feature_width must be an integer between"),
    "feature_width other": (("config", "feature_width"), 6, "config.feature_width must be 5"),
    "hidden": (("config", "hidden"), 900_000, "config.hidden = 900000: the captioner takes"),
    "hidden other": (("config", "hidden"), 7, "captioner.safetensors: attention.query.weight must be"),
    "hidden list": (("config", "hidden"), [6], r"config.hidden must be an integer .*, got \[6\]"),
    "dropout": (("config", "dropout"), "much", "config.dropout must be a number between 0 and 0.99"),
    "option": (("config", "depth"), 3, "config.depth: no such model option"),
    "config null": (("config",), None, "config must be an object, got null"),
    "config list": (("config",), [1], r"config must be an object, got \[1\]"),
    "captioner": (("captioner",), [1], "captioner must be a string"),
    "unknown": (("captioner",), "m4", "m4: no such captioner"),
    "features": (("features",), [], "features must be an object"),
    "streams": (("features", "streams"), 3, "the feature header is not valid"),
    "sampling": (("features", "sampling"), [4], "sampling is .4., not text"),
    "layer": (("features", "streams", 0, "layer"), {}, "stream 1 layer is {}, not text"),
    "backbone": (("features", "streams", 0, "backbone"), 5, "stream 1 backbone is 5, not text"),
    "width": (("features", "streams", 0, "width"), -5, "stream 1 width is -5"),
    "info": (("info",), [3], "info must be an object"),
    "max_words": (("info", "max_words"), "ten", "info.max_words must be an integer between"),
    "max_frames": (("info", "max_frames"), 1e9, "info.max_frames must be an integer between 1 and 10000"),
    "frames": (("info", "frames"), "last", "info.frames must be one of spread, even, first"),
    "vocabulary null": (("vocabulary",), None, "vocabulary must be a list"),
    "no special words": (("vocabulary",), WORDS, "vocabulary must be a list that begins with <pad>"),
    "number": (("vocabulary", 5), 5, r"vocabulary\[5\] must be a word without control characters, got 5"),
    "twice": (("vocabulary", 5), "a", "vocabulary must hold each word once, got 'a' twice"),
    "format": (("format",), {}, "checkpoint format {}, this capvid reads 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_configurations_are_refused(folder: Path, fault: str) -> None:
    path, value, message = FAULTS[fault]
    change_config(folder, *path, value=value)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)
    error_message(folder)


@pytest.mark.parametrize(
    "word", ["", " ", "two\nlines", "\x1b[2J", "tab\t", "\ud800", "\u2028", "\u202eesrever", "a" * 1000]
)
def test_words_with_control_characters_are_refused(folder: Path, word: str) -> None:
    change_config(folder, "vocabulary", 6, value=word)
    assert "vocabulary[6] must be a word" in error_message(folder)
    assert Vocabulary.build([[word, "dog"]], min_count=1, max_size=9).words[4:] == ["dog"]


def test_words_of_any_language_are_allowed() -> None:
    assert all(map(is_word, ["naïve", "犬", "नमस्ते", "👩\u200d🍳", "don't", "<unk>"]))


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_sparse(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(70 << 30)


def make_deep(path: Path) -> None:
    path.write_text("[" * 100_000)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (WEIGHTS, make_fifo, "captioner.safetensors: not a regular file"),
        (WEIGHTS, make_sparse, "more than the limit model-bytes"),
        (WEIGHTS, Path.unlink, "captioner.safetensors: No such file"),
        (CONFIG, make_fifo, "captioner.json: not a regular file"),
        (CONFIG, make_sparse, f"larger than the limit of {CONFIG_BYTES} bytes"),
        (CONFIG, make_deep, "nested too deeply"),
    ],
)
def test_unreadable_files_are_refused(
    folder: Path, name: str, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder / name)
    assert message in error_message(folder)


def test_weights_of_another_captioner_are_refused(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = "output.vocabulary.bias"
    save_file({**tensors, name: tensors[name].int()}, folder / WEIGHTS)
    assert f"{name} must be (10,) of BF16/F16/F32/F64, got (10,) of I32" in error_message(folder)
    save_file({**tensors, "extra": torch.zeros(1)}, folder / WEIGHTS)
    assert "has an unknown tensor 'extra'" in error_message(folder)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, folder / WEIGHTS)
    assert f"lacks tensor '{name}'" in error_message(folder)


def test_bundled_models_load_bit_exactly() -> None:
    for name in ("m3", "kv-memory"):
        loaded = load_checkpoint(BUNDLED / name)
        for key, stored in load_file(BUNDLED / name / WEIGHTS).items():
            assert torch.equal(loaded.captioner.state_dict()[key], stored.float())


def test_sketch_allocates_no_memory() -> None:
    sizes = {"vocabulary_size": 1_000_000, "feature_width": 2000}
    assert all(tensor.is_meta for tensor in sketch("m3", sizes).state_dict().values())
    with pytest.raises(UsageError, match="hidden = 500000: the captioner takes"):
        sketch("m3", {**sizes, "vocabulary_size": 4, "hidden": 500_000})
