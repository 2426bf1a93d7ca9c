"""The folder of a training run: its lock, the record of what it was made with, and the state to resume from.

The state is everything that the next step depends on, in one safetensors file: a run that is killed at any
moment and resumed ends with the weights of one that was never interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from capvid.backbones.catalog import backbones, models_file
from capvid.backbones.weights import local_weights, own_file_name
from capvid.datasets.dataset import SPLITS, CaptionedVideo
from capvid.errors import CheckpointError, UsageError, WeightsError
from capvid.features.feature_file import FeatureHeader
from capvid.text.vocabulary import Vocabulary
from capvid.training.optimization import AveragedWeights
from capvid.training.recipe import Recipe
from capvid.training.reporters import Progress
from capvid.utils.files import atomic_path, atomic_write_text, file_digest, open_regular, read_regular
from capvid.utils.limits import MIB
from capvid.utils.validation import parse_json
from capvid.version import __version__

RUN, VOCABULARY, FEATURES = "run.json", "vocabulary.json", "features.json"
_FORMAT = 1
_BYTES = 32 * MIB  # of run.json
PACKAGE = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "accelerate", "numpy")
STATE = "state.safetensors"
_STATE_FORMAT = 2
_DAMAGES = (OSError, SafetensorError, LookupError, ValueError, RuntimeError, TypeError, AttributeError)
_FREE = ("accumulate", "save_every")  # options that may change when a run is resumed


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
    """Write ``run.json``, ``vocabulary.json`` and ``features.json`` as training begins or resumes.

    A run that is resumed keeps the record of its beginning, and its list ``resumed`` grows by one.

    Raises:
        CheckpointError: the ``run.json`` of a run that is resumed is damaged.
        OSError: a file cannot be written.
    """
    now = _environment(device)
    began: Mapping[str, Any] | None = now
    resumed: list[Mapping[str, Any]] = []
    if progress != Progress():
        before = _read(folder / RUN)
        began = before.get("began")
        resumed = [*before["resumed"], {"epoch": progress.epoch, "batch": progress.batch, **now}]
    counts = {}
    for split in SPLITS:
        members = [video for video in videos if video.split == split]
        counts[split] = {
            "videos": len(members),
            "captions": sum(len(video.captions) for video in members),
            "paragraphs": sum(len(video.paragraphs) for video in members),
        }
    record = {
        "format": _FORMAT,
        "recipe": recipe.name,
        "captioner": recipe.captioner,
        "seed": recipe.training.seed,
        "data": counts,
        "vocabulary": len(vocabulary),
        "began": began,
        "resumed": resumed,
    }
    _write(folder / RUN, record)
    _write(folder / VOCABULARY, vocabulary.words)
    atomic_write_text(folder / FEATURES, header.to_json() + "\n")


def end(folder: Path, progress: Progress, *, uncalibrated: str | None) -> None:
    """Add the outcome to ``run.json``: epochs, seconds, the best epoch, and why it was not calibrated, if so.

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
    """Return the SHA-256 over names and contents of capvid's Python and TOML files, wherever they lie."""
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    files |= {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.toml")}
    files["models.toml"] = models_file()  # outside of the package in a checkout
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _environment(device: torch.device) -> dict[str, Any]:
    """Describe the time, the software and the machine."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    return {
        "time": now,
        "capvid": {"version": __version__, "source_sha256": source_digest()},
        "python": platform.python_version(),
        **versions,
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
    """Read ``run.json``; a run without one has no known beginning."""
    if not path.exists():
        return {"began": None, "resumed": []}
    try:
        record = parse_json(read_regular(path, max_bytes=_BYTES).decode())
        if not isinstance(record, dict) or not isinstance(record.get("resumed"), list):
            raise ValueError("not a record")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged ({error})", remedy="remove it, and resume again") from error
    return record


def _write(path: Path, value: Any) -> None:
    atomic_write_text(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


_LOCK = ".capvid-train.lock"
_OWNER = ".capvid-train.pid"  # apart, since opening a lock empties it


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Lock the run folder for this process, or for the first of those that accelerate launched.

    The system releases the lock when the process ends, however that happens. Where the folder cannot be
    written, or its file system has no locks, nothing is locked.

    Raises:
        UsageError: another process holds it.
    """
    from filelock import FileLock, Timeout

    if int(os.environ.get("RANK", "0")) > 0:
        yield
        return
    lock, owner = FileLock(folder / _LOCK), folder / _OWNER
    fresh = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        owner.write_text(str(os.getpid()))
    except Timeout:
        process = ""
        with suppress(OSError, ValueError):
            process = f" (process {int(read_regular(owner, max_bytes=100))})"
        raise UsageError(
            f"{folder}: in use by another capvid train{process}",
            remedy="wait until it ends, or choose another -o",
        ) from None
    except (OSError, NotImplementedError):
        pass  # what cannot be written is reported when the run is saved
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                owner.unlink(missing_ok=True)
            if fresh and [path.name for path in folder.iterdir()] == [_LOCK]:
                with suppress(OSError):  # nothing came of the run: leave no folder behind
                    (folder / _LOCK).unlink()
                    folder.rmdir()
        lock.release()


def check_free(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise UsageError if the folder holds a run, and neither resuming nor replacing it is asked for."""
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other", remedy="give one of them")
    if not (resume or overwrite) and any((folder / name).exists() for name in ("best", "last", "trials/001")):
        raise UsageError(
            f"{folder}: holds a training run already", remedy="choose another -o, --resume or --overwrite"
        )


def copy_weights(weights: Path, header: FeatureHeader, folder: Path) -> None:
    """Copy the verified weights of the features' backbones into the run.

    Args:
        weights: the file, or the folder of several.
        header: of the features.
        folder: of the run.

    Raises:
        WeightsError: they are not there.
    """
    if not weights.exists():
        raise WeightsError(f"{weights}: no such weights file")
    needed = {s.backbone: s for s in header.streams if s.backbone and s.backbone in backbones()}
    copied = 0
    for name, stream in needed.items():
        entry = backbones()[name]
        path = None if entry.source == "none" else local_weights(name, weights=weights)
        if path is not None and file_digest(path) in (entry.sha256, stream.weights_sha256):
            target = folder / "weights" / own_file_name(entry)
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(target) as temporary:
                temporary.write_bytes(path.read_bytes())
            copied += 1
    if not copied:
        names = ", ".join(needed) or "unknown to capvid"
        raise WeightsError(
            f"{weights}: not the weights of the features' backbone ({names})",
            remedy="give the file that the features were made with",
        )


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What changes from step to step.

    Attributes:
        module: the captioner.
        optimizer: of its weights.
        schedule: of the learning rate.
        average: running average of the weights, if there is one.
        device: where it is trained; its generator draws dropout.
        accelerator: the processes; their generators differ, everything else is the same in each.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    average: AveragedWeights | None
    device: torch.device
    accelerator: Accelerator

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name; a collective call."""
        tensors = {f"module.{name}": tensor for name, tensor in self.module.state_dict().items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{key}": torch.as_tensor(value) for key, value in moments.items()}
        weights = self.average.weights if self.average else ()
        tensors |= {f"average.{number}": weight for number, weight in enumerate(weights)}
        generators = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self.device)
        for name, state in generators.items():  # (processes, bytes)
            tensors[f"generators.{name}"] = self.accelerator.gather(state.unsqueeze(0).to(self.device))
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def restore(self, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
        """Take over the tensors and numbers of a saved state.

        Raises:
            KeyError, RuntimeError, ValueError: it is that of something else.
        """

        def below(prefix: str) -> dict[str, Tensor]:
            return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}

        self.module.load_state_dict(below("module."))
        state = self.optimizer.state_dict()
        state["state"] = {}
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        for name, tensor in below("optimizer.").items():
            number, _, key = name.partition(".")
            if tensor.shape not in (weights[int(number)].shape, ()):
                raise ValueError(f"optimizer.{name} is of another shape than its weight")
            state["state"].setdefault(int(number), {})[key] = tensor
        for group, rate in zip(state["param_groups"], note["rates"], strict=True):
            group["lr"] = rate
        self.optimizer.load_state_dict(state)
        self.schedule.last_epoch = note["steps"]
        self.schedule._last_lr = list(note["rates"])
        if self.average:
            for index, weight in enumerate(self.average.weights):
                weight.copy_(tensors[f"average.{index}"])
            self.average.steps = note["averaged"]
        rank = self.accelerator.process_index
        if rank < len(tensors["generators.cpu"]):  # else it was saved by fewer processes
            torch.set_rng_state(tensors["generators.cpu"][rank].clone())
            if self.device.type == "cuda" and "generators.cuda" in tensors:
                torch.cuda.set_rng_state(tensors["generators.cuda"][rank].clone(), self.device)


def identity(recipe: Recipe, data: Sequence[str]) -> dict[str, Any]:
    """Return what the state of a run must agree with: the recipe, and a digest of ``data``."""
    options = recipe.to_dict()
    options["training"] = {k: v for k, v in options["training"].items() if k not in _FREE}
    return {"recipe": options, "data": hashlib.sha256("\n".join(data).encode()).hexdigest()}


def save_state(path: Path, state: TrainerState, run: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
    """Write the state atomically, in the first process; a collective call.

    Args:
        path: state file.
        state: of the trainer.
        run: identity of the run; only a run of the same can be resumed.
        progress: where the run stands.
    """
    note = {
        "format": _STATE_FORMAT,
        "run": dict(run),
        "progress": dict(progress),
        "rates": [group["lr"] for group in state.optimizer.param_groups],
        "steps": state.schedule.last_epoch,
        "averaged": state.average.steps if state.average else 0,
    }
    tensors = state.tensors()
    if state.accelerator.is_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata={"capvid": json.dumps(note)})


def load_state(
    path: Path, state: TrainerState, run: Mapping[str, Any], check: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Restore a saved state and return the progress; ``check`` raises an error where it is none.

    Raises:
        CheckpointError: the file is damaged, or of a run with another recipe or other data.
    """
    try:
        open_regular(path).close()
        with safe_open(path, "pt") as file:
            note = parse_json((file.metadata() or {})["capvid"])
        if note["format"] != _STATE_FORMAT:
            raise ValueError(f"format {note['format']}")
        for name, value in run.items():
            if note["run"].get(name) != json.loads(json.dumps(value)):
                raise CheckpointError(
                    f"{path}: the state of a run with another {name}",
                    remedy=f"give the {name} that it was begun with, or begin anew with --overwrite",
                )
        state.restore(load_file(path), note)
        progress: dict[str, Any] = note["progress"]
        check(progress)
    except _DAMAGES as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path}: damaged, no state to resume from ({reason})", remedy="begin anew with --overwrite"
        ) from error
    return progress
