"""Distillation of the bundled backbone from larger ones."""
