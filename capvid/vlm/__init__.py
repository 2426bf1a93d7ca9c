"""Captioners that look at pixels."""
