"""What a captioner learns: a caption for each video, or a paragraph for its segments."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from capvid.backbones.catalog import BUNDLED
from capvid.captioners.base import CAPTIONERS, Captioner, ParagraphCaptioner, build
from capvid.captioners.checkpoint import holds_checkpoint, limited, load_checkpoint
from capvid.captioners.layers import pad_frames, pad_segments
from capvid.datasets.batches import ParagraphBatches, TrainingBatches
from capvid.datasets.dataset import CaptionedVideo
from capvid.datasets.examples import (
    FrameReader,
    Lengths,
    make_examples,
    make_paragraph_examples,
    tokenised,
    tokenised_paragraphs,
)
from capvid.decoding.beam_search import decode, decode_paragraphs
from capvid.decoding.decoding_options import DecodingOptions, Hypothesis
from capvid.decoding.rescoring import check_specificity
from capvid.errors import DataError, UsageError
from capvid.features.feature_file import FeatureHeader
from capvid.features.feature_store import NO_VIEWS, Views
from capvid.metrics.cider import CiderD
from capvid.scoring.scorer import paragraph_text, score, score_paragraphs
from capvid.text.vocabulary import SPECIAL, Vocabulary
from capvid.training.recipe import DataOptions, Recipe

Prediction = Any  # str, or a list of sentences
VIDEOS_AT_ONCE = 64


class Task:
    """Captions or paragraphs, from the dataset to the score.

    Args:
        data: data options of the recipe.
        paragraphs: whether a sentence is written for each segment, and not one for the video.
    """

    def __init__(self, data: DataOptions, *, paragraphs: bool) -> None:
        self.data, self.paragraphs = data, paragraphs
        self.lengths = Lengths(data.max_words, cut=data.long_captions == "cut")

    def check(self, videos: Sequence[CaptionedVideo], name: str) -> None:
        """Raise DataError unless every video has what the captioner ``name`` learns from."""
        bare = [v.id for v in videos if not (v.paragraphs if self.paragraphs else v.captions)]
        if bare and self.paragraphs:
            raise DataError(
                f"{name} writes paragraphs and expects segments with a sentence each; {bare[0]} has single "
                "captions only",
                remedy='give rows with "segments" and "paragraphs", or choose a captioner of sentences '
                "such as m3",
            )
        if bare:
            raise DataError(
                f"{name} writes one sentence per video and expects captions; {bare[0]} has only paragraphs "
                "of its segments",
                remedy="give data with captions, or choose a captioner of paragraphs such as mart",
            )

    def sentences(self, videos: Sequence[CaptionedVideo]) -> list[list[str]]:
        """Return all sentences that are learned from, in words."""
        if not self.paragraphs:
            return [caption for captions in tokenised(videos, self.lengths).values() for caption in captions]
        tokens = tokenised_paragraphs(videos, self.lengths, max_segments=self.data.max_segments)
        return [sentence for paragraphs in tokens.values() for p in paragraphs for sentence in p]

    def examples(
        self,
        videos: Sequence[CaptionedVideo],
        reader: FrameReader,
        vocabulary: Vocabulary | None,
        views: Views = NO_VIEWS,
    ) -> list[Any]:
        """Return the videos with usable sentences and their views; without a vocabulary, all videos."""
        if not self.paragraphs:
            return make_examples(videos, reader, vocabulary, self.lengths, views)
        segments = self.data.max_segments
        return make_paragraph_examples(videos, reader, vocabulary, self.lengths, views, max_segments=segments)

    def features(self, examples: Sequence[Any]) -> Iterator[Tensor]:
        """Return the frames of each video, or of each segment."""
        if self.paragraphs:
            return (segment for example in examples for segment in example.segments)
        return (example.frames for example in examples)

    def batches(self, examples: Sequence[Any], *, batch_size: int, seed: int) -> Any:
        """Return the training batches."""
        kind: Any = ParagraphBatches if self.paragraphs else TrainingBatches
        return kind(
            examples,
            batch_size=batch_size,
            captions_per_video=self.data.captions_per_video,
            max_frames=self.data.max_frames,
            first=self.data.frames == "first",
            frame_dropout=self.data.frame_dropout,
            seed=seed,
        )

    def hypotheses(
        self, captioner: Captioner, examples: Sequence[Any], options: DecodingOptions
    ) -> dict[str, list[Hypothesis]]:
        """Return the best hypothesis of each segment by video id; captions have one segment."""
        device = next(captioner.parameters()).device

        def frames(features: Tensor) -> Tensor:
            return limited(features, self.data.max_frames, self.data.frames).float()

        best: dict[str, list[Hypothesis]] = {}
        for first in range(0, len(examples), VIDEOS_AT_ONCE):
            part = examples[first : first + VIDEOS_AT_ONCE]
            if isinstance(captioner, ParagraphCaptioner):
                padded = pad_segments([[frames(segment) for segment in e.segments] for e in part])
                features, mask, counts = (tensor.to(device) for tensor in padded)
                decoded = decode_paragraphs(captioner, features, mask, counts, options)
            else:
                features, mask = pad_frames([frames(example.frames) for example in part])
                videos = decode(captioner, features.to(device), mask.to(device), options)
                decoded = [[hypotheses] for hypotheses in videos]
            for example, segments in zip(part, decoded, strict=True):
                best[example.id] = [hypotheses[0] for hypotheses in segments]
        return best

    def predict(
        self,
        captioner: Captioner,
        vocabulary: Vocabulary,
        examples: Sequence[Any],
        options: DecodingOptions,
    ) -> dict[str, Prediction]:
        """Return the best caption, or the sentences of the best paragraph, by video id."""
        predictions: dict[str, Prediction] = {}
        for name, segments in self.hypotheses(captioner, examples, options).items():
            sentences = [" ".join(vocabulary.decode(hypothesis.tokens)) for hypothesis in segments]
            predictions[name] = sentences if self.paragraphs else sentences[0]
        return predictions

    def cider(self, videos: Sequence[CaptionedVideo]) -> Callable[[Mapping[str, Prediction]], float]:
        """Return CIDEr-D of predictions for ``videos``, as a function of them."""
        references = self._references(videos)
        if not self.paragraphs:
            captions = CiderD(references)
            return lambda predictions: captions.score(predictions)[0]
        scorer = CiderD(references, tokenizer="none")
        return lambda predictions: scorer.score({k: paragraph_text(p) for k, p in predictions.items()})[0]

    def score(
        self, predictions: Mapping[str, Prediction], videos: Sequence[CaptionedVideo]
    ) -> dict[str, float]:
        """Return all scores by metric: BLEU, ROUGE_L and CIDEr-D, and R@1 to R@4 of paragraphs."""
        scorer = score_paragraphs if self.paragraphs else score
        return dict(scorer(predictions, self._references(videos)).corpus)

    def _references(self, videos: Sequence[CaptionedVideo]) -> dict[str, list[str]]:
        if self.paragraphs:
            return {video.id: [paragraph_text(p) for p in video.paragraphs] for video in videos}
        return {video.id: list(video.captions) for video in videos}


def task_of(captioner: type[Captioner] | Captioner, data: DataOptions) -> Task:
    """Return what ``captioner`` learns: paragraphs or captions."""
    return Task(data, paragraphs=captioner.paragraphs)


def split_of(videos: Sequence[CaptionedVideo], name: str) -> list[CaptionedVideo]:
    """The videos of a split.

    Raises:
        DataError: there are none.
    """
    found = [video for video in videos if video.split == name]
    if not found:
        raise DataError(f"no video of the data is in the {name} split", remedy="add some to the data")
    return found


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def vocabulary_for(sentences: Iterable[Sequence[str]], data: DataOptions) -> Vocabulary:
    """The words of tokenised training ``sentences`` that ``data`` keeps, or those of the captioner it names.

    Raises:
        DataError: no word is kept.
        CheckpointError: the captioner is not there, or damaged.
    """
    if data.vocabulary:
        bundled = BUNDLED / data.vocabulary
        return load_checkpoint(bundled if holds_checkpoint(bundled) else Path(data.vocabulary)).vocabulary
    found = Vocabulary.build(sentences, min_count=data.min_count, max_size=data.max_vocabulary)
    if len(found) == len(SPECIAL):
        raise DataError(
            f"no word comes {data.min_count} times in the training captions", remedy="lower data.min_count"
        )
    return found


def fresh_captioner(recipe: Recipe, header: FeatureHeader, words: int, value_width: int) -> Captioner:
    """A captioner for such features, its weights as the recipe wants them at the beginning.

    Args:
        recipe: what to train.
        header: of the features.
        words: in the vocabulary.
        value_width: of the features, the last columns that are a captioner's values, not keys.

    Raises:
        UsageError: the captioner cannot be made for such features, or not be validated as the recipe wants.
    """
    sizes = {"vocabulary_size": words, "feature_width": header.width, "locations": header.locations}
    if value_width:
        sizes["value_width"] = value_width
        kind = CAPTIONERS[recipe.captioner]
        if "value_width" not in {field.name for field in fields(kind.config_class)}:
            raise UsageError(
                f"{recipe.captioner} has no values beside its features",
                remedy="leave out --values, or give the stream as --features",
            )
    captioner = build(recipe.captioner, {**sizes, **recipe.model})
    check_specificity(captioner, recipe.decoding)
    limit = recipe.training.init_range
    if limit:
        for parameter in captioner.parameters():
            torch.nn.init.uniform_(parameter, -limit, limit)
    return captioner
