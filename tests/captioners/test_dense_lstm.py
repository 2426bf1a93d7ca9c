"""DenseLSTM against a plain Python implementation of the paper, and its growing state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from fast_paths import needs_bf16
from recurrent_reference import (
    Matrix,
    Vector,
    Weights,
    attend,
    dot,
    lstm,
    product,
    project,
    rows,
    sigmoid,
    softmax,
    start,
    total,
)
from variants import VARIANTS, all_real, clip, make, weights

from capvid.captioners.base import build
from capvid.captioners.dense_lstm import SelfAttention
from capvid.decoding.beam_search import decode
from capvid.decoding.decoding_options import DecodingOptions
from capvid.errors import UsageError

DENSE = [name for name in VARIANTS if name.startswith("dense-lstm")]
GROWING = [name for name in DENSE if name.removeprefix("dense-lstm-") not in ("none", "add", "mean")]
TOKENS = [1, 7, 4, 9]
LONG = [1, *([5, 8, 10, 4, 6, 9, 7] * 3)]  # longer than the first and the second capacity


def encoder_cell(w: Weights, x: Vector, h: Vector, c: Vector) -> tuple[Vector, Vector]:
    """Eq. 1-6, the gates in torch's order: input, forget, cell input, output."""
    size, gates = len(h), []
    for gate in range(4):
        gates.append(
            total(
                product(rows(w["encoder.weight_ih_l0"], gate * size, size), x),
                product(rows(w["encoder.weight_hh_l0"], gate * size, size), h),
                rows(w["encoder.bias_ih_l0"], gate * size, size),
                rows(w["encoder.bias_hh_l0"], gate * size, size),
            )
        )
    i, f, o = ([sigmoid(x) for x in gates[n]] for n in (0, 1, 3))
    g = [math.tanh(x) for x in gates[2]]
    c = [i[n] * g[n] + f[n] * c[n] for n in range(size)]
    return [o[n] * math.tanh(c[n]) for n in range(size)], c


def encode(w: Weights, frames: Matrix) -> Matrix:
    """Eq. 7-8 and the concatenation of the forward and the backward pass."""
    size = len(w["encoder.weight_hh_l0"][0])
    forward, reverse = [], []
    h, c = [0.0] * size, [0.0] * size
    for frame in frames:
        h, c = encoder_cell(w, frame, h, c)
        forward.append(h)
    h, c = [0.0] * size, [0.0] * size
    for frame in reversed(frames):
        h, c = encoder_cell(w, frame, h, c)
        reverse.insert(0, h)
    return [f + r for f, r in zip(forward, reverse, strict=True)]


def weighted_sum(weights: Vector, states: Matrix) -> Vector:
    return [sum(a * s[n] for a, s in zip(weights, states, strict=True)) for n in range(len(states[0]))]


def mean(vectors: Matrix) -> Vector:
    return [sum(parts) / len(vectors) for parts in zip(*vectors, strict=True)]


def latest_guiding(w: Weights, states: Matrix) -> tuple[Vector, Vector]:
    """Eq. 20-22, from s_0 on."""
    scores = []
    for s in states:
        inner = total(
            product(w["fusion.attention.query.weight"], states[-1]),
            product(w["fusion.attention.key.weight"], s),
            w["fusion.attention.key.bias"],
        )
        scores.append(dot(w["fusion.attention.score.weight"][0], [math.tanh(x) for x in inner]))
    weights = softmax(scores)  # Eq. 21
    return weighted_sum(weights, states), weights  # Eq. 20


def self_attention(w: Weights, states: Matrix, version: int) -> tuple[Vector, Vector]:
    """Eq. 17-19 with the scale that the text names, and the versions of Table 4."""
    projections = w["fusion.heads.weight"]
    size = len(projections) // 2
    queries = [product(projections[:size], s) for s in states]
    keys = [product(projections[size:], s) for s in states]
    weights = [softmax([dot(q, k) / math.sqrt(size) for k in keys]) for q in queries]
    fused = [weighted_sum(row, states) for row in weights]  # Eq. 17
    for layer in ["feed_forward", "second"][: {1: 0, 2: 1, 3: 2, 4: 1}[version]]:
        matrix, bias = w[f"fusion.{layer}.weight"], w[f"fusion.{layer}.bias"]
        fused = [[max(0.0, x) for x in total(product(matrix, m), bias)] for m in fused]  # Eq. 18
    pooled = mean(fused) if version == 4 else [max(parts) for parts in zip(*fused, strict=True)]  # Eq. 19
    return pooled, mean(weights)


