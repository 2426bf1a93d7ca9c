"""Names that are nearly right."""

from __future__ import annotations

from collections.abc import Iterable

_MOST = 3  # names that are asked for


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Ask for the names that are closest to ``name``, as a remedy; empty where none is close.

    Args:
        name: what was given.
        known: what could have been given.
    """
    from difflib import SequenceMatcher

    wanted, likeness = _folded(name), {}
    for item in known:
        folded = _folded(item)
        if folded == wanted:
            return f"did you mean {item}?"
        alike = SequenceMatcher(None, wanted, folded).ratio()
        if alike >= (0.5 if len(wanted) < 4 else 0.6) or (len(wanted) > 1 and folded.startswith(wanted)):
            likeness[item] = alike
    found = sorted(likeness, key=lambda item: -likeness[item])[:_MOST]
    if not found:
        return ""
    *others, last = found
    return f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"


def _folded(name: str) -> str:
    return name.casefold().replace("_", "-")
