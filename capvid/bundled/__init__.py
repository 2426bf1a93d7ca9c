"""The models that come with capvid: weights in half precision, and their model cards."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def model_card(name: str) -> str | None:
    """The card of a bundled model, in Markdown; None if it has none."""
    path = FOLDER / f"{name}.md"
    return path.read_text(encoding="utf-8") if path.is_file() else None
