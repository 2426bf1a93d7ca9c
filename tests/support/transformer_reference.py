"""Reference implementations of the MART paper's transformers: one video, plain lists of floats, no cache.

Written from the papers alone; only the weights, taken by name, are shared with the package.
A segment is (frames, words); every function here works on whole sequences of one segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from recurrent_reference import Matrix, Vector, Weights, dot, product, project, sigmoid, softmax, total

Segment = tuple[Matrix, Sequence[int]]
AttentionMask = Callable[[int, int], bool]


def linear(w: Weights, name: str, x: Vector) -> Vector:
    result = product(w[f"{name}.weight"], x)
    return total(result, w[f"{name}.bias"]) if f"{name}.bias" in w else result


def norm(w: Weights, name: str, x: Vector, epsilon: float = 1e-5) -> Vector:
    mean = sum(x) / len(x)
    variance = sum((value - mean) ** 2 for value in x) / len(x)
    normal = [(value - mean) / math.sqrt(variance + epsilon) for value in x]
    return [a * value + b for a, value, b in zip(w[f"{name}.weight"], normal, w[f"{name}.bias"], strict=True)]


def gelu(x: Vector) -> Vector:
    return [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x]


def encoding(position: int, width: int) -> Vector:
    """Vaswani et al., Section 3.5."""
    result = []
    for d in range(width):
        angle = position / 10000 ** (2 * (d // 2) / width)
        result.append(math.cos(angle) if d % 2 else math.sin(angle))
    return result


def causal(video: int, before: int = 0) -> AttentionMask:
    """Frames see the video; a word sees the video and the words up to itself; all see the ``before`` keys."""
    return lambda query, key: key < before + video or key - before <= query


def full_attention(query: int, key: int) -> bool:
    return True


def multi_head(
    w: Weights,
    name: str,
    heads: int,
    queries: Matrix,
    keys: Matrix,
    sees: AttentionMask,
    distances: bool = False,
) -> Matrix:
    """MultiHeadAtt(Q, K, V); ``distances`` adds relative positions, queries being the last keys."""
    width = len(queries[0]) // heads
    results = []
    for i, x in enumerate(queries):
        joined: Vector = []
        for head in range(heads):

            def project_head(matrix: str, y: Vector, first: int = head * width) -> Vector:
                return linear(w, f"{name}.{matrix}", y)[first : first + width]

            q, scores, values = project_head("query", x), [], []
            for j, key in enumerate(keys):
                if not sees(i, j):
                    continue
                score = dot(q, project_head("key", key))
                if distances:
                    relative = project_head("relative", encoding(len(keys) - len(queries) + i - j, len(x)))
                    score += dot(q, relative)
                    score += dot(w["content_bias"][head], project_head("key", key))
                    score += dot(w["position_bias"][head], relative)
                scores.append(score / math.sqrt(width))
                values.append(project_head("value", key))
            weights = softmax(scores)
            joined += [sum(a * v[d] for a, v in zip(weights, values, strict=True)) for d in range(width)]
        results.append(linear(w, f"{name}.output", joined) if f"{name}.output.weight" in w else joined)
    return results


def residual(w: Weights, name: str, x: Matrix, update: Matrix) -> Matrix:
    return [norm(w, name, total(a, b)) for a, b in zip(x, update, strict=True)]


def feed_forward(w: Weights, name: str, x: Matrix) -> Matrix:
    return [linear(w, f"{name}.2", gelu(linear(w, f"{name}.0", row))) for row in x]


def video_tokens(w: Weights, features: Matrix, absolute: bool) -> Matrix:
    frames = [norm(w, "frame.1", linear(w, "frame.0", frame)) for frame in project(w, features)]
    first, last = w["mark_embedding"]
    tokens = [total(token, w["type_embedding"][0]) for token in (first, *frames, last)]
    return [total(t, encoding(n, len(t))) if absolute else t for n, t in enumerate(tokens)]


def text_tokens(w: Weights, words: Sequence[int], absolute: bool) -> Matrix:
    vectors = [w["embedding.weight"][word] for word in words]
    tokens = [total(norm(w, "word.1", linear(w, "word.0", v)), w["type_embedding"][1]) for v in vectors]
    return [total(t, encoding(n, len(t))) if absolute else t for n, t in enumerate(tokens)]


def word_logprobs(w: Weights, hidden: Matrix) -> Matrix:
    """Return the log-probabilities of the next word after each of the words."""
    result = []
    for row in hidden:
        z = norm(w, "transform.2", gelu(linear(w, "transform.0", row)))
        result.append([math.log(p) for p in softmax(linear(w, "vocabulary", z))])
    return result


def mart(w: Weights, segments: Sequence[Segment], *, heads: int, layers: int, slots: int) -> list[Matrix]:
    """Section 3.2; without recurrence where ``slots`` is 0. Return :func:`word_logprobs` of each segment."""
    memories: list[Matrix] = []
    results = []
    for number, (features, words) in enumerate(segments):
        x = [*video_tokens(w, features, True), *text_tokens(w, words, True)]
        video = len(features) + 2
        for n in range(layers):
            name = f"layers.{n}"
            attended = multi_head(w, f"{name}.attention", heads, x, x, causal(video))
            middle = residual(w, f"{name}.attention_norm", x, attended)
            inner = middle
            if slots:
                if not number:
                    memories.append(first_memory(w, name, middle[:video]))
                memory = memories[n]
                inner = multi_head(
                    w, f"{name}.memory_attention", heads, middle, [*memory, *middle], causal(video, slots)
                )
                memories[n] = update_memory(w, f"{name}.updater", heads, memory, middle)
            fed = feed_forward(w, f"{name}.feed_forward", inner)
            x = residual(w, f"{name}.feed_forward_norm", middle, fed)
        results.append(word_logprobs(w, x[video:]))
    return results


def first_memory(w: Weights, name: str, video: Matrix) -> Matrix:
    mean = [sum(row[d] for row in video) / len(video) for d in range(len(video[0]))]
    return [
        norm(w, f"{name}.first.1", linear(w, f"{name}.first.0", total(mean, slot)))
        for slot in w[f"{name}.slots"]
    ]


def update_memory(w: Weights, name: str, heads: int, memory: Matrix, hidden: Matrix) -> Matrix:
    """S_t, C_t, Z_t, M_t."""
    width = len(memory[0])
    w_m, w_s, bias = w[f"{name}.memory.weight"], w[f"{name}.summary.weight"], w[f"{name}.summary.bias"]
    result = []
    for m, s in zip(
        memory, multi_head(w, f"{name}.attention", heads, memory, hidden, full_attention), strict=True
    ):
        c = total(product(w_m[:width], m), product(w_s[:width], s), bias[:width])
        z = total(product(w_m[width:], m), product(w_s[width:], s), bias[width:])
        result.append([(1 - sigmoid(z[d])) * math.tanh(c[d]) + sigmoid(z[d]) * m[d] for d in range(width)])
    return result


def authors_norm(w: Weights, name: str, x: Vector) -> Vector:
    return norm(w, name, x, 1e-12)


def authors_projection(w: Weights, name: str, x: Vector) -> Vector:
    rectified = [max(0.0, v) for v in linear(w, f"{name}.2", authors_norm(w, f"{name}.0", x))]
    return authors_norm(w, f"{name}.4", rectified)


def authors_tokens(w: Weights, features: Matrix, words: Sequence[int], start: int) -> Matrix:
    """Every token is a word and a frame: [VID] for frames, a frame of zeros for words."""
    first, last, middle = w["mark_embedding"]
    zeros = [0.0] * len(w["frame.0.weight"])
    frames = [zeros, *project(w, features), *[zeros] * (1 + len(words))]
    vectors = [first, *[middle] * len(features), last, *[w["embedding.weight"][word] for word in words]]
    video = len(features) + 2
    result = []
    for n, (frame, vector) in enumerate(zip(frames, vectors, strict=True)):
        token = total(authors_projection(w, "frame", frame), authors_projection(w, "word", vector))
        position = n if n < video else start + n - video
        kind = w["type_embedding"][int(n >= video)]
        result.append(authors_norm(w, "token_norm", total(token, kind, encoding(position, len(token)))))
    return result


def authors_mart(
    w: Weights, segments: Sequence[Segment], *, heads: int, layers: int, slots: int, start: int, length: int
) -> list[Matrix]:
    """As the authors' code computes MART; the end token is remembered where ``length`` leaves room."""
    memories: list[Matrix] = []
    results = []
    for number, (features, words) in enumerate(segments):
        video = len(features) + 2
        sentence = [*words, 2] if slots and len(words) < length else words
        x = authors_tokens(w, features, sentence, start)
        for n in range(layers):
            name = f"layers.{n}"
            attended = multi_head(w, f"{name}.attention", heads, x, x, causal(video))
            added = [total(*pair) for pair in zip(x, attended, strict=True)]
            middle = [authors_norm(w, f"{name}.attention_norm", row) for row in added]
            inner = [gelu(linear(w, f"{name}.feed_forward.0", row)) for row in middle]
            states = inner
            if slots:
                if not number:
                    memories.append(authors_first_memory(w, name, inner[:video]))
                memory = memories[n]
                states = multi_head(
                    w, f"{name}.memory_attention", heads, inner, [*memory, *inner], causal(video, slots)
                )
                memories[n] = update_memory(w, f"{name}.updater", heads, memory, inner)
            fed = [linear(w, f"{name}.feed_forward.2", row) for row in states]
            added = [total(*pair) for pair in zip(middle, fed, strict=True)]
            x = [authors_norm(w, f"{name}.feed_forward_norm", row) for row in added]
        hidden = x[video : video + len(words)]
        z = [authors_norm(w, "transform.2", gelu(linear(w, "transform.0", row))) for row in hidden]
        results.append([[math.log(p) for p in softmax(linear(w, "vocabulary", row))] for row in z])
    return results


