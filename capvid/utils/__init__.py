"""Shared plumbing that knows nothing of video."""
