from __future__ import annotations

import io
import json

import pytest
from test_records import SETTINGS, result

from capvid.errors import MissingVideoError
from capvid.output import WRITERS, make_record

GOOD = result()
BAD = result(path="w.mp4", status="error", captions=(), error=MissingVideoError("w.mp4", "no such file"))


def written(form: str, *results: object, many: bool) -> str:
    stream = io.StringIO()
    with WRITERS[form](stream=stream, many=many, settings=SETTINGS) as writer:
        for each in results:
            writer.write(each)
    return stream.getvalue()


def test_the_formats_are_named_by_their_extension() -> None:
    assert list(WRITERS) == ["txt", "json", "jsonl"]


def test_txt() -> None:
    assert written("txt", GOOD, many=False) == "a dog\n"
    assert written("txt", GOOD, BAD, GOOD, many=True) == "in/v.mp4\ta dog\nin/v.mp4\ta dog\n"
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
        WRITERS["json"](stream=stream, many=True, settings=SETTINGS) as writer,
    ):
        writer.write(GOOD)
        raise KeyboardInterrupt
    assert json.loads(stream.getvalue()) == [make_record(GOOD, SETTINGS)]


def test_results_are_flushed_as_they_come() -> None:
    class Counting(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    for writer in WRITERS.values():
        stream = Counting()
        writer(stream=stream, many=True, settings=SETTINGS).write(GOOD)
        assert stream.flushed == 1
