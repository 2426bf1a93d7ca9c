"""``capvid score``: captions against references."""

from __future__ import annotations

import csv
import gc
import io
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from capvid.cli._batch import check_writable_file
from capvid.cli._terminal import print_line
from capvid.errors import DataError, UsageError
from capvid.utils.escaping import json_text, table_cell
from capvid.utils.files import atomic_write_text
from capvid.utils.output_check import check_outputs
from capvid.version import __version__

if TYPE_CHECKING:
    from capvid.metrics import Texts
    from capvid.scoring.comparison import Comparison, Ranking
    from capvid.scoring.comparison_page import Table
    from capvid.scoring.diversity import Diversity
    from capvid.scoring.references import MatchedPredictions, ReferenceSet
    from capvid.scoring.scorer import Scores
    from capvid.scoring.video_agreement import Agreement


Tokenizer = Literal["auto", "ptb", "builtin", "none"]
Missing = Literal["error", "empty", "skip"]
Engine = Literal["auto", "builtin", "java"]
Evaluator = Literal["2018", "2019"]
ReferencesForm = Literal[
    "coco", "msrvtt", "msvd", "activitynet", "youcook2", "captions", "paragraphs", "jsonl"
]
Form = Literal["text", "json", "markdown", "csv", "latex"]
SUFFIXES = (".json", ".jsonl", ".csv", ".tsv")
# three letters of a script without spaces: Thai, Lao, Khmer, Japanese, Chinese
_UNSPACED = re.compile("[\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]{3}")
MAX_VIDEOS = 10  # whose captions are printed side by side


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector: captions are many, and hold no cycles to look for."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_garbage_collection()
def score(
    predictions: Path = typer.Argument(..., metavar="PREDICTIONS", show_default=False),
    references: list[str] = typer.Argument(..., metavar="REFERENCES", show_default=False),
    paragraph: bool = typer.Option(
        False, "--paragraph", help="Score paragraphs as MART does, with R@1 to R@4."
    ),
    dense: bool = typer.Option(
        False, "--dense", help="Score segments as the ActivityNet challenge does, and by SODA_c."
    ),
    evaluator: Evaluator = typer.Option("2019", help="Version of the ActivityNet evaluator for --dense."),
    metrics: str | None = typer.Option(
        None,
        show_default="all that are installed",
        help="Any of bleu, meteor, rouge, cider and repetition, with commas between them.",
    ),
    tokenizer: Tokenizer = typer.Option(
        "auto", help="builtin (auto is the same); ptb, Stanford's, needs Java; none splits at spaces."
    ),
    missing: Missing = typer.Option(
        "error", help="Videos without a prediction: error; empty, an empty caption; skip, left out."
    ),
    references_format: ReferencesForm | None = typer.Option(
        None,
        metavar="FORM",
        show_default="by content",
        help="The form of REFERENCES: coco, msrvtt, msvd, activitynet, youcook2, captions, paragraphs or "
        "jsonl.",
    ),
    meteor_engine: Engine = typer.Option(
        "auto", help="builtin (auto is the same), or java, the published one."
    ),
    per_video: Path | None = typer.Option(
        None, help="File for each video's scores: .json, .jsonl, .csv or .tsv."
    ),
    others: list[Path] | None = typer.Option(
        None, "--compare", metavar="FILE", help="Other predictions. May be repeated."
    ),
    page: Path | None = typer.Option(
        None,
        "--report",
        metavar="FILE",
        help="HTML page of the videos on which the systems of --compare differ most.",
    ),
    videos: Path | None = typer.Option(
        None, metavar="DIR", help="Folder of the videos: add CLIPScore and EMScore, or frames to --report."
    ),
    encoder: str | None = typer.Option(
        None,
        metavar="ENCODER",
        show_default="clip; none with --report",
        help="Image-text encoder of CLIPScore and EMScore: clip, clip-large, siglip2, a folder, or "
        "OWNER/NAME on the Hub.",
    ),
    sampling: str = typer.Option(
        "uniform:16", metavar="SAMPLING", help="Frames that it sees: uniform:N or fps:R."
    ),
    training: list[str] | None = typer.Option(
        None,
        metavar="FILE",
        help="Training captions, like REFERENCES, to count copies of them. May be repeated.",
    ),
    form: Form = typer.Option(
        "text", "--format", help="Output: text; markdown, csv or latex, the tables alone; json, all decimals."
    ),
) -> None:
    """Score captions as the papers do: BLEU, METEOR, ROUGE_L and CIDEr-D.

    PREDICTIONS is what capvid caption wrote (json, jsonl, csv, tsv, or its folder), COCO results, or
    {id: caption}; with --paragraph {id: [sentence, ...]} or ActivityNet results. REFERENCES are COCO,
    MSR-VTT, MSVD, ActivityNet or YouCookII files, {id: [caption, ...]}, {id: paragraph}, or JSONL
    (FILE#split=test takes one split). Ids may be paths of videos: a/b/video7.mp4 is video7.
    """
    if per_video is not None:
        check_suffix(per_video)
        check_writable_file(per_video)
    if page is not None:
        check_writable_file(page)
        if not others:
            raise UsageError("--report needs several systems", remedy="add --compare FILE")
    outputs = [(option, path) for option, path in (("--per-video", per_video), ("--report", page)) if path]
    if outputs:
        from capvid.scoring.predictions import prediction_files

        files = chain.from_iterable(
            (name, name.rpartition("#")[0]) for name in (*references, *(training or ()))
        )
        systems = chain.from_iterable(map(prediction_files, (predictions, *(others or ()))))
        check_outputs(outputs, chain(filter(None, files), systems))
    if videos is not None and not videos.exists():
        raise UsageError(f"{videos}: no such folder", remedy="give the folder of the videos")
    if encoder is not None and videos is None:
        raise UsageError("--encoder needs the videos", remedy="add --videos DIR")
    if dense:
        unused = {
            "--paragraph": paragraph,
            "--metrics": metrics,
            "--references-format": references_format,
            "--meteor-engine": meteor_engine == "java",
            "--compare": others,
            "--videos": videos,
        }
        for option in (option for option, value in unused.items() if value):
            raise UsageError(f"{option} is not for --dense", remedy="leave one of them out")
        options = {"version": evaluator, "tokenizer": tokenizer, "missing": missing}
        report = _score_dense(predictions, references, training or (), options)
    else:
        if paragraph and tokenizer != "auto":
            remedy = "leave it out: paragraphs are split as MART does"
            raise UsageError("--tokenizer is for captions", remedy=remedy)
        from capvid.scoring.diversity import diversity
        from capvid.scoring.references import load_predictions, load_references

        names = _parse_metrics(metrics, paragraph=paragraph)
        kind = references_format or ""
        reference_set = load_references(references, form=kind, paragraphs=paragraph)
        tokenized = partial(_tokenized, paragraph=paragraph, tokenizer=tokenizer)
        known = None
        if training:
            other = load_references(training, form=kind, paragraphs=paragraph)
            captions = tokenized({}, other.texts, missing="empty").references.values()
            known = set(chain.from_iterable(captions))
        paths = [predictions, *(others or [])]
        predicted = [
            load_predictions(path, reference_set, paragraphs=paragraph, missing=missing) for path in paths
        ]
        _print_notes(note for one in predicted for note in one.notes)
        sentences = chain.from_iterable(predicted[0].sentences.values())
        if tokenizer != "none" and any(map(_UNSPACED.search, sentences)):
            problem = "captions in a script without spaces between words, such as Chinese, count as one word"
            _print_notes([f"{problem}: put spaces between the words of predictions and references"])
        compared = _references_of_all(predicted, reference_set) if missing == "skip" else reference_set.texts
        first = set(reference_set.first)  # R@n is of these videos
        texts = [
            tokenized(one.sentences, compared, missing=missing, repetition_of=first) for one in predicted
        ]
        scores, comparison = _score_systems(
            texts, metrics=names, meteor_engine=meteor_engine, meteor_needed=metrics is not None
        )
        settings: dict[str, str] = {
            "tokenizer": "mart" if paragraph else "builtin" if tokenizer == "auto" else tokenizer,
            "missing": missing,
        }
        if "METEOR" in scores[0].corpus:
            settings["meteor_engine"] = "builtin" if meteor_engine == "auto" else meteor_engine
        scored = Scored(
            paths=[str(path) for path in paths],
            references=reference_set,
            predicted=predicted,
            num_references={video: len(captions) for video, captions in texts[0].references.items()},
            scores=scores,
            comparison=comparison,
            diversity=[diversity(one.predictions.values(), known) for one in texts],
            settings=settings,
        )
        if videos is not None and (encoder is not None or page is None):  # a page may need frames only
            scored = replace(scored, agreement=_agreement(scored, videos, encoder or "clip", sampling))
        report = _caption_report(scored)
        if page is not None:
            _write_page(page, scored, report, videos)
    if per_video is not None:
        write_scores(per_video, report.rows, report.columns)
    if form == "json":
        typer.echo(json_text(report.record, indent=2))
    elif form == "text":
        report.print()
    else:
        _print_notes(f"{_letter(index)} is {path}" for index, path in enumerate(report.systems))
        for index, (head, rows) in enumerate(report.tables):
            typer.echo(("\n" if index else "") + table_text(form, head, rows), nl=False)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Scores as they are printed and written.

    Attributes:
        record: scores and how they were computed, for JSON.
        systems: paths of the predictions, if there are several.
        tables: scores times 100, as papers print them.
        videos: lines on single videos.
        counts: numbers of videos and references.
        rows: scores of each video.
        columns: names of the values of these rows.
    """

    record: Mapping[str, Any]
    systems: Sequence[str] = ()
    tables: Sequence[Table]
    videos: Sequence[str] = ()
    counts: str
    rows: Iterable[Mapping[str, Any]]
    columns: Sequence[str]

    def print(self) -> None:
        """Print all but the record and the rows."""
        for index, path in enumerate(self.systems):
            print_line(f"{_letter(index)}: {path}")
        for head, rows in self.tables:
            widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
            for row in (head, *rows):
                cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
                if not head[0]:  # names of rows
                    cells[0] = row[0].ljust(widths[0])
                print_line((" " if len(head) > 6 else "  ").join(cells).rstrip())
        for line in (*self.videos, self.counts):
            print_line(line)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Scores of the captions of one or more systems.

    Attributes:
        paths: path of the predictions of each system.
        references: the references.
        predicted: matched predictions of each.
        num_references: number of references of each scored video.
        scores: scores of each.
        comparison: comparison of two systems, or ranking of more.
        diversity: diversity of the captions of each.
        settings: tokenizer, METEOR engine and handling of videos without a prediction.
        agreement: agreement of the captions with the videos, if these were given.
    """

    paths: list[str]
    references: ReferenceSet
    predicted: list[MatchedPredictions[str]]
    num_references: dict[str, int]
    scores: list[Scores]
    comparison: Comparison | Ranking | None
    diversity: list[Diversity]
    settings: dict[str, str]
    agreement: Agreement | None = None

    def caption(self, index: int, video: str) -> str:
        """Return the caption of a video by a system."""
        return " ".join(self.predicted[index].sentences.get(video, []))

    def record(self, index: int) -> dict[str, Any]:
        """Return the scores of a system for JSON."""
        return {
            "predictions": self.paths[index],
            "scores": self.scores[index].corpus,
            "diversity": asdict(self.diversity[index]),
        }


