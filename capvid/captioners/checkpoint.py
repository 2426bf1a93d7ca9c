"""A trained captioner on disk: a folder with weights, configuration, vocabulary and feature header.

``captioner.safetensors`` holds the tensors; ``captioner.json`` all the rest. No pickle is read or written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from capvid.captioners.base import Captioner, sketch
from capvid.errors import CapvidError, CheckpointError
from capvid.features.feature_file import FeatureHeader
from capvid.text.vocabulary import Vocabulary
from capvid.utils.files import atomic_path, atomic_write_text, open_regular, read_regular
from capvid.utils.validation import MIB, bounded, checked_fields, choice, limits, parse_json, short

WEIGHTS = "captioner.safetensors"
CONFIG = "captioner.json"
CONFIG_BYTES = 32 * MIB  # of a captioner.json: a million words are half of it
FORMAT = 1
_REAL, _WHOLE = {"F64", "F32", "F16", "BF16"}, {"I64", "I32", "BOOL"}  # types of stored numbers


@dataclass(frozen=True, kw_only=True)
class _Notes:
    """Notes of a checkpoint that captioning depends on; all others are free."""

    recipe: str = ""
    max_frames: int = bounded(1, maximum=10_000)
    frames: str = choice("spread", "even", "first")
    max_words: int = 1


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A captioner with everything needed to use it.

    Attributes:
        captioner: the module, in evaluation mode.
        vocabulary: its words.
        header: header of the features it was trained on.
        name: name of the captioner.
        info: notes of the training run: recipe, epoch, scores, ``max_frames`` per video (or segment) and
            which ``frames`` these are (:func:`limited`), ``max_words`` of a caption; ``confidence``, its
            calibration (:class:`capvid.decoding.rescoring.Calibration`), if there is one.
        folder: folder it was loaded from.
        sees: whether it reads frames itself, so that its features are in no file.
    """

    captioner: Captioner
    vocabulary: Vocabulary
    header: FeatureHeader
    name: str
    info: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    sees: bool = False

    def frames(self, frames: Tensor) -> Tensor:
        """Return the frames, of (T, ...) of a video or segment, that the captioner reads."""
        count = int(self.info.get("max_frames", len(frames)))
        return limited(frames, count, str(self.info.get("frames", "spread")))


