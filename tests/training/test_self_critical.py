from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import NOUNS, SMALL, VERBS, Silent, data, trainer
from test_resume import Breaks, BrokenError, outcome

from capvid.captioners.checkpoint import Checkpoint, load_checkpoint
from capvid.decoding.beam_search import decode
from capvid.decoding.decoding_options import Hypothesis
from capvid.errors import FeatureMismatchError, UsageError
from capvid.metrics.cider import CiderD
from capvid.text.vocabulary import BOS, EOS
from capvid.training import objectives as module
from capvid.training.optimization import shards_of
from capvid.training.recipe import load_recipe
from capvid.training.trainer import Trainer

RATE = [
    "self_critical.learning_rate=4e-3",
    "self_critical.epochs=10",
    "self_critical.patience=10",
    "self_critical.batch_size=5",
    "self_critical.samples=8",
]


@pytest.fixture
def half_trained(tmp_path: Path) -> Trainer:
    """A captioner that has seen its twenty captions a few times and knows them by half."""
    made = trainer(tmp_path, "m3", "training.epochs=6", "training.average=0.0", "decoding.beam_size=5")
    made.run()
    return made


def fine_tuner(before: Trainer, *settings: str, reporter: Any = None, **options: Any) -> Trainer:
    return Trainer(
        load_recipe("m3-small", [*SMALL, "training.average=0.0", *RATE, *settings]),
        start=load_checkpoint(before.folder),
        **{
            "videos": before.videos,
            "store": before.store,
            "folder": before.folder.parent / "fine",
            "device": before.device,
            "reporter": reporter or Silent(),
            **options,
        },
    )


@pytest.mark.slow
def test_it_raises_what_it_is_rewarded_with(half_trained: Trainer) -> None:
    made = fine_tuner(half_trained)
    best, _ = made.run()
    log = [json.loads(line) for line in (made.folder / "metrics.jsonl").read_text().splitlines()]
    start = json.loads((half_trained.folder / "metrics.jsonl").read_text().splitlines()[-1])["val_cider"]
    assert log[-1]["loss"] < log[0]["loss"] - 0.2  # minus the CIDEr-D of what is drawn
    assert best.cider > start
    assert load_checkpoint(made.folder).info["val_cider"] == best.cider