def _parse_metrics(metrics: str | None, *, paragraph: bool) -> tuple[str, ...]:
    """Return the metrics to compute; by default all that are installed."""
    from capvid.scoring.scorer import check_metrics, metric_names

    if metrics is None:
        return metric_names(paragraphs=paragraph)
    names = tuple(name for name in (part.strip().lower() for part in metrics.split(",")) if name)
    if not names:
        known = ", ".join(metric_names(paragraphs=paragraph))
        raise UsageError("--metrics names none", remedy=f"use any of: {known}")
    check_metrics(names, paragraphs=paragraph)
    return names


def _references_of_all(predicted: Iterable[MatchedPredictions[str]], references: ReferenceSet) -> Any:
    """Return the references of the videos with a prediction by every system."""
    skipped = {video for one in predicted for video in one.missing}
    common = {video: texts for video, texts in references.texts.items() if video not in skipped}
    if not common:
        raise DataError("no video has a prediction in both files", remedy="compare their ids")
    return common


def _tokenized(
    sentences: Mapping[str, Sequence[str]],
    references: Mapping[str, Sequence[str]],
    *,
    paragraph: bool,
    tokenizer: str,
    missing: str,
    repetition_of: set[str] | None = None,
) -> Texts:
    """Tokenize paragraphs or captions with their references."""
    from capvid.scoring.scorer import caption_texts, paragraph_texts

    if paragraph:
        return paragraph_texts(sentences, references, missing=missing, repetition_of=repetition_of)
    captions = {video: texts[0] for video, texts in sentences.items()}
    return caption_texts(captions, references, tokenizer=tokenizer, missing=missing)


