"""Trained captioners: lookup, download and publishing."""
