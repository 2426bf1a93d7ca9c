"""Soft attention and M3 against a plain Python implementation of the paper's equations."""

from __future__ import annotations

import pytest
import torch
from recurrent_reference import m3, soft_attention
from variants import all_real, clip, make, padded_pair, weights

from capvid.captioners.base import build

TOKENS = [1, 7, 4]


@pytest.mark.parametrize("options", [{}, {"projection": 4, "standardise": True}])
def test_soft_attention_steps_match_the_reference(options: dict) -> None:
    captioner = make("soft-attention", **options)
    features = clip(captioner, 1, 4)
    if options:
        captioner.standardise.fit(torch.randn(50, 5) * 3 + 1)
    expected = soft_attention(weights(captioner), features[0].tolist(), TOKENS)
    state = captioner.encode(features, all_real(1, 4))
    for token, logprobs in zip(TOKENS, expected, strict=True):
        logits, state, _ = captioner.step(torch.tensor([token]), state)
        torch.testing.assert_close(logits[0].log_softmax(-1).tolist(), logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, {"projection": 4, "standardise": True}])
def test_m3_steps_and_heads_match_the_reference(options: dict) -> None:
    captioner = make("m3", **options)
    features = clip(captioner, 1, 4)
    if options:
        captioner.standardise.fit(torch.randn(50, 5) * 3 + 1)
    expected, traces = m3(weights(captioner), features[0].tolist(), TOKENS)
    state = captioner.encode(features, all_real(1, 4))
    for token, logprobs, heads in zip(TOKENS, expected, traces, strict=True):
        logits, state, trace = captioner.step(torch.tensor([token]), state)
        for name, expected_weights in heads.items():
            torch.testing.assert_close(trace[name][0].tolist(), expected_weights, atol=1e-5, rtol=0, msg=name)
        torch.testing.assert_close(logits[0].log_softmax(-1).tolist(), logprobs, atol=1e-5, rtol=0)


def test_m3_blank_feature_takes_weight_from_the_frames() -> None:
    captioner = make("m3")
    state = captioner.encode(clip(captioner, 1, 4), all_real(1, 4))
    _, _, trace = captioner.step(torch.tensor([1]), state)
    assert 0 < trace["blank"].item() < 1
    assert trace["attention"].sum().item() == pytest.approx(1 - trace["blank"].item())


def test_m3_memory_rows_stay_distinct() -> None:
    torch.manual_seed(0)
    captioner = build("m3", make("m3").config.to_dict()).eval()
    state = captioner.encode(clip(captioner, 1, 4), all_real(1, 4))
    for token in (1, 5, 6, 7, 8, 9):
        _, state, trace = captioner.step(torch.tensor([token]), state)
    rows = state.memory["memory"][0]
    assert torch.cdist(rows, rows).fill_diagonal_(1).min() > 1e-3
    assert trace["read_decoder"].std() > 1e-4


@pytest.mark.parametrize("name", ["soft-attention", "m3"])
@pytest.mark.parametrize("projection", [0, 4])
def test_dropout_spares_the_features_of_the_cnn(name: str, projection: int) -> None:
    """Section 4.4: dropout on the output of fully connected layers."""
    captioner = make(name, projection=projection, dropout=0.9).train()
    features = clip(captioner, 2, 4)
    frames = captioner.encode(features, all_real(2, 4)).video["frames"][:, :4]
    if projection:
        assert (frames == 0).float().mean() > 0.5
    else:
        torch.testing.assert_close(frames, features, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"projection": 4, "standardise": True}])
@pytest.mark.parametrize("name", ["soft-attention", "m3"])
def test_two_padded_videos_match_the_reference_of_each(name: str, options: dict) -> None:
    captioner = make(name, **options)
    if options:
        captioner.standardise.fit(torch.randn(50, 5) * 3 + 1)
    features, mask, lengths = padded_pair(captioner)
    sentences = [TOKENS, [1, 3, 9]]
    expected = []
    for video, length, sentence in zip(features, lengths, sentences, strict=True):
        frames = video[:length].tolist()
        w = weights(captioner)
        expected.append(soft_attention(w, frames, sentence) if name != "m3" else m3(w, frames, sentence)[0])
    tokens = torch.tensor(sentences)
    forced = captioner(features, mask, tokens).log_softmax(-1)  # (2, L, V)
    torch.testing.assert_close(forced.tolist(), expected, atol=1e-10, rtol=0)
    state = captioner.encode(features, mask)
    for position in range(len(TOKENS)):
        logits, state, trace = captioner.step(tokens[:, position], state)
        by_step = [video[position] for video in expected]
        torch.testing.assert_close(logits.log_softmax(-1).tolist(), by_step, atol=1e-10, rtol=0)
        assert not trace["attention"][~mask].any()