@pytest.mark.slow
def test_the_captioner_it_begins_with_stays_the_best_until_there_is_a_better(half_trained: Trainer) -> None:
    start = load_checkpoint(half_trained.folder)
    made = fine_tuner(half_trained, "self_critical.learning_rate=0.0", "self_critical.epochs=2")
    best, _ = made.run()
    assert best.epoch == 0 and [result.best for result in made.reporter.results] == [False, False]  # type: ignore[attr-defined]
    kept = load_checkpoint(made.folder)
    assert kept.info["val_cider"] == pytest.approx(start.info["val_cider"])
    for name, tensor in start.captioner.state_dict().items():
        assert torch.equal(kept.captioner.state_dict()[name], tensor)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_loss_is_that_of_the_papers(
    half_trained: Trainer, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Word by word: each sample's CIDEr-D less the mean of the video's other samples, times -log p."""
    drawn: list[Sequence[Sequence[Hypothesis]]] = []

    def noted(*arguments: Any) -> Sequence[Sequence[Hypothesis]]:
        assert arguments[3].temperature == temperature
        drawn.append(decode(*arguments))
        return drawn[-1]

    monkeypatch.setattr(module, "decode", noted)
    settings = ["self_critical.samples=3", f"self_critical.temperature={temperature}"]
    made = fine_tuner(half_trained, "decoding.max_length=4", *settings)
    shard = next(shards_of(made.batches, 1, 0, 1, made.accelerator))
    micro_batches = made.objective.micro_batches(shard, 1, bf16=False)
    ((learned, weights),) = micro_batches.pairs
    batch = shard.micro_batches[0].to(made.device)
    loss = made.loss(learned, weights)
    loss = loss / micro_batches.divisor
    told = {video.id: list(video.captions) for video in made.videos if video.split == "train"}
    scorer = CiderD(told)
    total, words, rewards = 0.0, 0, []
    for place, (name, samples) in enumerate(zip(batch.ids, drawn[0], strict=True)):
        said = [" ".join(made.vocabulary.decode(sample.tokens)) for sample in samples]
        scores = [scorer.score({**dict.fromkeys(told, "x"), name: text})[1][name] for text in said]
        rewards += scores
        for number, (sample, score) in enumerate(zip(samples, scores, strict=True)):
            others = [other for another, other in enumerate(scores) if another != number]
            with torch.no_grad():
                read = torch.tensor([[BOS, *sample.tokens]])
                logits = made.captioner(batch.features[[place]], batch.mask[[place]], read)[0]  # (words, V)
            spoken = torch.tensor([*sample.tokens, EOS][:4])  # no end where cut off
            logprobs = (logits / temperature).log_softmax(-1)[torch.arange(len(spoken)), spoken]
            total -= (score - sum(others) / len(others)) * logprobs.sum().item()
            words += len(spoken)
    assert max(rewards) > 0 and len(set(rewards)) > 5
    assert any(len(s.tokens) == 4 for some in drawn[0] for s in some)
    assert loss.item() == pytest.approx(total / words, rel=1e-4)
    assert micro_batches.logged is not None and micro_batches.count == len(rewards)
    assert micro_batches.logged.item() == pytest.approx(-sum(rewards))


def test_what_fits_other_videos_too_is_worth_less(half_trained: Trainer) -> None:
    """Each sample's CIDEr-D, less 1.5 times its mean for the four videos that follow its own in the batch."""
    made = fine_tuner(half_trained, "self_critical.contrast=1.5", "self_critical.samples=3")
    train = [video for video in made.videos if video.split == "train"][:7]
    ids = [video.id for video in train]
    samples = [
        [Hypothesis(made.vocabulary.encode(text.split()), [], 0.0) for text in (own, other, f"{own} {own}")]
        for own, other in ((v.captions[0], w.captions[0]) for v, w in zip(train, train[::-1], strict=True))
    ]
    found = made.objective.rewards(ids, samples)
    told = {video.id: list(video.captions) for video in made.videos if video.split == "train"}
    scorer = CiderD(told)
    for place in range(len(ids)):
        for number, sample in enumerate(samples[place]):
            said = " ".join(made.vocabulary.decode(sample.tokens))
            scores = scorer.score(dict.fromkeys(told, said))[1]
            others = [scores[ids[(place + shift) % len(ids)]] for shift in (1, 2, 3, 4)]
            assert found[place, number].item() == pytest.approx(scores[ids[place]] - 1.5 * sum(others) / 4)
    assert found.min() < 0 < found.max()


@pytest.mark.slow
def test_broken_off_and_resumed(half_trained: Trainer, tmp_path: Path) -> None:
    settings = ["self_critical.epochs=3", "training.save_every=0.0", "self_critical.batch_size=6"]
    whole = fine_tuner(half_trained, *settings, folder=tmp_path / "whole")
    whole.run()
    with pytest.raises(BrokenError):
        fine_tuner(half_trained, *settings, reporter=Breaks(6)).run()
    again = fine_tuner(half_trained, *settings, resume=True)
    assert (again.progress.epoch, again.progress.batch) == (2, 2)
    again.run()
    assert outcome(tmp_path / "whole") == outcome(again.folder)


def test_what_cannot_be_fine_tuned(half_trained: Trainer, tmp_path: Path) -> None:
    start = load_checkpoint(half_trained.folder)
    options: dict[str, Any] = {
        "videos": half_trained.videos,
        "store": half_trained.store,
        "folder": tmp_path / "fine",
        "device": half_trained.device,
        "reporter": Silent(),
    }
    with pytest.raises(UsageError, match="holds m3, and soft-attention-small is a recipe of soft-attention"):
        Trainer(load_recipe("soft-attention-small"), start=start, **options)
    alone = load_recipe("m3-small", [*SMALL, "self_critical.samples=1"])
    with pytest.raises(UsageError, match=r"self_critical.samples = 1: .*; draw at least 2"):
        Trainer(alone, start=start, **options)
    cold = load_recipe("m3-small", [*SMALL, "self_critical.temperature=0"])
    with pytest.raises(UsageError, match=r"self_critical.temperature = 0.0: .*; give one above 0"):
        Trainer(cold, start=start, **options)
    paragraphs = tmp_path / "p"
    paragraphs.mkdir()
    told = trainer(paragraphs, "mart", "training.epochs=1")
    told.run()
    with pytest.raises(UsageError, match="mart writes paragraphs, and only single captions are fine-tuned"):
        Trainer(load_recipe("mart-small"), start=load_checkpoint(told.folder), **options)
    other: Checkpoint = replace(start, header=replace(start.header, sampling="uniform:3"))
    options["store"] = data(tmp_path)[1]
    options["store"].header = replace(options["store"].header, sampling="uniform:9")
    with pytest.raises(FeatureMismatchError, match="sampling: trained on uniform:3, got uniform:9"):
        Trainer(load_recipe("m3-small", SMALL), start=other, **options)


def test_several_captions_of_a_video_are_scored_as_one_by_one() -> None:
    references = {f"v{n}": [f"a {noun} {VERBS[n % 4]}"] for n, noun in enumerate(NOUNS)}
    scorer = CiderD(references)
    said = ["a man runs very fast", "a man sings", "nothing of that"]
    alone = [scorer.score({**dict.fromkeys(references, "x"), "v0": text})[1]["v0"] for text in said]
    assert scorer.score_captions(["v0"] * 3, said) == alone and alone[0] > alone[1] > alone[2]
