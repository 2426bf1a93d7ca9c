"""What a sentence may not repeat."""

from __future__ import annotations

import torch
from torch import Tensor

from capvid.captioners.base import Captioner
from capvid.decoding.options import DecodingOptions
from capvid.errors import UsageError
from capvid.text.vocabulary import PAD


def repeating_words(said: Tensor, ngram: int) -> Tensor | None:
    """The tokens that would complete a sequence of ``ngram`` words which occurred already.

    Args:
        said: (R, L) words so far, without the start token.
        ngram: length of the sequences that may not occur twice.

    Returns:
        (R, n) tokens, padding where there are fewer than n; None if the sentences are too short to repeat.
    """
    if said.shape[1] < ngram:
        return None
    windows = said.unfold(1, ngram, 1)  # (R, n, ngram)
    begun = said[:, said.shape[1] - ngram + 1 :].unsqueeze(1)  # (R, 1, ngram - 1)
    again = (windows[..., :-1] == begun).all(-1)
    return windows[..., -1].where(again, PAD)


class Repetition:
    """What a sentence may not repeat, for a search by one captioner.

    Args:
        captioner: whose words.
        options: which repetitions are allowed.

    Raises:
        UsageError: content words are not to be repeated, and the captioner's tokens are no words.
    """

    def __init__(self, captioner: Captioner, options: DecodingOptions) -> None:
        check_repetition(captioner, options)
        self.ngram, self.words = options.no_repeat_ngram, options.no_repeat_words
        self.free = torch.tensor([PAD, *(captioner.function_words or ())])  # tokens that may be said twice

    def __bool__(self) -> bool:
        return self.words or bool(self.ngram)

    def banned(self, said: Tensor) -> Tensor | None:
        """The tokens (R, n) that may not follow the words ``said`` (R, L), and padding; None if all may."""
        found = [repeating_words(said, self.ngram)] if self.ngram else []
        if self.words and said.shape[1]:
            self.free = self.free.to(said.device)
            found.append(said.masked_fill(torch.isin(said, self.free), PAD))
        some = [tokens for tokens in found if tokens is not None]
        return torch.cat(some, 1) if some else None


def check_repetition(captioner: Captioner, options: DecodingOptions) -> None:
    """Raise UsageError if content words are not to be repeated by a captioner whose tokens are no words."""
    if options.no_repeat_words and captioner.function_words is None:
        raise UsageError(
            f"no_repeat_words: the tokens of {captioner.name} are pieces of words",
            remedy="use no_repeat_ngram",
        )
