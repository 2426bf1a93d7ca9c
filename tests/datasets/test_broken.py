from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from capvid.datasets.dataset import load_data
from capvid.errors import CapvidError, DataError

LONG = "kite " * 10_000
GOOD = {"timestamps": [[0, 4]], "sentences": ["A goat rows."]}
Writer = Callable[[Path, object], tuple[str, int]]


def jsonl(folder: Path, row: object) -> tuple[str, int]:
    text = row if isinstance(row, str) else json.dumps(row)
    path = folder / "own.jsonl"
    path.write_text(f'{{"id": "good", "captions": ["a kite"]}}\n\n{text}\n', encoding="utf-8")
    return f"jsonl:{path}", 3


def tsv(folder: Path, row: object) -> tuple[str, int]:
    path = folder / "own.tsv"
    path.write_text(f"good\ta kite\n{row}\n", encoding="utf-8")
    return f"tsv:{path}", 2


def msvd(folder: Path, row: object) -> tuple[str, int]:
    (folder / "sents_train_lc_nopunc.txt").write_text(f"vid1\ta kite\n{row}", encoding="utf-8")
    (folder / "youtube_mapping.txt").write_text("good vid1", encoding="utf-8")
    return f"msvd:{folder}", 2


def charades(folder: Path, row: object) -> tuple[str, int]:
    text = f'id,script,descriptions,length\ngood,x,"two\nlines",3\n{row}\n'
    (folder / "Charades_v1_train.csv").write_text(text, encoding="utf-8")
    return f"charades:{folder}", 4


def activitynet(folder: Path, row: object) -> tuple[str, int]:
    text = f'{{\n"good": {json.dumps(GOOD)},\n\n"v_bad":\n{json.dumps(row)}}}'
    (folder / "train.json").write_text(text, encoding="utf-8")
    return f"activitynet:{folder}", 5


def youcook2(folder: Path, row: object) -> tuple[str, int]:
    good = {"subset": "training", "annotations": [{"segment": [0, 4], "sentence": "cut a kite"}]}
    text = f'{{"database": {{\n"good": {json.dumps(good)},\n"bad": {json.dumps(row)}}}}}'
    (folder / "youcookii_annotations_trainval.json").write_text(text, encoding="utf-8")
    return f"youcook2:{folder}", 3


def msrvtt_sentence(folder: Path, row: object) -> tuple[str, int]:
    videos = [{"video_id": "good", "split": "train"}]
    text = (
        f'{{"videos": {json.dumps(videos)},\n"sentences": [\n'
        f'{{"video_id": "good", "caption": "a kite"}},\n{json.dumps(row)}\n]}}'
    )
    (folder / "train_val_videodatainfo.json").write_text(text, encoding="utf-8")
    return f"msrvtt:{folder}", 4


def msrvtt(folder: Path, row: object) -> tuple[str, int]:
    text = (
        f'{{"videos": [\n{{"video_id": "good", "split": "train"}},\n{json.dumps(row)}],\n'
        '"sentences": [{"video_id": "good", "caption": "a kite"}]}'
    )
    (folder / "train_val_videodatainfo.json").write_text(text, encoding="utf-8")
    return f"msrvtt:{folder}", 3


def coco(folder: Path, row: object) -> tuple[str, int]:
    path = folder / "captions.json"
    text = (
        f'{{"annotations": [{{"image_id": 1, "caption": "a kite"}}],\n"images": [\n'
        f'{{"id": 1, "file_name": "good.jpg"}},\n{json.dumps(row)}]}}'
    )
    path.write_text(text, encoding="utf-8")
    return f"coco:{path}", 4


