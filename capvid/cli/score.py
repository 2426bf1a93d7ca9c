"""``capvid score``: captions against references."""

from __future__ import annotations

import csv
import gc
import io
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from capvid.cli._batch import check_writable_file
from capvid.cli._terminal import print_line
from capvid.errors import DataError, UsageError
from capvid.utils.escaping import json_text, table_cell, terminal
from capvid.utils.files import atomic_write_text
from capvid.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

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
Form = Literal["coco", "msrvtt", "msvd", "activitynet", "youcook2", "captions", "paragraphs", "jsonl"]


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
    references_format: Form | None = typer.Option(
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
    as_json: bool = typer.Option(False, "--json", help="Print JSON, with all decimals."),
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
        _score_dense(
            predictions,
            references,
            per_video,
            as_json=as_json,
            training=[Path(path) for path in training or ()],
            tokenizer=tokenizer,
            missing=missing,
            version=evaluator,
        )
        return
    from capvid.scoring.comparison import compare, rank
    from capvid.scoring.diversity import diversity
    from capvid.scoring.references import load_predictions, load_references
    from capvid.scoring.scorer import score_texts

    chosen = _parse_metrics(metrics, paragraph=paragraph)
    if paragraph and tokenizer != "auto":
        raise UsageError(
            "--tokenizer is for captions", remedy="leave it out: paragraphs are split as MART does"
        )
    form = references_format or ""
    wanted = load_references(references, form=form, paragraphs=paragraph)
    known = None
    if training:
        known = _training_texts(training, form, tokenizer, paragraph=paragraph)
    paths = [predictions, *(others or [])]
    predicted = [load_predictions(path, wanted, paragraphs=paragraph, missing=missing) for path in paths]
    for note in dict.fromkeys(note for one in predicted for note in one.notes):
        print_line(f"note: {note}", err=True)
    texts = _texts(predicted, wanted, tokenizer, missing, paragraph=paragraph)
    options: dict[str, Any] = {
        "metrics": chosen,
        "meteor_engine": meteor_engine,
        "meteor_needed": metrics is not None,
    }
    comparison = compare(texts[0], texts[1], **options) if len(texts) == 2 else None
    ranking = rank(texts, **options) if len(texts) > 2 else None
    if comparison is not None:
        scores = comparison.first
    else:
        scores = ranking.scores[0] if ranking is not None else score_texts(texts[0], **options)
    for name, why in scores.left_out.items():
        print_line(f"note: {name} is left out: {why}", err=True)
    if "CIDEr-D" in scores.corpus and len(scores.per_video) == 1:
        print_line("note: CIDEr-D of a single video is 0, whatever its caption", err=True)
    agreement = None
    if videos is not None and (encoder is not None or page is None):  # a page may need frames only
        scored_videos = list(texts[0].references)
        agreement = _agreement(predicted, wanted, scored_videos, videos, encoder or "clip", sampling)
        for video, row in agreement.systems[0].items():
            scores.per_video[video].update(row)
    scored = Scored(
        paths=[str(path) for path in paths],
        wanted=wanted,
        predicted=predicted,
        texts=texts[0],
        scores=scores,
        comparison=comparison,
        ranking=ranking,
        diversity=[diversity(one.predictions.values(), known) for one in texts],
        agreement=agreement,
        tokenizer="mart" if paragraph else "builtin" if tokenizer == "auto" else tokenizer,
        meteor_engine="builtin" if meteor_engine == "auto" else meteor_engine,
        missing=missing,
    )
    if per_video is not None:
        write_videos(per_video, scored)
    if page is not None:
        _write_page(page, scored, videos)
    if as_json:
        typer.echo(json_text(report(scored), indent=2))
    else:
        print_report(scored)


def _score_dense(
    predictions: Path, references: list[str], per_video: Path | None, *, as_json: bool, **options: Any
) -> None:
    """Score segments, and write and print the result."""
    from rich.console import Console

    from capvid.scoring.dense import SODA, score_dense

    scores = score_dense(predictions, [Path(path) for path in references], **options)
    for note in scores.notes:
        print_line(f"note: {note}", err=True)
    if per_video is not None:
        rows = ({"video": video, **values} for video, values in scores.per_video.items())
        write_scores(per_video, rows, ["video", *scores.mean, *scores.soda])
    if as_json:
        record = {
            "predictions": str(predictions),
            "references": references,
            "evaluator": options["version"],
            "scores": {**scores.mean, **scores.soda},
            "thresholds": {str(threshold): values for threshold, values in scores.thresholds.items()},
            "diversity": asdict(scores.diversity),
            "tokenizer": options["tokenizer"],
            "missing": options["missing"],
            "counts": {"videos": len(scores.per_video), "missing": len(scores.missing)},
        }
        typer.echo(json_text(record, indent=2))
        return
    out = Console(highlight=False, emoji=False)
    names = [name for name in scores.mean if not name.startswith("BLEU-") or name == "BLEU-4"]
    rows_by_threshold = {
        **{str(key): values for key, values in scores.thresholds.items()},
        "mean": scores.mean,
    }
    table = [
        [key, *(f"{100 * values[name]:.1f}" for name in names)] for key, values in rows_by_threshold.items()
    ]
    _table(out, ["tIoU", *names], table)
    if scores.soda:
        _table(out, list(SODA), [[f"{100 * value:.2f}" for value in scores.soda.values()]])
    _print_diversity(out, [scores.diversity])
    out.print(f"{_count_videos(len(scores.per_video))}; scores are times 100", soft_wrap=True)


def _count_videos(count: int) -> str:
    return "1 video" if count == 1 else f"{count} videos"


def _parse_metrics(metrics: str | None, *, paragraph: bool) -> tuple[str, ...]:
    """Return the metrics to compute; by default all that are installed."""
    from capvid.scoring.scorer import check_metrics, metric_names

    if metrics is None:
        return metric_names(paragraphs=paragraph)
    chosen = tuple(name for name in (part.strip().lower() for part in metrics.split(",")) if name)
    if not chosen:
        raise UsageError(
            "--metrics names none", remedy=f"use any of: {', '.join(metric_names(paragraphs=paragraph))}"
        )
    check_metrics(chosen, paragraphs=paragraph)
    return chosen


def _texts(
    predicted: list[MatchedPredictions],
    wanted: ReferenceSet,
    tokenizer: str,
    missing: str,
    *,
    paragraph: bool,
) -> list[Texts]:
    """Tokenize each set of predictions with the references; videos skipped in one are skipped in all."""
    from capvid.scoring.scorer import caption_texts, paragraph_texts

    references = wanted.texts
    if missing == "skip":
        lacking = {video for one in predicted for video in one.missing}
        references = {video: texts for video, texts in references.items() if video not in lacking}
        if not references:
            raise DataError("no video has a prediction in both files", remedy="compare their ids")
    if paragraph:
        first = set(wanted.first)
        return [
            paragraph_texts(one.sentences, references, missing=missing, repetition_of=first)
            for one in predicted
        ]
    captions = [{video: sentences[0] for video, sentences in one.sentences.items()} for one in predicted]
    return [caption_texts(one, references, tokenizer=tokenizer, missing=missing) for one in captions]


def _agreement(
    predicted: list[MatchedPredictions],
    wanted: ReferenceSet,
    scored: Sequence[str],
    folder: Path,
    encoder: str,
    sampling: str,
) -> Agreement:
    """Score the captions against the videos in a folder, and say which could not be scored."""
    from capvid.scoring.video_agreement import score_agreement

    systems = [
        {video: " ".join(sentences) for video, sentences in one.sentences.items()} for one in predicted
    ]
    references = {video: wanted.texts[video] for video in scored}
    agreement = score_agreement(systems, references, folder, encoder, sampling=sampling)
    for video, error in agreement.errors.items():
        print_line(terminal(f"note: {video} has no CLIPScore and EMScore: {error.message}"), err=True)
    if agreement.num_shortened:
        limit = f"{agreement.max_tokens} tokens, the maximum of {agreement.encoder}"
        print_line(terminal(f"note: captions cut to {limit}: {agreement.num_shortened}"), err=True)
    return agreement


def _training_texts(files: list[str], form: str, tokenizer: str, *, paragraph: bool) -> set[str]:
    """Return tokenized training captions, or paragraphs."""
    from capvid.scoring.references import load_references
    from capvid.scoring.scorer import caption_texts, paragraph_texts

    texts = load_references(files, form=form, paragraphs=paragraph).texts
    if paragraph:
        read = paragraph_texts({}, texts, missing="empty")
    else:
        read = caption_texts({}, texts, tokenizer=tokenizer, missing="empty")
    return {text for captions in read.references.values() for text in captions}


MAX_VIDEOS = 10  # whose captions are shown side by side
WIDTH = 60  # columns of the tables at most


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Scores of predictions, with inputs and settings.

    Attributes:
        paths: paths of the predictions.
        wanted: the references.
        predicted: the matched predictions of each file.
        texts: tokenized texts of the first.
        scores: scores of the first.
        comparison: comparison of the first with the second, if there are two.
        ranking: ranking of all, if there are more.
        diversity: diversity of the predictions of each file.
        agreement: agreement of the predictions of each file with the videos, if these were given.
        tokenizer: name of the tokenizer.
        meteor_engine: name of the METEOR engine.
        missing: handling of videos without a prediction.
    """

    paths: list[str]
    wanted: ReferenceSet
    predicted: list[MatchedPredictions]
    texts: Texts
    scores: Scores
    comparison: Comparison | None
    ranking: Ranking | None
    diversity: Sequence[Diversity]
    agreement: Agreement | None
    tokenizer: str
    meteor_engine: str
    missing: str

    def caption(self, which: int, video: str) -> str:
        """Return the caption of a video by the first or second predictions."""
        return " ".join(self.predicted[which].sentences.get(video, []))


def report(scored: Scored) -> dict[str, Any]:
    """Return the scores and how they were computed, for JSON."""
    versions = {"capvid": __version__, "python": platform.python_version()}
    if scored.tokenizer == "ptb" or ("METEOR" in scored.scores.corpus and scored.meteor_engine == "java"):
        from capvid.metrics.java import java_version

        versions["java"] = java_version()
    record: dict[str, Any] = {
        "predictions": scored.paths[0],
        "references": scored.wanted.names,
        "scores": scored.scores.corpus,
        "diversity": asdict(scored.diversity[0]),
        "left_out": scored.scores.left_out,
        "tokenizer": scored.tokenizer,
        "missing": scored.missing,
        "versions": versions,
        "counts": {
            "videos": len(scored.texts.references),
            "references": sum(map(len, scored.texts.references.values())),
            "missing": len(scored.predicted[0].missing),
            "extra": len(scored.predicted[0].extra),
        },
    }
    if scored.agreement is not None:
        record["agreement"] = {
            "encoder": scored.agreement.encoder,
            "sampling": scored.agreement.sampling,
            "videos": len(scored.agreement.systems[0]),
            "shortened": scored.agreement.num_shortened,
            "scores": [
                {"predictions": path, **scored.agreement.corpus(which)}
                for which, path in enumerate(scored.paths)
            ],
            "failed": {video: error.message for video, error in scored.agreement.errors.items()},
        }
    if "METEOR" in scored.scores.corpus:
        record["meteor_engine"] = scored.meteor_engine
    if scored.comparison is not None:
        record["compare"] = _comparison(scored, scored.comparison)
    if scored.ranking is not None:
        record["ranking"] = _ranking(scored, scored.ranking)
    return record


def _comparison(scored: Scored, comparison: Comparison) -> dict[str, Any]:
    from capvid.scoring.comparison import SAMPLES, SEED

    return {
        "predictions": scored.paths[1],
        "scores": comparison.second.corpus,
        "diversity": asdict(scored.diversity[1]),
        "differences": {name: asdict(one) for name, one in comparison.differences.items()},
        "samples": SAMPLES,
        "seed": SEED,
        "by": comparison.by,
        "videos": [
            {
                "video": video,
                "difference": comparison.videos[video],
                "caption": scored.caption(0, video),
                "other": scored.caption(1, video),
            }
            for video in _most(comparison)
        ],
    }


def _ranking(scored: Scored, ranking: Ranking) -> dict[str, Any]:
    from capvid.scoring.comparison import SAMPLES, SEED

    neighbours: list[Any] = [*map(asdict, ranking.neighbours), None]
    return {
        "by": ranking.by,
        "samples": SAMPLES,
        "seed": SEED,
        "systems": [
            {
                "predictions": scored.paths[which],
                "scores": ranking.scores[which].corpus,
                "intervals": ranking.intervals[which],
                "diversity": asdict(scored.diversity[which]),
                "from_next": difference,
            }
            for which, difference in zip(ranking.order, neighbours, strict=True)
        ],
    }


def _most(comparison: Comparison) -> list[str]:
    """Return the videos that differ most."""
    return [video for video, difference in comparison.videos.items() if difference][:MAX_VIDEOS]


def write_videos(path: Path, scored: Scored) -> None:
    """Write video, caption and scores of each video.

    Raises:
        UsageError: the suffix is of no format.
        OSError: the file cannot be written.
    """
    rows = (
        {"video": video, "caption": scored.caption(0, video), **values}
        for video, values in scored.scores.per_video.items()
    )
    extra = scored.agreement.corpus(0) if scored.agreement is not None else ()
    write_scores(path, rows, ["video", "caption", *scored.scores.corpus, *extra])


def print_report(scored: Scored, console: Console | None = None) -> None:
    """Print the scores times 100, as papers print them.

    Args:
        scored: the result.
        console: where to; ``None`` is stdout.
    """
    from rich.console import Console

    out = console or Console(highlight=False, emoji=False)
    if scored.ranking is not None:
        _print_paths(out, scored.paths)
        _table(out, *_score_table(scored))
        _print_diversity(out, scored.diversity)
    elif scored.comparison is None:
        names = list(scored.scores.corpus)
        repeated = [name for name in names if name.startswith("R@")]
        for part in ([name for name in names if name not in repeated], repeated):
            if part:
                _table(out, part, [[f"{100 * scored.scores.corpus[name]:.1f}" for name in part]])
        _print_diversity(out, scored.diversity)
    else:
        _print_comparison(out, scored, scored.comparison)
    if scored.agreement is not None:
        _print_agreement(out, scored.agreement)
    out.print(_counts(scored), soft_wrap=True)


def _write_page(path: Path, scored: Scored, folder: Path | None) -> None:
    """Write the page of the videos that differ most, with the frames of those that can be found."""
    from capvid.datasets.annotation_files import first_ids
    from capvid.scoring import comparison_page
    from capvid.scoring.predictions import match_ids

    if scored.ranking is not None:
        by, all_scores = scored.ranking.by, scored.ranking.scores
    else:
        assert scored.comparison is not None
        by, all_scores = scored.comparison.by, [scored.comparison.first, scored.comparison.second]
    chosen = comparison_page.most_different([one.per_video for one in all_scores], by)
    names = {video: [one.names.get(video, "") for one in scored.predicted] for video in chosen}
    paths = {
        video: Path(name)
        for video in chosen
        for name in names[video]
        if os.path.isfile(name)  # noqa: PTH113  # Path.is_file raises for long names
    }
    if folder is not None:
        files = comparison_page.locate_videos(folder)
        matched = match_ids(files, scored.wanted.texts, scored.wanted.aliases).videos
        paths.update({video: files[matched[video]] for video in chosen if video in matched})
    frames, unreadable = comparison_page.read_thumbnails(paths)
    if unreadable:
        print_line(f"note: no frames of {len(unreadable)} videos: {first_ids(unreadable)}", err=True)
    compared = []
    for video in chosen:
        captions = [
            (_letter(which), one.per_video[video].get(by, 0.0), scored.caption(which, video))
            for which, one in enumerate(all_scores)
        ]
        compared.append(
            comparison_page.ComparedVideo(
                name=video,
                captions=sorted(captions, key=lambda each: -each[1]),
                references=scored.wanted.texts[video],
                frames=frames.get(video, ()),
            )
        )
    comparison_page.write_page(
        path,
        systems=[(_letter(which), name) for which, name in enumerate(scored.paths)],
        tables=[_score_table(scored), _diversity_table(scored.diversity)],
        by=by,
        counts=_counts(scored),
        videos=compared,
    )


def _counts(scored: Scored) -> str:
    references = sum(map(len, scored.texts.references.values()))
    return f"{_count_videos(len(scored.texts.references))}, {references} references; scores are times 100"


def _score_table(scored: Scored) -> Table:
    """Return the table of scores of several systems."""
    if scored.ranking is not None:
        return _ranking_table(scored, scored.ranking)
    assert scored.comparison is not None
    return _comparison_table(scored.comparison)


def _comparison_table(comparison: Comparison) -> Table:
    rows = []
    for name, one in comparison.differences.items():
        first, second = (100 * scores.corpus[name] for scores in (comparison.first, comparison.second))
        interval = f"{100 * one.low:+.1f} to {100 * one.high:+.1f}"
        rows.append(
            [name, f"{first:.1f}", f"{second:.1f}", f"{100 * one.difference:+.1f}", interval, f"{one.p:.3f}"]
        )
    return ["", "A", "B", "A - B", "95 % interval", "p"], rows


def _print_comparison(out: Console, scored: Scored, comparison: Comparison) -> None:
    _print_paths(out, scored.paths)
    _table(out, *_score_table(scored))
    _print_diversity(out, scored.diversity)
    videos = _most(comparison)
    if videos:
        out.print(f"The videos that differ most in {comparison.by}:")
    for video in videos:
        out.print(terminal(f"{100 * comparison.videos[video]:+.1f} {video}"), markup=False, soft_wrap=True)
        for which, letter in enumerate("AB"):
            out.print(terminal(f"  {letter}: {scored.caption(which, video)}"), markup=False, soft_wrap=True)


def _ranking_table(scored: Scored, ranking: Ranking) -> Table:
    """Return the systems, best first, each with an interval and the p-value of its lead over the next."""
    names = [name for name in scored.scores.corpus if not name.startswith("BLEU-") or name == "BLEU-4"]
    names.sort(key=lambda name: name != ranking.by)
    rows = []
    for which, next_p in zip(
        ranking.order, [*(f"{one.p:.3f}" for one in ranking.neighbours), "-"], strict=True
    ):
        values = [f"{100 * ranking.scores[which].corpus[name]:.1f}" for name in names]
        interval = " to ".join(f"{100 * end:.1f}" for end in ranking.intervals[which][ranking.by])
        rows.append([_letter(which), values[0], interval, next_p, *values[1:]])
    return ["", names[0], "95 % interval", "p of lead", *names[1:]], rows


def _letter(which: int) -> str:
    """Return A, B, ..., Z, AA, AB, ..."""
    return (_letter(which // 26 - 1) if which >= 26 else "") + chr(ord("A") + which % 26)


def _print_paths(out: Console, paths: Sequence[str]) -> None:
    for which, path in enumerate(paths):
        out.print(terminal(f"{_letter(which)}: {path}"), markup=False, soft_wrap=True)


def _print_diversity(out: Console, of_files: Sequence[Diversity]) -> None:
    _table(out, *_diversity_table(of_files))


def _diversity_table(of_files: Sequence[Diversity]) -> Table:
    head, rows = ["distinct", "words", "distinct-1", "distinct-2", "length", "in training"], []
    for one in of_files:
        shares = (one.distinct, one.distinct_1, one.distinct_2, one.in_training)
        distinct, *others, copied = ("" if share is None else f"{100 * share:.1f}" for share in shares)
        rows.append([distinct, str(one.vocabulary), *others, f"{one.mean_length:.1f}", copied])
    if of_files[0].in_training is None:
        head, rows = head[:-1], [row[:-1] for row in rows]
    if len(of_files) > 1:
        head, rows = ["", *head], [[_letter(which), *row] for which, row in enumerate(rows)]
    return head, rows


def _print_agreement(out: Console, agreement: Agreement) -> None:
    head = ["", *agreement.corpus(0)]
    rows = [
        [_letter(which), *(f"{100 * value:.1f}" for value in agreement.corpus(which).values())]
        for which in range(len(agreement.systems))
    ]
    if len(rows) == 1:
        head, rows = head[1:], [rows[0][1:]]
    _table(out, head, rows)


def _table(out: Console, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 1 if len(head) > 6 else 2, 0, 0))
    for column, name in enumerate(head):
        table.add_column(name, justify="left" if column == 0 and not name else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out.print(table, width=max(out.width, WIDTH))


SUFFIXES = (".json", ".jsonl", ".csv", ".tsv")


def check_suffix(path: Path) -> None:
    """Check the suffix of a file name.

    Raises:
        UsageError: it is not one of :data:`SUFFIXES`.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"{path}: no format {path.suffix or 'without suffix'}", remedy=f"use {', '.join(SUFFIXES)}"
        )


def write_scores(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Write a row for each video, replacing the file at once.

    Args:
        path: whose suffix says the format.
        rows: values by column; a value may be missing, and is null or an empty cell then.
        columns: in their order.

    Raises:
        UsageError: the suffix is of no format.
        OSError: the file cannot be written.
    """
    check_suffix(path)
    suffix = path.suffix.lower()
    records = [{column: row.get(column) for column in columns} for row in rows]
    if suffix == ".json":
        text = json_text(records, indent=1) + "\n"
    elif suffix == ".jsonl":
        text = "".join(json_text(record) + "\n" for record in records)
    elif suffix == ".tsv":
        lines = [columns, *([_cell(value) for value in record.values()] for record in records)]
        text = "".join("\t".join(line) + "\n" for line in lines)
    else:
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(value) for value in record.values()] for record in records)
        text = stream.getvalue()
    atomic_write_text(path.resolve(), text)  # a link stays one


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return table_cell(value)
    return "" if value is None else str(value)
