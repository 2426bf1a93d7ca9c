"""Conversion of checkpoints of the MART authors' code, without that code."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Run

from capvid.captioners.authors_weights import read_authors_checkpoint
from capvid.captioners.checkpoint import load_checkpoint
from capvid.errors import CheckpointError, UsageError, WeightsError

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[VID]", "[BOS]", "[EOS]", "[UNK]", "goat", "rows", "."]
SIZES: dict[str, Any] = {
    "hidden_size": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 4,
    "word_vec_size": 3,
    "hidden_dropout_prob": 0.1,
    "n_memory_cells": 2,
    "video_feature_size": 5,
    "max_v_len": 9,
    "max_t_len": 6,
}


@pytest.fixture
def easydict(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """The class EasyDict, which keeps values as attributes as well, while a checkpoint is written."""
    module = types.ModuleType("easydict")

    class EasyDict(dict):
        def __init__(self, **values: Any) -> None:
            super().__init__(values)
            self.__dict__.update(values)

    EasyDict.__module__, EasyDict.__qualname__ = "easydict", "EasyDict"
    module.EasyDict = EasyDict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "easydict", module)
    yield EasyDict


def their_tensors() -> dict[str, torch.Tensor]:
    """Return random tensors named as the authors' RecursiveTransformer names them."""
    layer, hidden, shapes = "encoder.layer.0.", (4, 4), {}
    shapes |= {"embeddings.word_embeddings.weight": (10, 3), "decoder.decoder.weight": (10, 4)}
    shapes |= {"embeddings.token_type_embeddings.weight": (2, 4), "decoder.bias": (10,)}
    shapes |= {"embeddings.position_embeddings.pe": (15, 4), "loss_func.one_hot": (1, 10)}
    shapes |= {layer + "memory_initilizer.init_memory_bias": (1, 2, 1)}
    weights: dict[str, tuple[int, ...]] = {"decoder.transform.dense": hidden}
    for name, width in (("word_fc", 3), ("video_embeddings", 5)):
        weights |= {f"embeddings.{name}.0": (width,), f"embeddings.{name}.2": (4, width)}
        weights[f"embeddings.{name}.4"] = (4,)
    for name in ("attention.self", "memory_augmented_attention", "memory_updater.memory_update_attention"):
        weights |= {f"{layer}{name}.{part}": hidden for part in ("query", "key", "value")}
    for name in ("attention.output.dense", "hidden_intermediate.dense", "memory_intermediate.dense"):
        weights[layer + name] = hidden
    for name in ("memory_projection", "output.dense", "memory_initilizer.init_memory_fc.0"):
        weights[layer + name] = hidden
    for name in ("attention.output.LayerNorm", "output.LayerNorm", "memory_initilizer.init_memory_fc.1"):
        weights[layer + name] = (4,)
    weights |= {"embeddings.LayerNorm": (4,), "decoder.transform.LayerNorm": (4,)}
    for gate in "cz":
        shapes[f"{layer}memory_updater.m{gate}.weight"] = hidden
        weights[f"{layer}memory_updater.s{gate}"] = hidden
    for name, shape in weights.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write(folder: Path, easydict: type, **changes: Any) -> tuple[Path, Path]:
    torch.manual_seed(0)
    content = {"model": their_tensors(), "model_cfg": easydict(**SIZES), "epoch": 3}
    content |= {"opt": argparse.Namespace(lr=1e-4, cuda=True), **changes}
    torch.save(content, folder / "model.chkpt")
    (folder / "word2idx.json").write_text(json.dumps({word: n for n, word in enumerate(WORDS)}))
    return folder / "model.chkpt", folder / "word2idx.json"


