"""Key-value memory against a plain Python implementation of the paper, and on synthetic tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from recurrent_reference import Matrix, Vector, Weights, dot, product, rows, sigmoid, softmax, start, total
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from variants import all_real, clip, make, padded_pair, weights

from capvid.captioners.base import build
from capvid.captioners.checkpoint import load_checkpoint
from capvid.datasets.dataset import CaptionedVideo
from capvid.errors import UsageError
from capvid.features.feature_store import FeatureStore
from capvid.training.recipe import load_recipe
from capvid.training.trainer import Trainer

TOKENS = [1, 7, 4]
STREAMS = {
    "frames alone": {},
    "frames projected": {"projection": 4, "standardise": True},
    "values": {"value_width": 2},
    "values projected": {"projection": 4, "value_width": 2, "standardise": True},
}


def mean(vectors: Matrix) -> Vector:
    return [x / len(vectors) for x in total(*vectors)]


def weighted_sum(weights: Vector, vectors: Matrix) -> Vector:
    """Eq. 3."""
    return total(*([weight * x for x in vector] for weight, vector in zip(weights, vectors, strict=True)))


def linear(w: Weights, name: str, x: Vector) -> Vector:
    return total(product(w[f"{name}.weight"], x), w[f"{name}.bias"])


def lstm(w: Weights, name: str, suffix: str, x: Vector, h: Vector, c: Vector) -> tuple[Vector, Vector]:
    """A plain LSTM with torch's weights; the rows are those of i, f, the candidate and o."""
    gates = total(
        product(w[f"{name}.weight_ih{suffix}"], x),
        product(w[f"{name}.weight_hh{suffix}"], h),
        w[f"{name}.bias_ih{suffix}"],
        w[f"{name}.bias_hh{suffix}"],
    )
    i, f, candidate, o = (rows(gates, gate * len(h), len(h)) for gate in range(4))
    c = [sigmoid(i[n]) * math.tanh(candidate[n]) + sigmoid(f[n]) * c[n] for n in range(len(h))]
    return [sigmoid(o[n]) * math.tanh(c[n]) for n in range(len(h))], c


def decoder(w: Weights, word: Vector, value: Vector, h: Vector, c: Vector) -> tuple[Vector, Vector]:
    """Eq. 4-9; the rows are those of i, f, o and the candidate."""
    gates = total(
        product(w["cell.recurrent.weight"], h),
        product(w["cell.word.weight"], word),
        product(w["cell.extra.weight"], value),
        w["cell.word.bias"],
    )
    i, f, o, candidate = (rows(gates, gate * len(h), len(h)) for gate in range(4))
    c = [sigmoid(i[n]) * math.tanh(candidate[n]) + sigmoid(f[n]) * c[n] for n in range(len(h))]
    return [sigmoid(o[n]) * c[n] for n in range(len(h))], c


def slots(w: Weights, features: Matrix, value_width: int) -> tuple[Matrix, Matrix]:
    """Return the keys and values of each frame."""
    if "standardise.mean" in w:
        statistics = (w["standardise.mean"], w["standardise.scale"])
        features = [[(x - m) * s for x, m, s in zip(f, *statistics, strict=True)] for f in features]
    width = len(features[0]) - value_width
    frames = [f[:width] for f in features]
    values = [f[width:] for f in features] if value_width else frames
    if "projection.frame.weight" in w:
        frames = [linear(w, "projection.frame", f) for f in frames]
        values = [linear(w, "projection.value", v) for v in values]
    elif "projection.weight" in w:
        frames = values = [linear(w, "projection", f) for f in frames]
    if "encoder.weight_ih_l0" not in w:
        return frames, values
    keys, h = [], [0.0] * len(w["encoder.weight_hh_l0"][0])
    c = h
    for frame in frames:
        h, c = lstm(w, "encoder", "_l0", frame, h, c)  # Eq. 2
        keys.append(h)
    return keys, values


