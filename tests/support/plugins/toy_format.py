"""Captions in upper case, as an output format of their own."""

from __future__ import annotations

from capvid.output.results import CaptionResult
from capvid.output.writers import FORMATS, Writer


@FORMATS.register("toy")
class ToyWriter(Writer):
    """Captions in upper case, one per line."""

    extension = "toy"

    def render(self, result: CaptionResult) -> str:
        """Return the captions of one result."""
        return "".join(f"{caption.text.upper()}\n" for caption in result.captions)
