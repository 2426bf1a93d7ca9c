"""Fixtures for the tests of the command line."""

from __future__ import annotations

from toy import bad_files, capvid, toy, toy_files, video_files

__all__ = ["bad_files", "capvid", "toy", "toy_files", "video_files"]
