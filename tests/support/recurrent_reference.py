"""Reference implementations of recurrent captioners: one video, plain lists of floats, no batching.

Written from the papers alone; only the weights, taken by name, are shared with the package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Vector = list[float]
Matrix = list[Vector]
Weights = dict[str, list]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softplus(x: float) -> float:
    return math.log(1 + math.exp(x))


def softmax(scores: Vector) -> Vector:
    total = sum(math.exp(s) for s in scores)
    return [math.exp(s) / total for s in scores]


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def product(matrix: Matrix, x: Vector) -> Vector:
    return [dot(row, x) for row in matrix]


def total(*vectors: Vector) -> Vector:
    return [sum(parts) for parts in zip(*vectors, strict=True)]


def rows(matrix: Sequence, first: int, count: int) -> list:
    """Return the rows of a matrix that belong to one head or gate."""
    return list(matrix[first : first + count])


def lstm(w: Weights, word: Vector, extra: Vector, h: Vector, c: Vector) -> tuple[Vector, Vector]:
    """M3, Eq. 1-6."""
    size = len(h)
    gates = []
    for gate in range(4):
        gates.append(
            total(
                product(rows(w["cell.word.weight"], gate * size, size), word),
                product(rows(w["cell.recurrent.weight"], gate * size, size), h),
                product(rows(w["cell.extra.weight"], gate * size, size), extra),
                rows(w["cell.word.bias"], gate * size, size),
            )
        )
    i, f, o = ([sigmoid(x) for x in gate] for gate in gates[:3])
    candidate = [math.tanh(x) for x in gates[3]]
    c = [i[n] * candidate[n] + f[n] * c[n] for n in range(size)]
    return [o[n] * math.tanh(c[n]) for n in range(size)], c


def attend(w: Weights, query: Vector, frames: Matrix) -> tuple[Vector, Vector]:
    """M3, Eq. 11-13: return the attended frame and the weights."""
    scores = []
    for frame in frames:
        hidden = total(
            product(w["attention.query.weight"], query),
            product(w["attention.key.weight"], frame),
            w["attention.key.bias"],
        )
        scores.append(dot(w["attention.score.weight"][0], [math.tanh(x) for x in hidden]))
    weights = softmax(scores)
    context = [sum(weights[n] * frames[n][d] for n in range(len(frames))) for d in range(len(frames[0]))]
    return context, weights


def next_word(w: Weights, context: Vector, h: Vector, word: Vector) -> Vector:
    """M3, Eq. 25-26: log-probabilities of the next word."""
    z = total(
        product(w["output.context.weight"], context),
        product(w["output.hidden.weight"], h),
        product(w["output.word.weight"], word),
        w["output.hidden.bias"],
    )
    z = [math.tanh(x) for x in z]
    logits = total(product(w["output.vocabulary.weight"], z), w["output.vocabulary.bias"])
    return [math.log(p) for p in softmax(logits)]


def start(w: Weights, frames: Matrix) -> tuple[Vector, Vector]:
    """Return h_0 and c_0 from the mean frame."""
    mean = [sum(frame[d] for frame in frames) / len(frames) for d in range(len(frames[0]))]
    both = [math.tanh(x) for x in total(product(w["initial.weight"], mean), w["initial.bias"])]
    return both[: len(both) // 2], both[len(both) // 2 :]


def project(w: Weights, features: Matrix) -> Matrix:
    """Return standardised and projected frames, if the captioner has these layers."""
    frames = features
    if "standardise.mean" in w:
        frames = [
            [(x - m) * s for x, m, s in zip(f, w["standardise.mean"], w["standardise.scale"], strict=True)]
            for f in frames
        ]
    if "projection.weight" in w:
        frames = [total(product(w["projection.weight"], f), w["projection.bias"]) for f in frames]
    return frames


def soft_attention(w: Weights, features: Matrix, tokens: Sequence[int]) -> list[Vector]:
    """Return the log-probabilities of the next word after each token."""
    frames = project(w, features)
    h, c = start(w, frames)
    logprobs = []
    for token in tokens:
        word = w["embedding.weight"][token]
        context, _ = attend(w, h, frames)
        h, c = lstm(w, word, context, h, c)
        logprobs.append(next_word(w, context, h, word))
    return logprobs


def address(memory: Matrix, key: Vector, beta: float) -> Vector:
    """M3, Eq. 21-23."""
    scores = []
    for row in memory:
        norms = math.sqrt(dot(row, row)) * math.sqrt(dot(key, key))
        scores.append(beta * dot(row, key) / (norms + 1e-8))
    return softmax(scores)


def read(memory: Matrix, weights: Vector) -> Vector:
    """M3, Eq. 10 and 17."""
    return [sum(weights[i] * memory[i][m] for i in range(len(memory))) for m in range(len(memory[0]))]


def write(memory: Matrix, weights: Vector, erase: Vector, add: Vector) -> Matrix:
    """M3, Eq. 8 and 15."""
    return [
        [row[m] * (1 - weight * erase[m]) + weight * add[m] for m in range(len(row))]
        for row, weight in zip(memory, weights, strict=True)
    ]


def head(matrix: Matrix, bias: Vector, source: Vector, first: int, count: int) -> Vector:
    return total(product(rows(matrix, first, count), source), rows(bias, first, count))


def m3(w: Weights, features: Matrix, tokens: Sequence[int]) -> tuple[list[Vector], list[dict[str, Vector]]]:
    """Return the log-probabilities after each token, and the five weight vectors of each step."""
    frames = project(w, features)
    h, c = start(w, frames)
    frames = [*frames, [0.0] * len(frames[0])]  # the blank feature, Eq. 14
    memory = w["memory"]
    m = len(memory[0])
    text, text_bias = w["text_heads.weight"], w["text_heads.bias"]
    visual, visual_bias = w["visual_head.weight"], w["visual_head.bias"]
    logprobs, traces = [], []
    for token in tokens:
        word = w["embedding.weight"][token]
        # Write the text (Eq. 8) by heads from h_{t-1}.
        key = [math.tanh(x) for x in head(text, text_bias, h, 0, m)]  # Eq. 19
        beta = softplus(head(text, text_bias, h, 5 * m, 1)[0])  # Eq. 20
        add = [math.tanh(x) for x in head(text, text_bias, h, 3 * m, m)]
        erase = [sigmoid(x) for x in head(text, text_bias, h, 4 * m, m)]
        write_text = address(memory, key, beta)
        memory = write(memory, write_text, erase, add)
        # Read for attention (Eq. 10), attend (Eq. 11-14).
        key = [math.tanh(x) for x in head(text, text_bias, h, m, m)]
        read_attention = address(memory, key, softplus(head(text, text_bias, h, 5 * m + 1, 1)[0]))
        context, attention = attend(w, read(memory, read_attention), frames)
        # Write the visual memory (Eq. 15) by a head from V_t.
        key = [math.tanh(x) for x in head(visual, visual_bias, context, 0, m)]
        add = [math.tanh(x) for x in head(visual, visual_bias, context, m, m)]
        erase = [sigmoid(x) for x in head(visual, visual_bias, context, 2 * m, m)]
        write_visual = address(memory, key, softplus(head(visual, visual_bias, context, 3 * m, 1)[0]))
        memory = write(memory, write_visual, erase, add)
        # Read for the decoder (Eq. 17), LSTM (Eq. 18).
        key = [math.tanh(x) for x in head(text, text_bias, h, 2 * m, m)]
        read_decoder = address(memory, key, softplus(head(text, text_bias, h, 5 * m + 2, 1)[0]))
        h, c = lstm(w, word, read(memory, read_decoder), h, c)
        logprobs.append(next_word(w, context, h, word))
        traces.append(
            {
                "write_text": write_text,
                "read_attention": read_attention,
                "attention": attention[:-1],
                "write_visual": write_visual,
                "read_decoder": read_decoder,
            }
        )
    return logprobs, traces