def test_converted_captioner_has_all_weights(capvid: Run, tmp_path: Path, easydict: type) -> None:
    path, words = write(tmp_path, easydict)
    code, out, err = capvid("convert", str(path), "--words", str(words))
    assert (code, out, err) == (0, f"{tmp_path / 'model'}\n", "")
    checkpoint = load_checkpoint(tmp_path / "model")
    theirs, ours = torch.load(path, weights_only=False)["model"], checkpoint.captioner.state_dict()
    rows = [0, 4, 5, 6, 7, 8, 9]
    assert checkpoint.vocabulary.words[4:] == ["goat", "rows", "."]
    assert ours["embedding.weight"].equal(theirs["embeddings.word_embeddings.weight"][rows])
    assert ours["vocabulary.bias"].equal(theirs["decoder.bias"][rows])
    layer = "encoder.layer.0.memory_updater."
    expected = torch.cat([theirs[f"{layer}mc.weight"], theirs[f"{layer}mz.weight"]])
    assert ours["layers.0.updater.memory.weight"].equal(expected)
    config = checkpoint.captioner.config
    assert checkpoint.name == "mart-authors"
    assert (config.text_start, config.text_length, config.memory_length) == (9, 6, 2)
    assert (checkpoint.info["max_frames"], checkpoint.info["frames"]) == (7, "even")
    assert (checkpoint.info["max_words"], checkpoint.info["decoding"]["max_length"]) == (4, 5)
    assert capvid("convert", str(path), "--words", str(words))[0] == 2  # the folder exists


def their_xl_tensors() -> dict[str, torch.Tensor]:
    """Return random tensors named as the authors' TransformerXL names them."""
    kept = {name: t for name, t in their_tensors().items() if not name.startswith("encoder.")}
    layer, hidden = "encoder.layers.0.", (4, 4)
    shapes: dict[str, tuple[int, ...]] = {"encoder.r_w_bias": (2, 2), "encoder.r_r_bias": (2, 2)}
    shapes |= {"encoder.pos_emb.inv_freq": (2,), f"{layer}dec_attn.qkv_net.weight": (12, 4)}
    shapes |= {f"{layer}dec_attn.{name}_net.weight": hidden for name in "or"}
    for name, shape in (("pos_ff.CoreNet.0", hidden), ("pos_ff.CoreNet.3", hidden)):
        shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": (4,)}
    for name in ("dec_attn", "pos_ff"):
        shapes |= {f"{layer}{name}.layer_norm.{kind}": (4,) for kind in ("weight", "bias")}
    return kept | {name: torch.randn(shape) for name, shape in shapes.items()}