BROKEN: list[tuple[Writer, object, str]] = [
    (jsonl, '{"id": "v", "captions": ["a"', "not JSON"),
    (jsonl, "[" * 100_000, "not JSON"),
    (jsonl, {"captions": ["a"]}, "no id"),
    (jsonl, {"id": " ", "captions": ["a"]}, "no id"),
    (jsonl, {"id": "good", "captions": ["a"]}, "the video good occurs twice"),
    (jsonl, {"id": "v", "captions": ["a", " "]}, "an empty caption"),
    (jsonl, {"id": "v", "captions": [None]}, "a caption that is not text: None"),
    (jsonl, {"id": "v", "captions": [LONG]}, "a caption of 10000 words"),
    (jsonl, {"id": "v", "captions": ["x" * 60_000]}, "a caption of 1 words and 60000 characters"),
    (jsonl, '{"id": "v", "captions": ["\\ud83d"]}', "an unpaired surrogate"),
    (jsonl, {"id": "v", "captions": ["a"], "split": "dev"}, "split 'dev' is not one of train, val, test"),
    (jsonl, {"id": "v", "captions": ["a"], "split": ["train"]}, "split .* is not one of"),
    (jsonl, {"id": "v", "segments": [{"start": 0, "end": 10**400}], "paragraphs": [["a"]]}, "no list of seg"),
    (tsv, "v a kite", "no id and caption"),
    (tsv, "\ta kite", "no id and caption"),
    (tsv, "v\t ", "an empty caption"),
    (tsv, f"v\t{LONG}", "a caption of 10000 words"),
    (msvd, "vid2 a kite", "no id and caption"),
    (msvd, "vid1\t", "an empty caption"),
    (msvd, "vid9\ta kite", "vid9 is not in youtube_mapping.txt"),
    (charades, "v,x", "2 columns, and 4 in the header"),
    (charades, "v,x,a,3,4", "5 columns, and 4 in the header"),
    (charades, ",x,a kite,3", "no id"),
    (charades, "good,x,a kite,3", "the video good occurs twice"),
    (charades, "v,x,,3", "no descriptions"),
    (charades, f"v,x,a kite;{LONG},3", "a caption of 10000 words"),
    (activitynet, "text", "no list of times"),
    (activitynet, {"timestamps": [[0, 4]]}, "no list of sentences: 'sentences' is missing"),
    (activitynet, {**GOOD, "timestamps": [[0, 4], [4, 5]]}, "2 segments and 1 sentences"),
    (activitynet, {**GOOD, "timestamps": [[0]]}, r"a segment that is not \[start, end\]"),
    (activitynet, {**GOOD, "timestamps": [[0, "4"]]}, "'4' is not a time in seconds"),
    (activitynet, {**GOOD, "timestamps": [[0, float("nan")]]}, "nan is not a time in seconds"),
    (activitynet, {**GOOD, "timestamps": [[-1, 4]]}, "a segment from -1 to 4 seconds"),
    (activitynet, {**GOOD, "sentences": [""]}, "an empty caption"),
    (activitynet, {**GOOD, "sentences": [["A goat."]]}, "a caption that is not text"),
    (activitynet, {**GOOD, "sentences": [LONG]}, "a caption of 10000 words"),
    (youcook2, {"subset": "extra", "annotations": []}, "subset 'extra' is not one of"),
    (youcook2, {"subset": "training", "annotations": []}, "no list of annotations"),
    (youcook2, {"subset": "training", "annotations": [{"sentence": "a"}]}, "no segment"),
    (youcook2, {"subset": "training", "annotations": [{"segment": [0, 1]}]}, "a caption that is not text"),
    (msrvtt_sentence, {"caption": "a kite"}, "no id: 'video_id' is missing"),
    (msrvtt_sentence, {"video_id": "v", "caption": "a kite"}, "no record in videos has the id v"),
    (msrvtt_sentence, {"video_id": "good", "caption": 3}, "a caption that is not text: 3"),
    (msrvtt_sentence, {"video_id": "good"}, "a caption that is not text: None"),
    (msrvtt_sentence, ["good", "a kite"], "no id"),
    (msrvtt_sentence, {"video_id": "good", "caption": LONG}, "a caption of 10000 words"),
    (msrvtt, {"split": "train"}, "no id: 'video_id' is missing"),
    (msrvtt, {"video_id": "good", "split": "train"}, "the id good occurs twice"),
    (msrvtt, {"video_id": "v", "split": "dev"}, "split 'dev' is not one of train, validate, test"),
    (msrvtt, {"video_id": "v", "split": "train"}, "v has no captions"),
    (coco, {"file_name": "v.jpg"}, "no id: 'id' is missing"),
    (coco, {"id": 1, "file_name": "v.jpg"}, "the id 1 occurs twice"),
    (coco, {"id": 2, "file_name": "v.jpg", "split": "dev"}, "split 'dev' is not one of"),
    (coco, {"id": 2, "file_name": "v.jpg"}, "v has no captions"),
    (coco, {"id": 2, "file_name": "/"}, "not a file name: '/'"),
]


@pytest.mark.parametrize(
    ("write", "row", "message"), BROKEN, ids=[f"{b[0].__name__}-{n}" for n, b in enumerate(BROKEN)]
)
def test_bad_row_raises_with_its_line_or_is_skipped(
    tmp_path: Path, write: Writer, row: object, message: str
) -> None:
    spec, line = write(tmp_path, row)
    with pytest.raises(DataError, match=f", line {line}[:,].*{message}") as error:
        load_data([spec])
    assert error.value.remedy
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    data = load_data([spec], skip_bad=True)
    assert [video.id for video in data.videos] == ["good"]
    (bad,) = data.skipped
    assert bad.location.line == line
    assert str(error.value) == f"{bad}; {bad.remedy}"


def test_error_names_the_json_record_by_name_or_number(tmp_path: Path) -> None:
    spec, _ = activitynet(tmp_path, {})
    with pytest.raises(DataError, match=r"train.json, line 5, record 'v_bad': no list of times"):
        load_data([spec])
    spec, _ = msrvtt_sentence(tmp_path, {})
    with pytest.raises(DataError, match=r"line 4, record 2 of sentences: no id"):
        load_data([spec])


