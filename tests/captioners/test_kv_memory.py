"""Key-value memory against a plain re-computation of the paper's equations, and on tasks made for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from reference import Matrix, Vector, Weights, dot, product, rows, sigmoid, softmax, start, total
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from variants import all_real, clip, make, weights

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


def mixed(shares: Vector, vectors: Matrix) -> Vector:
    """Eq. 3."""
    return total(*([share * x for x in vector] for share, vector in zip(shares, vectors, strict=True)))


def linear(w: Weights, name: str, x: Vector) -> Vector:
    return total(product(w[f"{name}.weight"], x), w[f"{name}.bias"])


def lstm(w: Weights, name: str, end: str, x: Vector, h: Vector, c: Vector) -> tuple[Vector, Vector]:
    """A plain LSTM with the weights of torch's; its rows are those of i, f, the candidate and o."""
    both = total(
        product(w[f"{name}.weight_ih{end}"], x),
        product(w[f"{name}.weight_hh{end}"], h),
        w[f"{name}.bias_ih{end}"],
        w[f"{name}.bias_hh{end}"],
    )
    i, f, candidate, o = (rows(both, gate * len(h), len(h)) for gate in range(4))
    c = [sigmoid(i[n]) * math.tanh(candidate[n]) + sigmoid(f[n]) * c[n] for n in range(len(h))]
    return [sigmoid(o[n]) * math.tanh(c[n]) for n in range(len(h))], c


def decoder(w: Weights, word: Vector, value: Vector, h: Vector, c: Vector) -> tuple[Vector, Vector]:
    """Eq. 4-9; the rows are those of i, f, o and the candidate."""
    both = total(
        product(w["cell.recurrent.weight"], h),
        product(w["cell.word.weight"], word),
        product(w["cell.extra.weight"], value),
        w["cell.word.bias"],
    )
    i, f, o, candidate = (rows(both, gate * len(h), len(h)) for gate in range(4))
    c = [sigmoid(i[n]) * math.tanh(candidate[n]) + sigmoid(f[n]) * c[n] for n in range(len(h))]
    return [sigmoid(o[n]) * c[n] for n in range(len(h))], c


def slots(w: Weights, features: Matrix, value_width: int) -> tuple[Matrix, Matrix]:
    """Keys and values of each frame."""
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
    """Log-probabilities of the next word after each token, and the weights of the slots."""
    keys, values = slots(w, features, value_width)
    h, c = start(w, keys)
    h_k = key_read = mean(keys)
    c_k = [0.0] * len(h_k)
    said, attention = [], []
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
        key_read, value = mixed(alpha, keys), mixed(alpha, values)
        h, c = decoder(w, word, value, h, c)
        said.append([math.log(p) for p in softmax(linear(w, "output", h + word + value))])  # Eq. 10
        attention.append(alpha)
    return said, attention


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("encoder", ["lstm", "none"])
@pytest.mark.parametrize("addressing", ["memory-lstm", "last-read", "none"])
def test_steps(addressing: str, encoder: str, streams: str) -> None:
    options = STREAMS[streams]
    captioner = make(f"kv-memory-{addressing}-{encoder}", **options)
    features = clip(captioner, 1, 4)
    if captioner.config.standardise:
        captioner.standardise.fit([torch.randn(50, 5) * 3 + 1])
    expected, attention = kv_memory(
        weights(captioner), features[0].tolist(), TOKENS, addressing, options.get("value_width", 0)
    )
    state = captioner.encode(features, all_real(1, 4))
    for token, said, alpha in zip(TOKENS, expected, attention, strict=True):
        logits, state, trace = captioner.step(torch.tensor([token]), state)
        torch.testing.assert_close(trace["attention"][0].tolist(), alpha, atol=1e-5, rtol=0)
        torch.testing.assert_close(logits[0].log_softmax(-1).tolist(), said, atol=1e-5, rtol=0)


@pytest.mark.parametrize("width", [5, 6])
def test_values_must_leave_columns_for_the_frames(width: int) -> None:
    with pytest.raises(
        UsageError, match=rf"value_width = {width}: the features are 5 wide .* frame features"
    ):
        make("kv-memory-values", value_width=width)


