from __future__ import annotations

import re
import subprocess
import sys

import pytest

import capvid


def test_the_public_names() -> None:
    assert capvid.__all__ == sorted(
        ["Caption", "CaptionPipeline", "CaptionResult", "CapvidError", "WordScore", "__version__", "load"]
    )
    for name in capvid.__all__:
        assert getattr(capvid, name) is not None


def test_where_they_live() -> None:
    from capvid.errors import CapvidError
    from capvid.loading import load
    from capvid.pipeline import CaptionPipeline

    assert (capvid.CapvidError, capvid.CaptionPipeline, capvid.load) == (CapvidError, CaptionPipeline, load)


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", capvid.__version__)


def test_no_other_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = capvid.nothing


def test_importing_is_light() -> None:
    script = "import capvid, sys; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'typer')))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
