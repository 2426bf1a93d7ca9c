"""Properties of every paragraph captioner: segments, padding, caches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from variants import VARIANTS, all_real, clip, make

from capvid.captioners.base import CAPTIONERS, ParagraphCaptioner, build
from capvid.errors import UsageError

PARAGRAPHS = [variant for variant, (name, _) in VARIANTS.items() if CAPTIONERS[name].paragraphs]
RECURRENT = [variant for variant in PARAGRAPHS if make(variant).recurrent]

# Two videos of three segments: padded tokens from BOS on, and the number of real frames.
WORDS = torch.tensor(
    [[[1, 5, 6, 0], [1, 8, 9, 7], [1, 4, 0, 0]], [[1, 10, 3, 4], [1, 4, 4, 0], [1, 6, 9, 0]]]
)
FRAMES = torch.tensor([[3, 4, 2], [4, 1, 3]])


def make_features(captioner: ParagraphCaptioner) -> tuple[Tensor, Tensor]:
    """Return features (2, 3, 4, D) and their mask."""
    torch.manual_seed(8)
    return clip(captioner, 2, 3, 4), torch.arange(4) < FRAMES.unsqueeze(-1)


@pytest.mark.parametrize("variant", PARAGRAPHS)
def test_stepping_through_segments_equals_teacher_forcing(variant: str) -> None:
    captioner = make(variant)
    features, mask = make_features(captioner)
    forced = captioner(features, mask, WORDS)
    carried = None
    for segment in range(3):
        state = first = captioner.encode(features[:, segment], mask[:, segment], carried)
        for position, tokens in enumerate(WORDS[:, segment].unbind(1)):
            logits, state, _ = captioner.step(tokens, state)
            real = tokens != 0
            torch.testing.assert_close(logits[real], forced[real, segment, position])
        carried = captioner.remember(first, WORDS[:, segment])
    assert bool(carried) == captioner.recurrent


@pytest.mark.parametrize("variant", PARAGRAPHS)
def test_padding_of_frames_words_and_segments_changes_nothing(variant: str) -> None:
    captioner = make(variant)
    features, mask = make_features(captioner)
    unpadded = captioner(features, mask, WORDS)
    padded_features = torch.cat(
        [features.masked_fill(~mask[..., None], 50.0), clip(captioner, 2, 3, 2, fill=1e3)], 2
    )
    padded_features = torch.cat([padded_features, clip(captioner, 2, 2, 6, fill=-1e3)], 1)
    real = torch.nn.functional.pad(mask, (0, 2, 0, 2))
    words = torch.nn.functional.pad(WORDS, (0, 3, 0, 2))
    padded = captioner(padded_features, real, words)
    assert padded.shape[:3] == (2, 5, 7)
    assert padded.isfinite().all()
    for row, segment in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        count = int((WORDS[row, segment] != 0).sum())
        torch.testing.assert_close(padded[row, segment, :count], unpadded[row, segment, :count])


@pytest.mark.parametrize("variant", PARAGRAPHS)
def test_videos_with_fewer_segments_are_unaffected(variant: str) -> None:
    captioner = make(variant)
    features, mask = make_features(captioner)
    words, real = WORDS.clone(), mask.clone()
    words[1, 1:], real[1, 1:] = 0, False  # the second video has one segment
    batched = captioner(features, real, words)
    torch.testing.assert_close(batched[:1], captioner(features[:1], mask[:1], WORDS[:1]))
    single = captioner(features[1:, :1], mask[1:, :1], WORDS[1:, :1])
    torch.testing.assert_close(batched[1:, :1], single)


@pytest.mark.parametrize("variant", PARAGRAPHS)
def test_segment_without_words_still_feeds_the_memory(variant: str) -> None:
    captioner = make(variant)
    features, mask = make_features(captioner)
    words = WORDS.clone()
    words[0, 1] = 0
    result = captioner(features, mask, words)
    assert result.isfinite().all()
    changed = features.clone()
    changed[0, 1] += torch.arange(features.shape[-1])  # a constant would be normalised away
    same = torch.allclose(result[0, 2, :2], captioner(changed, mask, words)[0, 2, :2])
    assert same == (not captioner.recurrent)


@pytest.mark.parametrize("variant", PARAGRAPHS)
def test_no_frames_and_no_words_stay_finite(variant: str) -> None:
    captioner = make(variant)
    features, no_frames = clip(captioner, 2, 3), torch.zeros(2, 3, dtype=torch.bool)
    carried = None
    for _ in range(2):
        state = captioner.encode(features, no_frames, carried)
        hidden, carried = captioner.read(state, torch.zeros(2, 4, dtype=torch.long))
        assert hidden.isfinite().all()
        assert all(tensor.isfinite().all() for tensor in carried.values())
        logits, _, trace = captioner.step(torch.tensor([1, 1]), state)
        assert logits.isfinite().all()
        assert trace["attention"].count_nonzero() == 0


@pytest.mark.parametrize("variant", PARAGRAPHS)
def test_long_sentences_outgrow_the_initial_cache(variant: str) -> None:
    captioner = make(variant)
    torch.manual_seed(1)
    features, mask, tokens = clip(captioner, 2, 3), all_real(2, 3), torch.randint(1, 11, (2, 20))
    forced, state = captioner(features, mask, tokens), captioner.encode(features, mask)
    for position in range(20):
        logits, state, _ = captioner.step(tokens[:, position], state)
        torch.testing.assert_close(forced[:, position], logits)


@pytest.mark.parametrize("variant", PARAGRAPHS)
def test_trace_covers_only_frames_of_the_segment(variant: str) -> None:
    captioner = make(variant)
    features, mask = make_features(captioner)
    carried = None
    for segment in range(2):
        state = captioner.encode(features[:, segment], mask[:, segment], carried)
        _, _, trace = captioner.step(torch.tensor([1, 1]), state)
        attention = trace["attention"]
        assert attention.shape == (2, 4)
        assert torch.equal(attention > 0, mask[:, segment])
        assert (attention.sum(1) < 1).all()
        carried = captioner.remember(state, WORDS[:, segment])


@pytest.mark.parametrize("variant", RECURRENT)
def test_carried_state_depends_on_video_and_sentence(variant: str) -> None:
    captioner = make(variant)
    features, mask = make_features(captioner)
    first, real = features[:, 0], mask[:, 0]
    carried = captioner.remember(captioner.encode(first, real), WORDS[:, 0])
    other_words = WORDS[:, 0].where(WORDS[:, 0] < 5, 8)
    for video, words in ((first, other_words), (first + torch.arange(first.shape[-1]), WORDS[:, 0])):
        other = captioner.remember(captioner.encode(video, real), words)
        for name, tensor in carried.items():
            assert torch.equal(tensor, other[name]) == (name == "mask"), name


@pytest.mark.parametrize("variant", PARAGRAPHS)
def test_training_in_bfloat16(variant: str) -> None:
    captioner = make(variant, spread=0.2).float().train()
    features, mask = make_features(captioner)
    with torch.autocast("cpu", torch.bfloat16):
        loss = captioner(features, mask, WORDS).float().log_softmax(-1)[..., 5].mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in captioner.parameters())


@pytest.mark.parametrize("name", ["mart", "vanilla-transformer", "transformer-xl"])
def test_heads_must_divide_the_width(name: str) -> None:
    with pytest.raises(UsageError, match=r"hidden = 10, heads = 4") as error:
        build(name, {"vocabulary_size": 9, "feature_width": 5, "hidden": 10, "heads": 4})
    assert "hidden = 12" in str(error.value.remedy)