def fuse(w: Weights, fusion: str, version: int, states: Matrix) -> tuple[Vector, Vector | None]:
    """A_t of s_0 .. s_{t-1}."""
    if fusion == "latest-guiding":
        return latest_guiding(w, states)
    if fusion == "self-attention":
        return self_attention(w, states, version)
    return {"none": states[-1], "add": total(*states), "mean": mean(states)}[fusion], None


def dense_lstm(
    w: Weights, fusion: str, version: int, features: Matrix, tokens: Sequence[int]
) -> tuple[list[Vector], list[dict[str, Vector | None]]]:
    """Return the log-probabilities after each token, and the weights of frames and states at each step."""
    frames = encode(w, project(w, features))
    s, c = start(w, frames)
    states, logprobs, traces = [s], [], []
    for token in tokens:
        fused, state_weights = fuse(w, fusion, version, states)
        context, attention = attend(w, fused, frames)  # Eq. 14-16
        s, c = lstm(w, w["embedding.weight"][token], context, fused, c)  # Eq. 13
        states.append(s)
        logprobs.append([math.log(p) for p in softmax(product(w["vocabulary.weight"], s))])  # Eq. 25
        traces.append({"attention": attention, "states": state_weights})
    return logprobs, traces


@pytest.mark.parametrize("variant", DENSE)
@pytest.mark.parametrize("options", [{}, {"projection": 0}, {"standardise": True}])
def test_steps_match_the_reference(variant: str, options: dict) -> None:
    captioner = make(variant, **options)
    features = clip(captioner, 1, 4)
    if "standardise" in options:
        captioner.standardise.fit([torch.randn(50, 5) * 3 + 1])
    config = captioner.config
    expected = dense_lstm(weights(captioner), config.fusion, config.version, features[0].tolist(), TOKENS)
    state = captioner.encode(features, all_real(1, 4))
    for token, logprobs, expected_trace in zip(TOKENS, *expected, strict=True):
        logits, state, trace = captioner.step(torch.tensor([token]), state)
        torch.testing.assert_close(logits[0].log_softmax(-1).tolist(), logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            trace["attention"][0].tolist(), expected_trace["attention"], atol=1e-5, rtol=0
        )
        assert ("states" in trace) == (expected_trace["states"] is not None) == (variant in GROWING)
        if "states" in trace:
            torch.testing.assert_close(
                trace["states"][0].tolist(), expected_trace["states"], atol=1e-5, rtol=0
            )


def test_encoder_reverses_real_frames_only() -> None:
    """Videos of different lengths in a batch are encoded as if alone, with zeros after their end."""
    captioner = make("dense-lstm")
    w, lengths = weights(captioner), [3, 5, 1]
    frames = torch.randn(3, 5, 4, dtype=torch.double)
    mask = torch.arange(5) < torch.tensor(lengths).unsqueeze(-1)
    encoded = captioner.encoder.of(frames, mask)
    for row, length in enumerate(lengths):
        expected = encode(w, frames[row, :length].tolist())
        torch.testing.assert_close(encoded[row, :length].tolist(), expected, atol=1e-5, rtol=0)
        assert not encoded[row, length:].any()


def test_encoder_directions_share_parameters() -> None:
    captioner = make("dense-lstm")
    assert not captioner.encoder.bidirectional
    assert sum(p.numel() for p in captioner.encoder.parameters()) == 4 * 3 * (4 + 3 + 2)


@pytest.mark.parametrize("variant", DENSE)
def test_sentences_longer_than_the_initial_capacity(variant: str) -> None:
    """Stepping, while the capacity is doubled twice, equals teacher forcing."""
    captioner = make(variant)
    features, mask = clip(captioner, 2, 3), all_real(2, 3)
    tokens = torch.tensor([LONG, LONG[:1] + LONG[:0:-1]])
    forced = captioner(features, mask, tokens)
    capacities = set()
    with torch.no_grad():
        state = captioner.encode(features, mask)
        for position in range(tokens.shape[1]):
            logits, state, _ = captioner.step(tokens[:, position], state)
            torch.testing.assert_close(logits, forced[:, position])
            capacities.add(state.memory["past"].shape[1])
    assert sorted(capacities) == ([8, 16, 32] if variant in GROWING else [6])


