"""HAM against a plain Python implementation of the paper, and on a task that needs its memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from recurrent_reference import (
    Matrix,
    Vector,
    Weights,
    dot,
    lstm,
    product,
    project,
    rows,
    sigmoid,
    softmax,
    total,
)
from torch import Tensor
from torch.nn import functional as F
from variants import all_real, clip, make, weights

from capvid.captioners.base import build
from capvid.captioners.ham import HAM, weighted_sum
from capvid.errors import UsageError

TOKENS = [1, 7, 4, 9]
VARIANTS = ["ham", "ham-no-memory", "ham-no-temporal", "ham-no-temporal-no-memory"]


def weighted_mean(vectors: Matrix, weights: Vector) -> Vector:
    return [sum(s * v[d] for s, v in zip(weights, vectors, strict=True)) for d in range(len(vectors[0]))]


def lstm_layer(w: Weights, name: str, x: Vector, h: Vector, c: Vector) -> tuple[Vector, Vector]:
    """The LSTM printed after Eq. 5, with biases if the weights have them."""
    size = len(h)
    bias = w.get(f"{name}.input.bias", [0.0] * 4 * size)
    gates = []
    for gate in range(4):
        gates.append(
            total(
                product(rows(w[f"{name}.input.weight"], gate * size, size), x),
                product(rows(w[f"{name}.recurrent.weight"], gate * size, size), h),
                rows(bias, gate * size, size),
            )
        )
    i, f, o = ([sigmoid(x) for x in gate] for gate in gates[:3])
    g = [math.tanh(x) for x in gates[3]]
    c = [f[n] * c[n] + i[n] * g[n] for n in range(size)]
    return [o[n] * math.tanh(c[n]) for n in range(size)], c


def first_state(w: Weights, vectors: Matrix) -> tuple[Vector, Vector]:
    """h_0 and c_0 of the first layer: two tanh layers without biases on the mean vector."""
    mean = weighted_mean(vectors, [1 / len(vectors)] * len(vectors))
    inner = [math.tanh(x) for x in product(w["initial.0.weight"], mean)]
    both = [math.tanh(x) for x in product(w["initial.2.weight"], inner)]
    return both[: len(both) // 2], both[len(both) // 2 :]


def temporal_model(w: Weights, maps: Sequence[Matrix]) -> tuple[Matrix, Matrix, Matrix]:
    """Eq. 2-5 with two layers: the top states, and both layers' last h and c."""
    maps = [project(w, frame) for frame in maps]  # every location of every frame
    h, c = first_state(w, [location for frame in maps for location in frame])
    upper_h, upper_c = [0.0] * len(h), [0.0] * len(h)
    states = []
    for frame in maps:
        rho = softmax(product(w["temporal.location.weight"], upper_h))  # Eq. 2
        h, c = lstm_layer(w, "temporal.stack.0", weighted_mean(frame, rho), h, c)  # Eq. 3-5
        upper_h, upper_c = lstm_layer(w, "temporal.stack.1", h, upper_h, upper_c)
        states.append(upper_h)
    return states, [h, upper_h], [c, upper_c]


def ham(
    w: Weights, features: Sequence, tokens: Sequence[int], *, temporal: bool, memory: bool
) -> tuple[list[Vector], list[Vector]]:
    """Return the log-probabilities after each token, and the attention weights of the frames."""
    if temporal:
        states, (h, top), (c, top_c) = temporal_model(w, features)
    else:
        states = project(w, features)
        h, c = first_state(w, states)
        top, top_c = [0.0] * len(h), [0.0] * len(h)
    query = w["attention.query.weight"]  # W_g and, beside it, W_m
    m = m_cell = [0.0] * (len(query[0]) - len(h))
    logprobs, attended = [], []
    for position, token in enumerate(tokens):
        alpha = [0.0] * len(states)
        context = [0.0] * (len(m) if memory else len(states[0]))
        if position:
            scores = []
            for state in states:
                inner = total(
                    product(w["attention.key.weight"], state),
                    product([row[: len(h)] for row in query], top),
                    product([row[len(h) :] for row in query], m),
                )
                scores.append(dot(w["attention.score.weight"][0], [math.tanh(x) for x in inner]))  # Eq. 6
            alpha = softmax(scores)  # Eq. 7
            context = weighted_mean(states, alpha)  # Eq. 8
            if memory:
                m, m_cell = lstm_layer(w, "memory", context, m, m_cell)  # Eq. 9
                context = m
        h, c = lstm(w, w["embedding.weight"][token], context, h, c)  # Eq. 10
        top, top_c = lstm_layer(w, "upper.0", h, top, top_c)
        logprobs.append([math.log(p) for p in softmax(product(w["vocabulary.weight"], top))])  # Eq. 11
        attended.append(alpha)
    return logprobs, attended


