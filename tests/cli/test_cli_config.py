from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import Run, Toy

from capvid.cli._options import config_first


def beam_of(capvid: Run, *command: object) -> int:
    code, out, err = capvid(*command)
    assert code == 0, err
    settings = json.loads(out)["settings"]
    return int(settings["beam_size"])


@pytest.mark.slow
def test_the_command_line_then_the_environment_then_the_file(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "a config.toml"
    config.write_text(f'[caption]\nformat = "json"\nbeam = 3\nmodel = {json.dumps(str(toy.model))}\n')
    command = ["caption", video_files[0]]
    assert beam_of(capvid, "--config", config, *command) == 3
    assert beam_of(capvid, *command, f"--config={config}") == 3
    monkeypatch.setenv("CAPVID_CONFIG", str(config))
    assert beam_of(capvid, *command) == 3
    monkeypatch.setenv("CAPVID_CAPTION_BEAM", "4")
    assert beam_of(capvid, *command) == 4
    assert beam_of(capvid, *command, "--beam", 2) == 2
    monkeypatch.delenv("CAPVID_CONFIG")
    monkeypatch.setenv("CAPVID_CAPTION_FORMAT", "json")
    assert beam_of(capvid, *command, "--model", toy.model) == 4


@pytest.mark.slow
def test_options_that_may_be_repeated_switches_and_commands_below(
    capvid: Run, tmp_path: Path, toy: Toy, video_files: list[Path], bad_files: dict[str, Path]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"id": "a", "split": "train", "captions": ["a dog"]}\n{"id": 3}\n')
    config = tmp_path / "c.toml"
    config.write_text('[data.check]\nfeatures = "nowhere"\n[caption]\nfail-fast = true\n')
    code, _, err = capvid("data", "check", f"jsonl:{data}", "--config", config)
    assert code != 0 and "nowhere: no such file or folder of features" in err
    broken = [bad_files["empty"], *video_files]
    code, out, _ = capvid("caption", *broken, "--model", toy.model, "--config", config)
    assert (code, out) == (1, "")
    assert capvid("caption", *broken, "--model", toy.model)[0] == 3


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_what_a_file_cannot_say(capvid: Run, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    code, out, err = capvid("--config", tmp_path / "c.toml", "models")
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


def test_a_file_that_is_not_there_and_values_that_do_not_fit(
    capvid: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = capvid("models", "--config", tmp_path / "none.toml")
    assert code == 2 and "none.toml: the configuration cannot be read (No such file or directory)" in err
    monkeypatch.setenv("CAPVID_CAPTION_BEAM", "wide")
    code, _, err = capvid("caption", "v.mp4")
    assert code == 2 and "--beam" in err and "wide" not in capvid("models")[2]


def test_where_config_may_stand() -> None:
    assert config_first(["a", "--config", "f", "b"]) == ["--config", "f", "a", "b"]
    assert config_first(["a", "b", "--config=f"]) == ["--config=f", "a", "b"]
    assert config_first(["a", "--", "--config", "f"]) == ["a", "--", "--config", "f"]
    assert config_first(["a"]) == ["a"]
    assert config_first(["a", "b", "--config"]) == ["a", "b", "--config"]  # its value is missing
    assert config_first(["a", "--config", "--", "f"]) == ["a", "--config", "--", "f"]
