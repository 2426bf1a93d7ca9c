from __future__ import annotations

import re
import subprocess
import sys

import pytest

import capvid


def test_dir_shows_exactly_the_public_names() -> None:
    assert dir(capvid) == sorted(capvid.__all__)
    for name in capvid.__all__:
        assert getattr(capvid, name) is not None
        if name != "__version__":
            assert getattr(capvid, name).__doc__


def test_help_shows_an_example_and_every_function() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", "import capvid; help(capvid)"], capture_output=True, text=True
    )
    assert ">>> captioner = capvid.load" in completed.stdout
    for name in ("extract", "load", "score", "train"):
        assert re.search(rf"^    {name}\(", completed.stdout, re.MULTILINE), name


def test_public_names_are_those_of_their_modules() -> None:
    from capvid.errors import CapvidError
    from capvid.pipeline import CaptionPipeline, load

    assert (capvid.CapvidError, capvid.CaptionPipeline, capvid.load) == (CapvidError, CaptionPipeline, load)


def test_version_is_a_release_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", capvid.__version__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = capvid.nothing


def test_import_is_light() -> None:
    script = "import capvid, sys; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'typer')))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