def limited(frames: Tensor, count: int, which: str) -> Tensor:
    """Return ``count`` frames of (T, ...) at most.

    Args:
        frames: frames of a video or segment.
        count: number of frames to keep.
        which: ``spread``, the middles of equal slices; ``even``, at equal distances from the first frame to
            the last, rounded down, as MART's authors do; ``first``, from the first on.
    """
    if len(frames) <= count or which == "first":
        return frames[:count]
    if which == "even":
        return frames[torch.arange(count) * (len(frames) - 1) // max(1, count - 1)]
    middles = (torch.arange(count, dtype=torch.float64) + 0.5) * len(frames) / count
    return frames[middles.long()]


def save_checkpoint(
    folder: Path,
    captioner: Captioner,
    vocabulary: Vocabulary,
    header: FeatureHeader,
    info: dict[str, Any],
    *,
    half: bool = False,
) -> None:
    """Write a checkpoint to ``folder``, weights first: a folder with a configuration is complete.

    With ``half``, weights are stored in half precision; they are loaded into single precision again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.half() if half and tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in captioner.state_dict().items()
    }
    with atomic_path(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    record = {
        "format": FORMAT,
        "captioner": captioner.name,
        "config": captioner.config.to_dict(),
        "features": json.loads(header.to_json()),
        "vocabulary": vocabulary.words,
        "info": info,
    }
    atomic_write_text(folder / CONFIG, json.dumps(record, ensure_ascii=False, indent=1))


def save_info(folder: Path, info: dict[str, Any]) -> None:
    """Replace the notes of the checkpoint in ``folder``.

    Raises:
        CheckpointError: the folder holds no checkpoint, or a damaged one.
        OSError: the file cannot be written.
    """
    try:
        record = read_config(folder)
        written = json.dumps({**record, "info": info}, ensure_ascii=False, indent=1)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: no captioner that can be read ({error})") from error
    atomic_write_text(folder / CONFIG, written)


def holds_checkpoint(folder: Path) -> bool:
    """Return whether the folder, or its ``best`` folder, holds a checkpoint."""
    return (folder / CONFIG).is_file() or (folder / "best" / CONFIG).is_file()


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read the checkpoint in ``folder``, or in the ``best`` folder of a training run.

    Raises:
        CheckpointError: the folder holds none, or it is damaged.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file() and (folder / "best" / CONFIG).is_file():
        folder = folder / "best"
    if not (folder / CONFIG).exists():
        raise CheckpointError(
            f"{folder}: no captioner in this folder ({CONFIG} is missing)",
            remedy="give the folder that capvid train wrote",
        )
    try:
        return _read(folder)
    except CheckpointError:
        raise
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError, CapvidError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            reason = f"{Path(error.filename).name}: {error.strerror}" if error.filename else error.strerror
        raise CheckpointError(
            f"{folder}: damaged checkpoint ({reason})", remedy="train it again or copy it anew"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Read the ``captioner.json`` of a folder.

    Raises:
        OSError: it cannot be read, is no regular file, or too large.
        ValueError: it is not a JSON object.
    """
    record = parse_json(read_regular(folder / CONFIG, max_bytes=CONFIG_BYTES).decode("utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"{CONFIG} must be an object, got {short(record)}")
    return {"format": None, **record}


def _read(folder: Path) -> Checkpoint:
    """Read a checkpoint, checking every field: the files are not trusted."""
    record = {"info": {}, **read_config(folder)}
    if record["format"] != FORMAT:
        raise CheckpointError(
            f"{folder}: checkpoint format {short(record['format'])}, this capvid reads {FORMAT}",
            remedy="use the capvid version that wrote it",
        )
    for part, kind in {"captioner": str, "features": dict, "config": dict, "info": dict}.items():
        if not isinstance(record.get(part), kind):
            expected = "a string" if kind is str else "an object"
            raise ValueError(f"{CONFIG}: {part} must be {expected}, got {short(record.get(part))}")
    name, options, info = record["captioner"], record["config"], record["info"]
    try:
        vocabulary = Vocabulary.checked(record.get("vocabulary"))
    except ValueError as error:
        space = "" if str(error).startswith("[") else " "
        raise ValueError(f"{CONFIG}: vocabulary{space}{error}") from error

    header = FeatureHeader.from_json(json.dumps(record["features"]))
    header.check_alike()
    known = {name: info[name] for name in info.keys() & _Notes.__dataclass_fields__.keys()}
    checked_fields(_Notes, known, prefix=f"{CONFIG}: info.")

    try:
        captioner = sketch(name, options)
    except CapvidError as error:
        raise ValueError(f"{CONFIG}: config.{error.message}") from error
    config = captioner.config
    for option, actual, wanted, source in (
        ("vocabulary_size", config.vocabulary_size, len(vocabulary), "vocabulary"),
        ("feature_width", config.feature_width, header.width, "features"),
        ("locations", config.locations, header.locations, "features"),
    ):
        if actual != wanted:
            raise ValueError(f"{CONFIG}: config.{option} must be {wanted}, as {source} says, got {actual}")
    _fill(captioner, folder / WEIGHTS)
    captioner.function_words = vocabulary.function_words
    return Checkpoint(
        captioner=captioner.eval(), vocabulary=vocabulary, header=header, name=name, info=info, folder=folder
    )


def _fill(captioner: Captioner, path: Path) -> None:
    """Load the weights in a file into a sketched captioner, after comparing the file's header with it."""
    with open_regular(path) as file:
        size = file.seek(0, 2)
    if size > limits().model_bytes:
        raise ValueError(f"{path.name} has {size} bytes, more than the limit model-bytes")
    expected = captioner.state_dict()
    with safe_open(path, "pt") as file:
        stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        for name in sorted(expected.keys() | stored.keys()):
            if name not in stored or name not in expected:
                problem = "lacks" if name in expected else "has an unknown"
                raise ValueError(f"{path.name} {problem} tensor {name[:100]!r}")
            shape, wanted = tuple(stored[name].get_shape()), tuple(expected[name].shape)
            types = _REAL if expected[name].is_floating_point() else _WHOLE
            if shape != wanted or stored[name].get_dtype() not in types:
                raise ValueError(
                    f"{path.name}: {name} must be {wanted} of {'/'.join(sorted(types))}, "
                    f"got {shape} of {stored[name].get_dtype()}"
                )
    # Copies, since tensors as they are loaded stay mapped to the file.
    weights = {name: tensor.to(expected[name].dtype, copy=True) for name, tensor in load_file(path).items()}
    captioner.load_state_dict(weights, assign=True)
