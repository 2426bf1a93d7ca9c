"""Run folder: its lock, the record of the run's origin, and its progress."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
from safetensors import SafetensorError

from capvid.backbones.catalog import MODELS_FILE, backbones
from capvid.backbones.weights import local_weights, own_file_name
from capvid.datasets.dataset import SPLITS, CaptionedVideo
from capvid.errors import CheckpointError, UsageError, WeightsError
from capvid.features.feature_file import FeatureHeader
from capvid.text.vocabulary import Vocabulary
from capvid.training.recipe import Recipe
from capvid.training.reporters import EpochResult
from capvid.utils.files import atomic_path, atomic_write_text, read_regular, sha256_file
from capvid.utils.output_check import check_outputs
from capvid.utils.validation import MIB, parse_json, short
from capvid.version import __version__

RUN, VOCABULARY, FEATURES = "run.json", "vocabulary.json", "features.json"
_MAX_BYTES = 32 * MIB  # of run.json
PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(kw_only=True)
class Progress:
    """Progress of a run."""

    epoch: int = 1  # the current one, from 1
    batch: int = 0  # number of its batches that are done
    loss: float = 0.0  # sum over their words
    words: int = 0  # number of these words
    best: EpochResult | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)  # of metrics.jsonl

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Restore a saved progress; raise ValueError, TypeError or KeyError if the values are none."""
        best = None if values["best"] is None else EpochResult(**values["best"])
        progress = cls(**{**values, "best": best})
        counts = (progress.epoch, progress.batch, progress.words)
        if not all(type(count) is int and count >= 0 for count in counts) or progress.epoch < 1:
            raise ValueError("epoch, batch and words are not integers")
        return progress


