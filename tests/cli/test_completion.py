"""Shell completion, asked for through the protocol of the completion scripts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from capvid.backbones.catalog import backbones
from capvid.cli.app import main
from capvid.training.recipe import recipe_names


def complete(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the candidates for the last word, as bash requests them."""
    monkeypatch.setenv("_CAPVID_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    capsys.readouterr()
    assert main([]) == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("capvid tr", ["train"]),
        ("capvid data ", ["check"]),
        ("capvid caption --out", ["--output", "--output-dir"]),
        ("capvid caption --from", ["--from-file"]),
        ("capvid caption v.mp4 --format j", ["json", "jsonl"]),
        (
            "capvid caption --model ",
            [
                *("m3", "m3-motion", "kv-memory", "kv-memory-motion", "ham", "dense-lstm", "mart"),
                *("git-base-vatex", "git-large-vatex", "smolvlm2-256m", "smolvlm2-500m", "qwen3-vl-2b"),
            ],
        ),
        ("capvid caption --model runs/", []),  # the shell completes paths
        ("capvid caption vid", []),
        ("capvid extract --backbone resnet", ["resnet50", "resnet152", "resnet200d"]),
        ("capvid extract --backbone ", list(backbones())),
        ("capvid train ", recipe_names()),
        ("capvid train mart-s", ["mart-small"]),
        ("capvid models mar", ["mart", "mart-authors"]),
        ("capvid models colour", ["colour-grid"]),
        ("capvid convert f.pth --as x3", ["x3d-xs"]),
        ("capvid caption --device c", ["cpu", "cuda"]),
        ("capvid --show-completion z", ["zsh"]),
    ],
)
def test_completion_candidates(
    words: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complete(words, monkeypatch, capsys) == expected


SCRIPT = """
import json, sys
from capvid.cli.app import main
code = main([])
heavy = {"torch", "numpy", "transformers", "huggingface_hub", "av", "decord", "torchvision"}
print(json.dumps([code, sorted(heavy & set(sys.modules))]), file=sys.stderr)
"""


@pytest.mark.parametrize(("command", "first"), [("train m3-", "m3-compact"), ("caption --model m", "m3")])
def test_completion_imports_nothing_heavy(command: str, first: str) -> None:
    environment = os.environ | {
        "_CAPVID_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": f"capvid {command}",
    }
    completed = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment
    )
    assert json.loads(completed.stderr) == [0, []]
    name, _, description = completed.stdout.splitlines()[0].partition("\t")
    assert name == first and description


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_completion_scripts_are_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--show-completion", shell]) == 0
    assert f"complete_{shell}" in capsys.readouterr().out


def test_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--show-completion", "tcsh"]) == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_a_recipe_name(tmp_path: Path) -> None:
    program = tmp_path / "capvid"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m capvid "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(capvid --show-completion bash)"; COMP_WORDS=(capvid train m3-t); COMP_CWORD=2; '
        '$(complete -p capvid | sed "s/.*-F \\([^ ]*\\).*/\\1/") capvid; echo "${COMPREPLY[@]}"'
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    completed = subprocess.run(
        ["bash", "--norc", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PATH": path},
    )
    assert (completed.stdout, completed.stderr) == ("m3-tiny\n", "")


def test_install_completion_writes_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert main(["--install-completion", "fish"]) == 0
    (script,) = tmp_path.rglob("capvid.fish")
    assert "complete_fish" in script.read_text()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert str(script) in captured.err
