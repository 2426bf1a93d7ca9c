"""Captions as words, and words as numbers."""
