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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from capvid.datasets.annotation_files import (
    JsonReader,
    RowError,
    Rows,
    check_unicode,
    first_ids,
    member,
    read_text,
)
from capvid.datasets.dataset import Location
from capvid.errors import CapvidError, DataError, UsageError
from capvid.metrics.dense_captioning import (
    MAX_SEGMENTS,
    THRESHOLDS,
    UNMATCHED,
    PairScorer,
    Segments,
    TimedSentence,
    dense_scores,
)
from capvid.metrics.ngram_index import tokenize
from capvid.metrics.soda import soda_c
from capvid.scoring.diversity import Diversity, diversity
from capvid.scoring.predictions import IDS, as_id, match_ids
from capvid.utils.files import MANIFEST

_REMEDY = "give results or annotations of ActivityNet Captions, or JSON records of capvid caption"
_NESTED = ("results", "database")
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
    files = [path]
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*.json*")) if file.name != MANIFEST and file.is_file()]
    rows = Rows(skip_bad=False)
    segments: dict[str, list[TimedSentence]] = {}
    for file in files:
        for location, name, row in _records(JsonReader(file, read_text(file))):
            with rows.at(location):
                video = as_id(name)
                if video in segments:
                    raise RowError(f"the id {reprlib.repr(video)} occurs twice", "give each video one record")
                if not (isinstance(row, dict) and row.get("status") == "error"):
                    segments[video] = [_segment(*each) for each in _triples(row)]
    if not segments:
        raise DataError(f"{path}: no segments", remedy=_REMEDY)
    return segments


def _records(stream: JsonReader) -> Iterator[tuple[Location, Any, Any]]:
    """Yield location, id and content of each video."""
    first = stream.peek_value()
    if not isinstance(first, (dict, list)):
        raise DataError(f"{stream.path}: not a known format of segments", remedy=_REMEDY)
    if isinstance(first, dict) and not any(isinstance(first.get(key), str) for key in IDS):
        for line, name in stream.members():
            if name in _NESTED and stream.peek() == "{":
                for inner_line, video in stream.members():
                    yield Location(stream.path, inner_line, f"record {video!r}"), video, stream.value()
            elif name in ("version", "external_data", "params"):
                stream.value()
            else:
                yield Location(stream.path, line, f"record {name!r}"), name, stream.value()
    else:
        lines = stream.items() if isinstance(first, list) else _lines(stream)
        for line in lines:
            row = stream.value()
            members = row if isinstance(row, dict) else {}
            yield (
                Location(stream.path, line),
                next((members[key] for key in IDS if members.get(key)), None),
                row,
            )
    stream.end()


def _lines(stream: JsonReader) -> Iterator[int]:
    while stream.peek():
        yield stream.line


def _triples(row: Any) -> list[tuple[Any, Any, Any]]:
    """Return start, end and sentence of each segment of a record, unchecked."""
    if isinstance(row, dict) and "timestamps" in row:
        times, sentences = (member(row, key, list, f"list of {key}") for key in ("timestamps", "sentences"))
        if len(times) != len(sentences):
            counts = f"{len(times)} segments and {len(sentences)} sentences"
            raise RowError(counts, "give a sentence for every segment")
        return [(*_pair(pair), sentence) for pair, sentence in zip(times, sentences, strict=True)]
    if isinstance(row, dict) and "annotations" not in row:
        if row.get("segments"):
            parts = member(row, "segments", list, "list of segments")
            return [(part.get("start"), part.get("end"), part.get("caption")) for part in map(_object, parts)]
        captions = member(row, "captions", list, "list of captions")
        return [(0.0, row.get("duration"), _object(captions[0]).get("text"))]
    parts = row.get("annotations") if isinstance(row, dict) else row
    if not isinstance(parts, list):
        raise RowError(f"no segments: {reprlib.repr(row)}", _REMEDY)
    return [
        (*_pair(part.get("timestamp", part.get("segment"))), part.get("sentence"))
        for part in map(_object, parts)
    ]


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"a segment that is not an object: {reprlib.repr(value)}", _REMEDY)
    return value


def _pair(times: Any) -> tuple[Any, Any]:
    if not isinstance(times, list) or len(times) != 2:
        raise RowError(f"a segment that is not [start, end]: {reprlib.repr(times)}", "give both times")
    return times[0], times[1]


def _segment(start: Any, end: Any, sentence: Any) -> TimedSentence:
    if not isinstance(sentence, str):
        raise RowError(f"a sentence that is not text: {reprlib.repr(sentence)}", "write a text")
    for time in (start, end):
        if isinstance(time, bool) or not isinstance(time, (int, float)) or not abs(time) <= 1e12:
            raise RowError(f"{reprlib.repr(time)} is not a time in seconds", "give times as numbers")
    if start > end:
        raise RowError(f"a segment from {start:g} to {end:g} seconds", "give the earlier time first")
    return TimedSentence(float(start), float(end), check_unicode(sentence))


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
    predicted = read_timed_sentences(predictions)
    videos = list(dict.fromkeys(video for annotator in annotators for video in annotator))
    matches = match_ids(predicted, videos, {video.removeprefix("v_"): video for video in videos})
    notes = []
    if matches.extra:
        notes.append(
            f"{predictions}: {len(matches.extra)} not in the references, left out: {first_ids(matches.extra)}"
        )
    absent = [video for video in videos if video not in matches.videos]
    if absent and (missing == "error" or len(absent) == len(videos)):
        raise DataError(
            f"{predictions}: no prediction for {len(absent)} of {len(videos)} videos: {first_ids(absent)}",
            remedy="caption them too, or choose --missing empty or skip",
        )
    if missing == "skip":
        videos = [video for video in videos if video in matches.videos]
    own: Segments = {video: predicted[name][:MAX_SEGMENTS] for video, name in matches.videos.items()}
    texts = {
        each.sentence for group in (own, *annotators) for video in videos for each in group.get(video, ())
    }
    known = [
        each.sentence
        for path in training
        for segments in read_timed_sentences(path).values()
        for each in segments
    ]
    tokens = _tokenize(sorted(texts), tokenizer)
    own, *annotators = (_with_tokens(group, videos, tokens) for group in (own, *annotators))
    scorer = None
    try:
        scorer = PairScorer({*tokens.values(), *UNMATCHED.values()})
    except (CapvidError, ImportError) as error:
        reason = error if isinstance(error, CapvidError) else "pip install 'capvid[meteor]'"
        notes.append(f"METEOR and SODA_c are left out: {reason}")
    values, soda = [], []
    for block in _blocks(videos, own, annotators):
        if scorer is not None:
            scorer.align(block, own, annotators, UNMATCHED[version])
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
            [each.sentence for segments in own.values() for each in segments],
            _tokenize(known, tokenizer).values() if training else None,
        ),
        missing=absent,
        notes=notes,
    )


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
