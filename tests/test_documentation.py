"""Every code block of the documentation runs and prints the documented output.

``console`` blocks hold commands after ``$`` and their output, in which ``...`` matches anything; ``bash``
blocks hold commands that must succeed; a ``text`` block right after a ``python`` block is its output. Blocks
below a comment ``<!-- skip: REASON -->`` cannot run in a test.
"""

from __future__ import annotations

import csv
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from toy import Run, capvid

from capvid.captioners.base import CAPTIONERS
from capvid.decoding.decoding_options import DecodingOptions
from capvid.training.recipe import DataOptions, TrainingOptions

__all__ = ["capvid"]

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
REASONS = {"cluster", "download", "installation", "jq", "server"}
REASONS |= {"runs this test", "rewrites the pages that this test checks"}
SHELL = re.compile(r"[|<>;&*$]|^find |^python |^cat |^ls ")


@dataclass(frozen=True)
class Block:
    """A fenced code block: language, reason to skip it, content, and the text block that follows."""

    language: str
    skip: str
    code: str
    output: str | None


def blocks(page: Path) -> Iterator[Block]:
    pattern = re.compile(
        r"(?:^<!-- skip: ([^\n]+) -->\n)?^```(\w+)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?",
        re.DOTALL | re.MULTILINE,
    )
    for skip, language, code, output in pattern.findall(page.read_text(encoding="utf-8")):
        yield Block(language, skip, code, output if language == "python" else None)


def commands(code: str, *, prompt: bool) -> Iterator[tuple[str, str]]:
    """Yield the commands of a block, each with the output below it."""
    lines = code.replace("\\\n", " ").splitlines()
    if not prompt:
        yield from ((line, "...") for line in lines if line.strip() and not line.startswith("#"))
        return
    starts = [n for n, line in enumerate(lines) if line.startswith("$ ")]
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield lines[start][2:], "\n".join(lines[start + 1 : stop])


def check_output(actual: str, expected: str, source: str) -> None:
    pattern = ".*".join(map(re.escape, expected.strip().split("...")))
    message = f"{source} printed:\n{actual}\ninstead of:\n{expected}"
    assert re.fullmatch(pattern, actual.strip(), re.DOTALL), message


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    script = ROOT / "examples" / "shapes.py"
    subprocess.run([sys.executable, script, folder, "--clips", "16"], check=True)
    return folder


@pytest.fixture
def working_folder(tmp_path: Path, shapes: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with the files that the pages mention."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CAPVID_CONFIG", raising=False)
    monkeypatch.setenv("CAPVID_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CAPVID_TRAIN_SET", "training.epochs=1")  # the pages train for longer
    shutil.copytree(ROOT / "examples", "examples")
    Path("holiday").mkdir()
    Path("clips").mkdir()
    for name in ("holiday/car.mp4", "clips/car.mp4", "match.mp4", "your-video.mp4"):
        shutil.copyfile(ROOT / "examples" / "car.mp4", name)
    shutil.make_archive("clips", "tar", base_dir="clips")
    shutil.copytree(shapes / "videos", "videos")
    shutil.copyfile(shapes / "captions.jsonl", "captions.jsonl")
    files: dict[str, object] = {
        "predictions": {"cooking": "a man is cooking in a kitchen", "dog": "a dog is running in a field"},
        "short": {"cooking": "a man cooks", "dog": "a dog is running"},
        "constant": dict.fromkeys(["cooking", "dog"], "a man is talking"),
        "references": {
            "cooking": ["a man is cooking food", "someone cooks in a kitchen", "a man fries an egg"],
            "dog": ["a dog runs across a field", "a brown dog is running", "the dog plays on the grass"],
        },
    }
    events = {"v": {"timestamps": [[0, 4], [5, 9]], "sentences": ["a man is cooking", "he eats"]}}
    files.update(dict.fromkeys(["events", "annotator-1", "annotator-2"], events))
    for name, captions in files.items():
        Path(f"{name}.json").write_text(json.dumps(captions))
    return tmp_path