def check_identity(path: Path, what: str, saved: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the run in ``path`` was begun with the same recipe and data."""
    for name, value in identity.items():
        value = json.loads(json.dumps(value))
        if saved.get(name) != value:
            options = ", ".join(_differences(saved.get(name), value))
            raise CheckpointError(
                f"{path}: {what} with another {name}{f' ({options})' if options else ''}",
                remedy=f"give the {name} that it was begun with, or begin anew with --overwrite",
            )


def _differences(saved: Any, value: Any, prefix: str = "") -> Iterator[str]:
    """Yield each option that differs, with its saved and its new value."""
    if not isinstance(saved, dict) or not isinstance(value, dict):
        if prefix:
            yield f"{prefix} was {short(saved)}, is {short(value)}"
        return
    for name in [*saved, *(name for name in value if name not in saved)]:
        if saved.get(name) != value.get(name):
            yield from _differences(saved.get(name), value.get(name), f"{prefix}.{name}".lstrip("."))


@contextmanager
def resuming(path: Path, what: str) -> Iterator[None]:
    """Translate whatever a damaged file causes into a CheckpointError of one line."""
    damages = (OSError, SafetensorError, LookupError, ValueError, RuntimeError, TypeError)
    try:
        yield
    except (*damages, AttributeError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path}: damaged, no {what} to resume from ({reason})", remedy="begin anew with --overwrite"
        ) from error


def begin(
    folder: Path,
    recipe: Recipe,
    videos: Sequence[CaptionedVideo],
    vocabulary: Vocabulary,
    header: FeatureHeader,
    device: torch.device,
    progress: Progress,
) -> None:
    """Write ``run.json``, ``vocabulary.json`` and ``features.json`` as training begins or resumes.

    A resumed run keeps the record of its beginning and gains an entry in the list ``resumed``.
    """
    now = _environment(device)
    origin: Mapping[str, Any] = {"began": now, "resumed": []}
    if progress != Progress():
        before = _read(folder / RUN)
        resumed = [*before["resumed"], {"epoch": progress.epoch, "batch": progress.batch, **now}]
        origin = {"began": before.get("began"), "resumed": resumed}
    counts = {}
    for split in SPLITS:
        members = [video for video in videos if video.split == split]
        counts[split] = {
            "videos": len(members),
            "captions": sum(len(video.captions) for video in members),
            "paragraphs": sum(len(video.paragraphs) for video in members),
        }
    record = {
        "format": 1,
        "recipe": recipe.name,
        "captioner": recipe.captioner,
        "seed": recipe.training.seed,
        "data": counts,
        "vocabulary": len(vocabulary),
        **origin,
    }
    _write(folder / RUN, record)
    _write(folder / VOCABULARY, vocabulary.words)
    atomic_write_text(folder / FEATURES, header.to_json() + "\n")


def end(folder: Path, progress: Progress, *, uncalibrated: str | None) -> None:
    """Add the outcome to ``run.json``: epochs, seconds, the best epoch, and the reason for no calibration."""
    if (folder / RUN).is_file() and progress.best is not None:
        ended = {
            "epochs": len(progress.rows),
            "seconds": round(sum(row["seconds"] for row in progress.rows), 3),
            "best": {"epoch": progress.best.epoch, "val_cider": progress.best.cider},
            "uncalibrated": uncalibrated,
        }
        _write(folder / RUN, {**_read(folder / RUN), **ended})


@lru_cache(maxsize=1)
def source_digest() -> str:
    """Return the SHA-256 over names and contents of capvid's Python and TOML files."""
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    files |= {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.toml")}
    files["models.toml"] = MODELS_FILE  # outside the package in a checkout
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _environment(device: torch.device) -> dict[str, Any]:
    """Return the time, the software versions and the machine."""
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "capvid": {"version": __version__, "source_sha256": source_digest()},
        "python": platform.python_version(),
        **{package.__name__: str(package.__version__) for package in (torch, accelerate, np)},
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "processes": torch.distributed.get_world_size() if grouped else 1,
    }


@lru_cache(maxsize=1)
def _processor() -> str:
    """Return the name of the processor, which Python does not know on Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []:
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def _read(path: Path) -> Mapping[str, Any]:
    """Read ``run.json``; without one, the beginning of the run is unknown."""
    if not path.exists():
        return {"began": None, "resumed": []}
    try:
        record = parse_json(read_regular(path, max_bytes=_MAX_BYTES).decode())
        if not isinstance(record, dict) or not isinstance(record.get("resumed"), list):
            raise ValueError("not a record")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged ({error})", remedy="remove it, and resume again") from error
    return record


def _write(path: Path, value: Any) -> None:
    atomic_write_text(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


_LOCK = ".capvid-train.lock"
_OWNER = ".capvid-train.pid"  # a file of its own, since opening a lock empties it


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Lock the run folder for this process, or for the first of those that accelerate launched.

    The operating system releases the lock when the process ends, even if it is killed. Without write
    permission, or on a file system without locks, nothing is locked.

    Raises:
        UsageError: another process holds the lock.
    """
    from filelock import FileLock, Timeout

    if int(os.environ.get("RANK", "0")) > 0:
        yield
        return
    lock, owner = FileLock(folder / _LOCK), folder / _OWNER
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        owner.write_text(str(os.getpid()))
    except Timeout:
        process = ""
        with suppress(OSError, ValueError):
            process = f" (process {int(read_regular(owner, max_bytes=100))})"
        problem = f"{folder}: in use by another capvid train{process}"
        raise UsageError(problem, remedy="wait until it ends, or choose another -o") from None
    except (OSError, NotImplementedError):
        pass  # reported when the run is saved
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                owner.unlink(missing_ok=True)
            if is_new and [path.name for path in folder.iterdir()] == [_LOCK]:
                with suppress(OSError):  # leave no empty folder behind
                    (folder / _LOCK).unlink()
                    folder.rmdir()
        lock.release()


def check_free(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise UsageError if the folder holds a run that is neither to be resumed nor replaced."""
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other", remedy="give one of them")
    if not (resume or overwrite) and any((folder / name).exists() for name in ("best", "last", "trials/001")):
        raise UsageError(
            f"{folder}: holds a training run already", remedy="choose another -o, --resume or --overwrite"
        )


def check_inputs(folder: Path, inputs: Iterable[str | Path]) -> None:
    """Raise UsageError if a run in the folder would replace one of its inputs, or somebody's README.md."""
    names = (RUN, VOCABULARY, FEATURES, "recipe.json", "metrics.jsonl", "test.json", "README.md")
    paths = [*(folder / name for name in names), *folder.glob("best/*"), *folder.glob("last/*")]
    read = [str(path) for path in inputs]
    read += [name for path in read if (name := path.rpartition("#")[0])]  # before a split, or a backbone
    check_outputs([("-o", path) for path in paths], read, kind=None)
    for path in read:
        for own in (folder, folder / "best"):
            if own.is_dir() and Path(path).is_dir() and own.samefile(path):
                raise UsageError(f"{path}: is read, and a part of -o", remedy="give another folder with -o")
    if (folder / "README.md").exists() and not (folder / RUN).exists():
        problem = f"{folder}: holds a README.md, which the model card would replace"
        raise UsageError(problem, remedy="give another folder with -o")


def copy_weights(weights: Path, header: FeatureHeader, folder: Path) -> None:
    """Copy the verified weights of the features' backbones, from a file or folder, into the run folder."""
    if not weights.exists():
        raise WeightsError(f"{weights}: no such weights file")
    needed = {s.backbone: s for s in header.streams if s.backbone and s.backbone in backbones()}
    copied = 0
    for name, stream in needed.items():
        entry = backbones()[name]
        path = None if entry.source == "none" else local_weights(name, weights=weights)
        if path is not None and sha256_file(path) in (entry.sha256, stream.weights_sha256):
            target = folder / "weights" / own_file_name(entry)
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(target) as temporary:
                temporary.write_bytes(path.read_bytes())
            copied += 1
    if not copied:
        names = ", ".join(needed) or "unknown to capvid"
        problem = f"{weights}: not the weights of the features' backbone ({names})"
        raise WeightsError(problem, remedy="give the file that the features were made with")
