"""Scoring of predictions against references."""
