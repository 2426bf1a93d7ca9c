"""Captions in upper case, as an output format of their own."""

from __future__ import annotations

from capvid.output.results import CaptionResult
from capvid.output.writers import FORMATS, Document


@FORMATS.register("toy")
def upper_case(result: CaptionResult, document: Document) -> str:
    """Return the captions in upper case, one per line."""
    return "".join(f"{caption.text.upper()}\n" for caption in result.captions)
