from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_diagram_is_up_to_date_and_complete() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "draw_architecture.py"))
    assert (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8") == script["draw"]()
    folders = {path.parent.name for path in (ROOT / "capvid").glob("*/__init__.py")}
    assert folders == script["FOLDERS"].keys()


def test_page_mentions_only_existing_files() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = {word.strip("`.,;:()") for word in page.split() if word.startswith(("`capvid/", "(`capvid/"))}
    assert names
    assert [name for name in sorted(names) if not (ROOT / name.partition("*")[0].rstrip("/")).exists()] == []
