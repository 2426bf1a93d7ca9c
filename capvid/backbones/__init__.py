"""Backbones: from images to feature vectors."""