def authors_first_memory(w: Weights, name: str, video: Matrix) -> Matrix:
    mean = [sum(row[d] for row in video) / len(video) for d in range(len(video[0]))]
    return [
        authors_norm(w, f"{name}.first.1", linear(w, f"{name}.first.0", [value + bias for value in mean]))
        for (bias,) in w[f"{name}.slots"]
    ]


def transformer_xl(w: Weights, segments: Sequence[Segment], *, heads: int, layers: int) -> list[Matrix]:
    """Section 3.3."""
    before: list[Matrix] = [[] for _ in range(layers)]
    results = []
    for features, words in segments:
        x = [*video_tokens(w, features, False), *text_tokens(w, words, False)]
        video = len(features) + 2
        layer_inputs = []
        for n in range(layers):
            name, past = f"layers.{n}", before[n]
            sees = causal(video, len(past))
            attended = multi_head(w, f"{name}.attention", heads, x, [*past, *x], sees, True)
            layer_inputs.append(x)
            x = residual(w, f"{name}.attention_norm", x, attended)
            fed = feed_forward(w, f"{name}.feed_forward", x)
            x = residual(w, f"{name}.feed_forward_norm", x, fed)
        before = layer_inputs
        results.append(word_logprobs(w, x[video:]))
    return results


def authors_transformer_xl(
    w: Weights, segments: Sequence[Segment], *, heads: int, layers: int, start: int, length: int
) -> list[Matrix]:
    """As the authors' code computes Transformer-XL: ``start + length`` tokens a segment, [PAD] included."""
    before: list[Matrix] = [[] for _ in range(layers)]
    was_real: list[bool] = []
    results = []
    for features, words in segments:
        sentence = [*words, 2][:length]
        (first, last, middle), pad = w["mark_embedding"], w["embedding.weight"][0]
        zeros, blanks = [0.0] * len(w["frame.0.weight"]), start - len(features) - 2
        frames = [zeros, *project(w, features), *[zeros] * (start + length)][: start + length]
        vectors = [first, *[middle] * len(features), last, *[pad] * blanks]
        vectors += [w["embedding.weight"][word] for word in sentence] + [pad] * (length - len(sentence))
        real = [True] * (len(features) + 2) + [False] * blanks
        real += [True] * len(sentence) + [False] * (length - len(sentence))
        x = []
        for n, (frame, vector) in enumerate(zip(frames, vectors, strict=True)):
            kind = w["type_embedding"][int(n >= start)]
            token = total(authors_projection(w, "frame", frame), authors_projection(w, "word", vector), kind)
            x.append(authors_norm(w, "token_norm", token))
        layer_inputs = []
        for n in range(layers):
            name = f"layers.{n}"
            layer_inputs.append(x)
            attended = shifted_heads(w, f"{name}.attention", heads, x, before[n], (start, real, was_real))
            x = residual(w, f"{name}.attention_norm", x, attended)
            inner = [[max(0.0, v) for v in linear(w, f"{name}.feed_forward.0", row)] for row in x]
            fed = [linear(w, f"{name}.feed_forward.3", row) for row in inner]
            x = residual(w, f"{name}.feed_forward_norm", x, fed)
        before, was_real = layer_inputs, real
        z = [authors_norm(w, "transform.2", gelu(linear(w, "transform.0", row))) for row in x[start:]]
        rows = z[: len(words)]
        results.append([[math.log(p) for p in softmax(linear(w, "vocabulary", row))] for row in rows])
    return results