def run_command(command: str, capvid: Run) -> str:
    """Run one command line, in this process if it needs no shell."""
    if not SHELL.search(command.partition(" # ")[0]):
        name, *arguments = shlex.split(command, comments=True)
        assert name == "capvid"
        code, out, err = capvid(*arguments)
        assert code == 0, f"{command}: {err}"
        return out
    python = shlex.quote(sys.executable)
    script = f'set -e\ncapvid() {{ {python} -m capvid "$@"; }}\npython() {{ {python} "$@"; }}\n{command}\n'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    completed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)
    assert completed.returncode == 0, f"{command}: {completed.stderr}"
    return completed.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_blocks_run(
    page: Path, working_folder: Path, capvid: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    if page.name == "python.md":
        assert capvid("extract", "videos", "--backbone", "colour-grid", "-o", "train-features")[0] == 0
    for block in blocks(page):
        if block.skip:
            assert block.skip in REASONS
        elif block.language in ("console", "bash"):
            for command, expected in commands(block.code, prompt=block.language == "console"):
                check_output(run_command(command, capvid), expected, f"{page.name}: {command}")
        elif block.language == "python":
            capsys.readouterr()
            exec(compile(block.code, page.name, "exec"), names)
            check_output(capsys.readouterr().out, block.output or "", page.name)
        elif block.language == "json":
            json.loads(block.code)
        else:
            assert block.language in ("toml", "text")


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_dialects_of_trainers(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    rows = [{"file_name": "a.mp4", "text": 'says "no", twice'}, {"file_name": "b/c.mp4", "text": "a dog"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "clips" / "metadata.jsonl").write_text(lines)
    (block,) = [each for each in blocks(ROOT / "docs" / "training-data.md") if each.skip == "jq"]
    subprocess.run(["bash", "-ec", block.code], cwd=tmp_path, check=True)
    written = {path.name: path.read_text() for path in (tmp_path / "clips").iterdir()}
    assert [json.loads(line) for line in written["musubi.jsonl"].splitlines()] == [
        {"video_path": str(tmp_path / "clips" / row["file_name"]), "caption": row["text"]} for row in rows
    ]
    assert written["videos.txt"] == "a.mp4\nb/c.mp4\n" and written["prompt.txt"].endswith("a dog\n")
    table = list(csv.reader(written["metadata.csv"].splitlines()))
    assert table == [["video", "prompt"], *([row["file_name"], row["text"]] for row in rows)]
    assert [row["media_path"] for row in json.loads(written["dataset.json"])] == ["a.mp4", "b/c.mp4"]


def test_reference_pages_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    pages = runpy.run_path(str(ROOT / "docs" / "generate_reference.py"))["pages"]()
    for name, text in pages.items():
        stored = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
        assert stored == text, f"docs/reference/{name} is stale: run python docs/generate_reference.py"


def test_links_have_targets() -> None:
    for page in [*PAGES, *(ROOT / "docs" / "reference").glob("*.md"), ROOT / "benchmarks" / "RESULTS.md"]:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            file = (page.parent / path) if path else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in anchors, f"{page.name}: {target}"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90


def test_options_named_beside_the_papers_exist() -> None:
    """The last column of the table of deviations, with or without wildcards."""
    known = {"--values", "none"}
    sections = {"data": DataOptions, "training": TrainingOptions, "decoding": DecodingOptions}
    for name, section in sections.items():
        known |= {f"{name}.*", *(f"{name}.{field.name}" for field in fields(section))}
    for name, captioner in CAPTIONERS.items():
        known |= {f"captioner={name}", *(f"model.{field.name}" for field in fields(captioner.config_class))}
    table = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 40
    for row in rows:
        assert len(row) == 7, row
        assert {option.strip(" `") for option in row[5].split(",")} <= known, row
