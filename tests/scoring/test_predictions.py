from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capvid.errors import DataError
from capvid.scoring.predictions import read_predictions


def record(video: str, *captions: str, **more: Any) -> dict[str, Any]:
    words = [{"word": "a", "logprob": -0.5}]
    hypotheses = [{"text": text, "logprob": -1.0, "words": words} for text in captions]
    status = "ok" if captions else "error"
    return {
        "schema_version": 1,
        "video": video,
        "status": status,
        "captions": hypotheses,
        "error": None,
        **more,
    }


RECORDS = [
    record("a/v1.mp4", "a dog", "the dog"),
    record("a/v2.mp4"),
    record("a/v3.mp4", "caf\u00e9 \u2028x"),
]
SENTENCES = {"a/v1.mp4": ["a dog"], "a/v3.mp4": ["caf\u00e9 \u2028x"]}
PLAIN = {"1": ["a dog"], "2": ["a cat"]}
FORMATS = {
    "list": (json.dumps(RECORDS, indent=2), SENTENCES),
    "lines": ("".join(f"{json.dumps(row)}\n" for row in RECORDS), SENTENCES),
    "blank lines": ("\n\n".join(json.dumps(row, ensure_ascii=False) for row in RECORDS), SENTENCES),
    "one record": (json.dumps(RECORDS[0], indent=1), {"a/v1.mp4": ["a dog"]}),
    "coco": ('[{"image_id": 1, "caption": "a dog"}, {"image_id": "2", "caption": "a cat"}]', PLAIN),
    "video ids": ('[{"video_id": 1.0, "caption": "a dog"}, {"id": "2", "sentence": "a cat"}]', PLAIN),
    "object": ('{"1": "a dog", "2": "a cat"}', PLAIN),
    "one caption each": ('{"1": ["a dog"], "2": [{"caption": "a cat"}]}', PLAIN),
    "results": ('{"version": "1.0", "results": {"1": "a dog", "2": "a cat"}, "external_data": {}}', PLAIN),
    "odd ids": ('{"version": "a dog", "results": "a cat"}', {"results": ["a cat"], "version": ["a dog"]}),
    "csv": (
        'video,caption,logprob\n1,a dog,-1\n2,"a ""big"", cat\nsits",-2\n',
        {**PLAIN, "2": ['a "big", cat\nsits']},
    ),
    "csv with more": ("id,x,caption\r\n1,0,a dog\r\n2,0,a cat\r\n", PLAIN),
    "n best": ("video,caption,logprob\n1,a dog,-1\n1,dogs,-2\n2,a cat,-1\n", PLAIN),
    "tsv": ('video\tcaption\tlogprob\n1\ta dog\t-1\n2\t"a cat\t-2\n', {**PLAIN, "2": ['"a cat']}),
    "tsv without names": ("1\ta dog\n2\ta cat", PLAIN),
}


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("packing", ["plain", "gzip", "mark"])
def test_every_format_is_detected_and_read(format_name: str, packing: str, tmp_path: Path) -> None:
    text, sentences = FORMATS[format_name]
    data = text.encode()
    path = tmp_path / "predictions"
    path.write_bytes({"plain": data, "gzip": gzip.compress(data), "mark": b"\xef\xbb\xbf" + data}[packing])
    predictions = read_predictions(path)
    assert predictions.sentences == sentences
    assert predictions.failed == (["a/v2.mp4"] if sentences is SENTENCES else [])
    dropped_counts = {"n best": 1, "list": 1, "lines": 1, "blank lines": 1, "one record": 1}
    assert predictions.dropped == dropped_counts.get(format_name, 0)


PARAGRAPHS = {
    "sentences": '{"v": ["a dog.", "it runs"], "w": "rain"}',
    "mart": '{"version": "V", "results": {"v": [{"sentence": "a dog.", "timestamp": [0, 1]}, '
    '{"sentence": "it runs"}], "w": [{"sentence": "rain"}]}}',
    "records": json.dumps(
        [
            record(
                "v",
                segments=[{"start": 0, "end": 1, "caption": "a dog."}, {"caption": "it runs"}],
                status="ok",
            ),
            record("w", "rain"),
        ]
    ),
}


