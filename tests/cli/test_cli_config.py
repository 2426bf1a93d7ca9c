from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import Run, Toy

from capvid.cli._options import config_first


def printed_beam_size(capvid: Run, *command: object) -> int:
    code, out, err = capvid(*command)
    assert code == 0, err
    settings = json.loads(out)["settings"]
    return int(settings["beam_size"])


@pytest.mark.slow
def test_precedence_of_options_environment_and_file(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "a config.toml"
    config.write_text(f'[caption]\nformat = "json"\nbeam = 3\nmodel = {json.dumps(str(toy.model))}\n')
    command = ["caption", video_files[0]]
    assert printed_beam_size(capvid, "--config", config, *command) == 3
    assert printed_beam_size(capvid, *command, f"--config={config}") == 3
    monkeypatch.setenv("CAPVID_CONFIG", str(config))
    assert printed_beam_size(capvid, *command) == 3
    monkeypatch.setenv("CAPVID_CAPTION_BEAM", "4")
    assert printed_beam_size(capvid, *command) == 4
    assert printed_beam_size(capvid, *command, "--beam", 2) == 2
    monkeypatch.delenv("CAPVID_CONFIG")
    monkeypatch.setenv("CAPVID_CAPTION_FORMAT", "json")
    assert printed_beam_size(capvid, *command, "--model", toy.model) == 4


@pytest.mark.slow
def test_config_sets_repeated_options_switches_and_subcommands(
    capvid: Run, tmp_path: Path, toy: Toy, video_files: list[Path], bad_files: dict[str, Path]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"id": "a", "split": "train", "captions": ["a dog"]}\n{"id": 3}\n')
    config = tmp_path / "c.toml"
    config.write_text('[data.check]\nfeatures = "nowhere"\n[caption]\nfail-fast = true\n')
    code, _, err = capvid("data", "check", f"jsonl:{data}", "--config", config)
    assert code != 0 and "nowhere: no such file or folder of features" in err
    inputs = [bad_files["empty"], *video_files]
    code, out, _ = capvid("caption", *inputs, "--model", toy.model, "--config", config)
    assert code == 1 and "\t\terror: " in out
    assert capvid("caption", *inputs, "--model", toy.model)[0] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[caption]\nbeams = 3",
            r"c.toml: caption.beams: no such option; did you mean beam?",
        ),
        ("[captions]\nbeam = 3", r"c.toml: captions: no such option; did you mean caption?"),
        ("beam = 3", r"c.toml: beam: no such option; known are caption, extract, train"),
        ("[caption]\nbeam = [3]", r"c.toml: caption.beam = [3]: expected one value"),
        ("[caption]\nbeam = true", r"c.toml: caption.beam = True: expected a value"),
        ("[caption]\noverwrite = 1", r"c.toml: caption.overwrite = 1: expected true or false"),
        ("[caption", r"c.toml: not valid TOML"),
        ("[data.check]\nspeed = 1", r"c.toml: data.check.speed: no such option; known are features"),
    ],
)
def test_invalid_configuration_prints_one_error_line(
    capvid: Run, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "c.toml").write_text(text)
    code, out, err = capvid("--config", tmp_path / "c.toml", "models")
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_missing_file_and_invalid_environment_value(
    capvid: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = capvid("models", "--config", tmp_path / "none.toml")
    assert code == 2 and "none.toml: the configuration cannot be read (No such file or directory)" in err
    monkeypatch.setenv("CAPVID_CAPTION_BEAM", "wide")
    code, _, err = capvid("caption", "v.mp4")
    assert code == 2 and "--beam" in err and "wide" not in capvid("models")[2]


def test_config_first_moves_the_option_to_the_front() -> None:
    assert config_first(["a", "--config", "f", "b"]) == ["--config", "f", "a", "b"]
    assert config_first(["a", "b", "--config=f"]) == ["--config=f", "a", "b"]
    assert config_first(["a", "--", "--config", "f"]) == ["a", "--", "--config", "f"]
    assert config_first(["a"]) == ["a"]
    assert config_first(["a", "b", "--config"]) == ["a", "b", "--config"]  # its value is missing
    assert config_first(["a", "--config", "--", "f"]) == ["a", "--config", "--", "f"]