def shifted_heads(
    w: Weights, name: str, heads: int, x: Matrix, past: Matrix, sees: tuple[int, list[bool], list[bool]]
) -> Matrix:
    """Attention over [past; x], its position terms shifted as one list of all rows, each after a zero."""
    (start, real, was_real), keys, width = sees, [*past, *x], len(x[0]) // heads
    joined: Matrix = [[] for _ in x]
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        q, k, v = (
            [linear(w, f"{name}.{kind}", row)[part] for row in rows]
            for kind, rows in (("query", x), ("key", keys), ("value", keys))
        )
        r = [
            linear(w, f"{name}.relative", encoding(distance, len(x[0])))[part]
            for distance in range(len(keys) - 1, -1, -1)
        ]
        flat = []
        for row in q:
            flat += [0.0, *[dot(total(row, w["position_bias"][head]), encoded) for encoded in r]]
        shifted = flat[len(x) :]
        for i, row in enumerate(q):
            weights, values = [], []
            for j in range(len(keys)):
                own = j - len(past)
                visible = was_real[i] if own < 0 else real[own] and (own < start or own <= i)
                if visible:
                    content = dot(total(row, w["content_bias"][head]), k[j])
                    weights.append((content + shifted[i * len(keys) + j]) / math.sqrt(width))
                    values.append(v[j])
            shares = softmax(weights)
            joined[i] += [sum(a * v[d] for a, v in zip(shares, values, strict=True)) for d in range(width)]
    return [linear(w, f"{name}.output", row) for row in joined]