def _score_systems(texts: list[Texts], **options: Any) -> tuple[list[Scores], Comparison | Ranking | None]:
    """Score each system, compare two, rank more, and print notes."""
    from capvid.scoring.comparison import compare, rank
    from capvid.scoring.scorer import score_texts

    comparison: Comparison | Ranking | None = None
    if len(texts) == 1:
        scores = [score_texts(texts[0], **options)]
    elif len(texts) == 2:
        comparison = compare(*texts, **options)
        scores = [comparison.first, comparison.second]
    else:
        comparison = rank(texts, **options)
        scores = comparison.scores
    _print_notes(f"{name} is left out: {reason}" for name, reason in scores[0].left_out.items())
    if "CIDEr-D" in scores[0].corpus and len(scores[0].per_video) == 1:
        _print_notes(["CIDEr-D of a single video is 0, whatever its caption"])
    return scores, comparison


def _agreement(scored: Scored, folder: Path, encoder: str, sampling: str) -> Agreement:
    """Score the captions against the videos in a folder, and say which could not be scored."""
    from capvid.scoring.video_agreement import score_agreement

    references = {video: scored.references.texts[video] for video in scored.num_references}
    systems = [
        {video: scored.caption(index, video) for video in one.sentences}
        for index, one in enumerate(scored.predicted)
    ]
    agreement = score_agreement(systems, references, folder, encoder, sampling=sampling)
    errors = agreement.errors.items()
    _print_notes(f"{video} has no CLIPScore and EMScore: {error.message}" for video, error in errors)
    if agreement.num_shortened:
        limit = f"{agreement.max_tokens} tokens, the maximum of {agreement.encoder}"
        _print_notes([f"captions cut to {limit}: {agreement.num_shortened}"])
    return agreement


