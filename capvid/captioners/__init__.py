"""Captioners: one paper, one module."""
