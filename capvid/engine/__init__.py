"""Runs over very many videos, whose results go into shards: here, or on a Ray cluster."""
