"""Captions as text: one writer per format, the JSON record, and a page to look at."""

from __future__ import annotations

from capvid.output.records import SCHEMA_VERSION, make_record
from capvid.output.report import Report
from capvid.output.writers import WRITERS, Writer

__all__ = ["SCHEMA_VERSION", "WRITERS", "Report", "Writer", "make_record"]
