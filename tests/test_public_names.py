from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

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


def test_the_typed_options_of_load_are_the_fields_of_its_dataclasses() -> None:
    from capvid.decoding.decoding_options import ChatOptions, DecodingOptions, LoadOptions

    declared = {**get_type_hints(DecodingOptions), **get_type_hints(ChatOptions)}
    assert get_type_hints(LoadOptions) == {name: kind | None for name, kind in declared.items()}


CONFIG = """\
[mypy]
follow_imports = silent
[mypy-torch.*,numpy.*,PIL.*,transformers.*,pyarrow.*,scipy.*,rich.*,fsspec.*,safetensors.*]
follow_imports = skip
"""  # without the libraries, which take minutes


@pytest.mark.slow
def test_type_checkers_see_misspelt_and_mistyped_options(tmp_path: Path) -> None:
    """Each line of a user's file is checked by ``mypy --strict``."""
    right = [
        'capvid.load("m3", beam_size=3, prompt="What?", segments="auto")("v.mp4")',
        'capvid.load(num_captions=None)(open("v.mp4", "rb"))',
        'capvid.load()([b""])',
        'capvid.load()(b"")',
    ]
    wrong = [
        'capvid.load(modell="m3")',
        'capvid.load("m3", beamsize=3)',
        'capvid.load("m3", beam_size="3")',
        'capvid.load("m3", prompt=3)',
        'capvid.load("m3", batch_size=None)',
    ]
    file = tmp_path / "user.py"
    file.write_text("\n".join(["import capvid", *right, *wrong, ""]))
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--strict", "user.py"]
    completed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    lines = [int(line.split(":")[1]) for line in completed.stdout.splitlines() if ": error:" in line]
    first = len(right) + 2
    assert lines == list(range(first, first + len(wrong))), completed.stdout
    assert "modell" in completed.stdout and "beamsize" in completed.stdout
