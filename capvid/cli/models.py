"""``capvid models``: what can be selected."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from capvid.cli._options import complete_model
from capvid.cli._terminal import print_line
from capvid.errors import UsageError
from capvid.utils.escaping import json_text

if TYPE_CHECKING:
    from capvid.backbones.catalog import BackboneEntry, CaptionerEntry

_ACTIVATIONS = 1.2  # memory of a running model relative to its weights


def models(
    name: str | None = typer.Argument(None, metavar="[NAME]", autocompletion=complete_model),
    as_json: bool = typer.Option(False, "--json", help="Print JSON, with everything that is known."),
) -> None:
    """List the models, or show one with its model card, or one of the Hub (OWNER/NAME) before its download.

    Captioners write the sentences: one comes trained, and all can be trained with capvid train. Backbones are
    the networks that see the frames; those that are not here yet are downloaded when they are first used, or
    have to be got (capvid models NAME says where).
    """
    from capvid.backbones.catalog import backbone_entry, backbones, captioners, model_card
    from capvid.utils.registry import did_you_mean

    entries: list[CaptionerEntry | BackboneEntry] = [*captioners().values(), *backbones().values()]
    if name is None:
        if as_json:
            typer.echo(json_text([_record(entry) for entry in entries], indent=1))
        else:
            _list_models(list(captioners().values()), list(backbones().values()))
        return
    entry = next((each for each in captioners().values() if name in (each.name, each.repository)), None)
    try:
        selected = entry or backbone_entry(name)
    except UsageError as error:
        if "/" in name:
            _show_remote(name, as_json=as_json)
            return
        known = [*captioners(), *backbones()]
        remedy = did_you_mean(name, known) or f"there are {', '.join(known)}"
        raise UsageError(f"unknown model {name!r}", remedy=remedy) from error
    if as_json:
        typer.echo(json_text(_record(selected), indent=1))
        return
    rows = _rows(selected)
    width = max(map(len, rows)) + 1
    for key, value in rows.items():
        print_line(f"{key + ':':<{width}} {value}")
    if (card := model_card(selected.name)) is not None:
        typer.echo(f"\n{card.rstrip()}")


def _show_remote(name: str, *, as_json: bool) -> None:
    """Print type, licence and size of a model on the Hub, and whether it fits into the memory."""
    from capvid.checkpoints.hub_checkpoints import inspect_model
    from capvid.utils.device import free_memory

    model = inspect_model(name)
    free, where = free_memory()
    needed = int(model.parameters * (4 if where == "of RAM" else 2) * _ACTIVATIONS)  # fp32 on a CPU
    if as_json:
        record = {**dataclasses.asdict(model), "supported": model.supported, "fits": needed <= free}
        typer.echo(json_text({**record, "needed_bytes": needed, "free_bytes": free}, indent=1))
        return
    fits = "fits" if needed <= free else "does not fit"
    rows = {
        "repository": f"{model.repository}@{model.commit[:12]}",
        "type": f"{model.kind}{'' if model.supported else ', which capvid cannot use'}",
        "licence": model.licence or "not stated",
        "weights": f"{model.parameters / 1e9:.2g} billion, {model.bytes / 1e9:.2g} GB",
        "memory": f"{fits}: needs about {needed / 1e9:.2g} GB, {free / 1e9:.2g} GB {where} are free",
    }
    for key, value in rows.items():
        print_line(f"{key + ':':<12}{value}")


def _list_models(captioners: Sequence[CaptionerEntry], backbones: Sequence[BackboneEntry]) -> None:
    """Print both tables: at the terminal's width, or with all columns, one line per model, when piped."""
    from capvid.backbones.catalog import default_captioners
    from capvid.backbones.weights import is_available
    from capvid.cli._terminal import column_lines, terminal_width, wrap

    width = terminal_width()
    here = {entry.name: "yes" if is_available(entry) else "no" for entry in backbones}
    if width is None:
        sources = [f"{_size(c)}, comes with capvid" if c.bundled else c.source or "-" for c in captioners]
        rows = [(c.name, c.description, c.paper, s) for c, s in zip(captioners, sources, strict=True)]
        lines = [*column_lines(("captioner", "description", "paper", "trained"), rows, None), ""]
        wide = [(b.name, ", ".join(b.layers), _size(b), b.licence, b.source, here[b.name]) for b in backbones]
        lines += column_lines(("backbone", "layers", "size", "licence", "source", "here"), wide, None)
    else:
        lines = ["Captioners", ""]
        for entry in captioners:
            terms = ""
            if entry.repository is not None:
                terms = f" (--model {entry.repository}, {entry.licence})"
            elif entry.source is not None:
                *preferred, offline = default_captioners()
                default = "; the default" if entry.name in preferred else ""
                default = "; the default offline" if entry.name == offline else default
                terms = f" (comes with capvid, {_size(entry)}, {entry.licence}{default})"
            lines.append(f"{entry.name}{terms}")
            for text in (entry.description, entry.paper):
                lines += [f"    {line}" for line in wrap(text, width - 4)]
        lines += ["", "Backbones", ""]
        origins = {"bundled": "capvid", "hub": "the Hub", "file": "your file", "none": "-"}
        origins["https"] = "the web"
        kinds = [b.source.partition(":")[0] for b in backbones]
        narrow = [
            (b.name, here[b.name], _size(b), origins.get(kind, kind), b.licence)
            for b, kind in zip(backbones, kinds, strict=True)
        ]
        lines += column_lines(("backbone", "here", "size", "from", "licence"), narrow, width)
        lines += ["", "capvid models NAME shows all about one, capvid train --list what can be trained."]
    for line in lines:
        print_line(line)


