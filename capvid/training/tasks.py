"""What there is to learn: a caption for each video, or a paragraph for its segments.

The training loop and the evaluation know the two by what they have in common, :class:`Task`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from capvid.captioners import Captioner
from capvid.captioners.base import ParagraphCaptioner
from capvid.captioners.checkpoint import limited
from capvid.data.batches import ParagraphBatches, TrainingBatches
from capvid.data.captions import CaptionedVideo
from capvid.data.examples import (
    Example,
    Lengths,
    ParagraphExample,
    make_examples,
    make_paragraph_examples,
    tokenised,
    tokenised_paragraphs,
)
from capvid.data.frames import FrameReader
from capvid.decoding import DecodingOptions, Hypothesis, decode, decode_paragraphs, pad_frames, pad_segments
from capvid.errors import DataError
from capvid.features.views import NO_VIEWS, Views
from capvid.metrics import paragraph_text, score, score_paragraphs
from capvid.metrics.cider import CiderD
from capvid.text.vocabulary import Vocabulary
from capvid.training.recipe import DataOptions

Prediction = Any  # str, or a list of sentences
VIDEOS_AT_ONCE = 64

_Example = TypeVar("_Example", Example, ParagraphExample)


class Task(ABC, Generic[_Example]):
    """Captions or paragraphs, from the data set to the score.

    Args:
        data: the recipe's data options.
    """

    def __init__(self, data: DataOptions) -> None:
        self.data = data
        self.lengths = Lengths(data.max_words, cut=data.long_captions == "cut")

    @abstractmethod
    def check(self, videos: Sequence[CaptionedVideo], name: str) -> None:
        """Raise DataError unless every video has what the captioner ``name`` learns from."""

    @abstractmethod
    def sentences(self, videos: Sequence[CaptionedVideo]) -> list[list[str]]:
        """All sentences that are learned from, in words."""

    @abstractmethod
    def examples(
        self,
        videos: Sequence[CaptionedVideo],
        reader: FrameReader,
        vocabulary: Vocabulary | None,
        views: Views = NO_VIEWS,
    ) -> list[_Example]:
        """The videos with usable sentences, and their ``views``.

        Without a ``vocabulary`` all videos, and no sentences.
        """

    @abstractmethod
    def features(self, examples: Sequence[_Example]) -> Iterator[Tensor]:
        """The features of all examples, part by part."""

    @abstractmethod
    def batches(self, examples: Sequence[_Example], *, batch_size: int, seed: int) -> Any:
        """The batches of training."""

    @abstractmethod
    def predict(
        self,
        captioner: Captioner,
        vocabulary: Vocabulary,
        examples: Sequence[_Example],
        options: DecodingOptions,
    ) -> dict[str, Prediction]:
        """What the captioner says about each video."""

    @abstractmethod
    def cider(self, videos: Sequence[CaptionedVideo]) -> Callable[[Mapping[str, Prediction]], float]:
        """CIDEr-D of predictions for ``videos``, as a function of them."""

    @abstractmethod
    def score(
        self, predictions: Mapping[str, Prediction], videos: Sequence[CaptionedVideo]
    ) -> dict[str, float]:
        """All scores of predictions for ``videos``."""

    def _batches(self, examples: Sequence[_Example], kind: Any, *, batch_size: int, seed: int) -> Any:
        return kind(
            examples,
            batch_size=batch_size,
            captions_per_video=self.data.captions_per_video,
            max_frames=self.data.max_frames,
            first=self.data.frames == "first",
            frame_dropout=self.data.frame_dropout,
            seed=seed,
        )


class Captions(Task[Example]):
    """One sentence for each video."""

    def check(self, videos: Sequence[CaptionedVideo], name: str) -> None:
        """Raise DataError unless every video has captions."""
        bare = [video.id for video in videos if not video.captions]
        if bare:
            raise DataError(
                f"{name} writes one sentence per video and expects captions; {bare[0]} has only paragraphs "
                "of its segments",
                remedy="give data with captions, or choose a captioner of paragraphs such as mart",
            )

    def sentences(self, videos: Sequence[CaptionedVideo]) -> list[list[str]]:
        """All captions that are learned from, in words."""
        return [caption for captions in tokenised(videos, self.lengths).values() for caption in captions]

    def examples(
        self,
        videos: Sequence[CaptionedVideo],
        reader: FrameReader,
        vocabulary: Vocabulary | None,
        views: Views = NO_VIEWS,
    ) -> list[Example]:
        """The videos with their frames and captions."""
        return make_examples(videos, reader, vocabulary, self.lengths, views)

    def features(self, examples: Sequence[Example]) -> Iterator[Tensor]:
        """The frames of each video."""
        return (example.frames for example in examples)

    def batches(self, examples: Sequence[Example], *, batch_size: int, seed: int) -> TrainingBatches:
        """The batches of training."""
        return self._batches(examples, TrainingBatches, batch_size=batch_size, seed=seed)

    def predict(
        self,
        captioner: Captioner,
        vocabulary: Vocabulary,
        examples: Sequence[Example],
        options: DecodingOptions,
    ) -> dict[str, str]:
        """The best caption of each video."""
        found = self.hypotheses(captioner, examples, options)
        return {name: " ".join(vocabulary.decode(best.tokens)) for name, best in found.items()}

    def hypotheses(
        self, captioner: Captioner, examples: Sequence[Example], options: DecodingOptions
    ) -> dict[str, Hypothesis]:
        """The best caption of each video, with its log-probabilities."""
        device = next(captioner.parameters()).device
        said: dict[str, Hypothesis] = {}
        for first in range(0, len(examples), VIDEOS_AT_ONCE):
            some = examples[first : first + VIDEOS_AT_ONCE]
            clips = [limited(e.frames, self.data.max_frames, self.data.frames).float() for e in some]
            features, mask = pad_frames(clips)
            found = decode(captioner, features.to(device), mask.to(device), options)
            for example, hypotheses in zip(some, found, strict=True):
                said[example.id] = hypotheses[0]
        return said

    def cider(self, videos: Sequence[CaptionedVideo]) -> Callable[[Mapping[str, str]], float]:
        """CIDEr-D against all captions of ``videos``."""
        scorer = CiderD({video.id: list(video.captions) for video in videos})
        return lambda predictions: scorer.score(predictions)[0]

    def score(self, predictions: Mapping[str, str], videos: Sequence[CaptionedVideo]) -> dict[str, float]:
        """BLEU, ROUGE_L and CIDEr-D."""
        return dict(score(predictions, {video.id: list(video.captions) for video in videos}).corpus)


class Paragraphs(Task[ParagraphExample]):
    """A sentence for each segment of a video."""

    def check(self, videos: Sequence[CaptionedVideo], name: str) -> None:
        """Raise DataError unless every video has segments and paragraphs."""
        bare = [video.id for video in videos if not video.paragraphs]
        if bare:
            raise DataError(
                f"{name} writes paragraphs and expects segments with a sentence each; {bare[0]} has single "
                "captions only",
                remedy='give rows with "segments" and "paragraphs", or choose a captioner of sentences '
                "such as m3",
            )

    def sentences(self, videos: Sequence[CaptionedVideo]) -> list[list[str]]:
        """All sentences of the paragraphs that are learned from, in words."""
        spoken = tokenised_paragraphs(videos, self.lengths, max_segments=self.data.max_segments)
        return [sentence for paragraphs in spoken.values() for p in paragraphs for sentence in p]

    def examples(
        self,
        videos: Sequence[CaptionedVideo],
        reader: FrameReader,
        vocabulary: Vocabulary | None,
        views: Views = NO_VIEWS,
    ) -> list[ParagraphExample]:
        """The videos with their segments and paragraphs."""
        return make_paragraph_examples(
            videos, reader, vocabulary, self.lengths, views, max_segments=self.data.max_segments
        )

    def features(self, examples: Sequence[ParagraphExample]) -> Iterator[Tensor]:
        """The frames of each segment."""
        return (segment for example in examples for segment in example.segments)

    def batches(
        self, examples: Sequence[ParagraphExample], *, batch_size: int, seed: int
    ) -> ParagraphBatches:
        """The batches of training."""
        return self._batches(examples, ParagraphBatches, batch_size=batch_size, seed=seed)

    def predict(
        self,
        captioner: Captioner,
        vocabulary: Vocabulary,
        examples: Sequence[ParagraphExample],
        options: DecodingOptions,
    ) -> dict[str, list[str]]:
        """The best sentence of each segment of each video."""
        assert isinstance(captioner, ParagraphCaptioner)
        device = next(captioner.parameters()).device
        said: dict[str, list[str]] = {}
        for first in range(0, len(examples), VIDEOS_AT_ONCE):
            some = examples[first : first + VIDEOS_AT_ONCE]
            clips = [
                [limited(s, self.data.max_frames, self.data.frames).float() for s in example.segments]
                for example in some
            ]
            features, mask, counts = pad_segments(clips)
            found = decode_paragraphs(
                captioner, features.to(device), mask.to(device), counts.to(device), options
            )
            for example, segments in zip(some, found, strict=True):
                best = [hypotheses[0].tokens for hypotheses in segments]
                said[example.id] = [" ".join(vocabulary.decode(tokens)) for tokens in best]
        return said

    def cider(self, videos: Sequence[CaptionedVideo]) -> Callable[[Mapping[str, list[str]]], float]:
        """CIDEr-D of whole paragraphs."""
        references = {video.id: [paragraph_text(p) for p in video.paragraphs] for video in videos}
        scorer = CiderD(references, tokenizer="none")
        return lambda said: scorer.score({name: paragraph_text(s) for name, s in said.items()})[0]

    def score(
        self, predictions: Mapping[str, list[str]], videos: Sequence[CaptionedVideo]
    ) -> dict[str, float]:
        """BLEU, ROUGE_L and CIDEr-D of whole paragraphs, and R@1 to R@4."""
        references = {video.id: [paragraph_text(p) for p in video.paragraphs] for video in videos}
        return dict(score_paragraphs(predictions, references).corpus)


def task_of(captioner: type[Captioner] | Captioner, data: DataOptions) -> Task[Any]:
    """What ``captioner`` learns: paragraphs or captions."""
    return Paragraphs(data) if captioner.paragraphs else Captions(data)
