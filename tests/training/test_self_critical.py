from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import (
    NOUNS,
    SMALL_M3,
    VERBS,
    SilentReporter,
    StopAfterSteps,
    StoppedError,
    make_trainer,
    run_outcome,
    write_dataset,
)

from capvid.captioners.checkpoint import Checkpoint, load_checkpoint
from capvid.datasets.batches import Example
from capvid.decoding.beam_search import decode
from capvid.decoding.decoding_options import Hypothesis
from capvid.errors import FeatureMismatchError, UsageError
from capvid.metrics.cider import CiderD
from capvid.text.vocabulary import BOS, EOS
from capvid.training import objectives as module
from capvid.training.objectives import SelfCritical
from capvid.training.optimization import shards_of
from capvid.training.recipe import load_recipe
from capvid.training.trainer import Trainer

FINE_TUNING = [
    "self_critical.learning_rate=4e-3",
    "self_critical.epochs=10",
    "self_critical.patience=10",
    "self_critical.batch_size=5",
    "self_critical.samples=8",
]


@pytest.fixture
def half_trained(tmp_path: Path) -> Trainer:
    """Return the trainer of a captioner that knows its twenty captions by half."""
    trainer = make_trainer(
        tmp_path, "m3", "training.epochs=6", "training.average=0.0", "decoding.beam_size=5"
    )
    trainer.run()
    return trainer


def make_fine_tuner(trained: Trainer, *settings: str, reporter: Any = None, **options: Any) -> Trainer:
    return Trainer(
        load_recipe("m3-small", [*SMALL_M3, "training.average=0.0", *FINE_TUNING, *settings]),
        start=load_checkpoint(trained.folder),
        **{
            "videos": trained.videos,
            "store": trained.store,
            "folder": trained.folder.parent / "fine",
            "device": trained.device,
            "reporter": reporter or SilentReporter(),
            **options,
        },
    )


@pytest.mark.slow
def test_fine_tuning_raises_the_reward(half_trained: Trainer) -> None:
    fine_tuned = make_fine_tuner(half_trained)
    best, _ = fine_tuned.run()
    log = [json.loads(line) for line in (fine_tuned.folder / "metrics.jsonl").read_text().splitlines()]
    start = json.loads((half_trained.folder / "metrics.jsonl").read_text().splitlines()[-1])["val_cider"]
    assert log[-1]["loss"] < log[0]["loss"] - 0.2  # the loss is minus the CIDEr-D of the samples
    assert best.cider > start
    assert load_checkpoint(fine_tuned.folder).info["val_cider"] == best.cider


