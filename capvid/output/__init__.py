"""Captions as text: one writer per format, and the JSON record."""

from __future__ import annotations

from capvid.output.records import SCHEMA_VERSION, make_record
from capvid.output.writers import WRITERS, Writer

__all__ = ["SCHEMA_VERSION", "WRITERS", "Writer", "make_record"]