@pytest.mark.parametrize("format_name", PARAGRAPHS)
def test_paragraphs_are_read_from_every_format(format_name: str, tmp_path: Path) -> None:
    path = tmp_path / "predictions.json"
    path.write_text(PARAGRAPHS[format_name])
    assert read_predictions(path, paragraphs=True).sentences == {"v": ["a dog.", "it runs"], "w": ["rain"]}


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_segments_of_a_table_form_a_paragraph(suffix: str, tmp_path: Path) -> None:
    rows = [
        ("video", "start", "end", "caption", "logprob"),
        ("a.mp4", "0.000", "2.000", "a man", "-1"),
        ("a.mp4", "0.000", "2.000", "a woman", "-2"),
        ("a.mp4", "2.000", "5.000", "a dog", "-1"),
        ("b.mp4", "2.000", "5.000", "a cat", "-1"),
    ]
    path = tmp_path / f"p.{suffix}"
    path.write_text("".join({"csv": ",", "tsv": "\t"}[suffix].join(row) + "\n" for row in rows))
    predictions = read_predictions(path, paragraphs=True)
    assert predictions.sentences == {"a.mp4": ["a man", "a dog"], "b.mp4": ["a cat"]}
    assert predictions.dropped == 1
    predictions = read_predictions(path)
    assert predictions.sentences == {"a.mp4": ["a man"], "b.mp4": ["a cat"]} and predictions.dropped == 2


