"""CLIPScore and EMScore: agreement of captions with videos by embeddings of an image-text encoder.

- CLIPScore and RefCLIPScore: Hessel et al., EMNLP 2021, arXiv:2104.08718, section 3. A video is the mean of
  the normalised embeddings of its frames, as in EMScore's coarse-grained matching.
- EMScore: Shi et al., CVPR 2022, arXiv:2111.08919, section 3. The published program takes the best reference
  for each number separately and gives the end of a sentence the mean IDF; so does this. Its padding counts as
  a word for that mean; here it does not.

Array shapes: T frames, L tokens, start and end included, D width of the embeddings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

WEIGHT = 2.5  # w of CLIPScore
PROMPT = "A photo depicts "  # which CLIPScore puts before each caption


@dataclass(frozen=True)
class TextEmbedding:
    """A sentence by an image-text encoder.

    Attributes:
        ids: token numbers (L,).
        sentence: embedding (D,), of length 1.
        tokens: embeddings of the tokens (L, D), each of length 1.
    """

    ids: tuple[int, ...]
    sentence: np.ndarray
    tokens: np.ndarray


def normalise_rows(rows: np.ndarray) -> np.ndarray:
    """Scale vectors (..., D) to length 1, in float64; zeros stay zeros."""
    rows = np.asarray(rows, dtype=np.float64)
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    scaled: np.ndarray = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
    return scaled


def video_embedding(frames: np.ndarray) -> np.ndarray:
    """Return the normalised mean (D,) of the normalised frame embeddings (T, D)."""
    return normalise_rows(normalise_rows(frames).mean(axis=0))


def clip_score(sentence: np.ndarray, video: np.ndarray) -> float:
    """Return CLIP-S(c, v) = w max(cos(c, v), 0) of normalised embeddings (D,)."""
    return WEIGHT * max(float(sentence @ video), 0.0)


def ref_clip_score(score: float, sentence: np.ndarray, references: Iterable[np.ndarray]) -> float:
    """Return RefCLIP-S, the harmonic mean of CLIP-S and max(max_r cos(c, r), 0)."""
    nearest = max(0.0, *[float(sentence @ reference) for reference in references])
    return harmonic_mean(score, nearest)


def harmonic_mean(first: float, second: float) -> float:
    """Return 2 a b / (a + b), and 0 where that is undefined."""
    return 2 * first * second / (first + second) if first + second else 0.0


def idf_weights(sentences: Sequence[Sequence[int]]) -> dict[int, float]:
    """Return the inverse document frequencies of tokens, log((M + 1) / (n + 1)) in n of M sentences.

    The last token of a sentence is its end, which occurs in all of them: it gets the mean of all tokens.

    Args:
        sentences: token numbers of the references, or of the captions if there are none.
    """
    counts = Counter(token for sentence in sentences for token in set(sentence))
    weights = {token: math.log((len(sentences) + 1) / (n + 1)) for token, n in counts.items()}
    weights[sentences[0][-1]] = sum(weights.values()) / len(weights)
    return weights


def token_weights(ids: Sequence[int], idf: Mapping[int, float], count: int) -> np.ndarray:
    """Return the IDF weights (L,) of tokens, of sum 1; equal ones if all of them are 0.

    Args:
        ids: token numbers (L,).
        idf: inverse document frequencies.
        count: number M of sentences that they are of; tokens of none of these weigh log(M + 1).
    """
    weights = np.array([idf.get(token, math.log(count + 1)) for token in ids])
    return weights / weights.sum() if weights.sum() else np.full(len(weights), 1 / len(weights))


def fine_grained(
    tokens: np.ndarray, weights: np.ndarray, others: np.ndarray, other_weights: np.ndarray
) -> tuple[float, float, float]:
    """Return fine-grained precision, recall and F1 of tokens (L, D) against frames or tokens (N, D)."""
    similarity = tokens @ others.T  # (L, N)
    precision = float(weights @ similarity.max(axis=1))
    recall = float(other_weights @ similarity.max(axis=0))
    return precision, recall, harmonic_mean(precision, recall)


def em_score(
    caption: TextEmbedding,
    frames: np.ndarray,
    references: Sequence[TextEmbedding],
    idf: Mapping[int, float],
    count: int,
) -> dict[str, float]:
    """Return EMScore by name: coarse, fine (F1) and their mean, against the video and with references.

    Args:
        caption: the caption.
        frames: embeddings of the frames (T, D).
        references: reference captions; none leaves out EMScoreRef.
        idf: inverse document frequencies of tokens.
        count: number of sentences that they are of.
    """
    weights = token_weights(caption.ids, idf, count)
    equal = np.full(len(frames), 1 / len(frames))  # frames are not weighted
    coarse = float(caption.sentence @ video_embedding(frames))  # EMScore(X, V)_c
    _, _, fine = fine_grained(caption.tokens, weights, normalise_rows(frames), equal)  # EMScore(X, V)_f
    scores = {"EMScore": (coarse + fine) / 2, "EMScore-c": coarse, "EMScore-f": fine}
    if references:
        nearest = max(float(caption.sentence @ one.sentence) for one in references)  # EMScore(X, X*)_c
        best = max(  # EMScore(X, X*)_f
            fine_grained(caption.tokens, weights, one.tokens, token_weights(one.ids, idf, count))[2]
            for one in references
        )
        scores["EMScoreRef"] = (scores["EMScore"] + (nearest + best) / 2) / 2  # EMScore(X, V, X*)
    return scores
