"""What the CNN sees: backbones, extraction, and the files that keep their features."""
