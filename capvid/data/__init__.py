"""Data sets and batches."""
