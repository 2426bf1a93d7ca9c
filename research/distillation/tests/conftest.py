"""Makes ``distillation`` and the helpers of capvid's tests importable."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side

RESEARCH = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(RESEARCH), str(RESEARCH.parent / "tests" / "support")]
