"""From a captioner's probabilities to sentences; shared by every captioner, batched over videos and beams."""

from __future__ import annotations

from capvid.decoding.options import DecodingOptions, Hypothesis
from capvid.decoding.padding import pad_frames, pad_segments
from capvid.decoding.paragraphs import decode_paragraphs
from capvid.decoding.search import decode

__all__ = ["DecodingOptions", "Hypothesis", "decode", "decode_paragraphs", "pad_frames", "pad_segments"]
