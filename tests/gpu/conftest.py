"""Import path of the GPU tests, which use helpers of tests/backbones."""

from __future__ import annotations

import sys
from pathlib import Path

BACKBONE_TESTS = Path(__file__).parents[1] / "backbones"
sys.path.insert(0, str(BACKBONE_TESTS))