def kv_memory(
    w: Weights, features: Matrix, tokens: Sequence[int], addressing: str, value_width: int
) -> tuple[list[Vector], list[Vector]]:
    """Return the log-probabilities after each token, and the weights of the slots."""
    keys, values = slots(w, features, value_width)
    h, c = start(w, keys)
    h_k = key_read = mean(keys)
    c_k = [0.0] * len(h_k)
    logprobs, attention = [], []
    for token in tokens:
        word = w["embedding.weight"][token]
        if addressing == "memory-lstm":
            h_k, c_k = lstm(w, "addressing", "", key_read, h_k, c_k)  # Eq. 11
        else:
            h_k = key_read
        q = product(w["attention.query.weight"], h if addressing == "none" else h_k + h)  # Eq. 12
        scores = []
        for key in keys:
            inner = total(q, product(w["attention.key.weight"], key))
            scores.append(dot(w["attention.score.weight"][0], [math.tanh(x) for x in inner]))  # Eq. 13
        alpha = softmax(scores)  # Eq. 14
        key_read, value = weighted_sum(alpha, keys), weighted_sum(alpha, values)
        h, c = decoder(w, word, value, h, c)
        logprobs.append([math.log(p) for p in softmax(linear(w, "output", h + word + value))])  # Eq. 10
        attention.append(alpha)
    return logprobs, attention


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("encoder", ["lstm", "none"])
@pytest.mark.parametrize("addressing", ["memory-lstm", "last-read", "none"])
def test_steps_match_the_reference(addressing: str, encoder: str, streams: str) -> None:
    options = STREAMS[streams]
    captioner = make(f"kv-memory-{addressing}-{encoder}", **options)
    features = clip(captioner, 1, 4)
    if captioner.config.standardise:
        captioner.standardise.fit([torch.randn(50, 5) * 3 + 1])
    expected, attention = kv_memory(
        weights(captioner), features[0].tolist(), TOKENS, addressing, options.get("value_width", 0)
    )
    state = captioner.encode(features, all_real(1, 4))
    for token, logprobs, alpha in zip(TOKENS, expected, attention, strict=True):
        logits, state, trace = captioner.step(torch.tensor([token]), state)
        torch.testing.assert_close(trace["attention"][0].tolist(), alpha, atol=1e-5, rtol=0)
        torch.testing.assert_close(logits[0].log_softmax(-1).tolist(), logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("encoder", ["lstm", "none"])
@pytest.mark.parametrize("addressing", ["memory-lstm", "last-read", "none"])
def test_two_padded_videos_match_the_reference_of_each(addressing: str, encoder: str, streams: str) -> None:
    options = STREAMS[streams]
    captioner = make(f"kv-memory-{addressing}-{encoder}", **options)
    if captioner.config.standardise:
        captioner.standardise.fit([torch.randn(50, 5) * 3 + 1])
    features, mask, lengths = padded_pair(captioner)
    sentences, w = [TOKENS, [1, 3, 9]], weights(captioner)
    both = [
        kv_memory(w, video[:length].tolist(), sentence, addressing, options.get("value_width", 0))
        for video, length, sentence in zip(features, lengths, sentences, strict=True)
    ]
    expected = [logprobs for logprobs, _ in both]
    tokens = torch.tensor(sentences)
    forced = captioner(features, mask, tokens).log_softmax(-1)  # (2, L, V)
    torch.testing.assert_close(forced.tolist(), expected, atol=1e-10, rtol=0)
    state = captioner.encode(features, mask)
    for position in range(len(TOKENS)):
        logits, state, trace = captioner.step(tokens[:, position], state)
        by_step = [video[position] for video in expected]
        torch.testing.assert_close(logits.log_softmax(-1).tolist(), by_step, atol=1e-10, rtol=0)
        alpha = [attention[position] + [0.0] * (4 - len(attention[position])) for _, attention in both]
        torch.testing.assert_close(trace["attention"].tolist(), alpha, atol=1e-10, rtol=0)


@pytest.mark.parametrize("width", [5, 6])
def test_value_width_must_leave_frame_features(width: int) -> None:
    with pytest.raises(
        UsageError, match=rf"value_width = {width}: the features are 5 wide .* frame features"
    ):
        make("kv-memory-values", value_width=width)


SETTINGS = [
    "model.value_width=6",
    "model.embedding=24",
    "model.hidden=48",
    "model.encoder_hidden=32",
    "model.attention=16",
    "model.projection=32",
    "model.dropout=0.0",
    "data.min_count=1",
    "data.frame_dropout=0.0",
    "training.epochs=50",
    "training.batch_size=10",
    "training.label_smoothing=0.0",
    "training.learning_rate=0.01",
    "training.average=0.9",
    "training.patience=50",
    "training.precision=fp32",
]
NOUNS = ["man", "woman", "dog", "cat", "girl"]
VERBS = ["sings slowly", "jumps over a wall"]

FRAMES, SYMBOLS, FIRST = 6, 8, 4


def chain_task(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return features (N, T, 2 T + 1 + S) and tokens (N, T) of frames that form a chain.

    The key of each frame holds its position, the position of the frame to name next, and a mark on the first
    one; its value is the symbol to name. Positions are drawn anew per video, so counting words is no help.
    """
    positions = torch.rand(count, FRAMES, generator=generator).argsort(1)
    symbols = torch.randint(SYMBOLS, (count, FRAMES), generator=generator)
    position_codes, marks = (
        F.one_hot(positions, FRAMES),
        F.one_hot(torch.zeros(count, dtype=torch.long), FRAMES),
    )
    columns = [position_codes, position_codes.roll(-1, 1), marks.unsqueeze(-1), F.one_hot(symbols, SYMBOLS)]
    in_order = torch.cat(columns, -1).float()
    rows = positions.argsort(1).unsqueeze(-1).expand_as(in_order)
    return in_order.gather(1, rows), symbols + FIRST


def order_task(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return features (N, T, S) and tokens (N, T) of frames whose symbols are named in temporal order."""
    symbols = torch.randint(SYMBOLS, (count, FRAMES), generator=generator)
    return F.one_hot(symbols, SYMBOLS).float(), symbols + FIRST


def accuracy_after_training(task: Callable[..., tuple[Tensor, Tensor]], **options: Any) -> list[float]:
    """Return the accuracy at each position of 500 new captions after at most 450 batches of 64."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    sizes = {"vocabulary_size": FIRST + SYMBOLS, "feature_width": task(1, generator)[0].shape[-1]}
    sizes |= {"embedding": 8, "hidden": 16, "encoder_hidden": 32, "attention": 32}
    captioner = build("kv-memory", {**sizes, "dropout": 0.0, **options})
    optimizer = torch.optim.Adam(captioner.parameters(), lr=0.01)

    def logits_of(features: Tensor, words: Tensor) -> Tensor:
        return captioner(features, all_real(len(words), FRAMES), F.pad(words[:, :-1], (1, 0), value=1))

    mastered = 0  # consecutive batches with a low loss
    for _ in range(450):
        features, words = task(64, generator)
        loss = F.cross_entropy(logits_of(features, words).flatten(0, 1), words.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(captioner.parameters(), 5.0)
        optimizer.step()
        mastered = mastered + 1 if loss < 0.02 else 0
        if mastered == 5:
            break
    features, words = task(500, generator)
    with torch.no_grad():
        return (logits_of(features, words).argmax(-1) == words).float().mean(0).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("addressing", ["memory-lstm", "last-read", "none"])
def test_addressing_follows_a_chain_of_keys(addressing: str) -> None:
    """The key read last points to the next one, which only the addressing modes feed into the next query.

    Without addressing, the decoder sees only symbols and has to guess which comes next, except for the first,
    which is marked, and the last, which is left over.
    """
    accuracy = accuracy_after_training(chain_task, addressing=addressing, encoder="none", value_width=SYMBOLS)
    if addressing == "none":
        assert accuracy[0] > 0.99
        assert max(accuracy[1:4]) < 0.6
    else:
        assert min(accuracy) > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["lstm", "none"])
def test_encoder_provides_temporal_order(encoder: str) -> None:
    """Without the encoder, keys and values are a bag of frames without order."""
    accuracy = accuracy_after_training(order_task, encoder=encoder)
    assert min(accuracy[:4]) > 0.99 if encoder == "lstm" else max(accuracy[:4]) < 0.6


@pytest.mark.slow
def test_captioner_memorises_ten_captions(tmp_path: Path) -> None:
    """Train by the recipe on keys and values in two files; only the values distinguish the videos."""
    generator = torch.Generator().manual_seed(0)
    videos, keys, values = [], {}, {}
    for number in range(10):
        caption = f"a {NOUNS[number % 5]} {VERBS[number // 5]}"
        semantic = torch.randn(3, 6, generator=generator)
        for split in ("train", "val"):
            name = f"{split}{number}"
            videos.append(CaptionedVideo(name, split, (caption,)))
            keys[name], values[name] = torch.eye(3, 4), semantic.clone()
    save_file(keys, tmp_path / "keys.safetensors")
    save_file(values, tmp_path / "values.safetensors")
    trainer = Trainer(
        load_recipe("kv-memory-small", SETTINGS),
        videos=videos,
        store=FeatureStore([tmp_path / "keys.safetensors", tmp_path / "values.safetensors"]),
        folder=tmp_path / "run",
        device=torch.device("cpu"),
        reporter=Mock(),
    )
    best, _ = trainer.run()
    assert best.cider > 9.9  # every caption is reproduced word for word
    saved = load_checkpoint(tmp_path / "run").captioner
    assert saved.config == trainer.captioner.config
