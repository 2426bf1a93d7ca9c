"""``capvid models``: what can be selected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capvid.cli import _completion as completion
from capvid.cli._terminal import print_line
from capvid.errors import UsageError
from capvid.utils.escaping import json_text

if TYPE_CHECKING:
    from capvid.backbones.catalog import BackboneEntry, CaptionerEntry


def models(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", show_default=False, autocompletion=completion.models),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with everything that is known.")
    ] = False,
) -> None:
    """List the models, or show one with its model card.

    Captioners write the sentences: one comes trained, and all can be trained with capvid train. Backbones are
    the networks that see the frames; those that are not here yet are downloaded when they are first used, or
    have to be got (capvid models NAME says where).
    """
    from capvid.backbones.catalog import backbones, captioners, model_card

    if name is None and not as_json:
        _show_all(list(captioners().values()), list(backbones().values()))
    elif name is None:
        entries: list[CaptionerEntry | BackboneEntry] = [*captioners().values(), *backbones().values()]
        typer.echo(json_text([_record(entry) for entry in entries], indent=1))
    elif as_json:
        typer.echo(json_text(_record(_find(name)), indent=1))
    else:
        entry = _find(name)
        rows = _rows(entry)
        width = max(map(len, rows)) + 1
        for key, value in rows.items():
            print_line(f"{key + ':':<{width}} {value}")
        if (card := model_card(entry.name)) is not None:
            typer.echo(f"\n{card.rstrip()}")


def _find(name: str) -> CaptionerEntry | BackboneEntry:
    """Find the captioner or backbone of that name.

    Raises:
        UsageError: there is neither.
    """
    from capvid.backbones.catalog import backbone_entry, backbones, captioners
    from capvid.utils.registry import did_you_mean

    for captioner in captioners().values():
        if name in (captioner.name, captioner.repository):
            return captioner
    try:
        return backbone_entry(name)
    except UsageError as error:
        known = [*captioners(), *backbones()]
        remedy = did_you_mean(name, known) or f"there are {', '.join(known)}"
        raise UsageError(f"unknown model {name!r}", remedy=remedy) from error


def _show_all(captioners: Sequence[CaptionerEntry], backbones: Sequence[BackboneEntry]) -> None:
    """Print both tables: at the terminal's width, or with everything on one line for each when piped."""
    from capvid.backbones.weights import is_here
    from capvid.cli._terminal import column_lines, terminal_width, wrapped

    width = terminal_width()
    here = {entry.name: "yes" if is_here(entry) else "no" for entry in backbones}
    if width is None:
        rows = [(c.name, c.description, c.paper, _trained(c)) for c in captioners]
        _print(column_lines(("captioner", "description", "paper", "trained"), rows, None))
        print_line()
        wide = [
            (b.name, ", ".join(b.layers), _megabytes(b.bytes), b.licence, b.source, here[b.name])
            for b in backbones
        ]
        _print(column_lines(("backbone", "layers", "size", "licence", "source", "here"), wide, None))
        return
    typer.echo("Captioners\n")
    for captioner in captioners:
        print_line(captioner.name if captioner.source is None else f"{captioner.name} ({_terms(captioner)})")
        for text in (captioner.description, captioner.paper):
            _print(f"    {line}" for line in wrapped(text, width - 4))
    typer.echo("\nBackbones\n")
    narrow = [(b.name, here[b.name], _megabytes(b.bytes), _place(b), b.licence) for b in backbones]
    _print(column_lines(("backbone", "here", "size", "from", "licence"), narrow, width))
    typer.echo("\ncapvid models NAME shows all about one, capvid train --list what can be trained.")


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print_line(line)


def _rows(entry: CaptionerEntry | BackboneEntry) -> dict[str, str]:
    """What is shown of a single model."""
    from capvid.backbones.catalog import BackboneEntry

    return _backbone_rows(entry) if isinstance(entry, BackboneEntry) else _captioner_rows(entry)


def _captioner_rows(entry: CaptionerEntry) -> dict[str, str]:
    recipes = ", ".join(_recipes(entry))
    rows = {
        "captioner": entry.name,
        "description": entry.description,
        "paper": entry.paper,
        "code": entry.file,
        "weights": entry.source or "none come with capvid: train it",
        "recipes": f"{recipes} (capvid train RECIPE)" if recipes else "-",
    }
    if entry.source is not None:
        rows |= {
            "size": _megabytes(entry.bytes),
            "sha256": entry.sha256 or "recorded at the first download",
            "licence": entry.licence or "-",
        }
    return rows


def _backbone_rows(entry: BackboneEntry) -> dict[str, str]:
    from capvid.backbones.weights import is_here

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
        "here": "yes" if is_here(entry) else f"no; {_how(entry)}",
    }


def _record(entry: CaptionerEntry | BackboneEntry) -> dict[str, Any]:
    """Everything that is known of a model, for programs."""
    from capvid.backbones.catalog import BackboneEntry, default_captioner
    from capvid.backbones.weights import is_here

    if not isinstance(entry, BackboneEntry):
        return {
            "kind": "captioner",
            "name": entry.name,
            "description": entry.description,
            "paper": entry.paper,
            "code": entry.file,
            "source": entry.source,
            "licence": entry.licence,
            "bytes": entry.bytes,
            "sha256": entry.sha256,
            "here": entry.bundled,
            "default": entry.name == default_captioner(),
            "recipes": _recipes(entry),
        }
    layers = {
        name: {"locations": layer.locations, "width": layer.width} for name, layer in entry.layers.items()
    }
    return {
        "kind": "backbone",
        "name": entry.name,
        "aliases": list(entry.aliases),
        "description": entry.description,
        "origin": entry.origin,
        "source": entry.source,
        "file": entry.file,
        "licence": entry.licence,
        "bytes": entry.bytes,
        "sha256": entry.sha256,
        "here": is_here(entry),
        "layers": layers,
        "default_layer": entry.default_layer,
        "input": entry.describe_input(),
    }


def _recipes(entry: CaptionerEntry) -> list[str]:
    """Names of the recipes that train this captioner."""
    from capvid.training.recipe import all_recipes

    return [name for name, recipe in all_recipes().items() if recipe.get("captioner") == entry.name]


def _trained(entry: CaptionerEntry) -> str:
    return f"{_megabytes(entry.bytes)}, comes with capvid" if entry.bundled else entry.source or "-"


def _terms(entry: CaptionerEntry) -> str:
    """What is to be known of a captioner that comes trained."""
    from capvid.backbones.catalog import default_captioner

    if entry.repository is not None:
        return f"--model {entry.repository}, {entry.licence}"
    default = "; taken where --model is not given" if entry.name == default_captioner() else ""
    return f"comes with capvid, {_megabytes(entry.bytes)}, {entry.licence}{default}"


def _digest(entry: BackboneEntry) -> str:
    if entry.source == "none":
        return "-"
    downloaded = entry.source.startswith(("hub:", "torchvision:"))
    return entry.sha256 or ("recorded at the first download" if downloaded else "not known beforehand")


def _place(entry: BackboneEntry) -> str:
    """Where the weights come from, in a word or two."""
    kind = entry.source.partition(":")[0]
    return {"bundled": "capvid", "hub": "the Hub", "file": "your file", "none": "-"}.get(kind, kind)


def _how(entry: BackboneEntry) -> str:
    """How weights that are not here get here."""
    if entry.source.startswith("file:"):
        return "get the file, capvid convert it if need be, and give it with --weights or CAPVID_WEIGHTS"
    return "downloaded when it is first used"


def _megabytes(size: int | None) -> str:
    return f"{size / 1e6:.0f} MB" if size else "-"
