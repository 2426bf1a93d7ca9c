"""From a captioner's probabilities to sentences; shared by every captioner, batched over videos and beams."""

from __future__ import annotations

from capvid.decoding.search import DecodingOptions, Hypothesis, decode

__all__ = ["DecodingOptions", "Hypothesis", "decode"]
