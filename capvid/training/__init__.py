"""Recipes, the training loop, evaluation."""
