"""What a sentence may not repeat."""

from __future__ import annotations

from torch import Tensor

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