def their_masked_tensors() -> dict[str, torch.Tensor]:
    """Return random tensors named as the authors' MTransformer names them."""
    shapes: dict[str, tuple[int, ...]] = {"decoder.out.weight": (10, 4), "decoder.out.bias": (10,)}
    video = "encoder.video_embeddings."
    shapes |= {f"{video}2.weight": (4, 5), f"{video}2.bias": (4,)}
    shapes |= {f"{video}0.{kind}": (5,) for kind in ("gamma", "beta")}
    for layer, attentions in (
        ("encoder.layers.0.", ["selfattn"]),
        ("decoder.layers.0.", ["selfattn", "attention"]),
    ):
        for name in attentions:
            shapes |= {f"{layer}{name}.layer.w{part}.weight": (4, 4) for part in "qkvo"}
        for name in (*attentions, "feedforward"):
            shapes |= {f"{layer}{name}.layernorm.{kind}": (4,) for kind in ("gamma", "beta")}
        for number in "12":
            linear = f"{layer}feedforward.layer.linear{number}"
            shapes |= {f"{linear}.weight": (4, 4), f"{linear}.bias": (4,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_transformer_xl_is_converted(tmp_path: Path, easydict: type) -> None:
    tensors = their_xl_tensors()
    sizes = easydict(**{**SIZES, "xl_grad": True, "intermediate_size": 7})  # which their code ignores
    checkpoint = read_authors_checkpoint(*write(tmp_path, easydict, model=tensors, model_cfg=sizes))
    ours, config = checkpoint.captioner.state_dict(), checkpoint.captioner.config
    assert (checkpoint.name, checkpoint.info["recipe"]) == (
        "transformer-xl-authors",
        "transformer-xl-activitynet-authors",
    )
    assert (config.recurrent_gradient, config.feed_forward) == (True, 4)
    assert ours["content_bias"].equal(tensors["encoder.r_w_bias"])
    layer = "encoder.layers.0.dec_attn."
    assert ours["layers.0.attention.key.weight"].equal(tensors[f"{layer}qkv_net.weight"][4:8])
    # sines and cosines take turns
    expected = tensors[f"{layer}r_net.weight"][:, [0, 2, 1, 3]]
    assert ours["layers.0.attention.relative.weight"].equal(expected)


def test_masked_transformer_is_converted(tmp_path: Path, easydict: type) -> None:
    tensors = their_masked_tensors()
    checkpoint = read_authors_checkpoint(*write(tmp_path, easydict, model=tensors))
    ours = checkpoint.captioner.state_dict()
    assert (checkpoint.name, checkpoint.info["max_frames"]) == ("vanilla-transformer-authors", 9)
    assert ours["vocabulary.weight"].equal(tensors["decoder.out.weight"][[0, 4, 5, 6, 7, 8, 9]])
    assert ours["decoder.0.cross_norm.bias"].equal(tensors["decoder.layers.0.attention.layernorm.beta"])
    assert ours["decoder.0.attention.value.weight"].equal(
        tensors["decoder.layers.0.selfattn.layer.wv.weight"]
    )


def test_checkpoints_that_are_refused(tmp_path: Path, easydict: type) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return os.system, ("touch " + str(tmp_path / "ran"),)

    path, words = write(tmp_path, easydict, opt=Harmful())
    with pytest.raises(WeightsError, match="holds more than tensors"):
        read_authors_checkpoint(path, words)
    assert not (tmp_path / "ran").exists()
    tensors = their_tensors()
    del tensors["encoder.layer.0.memory_updater.mz.weight"]
    for changes, message in (
        ({"model": tensors}, "not a checkpoint of the MART authors' code"),
        ({"model": their_tensors() | {"encoder.r_w": torch.zeros(2)}}, "unknown tensor"),
        ({"model": their_tensors() | {"encoder.r_w_bias": torch.zeros(2)}}, "'xl_grad'"),
        (
            {"model": their_tensors() | {"decoder.out.weight": torch.zeros(10, 4)}},
            "VanillaTransformer: Missing key",
        ),
        (
            {"model_cfg": easydict(**{**SIZES, "hidden_size": "wide"})},
            "not a checkpoint of the MART authors' code",
        ),
        ({"model_cfg": easydict(**{**SIZES, "max_v_len": 2})}, "not a checkpoint of the MART authors' code"),
        ({"model_cfg": 3}, "not a checkpoint of the MART authors' code"),
        ({"model": 3}, "not a checkpoint of the MART authors' code"),
        ({"model": their_tensors() | {"decoder.decoder.weight": torch.zeros(3, 4)}}, "out of bounds"),
        ({"model": their_tensors() | {"decoder.bias": torch.zeros(())}}, "too many indices"),
        ({"model": their_tensors() | {"decoder.bias": torch.full((10,), math.nan)}}, "finite numbers"),
        (
            {"model": their_tensors() | {"decoder.bias": torch.zeros(10) * 1j}},
            "finite numbers",
        ),
        ({"model": their_tensors() | {"decoder.bias": torch.zeros(10, device="meta")}}, "finite numbers"),
    ):
        path, words = write(tmp_path, easydict, **changes)
        with pytest.raises(CheckpointError, match=message):
            read_authors_checkpoint(path, words)
    path, words = write(tmp_path, easydict)
    words.write_text(json.dumps({word: number for number, word in enumerate(WORDS[:-1])}))
    with pytest.raises(CheckpointError, match=r"it has 10 words, and word2idx\.json 9"):
        read_authors_checkpoint(path, words)
    for content in ("[]", "{", '{"[PAD]": 0}'):
        words.write_text(content)
        with pytest.raises(UsageError, match=r"word2idx\.json"):
            read_authors_checkpoint(path, words)
