"""Encoders of images and clips with random weights, in full or with few blocks."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from capvid.backbones.catalog import MODELS_FILE, BackboneEntry, backbones

DEPTHS = {"timm": "depth", "clip": "num_hidden_layers", "vjepa2": "num_hidden_layers"}
ENCODERS = [
    entry.name
    for entry in backbones().values()
    if entry.kind in ("clip", "vjepa2") or (entry.architecture or "").startswith("vit_")
]


def shallow(entry: BackboneEntry, blocks: int) -> BackboneEntry:
    """Return the entry with few transformer blocks; all blocks of such a network are alike."""
    if entry.name not in ENCODERS:
        return entry
    return dataclasses.replace(entry, config={**entry.config, DEPTHS[entry.kind]: blocks})


def write_pinned_models(path: Path, name: str, commit: str, blocks: int | None) -> Path:
    """Write a models file with one encoder of ``models.toml``, at a commit, in full or with few blocks."""
    tables = re.split(r"(?m)^(?=\[)", MODELS_FILE.read_text(encoding="utf-8"))
    text = "".join(table for table in tables if re.match(rf"\[backbones\.{name}[.\]]", table))
    text = re.sub(r'(source = "hub:[^"@]+)"', rf'\1@{commit}"', text)
    if blocks is not None:
        depth, header = DEPTHS[backbones()[name].kind], f"[backbones.{name}.config]\n"
        text = re.sub(rf"(?m)^{depth} = .*\n", "", text)
        text = text if header in text else text + header
        text = text.replace(header, f"{header}{depth} = {blocks}\n")
    path.write_text(text)
    return path
