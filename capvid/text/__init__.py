"""Captions as tokens, and tokens as indices."""
