"""What a training run was made of and with, beside its checkpoints: ``run.json`` and two smaller files.

Nothing in them names a path or the host, so that they can be passed on.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import capvid
from capvid.data.captions import SPLITS, CaptionedVideo
from capvid.errors import CheckpointError
from capvid.features.file import FeatureHeader
from capvid.features.registry import models_file
from capvid.files import atomic_write_text, read_regular
from capvid.limits import MIB
from capvid.parsing import parse_json
from capvid.text.vocabulary import Vocabulary
from capvid.training.progress import Progress
from capvid.training.recipe import Recipe

RUN, VOCABULARY, FEATURES = "run.json", "vocabulary.json", "features.json"
_FORMAT = 1
_BYTES = 32 * MIB  # of run.json
_PACKAGES = ("torch", "accelerate", "numpy")


def begin(
    folder: Path,
    *,
    recipe: Recipe,
    videos: Sequence[CaptionedVideo],
    vocabulary: Vocabulary,
    header: FeatureHeader,
    device: torch.device,
    progress: Progress,
) -> None:
    """Write ``run.json``, ``vocabulary.json`` and ``features.json`` as training begins or goes on.

    A run that goes on keeps what was written when it began, and its list ``resumed`` grows by one.

    Args:
        folder: of the run.
        recipe: its settings.
        videos: of all splits.
        vocabulary: its words, written in their order.
        header: of the features.
        device: where it is trained.
        progress: where it stands.

    Raises:
        CheckpointError: the ``run.json`` of a run that goes on is damaged.
        OSError: a file cannot be written.
    """
    now = {"time": _now(), **_surroundings(device)}
    began: Mapping[str, Any] | None = now
    resumed: list[Mapping[str, Any]] = []
    if progress != Progress():
        before = _read(folder / RUN)
        began = before.get("began")
        resumed = [*before["resumed"], {"epoch": progress.epoch, "batch": progress.batch, **now}]
    record = {
        "format": _FORMAT,
        "recipe": recipe.name,
        "captioner": recipe.captioner,
        "seed": recipe.training.seed,
        "data": _counts(videos),
        "vocabulary": len(vocabulary),
        "began": began,
        "resumed": resumed,
    }
    _write(folder / RUN, record)
    _write(folder / VOCABULARY, vocabulary.words)
    atomic_write_text(folder / FEATURES, header.to_json() + "\n")


def end(folder: Path, progress: Progress, *, uncalibrated: str | None) -> None:
    """Add to ``run.json`` what came out.

    That is the number of epochs, their seconds in all, which was the best, and why it was not calibrated,
    null if it was. A run without the file, one of an older capvid that was over already, gets none.

    Raises:
        CheckpointError: the file is damaged.
        OSError: it cannot be written.
    """
    if (folder / RUN).is_file() and progress.best is not None:
        rows = progress.rows
        ended = {
            "epochs": len(rows),
            "seconds": round(sum(row["seconds"] for row in rows), 3),
            "best": {"epoch": progress.best.epoch, "val_cider": progress.best.cider},
            "uncalibrated": uncalibrated,
        }
        _write(folder / RUN, {**_read(folder / RUN), **ended})


@lru_cache(maxsize=1)
def source_digest() -> str:
    """SHA-256 over the Python and TOML files of capvid, as 64 hexadecimal digits.

    It tells two development checkouts apart that have the same version. The names and contents of the files
    go into it in the order of the names; where the package lies does not.
    """
    package = Path(capvid.__file__).parent
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    files |= {path.relative_to(package).as_posix(): path for path in package.rglob("*.toml")}
    files["models.toml"] = models_file()  # outside of the package in a checkout
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _surroundings(device: torch.device) -> dict[str, Any]:
    """The software and the machine."""
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    return {
        "capvid": {"version": capvid.__version__, "source_sha256": source_digest()},
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "processes": torch.distributed.get_world_size() if grouped else 1,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@lru_cache(maxsize=1)
def _processor() -> str:
    """The processor's name; on Linux, Python does not know it."""
    listed = Path("/proc/cpuinfo")
    for line in listed.read_text(errors="replace").splitlines() if listed.is_file() else []:
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def _counts(videos: Sequence[CaptionedVideo]) -> dict[str, dict[str, int]]:
    """Videos, captions and paragraphs of each split."""
    counts = {}
    for split in SPLITS:
        some = [video for video in videos if video.split == split]
        counts[split] = {
            "videos": len(some),
            "captions": sum(len(video.captions) for video in some),
            "paragraphs": sum(len(video.paragraphs) for video in some),
        }
    return counts


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def _read(path: Path) -> Mapping[str, Any]:
    """What was written before; where an older capvid began the run, when that was is not known."""
    if not path.exists():
        return {"began": None, "resumed": []}
    try:
        record = parse_json(read_regular(path, max_bytes=_BYTES).decode())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged ({error})", remedy="remove it, and resume again") from error
    if not isinstance(record, dict) or not isinstance(record.get("resumed"), list):
        raise CheckpointError(f"{path}: damaged (not a record)", remedy="remove it, and resume again")
    return record


def _write(path: Path, value: Any) -> None:
    atomic_write_text(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")
