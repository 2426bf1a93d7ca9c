from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_training import StopAfterSteps, StoppedError, make_trainer, resume_run, run_outcome
from torch import Tensor

from capvid.datasets.batches import Batch
from capvid.errors import UsageError
from capvid.text.vocabulary import BOS, EOS, PAD
from capvid.training import objectives as module
from capvid.training.objectives import with_own_words
from capvid.training.recipe import load_recipe


class PeakedCaptioner(torch.nn.Module):
    """Predicts words n + 1 and n + 2 after word n, with weights 0.75 and 0.25, and a likelier EOS."""

    def teacher_forced(self, features: Tensor, mask: Tensor, inputs: Tensor) -> Tensor:
        return inputs.unsqueeze(-1).float()

    def logits(self, z: Tensor) -> Tensor:
        words = torch.arange(30)
        offset = words - torch.where(z < 10, 10, z)  # (..., V)
        probabilities = torch.where(offset == 1, 0.75, torch.where(offset == 2, 0.25, 0.0))
        return torch.where(words == EOS, torch.tensor(5.0), probabilities.log())


def make_batch(rows: int) -> Batch:
    words = torch.tensor([[10, 20, 5], [12, 22, PAD]]).repeat(rows, 1)
    start = torch.full((2 * rows, 1), BOS)
    inputs = torch.cat([start, words], 1)
    targets = torch.cat([words, torch.full((2 * rows, 1), PAD)], 1)
    return Batch(torch.zeros(2 * rows, 1, 3), torch.ones(2 * rows, 1, dtype=torch.bool), inputs, targets)


def test_words_are_sampled_given_the_reference_words() -> None:
    torch.manual_seed(0)
    batch = make_batch(2000)
    original_inputs = batch.inputs.clone()
    sampled = with_own_words(PeakedCaptioner(), batch, 1.0)  # type: ignore[arg-type]
    assert torch.equal(batch.inputs, original_inputs) and sampled.targets is batch.targets
    assert (sampled.inputs[:, 0] == BOS).all()
    assert torch.equal(sampled.inputs == PAD, batch.inputs == PAD)
    words = sampled.inputs[::2]  # inputs after BOS, 10 and 20; special tokens are never sampled
    for position, previous in ((1, 10), (2, 10), (3, 20)):
        offset = words[:, position] - previous
        assert set(offset.tolist()) == {1, 2}
        assert (offset == 1).double().mean().item() == pytest.approx(0.75, abs=0.04)
    assert set((sampled.inputs[1::2, 2] - 12).tolist()) == {1, 2}


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_rate_is_the_share_of_sampled_words(rate: float) -> None:
    torch.manual_seed(1)
    batch = make_batch(2000)
    sampled = with_own_words(PeakedCaptioner(), batch, rate)  # type: ignore[arg-type]
    changed = (sampled.inputs != batch.inputs) & (batch.inputs != PAD)
    assert not changed[:, 0].any()
    assert changed[:, 2].double().mean().item() == pytest.approx(rate, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m3", "mart"])
def test_rate_grows_from_zero_and_resumes_exactly(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []

    def record(captioner: object, batch: Batch, rate: float) -> Batch:
        rates.append(rate)
        return with_own_words(captioner, batch, rate)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "with_own_words", record)
    settings = ["training.scheduled_sampling=0.5", "training.epochs=4", "training.save_every=0.0"]
    folders = [tmp_path / "undisturbed", tmp_path / "resumed"]
    for folder in folders:
        folder.mkdir()
    make_trainer(folders[0], name, *settings).run()  # 2 batches an epoch
    assert rates == pytest.approx([0.5 * step / 8 for step in range(1, 8)])
    trainer = make_trainer(folders[1], name, *settings)
    trainer.reporter = StopAfterSteps(5)
    with pytest.raises(StoppedError):
        trainer.run()
    resume_run(trainer).run()
    assert run_outcome(folders[0] / "run") == run_outcome(folders[1] / "run")


@pytest.mark.parametrize("option", ["training.scheduled_sampling", "data.frame_dropout", "training.warmup"])
def test_rate_above_one_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} must be a number between 0 and 1, got 1.5"):
        load_recipe("m3-small", [f"{option}=1.5"])
    load_recipe("m3-small", [f"{option}=1"])
