from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

from capvid.datasets.dataset import CaptionedVideo, Segment, load_data, parse_spec
from capvid.errors import DataError, UsageError
from capvid.text.tokenization import words

HEADER = "id subject scene quality relevance verified script objects descriptions actions length"


def write_json(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def timed_record(*segments: tuple[float, float, str]) -> dict:
    return {
        "duration": 90.5,
        "timestamps": [[start, end] for start, end, _ in segments],
        "sentences": [sentence for _, _, sentence in segments],
    }


def write_charades(path: Path, rows: dict[str, str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(HEADER.split())
        for name, text in rows.items():
            writer.writerow([name, "AB12", "Attic", 5, 6, "Yes", "Act, please.", "kite", text, "", "20.5"])
    return path


def write_msvd(folder: Path, *, mapping: bool) -> None:
    texts = {
        "train": "vid1\ta goat rows a boat\nvid1\tan animal rows\nvid2\ta robot knits\n",
        "val": "vid3\ta tree sings\n",
        "test": "vid4\ta kite   reads\r\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in texts.items():
        (folder / f"sents_{split}_lc_nopunc.txt").write_bytes(text.encode())
    if mapping:
        lines = [f"clip-{n}_1_9 vid{n}" for n in range(1, 5)]
        (folder / "youtube_mapping.txt").write_text("\n".join(lines), encoding="utf-8")


def by_id(*specs: str) -> dict[str, CaptionedVideo]:
    return {video.id: video for video in load_data(specs).videos}


def test_msvd_uses_clip_names_if_there_is_a_mapping(tmp_path: Path) -> None:
    write_msvd(tmp_path / "plain", mapping=False)
    write_msvd(tmp_path / "mapped", mapping=True)
    plain = by_id(f"msvd:{tmp_path / 'plain'}")
    assert {name: video.split for name, video in plain.items()} == {
        "vid1": "train",
        "vid2": "train",
        "vid3": "val",
        "vid4": "test",
    }
    assert plain["vid1"].captions == ("a goat rows a boat", "an animal rows")
    assert plain["vid4"].captions == ("a kite   reads",)
    mapped = by_id(f"msvd:{tmp_path / 'mapped'}")
    assert list(mapped) == [f"clip-{n}_1_9" for n in range(1, 5)]
    assert mapped["clip-1_1_9"].captions == plain["vid1"].captions
    assert by_id(f"msvd:{tmp_path / 'mapped'}#ids=vid") == plain


def test_msrvtt_reads_both_files_and_their_splits(tmp_path: Path) -> None:
    def info(*videos: tuple[str, str]) -> dict:
        return {
            "info": {"version": "1.0"},
            "videos": [{"video_id": name, "split": split, "id": 1} for name, split in videos],
            "sentences": [
                {"caption": f"{name} does {n}", "video_id": name, "sen_id": n}
                for n in range(2)
                for name, _ in reversed(videos)
            ],
        }

    write_json(tmp_path / "train_val_videodatainfo.json", info(("video0", "train"), ("video7", "validate")))
    write_json(tmp_path / "test_videodatainfo.json", info(("video9", "test")))
    videos = load_data([f"msrvtt:{tmp_path}"]).videos
    assert [(v.id, v.split) for v in videos] == [("video0", "train"), ("video7", "val"), ("video9", "test")]
    assert videos[1].captions == ("video7 does 0", "video7 does 1")


def test_charades_splits_descriptions_and_selects_validation_videos(tmp_path: Path) -> None:
    rows = {f"T{n:03d}": f"Goat {n}, with a kite.  It flies.;{{}}; A goat flies {n}." for n in range(100)}
    write_charades(tmp_path / "Charades_v1_train.csv", {**rows, "NONE1": "{}", "NONE2": "{};{}"})
    write_charades(tmp_path / "Charades_v1_test.csv", {"X1": 'Says "hello"\nand goes.'})
    data = load_data([f"charades:{tmp_path}"])
    videos = {video.id: video for video in data.videos}
    assert videos["T003"].captions == ("Goat 3, with a kite.  It flies.", "A goat flies 3.")
    assert videos["X1"] == CaptionedVideo("X1", "test", ('Says "hello"\nand goes.',))
    validation = {video.id for video in data.videos if video.split == "val"}
    assert len(videos) == 101
    assert len(validation) == 5
    assert data.skipped == []
    assert "2 videos without a description" in data.notes[0]
    write_charades(tmp_path / "Charades_v1_train.csv", dict(reversed(rows.items())))
    assert validation == {
        video.id for video in load_data([f"charades:{tmp_path}"]).videos if video.split == "val"
    }


def test_activitynet_reads_the_validation_halves_and_both_annotators(tmp_path: Path) -> None:
    one, two = (
        timed_record((0, 4.5, "A goat."), (3, 9, " It rows.")),
        timed_record((5, 9, "It sings."), (1, 2, " It knits.")),
    )
    other = timed_record((0, 9, "Some boat."))
    write_json(tmp_path / "train.json", {"v_a": one})
    write_json(tmp_path / "val_1.json", {"v_b": two, "v_c": one})
    spec = f"activitynet:{tmp_path}"
    undivided = load_data([spec])
    assert [(v.id, v.split) for v in undivided.videos] == [("v_a", "train"), ("v_b", "val"), ("v_c", "val")]
    assert "all of val_1.json" in undivided.notes[0]
    write_json(tmp_path / "captioning_val_1.json", {"v_b": two})
    write_json(tmp_path / "captioning_test_1.json", {"v_c": one})
    write_json(tmp_path / "captioning_test_2_para.json", {"v_c": "Some boat. It rows."})
    videos = by_id(spec)
    assert {name: video.split for name, video in videos.items()} == {
        "v_a": "train",
        "v_b": "val",
        "v_c": "test",
    }
    assert videos["v_a"].segments == (Segment(0, 4.5, "seconds"), Segment(3, 9, "seconds"))
    assert videos["v_a"].paragraphs == (("A goat.", " It rows."),)
    assert videos["v_b"].paragraphs == (
        ("It sings.", " It knits."),
    )  # in the order of annotation, not of time
    assert videos["v_c"].paragraphs[1:] == (("Some boat. It rows.",),)
    write_json(tmp_path / "val_2.json", {"v_b": other, "v_a": other})
    videos = by_id(spec)
    assert videos["v_b"].paragraphs[1:] == (("Some boat.",),)
    assert videos["v_a"].paragraphs == (("A goat.", " It rows."),)  # the train split has one annotator


def test_names_of_the_mart_authors(tmp_path: Path) -> None:
    record = timed_record((0, 4, "A goat."), (3, 9, " It rows."))
    names = ("train", "anet_entities_val_1", "anet_entities_test_1")
    for name, video in zip(names, ("v_a", "v_b", "v_c"), strict=True):
        write_json(tmp_path / f"{name}.json", {video: record})
    write_json(tmp_path / "anet_entities_test_2_para.json", {"v_c": "Some boat."})
    videos = by_id(f"activitynet:{tmp_path}")
    assert [(video.split, len(video.paragraphs)) for video in videos.values()] == [
        ("train", 1),
        ("val", 1),
        ("test", 2),
    ]
    folder = tmp_path / "yc2"
    folder.mkdir()
    for split in ("train", "val"):
        write_json(folder / f"yc2_{split}_anet_format.json", {split: record})
    assert [video.split for video in by_id(f"youcook2:{folder}").values()] == ["train", "val"]


def test_timed_record_equals_a_jsonl_row_in_seconds(tmp_path: Path) -> None:
    write_json(
        tmp_path / "captioning_train.json", {"dish": timed_record((1, 4, "cut a kite"), (4, 8, "fry it"))}
    )
    row = {
        "id": "dish",
        "unit": "seconds",
        "segments": [{"start": 1, "end": 4}, {"start": 4, "end": 8}],
        "paragraphs": [["cut a kite", "fry it"]],
    }
    write_json(tmp_path / "own.jsonl", row)
    assert load_data([f"youcook2:{tmp_path}"]).videos == load_data([f"jsonl:{tmp_path / 'own.jsonl'}"]).videos


def test_youcook2_takes_splits_from_subsets(tmp_path: Path) -> None:
    def dish(subset: str, sentence: str) -> dict:
        return {"subset": subset, "annotations": [{"segment": [10, 20], "id": 0, "sentence": sentence}]}

    database = {"one": dish("training", "boil a kite"), "two": dish("validation", "peel a boat")}
    write_json(tmp_path / "youcookii_annotations_trainval.json", {"database": database})
    videos = by_id(f"youcook2:{tmp_path}")
    assert [video.split for video in videos.values()] == ["train", "val"]
    assert videos["two"].segments == (Segment(10, 20, "seconds"),)
    assert videos["two"].paragraphs == (("peel a boat",),)


def test_segments_that_do_not_end_after_their_start_are_corrected_and_noted(tmp_path: Path) -> None:
    write_json(tmp_path / "train.json", {"v_a": timed_record((6, 5, "a"), (7, 7, "b"), (0.2, 0.2, "c"))})
    data = load_data([f"activitynet:{tmp_path}"])
    assert [(s.start, s.end) for s in data.videos[0].segments] == [(5, 6), (6.5, 7), (0, 0.2)]
    assert any("3 segments" in note and "v_a" in note for note in data.notes)


def test_coco_takes_splits_from_images_or_from_the_spec(tmp_path: Path) -> None:
    images = [
        {"id": 1, "file_name": "a/kite.jpg", "split": "val"},
        {"id": 2, "file_name": "boat.one.mp4"},
        {"id": 3},
    ]
    captions = [{"id": n, "image_id": n % 3 + 1, "caption": f"A kite, {n}!"} for n in range(6)]
    path = write_json(tmp_path / "captions.json", {"images": images, "annotations": captions})
    videos = by_id(f"coco:{path}")
    assert {name: v.split for name, v in videos.items()} == {
        "a/kite": "val",
        "boat.one": "train",
        "3": "train",
    }
    assert videos["a/kite"].captions == ("A kite, 0!", "A kite, 3!")
    assert [v.split for v in load_data([f"coco:{path}#split=test"]).videos] == ["val", "test", "test"]
    with pytest.raises(UsageError, match="no split 'dev'"):
        load_data([f"coco:{path}#split=dev"])


@pytest.mark.parametrize("subfolder", ["", "annotations"])
@pytest.mark.parametrize("packed", [False, True])
def test_compressed_files_and_files_in_a_subfolder_are_read(
    tmp_path: Path, subfolder: str, packed: bool
) -> None:
    write_msvd(tmp_path / subfolder, mapping=True)
    if packed:
        for path in list((tmp_path / subfolder).glob("*.txt")):
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    assert [v.id for v in load_data([f"msvd:{tmp_path}"]).videos] == [f"clip-{n}_1_9" for n in range(1, 5)]


def test_compressed_jsonl_is_read_by_its_uncompressed_name(tmp_path: Path) -> None:
    line = b'\xef\xbb\xbf{"id": "v", "captions": ["a kite"]}'
    (tmp_path / "own.jsonl.gz").write_bytes(gzip.compress(line))
    assert by_id(f"jsonl:{tmp_path / 'own.jsonl'}") == by_id(f"jsonl:{tmp_path / 'own.jsonl.gz'}")


def test_file_in_two_subfolders_is_an_error(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_msvd(tmp_path / name, mapping=False)
    with pytest.raises(DataError, match=r"sents_train_lc_nopunc.txt is in a and in b; give the folder"):
        load_data([f"msvd:{tmp_path}"])


def test_missing_splits_are_noted(tmp_path: Path) -> None:
    write_msvd(tmp_path, mapping=False)
    (tmp_path / "sents_test_lc_nopunc.txt").unlink()
    data = load_data([f"msvd:{tmp_path}"])
    assert {video.split for video in data.videos} == {"train", "val"}
    assert "no sents_test_lc_nopunc.txt, so no test split" in data.notes[0]


@pytest.mark.parametrize("kind", ["msvd", "msrvtt", "charades", "activitynet", "youcook2"])
def test_folder_without_annotation_files_is_an_error(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataError, match="here or one folder down; give their folder"):
        load_data([f"{kind}:{tmp_path}"])
    with pytest.raises(DataError, match="no such folder"):
        load_data([f"{kind}:{tmp_path / 'none'}"])


def test_datasets_of_several_formats_are_concatenated(tmp_path: Path) -> None:
    write_msvd(tmp_path, mapping=False)
    (tmp_path / "more.tsv").write_text("w1\tA kite.\n", encoding="utf-8")
    assert list(by_id(f"msvd:{tmp_path}", f"tsv:{tmp_path / 'more.tsv'}"))[-1] == "w1"
    (tmp_path / "same.tsv").write_text("w1\tA kite.\nvid3\tA kite.\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"same.tsv, line 2: the video vid3 occurs twice .*val_lc_nopunc"):
        load_data([f"msvd:{tmp_path}", f"tsv:{tmp_path / 'same.tsv'}"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere:x", "no such dataset format; use one of .*jsonl:FILE, .*youcook2:DIR"),
        ("msvd:", "no path; write msvd:DIR"),
        ("coco:x.json#part=1", "'part=1' is not understood after the #; use split="),
        ("msvd:x#ids=", "'ids=' is not understood"),
    ],
)
def test_invalid_specs_are_usage_errors(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_spec(spec)


def test_folder_instead_of_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is a folder; give a file, or one of .*msvd:DIR"):
        load_data([str(tmp_path)])


def test_case_and_punctuation_are_left_to_the_tokenizer(tmp_path: Path) -> None:
    write_json(tmp_path / "train.json", {"v_a": timed_record((0, 1, "  A Goat, rowing... isn't!"))})
    (video,) = load_data([f"activitynet:{tmp_path}"]).videos
    assert video.paragraphs[0][0] == "  A Goat, rowing... isn't!"
    assert words(video.paragraphs[0][0]) == ["a", "goat", "rowing", "is", "n't"]
