"""Reference decoding of one video by definition: lists and loops, without incremental state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from variants import clip

from capvid.captioners.base import Captioner, Carried, ParagraphCaptioner
from capvid.decoding.decoding_options import DecodingOptions
from capvid.text.vocabulary import BOS, EOS

WORDS = range(4, 11)
FUNCTION_WORDS = (5, 8)
NextWord = Callable[[Sequence[Sequence[int]]], Tensor]  # prefixes of one length -> log-probabilities (n, V)


@dataclass(frozen=True)
class Sentence:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.logprobs)

    def score(self, penalty: float) -> float:
        return self.total / len(self.logprobs) ** penalty

    def extended(self, word: int, logprob: float) -> Sentence:
        return Sentence((*self.tokens, *([] if word == EOS else [word])), (*self.logprobs, logprob))


def videos(captioner: Captioner, count: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Return features and mask of ``count`` videos of 2 to 4 frames, padded with random numbers."""
    torch.manual_seed(seed)
    mask = torch.arange(4) < torch.tensor([2 + n % 3 for n in range(count)]).unsqueeze(-1)
    return clip(captioner, count, 4), mask


def repeats(words: Sequence[int], ngram: int) -> bool:
    """Whether a sequence of ``ngram`` words occurs twice."""
    grams = [tuple(words[n : n + ngram]) for n in range(len(words) - ngram + 1)]
    return len(set(grams)) < len(grams)


def by_teacher_forcing(captioner: Captioner, features: Tensor, mask: Tensor) -> NextWord:
    """Return the next-word function of one video (1, T, D)."""

    def next_word(prefixes: Sequence[Sequence[int]]) -> Tensor:
        tokens = torch.tensor([[BOS, *words] for words in prefixes])
        return captioner(features, mask, tokens)[:, -1].log_softmax(-1)

    return next_word


def segment_next_word(
    captioner: ParagraphCaptioner, features: Tensor, mask: Tensor, carried: Carried | None
) -> NextWord:
    """Return the next-word function of one segment (1, T, D), given the carried state."""

    def next_word(prefixes: Sequence[Sequence[int]]) -> Tensor:
        tokens = torch.tensor([[BOS, *words] for words in prefixes])
        state = captioner.encode(features, mask, carried).repeat(len(prefixes))
        return captioner.logits(captioner.read(state, tokens)[0])[:, -1].log_softmax(-1)

    return next_word


def beam_search(next_word: NextWord, options: DecodingOptions) -> list[Sentence]:
    """Return all sentences that a beam search finishes, best first."""
    beams, finished = [Sentence((), ())], []
    for position in range(options.max_length + 1):
        candidates = []
        for beam, logprobs in zip(beams, next_word([b.tokens for b in beams]).tolist(), strict=True):
            words = [] if position == options.max_length else list(WORDS)
            if options.no_repeat_ngram:
                words = [w for w in words if not repeats([*beam.tokens, w], options.no_repeat_ngram)]
            if options.no_repeat_words:
                words = [w for w in words if w in FUNCTION_WORDS or w not in beam.tokens]
            if position >= options.min_length or not words:
                words.append(EOS)
            candidates += [(beam.extended(word, logprobs[word]), word == EOS) for word in words]
        candidates.sort(key=lambda candidate: -candidate[0].total)
        finished += [sentence for sentence, ended in candidates[: options.beam_size] if ended]
        beams = [sentence for sentence, ended in candidates if not ended][: options.beam_size]
        if len(finished) >= options.beam_size or not beams:
            break
    return sorted(finished, key=lambda sentence: -sentence.score(options.length_penalty))
