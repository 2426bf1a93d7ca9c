from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from capvid.backbones.catalog import StreamHeader
from capvid.captioners.base import CAPTIONERS, build
from capvid.errors import UsageError
from capvid.features.feature_file import FeatureHeader
from capvid.text.vocabulary import Vocabulary
from capvid.training.optimization import OPTIMIZERS, AveragedWeights, learning_rate_factor
from capvid.training.recipe import TrainingOptions, load_recipe, recipe_names
from capvid.training.trainer import fresh_captioner


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_builds(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.description
    sizes = {"vocabulary_size": 20, "feature_width": 8, **recipe.model}
    kind = CAPTIONERS[recipe.captioner]
    maps = kind.needs_maps(kind.config_class.from_dict(sizes))
    with torch.device("meta"):
        captioner = build(recipe.captioner, {**sizes, "locations": 4 if maps else 0})
    assert captioner.name == recipe.captioner


def test_settings_override_the_recipe() -> None:
    recipe = load_recipe(
        "m3-small", ["training.epochs=3", "model.memory_rows=5", "training.optimizer=adadelta"]
    )
    assert (recipe.training.epochs, recipe.model["memory_rows"]) == (3, 5)
    assert recipe.training.optimizer == "adadelta"
    zeros = load_recipe("m3-small", ["training.seed=0", "decoding.min_length=0", "training.clip_norm=0"])
    assert (zeros.training.seed, zeros.decoding.min_length, zeros.training.clip_norm) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("epochs=3", "not understood"),
        ("training.epoch=3", "training.epoch: no such option"),
        ("training.epochs=many", "must be an integer between 1 and 1000000, got 'many'"),
        ("training.epochs=0", "training.epochs must be an integer between 1 and 1000000, got 0"),
        ("training.dropout=0.1", "no such option"),
        ("training.optimizer=sgd", "must be one of adam, adamw, bert-adam, adadelta, got 'sgd'"),
        ("decoding.beam_size=0", "decoding.beam_size must be an integer between"),
        ("data.frames=middle", "must be one of spread, even, first"),
        ("data.sampling=often", "data.sampling: often: no such sampling"),
        ("training.beta1=-0.1", "training.beta1 must be a number between 0 and 0.999999, got -0.1"),
        ("training.learning_rate=nan", "training.learning_rate must be a number between 0 and 100, got nan"),
        ("training.learning_rate=inf", "got inf"),
        ("data.frame_dropout=1.5", "data.frame_dropout must be a number between 0 and 1, got 1.5"),
        ("training.learning_rate=-1", "got -1.0"),
        ("training.learning_rate=[1]", r"got \[1\]"),
        ("training.epochs=1000000000000", "got 1000000000000"),
        ("training.batch_size=1000000000", "must be an integer between 1 and 65536"),
        ("training.seed=" + "9" * 5000, "training.seed must be an integer between 0 and 4294967295"),
        ("model.hidden=1e8", "model.hidden must be an integer between 1 and 1000000, got 100000000.0"),
        ("model.hidden=1000000", "model.hidden = 1000000: the captioner takes .* choose smaller sizes"),
        ("model.depth=3", "model.depth: no such model option"),
        ("training.epochs=" + "[" * 5000, "training.epochs must be an integer"),
    ],
)
def test_invalid_settings(setting: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_recipe("m3-small", [setting])


def test_linear_and_constant_schedules() -> None:
    linear = learning_rate_factor(TrainingOptions(schedule="linear", warmup=0.2), 10)
    assert [linear(step) for step in range(11)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0]
    )
    assert learning_rate_factor(TrainingOptions(), 10)(7) == 1.0


def test_bert_schedule_begins_and_ends_at_zero() -> None:
    factor = learning_rate_factor(TrainingOptions(schedule="bert", warmup=0.2), 10)
    assert [factor(step) for step in range(11)] == pytest.approx(
        [0.0, 0.5, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0]
    )


def test_bert_adam_matches_plain_loops() -> None:
    """No bias correction, 1e-6 in the divisor, decay apart from the moments and not of biases and norms."""
    torch.manual_seed(0)
    sizes = {"vocabulary_size": 9, "feature_width": 3, "hidden": 4, "heads": 2}
    captioner = build("mart-authors", {**sizes, "feed_forward": 4, "word_width": 3, "layers": 1}).double()
    options = TrainingOptions(optimizer="bert-adam", learning_rate=0.1, weight_decay=0.3, beta2=0.9)
    optimizer = OPTIMIZERS["bert-adam"](captioner, options)
    spared = ("bias", "slots", "attention_norm.weight", "feed_forward_norm.weight", "token_norm.weight")
    expected = {name: weight.flatten().tolist() for name, weight in captioner.named_parameters()}
    moments = {name: [(0.0, 0.0)] * len(values) for name, values in expected.items()}
    for _ in range(3):
        for name, weight in captioner.named_parameters():
            weight.grad = torch.randn_like(weight)
            decay = 0.0 if name.endswith((*spared, "transform.2.weight")) else 0.3
            for k, gradient in enumerate(weight.grad.flatten().tolist()):
                mean, square = moments[name][k]
                mean, square = 0.9 * mean + 0.1 * gradient, 0.9 * square + 0.1 * gradient**2
                moments[name][k] = mean, square
                step = mean / (square**0.5 + 1e-6) + decay * expected[name][k]
                expected[name][k] -= 0.1 * step
        optimizer.step()
    for name, weight in captioner.named_parameters():
        assert weight.flatten().tolist() == pytest.approx(expected[name]), name