def vanilla_transformer(w: Weights, segments: Sequence[Segment], *, heads: int, layers: int) -> list[Matrix]:
    """Section 3.1: layer l of the decoder attends to layer l of the encoder."""
    results = []
    for features, words in segments:
        v, x = video_tokens(w, features, True), text_tokens(w, words, True)
        for n in range(layers):
            name = f"encoder.{n}"
            attended = multi_head(w, f"{name}.attention", heads, v, v, full_attention)
            v = residual(w, f"{name}.attention_norm", v, attended)
            v = residual(w, f"{name}.feed_forward_norm", v, feed_forward(w, f"{name}.feed_forward", v))
            name = f"decoder.{n}"
            attended = multi_head(w, f"{name}.attention", heads, x, x, causal(0))
            x = residual(w, f"{name}.attention_norm", x, attended)
            attended = multi_head(w, f"{name}.cross_attention", heads, x, v, full_attention)
            x = residual(w, f"{name}.cross_norm", x, attended)
            x = residual(w, f"{name}.feed_forward_norm", x, feed_forward(w, f"{name}.feed_forward", x))
        results.append(word_logprobs(w, x))
    return results


def deviation_norm(w: Weights, name: str, x: Vector) -> Vector:
    mean = sum(x) / len(x)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in x) / (len(x) - 1))
    scale, shift = w[f"{name}.weight"], w[f"{name}.bias"]
    return [a * (v - mean) / (deviation + 1e-6) + b for a, v, b in zip(scale, x, shift, strict=True)]


def masked_transformer(
    w: Weights, segments: Sequence[Segment], *, heads: int, layers: int, start: int
) -> list[Matrix]:
    """As the authors' code computes the vanilla transformer: frames are padded to ``start`` with zeros."""
    hidden = len(w["encoder.0.attention.query.weight"])
    # scores divided by sqrt(hidden), where multi_head divides by sqrt(hidden / heads)
    w = {
        name: [[value / math.sqrt(heads) for value in row] for row in weight]
        if name.endswith("query.weight")
        else weight
        for name, weight in w.items()
    }

    def block(name: str, x: Matrix, update: Matrix) -> Matrix:
        return [deviation_norm(w, name, total(a, b)) for a, b in zip(x, update, strict=True)]

    def fed(name: str, x: Matrix) -> Matrix:
        inner = [[max(0.0, v) for v in linear(w, f"{name}.feed_forward.0", row)] for row in x]
        update = [linear(w, f"{name}.feed_forward.2", row) for row in inner]
        return block(f"{name}.feed_forward_norm", x, update)

    results = []
    for features, words in segments:
        padding = [[0.0] * hidden] * (start - len(features))
        v = [linear(w, "frame.2", deviation_norm(w, "frame.0", frame)) for frame in project(w, features)]
        v = [*[total(row, encoding(n, hidden)) for n, row in enumerate(v)], *padding]
        vectors = [[value * math.sqrt(hidden) for value in w["vocabulary.weight"][word]] for word in words]
        x = [total(row, encoding(n, hidden)) for n, row in enumerate(vectors)]
        for n in range(layers):
            name = f"encoder.{n}"
            attended = multi_head(w, f"{name}.attention", heads, v, v, full_attention)
            v = fed(name, block(f"{name}.attention_norm", v, attended))
            v = [*v[: len(features)], *padding]
            name = f"decoder.{n}"
            attended = multi_head(w, f"{name}.attention", heads, x, x, causal(0))
            x = block(f"{name}.attention_norm", x, attended)
            attended = multi_head(w, f"{name}.cross_attention", heads, x, v, full_attention)
            x = fed(name, block(f"{name}.cross_norm", x, attended))
        results.append([[math.log(p) for p in softmax(linear(w, "vocabulary", row))] for row in x])
    return results