@pytest.mark.slow
def test_start_stays_the_best_until_it_is_surpassed(half_trained: Trainer) -> None:
    start = load_checkpoint(half_trained.folder)
    fine_tuned = make_fine_tuner(half_trained, "self_critical.learning_rate=0.0", "self_critical.epochs=2")
    best, _ = fine_tuned.run()
    assert best.epoch == 0 and [result.best for result in fine_tuned.reporter.results] == [False, False]  # type: ignore[attr-defined]
    checkpoint = load_checkpoint(fine_tuned.folder)
    assert checkpoint.info["val_cider"] == pytest.approx(start.info["val_cider"])
    for name, tensor in start.captioner.state_dict().items():
        assert torch.equal(checkpoint.captioner.state_dict()[name], tensor)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_loss_matches_the_papers(
    half_trained: Trainer, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Per word: -log p times the sample's CIDEr-D minus the mean of the video's other samples."""
    sampled: list[Sequence[Sequence[Hypothesis]]] = []

    def record(*arguments: Any) -> Sequence[Sequence[Hypothesis]]:
        assert arguments[3].temperature == temperature
        sampled.append(decode(*arguments))
        return sampled[-1]

    monkeypatch.setattr(module, "decode", record)
    settings = ["self_critical.samples=3", f"self_critical.temperature={temperature}"]
    fine_tuned = make_fine_tuner(half_trained, "decoding.max_length=4", *settings)
    shard = next(shards_of(fine_tuned.batches, 1, 0, 1, fine_tuned.accelerator))
    micro_batches = fine_tuned.objective.micro_batches(shard, 1, bf16=False)
    ((learned, weights),) = micro_batches.pairs
    batch = shard.micro_batches[0].to(fine_tuned.device)
    loss = fine_tuned.loss(learned, weights)
    loss = loss / micro_batches.divisor
    references = {video.id: list(video.captions) for video in fine_tuned.videos if video.split == "train"}
    scorer = CiderD(references)
    total, word_count, rewards = 0.0, 0, []
    for row, (name, samples) in enumerate(zip(batch.ids, sampled[0], strict=True)):
        texts = [" ".join(fine_tuned.vocabulary.decode(sample.tokens)) for sample in samples]
        scores = [scorer.score({**dict.fromkeys(references, "x"), name: text})[1][name] for text in texts]
        rewards += scores
        for number, (sample, score) in enumerate(zip(samples, scores, strict=True)):
            other_scores = [other for index, other in enumerate(scores) if index != number]
            with torch.no_grad():
                features, mask = batch.features[[row]], batch.mask[[row]]
                inputs = torch.tensor([[BOS, *sample.tokens]])
                (logits,) = fine_tuned.captioner(features, mask, inputs)  # (words, V)
            targets = torch.tensor([*sample.tokens, EOS][:4])  # no EOS in truncated samples
            logprobs = (logits / temperature).log_softmax(-1)[torch.arange(len(targets)), targets]
            total -= (score - sum(other_scores) / len(other_scores)) * logprobs.sum().item()
            word_count += len(targets)
    assert max(rewards) > 0 and len(set(rewards)) > 5
    assert any(len(s.tokens) == 4 for samples in sampled[0] for s in samples)
    assert loss.item() == pytest.approx(total / word_count, rel=1e-4)
    assert micro_batches.logged is not None and micro_batches.count == len(rewards)
    assert micro_batches.logged.item() == pytest.approx(-sum(rewards))


def make_objective(folder: Path, **options: Any) -> SelfCritical:
    """Return the objective of an untrained captioner with dropout."""
    trainer = make_trainer(folder, "m3", "model.dropout=0.5")
    recipe = replace(trainer.recipe, self_critical=replace(trainer.recipe.self_critical, **options))
    references = {video.id: list(video.captions) for video in trainer.videos if video.split == "train"}
    parts = (trainer.vocabulary, trainer.captioner, trainer.batches.examples, references)
    return SelfCritical(recipe, *parts, trainer.accelerator, trainer.device)


def test_views_of_a_video_are_no_contrast_to_it(tmp_path: Path) -> None:
    objective = make_objective(tmp_path, contrast=1.0)
    first, second = list(objective.references)[:2]
    texts = [objective.references[name][0] for name in (first, second)]
    samples = [[Hypothesis(objective.vocabulary.encode(text.split()), [], 0.0) for text in texts]] * 3
    rewards = objective.rewards([first, first, second], samples)
    own = objective.scorer.score_captions([first, first, second, second], texts * 2)
    expected = [own[0] - own[2], own[1] - own[3]]  # of the other video alone, not the mean with the view
    assert rewards[0].tolist() == pytest.approx(expected) and rewards[1].tolist() == pytest.approx(expected)


def test_samples_are_drawn_without_dropout_and_weighted_against_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = make_objective(tmp_path, samples=3)
    modes: list[bool] = []

    def record(captioner: Any, *arguments: Any) -> Any:
        modes.append(captioner.training)
        return decode(captioner, *arguments)

    monkeypatch.setattr(module, "decode", record)
    monkeypatch.setattr(
        SelfCritical, "rewards", lambda self, ids, _: torch.tensor([[1.0, 2.0, 6.0]] * len(ids))
    )
    objective.captioner.train()
    shard = next(shards_of(objective.batches, 1, 0, 1, objective.accelerator))
    ((_, weights),) = objective.micro_batches(shard, 1, bf16=False).pairs
    assert modes == [False]
    # each reward minus the mean of the two others
    assert weights is not None and weights[:3, 0].tolist() == pytest.approx([-3.0, -1.5, 4.5])


def test_contrast_lowers_rewards_of_generic_captions(half_trained: Trainer) -> None:
    """Reward: CIDEr-D minus 1.5 times the mean CIDEr-D for the next four videos of the batch."""
    fine_tuned = make_fine_tuner(half_trained, "self_critical.contrast=1.5", "self_critical.samples=3")
    train = [video for video in fine_tuned.videos if video.split == "train"][:7]
    ids = [video.id for video in train]
    samples = [
        [
            Hypothesis(fine_tuned.vocabulary.encode(text.split()), [], 0.0)
            for text in (own, other, f"{own} {own}")
        ]
        for own, other in ((v.captions[0], w.captions[0]) for v, w in zip(train, train[::-1], strict=True))
    ]
    rewards = fine_tuned.objective.rewards(ids, samples)
    references = {video.id: list(video.captions) for video in fine_tuned.videos if video.split == "train"}
    scorer = CiderD(references)
    for row in range(len(ids)):
        for number, sample in enumerate(samples[row]):
            text = " ".join(fine_tuned.vocabulary.decode(sample.tokens))
            scores = scorer.score(dict.fromkeys(references, text))[1]
            other_scores = [scores[ids[(row + shift) % len(ids)]] for shift in (1, 2, 3, 4)]
            assert rewards[row, number].item() == pytest.approx(
                scores[ids[row]] - 1.5 * sum(other_scores) / 4
            )
    assert rewards.min() < 0 < rewards.max()


@pytest.mark.slow
def test_fine_tuning_resumes_exactly(half_trained: Trainer, tmp_path: Path) -> None:
    settings = ["self_critical.epochs=3", "training.save_every=0.0", "self_critical.batch_size=6"]
    undisturbed = make_fine_tuner(half_trained, *settings, folder=tmp_path / "undisturbed")
    undisturbed.run()
    with pytest.raises(StoppedError):
        make_fine_tuner(half_trained, *settings, reporter=StopAfterSteps(6)).run()
    resumed = make_fine_tuner(half_trained, *settings, resume=True)
    assert (resumed.progress.epoch, resumed.progress.batch) == (2, 2)
    resumed.run()
    assert run_outcome(tmp_path / "undisturbed") == run_outcome(resumed.folder)


def test_invalid_fine_tuning_is_refused(half_trained: Trainer, tmp_path: Path) -> None:
    start = load_checkpoint(half_trained.folder)
    options: dict[str, Any] = {
        "videos": half_trained.videos,
        "store": half_trained.store,
        "folder": tmp_path / "fine",
        "device": half_trained.device,
        "reporter": SilentReporter(),
    }
    with pytest.raises(UsageError, match="holds m3, and soft-attention-small is a recipe of soft-attention"):
        Trainer(load_recipe("soft-attention-small"), start=start, **options)
    one_sample = load_recipe("m3-small", [*SMALL_M3, "self_critical.samples=1"])
    with pytest.raises(UsageError, match=r"self_critical.samples = 1: .*; draw at least 2"):
        Trainer(one_sample, start=start, **options)
    zero_temperature = load_recipe("m3-small", [*SMALL_M3, "self_critical.temperature=0"])
    with pytest.raises(UsageError, match=r"self_critical.temperature = 0.0: .*; give one above 0"):
        Trainer(zero_temperature, start=start, **options)
    paragraphs = tmp_path / "p"
    paragraphs.mkdir()
    mart = make_trainer(paragraphs, "mart", "training.epochs=1")
    mart.run()
    with pytest.raises(UsageError, match="mart writes paragraphs, and only single captions are fine-tuned"):
        Trainer(load_recipe("mart-small"), start=load_checkpoint(mart.folder), **options)
    other_sampling: Checkpoint = replace(start, header=replace(start.header, sampling="uniform:3"))
    options["store"] = write_dataset(tmp_path)[1]
    options["store"].header = replace(options["store"].header, sampling="uniform:9")
    with pytest.raises(FeatureMismatchError, match="sampling: trained on uniform:3, got uniform:9"):
        Trainer(load_recipe("m3-small", SMALL_M3), start=other_sampling, **options)


def test_captions_of_a_batch_score_like_single_ones() -> None:
    references = {f"v{n}": [f"a {noun} {VERBS[n % 4]}"] for n, noun in enumerate(NOUNS)}
    scorer = CiderD(references)
    captions = ["a man runs very fast", "a man sings", "nothing of that"]
    expected = [scorer.score({**dict.fromkeys(references, "x"), "v0": text})[1]["v0"] for text in captions]
    assert scorer.score_captions(["v0"] * 3, captions) == expected and expected[0] > expected[1] > expected[2]


def test_order_of_videos_depends_on_seed_and_epoch_alone() -> None:
    recipe = load_recipe("m3-small", [*SMALL_M3, "training.batch_size=4"])
    examples = [Example(f"v{n}", 1, (), lambda name: torch.zeros(1, 3)) for n in range(30)]

    def ids(epoch: int) -> list[str]:
        batches = module.VideoBatches(examples, recipe)
        return [example.id for plan in batches.epoch(epoch) for example, _ in plan.rows]

    first = ids(1)
    torch.manual_seed(1)
    assert ids(1) == first != sorted(first) and ids(2) != first
    assert sorted(first) == sorted(example.id for example in examples)
