"""Lets the tests of this folder import the helpers beside the tests of backbones and of training."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "backbones"), str(TESTS / "training")]