@pytest.mark.parametrize("options", [{}, {"projection": 7, "standardise": True}])
@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_match_the_reference(variant: str, options: dict) -> None:
    captioner = make(variant, **options)
    features = clip(captioner, 1, 3)
    if options:
        captioner.standardise.fit([torch.randn(50, 5) * 3 + 1])
    expected, attended = ham(
        weights(captioner),
        features[0].tolist(),
        TOKENS,
        temporal="no-temporal" not in variant,
        memory="no-memory" not in variant,
    )
    state = captioner.encode(features, all_real(1, 3))
    for token, logprobs, alpha in zip(TOKENS, expected, attended, strict=True):
        logits, state, trace = captioner.step(torch.tensor([token]), state)
        torch.testing.assert_close(trace["attention"][0].tolist(), alpha, atol=1e-5, rtol=0)
        torch.testing.assert_close(logits[0].log_softmax(-1).tolist(), logprobs, atol=1e-5, rtol=0)
    assert "no-memory" in variant or state.memory["m"].abs().min() > 0


@pytest.mark.parametrize("options", [{}, {"projection": 7, "standardise": True}])
def test_without_ham_the_decoder_sees_the_video_in_its_first_state_only(options: dict) -> None:
    """No HAM + TEM: Eq. 2-5, then Eq. 10-11 without h_m."""
    captioner = make("ham-no-attention", **options)
    features = clip(captioner, 1, 3)
    if options:
        captioner.standardise.fit([torch.randn(50, 5) * 3 + 1])
    w = weights(captioner)
    assert not [name for name in w if name.startswith(("attention.", "memory.", "cell.extra."))]
    _, (h, top), (c, top_c) = temporal_model(w, features[0].tolist())
    w |= {"cell.input.weight": w["cell.word.weight"], "cell.input.bias": w["cell.word.bias"]}
    state = captioner.encode(features, all_real(1, 3))
    for token in TOKENS:
        h, c = lstm_layer(w, "cell", w["embedding.weight"][token], h, c)
        top, top_c = lstm_layer(w, "upper.0", h, top, top_c)
        expected = [math.log(p) for p in softmax(product(w["vocabulary.weight"], top))]
        logits, state, trace = captioner.step(torch.tensor([token]), state)
        torch.testing.assert_close(logits[0].log_softmax(-1).tolist(), expected, atol=1e-5, rtol=0)
        assert trace == {}


def test_memory_needs_attention() -> None:
    with pytest.raises(UsageError, match=r"attend = off: .* nothing to remember; set memory = off"):
        make("ham", attend=False)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("variant", [*VARIANTS, "ham-no-attention"])