SMALL = [
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


def ring(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Frames in any order, each with its place, the place of the frame to name next, a mark on the first one.

    Places are dealt anew for every video, so that counting words tells nothing. They stand in the keys alone;
    the values are the symbols to name. Hence features (N, T, 2 T + 1 + S) and words (N, T).
    """
    places = torch.rand(count, FRAMES, generator=generator).argsort(1)
    symbols = torch.randint(SYMBOLS, (count, FRAMES), generator=generator)
    own, marks = F.one_hot(places, FRAMES), F.one_hot(torch.zeros(count, dtype=torch.long), FRAMES)
    named = [own, own.roll(-1, 1), marks.unsqueeze(-1), F.one_hot(symbols, SYMBOLS)]
    in_order = torch.cat(named, -1).float()
    rows = places.argsort(1).unsqueeze(-1).expand_as(in_order)
    return in_order.gather(1, rows), symbols + FIRST


def film(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Frames show a symbol each, to be named in the order of time: features (N, T, S) and words (N, T)."""
    symbols = torch.randint(SYMBOLS, (count, FRAMES), generator=generator)
    return F.one_hot(symbols, SYMBOLS).float(), symbols + FIRST


def accuracy_after_training(task: Callable[..., tuple[Tensor, Tensor]], **options: Any) -> list[float]:
    """Share of right words at each place of 500 new captions, after 450 batches of 64, or fewer that do."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    sizes = {"vocabulary_size": FIRST + SYMBOLS, "feature_width": task(1, generator)[0].shape[-1]}
    sizes |= {"embedding": 8, "hidden": 16, "encoder_hidden": 32, "attention": 32}
    captioner = build("kv-memory", {**sizes, "dropout": 0.0, **options})
    optimizer = torch.optim.Adam(captioner.parameters(), lr=0.01)

    def said(features: Tensor, words: Tensor) -> Tensor:
        return captioner(features, all_real(len(words), FRAMES), F.pad(words[:, :-1], (1, 0), value=1))

    mastered = 0  # batches in a row
    for _ in range(450):
        features, words = task(64, generator)
        loss = F.cross_entropy(said(features, words).flatten(0, 1), words.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(captioner.parameters(), 5.0)
        optimizer.step()
        mastered = mastered + 1 if loss < 0.02 else 0
        if mastered == 5:
            break
    features, words = task(500, generator)
    with torch.no_grad():
        return (said(features, words).argmax(-1) == words).float().mean(0).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("addressing", ["memory-lstm", "last-read", "none"])
def test_keys_that_were_read_lead_to_the_next(addressing: str) -> None:
    """What was read tells what to read next, and only addressing by it brings that to the next query.

    Without it the decoder gets symbols, whatever it attends to, and can but guess which of those not yet
    named comes next: the first one it finds by its mark, the last one as it is left over.
    """
    right = accuracy_after_training(ring, addressing=addressing, encoder="none", value_width=SYMBOLS)
    if addressing == "none":
        assert right[0] > 0.99
        assert max(right[1:4]) < 0.6
    else:
        assert min(right) > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["lstm", "none"])
def test_the_encoder_tells_the_order_of_time(encoder: str) -> None:
    """Without it, keys and values are a bag of frames: the order in which they come changes nothing."""
    right = accuracy_after_training(film, encoder=encoder)
    assert min(right[:4]) > 0.99 if encoder == "lstm" else max(right[:4]) < 0.6


@pytest.mark.slow
def test_ten_captions_are_learned_by_heart(tmp_path: Path) -> None:
    """By the recipe, from files of frame features and of values; only the values tell the videos apart."""
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
        load_recipe("kv-memory-small", SMALL),
        videos=videos,
        store=FeatureStore([tmp_path / "keys.safetensors", tmp_path / "values.safetensors"]),
        folder=tmp_path / "run",
        device=torch.device("cpu"),
        reporter=Mock(),
    )
    best, _ = trainer.run()
    assert best.cider > 9.9  # every caption, word for word
    saved = load_checkpoint(tmp_path / "run").captioner
    assert saved.config == trainer.captioner.config
