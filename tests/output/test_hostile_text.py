"""Words of a model, names of files and messages that would break an output format or control a terminal."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import numpy as np
import pysrt
import pytest
import webvtt
from hypothesis import given, settings
from hypothesis import strategies as st
from report_pages import written as report_of
from test_records import SETTINGS, result

from capvid.cli.score import write_scores
from capvid.decoding.caption_generator import Caption, WordScore
from capvid.errors import CapvidError
from capvid.output.report import attention_lines
from capvid.output.results import CaptionResult
from capvid.output.shards import (
    JsonLines,
    ParquetCaptions,
    Row,
    ShardFolder,
    ShardFormat,
    WebDataset,
    caption_row,
)
from capvid.output.writers import COLUMNS, FORMATS, Document
from capvid.scoring.predictions import read_predictions
from capvid.utils.escaping import utf8_text
from capvid.video.input_set import identity

HOSTILE = [
    "a\nb",
    "a\r\n\r\n2\n00:00:01,000 --> 00:00:02,000\nx",
    "</c><i>x --> y</i>",
    "{\\an8}a",
    "\x1b]0;title\x07",
    "\u202egpj",
    "\u2028\u2029\x85\x0b\x0c\x1c",
    "half \ud800 byte \udcff",
    "=1+1",
    "+1",
    "-1",
    "@SUM(A1)",
    "\t=1",
    "\x00",
    '"quoted", and\ttab',
    "</script><script>alert(1)</script><!--",
    "1",
    "",
    " ",
]
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "caption-record.schema.json").read_text())
CHECK = jsonschema.Draft202012Validator(SCHEMA)
ANY_TEXT = st.text(st.characters(codec=None), max_size=20) | st.sampled_from(HOSTILE)
UNPRINTABLE = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def hostile(text: str, path: str = "v.mp4", logprob: float = -1.0) -> CaptionResult:
    """A result of two captions whose texts, words and file name are hostile."""
    caption = Caption(text=text, logprob=logprob, words=(WordScore(word=text, logprob=logprob),))
    return result(path=Path(path), captions=(caption, caption), duration=2.5)


def failed(text: str) -> CaptionResult:
    error = CapvidError(f"{text}: cannot be read", remedy=text)
    return result(path=Path(f"f{text}".replace("\0", "")), status="error", captions=(), error=error)


def written(form: str, *results: CaptionResult, many: bool = True, **options: int) -> str:
    stream = io.StringIO(newline="")
    with Document(form=FORMATS[form], stream=stream, many=many, settings=SETTINGS, **options) as document:
        for each in results:
            document.append(document.render(each))
    stream.getvalue().encode("utf-8")
    return stream.getvalue()


@settings(max_examples=60, deadline=None)
@given(ANY_TEXT, ANY_TEXT)
def test_no_text_breaks_a_format(text: str, name: str) -> None:
    made, bad = hostile(text, f"{name}x"), failed(text)
    lines = written("txt", made).split("\n")
    assert len(lines) == 3 and lines[2] == "" and all(line.count("\t") == 1 for line in lines[:2])
    (reason, end) = written("txt", bad).split("\n")
    assert end == "" and reason.count("\t") == 2 and not UNPRINTABLE.search(reason.replace("\t", ""))
    assert not UNPRINTABLE.search("".join(lines).replace("\t", ""))

    for form, whole in (("jsonl", written("jsonl", made, bad)), ("json", written("json", made, bad))):
        rows = json.loads(whole) if form == "json" else [json.loads(line) for line in whole.splitlines()]
        for row in rows:
            CHECK.validate(row)
        assert rows[0]["captions"][0]["text"] == rows[0]["captions"][1]["words"][0]["word"] == utf8_text(text)
        assert rows[0]["video"] == utf8_text(Path(f"{name}x"))

    tables = (
        csv.reader(io.StringIO(written("csv", made, bad), newline="")),
        csv.reader(
            io.StringIO(written("tsv", made, bad), newline=""), delimiter="\t", quoting=csv.QUOTE_NONE
        ),
    )
    for table in tables:
        _, *rows = list(table)
        assert len(rows) == 3 and rows[0] == rows[1] and len(rows[0]) == len(rows[2]) == len(COLUMNS)
        assert not re.match(r"\s*[=+\-@\t\r]", rows[2][-1]) and not UNPRINTABLE.search("".join(rows[2]))
        assert not re.match(r"\s*[=+\-@\t\r]", rows[0][0]) and not re.match(r"\s*[=+\-@\t\r]", rows[0][3])
        assert [float(cell) for cell in (rows[0][1], rows[0][2], rows[0][4])] == [0, 2.5, -1]
        assert not UNPRINTABLE.search("".join(rows[0]))

    two = hostile(text)
    (cue,) = pysrt.from_string(written("srt", two, many=False, line_width=0))
    assert (cue.index, cue.start.ordinal, cue.end.ordinal) == (1, 0, 2500)
    assert not re.search("[<>{}\n]", cue.text)
    (caption,) = webvtt.from_string(written("vtt", two, many=False, line_width=0)).captions
    assert (caption.start, caption.end) == ("00:00:00.000", "00:00:02.500")
    assert not re.search("[<>\n]", caption.raw_text)
    for width in (1, 7, 42):  # an empty line would end a cue before its text
        cues = list(pysrt.from_string(written("srt", two, many=False, line_width=width)))
        assert "".join(written_text(each.text) for each in cues) == written_text(cue.text)
        captions = webvtt.from_string(written("vtt", two, many=False, line_width=width)).captions
        assert "".join(written_text(each.raw_text) for each in captions) == written_text(caption.raw_text)


def written_text(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("form", ["csv", "tsv"])
def test_predictions_are_read_without_the_apostrophe(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"p.{form}"
    path.write_text(written(form, hostile("- a dog", "=1.mp4"), hostile("'a", "b.mp4")), encoding="utf-8")
    predictions = read_predictions(path)
    assert {"- a dog", "'a"} == {
        caption for captions in predictions.sentences.values() for caption in captions
    }


@pytest.mark.parametrize("form", [JsonLines, ParquetCaptions])
def test_shards(tmp_path: Path, form: Callable[[], ShardFormat]) -> None:
    folder = ShardFolder(str(tmp_path), kind="captions", form=form(), head={"model": "m"})
    folder.begin(overwrite=False)
    results = [hostile(text, f"{number}{text}") for number, text in enumerate(HOSTILE) if "\0" not in text]
    results += [failed(text) for text in HOSTILE]
    name = folder.write([caption_row(each, {"sampling": "\udcff", "beam_size": 1}) for each in results])
    done = folder.done(retry_failed=False)
    assert all(identity(each.path) in done for each in results)
    again = folder.done(retry_failed=True)
    assert [identity(each.path) in again for each in results] == [each.error is None for each in results]
    if form is JsonLines:
        rows = [json.loads(line) for line in (tmp_path / name).read_bytes().splitlines()]
        assert len(rows) == len(HOSTILE) - 1
        for row in rows:
            CHECK.validate(row)


def test_a_shard_of_features(tmp_path: Path) -> None:
    folder = ShardFolder(str(tmp_path), kind="features", form=WebDataset(), head={})
    names = [f"{number}{text}" for number, text in enumerate(HOSTILE) if "\0" not in text]
    rows = [
        Row(video=name, key=f"key{name}", record={"video": name, "status": "ok", "duration": float("nan")})
        for name in map(utf8_text, names)
    ]
    folder.write(rows)
    done = folder.done()
    assert all(identity(name) in done for name in names)


@pytest.mark.parametrize("form", ["json", "jsonl", "csv", "tsv", "txt", "srt", "vtt"])
@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_numbers_that_are_none(form: str, number: float) -> None:
    text = written(form, hostile("a dog", logprob=number), many=False)
    assert "nan" not in text.lower() and "inf" not in text.lower()
    if form in ("json", "jsonl"):
        record = json.loads(text)
        CHECK.validate(record)
        assert record["captions"][0]["logprob"] is None


def test_the_report(tmp_path: Path) -> None:
    results = [hostile(text, f"{number}{text}") for number, text in enumerate(HOSTILE) if "\0" not in text]
    page = report_of(tmp_path / "p.html", *results, *map(failed, HOSTILE), hostile("a", logprob=float("nan")))
    assert len(page.articles) == len(results) + len(HOSTILE) + 1 and len(page.scripts) == 1
    texts = [utf8_text(text) for text in HOSTILE if "\0" not in text] + ["a"]
    assert [data["segments"][0]["captions"][0]["text"] for data in page.data] == texts
    assert page.data[-1]["segments"][0]["captions"][0]["logprob"] is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_charts(value: float) -> None:
    weights = np.full((2, 4), value)
    caption = Caption(
        text="\x1b[2J\n",
        logprob=-1.0,
        words=(WordScore(word="\x1b[2J\n", logprob=-1.0),),
        traces={"attention": weights},
    )
    lines = attention_lines(result(path=Path("a\nb"), captions=(caption,)), width=60, named=True)
    assert len(lines) == 3 and not any(UNPRINTABLE.search(line) or "\n" in line for line in lines)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl"])
def test_scores_of_each_video(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"scores.{suffix}"
    write_scores(
        path, [{"video": text, "caption": text, "B": -0.5} for text in HOSTILE], ["video", "caption", "B"]
    )
    text = path.read_bytes().decode()
    if suffix == "json":
        assert [row["video"] for row in json.loads(text)] == list(map(utf8_text, HOSTILE))
    elif suffix == "jsonl":
        assert [json.loads(row)["B"] for row in text.splitlines()] == [-0.5] * len(HOSTILE)
    else:
        delimiter = "," if suffix == "csv" else "\t"
        quoting = csv.QUOTE_MINIMAL if suffix == "csv" else csv.QUOTE_NONE
        _, *rows = csv.reader(text.split("\n")[:-1], delimiter=delimiter, quoting=quoting)
        assert len(rows) == len(HOSTILE) and {row[2] for row in rows} == {"-0.5"}
        assert not any(cell.startswith(tuple("=+-@\t\r")) for row in rows for cell in row[:2])