def test_stepping_equals_teacher_forcing_with_any_depth(variant: str, layers: int) -> None:
    captioner = make(variant, layers=layers)
    features, mask, tokens = clip(captioner, 2, 3), all_real(2, 3), torch.tensor([TOKENS, TOKENS[::-1]])
    state = captioner.encode(features, mask)
    assert state.memory["h"].shape == (2, layers, 6)
    for position in range(4):
        logits, state, _ = captioner.step(tokens[:, position], state)
        torch.testing.assert_close(captioner(features, mask, tokens)[:, position], logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_initial_state_is_that_of_the_last_real_frame(variant: str) -> None:
    captioner = make(variant)
    features = clip(captioner, 3, 5)
    lengths = [2, 5, 1]
    mask = torch.arange(5) < torch.tensor(lengths).unsqueeze(-1)
    features[~mask] = 1e3
    batched = captioner.encode(features, mask)
    for row, length in enumerate(lengths):
        single = captioner.encode(features[row : row + 1, :length], all_real(1, length))
        for name in ("h", "c"):
            torch.testing.assert_close(batched.memory[name][row], single.memory[name][0])
    if "no-temporal" not in variant:
        last = batched.video["states"][range(3), [n - 1 for n in lengths]]
        torch.testing.assert_close(batched.memory["h"][:, -1], last)


def test_memory_stays_empty_before_the_first_word() -> None:
    captioner = make("ham")
    first = captioner.encode(clip(captioner, 1, 3), all_real(1, 3))
    _, second, _ = captioner.step(torch.tensor([1]), first)
    assert not second.memory["m"].any()
    _, third, _ = captioner.step(torch.tensor([5]), second)
    assert third.memory["m"].all()
    assert third.video is first.video


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_maps_are_computed_in_float32(dtype: torch.dtype) -> None:
    """Gradients below the range of half precision still reach W_p."""
    captioner = make("ham", standardise=True).float()
    features = clip(captioner, 2, 3).to(dtype)
    gradients = []
    for maps in (features, features.float()):
        captioner.zero_grad()
        (1e-8 * captioner(maps, all_real(2, 3), torch.tensor([TOKENS, TOKENS]))[..., 5].sum()).backward()
        gradients.append(captioner.temporal.location.weight.grad.clone() * 1e8)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 1e-3


def test_weighted_sum_gradient() -> None:
    torch.manual_seed(0)
    weights = torch.rand(2, 3, dtype=torch.double, requires_grad=True)
    vectors = torch.randn(2, 3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(weighted_sum, (weights, vectors))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "ham with temporal_model on expects feature maps"),
        (
            {"temporal_model": "off", "locations": 4},
            "ham with temporal_model off expects one vector per frame",
        ),
    ],
)
def test_features_of_the_wrong_shape_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build("ham", {"vocabulary_size": 11, "feature_width": 5, **options})


def test_switches_accept_on_and_off() -> None:
    small = {"vocabulary_size": 9, "feature_width": 5, "embedding": 3, "hidden": 4, "attention": 2}
    captioner = build("ham", {**small, "temporal_model": "off", "memory": "off"})
    assert isinstance(captioner, HAM)
    assert captioner.temporal is None and captioner.memory is None


# A synthetic task. The frames are shuffled; each holds a symbol, its own tag and the tag of the next frame,
# and one of them is marked as the first. The caption is "go", then the symbols along this chain. The next
# frame follows only from the last attended one, not from the words, because symbols repeat. A decoder of
# four units hardly has room for a symbol and a tag; the memory does.
LINKS, SYMBOLS = 4, 4


def chains(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return frames (B, T, D) and the tokens of their captions (B, T + 2)."""
    tags, positions = (torch.rand(count, LINKS, generator=generator).argsort(1) for _ in range(2))
    symbols = torch.randint(SYMBOLS, (count, LINKS), generator=generator)
    first = F.one_hot(torch.zeros(count, dtype=torch.long), LINKS).unsqueeze(-1)
    columns = [first, F.one_hot(tags, LINKS), F.one_hot(tags.roll(-1, 1), LINKS), F.one_hot(symbols, SYMBOLS)]
    frames = 3 * torch.cat(columns, -1).float()
    frames = frames.gather(1, positions.unsqueeze(-1).expand_as(frames))
    return frames, torch.cat([torch.tensor([[1, 4]]).expand(count, 2), symbols + 5], 1)


def accuracy_after_training(*, memory: bool, steps: int) -> float:
    """Return the share of correct symbols on new chains after ``steps`` batches of 64."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    sizes = {"embedding": 4, "hidden": 4, "attention": 32, "memory_width": 64, "bottleneck": 8, "layers": 1}
    width = 1 + 2 * LINKS + SYMBOLS
    options = {
        "vocabulary_size": 5 + SYMBOLS,
        "feature_width": width,
        "temporal_model": False,
        "dropout": 0.0,
    }
    captioner = build("ham", {**options, **sizes, "memory": memory})
    optimizer = torch.optim.Adam(captioner.parameters(), lr=2e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / steps)))
    for _ in range(steps):
        frames, tokens = chains(64, generator)
        logits = captioner(frames, all_real(64, LINKS), tokens[:, :-1])[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(captioner.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    frames, tokens = chains(1000, generator)
    with torch.no_grad():
        correct = captioner(frames, all_real(1000, LINKS), tokens[:, :-1])[:, 1:].argmax(-1) == tokens[:, 2:]
    return correct.float().mean().item()


@pytest.mark.slow
def test_chain_of_frames_needs_the_memory() -> None:
    assert accuracy_after_training(memory=True, steps=400) > 0.97
    assert accuracy_after_training(memory=False, steps=400) < 0.85