def test_word_vectors_from_a_file(tmp_path: Path) -> None:
    path, vocabulary = tmp_path / "glove.txt", Vocabulary(["dog", "cat", "emu"])
    header = FeatureHeader(
        streams=(StreamHeader(backbone=None, layer=None, width=3),),
        sampling=None,
        reader=None,
        dtype="float32",
        capvid_version="1",
    )

    def embedding(content: str) -> torch.Tensor:
        path.write_text(content, encoding="utf-8")
        settings = [f"model.word_vectors={path}", "model.word_width=2", "model.hidden=4", "model.heads=2"]
        captioner = fresh_captioner(load_recipe("mart-small", settings), header, vocabulary, 0)
        assert str(path) not in str(captioner.config.to_dict())
        return captioner.embedding.weight

    weight = embedding("the 1 2\ncat 0.5 -1\ndog 3 4e-1\n. . 7 8\n")
    assert weight[4:6].tolist() == [[3, pytest.approx(0.4)], [0.5, -1]]
    assert weight[6].any() and not (weight[6] == weight[5]).any()
    for content, message in {
        "cat 1 2\ncat 1\n": "line 2 has 1 numbers, but model.word_width is 2",
        "cat 1 2 3\n": "line 1 has 3 numbers, but model.word_width is 2",
        "cat 1 b\n": "not a file of word vectors",
        "cat 1 nan\n": "line 1 has numbers that are not finite",
        "the 1 2\n": "no word of the training captions",
        "x" * 300_000: "line 1 has 0 numbers",
    }.items():
        with pytest.raises(UsageError, match=message):
            embedding(content)
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match="not a file of word vectors"):
        fresh_captioner(load_recipe("mart-small", [f"model.word_vectors={path}"]), header, vocabulary, 0)


def test_adam_coefficients() -> None:
    layer = torch.nn.Linear(2, 2)
    for name in ("adam", "adamw"):
        optimizer = OPTIMIZERS[name](layer, TrainingOptions(beta1=0.8, beta2=0.99))
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)


def test_invalid_model_options_and_recipe_names() -> None:
    sizes = {"vocabulary_size": 20, "feature_width": 8}
    with pytest.raises(UsageError, match="memory_rows: no such model option"):
        build("soft-attention", {**sizes, "memory_rows": 3})
    with pytest.raises(UsageError, match=r"hidden must be an integer .*, got 'wide'"):
        build("m3", {**sizes, "hidden": "wide"})
    for option, value in (("dropout", 3.0), ("memory_rows", 0), ("projection", -1)):
        with pytest.raises(UsageError, match=f"{option} must be .* between .*, got {value}"):
            build("m3", {**sizes, option: value})
    with pytest.raises(UsageError, match="no such captioner"):
        build("m4", sizes)
    with pytest.raises(UsageError, match="no such recipe"):
        load_recipe("m4-small")


def test_one_cycle_schedule() -> None:
    factor = learning_rate_factor(TrainingOptions(schedule="one-cycle", warmup=0.2), 100)
    assert factor(0) == pytest.approx(1 / 20)
    assert factor(19) == factor(20) == 1.0
    assert factor(60) == pytest.approx(0.5)
    assert factor(100) == pytest.approx(0.0)


def test_averaged_weights() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    average, expected = AveragedWeights(layer, 0.27), 1.0
    for step, value in enumerate((2.0, 4.0, 8.0), 1):
        with torch.no_grad():
            layer.weight.fill_(value)
        average.update(layer)
        decay = min(0.27, (1 + step) / (10 + step))  # 2/11, 3/12, then 0.27
        expected = decay * expected + (1 - decay) * value
    average.swap(layer)
    assert layer.weight.item() == pytest.approx(expected)
    average.swap(layer)
    assert layer.weight.item() == 8.0


def test_invalid_recipe_files(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    for text, message in {
        "a = " + "[" * 50_000: "nested too deeply|not valid TOML",
        "captioner = 3": "names no captioner",
        'captioner = "m3"\nmodel = 3': "model must be a table, got 3",
        'captioner = "m3"\ntraining = [1]': r"training must be a table, got \[1\]",
        'captioner = "m3"\nsearch = 1': "search must be a table",
        'captioner = "m3"\ndescription = 1': "description must be a string",
    }.items():
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            load_recipe(str(path))
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_recipe(str(path))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UsageError, match="not a regular file"):
        load_recipe(str(path))