def _print_notes(notes: Iterable[str]) -> None:
    for note in dict.fromkeys(notes):
        print_line(f"note: {note}", err=True)


def _score_dense(
    predictions: Path, references: list[str], training: Sequence[str], options: Mapping[str, Any]
) -> Report:
    """Score segments with sentences."""
    from capvid.scoring.dense import score_dense

    files, training_files = ([Path(path) for path in paths] for paths in (references, training))
    scores = score_dense(predictions, files, training=training_files, **options)
    _print_notes(scores.notes)
    thresholds = {str(threshold): values for threshold, values in scores.thresholds.items()}
    names = _table_names(scores.mean)
    rows = [
        [key, *(_percent(values[name]) for name in names)]
        for key, values in {**thresholds, "mean": scores.mean}.items()
    ]
    tables: list[Table] = [(["tIoU", *names], rows)]
    if scores.soda:
        tables.append((list(scores.soda), [[_percent(value, 2) for value in scores.soda.values()]]))
    tables.append(_diversity_table([scores.diversity]))
    record = {
        "predictions": str(predictions),
        "references": references,
        "evaluator": options["version"],
        "scores": {**scores.mean, **scores.soda},
        "thresholds": thresholds,
        "diversity": asdict(scores.diversity),
        "tokenizer": options["tokenizer"],
        "missing": options["missing"],
        "counts": {"videos": len(scores.per_video), "missing": len(scores.missing)},
    }
    return Report(
        record=record,
        tables=tables,
        counts=f"{_count_videos(len(scores.per_video))}; scores are times 100",
        rows=[{"video": video, **values} for video, values in scores.per_video.items()],
        columns=["video", *scores.mean, *scores.soda],
    )


