"""Training: from recipes to checkpoints."""
