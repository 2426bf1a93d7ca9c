"""Own memory: what is remembered, and what is taught with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_loop import trainer
from test_resume import Breaks, BrokenError, outcome, resumed
from transformer_reference import mart
from variants import clip, make, weights

from capvid.captioners.base import ParagraphCaptioner
from capvid.datasets.batches import Batch, in_segments
from capvid.decoding.beam_search import decode_paragraphs
from capvid.decoding.decoding_options import DecodingOptions
from capvid.errors import RecipeError
from capvid.text.vocabulary import BOS, EOS, PAD
from capvid.training import objectives as module
from capvid.training.objectives import least_repeated, with_own_memory
from capvid.training.recipe import load_recipe

GREEDY = DecodingOptions(max_length=6)
PARAGRAPHS = [
    [[[5, 6, 7], [8, 9], [5, 4]], [[4, 8], [6, 6, 6, 5], [9]]],
    [[[9, 4], [5, 5, 8]]],
]


def batch(captioner: ParagraphCaptioner) -> Batch:
    """A video of three segments, with two paragraphs, and one of two."""
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    mask[1, 2] = False
    taught = in_segments([paragraphs[0] for paragraphs in PARAGRAPHS], 3)
    return Batch(clip(captioner, 2, 3, 4) * mask.unsqueeze(-1), mask, *taught, PARAGRAPHS)


def test_each_segment_is_taught_what_repeats_the_least() -> None:
    paragraphs = [
        [[1, 2, 3, 4], [1, 2, 3, 4], [7, 8, 9]],
        [[9, 9, 9], [9, 9, 1, 2, 3], [1, 2, 3]],
        [[5], [1, 2], [3, 4, 5, 6, 7]],
    ]
    # before the second 123, 234 and 345 were said; before the third 912 and 129 as well
    assert least_repeated(paragraphs, [[1, 2, 3, 4, 5], [9, 1, 2, 9]]) == [[1, 2, 3, 4], [1, 2], [7, 8, 9]]
    assert least_repeated(paragraphs, [[7, 8, 9], [1, 2, 3]]) == [[1, 2, 3, 4], [1, 2, 3, 4], [3, 4, 5, 6, 7]]
    assert least_repeated(paragraphs, [[], []]) == paragraphs[0]
    assert least_repeated(paragraphs[:1], [[1, 2, 3, 4], [7, 8, 9]]) == paragraphs[0]
    assert least_repeated([[[4]]], []) == [[4]]


@pytest.mark.parametrize("variant", ["mart", "transformer-xl"])
def test_what_it_writes_greedily_is_remembered(variant: str) -> None:
    captioner = make(variant)
    given = batch(captioner)
    before = given.inputs.clone(), given.targets.clone()
    captioner.train()
    made = with_own_memory(captioner, given, max_length=6)
    assert captioner.training
    assert torch.equal(given.inputs, before[0]) and torch.equal(given.targets, before[1])
    found = decode_paragraphs(captioner, given.features, given.mask, torch.tensor([3, 2]), GREEDY)
    said = [[segment[0].tokens for segment in video] for video in found]
    assert made.remembered is not None and made.remembered.shape[:2] == (2, 2)
    own = made.remembered.tolist()
    for video, segment in ((0, 0), (0, 1), (1, 0)):
        sentence = [BOS, *said[video][segment]]
        assert own[video][segment] == sentence + [PAD] * (len(own[0][0]) - len(sentence))
    chosen = [least_repeated(*pair) for pair in zip(PARAGRAPHS, said, strict=True)]
    for video, segments in enumerate(chosen):
        for segment, sentence in enumerate(segments):
            assert [word for word in made.inputs[video, segment].tolist() if word] == [BOS, *sentence]
            assert [word for word in made.targets[video, segment].tolist() if word] == [*sentence, EOS]
    assert not made.inputs[1, 2].any() and not made.targets[1, 2].any()


def test_nothing_changes_where_nothing_is_remembered() -> None:
    for variant in ("mart-no-recurrence", "vanilla-transformer"):
        captioner = make(variant)
        given = batch(captioner)
        assert with_own_memory(captioner, given, max_length=6) is given
    captioner = make("mart")
    given = batch(captioner)
    alone = Batch(given.features[:, :1], given.mask[:, :1], given.inputs[:, :1], given.targets[:, :1])
    assert with_own_memory(captioner, alone, max_length=6) is alone
    silent = Batch(given.features, given.mask, given.inputs, torch.zeros_like(given.targets), PARAGRAPHS)
    assert with_own_memory(captioner, silent, max_length=6) is silent


@pytest.mark.parametrize("variant", ["mart", "transformer-xl"])
def test_segments_go_on_from_what_is_remembered(variant: str) -> None:
    """As if each segment were read alone, after the others with the sentences remembered."""
    captioner = make(variant)
    given = batch(captioner)
    own = torch.tensor([[[BOS, 4, 9, 9], [BOS, 8, PAD, PAD]], [[BOS, 7, 7, PAD], [BOS, PAD, PAD, PAD]]])
    found = captioner.teacher_forced(given.features, given.mask, given.inputs, own)
    for video, count in ((0, 3), (1, 2)):
        carried = None
        for segment in range(count):
            one = slice(video, video + 1)
            state = captioner.encode(given.features[one, segment], given.mask[one, segment], carried)
            read, _ = captioner.read(state, given.inputs[one, segment])
            words = int((given.inputs[video, segment] != PAD).sum())
            torch.testing.assert_close(found[video, segment, :words], read[0, :words])
            if segment < 2:
                carried = captioner.remember(state, own[one, segment])
    same = captioner.teacher_forced(given.features, given.mask, given.inputs, given.inputs[:, :-1])
    torch.testing.assert_close(same, captioner.teacher_forced(given.features, given.mask, given.inputs))
    assert not torch.allclose(same[0, 1], found[0, 1])


def test_mart_of_the_paper_with_other_sentences_remembered() -> None:
    """The second segment's words, in the plain re-computation, after another first sentence."""
    captioner = make("mart")
    features, mask = clip(captioner, 1, 2, 3), torch.ones(1, 2, 3, dtype=torch.bool)
    frames = [features[0, n].tolist() for n in range(2)]
    own, second = [BOS, 9, 4, 6], [BOS, 7, 5]
    expected = mart(weights(captioner), [(frames[0], own), (frames[1], second)], heads=2, layers=2, slots=2)
    words = torch.tensor([[[BOS, 10, 8], second]])
    z = captioner.teacher_forced(features, mask, words, torch.tensor([[own]]))
    found = captioner.logits(z[0, 1]).log_softmax(-1)
    torch.testing.assert_close(found.tolist(), expected[1], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_from_the_second_epoch_on_and_resumed_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught: list[Batch] = []

    def noted(captioner: ParagraphCaptioner, given: Batch, *, max_length: int) -> Batch:
        taught.append(with_own_memory(captioner, given, max_length=max_length))
        return taught[-1]

    monkeypatch.setattr(module, "with_own_memory", noted)
    settings = ["training.own_memory=true", "training.epochs=4", "training.save_every=0.0"]
    folders = [tmp_path / "whole", tmp_path / "broken"]
    for folder in folders:
        folder.mkdir()
    trainer(folders[0], "mart", *settings).run()  # 2 batches an epoch
    assert len(taught) == 6 and all(made.remembered is not None for made in taught)
    made = trainer(folders[1], "mart", *settings)
    made.reporter = Breaks(5)
    with pytest.raises(BrokenError):
        made.run()
    resumed(made).run()
    assert outcome(folders[0] / "run") == outcome(folders[1] / "run")


def test_captioners_of_single_captions_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"training.own_memory = true: m3 writes single captions"):
        load_recipe("m3-small", ["training.own_memory=true"])
    assert load_recipe("vanilla-transformer-small", ["training.own_memory=true"]).training.own_memory
