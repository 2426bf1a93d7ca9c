from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jsonschema
import numpy as np
import pysrt
import pytest
import webvtt
from test_records import SETTINGS, looked, result

from capvid.decoding.caption_generator import Caption
from capvid.errors import DataError, VideoError
from capvid.output.results import CaptionResult, Segment, make_record
from capvid.output.writers import COLUMNS, FORMATS, Document

GOOD = result()
FLAGGED = result(captions=(Caption(text="a dog", logprob=-0.5, words=(), confidence=0.1),))
BAD = result(
    path="w.mp4", status="error", captions=(), error=VideoError("w.mp4", "no such file", kind="missing")
)


def written(form: str, *results: object, many: bool, **options: float) -> str:
    stream = io.StringIO()
    with Document(form=FORMATS[form], stream=stream, many=many, settings=SETTINGS, **options) as document:
        for each in results:
            document.append(document.render(each))
    return stream.getvalue()


def test_the_formats_are_named_by_their_extension() -> None:
    assert list(FORMATS) == ["txt", "json", "jsonl", "srt", "vtt", "tsv", "csv"]


def test_records_have_attention_where_it_is_asked_for() -> None:
    wanted = make_record(looked(), SETTINGS, attention=True)
    for form in ("json", "jsonl"):
        assert FORMATS[form].records_attention
        stream = io.StringIO()
        with Document(
            form=FORMATS[form], stream=stream, many=False, settings=SETTINGS, attention=True
        ) as document:
            document.append(document.render(looked()))
        assert json.loads(stream.getvalue()) == wanted != make_record(looked(), SETTINGS)
        assert json.loads(written(form, looked(), many=False)) == make_record(looked(), SETTINGS)
    others = [writer for writer in FORMATS.values() if not writer.records_attention]
    assert [writer.extension for writer in others] == ["txt", "srt", "vtt", "tsv", "csv"]


def test_txt() -> None:
    assert written("txt", GOOD, many=False) == "a dog\n"
    assert written("txt", GOOD, BAD, GOOD, many=True) == (
        "in/v.mp4\ta dog\nw.mp4\t\terror: w.mp4: no such file\nin/v.mp4\ta dog\n"
    )
    assert written("txt", FLAGGED, many=True) == "in/v.mp4\ta dog\tlow confidence\n"
    assert written("txt", FLAGGED, many=False) == "a dog\n"
    assert written("txt", BAD, many=False) == ""


def test_jsonl() -> None:
    lines = written("jsonl", GOOD, BAD, many=True).splitlines()
    assert [json.loads(line) for line in lines] == [make_record(GOOD, SETTINGS), make_record(BAD, SETTINGS)]


def test_json() -> None:
    assert json.loads(written("json", GOOD, many=False)) == make_record(GOOD, SETTINGS)
    assert json.loads(written("json", many=True)) == []
    assert json.loads(written("json", GOOD, many=True)) == [make_record(GOOD, SETTINGS)]
    both = [make_record(GOOD, SETTINGS), make_record(BAD, SETTINGS)]
    assert json.loads(written("json", GOOD, BAD, many=True)) == both


def test_an_interrupted_json_document_is_whole() -> None:
    stream = io.StringIO()
    with (
        pytest.raises(KeyboardInterrupt),
        Document(form=FORMATS["json"], stream=stream, many=True, settings=SETTINGS) as document,
    ):
        document.append(document.render(GOOD))
        raise KeyboardInterrupt
    assert json.loads(stream.getvalue()) == [make_record(GOOD, SETTINGS)]


