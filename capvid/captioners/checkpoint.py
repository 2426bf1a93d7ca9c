"""A trained captioner on disk: a folder with weights, configuration, vocabulary and feature header.

``captioner.safetensors`` holds the tensors; ``captioner.json`` all the rest. No pickle is read or written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from capvid.captioners import build
from capvid.captioners.base import Captioner
from capvid.errors import CapvidError, CheckpointError, FeatureMismatchError
from capvid.features.file import FeatureHeader
from capvid.files import atomic_path, atomic_write_text
from capvid.text.vocabulary import Vocabulary

WEIGHTS = "captioner.safetensors"
CONFIG = "captioner.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A captioner with all that is needed to use it.

    Attributes:
        captioner: the module, in evaluation mode.
        vocabulary: its words.
        header: the features it was trained on.
        name: the captioner family's name.
        info: notes of the training run: recipe, epoch, scores, ``max_frames`` per video (or segment) and
            which ``frames`` these are (:func:`limited`), ``max_words`` of a caption; ``generic``, how likely
            captions are generic (:class:`capvid.decoding.confidence.Calibration`), if that was measured.
        folder: where it was loaded from.
        sees: whether it sees frames itself, so that its features are in no file.
    """

    captioner: Captioner
    vocabulary: Vocabulary
    header: FeatureHeader
    name: str
    info: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    sees: bool = False

    def accept(self, header: FeatureHeader) -> None:
        """Accept features with this header as like those trained on.

        Raises:
            FeatureMismatchError: they differ; the message names each differing field.
        """
        try:
            self.header.checked(header)
        except FeatureMismatchError as error:
            if not self.sees:
                raise
            raise FeatureMismatchError(
                f"{self.name} takes videos, which it sees itself, not features", remedy="give the video"
            ) from error

    def frames(self, frames: Tensor) -> Tensor:
        """Those of a video's, or segment's, frames (T, ...) that the captioner looks at."""
        count = int(self.info.get("max_frames", len(frames)))
        return limited(frames, count, str(self.info.get("frames", "spread")))


def limited(frames: Tensor, count: int, which: str) -> Tensor:
    """At most ``count`` of the frames (T, ...).

    Args:
        frames: of a video or segment.
        count: how many at most.
        which: ``first``, or ``spread``: the middles of ``count`` equal slices.
    """
    if len(frames) <= count or which == "first":
        return frames[:count]
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
    """Write a checkpoint to ``folder``, weights first: a folder with a configuration is a whole one.

    With ``half``, numbers are stored in half precision; they are loaded into single precision again.
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
    """Write other notes into the checkpoint in ``folder``; all the rest of it stays.

    Raises:
        CheckpointError: the folder holds none, or it is damaged.
        OSError: it cannot be written.
    """
    try:
        record = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        written = json.dumps({**record, "info": info}, ensure_ascii=False, indent=1)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: no captioner that can be read ({error})") from error
    atomic_write_text(folder / CONFIG, written)


def holds_checkpoint(folder: Path) -> bool:
    """Whether there is a checkpoint in the folder, or in the ``best`` folder of a training run."""
    return any((folder / part / CONFIG).is_file() for part in (".", "best"))


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read the checkpoint in ``folder``, or in the ``best`` folder of a training run.

    Raises:
        CheckpointError: the folder holds none, or it is damaged.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file() and (folder / "best" / CONFIG).is_file():
        folder = folder / "best"
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder}: no captioner in this folder ({CONFIG} is missing)",
            remedy="give the folder that capvid train wrote",
        )
    damaged = "train it again or copy it anew"
    try:
        record = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise CheckpointError(
                f"{folder}: checkpoint format {record['format']}, this capvid reads {FORMAT}",
                remedy="use the capvid version that wrote it",
            )
        captioner = build(record["captioner"], record["config"])
        captioner.load_state_dict(load_file(folder / WEIGHTS))
        header = FeatureHeader.from_json(json.dumps(record["features"]))
        vocabulary = Vocabulary(record["vocabulary"])
        captioner.function_words = vocabulary.function_words()
    except CheckpointError:
        raise
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError, CapvidError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{folder}: damaged checkpoint ({reason})", remedy=damaged) from error
    return Checkpoint(
        captioner=captioner.eval(),
        vocabulary=vocabulary,
        header=header,
        name=record["captioner"],
        info=record.get("info", {}),
        folder=folder,
    )
