"""The losses of distillation.

Notation for tensor shapes: B pictures, E width of the student's embedding, D of a teacher's features, K of
its classes, W words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from capvid.training.distil.recipe import TeacherOptions
from capvid.training.distil.targets import ClassHead


@dataclass(frozen=True)
class Lesson:
    """What there is to learn from a batch.

    Attributes:
        features: of each teacher, (B, D) float32, not negative.
        shares: (B, W) share of the captions that hold the word.
        known: (B,) whether the picture has captions.
    """

    features: Mapping[str, Tensor]
    shares: Tensor
    known: Tensor


class TeacherLoss(nn.Module):
    """One teacher's features, told from the student's embedding.

    Features are compared as square roots (which makes their long-tailed distributions even) in units of each
    one's standard deviation: an error of 1 is what telling the mean would give. From the features told, the
    teacher's own class head makes a class distribution, to be like that of the true features
    (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015).
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        features: Tensor,
        head: ClassHead | None,
        options: TeacherOptions,
        *,
        embedding: int,
        temperature: float,
    ) -> None:
        super().__init__()
        roots = features.float().clamp_min(0).sqrt()  # (N, D)
        self.register_buffer("mean", roots.mean(0))
        self.register_buffer("deviation", roots.std(0).clamp_min(1e-3))
        self.tell = nn.Linear(embedding, features.shape[1])
        self.head = head
        self.options = options
        self.temperature = temperature

    def wanted(self, features: Tensor) -> Tensor:
        """What is to be told of features (B, D): their square roots, less the mean, in deviations."""
        return (features.clamp_min(0).sqrt() - self.mean) / self.deviation

    def forward(self, embedding: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings (B, E) and true features (B, D) -> the loss, and the mean squared error in it."""
        told = self.tell(embedding)  # (B, D), in units of the deviation
        error = F.mse_loss(told, self.wanted(features))
        loss = self.options.features * error
        if self.head is not None and self.options.classes:
            seen = (told * self.deviation + self.mean).clamp_min(0).square()
            divergence = F.kl_div(
                (self.head(seen) / self.temperature).log_softmax(-1),
                (self.head(features) / self.temperature).log_softmax(-1),
                log_target=True,
                reduction="batchmean",
            )
            loss = loss + self.options.classes * divergence
        return loss, error


class Lessons(nn.Module):
    """All losses together, with what is learned for them beside the student."""

    def __init__(
        self, teachers: Mapping[str, TeacherLoss], *, embedding: int, words: int, word_weight: float
    ) -> None:
        super().__init__()
        self.teachers = nn.ModuleDict(teachers)
        self.words = nn.Linear(embedding, words)
        nn.init.constant_(self.words.bias, -4.0)  # most words are not there
        self.word_weight = word_weight

    def named_teachers(self) -> Iterator[tuple[str, TeacherLoss]]:
        """Each teacher's name and loss."""
        for name, teacher in self.teachers.items():
            yield name, cast(TeacherLoss, teacher)

    def forward(self, embedding: Tensor, lesson: Lesson) -> tuple[Tensor, dict[str, float]]:
        """Embeddings (B, E) -> the loss, and each teacher's error and the words' loss for the log."""
        total = embedding.new_zeros(())
        parts = {}
        for name, teacher in self.named_teachers():
            loss, error = teacher(embedding, lesson.features[name])
            total = total + loss
            parts[name] = float(error.detach())
        if self.word_weight and len(self.words.bias) and bool(lesson.known.any()):
            scores = self.words(embedding[lesson.known])
            loss = F.binary_cross_entropy_with_logits(scores, lesson.shares[lesson.known], reduction="sum")
            loss = loss / len(scores)
            total = total + self.word_weight * loss
            parts["words"] = float(loss.detach())
        return total, parts