def test_repeated_json_key_is_an_error(tmp_path: Path) -> None:
    text = f'{{"v_a": {json.dumps(GOOD)},\n"v_a": {json.dumps(GOOD)}}}'
    (tmp_path / "train.json").write_text(text, encoding="utf-8")
    with pytest.raises(
        DataError, match=r"line 2, record 'v_a': the video v_a occurs twice \(first at .*line 1"
    ):
        load_data([f"activitynet:{tmp_path}"])
    (tmp_path / "train.json").write_text("{}", encoding="utf-8")
    (tmp_path / "captioning_val_1.json").write_text(json.dumps({"v_b": GOOD}), encoding="utf-8")
    (tmp_path / "val_2.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"val_2.json, line 2, record 'v_a': the video v_a occurs twice"):
        load_data([f"activitynet:{tmp_path}"])


def test_line_in_another_encoding_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "own.tsv"
    path.write_bytes("good\ta kite\nv\tein Fr\u00fchst\u00fcck\nw\ta boat\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"line 2: not UTF-8 text .*; save the file as UTF-8"):
        load_data([f"tsv:{path}"])
    data = load_data([f"tsv:{path}"], skip_bad=True)
    assert [video.id for video in data.videos] == ["good", "w"]
    assert [bad.location.line for bad in data.skipped] == [2]


BYTES = [
    (b'{\n"v_a": {"timestamps": [[0, 4', r"train.json, line 2, column \d+: not JSON"),
    (b"", "train.json, line 1, column 1: not JSON"),
    (b'{\n"v_a":\n"\xfc"}', "train.json, line 3: not UTF-8 text"),
    ('{"v_a": 1}'.encode("utf-16")[:-1], "train.json: not UTF-16 text"),
    (b"[" * 100_000, "train.json, line 1.*: not JSON"),
    (b"[1, 2]", "train.json: no object of records; give the file as it was published"),
    (b"{}", "no captions in this file"),
    (gzip.compress(json.dumps({"v_a": GOOD}).encode())[:-12], "train.json: not readable"),
]


@pytest.mark.parametrize(("content", "message"), BYTES, ids=range(len(BYTES)))
@pytest.mark.parametrize("skip_bad", [False, True])
def test_unparsable_file_raises_even_if_bad_rows_are_skipped(
    tmp_path: Path, content: bytes, message: str, skip_bad: bool
) -> None:
    (tmp_path / "train.json").write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        load_data([f"activitynet:{tmp_path}"], skip_bad=skip_bad)
    assert error.value.remedy
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no captions in this file"),
        ("name,descriptions\nv,a kite\n", "line 1: no columns id and descriptions"),
        ('id,descriptions\nv,a kite\nw,"a boat\nand more\n', "line 3: not CSV"),
    ],
)
def test_invalid_csv_raises_even_if_bad_rows_are_skipped(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "Charades_v1_train.csv").write_text(text, encoding="utf-8")
    for skip_bad in (False, True):
        with pytest.raises(DataError, match=message):
            load_data([f"charades:{tmp_path}"], skip_bad=skip_bad)


def test_missing_json_list_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train_val_videodatainfo.json").write_text('{"videos": []}', encoding="utf-8")
    with pytest.raises(DataError, match="no list sentences; give the file as it was published"):
        load_data([f"msrvtt:{tmp_path}"])


def test_dataset_with_only_bad_rows_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "own.tsv"
    path.write_text("v\nw\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"none of its rows can be used \(.*line 2: no id and caption"):
        load_data([f"tsv:{path}"], skip_bad=True)


def test_bad_rows_and_failed_datasets_are_collected(tmp_path: Path) -> None:
    path = tmp_path / "own.tsv"
    path.write_text("v\na\tb\nw\n\nc\t\n", encoding="utf-8")
    data = load_data([f"tsv:{tmp_path / 'none'}", f"tsv:{path}"], skip_bad=True, keep_going=True)
    assert [bad.location.line for bad in data.skipped] == [1, 3, 5]
    assert [video.id for video in data.videos] == ["a"]
    assert ["no such file" in str(error) for error in data.failed] == [True]


def test_captions_of_a_bad_video_are_not_reported_again(tmp_path: Path) -> None:
    spec, _ = msrvtt(tmp_path, {"video_id": "v", "split": "dev"})
    path = tmp_path / "train_val_videodatainfo.json"
    info = json.loads(path.read_text(encoding="utf-8"))
    info["sentences"].append({"video_id": "v", "caption": "a boat"})
    path.write_text(json.dumps(info), encoding="utf-8")
    assert len(load_data([spec], skip_bad=True).skipped) == 1


def test_invalid_coco_files_raise_capvid_errors(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    for content in ("null", "3", '"text"', '{"images": 3}', '{"images": [[]], "annotations": [1]}'):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(CapvidError):
            load_data([f"coco:{path}"], skip_bad=True)
