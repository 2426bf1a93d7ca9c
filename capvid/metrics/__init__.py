"""Caption metrics: pure functions from captions and references to scores."""
