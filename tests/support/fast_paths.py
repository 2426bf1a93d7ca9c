"""Skip markers for half-precision tests on CPUs without the instructions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from capvid.utils.device import has_fast_path

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def is_fast(precision: str | torch.dtype) -> bool:
    """Whether this CPU computes in a precision without falling back to slow reference code."""
    dtype = DTYPES[precision] if isinstance(precision, str) else precision
    return has_fast_path(dtype, torch.device("cpu"))


def where_fast(precision: str | torch.dtype, *others: Any) -> Any:
    """Return a parametrised case that is skipped if its precision, the first value, is slow here."""
    skip = pytest.mark.skipif(not is_fast(precision), reason=f"no fast path for {precision}")
    return pytest.param(precision, *others, marks=skip, id=str(precision).removeprefix("torch."))


needs_bf16 = pytest.mark.skipif(not is_fast("bf16"), reason="no fast path for bfloat16")
needs_fp16 = pytest.mark.skipif(not is_fast("fp16"), reason="no fast path for float16")
