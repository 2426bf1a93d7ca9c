"""Dataset formats: one module each, which registers its reader."""
