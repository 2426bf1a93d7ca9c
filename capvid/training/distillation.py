"""Word-level distillation: the next-word probabilities of trained captioners as soft targets.

A run with ``training.soft_targets`` = k keeps, for every word of the training captions, the k most probable
words by its best checkpoint. Another run on the same data takes such runs as teachers and learns their mean
distribution beside the references: Kim and Rush, Sequence-Level Knowledge Distillation, EMNLP 2016
(arXiv:1606.07947), Section 3.1. The teachers' features are not needed any more, so each may have had its own.

Notation for tensor shapes: W words of all training captions, end tokens included; k words of a teacher.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from capvid.captioners.checkpoint import load_checkpoint
from capvid.datasets.examples import Example
from capvid.errors import TrainingError, UsageError
from capvid.text.vocabulary import Vocabulary
from capvid.training.evaluation import Task
from capvid.utils.files import atomic_path, open_regular

SOFT_TARGETS = "soft_targets.safetensors"


def write_soft_targets(
    folder: Path, task: Task, examples: Sequence[Example], *, count: int, device: torch.device
) -> None:
    """Write the ``count`` most probable words at each word of the examples' captions, by a run's best epoch.

    Augmented views share the soft targets of their video.
    """
    checkpoint = load_checkpoint(folder)
    captioner, originals = checkpoint.captioner.to(device), [each for each in examples if not each.key]
    words, probabilities = [], []
    for logits, _ in task.teacher_forced(captioner, originals):
        top = logits.softmax(-1).topk(min(count, logits.shape[-1]), -1)
        words.append(top.indices.int().cpu())
        probabilities.append((top.values / top.values.sum(-1, keepdim=True)).half().cpu())
    tensors = {"words": torch.cat(words), "probabilities": torch.cat(probabilities)}  # (W, k)
    note = {"captions": _digest(originals, checkpoint.vocabulary)}
    with atomic_path(folder / SOFT_TARGETS) as temporary:
        save_file(tensors, temporary, metadata={"capvid": json.dumps(note)})


def with_soft_targets(
    examples: Sequence[Example], vocabulary: Vocabulary, teachers: Sequence[Path]
) -> list[Any]:
    """Return the examples with the mean of the teachers' soft targets for each caption.

    Raises:
        UsageError: a run has no soft targets, or those of other captions or words.
    """
    originals = [each for each in examples if not each.key]
    digest = _digest(originals, vocabulary)
    files = [_read(folder / SOFT_TARGETS, digest) for folder in teachers]
    words = torch.cat([file["words"] for file in files], 1)  # (W, teachers * k), the same word several times
    probabilities = torch.cat([file["probabilities"] for file in files], 1) / len(files)
    soft, start = {}, 0
    for example in originals:
        targets = []
        for caption in example.captions:
            end = start + len(caption) + 1
            targets.append((words[start:end], probabilities[start:end]))
            start = end
        soft[example.id] = targets
    return [replace(example, soft=soft[example.id]) for example in examples]


def _read(path: Path, digest: str) -> dict[str, torch.Tensor]:
    try:
        open_regular(path).close()
        with safe_open(path, "pt") as file:
            if json.loads((file.metadata() or {})["capvid"])["captions"] != digest:
                raise UsageError(
                    f"{path}: soft targets of other captions or of another vocabulary",
                    remedy="train teacher and student on the same --data with the same words",
                )
            return {name: file.get_tensor(name) for name in ("words", "probabilities")}
    except FileNotFoundError as error:
        raise UsageError(
            f"{path.parent}: this run has no soft targets",
            remedy="train it with --set training.soft_targets=16; with --resume, a finished run adds them",
        ) from error
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise TrainingError(
            f"{path}: damaged ({str(error).splitlines()[0]})",
            remedy="delete it, and let the teacher's run write it again with --resume",
        ) from error


def _digest(examples: Sequence[Example], vocabulary: Vocabulary) -> str:
    """Return the SHA-256 of the vocabulary and of all captions in tokens, in order."""
    digest = hashlib.sha256("\n".join(vocabulary.words).encode())
    for example in examples:
        digest.update(json.dumps([example.id, example.captions]).encode())
    return digest.hexdigest()