def _record(entry: CaptionerEntry | BackboneEntry) -> dict[str, Any]:
    """Return all metadata of a model, for programs."""
    from capvid.backbones.catalog import BackboneEntry, default_captioners
    from capvid.backbones.weights import is_available
    from capvid.training.recipe import all_recipes

    if not isinstance(entry, BackboneEntry):
        recipes = all_recipes().items()
        return {
            "kind": "captioner",
            **{name: getattr(entry, name) for name in ("name", "description", "paper")},
            "code": entry.file,
            **{name: getattr(entry, name) for name in ("source", "licence", "bytes", "sha256")},
            "here": entry.bundled,
            "default": entry.name in default_captioners(),
            "recipes": [name for name, recipe in recipes if recipe.get("captioner") == entry.name],
        }
    members = ("description", "origin", "source", "file", "licence", "bytes", "sha256")
    return {
        "kind": "backbone",
        "name": entry.name,
        "aliases": list(entry.aliases),
        **{name: getattr(entry, name) for name in members},
        "here": is_available(entry),
        "layers": {
            name: {"locations": one.locations, "width": one.width} for name, one in entry.layers.items()
        },
        "default_layer": entry.default_layer,
        "input": entry.describe_input(),
    }


def _rows(entry: CaptionerEntry | BackboneEntry) -> dict[str, str]:
    """Return the record of a model as text, for people."""
    record = _record(entry)
    digest = record["sha256"] or "recorded at the first download"
    if record["kind"] == "captioner":
        recipes = ", ".join(record["recipes"])
        terms = {"size": _size(entry), "sha256": digest, "licence": record["licence"] or "-"}
        return {
            "captioner": record["name"],
            **{key: record[key] for key in ("description", "paper", "code")},
            "weights": record["source"] or "none come with capvid: train it",
            "recipes": f"{recipes} (capvid train RECIPE)" if recipes else "-",
            **(terms if record["source"] is not None else {}),
        }
    source = record["source"]
    if source == "none":
        digest = "-"
    elif not source.startswith(("hub:", "torchvision:")):
        digest = record["sha256"] or "not known beforehand"
    download = "downloaded when it is first used"
    if source.startswith("file:"):
        download = "get the file, capvid convert it if need be, and give it with --weights or CAPVID_WEIGHTS"
    layers = []
    for name, layer in record["layers"].items():
        locations = "" if layer["locations"] is None else f"{layer['locations']} x "
        layers.append(f"{name} ({locations}{layer['width']})")
    return {
        "backbone": record["name"],
        "also called": ", ".join(record["aliases"]) or "-",
        **{key: record[key] for key in ("description", "origin", "licence", "source", "file")},
        "size": _size(entry),
        "sha256": digest,
        "layers": ", ".join(layers),
        "default layer": record["default_layer"],
        "input": record["input"],
        "here": "yes" if record["here"] else f"no; {download}",
    }


def _size(entry: CaptionerEntry | BackboneEntry) -> str:
    return f"{entry.bytes / 1e6:.0f} MB" if entry.bytes else "-"
