"""Datasets: formats, examples and batches."""