@pytest.mark.parametrize("variant", GROWING)
def test_states_are_written_in_place(variant: str) -> None:
    captioner = make(variant)
    with torch.inference_mode():
        _, state, _ = captioner.step(
            torch.tensor([1]), captioner.encode(clip(captioner, 1, 3), all_real(1, 3))
        )
        address = state.memory["past"].data_ptr()
        for token in (5, 6, 7):
            _, state, _ = captioner.step(torch.tensor([token]), state)
            assert state.memory["past"].data_ptr() == address


@pytest.mark.parametrize("variant", GROWING)
def test_gradients_after_steps_without_gradients(variant: str) -> None:
    captioner = make(variant)
    features, mask = clip(captioner, 1, 3), all_real(1, 3)
    with torch.no_grad():
        state = captioner.encode(features, mask)
        for token in LONG[:3]:
            _, state, _ = captioner.step(torch.tensor([token]), state)
    for token in LONG[3:6]:
        logits, state, _ = captioner.step(torch.tensor([token]), state)
    torch.testing.assert_close(logits, captioner(features, mask, torch.tensor([LONG[:6]]))[:, -1])
    logits.sum().backward()
    assert captioner.cell.recurrent.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("variant", DENSE)
def test_beam_logprobs_of_long_sentences(variant: str) -> None:
    """The log-probabilities of beams, whose states are reordered at every word, equal teacher forcing."""
    captioner = make(variant)
    features, mask = clip(captioner, 2, 4), all_real(2, 4)
    with torch.no_grad():
        beams = decode(
            captioner,
            features,
            mask,
            DecodingOptions(beam_size=3, min_length=9, max_length=18, num_captions=3),
        )
    for row, hypotheses in enumerate(beams):
        for hypothesis in hypotheses:
            tokens = torch.tensor([[1, *hypothesis.tokens]])
            logits = captioner(features[row : row + 1], mask[row : row + 1], tokens)[0]
            expected = logits.float().log_softmax(-1)[range(tokens.shape[1]), [*hypothesis.tokens, 2]]
            assert hypothesis.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert all(len(h.tokens) > 8 for hypotheses in beams for h in hypotheses)


@needs_bf16
@pytest.mark.parametrize("variant", ["dense-lstm", "dense-lstm-self-attention-2"])
def test_half_precision(variant: str) -> None:
    torch.manual_seed(0)
    captioner = build(VARIANTS[variant][0], VARIANTS[variant][1]).eval()
    features, mask, tokens = clip(captioner, 2, 3), all_real(2, 3), torch.tensor([LONG[:6]] * 2)
    full = captioner(features, mask, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        half = captioner(features, mask, tokens)
    torch.testing.assert_close(half.float(), full, atol=0.05, rtol=0)


@pytest.mark.parametrize("version", [0, 5])
def test_unknown_versions_are_refused(version: int) -> None:
    with pytest.raises(UsageError, match=r"version (must be|= 5)"):
        make("dense-lstm-self-attention-2", version=version)


def test_version_without_self_attention_is_refused() -> None:
    with pytest.raises(UsageError, match="version = 3: only fusion = self-attention has versions"):
        make("dense-lstm", version=3)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_versions_of_self_attention(number: int) -> None:
    torch.manual_seed(number)
    fusion = SelfAttention(hidden=3, width=2, version=number).double()
    states = 3 * torch.randn(4, 1, 3, dtype=torch.float64)
    with torch.no_grad():
        past = fusion.first(states[0])
        for count, s in enumerate(states[1:], 1):
            past = fusion.add(past, s, count)
        fused, shares = fusion(past, len(states))
    w = {f"fusion.{name}": tensor.tolist() for name, tensor in fusion.state_dict().items()}
    expected, expected_shares = self_attention(w, states[:, 0].tolist(), number)
    assert fused[0].tolist() == pytest.approx(expected)
    assert shares[0].tolist() == pytest.approx(expected_shares)
