"""Dense captioning: segments of predictions and references, and their scores.

Predictions and references are read from any of

- results of the ActivityNet challenge, PDVC's included: ``{"results": {id: [{"timestamp", "sentence"}]}}``;
- ActivityNet Captions: ``{id: {"timestamps", "sentences"}}``;
- YouCookII: ``{"database": {id: {"annotations": [{"segment", "sentence"}]}}}``;
- records of ``capvid caption``: ``segments`` with ``start``, ``end`` and ``caption``; without segments, the
  caption of the video from 0 to ``duration``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from capvid.datasets.annotation_files import JsonReader, member, read_text
from capvid.datasets.dataset import RowError, Rows
from capvid.datasets.formats.timed_sentences import parse_times
from capvid.errors import CapvidError, DataError, UsageError
from capvid.metrics.dense_captioning import (
    MAX_SEGMENTS,
    THRESHOLDS,
    UNMATCHED,
    Segments,
    TimedSentence,
    dense_scores,
    overlapping_pairs,
    soda_c,
)
from capvid.metrics.ngram_index import tokenize
from capvid.scoring.diversity import Diversity, diversity
from capvid.scoring.predictions import Predictions, RecordReader, as_text, is_failed, prediction_files
from capvid.scoring.references import match_predictions

_REMEDY = "give results or annotations of ActivityNet Captions, or JSON records of capvid caption"
_MAX_PAIRS = 50_000  # pairs of segments that are scored at once
SODA = ("SODA_c precision", "SODA_c recall", "SODA_c F")


@dataclass(frozen=True, kw_only=True)
class DenseScores:
    """Scores of predicted segments: CIDEr-D from 0 to 10, all others from 0 to 1.

    Attributes:
        thresholds: precision, recall, BLEU-1 to BLEU-4, METEOR and CIDEr-D at each tIoU.
        mean: their means over the thresholds.
        soda: precision, recall and F of SODA_c; empty without METEOR.
        per_video: the means and SODA_c of each video.
        diversity: diversity of the predicted sentences.
        missing: videos of the references without a prediction.
        notes: further remarks, one line each.
    """

    thresholds: dict[float, dict[str, float]]
    mean: dict[str, float]
    soda: dict[str, float]
    per_video: dict[str, dict[str, float]]
    diversity: Diversity
    missing: list[str]
    notes: list[str]


def read_timed_sentences(path: Path) -> dict[str, list[TimedSentence]]:
    """Read the segments of each video from a file, or from all JSON files in a folder.

    Raises:
        DataError: a file is unreadable or of another format; the message names file and line.
    """
    rows, reader = Rows(skip_bad=False), RecordReader()
    segments: dict[str, list[TimedSentence]] = {}
    for file in prediction_files(path, (".json", ".jsonl")):
        stream = JsonReader(file, read_text(file))
        if stream.peek() not in ("{", "["):
            raise DataError(f"{file}: not a known format of segments", remedy=_REMEDY)
        for location, video, row in reader.records(stream):
            with rows.at(location):
                if not is_failed(row):
                    segments[video] = _parse_segments(row)
    if not segments:
        raise DataError(f"{path}: no segments", remedy=_REMEDY)
    return segments


def _parse_segments(row: Any) -> list[TimedSentence]:
    """Return the segments of a video in any of the forms above."""
    sentences = times = row
    if isinstance(row, dict) and "timestamps" in row:
        times, sentences = (member(row, key, list, f"list of {key}") for key in ("timestamps", "sentences"))
    else:
        if isinstance(row, dict):
            sentences = row["annotations"] if "annotations" in row else row.get("segments")
        if isinstance(row, dict) and "annotations" not in row and not sentences:
            caption = as_text(member(row, "captions", list, "list of captions")[0])
            sentences = [{"start": 0, "end": row.get("duration"), "caption": caption}]
        if not isinstance(sentences, list):
            raise RowError(f"no segments: {reprlib.repr(row)}", _REMEDY)
        for each in sentences:
            if not isinstance(each, dict):
                raise RowError(f"a segment that is not an object: {reprlib.repr(each)}", _REMEDY)
        times = [
            each.get("timestamp", each.get("segment", [each.get("start"), each.get("end")]))
            for each in sentences
        ]
    segments = []
    for (start, end), sentence in zip(parse_times(times, sentences), sentences, strict=True):
        if start > end:
            raise RowError(f"a segment from {start:g} to {end:g} seconds", "give the earlier time first")
        segments.append(TimedSentence(start, end, as_text(sentence)))
    return segments


def score_dense(
    predictions: Path,
    references: Sequence[Path],
    *,
    training: Sequence[Path] = (),
    tokenizer: str = "builtin",
    missing: str = "error",
    version: str = "2019",
) -> DenseScores:
    """Score predicted segments against those of one or more annotators.

    Args:
        predictions: file of predictions, or the folder of ``capvid caption --output-dir``.
        references: one file per annotator.
        training: files with training sentences, of the same forms, to count copies of them.
        tokenizer: as for :func:`capvid.scoring.scorer.score`.
        missing: treatment of videos without a prediction: ``error``; ``empty``, which scores 0, as in the
            evaluator of ActivityNet; or ``skip``, as in the authors' program of SODA.
        version: version of the evaluator, one of :data:`UNMATCHED`.

    Raises:
        DataError: a file is unreadable, its ids are others, or predictions are missing.
        UsageError: no such tokenizer or version.
    """
    if version not in UNMATCHED:
        raise UsageError(f"no evaluator {version!r}", remedy=f"use one of: {', '.join(UNMATCHED)}")
    annotators: list[Segments] = [read_timed_sentences(path) for path in references]
    videos = list(dict.fromkeys(video for annotator in annotators for video in annotator))
    predicted = Predictions(read_timed_sentences(predictions))
    aliases = {video.removeprefix("v_"): video for video in videos}
    matched = match_predictions(predictions, predicted, videos, aliases, missing)
    notes = matched.notes
    if missing == "skip":
        videos = list(matched.sentences)
    own: Segments = {video: segments[:MAX_SEGMENTS] for video, segments in matched.sentences.items()}
    texts = set(_sentences(group.get(video, ()) for group in (own, *annotators) for video in videos))
    known = list(_sentences(part for path in training for part in read_timed_sentences(path).values()))
    tokens = _tokenize(sorted(texts), tokenizer)
    own, *annotators = (_with_tokens(group, videos, tokens) for group in (own, *annotators))
    scorer = None
    try:
        from capvid.metrics.meteor.meteor_scorer import PairScorer

        scorer = PairScorer({*tokens.values(), *UNMATCHED.values()})
    except (CapvidError, ImportError) as error:
        reason = error if isinstance(error, CapvidError) else "pip install 'capvid[meteor]'"
        notes.append(f"METEOR and SODA_c are left out: {reason}")
    values, soda = [], []
    for block in _blocks(videos, own, annotators):
        if scorer is not None:
            scorer.align(overlapping_pairs(block, own, annotators, UNMATCHED[version]))
            soda.append(soda_c(block, own, annotators, scorer))
        values.append(dense_scores(block, own, annotators, pair_scorer=scorer, version=version))
    scores = {name: np.concatenate([one[name] for one in values]) for name in values[0]}
    by_video = {name: one.mean(1) for name, one in scores.items()}
    if soda:
        by_video.update(zip(SODA, np.concatenate(soda).T, strict=True))
    return DenseScores(
        thresholds={
            threshold: {name: float(one[:, column].mean()) for name, one in scores.items()}
            for column, threshold in enumerate(THRESHOLDS)
        },
        mean={name: float(one.mean()) for name, one in scores.items()},
        soda={name: float(by_video[name].mean()) for name in SODA if soda},
        per_video={
            video: {name: float(one[row]) for name, one in by_video.items()}
            for row, video in enumerate(videos)
        },
        diversity=diversity(
            _sentences(own.values()),
            _tokenize(known, tokenizer).values() if training else None,
        ),
        missing=matched.missing,
        notes=notes,
    )


def _sentences(segments: Iterable[Sequence[TimedSentence]]) -> Iterator[str]:
    return (each.sentence for part in segments for each in part)


def _tokenize(texts: Sequence[str], tokenizer: str) -> dict[str, str]:
    """Return the tokens of each text, other characters than ASCII as spaces, as in both programs."""
    plain = ["".join(c if c.isascii() else " " for c in text) for text in texts]
    if tokenizer == "ptb":
        from capvid.metrics import java

        return dict(zip(texts, java.tokenize(plain), strict=True))
    return {text: tokenize(each, tokenizer=tokenizer) for text, each in zip(texts, plain, strict=True)}


def _with_tokens(segments: Segments, videos: Sequence[str], tokens: dict[str, str]) -> Segments:
    return {
        video: [each._replace(sentence=tokens[each.sentence]) for each in segments[video]]
        for video in videos
        if video in segments
    }


def _blocks(videos: Sequence[str], own: Segments, annotators: Sequence[Segments]) -> Iterator[list[str]]:
    """Yield videos in blocks of limited size, so that memory does not grow with their number."""
    block: list[str] = []
    count = 0
    for video in videos:
        references = sum(len(annotator.get(video, ())) for annotator in annotators)
        pairs = len(own.get(video, ())) * (references + 1)
        if block and count + pairs > _MAX_PAIRS:
            yield block
            block, count = [], 0
        block.append(video)
        count += pairs
    yield block