def test_results_are_flushed_as_they_come() -> None:
    class Counting(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    for form in FORMATS.values():
        stream = Counting()
        document = Document(form=form, stream=stream, many=True, settings=SETTINGS)
        document.append(document.render(ODD))
        assert stream.flushed == 1


ODD = result(
    path='a "b", c.mp4',
    duration=7265.9996,
    captions=(
        Caption(text="a <b> & a dog", logprob=-0.5, words=()),
        Caption(text='says "no",', logprob=-12.3456789, words=(), confidence=0.9),
    ),
)


@pytest.mark.parametrize(("form", "separator"), [("csv", ","), ("tsv", "\t")])
def test_tables(form: str, separator: str) -> None:
    text = written(form, GOOD, BAD, FLAGGED, ODD, many=True)
    quoting = csv.QUOTE_MINIMAL if form == "csv" else csv.QUOTE_NONE
    rows = list(csv.DictReader(io.StringIO(text), delimiter=separator, quoting=quoting))
    assert [tuple(row.values()) for row in rows] == [
        ("in/v.mp4", "0.000", "", "a dog", "-0.500000", "", "", "ok", ""),
        ("w.mp4", "", "", "", "", "", "", "error", "w.mp4: no such file"),
        ("in/v.mp4", "0.000", "", "a dog", "-0.500000", "0.100", "true", "ok", ""),
        ('a "b", c.mp4', "0.000", "7266.000", "a <b> & a dog", "-0.500000", "", "", "ok", ""),
        ('a "b", c.mp4', "0.000", "7266.000", 'says "no",', "-12.345679", "0.900", "false", "ok", ""),
    ]
    assert tuple(rows[0]) == COLUMNS
    assert written(form, many=True) == separator.join(rows[0]) + "\n"


def test_srt() -> None:
    (cue,) = pysrt.from_string(written("srt", ODD, many=False))
    assert (cue.index, cue.text) == (1, "a \u2039b\u203a & a dog")
    assert (cue.start.ordinal, cue.end.ordinal) == (0, 7_000)
    (cue,) = pysrt.from_string(written("srt", ODD, many=False, max_cue=0))
    assert (cue.start.ordinal, cue.end.ordinal) == (0, 7_266_000)
    assert written("srt", BAD, many=False) == ""
    with pytest.raises(DataError, match=r"in/v.mp4: subtitles need times, .*; give the video, or choose"):
        written("srt", GOOD, many=False)


def test_vtt() -> None:
    text = written("vtt", ODD, many=False, max_cue=0)
    (cue,) = webvtt.from_string(text).captions
    assert (cue.start, cue.end, cue.identifier) == ("00:00:00.000", "02:01:06.000", "1")
    assert cue.raw_text == "a &lt;b&gt; &amp; a dog" and text.startswith("WEBVTT\n\n")


def spoken(text: str, *spans: tuple[float, float]) -> CaptionResult:
    caption = Caption(text=text, logprob=-1.0, words=())
    segments = [Segment(start=a, end=b, captions=(caption,), frames=np.arange(1)) for a, b in spans]
    return result(captions=(caption,), segments=tuple(segments), paragraph=True, duration=spans[-1][1])


@pytest.mark.parametrize("form", ["srt", "vtt"])
def test_subtitles_follow_the_conventions(form: str) -> None:
    """At most seven seconds, and two lines of 42 characters; a longer text has several cues."""

    def parse(text: str) -> list[tuple[float, float, list[str]]]:
        if form == "srt":
            return [
                (cue.start.ordinal / 1000, cue.end.ordinal / 1000, cue.text.split("\n"))
                for cue in pysrt.from_string(text)
            ]
        return [
            (cue.start_in_seconds + cue.start_time.milliseconds / 1000,
             cue.end_in_seconds + cue.end_time.milliseconds / 1000, cue.lines)
            for cue in webvtt.from_string(text).captions
        ]  # fmt: skip

    sentence = "a man in a red shirt is playing a guitar on a stage"
    both = ["a man in a red shirt is", "playing a guitar on a stage"]
    film = spoken(sentence, (0.0, 46.0), (46.0, 49.5))
    assert parse(written(form, film, many=False)) == [(0, 7, both), (46, 49.5, both)]
    assert parse(written(form, film, many=False, max_cue=0, line_width=0)) == [
        (0, 46, [sentence]),
        (46, 49.5, [sentence]),
    ]
    long = " ".join([sentence] * 4)
    cues = parse(written(form, spoken(long, (1.0, 9.0), (9.0, 90.0)), many=False))
    for first, last, spans in ((1.0, 9.0, cues[: len(cues) // 2]), (9.0, 90.0, cues[len(cues) // 2 :])):
        assert " ".join(line for *_, lines in spans for line in lines) == long
        assert spans[0][0] == first and spans[-1][1] <= last and len(spans) == 3
        assert all(len(lines) <= 2 and max(map(len, lines)) <= 42 for *_, lines in spans)
        assert all(0 < end - start <= 7 for start, end, _ in spans)
        assert all(end <= start for (_, end, _), (start, _, _) in pairwise(spans))
    for narrow in (1, 5):
        parse(written(form, spoken("x" * 99, (0, 1)), many=False, line_width=narrow))
    # a single image, and a segment of less than a millisecond
    assert [
        (start, end) for start, end, _ in parse(written(form, spoken("a", (0, 0), (2, 2.0002)), many=False))
    ] == [
        (0, 0.001),
        (2, 2.001),
    ]


def test_records_are_as_the_schema_says() -> None:
    schema = json.loads((Path(__file__).parents[2] / "docs" / "caption-record.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    for one in (GOOD, ODD, BAD):
        check.validate(make_record(one, SETTINGS))
    several = replace(
        looked(), paragraph=True, segments=(replace(looked().segments[0], memory_change=(0.5,)),)
    )
    for attention in (False, True):
        for one in (looked(), replace(looked(), times=None), several):
            check.validate(make_record(one, SETTINGS, attention=attention))
    for change in (
        {"duration": "7 s"},
        {"status": "error"},
        {"captions": []},
        {"more": 1},
        {"schema_version": 2},
    ):
        assert not check.is_valid({**make_record(ODD, SETTINGS), **change})


def test_a_format_is_one_new_module(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "support" / "plugins" / "toy_format.py", tmp_path)
    script = (
        "import sys\n"
        "from capvid.output import writers\n"
        f"writers.__path__.append({str(tmp_path)!r})\n"
        "print(*writers.FORMATS, writers.FORMATS['toy'].extension)\n"
        "print({'numpy', 'torch', 'pyarrow'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "txt json jsonl srt vtt tsv csv toy toy\nset()\n"