def _caption_report(scored: Scored) -> Report:
    """Return what is printed and written of scored captions."""
    from capvid.scoring.comparison import Comparison, Ranking

    record, tables = _caption_record(scored), []
    corpus, agreement, comparison = scored.scores[0].corpus, scored.agreement, scored.comparison
    videos = []
    if isinstance(comparison, Comparison):
        record["compare"] = _comparison_record(scored, comparison)
        tables.append(_comparison_table(comparison))
        if most := _most_different(comparison):
            videos = [f"The videos that differ most in {comparison.by}:"]
        for video, difference in most.items():
            videos.append(f"{100 * difference:+.1f} {video}")
            videos += [f"  {letter}: {scored.caption(n, video)}" for n, letter in enumerate("AB")]
    elif isinstance(comparison, Ranking):
        record["ranking"] = _ranking_record(scored, comparison)
        tables.append(_ranking_table(comparison))
    else:
        repeated = [name for name in corpus if name.startswith("R@")]
        for names in ([name for name in corpus if name not in repeated], repeated):
            if names:
                tables.append((names, [[_percent(corpus[name]) for name in names]]))
    tables.append(_diversity_table(scored.diversity))
    agreed: Mapping[str, Mapping[str, float]] = {}
    if agreement is not None:
        record["agreement"] = _agreement_record(scored, agreement)
        agreed = agreement.systems[0]
        means = [agreement.corpus(index) for index in range(len(scored.paths))]
        tables.append(_lettered(list(means[0]), [list(map(_percent, row.values())) for row in means]))
    rows = (
        {"video": video, "caption": scored.caption(0, video), **values, **agreed.get(video, {})}
        for video, values in scored.scores[0].per_video.items()
    )
    counts = record["counts"]
    return Report(
        record=record,
        systems=scored.paths if comparison else (),
        tables=tables,
        videos=videos,
        counts=f"{_count_videos(counts['videos'])}, {counts['references']} references; scores are times 100",
        rows=rows,
        columns=["video", "caption", *corpus, *(agreement.corpus(0) if agreement else ())],
    )


def _caption_record(scored: Scored) -> dict[str, Any]:
    """Return the scores of the first system and how they were computed."""
    versions = {"capvid": __version__, "python": platform.python_version()}
    if "ptb" in scored.settings.values() or "java" in scored.settings.values():
        from capvid.metrics.java import java_version

        versions["java"] = java_version()
    return {
        **scored.record(0),
        "references": scored.references.names,
        "left_out": scored.scores[0].left_out,
        **scored.settings,
        "versions": versions,
        "counts": {
            "videos": len(scored.num_references),
            "references": sum(scored.num_references.values()),
            "missing": len(scored.predicted[0].missing),
            "extra": len(scored.predicted[0].extra),
        },
    }


def _comparison_record(scored: Scored, comparison: Comparison) -> dict[str, Any]:
    from capvid.scoring.comparison import SAMPLES, SEED

    return {
        **scored.record(1),
        "differences": {name: asdict(one) for name, one in comparison.differences.items()},
        "samples": SAMPLES,
        "seed": SEED,
        "by": comparison.by,
        "videos": [
            {
                "video": video,
                "difference": difference,
                "caption": scored.caption(0, video),
                "other": scored.caption(1, video),
            }
            for video, difference in _most_different(comparison).items()
        ],
    }


