from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_loop import trainer
from test_resume import Breaks, BrokenError, outcome, resumed
from torch import Tensor

from capvid.datasets.batches import Batch
from capvid.errors import RecipeError
from capvid.text.vocabulary import BOS, EOS, PAD
from capvid.training import objectives as module
from capvid.training.objectives import with_own_words
from capvid.training.recipe import load_recipe


class Peaked(torch.nn.Module):
    """Says after a word number n the words n + 1 and n + 2, at .75 and .25, or the end, which is likelier."""

    def teacher_forced(self, features: Tensor, mask: Tensor, inputs: Tensor) -> Tensor:
        return inputs.unsqueeze(-1).float()

    def logits(self, z: Tensor) -> Tensor:
        words = torch.arange(30)
        after = words - torch.where(z < 10, 10, z)  # (..., V)
        found = torch.where(after == 1, 0.75, torch.where(after == 2, 0.25, 0.0))
        return torch.where(words == EOS, torch.tensor(5.0), found.log())


def batch(rows: int) -> Batch:
    words = torch.tensor([[10, 20, 5], [12, 22, PAD]]).repeat(rows, 1)
    start = torch.full((2 * rows, 1), BOS)
    inputs = torch.cat([start, words], 1)
    targets = torch.cat([words, torch.full((2 * rows, 1), PAD)], 1)
    return Batch(torch.zeros(2 * rows, 1, 3), torch.ones(2 * rows, 1, dtype=torch.bool), inputs, targets)


def test_words_are_drawn_from_what_the_right_ones_make_likely() -> None:
    torch.manual_seed(0)
    given = batch(2000)
    kept = given.inputs.clone()
    made = with_own_words(Peaked(), given, 1.0)  # type: ignore[arg-type]
    assert torch.equal(given.inputs, kept) and made.targets is given.targets
    assert (made.inputs[:, 0] == BOS).all()
    assert torch.equal(made.inputs == PAD, given.inputs == PAD)
    words = made.inputs[::2]  # after BOS, 10 and 20; special tokens are never drawn
    for place, before in ((1, 10), (2, 10), (3, 20)):
        after = words[:, place] - before
        assert set(after.tolist()) == {1, 2}
        assert (after == 1).double().mean().item() == pytest.approx(0.75, abs=0.04)
    assert set((made.inputs[1::2, 2] - 12).tolist()) == {1, 2}


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_the_rate_is_that_of_words(rate: float) -> None:
    torch.manual_seed(1)
    given = batch(2000)
    made = with_own_words(Peaked(), given, rate)  # type: ignore[arg-type]
    changed = (made.inputs != given.inputs) & (given.inputs != PAD)
    assert not changed[:, 0].any()
    assert changed[:, 2].double().mean().item() == pytest.approx(rate, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m3", "mart"])
def test_it_grows_from_nothing_and_is_resumed_exactly(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []

    def noted(captioner: object, given: Batch, rate: float) -> Batch:
        rates.append(rate)
        return with_own_words(captioner, given, rate)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "with_own_words", noted)
    settings = ["training.scheduled_sampling=0.5", "training.epochs=4", "training.save_every=0.0"]
    folders = [tmp_path / "whole", tmp_path / "broken"]
    for folder in folders:
        folder.mkdir()
    trainer(folders[0], name, *settings).run()  # 2 batches an epoch
    assert rates == pytest.approx([0.5 * step / 8 for step in range(1, 8)])
    made = trainer(folders[1], name, *settings)
    made.reporter = Breaks(5)
    with pytest.raises(BrokenError):
        made.run()
    resumed(made).run()
    assert outcome(folders[0] / "run") == outcome(folders[1] / "run")


@pytest.mark.parametrize("option", ["training.scheduled_sampling", "data.frame_dropout", "training.warmup"])
def test_a_rate_above_one_is_refused(option: str) -> None:
    with pytest.raises(RecipeError, match=f"{option} must be a number between 0 and 1, got 1.5"):
        load_recipe("m3-small", [f"{option}=1.5"])
    load_recipe("m3-small", [f"{option}=1"])
