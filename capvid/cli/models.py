"""``capvid models``: what can be selected."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from capvid.errors import UsageError

if TYPE_CHECKING:
    from capvid.features.registry import BackboneEntry, CaptionerEntry


def models(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)] = None,
) -> None:
    """List the models, or show one with its model card.

    Captioners write the sentences; backbones are the networks that see the frames.
    """
    from capvid.bundled import model_card
    from capvid.features.registry import backbones, captioners

    if name is None:
        _show_all(list(captioners().values()), list(backbones().values()))
        return
    captioner = captioners().get(name) or next(
        (entry for entry in captioners().values() if entry.repository == name), None
    )
    rows = _captioner_rows(captioner) if captioner else _backbone_rows(_find_backbone(name))
    width = max(map(len, rows)) + 1
    for key, value in rows.items():
        typer.echo(f"{key + ':':<{width}} {value}")
    if (card := model_card(name)) is not None:
        typer.echo(f"\n{card.rstrip()}")


def _find_backbone(name: str) -> BackboneEntry:
    """Find the backbone of that name.

    Raises:
        UsageError: there is neither such a backbone nor such a captioner.
    """
    from capvid.features.registry import backbone_entry, backbones, captioners

    try:
        return backbone_entry(name)
    except UsageError as error:
        known = ", ".join([*captioners(), *backbones()])
        raise UsageError(f"unknown model {name!r}", remedy=f"there are {known}") from error


def _show_all(captioners: list[CaptionerEntry], backbones: list[BackboneEntry]) -> None:
    """Print both tables, at the terminal's width, or without cutting anything off when piped."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from capvid.features.weights import is_here

    on_terminal = sys.stdout.isatty()
    console = Console(width=None if on_terminal else 400, highlight=False)
    style = box.SIMPLE_HEAD if on_terminal else None  # piped: one row per line, columns aligned
    table = Table("captioner", "description", "paper", "trained", box=style)
    for captioner in captioners:
        trained = captioner.source or "-"
        if captioner.bundled:
            trained = f"{_megabytes(captioner.bytes)}, comes with capvid"
        table.add_row(captioner.name, captioner.description, captioner.paper, trained)
    console.print(table)
    console.print()
    table = Table("backbone", "layers", "size", "licence", "source", "here", box=style)
    for entry in backbones:
        table.add_row(
            entry.name,
            ", ".join(entry.layers),
            _megabytes(entry.bytes),
            entry.licence,
            entry.source,
            "yes" if is_here(entry) else "no",
        )
    console.print(table)


def _captioner_rows(entry: CaptionerEntry) -> dict[str, str]:
    rows = {
        "captioner": entry.name,
        "description": entry.description,
        "paper": entry.paper,
        "code": entry.file,
        "weights": entry.source or "train it with capvid train",
    }
    if entry.source is not None:
        rows |= {
            "size": _megabytes(entry.bytes),
            "sha256": entry.sha256 or "recorded at the first download",
            "licence": entry.licence or "-",
        }
    return rows


def _backbone_rows(entry: BackboneEntry) -> dict[str, str]:
    from capvid.features.weights import is_here

    layers = (
        f"{name} ({layer.width if layer.locations is None else f'{layer.locations} x {layer.width}'})"
        for name, layer in entry.layers.items()
    )
    return {
        "backbone": entry.name,
        "also called": ", ".join(entry.aliases) or "-",
        "description": entry.description,
        "origin": entry.origin,
        "licence": entry.licence,
        "source": entry.source,
        "file": entry.file,
        "size": _megabytes(entry.bytes),
        "sha256": _digest(entry),
        "layers": ", ".join(layers),
        "default layer": entry.default_layer,
        "input": entry.describe_input(),
        "here": "yes" if is_here(entry) else "no",
    }


def _digest(entry: BackboneEntry) -> str:
    if entry.source == "none":
        return "-"
    downloaded = entry.source.startswith(("hub:", "torchvision:"))
    return entry.sha256 or ("recorded at the first download" if downloaded else "not known beforehand")


def _megabytes(size: int | None) -> str:
    return f"{size / 1e6:.0f} MB" if size else "-"