def test_folder_of_predictions_is_read_recursively(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.json").write_text(json.dumps(RECORDS[0], indent=2))
    (tmp_path / "b" / "c.json").write_text(json.dumps(RECORDS[2], indent=2))
    (tmp_path / "b" / "notes.txt").write_text("nothing")
    assert read_predictions(tmp_path).sentences == SENTENCES
    (tmp_path / "b" / "c.json").unlink()
    with pytest.raises(DataError, match="no predictions in this folder"):
        read_predictions(tmp_path / "b")


BROKEN = {
    "empty": (b"", "no predictions; give"),
    "only spaces": (b" \n\n", "no predictions; give"),
    "no records": (b"[]", "no predictions; give"),
    "truncated": (
        b'[{"image_id": 1, "caption": "a dog"},\n{"image_id": 2, "cap',
        "line 2, column .*ends too early .*cut off",
    ),
    "truncated after a comma": (
        b'[{"image_id": 1, "caption": "a"},',
        "line 1, column 34: not JSON: it ends too early",
    ),
    "not JSON": (
        b'[\n{"image_id": 1, caption: "a dog"}, {"image_id": 2, "caption": ""}]',
        "line 2, column 17: not JSON",
    ),
    "no comma": (b'{"a": "b"\n"c": "d"}', "line 2, column 1: not JSON .*expected ','"),
    "no colon": (b'{"a" "b"}', "line 1, column 6: not JSON .*expected ':'"),
    "no name": (b'{a: "b"}', "line 1, column 2: not JSON .*double quotes"),
    "two documents": (b'{"a": "b"}\n{"c": "d"}', "line 2, column 1: not JSON .*after the end"),
    "null": (
        b'[{"image_id": 1,\n"caption": null}]',
        "line 1, record '1': a caption that is not text: None; .*--missing",
    ),
    "a number": (b'{"a": "b",\n"c": 3}', "line 2, record 'c': a caption that is not text: 3"),
    "no id": (b'[{"caption": "a"}]', "line 1: no id"),
    "invalid id": (
        b'[{"image_id": true, "caption": "a"}]',
        "line 1: an id that is not text or a number: True",
    ),
    "not a record": (b'["a"]', "line 1: not a record: 'a'"),
    "repeated id": (b'{"1": "a",\n"1": "b"}', "line 2: the id '1' occurs twice .*line 1"),
    "same id as number and text": (
        b'[{"id": 1, "caption": "a"},\n{"id": "1", "caption": "a"}]',
        "line 2: the id '1' occurs twice",
    ),
    "repeated id in a table": (b"video,caption\n1,a\n1,b\n", "line 3: the id '1' occurs twice"),
    "many captions": (b'{"1": ["a", "b"]}', "2 captions for one video; .*--paragraph"),
    "no captions": (b'{"1": []}', "0 captions for one video"),
    "latin-1": (
        '{\n"1": "caf\u00e9"}'.encode("latin-1"),
        "line 2: not UTF-8 text .*; save the file as UTF-8",
    ),
    "utf-16": ('{"1": "a"}'.encode("utf-16")[:-1], "not UTF-16 text"),
    "binary data": (bytes(range(256)) * 9, "line 2: not UTF-8 text"),
    "prose": (b"a dog runs\n", "line 1: not a known format of predictions; give"),
    "another table": (b"name,size\nx,1\n", "line 1: not a known format of predictions"),
    "too few columns": (b"video\tcaption\n1\ta\n2\n", "line 3: 1 columns; write a video and a caption"),
    "old Macintosh line ends": (b"video,caption\r1,a\r2,b\r", "line 1: not a known format of predictions"),
    "unclosed quote": (b'video,caption\n1,a\n2,"b\n', "line 3: not a row of a table"),
    "an unpaired surrogate": (b'{"1": "\\ud83d"}', "an unpaired surrogate"),
    "an unpaired surrogate in an id": (b'{"\\ud83d": "a"}', "an unpaired surrogate"),
    "deeply nested": (b'{"1": ' + b"[" * 100_000, "not JSON|ends too early"),
    "truncated gzip": (gzip.compress(b'{"1": "a"}' * 9)[:-12], "not readable"),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_invalid_file_reports_location_and_remedy(problem: str, tmp_path: Path) -> None:
    data, message = BROKEN[problem]
    path = tmp_path / "predictions.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        read_predictions(path)
    assert str(caught.value).startswith(str(path))
    assert caught.value.remedy


@pytest.mark.parametrize("start", ["{", "[{", '{"id": 1, "caption": "a"}\n{'])
def test_wrong_encoding_late_in_the_file_is_reported(start: str, tmp_path: Path) -> None:
    path = tmp_path / "predictions.json"
    path.write_bytes(start.encode() + b'"id": 1, "caption": "dogs' + b" and dogs" * 50 + b"\n\xe9")
    with pytest.raises(DataError, match="not UTF-8 text"):
        read_predictions(path)


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_predictions(tmp_path / "x.json")


def is_readable(path: Path, *, paragraphs: bool = False) -> bool:
    """Whether the file can be read; errors must be one line that begins with its path."""
    try:
        read_predictions(path, paragraphs=paragraphs)
    except DataError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("format_name", FORMATS)
def test_truncated_files_are_rejected(format_name: str, tmp_path: Path) -> None:
    data = FORMATS[format_name][0].encode()
    path = tmp_path / "predictions"
    for end in range(len(data)):
        path.write_bytes(data[:end])
        complete = data[:end].rstrip(b"\n") == data.rstrip(b"\n")
        if is_readable(path) and data.startswith((b"[", b'{"1', b'{"v')):
            assert complete


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.integers(0),
    st.sampled_from(list(b'"[]{},:\\\n\t 0nx\xff')),
    st.booleans(),
)
def test_damaged_file_raises_only_data_errors(
    format_name: str, position: int, byte: int, paragraphs: bool
) -> None:
    data = bytearray(FORMATS[format_name][0].encode())
    data[position % len(data)] = byte
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predictions"
        path.write_bytes(data)
        is_readable(path, paragraphs=paragraphs)
