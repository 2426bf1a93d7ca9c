"""Limits set by the configuration file and the environment, and invalid configuration files."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest
from toy import Run

from capvid.utils.validation import Limits, limits

VARIABLE = "CAPVID_LIMIT_FRAME_PIXELS"


@pytest.fixture(autouse=True)
def _restore_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in fields(Limits):
        monkeypatch.setenv(f"CAPVID_LIMIT_{field.name.upper()}", "")


def test_limits_from_file_and_environment(
    capvid: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[limits]\nframe-pixels = 1e6\nvideo_frames = 7\n")
    assert limits() == Limits()
    assert capvid("--config", config, "models")[0] == 0
    assert limits() == Limits(frame_pixels=1_000_000, video_frames=7)
    monkeypatch.setenv(VARIABLE, "123")
    assert capvid("--config", config, "models")[0] == 0
    assert limits().frame_pixels == 123  # the environment takes precedence


def test_limit_from_file_applies_to_a_command(
    capvid: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[limits]\nlist-bytes = 3\n")
    monkeypatch.setattr("sys.stdin", (tmp_path / "c.toml").open(encoding="utf-8"))
    code, _, err = capvid("caption", "--from-file", "-", "--config", config)
    assert code == 2 and "larger than the limit of 3 bytes" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[limits]\nframe-pixel = 1", "limits.frame-pixel: no such limit; did you mean frame-pixels?"),
        ("[limits]\nx = 1", "limits.x: no such limit; known limits are frame-pixels, video-frames"),
        ("[limits]\nframe-pixels = -1", "limits.frame-pixels must be a positive number, got -1"),
        ("[limits]\nframe-pixels = inf", "limits.frame-pixels must be a positive number, got inf"),
        ("[limits]\nframe-pixels = nan", "limits.frame-pixels must be a positive number, got nan"),
        ("[limits]\nframe-pixels = []", "limits.frame-pixels must be a positive number, got []"),
        ("limits = 3", "limits = 3: expected a table"),
        ("limit = 3", "limit: no such option; did you mean limits?"),
        ("a = " + "[" * 3000 + "]" * 3000, "not valid TOML (nested too deeply)"),
        ("[" + ".".join("a" * 500) + "]", "not valid TOML (nested too deeply)"),
        ("a = " + "9" * 5000, "not valid TOML"),
        ("a = \0", "not valid TOML"),
        ("[caption]\nbeam = [[1]]", "caption.beam = [[1]]: expected a value"),
        ("[data.check]\nfeatures = [{a = 1}]", "data.check.features = [{'a': 1}]: expected a value"),
    ],
)
def test_invalid_configuration_files(capvid: Run, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    code, out, err = capvid("--config", tmp_path / "c.toml", "models")
    assert (code, out) == (2, "") and err.startswith(f"error: {tmp_path}") and message in err, err
    assert err.count("\n") == 1 and len(err) < 20_000


@pytest.mark.parametrize("value", ["inf", "nan", "1e999", "3.5", "1979-05-27", "-1", "''"])
def test_invalid_option_values_in_the_file(capvid: Run, tmp_path: Path, value: str) -> None:
    (tmp_path / "c.toml").write_text(f"[caption]\nbeam = {value}\n")
    code, out, err = capvid("--config", tmp_path / "c.toml", "caption", "no.mp4")
    assert (code, out) == (2, "") and "--beam" in err and "internal error" not in err


def test_invalid_limit_in_the_environment(capvid: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "many")
    assert capvid("models") == (2, "", f"error: {VARIABLE} must be a positive number, got many\n")


@pytest.mark.skipif(os.name != "posix", reason="needs os.mkfifo")
def test_configuration_must_be_a_small_regular_file(
    capvid: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for path, reason in ((tmp_path / "pipe.toml", "not a regular file"), (tmp_path, "Is a directory")):
        code, _, err = capvid("--config", path, "models")
        assert code == 2 and f"{path}: the configuration cannot be read ({reason}" in err
    (tmp_path / "long.toml").write_text("#" * 2000)
    monkeypatch.setenv("CAPVID_LIMIT_TEXT_BYTES", "1000")
    code, _, err = capvid("--config", tmp_path / "long.toml", "models")
    assert code == 2 and "cannot be read (larger than the limit of 1000 bytes)" in err
