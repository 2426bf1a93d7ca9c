"""Own memory: training on the memory of the captioner's own sentences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_training import StopAfterSteps, StoppedError, make_trainer, resume_run, run_outcome
from transformer_reference import mart
from variants import clip, make, weights

from capvid.captioners.base import ParagraphCaptioner
from capvid.datasets.batches import Batch, paragraph_teacher_tokens
from capvid.decoding.beam_search import decode_paragraphs
from capvid.decoding.decoding_options import DecodingOptions
from capvid.errors import UsageError
from capvid.text.vocabulary import BOS, EOS, PAD
from capvid.training import objectives as module
from capvid.training.objectives import least_repeated, with_own_memory
from capvid.training.recipe import load_recipe

GREEDY = DecodingOptions(max_length=6)
PARAGRAPHS = [
    [[[5, 6, 7], [8, 9], [5, 4]], [[4, 8], [6, 6, 6, 5], [9]]],
    [[[9, 4], [5, 5, 8]]],
]


def make_batch(captioner: ParagraphCaptioner) -> Batch:
    """Return a video of three segments with two paragraphs, and one of two segments with one."""
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    mask[1, 2] = False
    inputs_and_targets = paragraph_teacher_tokens([paragraphs[0] for paragraphs in PARAGRAPHS], 3)
    return Batch(clip(captioner, 2, 3, 4) * mask.unsqueeze(-1), mask, *inputs_and_targets, PARAGRAPHS)


def test_least_repeated_reference_sentence_is_chosen() -> None:
    paragraphs = [
        [[1, 2, 3, 4], [1, 2, 3, 4], [7, 8, 9]],
        [[9, 9, 9], [9, 9, 1, 2, 3], [1, 2, 3]],
        [[5], [1, 2], [3, 4, 5, 6, 7]],
    ]
    # segment 1 contains the trigrams 123, 234 and 345; segment 2 adds 912 and 129
    assert least_repeated(paragraphs, [[1, 2, 3, 4, 5], [9, 1, 2, 9]]) == [[1, 2, 3, 4], [1, 2], [7, 8, 9]]
    assert least_repeated(paragraphs, [[7, 8, 9], [1, 2, 3]]) == [[1, 2, 3, 4], [1, 2, 3, 4], [3, 4, 5, 6, 7]]
    assert least_repeated(paragraphs, [[], []]) == paragraphs[0]
    assert least_repeated(paragraphs[:1], [[1, 2, 3, 4], [7, 8, 9]]) == paragraphs[0]
    assert least_repeated([[[4]]], []) == [[4]]


@pytest.mark.parametrize("variant", ["mart", "transformer-xl"])
def test_greedy_sentences_are_remembered(variant: str) -> None:
    captioner = make(variant)
    batch = make_batch(captioner)
    original = batch.inputs.clone(), batch.targets.clone()
    captioner.train()
    taught = with_own_memory(captioner, batch, max_length=6)
    assert captioner.training
    assert torch.equal(batch.inputs, original[0]) and torch.equal(batch.targets, original[1])
    hypotheses = decode_paragraphs(captioner, batch.features, batch.mask, torch.tensor([3, 2]), GREEDY)
    sentences = [[segment[0].tokens for segment in video] for video in hypotheses]
    assert taught.remembered is not None and taught.remembered.shape[:2] == (2, 2)
    remembered = taught.remembered.tolist()
    for video, segment in ((0, 0), (0, 1), (1, 0)):
        sentence = [BOS, *sentences[video][segment]]
        assert remembered[video][segment] == sentence + [PAD] * (len(remembered[0][0]) - len(sentence))
    chosen = [least_repeated(*pair) for pair in zip(PARAGRAPHS, sentences, strict=True)]
    for video, segments in enumerate(chosen):
        for segment, sentence in enumerate(segments):
            assert [word for word in taught.inputs[video, segment].tolist() if word] == [BOS, *sentence]
            assert [word for word in taught.targets[video, segment].tolist() if word] == [*sentence, EOS]
    assert not taught.inputs[1, 2].any() and not taught.targets[1, 2].any()


def test_batch_is_unchanged_without_memory() -> None:
    for variant in ("mart-no-recurrence", "vanilla-transformer"):
        captioner = make(variant)
        batch = make_batch(captioner)
        assert with_own_memory(captioner, batch, max_length=6) is batch
    captioner = make("mart")
    batch = make_batch(captioner)
    single_segment = Batch(
        batch.features[:, :1], batch.mask[:, :1], batch.inputs[:, :1], batch.targets[:, :1]
    )
    assert with_own_memory(captioner, single_segment, max_length=6) is single_segment
    without_targets = Batch(
        batch.features, batch.mask, batch.inputs, torch.zeros_like(batch.targets), PARAGRAPHS
    )
    assert with_own_memory(captioner, without_targets, max_length=6) is without_targets


@pytest.mark.parametrize("variant", ["mart", "transformer-xl"])
def test_segments_continue_from_the_remembered_sentences(variant: str) -> None:
    """The result equals reading each segment alone after remembering the sentences before it."""
    captioner = make(variant)
    batch = make_batch(captioner)
    remembered = torch.tensor(
        [[[BOS, 4, 9, 9], [BOS, 8, PAD, PAD]], [[BOS, 7, 7, PAD], [BOS, PAD, PAD, PAD]]]
    )
    hidden = captioner.teacher_forced(batch.features, batch.mask, batch.inputs, remembered)
    for video, count in ((0, 3), (1, 2)):
        carried = None
        for segment in range(count):
            rows = slice(video, video + 1)
            state = captioner.encode(batch.features[rows, segment], batch.mask[rows, segment], carried)
            hidden_of_segment, _ = captioner.read(state, batch.inputs[rows, segment])
            length = int((batch.inputs[video, segment] != PAD).sum())
            torch.testing.assert_close(hidden[video, segment, :length], hidden_of_segment[0, :length])
            if segment < 2:
                carried = captioner.remember(state, remembered[rows, segment])
    default = captioner.teacher_forced(batch.features, batch.mask, batch.inputs, batch.inputs[:, :-1])
    torch.testing.assert_close(default, captioner.teacher_forced(batch.features, batch.mask, batch.inputs))
    assert not torch.allclose(default[0, 1], hidden[0, 1])


def test_mart_reference_with_another_remembered_sentence() -> None:
    """Compare the second segment with the reference, after remembering another first sentence."""
    captioner = make("mart")
    features, mask = clip(captioner, 1, 2, 3), torch.ones(1, 2, 3, dtype=torch.bool)
    frames = [features[0, n].tolist() for n in range(2)]
    remembered, second = [BOS, 9, 4, 6], [BOS, 7, 5]
    expected = mart(
        weights(captioner), [(frames[0], remembered), (frames[1], second)], heads=2, layers=2, slots=2
    )
    words = torch.tensor([[[BOS, 10, 8], second]])
    hidden = captioner.teacher_forced(features, mask, words, torch.tensor([[remembered]]))
    logprobs = captioner.logits(hidden[0, 1]).log_softmax(-1)
    torch.testing.assert_close(logprobs.tolist(), expected[1], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_own_memory_starts_in_epoch_2_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[Batch] = []

    def record(captioner: ParagraphCaptioner, batch: Batch, *, max_length: int) -> Batch:
        batches.append(with_own_memory(captioner, batch, max_length=max_length))
        return batches[-1]

    monkeypatch.setattr(module, "with_own_memory", record)
    settings = ["training.own_memory=true", "training.epochs=4", "training.save_every=0.0"]
    folders = [tmp_path / "undisturbed", tmp_path / "resumed"]
    for folder in folders:
        folder.mkdir()
    make_trainer(folders[0], "mart", *settings).run()  # 2 batches an epoch
    assert len(batches) == 6 and all(batch.remembered is not None for batch in batches)
    trainer = make_trainer(folders[1], "mart", *settings)
    trainer.reporter = StopAfterSteps(5)
    with pytest.raises(StoppedError):
        trainer.run()
    resume_run(trainer).run()
    assert run_outcome(folders[0] / "run") == run_outcome(folders[1] / "run")


def test_single_caption_captioners_are_refused() -> None:
    with pytest.raises(UsageError, match=r"training.own_memory = true: m3 writes single captions"):
        load_recipe("m3-small", ["training.own_memory=true"])
    assert load_recipe("vanilla-transformer-small", ["training.own_memory=true"]).training.own_memory
