from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capvid.errors import DataError, UsageError
from capvid.scoring.references import load_predictions, load_references, read_references

TEXTS = {"1": ["a dog", "the dog"], "2": ["a cat"]}
FORMATS = {
    "coco": '{"info": {"x": [1]}, "type": "captions", "annotations": ['
    '{"image_id": 1, "id": 5, "caption": "a dog"},'
    '{"image_id": 2, "caption": "a cat"}, {"image_id": 1, "caption": "the dog"}], "images": [{"id": 1}]}',
    "msrvtt": '{"info": {}, "videos": [{"video_id": "1", "split": "test", "id": 7}], "sentences": ['
    '{"caption": "a dog", "video_id": "1", "sen_id": 0}, {"caption": "the dog", "video_id": "1"},'
    '{"caption": "a cat", "video_id": "2"}]}',
    "captions": '{"1": ["a dog", "the dog"], "2": ["a cat"]}',
    "paragraphs": '{"1": "a dog", "2": "a cat"}',
    "jsonl": '{"id": 1, "captions": ["a dog", "the dog"]}\n\n'
    '{"id": "2", "split": "test", "captions": ["a cat"]}\n',
    "msvd": "1\ta dog\r\n2\ta cat\r\n1\tthe dog",
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("forced", [False, True])
def test_captions_are_read_from_every_format(form: str, forced: bool, tmp_path: Path) -> None:
    path = tmp_path / "references"
    path.write_text(FORMATS[form], newline="")
    texts = {"1": ["a dog"], "2": ["a cat"]} if form == "paragraphs" else TEXTS
    assert read_references(path, form=form if forced else "").texts == texts
    path.write_bytes(gzip.compress(FORMATS[form].encode()))
    assert read_references(path).texts == texts


PARAGRAPHS = {
    "activitynet": '{"v": {"duration": 9, "timestamps": [[0, 1], [1, 2]], '
    '"sentences": ["A dog.", " It runs."]}}',
    "youcook2": '{"database": {"v": {"subset": "validation", "annotations": ['
    '{"segment": [0, 1], "sentence": "A dog."}, {"sentence": " It runs."}]}}}',
    "paragraphs": '{"v": "A dog.  It runs."}',
    "captions": '{"v": ["A dog.", " It runs."]}',
    "jsonl": '{"id": "v", "segments": [{"start": 0, "end": 1}], "paragraphs": [["A dog.", " It runs."]]}',
}


@pytest.mark.parametrize("form", PARAGRAPHS)
@pytest.mark.parametrize("forced", [False, True])
def test_paragraphs_are_read_from_every_format(form: str, forced: bool, tmp_path: Path) -> None:
    path = tmp_path / "references"
    path.write_text(PARAGRAPHS[form])
    references = read_references(path, form=form if forced else "", paragraphs=True)
    assert references.texts == {"v": ["A dog.  It runs."]}


def test_spec_selects_a_split(tmp_path: Path) -> None:
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text(
        '{"id": "1", "split": "val", "captions": ["a"]}\n{"id": "2", "split": "test", "captions": ["b"]}'
    )
    assert load_references([f"{jsonl}#split=test"]).texts == {"2": ["b"]}
    assert load_references([str(jsonl)]).texts == {"1": ["a"], "2": ["b"]}
    coco = tmp_path / "coco.json"
    coco.write_text(
        '{"annotations": [{"image_id": 1, "caption": "a"}, {"image_id": 2, "caption": "b"}], "images": '
        '[{"id": 1, "split": "validate", "file_name": "val/COCO_1.jpg"}, {"id": 2, "split": "restval"}]}'
    )
    references = load_references([f"{coco}#split=val"])
    assert references.texts == {"1": ["a"]}
    assert references.aliases == {"COCO_1": "1"}
    with pytest.raises(DataError, match="no captions of the train split"):
        load_references([f"{jsonl}#split=train"])
    with pytest.raises(UsageError, match="no split 'dev'"):
        load_references([f"{jsonl}#split=dev"])
    with pytest.raises(UsageError, match="'half=1' is not understood after the #; use split=test"):
        load_references([f"{jsonl}#half=1"])
    plain = tmp_path / "b#split=test.json"
    plain.write_text('{"1": ["a"]}')
    assert load_references([str(plain)]).texts == {"1": ["a"]}
    with pytest.raises(DataError, match="its records name no split"):
        load_references([f"{plain}#split=test"])


def test_references_of_several_files_are_merged(tmp_path: Path) -> None:
    first, second, predictions = tmp_path / "1.json", tmp_path / "2.json", tmp_path / "predictions.json"
    first.write_text('{"v_bXdq2zI1Ms0": "A dog.", "v_FsS_NCZEfaI": "A cat."}')
    second.write_text('{"bXdq2zI1Ms0": "It rains.", "v_uqiMw7tQ1Cc": "Snow."}')
    references = load_references([str(first), str(second)], paragraphs=True)
    assert references.texts == {
        "v_bXdq2zI1Ms0": ["A dog.", "It rains."],
        "v_FsS_NCZEfaI": ["A cat."],
        "v_uqiMw7tQ1Cc": ["Snow."],
    }
    assert references.first == ["v_bXdq2zI1Ms0", "v_FsS_NCZEfaI"]
    predictions.write_text('{"bXdq2zI1Ms0": ["a"], "x/FsS_NCZEfaI.mp4": ["b"], "v_uqiMw7tQ1Cc": ["c"]}')
    assert load_predictions(predictions, references, paragraphs=True).sentences == dict(
        zip(references.texts, (["a"], ["b"], ["c"]), strict=True)
    )


def test_predictions_match_msvd_clip_names(tmp_path: Path) -> None:
    (tmp_path / "sents_test_lc_nopunc.txt").write_text("vid1\ta dog\n")
    (tmp_path / "youtube_mapping.txt.gz").write_bytes(gzip.compress(b"-4wsuPCjDBc_5_15 vid1\n-x_1_2 vid2\n"))
    (tmp_path / "predictions.tsv").write_text("clips/-4wsuPCjDBc_5_15.avi\ta cat\n")
    references = load_references([str(tmp_path / "sents_test_lc_nopunc.txt")])
    assert load_predictions(tmp_path / "predictions.tsv", references).sentences == {"vid1": ["a cat"]}


BROKEN = {
    "empty": ("", "no captions in this file"),
    "prose": ("a dog runs", "line 1: neither JSON nor an id, a tab and a caption; name its format"),
    "cut off": (FORMATS["coco"][:150], "not JSON: it ends too early .*cut off"),
    "null": (
        '{"annotations": [{"image_id": 1,\n "caption": null}]}',
        "line 1, record 1 of annotations: a caption that is not",
    ),
    "no id": ('{"annotations": [{"caption": "a"}]}', "line 1, record 1 of annotations: no id"),
    "twice": ('{"1": ["a"],\n"1": ["b"]}', "line 2, record '1': the id '1' occurs twice"),
    "no captions": ('{"1": ["a"],\n"2": []}', "line 2, record '2': no captions"),
    "a number": ('{"1": 3}', "line 1, record '1': no captions: 3; name its format"),
    "paragraphs": (PARAGRAPHS["activitynet"], "holds paragraphs; score them with --paragraph"),
    "recipes": (PARAGRAPHS["youcook2"], "holds paragraphs; score them with --paragraph"),
    "rows of paragraphs": (PARAGRAPHS["jsonl"], "no captions, but paragraphs; score them with --paragraph"),
    "a row without id": ('{"id": "1", "captions": ["a"]}\n{"captions": ["a"]}', "line 2: no id"),
    "a row without captions": ('{"id": "1", "captions": ["a"]}\n{"id": "2"}', "line 2: no list of captions"),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_invalid_file_reports_location_and_remedy(problem: str, tmp_path: Path) -> None:
    text, message = BROKEN[problem]
    path = tmp_path / "references"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        read_references(path)
    assert str(caught.value).startswith(str(path))
    assert caught.value.remedy


def test_wrong_format_or_paragraph_option_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "references"
    path.write_text(FORMATS["coco"])
    with pytest.raises(DataError, match="holds captions, no paragraphs"):
        read_references(path, paragraphs=True)
    with pytest.raises(DataError, match="has the format coco, not msrvtt"):
        read_references(path, form="msrvtt")
    (tmp_path / "other").write_text(FORMATS["captions"])
    with pytest.raises(DataError, match="has the format captions, not coco"):
        read_references(tmp_path / "other", form="coco")
    with pytest.raises(UsageError, match="no references format 'xml'; use one of: coco"):
        read_references(path, form="xml")
    with pytest.raises(DataError, match="is a folder"):
        read_references(tmp_path)
    path.write_text(json.dumps({"id": "1", "captions": ["a"]}))
    with pytest.raises(DataError, match="no paragraphs, but captions; leave out --paragraph"):
        read_references(path, paragraphs=True)
    path.write_text("1\ta dog")
    with pytest.raises(DataError, match="has the format msvd, not coco"):
        read_references(path, form="coco")


def test_empty_references_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "references"
    path.write_text('{"1": [""], "2": "  "}')
    assert read_references(path).texts == {"1": [""], "2": ["  "]}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*FORMATS.values(), *PARAGRAPHS.values()]),
    st.integers(0),
    st.sampled_from(list(b'"[]{},:\\\n\t 0nx\xff')),
    st.booleans(),
    st.booleans(),
)
def test_damaged_file_raises_only_data_errors(
    text: str, position: int, byte: int, truncated: bool, paragraphs: bool
) -> None:
    data = bytearray(text.encode())
    data[position % len(data)] = byte
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "references"
        path.write_bytes(data[: position % len(data) + 1] if truncated else data)
        try:
            read_references(path, paragraphs=paragraphs)
        except DataError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
