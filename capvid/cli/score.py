"""``capvid score``: captions against references."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capvid.cli import common
from capvid.cli.streams import print_line
from capvid.errors import DataError, UsageError
from capvid.escaping import json_text

if TYPE_CHECKING:
    from capvid.data.scored import Said, Wanted
    from capvid.metrics.scoring import Texts


class Tokenizer(str, Enum):
    """The tokenizers of ``--tokenizer``."""

    auto = "auto"
    ptb = "ptb"
    builtin = "builtin"
    none = "none"


class Missing(str, Enum):
    """What ``--missing`` does about videos without a prediction."""

    error = "error"
    empty = "empty"
    skip = "skip"


class Engine(str, Enum):
    """The engines of ``--meteor-engine``."""

    auto = "auto"
    builtin = "builtin"
    java = "java"


class Form(str, Enum):
    """The forms of ``--references-format``."""

    coco = "coco"
    msrvtt = "msrvtt"
    msvd = "msvd"
    activitynet = "activitynet"
    youcook2 = "youcook2"
    captions = "captions"
    paragraphs = "paragraphs"
    jsonl = "jsonl"


def score(
    predictions: Annotated[Path, typer.Argument(metavar="PREDICTIONS", show_default=False)],
    references: Annotated[list[str], typer.Argument(metavar="REFERENCES", show_default=False)],
    paragraph: Annotated[
        bool, typer.Option("--paragraph", help="Score paragraphs as MART does, with R@1 to R@4.")
    ] = False,
    metrics: Annotated[
        str | None,
        typer.Option(
            show_default="all that are installed",
            help="Any of bleu, meteor, rouge, cider and repetition, with commas between them.",
        ),
    ] = None,
    tokenizer: Annotated[
        Tokenizer,
        typer.Option(help="builtin (auto is the same); ptb, Stanford's, needs Java; none splits at spaces."),
    ] = Tokenizer.auto,
    missing: Annotated[
        Missing,
        typer.Option(help="Videos without a prediction: error; empty, they said nothing; skip, left out."),
    ] = Missing.error,
    references_format: Annotated[
        Form | None,
        typer.Option(
            metavar="FORM",
            show_default="by content",
            help="The form of REFERENCES: coco, msrvtt, msvd, activitynet, youcook2, captions, paragraphs or "
            "jsonl.",
        ),
    ] = None,
    meteor_engine: Annotated[
        Engine, typer.Option(help="builtin (auto is the same), or java, the published one.")
    ] = Engine.auto,
    per_video: Annotated[
        Path | None,
        typer.Option(show_default=False, help="File for each video's scores: .json, .jsonl, .csv or .tsv."),
    ] = None,
    other: Annotated[
        Path | None,
        typer.Option("--compare", show_default=False, help="Other predictions, to compare with."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all decimals.")] = False,
) -> None:
    """Score captions as the papers do: BLEU, METEOR, ROUGE_L and CIDEr-D.

    PREDICTIONS is what capvid caption wrote (json, jsonl, csv, tsv, or its folder), COCO results, or
    {id: caption}; with --paragraph {id: [sentence, ...]} or ActivityNet results. REFERENCES are COCO,
    MSR-VTT, MSVD, ActivityNet or YouCookII files, {id: [caption, ...]}, {id: paragraph}, or JSONL
    (FILE#split=test takes one split). Ids may be paths of videos: a/b/video7.mp4 is video7.
    """
    from capvid.cli.score_report import Scored, print_report, report, write_videos
    from capvid.data.scored import load_predictions, load_references
    from capvid.metrics.compare import compare
    from capvid.metrics.scoring import score_texts
    from capvid.output.scores import check_suffix

    chosen = _chosen(metrics, paragraph=paragraph)
    if paragraph and tokenizer is not Tokenizer.auto:
        raise UsageError(
            "--tokenizer is for captions", remedy="leave it out: paragraphs are split as MART does"
        )
    if per_video is not None:
        check_suffix(per_video)
        common.check_writable_file(per_video)
    form = references_format.value if references_format else ""
    wanted = load_references(references, form=form, paragraphs=paragraph)
    paths = [predictions, other] if other else [predictions]
    said = [load_predictions(path, wanted, paragraphs=paragraph, missing=missing.value) for path in paths]
    for note in dict.fromkeys(note for one in said for note in one.notes):
        print_line(f"note: {note}", err=True)
    texts = _texts(said, wanted, tokenizer.value, missing.value, paragraph=paragraph)
    options: dict[str, Any] = {
        "metrics": chosen,
        "meteor_engine": meteor_engine.value,
        "meteor_needed": metrics is not None,
    }
    comparison = compare(texts[0], texts[1], **options) if other else None
    scores = comparison.first if comparison else score_texts(texts[0], **options)
    for name, why in scores.left_out.items():
        print_line(f"note: {name} is left out: {why}", err=True)
    if "CIDEr-D" in scores.corpus and len(scores.per_video) == 1:
        print_line("note: CIDEr-D of a single video is 0, whatever its caption", err=True)
    scored = Scored(
        paths=[str(path) for path in paths],
        wanted=wanted,
        said=said,
        texts=texts[0],
        scores=scores,
        comparison=comparison,
        tokenizer="mart" if paragraph else "builtin" if tokenizer is Tokenizer.auto else tokenizer.value,
        meteor_engine="builtin" if meteor_engine is Engine.auto else meteor_engine.value,
        missing=missing.value,
    )
    if per_video is not None:
        write_videos(per_video, scored)
    if as_json:
        typer.echo(json_text(report(scored), indent=2))
    else:
        print_report(scored)


def _chosen(metrics: str | None, *, paragraph: bool) -> tuple[str, ...]:
    """The metrics to be scored; those that are not named may be left out if they are not installed."""
    from capvid.metrics.scoring import METRICS, check_metrics

    if metrics is None:
        return METRICS if paragraph else tuple(name for name in METRICS if name != "repetition")
    chosen = tuple(name for name in (part.strip().lower() for part in metrics.split(",")) if name)
    if not chosen:
        raise UsageError("--metrics names none", remedy=f"use any of: {', '.join(METRICS)}")
    check_metrics(chosen, paragraphs=paragraph)
    return chosen


def _texts(said: list[Said], wanted: Wanted, tokenizer: str, missing: str, *, paragraph: bool) -> list[Texts]:
    """Each set of predictions beside the references, tokenised; what is skipped in one is so in all."""
    from capvid.metrics.scoring import caption_texts, paragraph_texts

    references = wanted.texts
    if missing == "skip":
        lacking = {video for one in said for video in one.missing}
        references = {video: texts for video, texts in references.items() if video not in lacking}
        if not references:
            raise DataError("no video has a prediction in both files", remedy="compare their ids")
    if paragraph:
        first = set(wanted.first)
        return [
            paragraph_texts(one.sentences, references, missing=missing, repetition_of=first) for one in said
        ]
    captions = [{video: sentences[0] for video, sentences in one.sentences.items()} for one in said]
    return [caption_texts(one, references, tokenizer=tokenizer, missing=missing) for one in captions]
