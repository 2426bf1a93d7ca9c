"""``capvid doctor``: what is on this machine, and what to do about what is not."""

from __future__ import annotations

import typer

from capvid.cli.streams import print_line


def doctor() -> None:
    """Look at versions, devices, codecs, cache, Java and the Hub.

    Each line says how something stands; below a gap stands what to do about it. The exit code is 1 if capvid
    cannot be used, 0 otherwise.
    """
    from capvid.diagnosis import State, diagnose

    broken = False
    for finding in diagnose():
        print_line(f"{finding.state.value:<6}  {finding.topic:<14}  {finding.found}")
        if finding.remedy:
            print_line(f"{'':<6}  {'':<14}  -> {finding.remedy}")
        broken = broken or finding.state is State.BROKEN
    if broken:
        raise typer.Exit(1)
