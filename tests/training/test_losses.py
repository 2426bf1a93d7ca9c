"""The losses of the papers, and their optimizers, against plain re-computations."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from small_training import make_trainer
from torch.nn import functional as F

from capvid.text.vocabulary import PAD
from capvid.training.optimization import OPTIMIZERS, shards_of
from capvid.training.recipe import TrainingOptions, load_recipe


def first_gradients(folder: Path, name: str, loss: str, *settings: str) -> tuple[list, list, int, int, float]:
    """Return the gradients of a trainer's first step, and a plain loss per sentence and word of its batch."""
    folder.mkdir()
    trainer = make_trainer(folder, name, f"training.loss={loss}", "training.clip_norm=0.0", *settings)
    shard = next(shards_of(trainer.batches, 1, 0, 2, trainer.accelerator))
    batches = [batch.to(trainer.device) for batch in shard.micro_batches]
    trainer.captioner.train()
    total, sentences, words = torch.zeros(()), 0, 0
    for batch in batches:  # sentence by sentence and word by word
        hidden = trainer.captioner.teacher_forced(batch.features, batch.mask, batch.inputs)
        logits = trainer.captioner.logits(hidden).flatten(0, -3)
        for scores, targets in zip(logits, batch.targets.flatten(0, -2), strict=True):
            real = [n for n, target in enumerate(targets.tolist()) if target != PAD]
            sentences, words = sentences + bool(real), words + len(real)
            for n in real:
                total = total - F.log_softmax(scores[n], -1)[targets[n]]
    divisor = {"word": words, "sentence": sentences, "sum": 1}[loss]
    parameters = [p for p in trainer.captioner.parameters() if p.requires_grad]
    expected = torch.autograd.grad(total / divisor, parameters, allow_unused=True)
    trainer._step(shard)
    return [p.grad for p in parameters], list(expected), sentences, words, trainer.progress.words


@pytest.mark.parametrize("name", ["m3", "kv-memory", "mart"])
@pytest.mark.parametrize("loss", ["word", "sentence", "sum"])
def test_gradients_are_those_of_the_printed_loss(tmp_path: Path, name: str, loss: str) -> None:
    gradients, expected, sentences, words, logged = first_gradients(tmp_path / "a", name, loss)
    assert 1 < sentences < words == logged  # the logged loss stays per word
    for gradient, plain in zip(gradients, expected, strict=True):
        assert (gradient is None) == (plain is None)
        if plain is not None:
            torch.testing.assert_close(gradient, plain, atol=1e-5, rtol=1e-4)


def test_paper_recipes_have_the_printed_losses_and_optimizers() -> None:
    for name, loss, optimizer in [
        ("m3-msvd", "sentence", "adadelta"),
        ("soft-attention-msrvtt", "sentence", "adadelta"),
        ("kv-memory-youtube2text", "sentence", "adadelta"),
        ("ham-msvd", "sum", "adam"),
        ("ham-charades", "sum", "adam"),
        ("dense-lstm-msvd", "sentence", "adam"),
        ("m3-compact", "word", "adamw"),
    ]:
        options = load_recipe(name).training
        assert (options.loss, options.optimizer, options.rho) == (loss, optimizer, 0.95), name


def test_the_registered_optimizers_are_the_choices() -> None:
    choices = next(f.metadata["choices"] for f in fields(TrainingOptions) if f.name == "optimizer")
    assert sorted(choices) == sorted(OPTIMIZERS)


@pytest.mark.parametrize("rho", [0.95, 0.9])
def test_adadelta_is_that_of_zeiler(rho: float) -> None:
    """Zeiler (2012), Algorithm 1, with the gradient of the L2 term of M3, Eq. 24."""
    layer, eps, decay = torch.nn.Linear(1, 1).double(), 1e-6, 0.1
    options = TrainingOptions(optimizer="adadelta", learning_rate=1.0, rho=rho, weight_decay=decay)
    optimizer = OPTIMIZERS["adadelta"](layer, options)
    parameters = [layer.weight, layer.bias]  # the bias decays, too
    values, squares, updates = [p.item() for p in parameters], [0.0, 0.0], [0.0, 0.0]
    for step in range(1, 4):
        optimizer.zero_grad()
        (step * (layer.weight + 2 * layer.bias)).sum().backward()
        optimizer.step()
        for n, factor in enumerate((1.0, 2.0)):
            gradient = step * factor + decay * values[n]
            squares[n] = rho * squares[n] + (1 - rho) * gradient**2
            update = -((updates[n] + eps) ** 0.5) / (squares[n] + eps) ** 0.5 * gradient
            updates[n] = rho * updates[n] + (1 - rho) * update**2
            values[n] += update
        assert [p.item() for p in parameters] == pytest.approx(values, rel=1e-12)


def test_weight_decay_of_adamw_spares_vectors_and_embeddings() -> None:
    module = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(3, 2), "layer": torch.nn.Linear(2, 2)})
    optimizer = OPTIMIZERS["adamw"](module, TrainingOptions(weight_decay=0.1))
    decayed, spared = optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert [id(p) for p in decayed["params"]] == [id(module["layer"].weight)]
