"""Decoding: from next-token scores to sentences."""
