"""Training a compact backbone to see as larger ones do."""
