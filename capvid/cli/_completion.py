"""What the shell is told when Tab is pressed; nothing here may take long, or import torch."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import typer

from capvid.cli._terminal import print_line
from capvid.utils.escaping import terminal

Candidates = list[tuple[str, str]]  # a value, and what it is


class Shell(str, Enum):
    """The shells of ``--show-completion`` and ``--install-completion``."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"
    powershell = "powershell"
    pwsh = "pwsh"


def _beginning(incomplete: str, candidates: Iterable[tuple[str, str]]) -> Candidates:
    return [(terminal(value), terminal(text)) for value, text in candidates if value.startswith(incomplete)]


def captioners(incomplete: str) -> Candidates:
    """Captioners that come trained; a path is completed by the shell where none begins like it."""
    from capvid.backbones.catalog import captioners

    return _beginning(incomplete, ((n, e.description) for n, e in captioners().items() if e.source))


def backbones(incomplete: str) -> Candidates:
    """Backbones."""
    from capvid.backbones.catalog import backbones

    return _beginning(incomplete, ((name, entry.description) for name, entry in backbones().items()))


def models(incomplete: str) -> Candidates:
    """Captioners, trained or not, and backbones."""
    from capvid.backbones.catalog import captioners

    found = _beginning(incomplete, ((name, entry.description) for name, entry in captioners().items()))
    return found + backbones(incomplete)


def recipes(incomplete: str) -> Candidates:
    """Recipes that come with capvid."""
    from capvid.training.recipe import all_recipes

    return _beginning(incomplete, ((name, recipe["description"]) for name, recipe in all_recipes().items()))


def devices(incomplete: str) -> Candidates:
    """Devices, whether this machine has them or not."""
    return _beginning(incomplete, ((name, "") for name in ("auto", "cpu", "cuda", "mps")))


def precisions(incomplete: str) -> Candidates:
    """Numbers that backbones compute in."""
    return _beginning(incomplete, ((name, "") for name in ("auto", "fp32", "fp16", "bf16")))


def show(shell: Shell | None) -> None:
    """Print what a shell has to read to complete capvid's commands, and stop."""
    if shell is not None:
        from typer.completion import get_completion_script

        script = get_completion_script(prog_name="capvid", complete_var="_CAPVID_COMPLETE", shell=shell.value)
        typer.echo(script)
        raise typer.Exit


def install(shell: Shell | None) -> None:
    """Put that where the shell reads it when it starts, and stop."""
    if shell is not None:
        from typer.completion import install

        _, path = install(shell=shell.value, prog_name="capvid", complete_var="_CAPVID_COMPLETE")
        print_line(f"written to {path}; it works in shells that are opened from now on", err=True)
        raise typer.Exit
