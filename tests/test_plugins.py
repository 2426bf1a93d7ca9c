"""A new captioner, backbone, dataset format, output format or metric takes one file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy import write_video

import capvid

PACKAGE = Path(capvid.__file__).parent
PLUGINS = Path(__file__).parent / "support" / "plugins"
FOLDERS = {
    "mean_word.py": "captioners",
    "quarters.py": "backbones",
    "toy_dataset.py": "datasets/formats",
    "toy_format.py": "output/writers",
    "toy_metric.py": "metrics",
}
RECIPE = """
captioner = "mean-word"
data = { min_count = 1 }
training = { epochs = 2, batch_size = 4, precision = "fp32" }
"""


@pytest.fixture(scope="module")
def extended_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Link the package into a folder, with the plugin files added."""
    root = tmp_path_factory.mktemp("extended")
    for path in PACKAGE.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            target = root / "capvid" / path.relative_to(PACKAGE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
    (root / "models.toml").symlink_to(PACKAGE.parent / "models.toml")
    for name, folder in FOLDERS.items():
        (root / "capvid" / folder / name).write_text((PLUGINS / name).read_text())
    return root


def test_plugin_files_are_short() -> None:
    assert {path.name for path in PLUGINS.glob("*.py")} == FOLDERS.keys()
    assert all(path.read_text().count("\n") <= 40 for path in PLUGINS.glob("*.py"))


@pytest.mark.slow
def test_plugins_are_used_by_the_command_line(extended_package: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> str:
        command = [sys.executable, "-m", "capvid", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(extended_package), "CAPVID_WEIGHTS": ""}
        completed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    for number in range(4):
        write_video(tmp_path / "clips" / f"v{number}.mp4", seed=number)
    lines = [f"{'val' if n == 3 else 'train'}:v{n}:a {'cat' if n % 2 else 'dog'} runs" for n in range(4)]
    (tmp_path / "data.txt").write_text("\n".join(lines))
    (tmp_path / "toy.toml").write_text(RECIPE)
    assert "toy:FILE (split:video:caption on each line)" in " ".join(run("data", "check", "--help").split())
    run("data", "check", "toy:data.txt")
    run("extract", "clips", "--backbone", "quarters", "-o", "features")
    run("train", "toy.toml", "--data", "toy:data.txt", "--features", "features", "-o", "run")
    text = run("caption", "clips/v0.mp4", "--model", "run", "--format", "toy")
    assert text.isupper() or text == "\n"
    run("caption", "clips", "--model", "run", "-o", "captions.jsonl")
    (tmp_path / "references.json").write_text(json.dumps({f"v{n}": ["a cat runs"] for n in range(4)}))
    assert "WORDS" in run("score", "captions.jsonl", "references.json", "--metrics", "toy,rouge")
