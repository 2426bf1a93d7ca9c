"""Scores of captions, as the papers report them: BLEU, METEOR, ROUGE_L and CIDEr-D, and R@n of paragraphs."""

from __future__ import annotations

from capvid.metrics.cider import CiderD
from capvid.metrics.scoring import METRICS, Scores, paragraph_text, score, score_paragraphs

__all__ = ["METRICS", "CiderD", "Scores", "paragraph_text", "score", "score_paragraphs"]