def _ranking_record(scored: Scored, ranking: Ranking) -> dict[str, Any]:
    from capvid.scoring.comparison import SAMPLES, SEED

    leads: list[Any] = [*map(asdict, ranking.neighbours), None]
    return {
        "by": ranking.by,
        "samples": SAMPLES,
        "seed": SEED,
        "systems": [
            {**scored.record(index), "intervals": ranking.intervals[index], "from_next": lead}
            for index, lead in zip(ranking.order, leads, strict=True)
        ],
    }


def _agreement_record(scored: Scored, agreement: Agreement) -> dict[str, Any]:
    return {
        "encoder": agreement.encoder,
        "sampling": agreement.sampling,
        "videos": len(agreement.systems[0]),
        "shortened": agreement.num_shortened,
        "scores": [
            {"predictions": path, **agreement.corpus(index)} for index, path in enumerate(scored.paths)
        ],
        "failed": {video: error.message for video, error in agreement.errors.items()},
    }


def _most_different(comparison: Comparison) -> dict[str, float]:
    """Return the videos that differ most, and their differences."""
    videos = [(video, difference) for video, difference in comparison.videos.items() if difference]
    return dict(videos[:MAX_VIDEOS])


def _comparison_table(comparison: Comparison) -> Table:
    rows = []
    for name, one in comparison.differences.items():
        scores = [_percent(scores.corpus[name]) for scores in (comparison.first, comparison.second)]
        interval = f"{100 * one.low:+.1f} to {100 * one.high:+.1f}"
        rows.append([name, *scores, f"{100 * one.difference:+.1f}", interval, f"{one.p:.3f}"])
    return ["", "A", "B", "A - B", "95 % interval", "p"], rows


def _ranking_table(ranking: Ranking) -> Table:
    """Return the systems, best first, each with an interval and the p-value of its lead over the next."""
    names = sorted(_table_names(ranking.scores[0].corpus), key=lambda name: name != ranking.by)
    rows = []
    leads = [*(f"{one.p:.3f}" for one in ranking.neighbours), "-"]
    for index, lead in zip(ranking.order, leads, strict=True):
        values = [_percent(ranking.scores[index].corpus[name]) for name in names]
        interval = " to ".join(map(_percent, ranking.intervals[index][ranking.by]))
        rows.append([_letter(index), values[0], interval, lead, *values[1:]])
    return ["", names[0], "95 % interval", "p of lead", *names[1:]], rows


def _diversity_table(systems: Sequence[Diversity]) -> Table:
    head = ["distinct", "words", "distinct-1", "distinct-2", "length"]
    rows = []
    for one in systems:
        shares = [_percent(share) for share in (one.distinct_1, one.distinct_2)]
        rows.append([_percent(one.distinct), str(one.vocabulary), *shares, f"{one.mean_length:.1f}"])
        if one.in_training is not None:
            rows[-1].append(_percent(one.in_training))
    return _lettered([*head, "in training"][: len(rows[0])], rows)


def _lettered(head: list[str], rows: list[list[str]]) -> Table:
    """Return a table of systems, with their letters if there are several."""
    if len(rows) == 1:
        return head, rows
    return ["", *head], [[_letter(index), *row] for index, row in enumerate(rows)]


