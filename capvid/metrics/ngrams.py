"""What the metrics share: tokenised captions, and the checks of predictions and references.

A tokenised caption is one string, its tokens joined by single spaces. BLEU and CIDEr-D split it at any
white space, ROUGE_L at the space character only, as the published code does; that differs for the rare
token that holds a no-break space.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from capvid.errors import DataError, UsageError
from capvid.text.tokenize import ptb_tokenize

MAX_N = 4
TOKENIZERS = ("auto", "ptb", "builtin", "none")

Caption = str | Sequence[str]


def tokenised(caption: Caption, *, tokenizer: str = "builtin") -> str:
    """Join the tokens of a caption by spaces.

    Args:
        caption: a text, or a list of tokens that is taken as it is.
        tokenizer: ``builtin`` for the rules of :mod:`capvid.text.tokenize` (``auto`` is the same), ``none``
            for a text whose tokens are separated by spaces already.

    Raises:
        UsageError: there is no tokenizer of that name, or it is ``ptb``, which takes all captions at once.
    """
    check_tokenizer(tokenizer)
    if tokenizer == "ptb":
        raise UsageError("the tokenizer 'ptb' takes no single captions", remedy="use capvid.metrics.score")
    if not isinstance(caption, str):
        return " ".join(caption)
    return caption if tokenizer == "none" else " ".join(ptb_tokenize(caption))


def check_tokenizer(name: str) -> None:
    """Refuse names that are none of a tokenizer.

    Raises:
        UsageError: it is one.
    """
    if name not in TOKENIZERS:
        raise UsageError(f"no tokenizer named {name!r}", remedy=f"use one of: {', '.join(TOKENIZERS)}")


def check_predictions(predictions: Mapping[str, object], references: Iterable[str]) -> None:
    """Refuse predictions that leave out a referenced video; other videos in them are allowed.

    Raises:
        DataError: some have none; the message names the first of them.
    """
    missing = [video for video in references if video not in predictions]
    if missing:
        named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise DataError(
            f"no prediction for {len(missing)} of the videos in the references: {named}",
            remedy="caption these videos too, or take them out of the references",
        )


def check_references(references: Mapping[str, Sequence[Caption]]) -> None:
    """Refuse references without videos, and videos without a list of references.

    Raises:
        DataError: there is no video, one has no reference, or one has a text in place of a list.
    """
    if not references:
        raise DataError("the references hold no video", remedy="give at least one video with its captions")
    for video, captions in references.items():
        if isinstance(captions, str):
            raise DataError(f"{video}: the references are one text", remedy="give a list of captions")
        if not captions:
            raise DataError(f"{video}: no references", remedy="give it a caption, or take the video out")