def _letter(index: int) -> str:
    """Return A, B, ..., Z, AA, AB, ..."""
    return (_letter(index // 26 - 1) if index >= 26 else "") + chr(ord("A") + index % 26)


def _percent(value: float, decimals: int = 1) -> str:
    return f"{100 * value:.{decimals}f}"


def _table_names(names: Iterable[str]) -> list[str]:
    """Return the names of the scores of a wide table, which has BLEU-4 only."""
    return [name for name in names if not name.startswith("BLEU-") or name == "BLEU-4"]


def _count_videos(count: int) -> str:
    return "1 video" if count == 1 else f"{count} videos"


def _write_page(path: Path, scored: Scored, report: Report, folder: Path | None) -> None:
    """Write the page of the videos that differ most, with the frames of those that can be found."""
    from capvid.datasets.annotation_files import first_ids
    from capvid.scoring import comparison_page
    from capvid.scoring.predictions import match_ids

    assert scored.comparison is not None
    by, references = scored.comparison.by, scored.references
    names = comparison_page.most_different([one.per_video for one in scored.scores], by)
    paths = {
        video: Path(name)
        for video in names
        for name in (one.names.get(video, "") for one in scored.predicted)
        if os.path.isfile(name)  # noqa: PTH113  # Path.is_file raises for long names
    }
    if folder is not None:
        files = comparison_page.locate_videos(folder)
        matched = match_ids(files, references.texts, references.aliases).videos
        paths.update({video: files[matched[video]] for video in names if video in matched})
    frames, unreadable = comparison_page.read_thumbnails(paths)
    if unreadable:
        _print_notes([f"no frames of {len(unreadable)} videos: {first_ids(unreadable)}"])
    videos = []
    for video in names:
        captions = [
            (_letter(index), one.per_video[video].get(by, 0.0), scored.caption(index, video))
            for index, one in enumerate(scored.scores)
        ]
        captions.sort(key=lambda each: -each[1])
        videos.append(
            comparison_page.ComparedVideo(
                name=video,
                captions=captions,
                references=references.texts[video],
                frames=frames.get(video, ()),
            )
        )
    comparison_page.write_page(
        path,
        systems=[(_letter(index), name) for index, name in enumerate(report.systems)],
        tables=report.tables,
        by=by,
        counts=report.counts,
        videos=videos,
    )


def table_text(form: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells as ``markdown``, ``csv`` or ``latex`` (booktabs), ending with a newline."""
    lines = [head, *rows]
    if form == "csv":
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows(lines)
        return stream.getvalue()
    columns = "l" * (not head[0]) + "r" * (len(head) - (not head[0]))
    if form == "markdown":
        rules = ["---" if column == "l" else "---:" for column in columns]
        escaped = [[cell.replace("|", "\\|") for cell in line] for line in (head, rules, *lines[1:])]
        return "".join(f"| {' | '.join(line)} |\n" for line in escaped)
    escapes = str.maketrans({character: f"\\{character}" for character in "%&_#$"})
    first, *others = (" & ".join([cell.translate(escapes) for cell in line]) + " \\\\\n" for line in lines)
    body = f"\\toprule\n{first}\\midrule\n{''.join(others)}\\bottomrule\n"
    return f"\\begin{{tabular}}{{{columns}}}\n{body}\\end{{tabular}}\n"


def check_suffix(path: Path) -> None:
    """Check the suffix of a file name.

    Raises:
        UsageError: it is not one of :data:`SUFFIXES`.
    """
    if path.suffix.lower() not in SUFFIXES:
        problem = f"{path}: no format {path.suffix or 'without suffix'}"
        raise UsageError(problem, remedy=f"use {', '.join(SUFFIXES)}")


def write_scores(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Write a row for each video, replacing the file at once.

    Args:
        path: whose suffix says the format, one of :data:`SUFFIXES`.
        rows: values by column; a value may be missing, and is null or an empty cell then.
        columns: in their order.

    Raises:
        OSError: the file cannot be written.
    """
    suffix = path.suffix.lower()
    records = [{column: row.get(column) for column in columns} for row in rows]
    lines = [columns, *([_cell(value) for value in record.values()] for record in records)]
    if suffix == ".json":
        text = json_text(records, indent=1) + "\n"
    elif suffix == ".jsonl":
        text = "".join(json_text(record) + "\n" for record in records)
    elif suffix == ".tsv":
        text = "".join("\t".join(line) + "\n" for line in lines)
    else:
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows(lines)
        text = stream.getvalue()
    atomic_write_text(path.resolve(), text)  # a link stays one


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return table_cell(value)
    return "" if value is None else str(value)
