from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy import Run, Toy

from capvid.scoring.scorer import score, score_paragraphs

REFERENCES = {
    "video1": ["a dog runs in the park", "the dog is running"],
    "video2": ["two cats sleep on a bed"],
    "video3": ["a man slices a potato", "someone is cooking"],
}
SAID = {"video1": "a dog is running", "video2": "cats on a bed", "video3": "a man is cooking"}
OTHER = {"video1": "a dog runs in the park", "video2": "two dogs", "video3": "a man is cooking"}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "wanted.json").write_text(json.dumps(REFERENCES))
    (tmp_path / "said.json").write_text(json.dumps(SAID))
    (tmp_path / "other.json").write_text(json.dumps(OTHER))
    return tmp_path


def shown(values: dict[str, float]) -> list[str]:
    return [f"{100 * value:.1f}" for value in values.values()]


def test_table(capvid: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setitem(sys.modules, "capvid.metrics.meteor.meteor_scorer", None)
    code, out, err = capvid("score", files / "said.json", files / "wanted.json")
    head, numbers, count = out.splitlines()
    assert code == 0
    assert head.split() == ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE_L", "CIDEr-D"]
    assert numbers.split() == shown(score(SAID, REFERENCES).corpus)
    assert count == "3 videos, 5 references; scores are times 100"
    assert max(map(len, out.splitlines())) <= 60
    assert err == "note: METEOR is left out: METEOR is not available; pip install 'capvid[meteor]'\n"


def test_json(capvid: Run, files: Path) -> None:
    (files / "said.json").write_text(json.dumps({**SAID, "more": "a bird"}))
    code, out, err = capvid(
        "score", files / "said.json", files / "wanted.json", "--metrics", "cider, BLEU", "--json"
    )
    found = json.loads(out)
    assert code == 0
    assert found["scores"] == score(SAID, REFERENCES, metrics=["bleu", "cider"]).corpus
    assert found["predictions"] == str(files / "said.json")
    assert found["references"] == [str(files / "wanted.json")]
    assert found["counts"] == {"videos": 3, "references": 5, "missing": 0, "extra": 1}
    assert found["tokenizer"] == "builtin"
    assert set(found["versions"]) == {"capvid", "python"}
    assert err == f"note: {files / 'said.json'}: 1 not in the references, left out: more\n"


FORMS: dict[str, tuple[str, str]] = {
    "records": (
        "said.json",
        json.dumps(
            [
                {"video": f"clips/{video}.mp4", "status": "ok", "captions": [{"text": text, "logprob": -1}]}
                for video, text in SAID.items()
            ]
        ),
    ),
    "record lines": (
        "said.jsonl",
        "".join(
            json.dumps({"video": f"clips/{video}.mp4", "captions": [{"text": text}]}) + "\n"
            for video, text in SAID.items()
        ),
    ),
    "csv": (
        "said.csv",
        "video,caption,logprob\n" + "".join(f"a/{v}.mp4,{text},-1\n" for v, text in SAID.items()),
    ),
    "tsv": (
        "said.tsv",
        "video\tcaption\tlogprob\n" + "".join(f"{v}\t{text}\t-1\n" for v, text in SAID.items()),
    ),
    "coco": ("said.json", json.dumps([{"image_id": v, "caption": text} for v, text in SAID.items()])),
}
WANTED: dict[str, str] = {
    "coco": json.dumps(
        {
            "images": [{"id": video} for video in REFERENCES],
            "annotations": [{"image_id": v, "caption": c} for v, texts in REFERENCES.items() for c in texts],
        }
    ),
    "msrvtt": json.dumps(
        {
            "videos": [{"video_id": video, "split": "test"} for video in REFERENCES],
            "sentences": [{"video_id": v, "caption": c} for v, texts in REFERENCES.items() for c in texts],
        }
    ),
    "msvd": "".join(f"{video}\t{text}\n" for video, texts in REFERENCES.items() for text in texts),
    "captions": json.dumps(REFERENCES),
    "jsonl": "".join(
        json.dumps({"id": video, "split": "test", "captions": texts}) + "\n"
        for video, texts in REFERENCES.items()
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_predictions(form: str, capvid: Run, files: Path) -> None:
    name, text = FORMS[form]
    (files / name).write_text(text)
    code, out, _ = capvid(
        "score", files / name, files / "wanted.json", "--json", "--metrics", "bleu,rouge,cider"
    )
    assert code == 0
    assert json.loads(out)["scores"] == score(SAID, REFERENCES).corpus


@pytest.mark.parametrize("form", WANTED)
def test_forms_of_references(form: str, capvid: Run, files: Path) -> None:
    (files / "wanted").write_text(WANTED[form])
    arguments = ["score", files / "said.json", files / "wanted", "--json", "--metrics", "bleu,rouge,cider"]
    for more in ([], ["--references-format", form]):
        code, out, _ = capvid(*arguments, *more)
        assert code == 0
        assert json.loads(out)["scores"] == score(SAID, REFERENCES).corpus


def test_missing(capvid: Run, files: Path) -> None:
    failed = {"video": "a/video2.mp4", "status": "error", "captions": [], "error": {"kind": "truncated"}}
    rows = [
        {"video": "video1", "caption": SAID["video1"]},
        failed,
        {"video": "video3", "caption": SAID["video3"]},
    ]
    (files / "said.json").write_text(json.dumps(rows))
    some = {video: text for video, text in SAID.items() if video != "video2"}
    arguments = ["score", files / "said.json", files / "wanted.json", "--json", "--metrics", "rouge,cider"]
    code, out, err = capvid(*arguments)
    assert (code, out) == (1, "")
    assert err == (
        f"error: {files / 'said.json'}: no prediction for 1 of 3 videos (1 of the predictions failed): "
        "video2; caption them too, or choose --missing empty or skip\n"
    )
    for missing in ("empty", "skip"):
        code, out, err = capvid(*arguments, "--missing", missing)
        found = json.loads(out)
        assert code == 0
        assert found["scores"] == score(some, REFERENCES, missing=missing, metrics=["rouge", "cider"]).corpus
        assert found["counts"]["missing"] == 1
        assert found["counts"]["videos"] == (3 if missing == "empty" else 2)
        assert "1 failed to be captioned: a/video2.mp4" in err


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "tsv"])
def test_per_video(suffix: str, capvid: Run, files: Path) -> None:
    said = {**SAID, "video1": 'a "dog",\tis\nrunning'}
    (files / "said.json").write_text(json.dumps(said))
    path = files / f"scores.{suffix}"
    path.write_text("old")
    options = ["--metrics", "bleu,rouge", "--per-video", path]
    code, _, _ = capvid("score", files / "said.json", files / "wanted.json", *options)
    assert code == 0
    text = path.read_text()
    rows: list[dict[str, Any]]
    if suffix == "json":
        rows = json.loads(text)
    elif suffix == "jsonl":
        rows = [json.loads(line) for line in text.splitlines()]
    else:
        quoting = csv.QUOTE_NONE if suffix == "tsv" else csv.QUOTE_MINIMAL
        delimiter = "\t" if suffix == "tsv" else ","
        rows = list(csv.DictReader(io.StringIO(text), delimiter=delimiter, quoting=quoting))
    expected = score(said, REFERENCES, metrics=["bleu", "rouge"]).per_video
    assert [row["video"] for row in rows] == list(REFERENCES)
    assert rows[0]["caption"] == (
        said["video1"] if suffix in ("json", "jsonl") else 'a "dog",\\tis\\nrunning'
    )
    for row in rows:
        assert {name: float(row[name]) for name in list(row)[2:]} == expected[row["video"]]
    assert [one.name for one in files.iterdir() if one.name.endswith(".tmp")] == []


def test_paragraphs(capvid: Run, files: Path) -> None:
    said = {"v": ["A dog runs.", "It runs, fast."], "w": ["rain"]}
    wanted = [{"v": "A dog runs fast.", "w": "It rains."}, {"v": "The dog runs.", "x": "Snow."}]
    (files / "said.json").write_text(
        json.dumps({"results": {v: [{"sentence": s} for s in x] for v, x in said.items()}})
    )
    for place, one in enumerate(wanted):
        (files / f"{place}.json").write_text(json.dumps(one))
    arguments = [
        "score",
        files / "said.json",
        files / "0.json",
        files / "1.json",
        "--paragraph",
        "--missing",
        "empty",
    ]
    code, out, _ = capvid(*arguments, "--metrics", "bleu,rouge,cider,repetition", "--json")
    both = {"v": ["A dog runs fast.", "The dog runs."], "w": ["It rains."], "x": ["Snow."]}
    found = json.loads(out)
    assert code == 0
    expected = score_paragraphs(said, both, missing="empty", repetition_of=wanted[0])
    assert found["scores"] == expected.corpus
    assert found["tokenizer"] == "mart"
    assert found["counts"] == {"videos": 3, "references": 4, "missing": 1, "extra": 0}
    _, out, _ = capvid(*arguments, "--metrics", "repetition")
    assert out.splitlines()[0].split() == ["R@1", "R@2", "R@3", "R@4"]
    assert out.splitlines()[1].split() == shown(
        {name: expected.corpus[name] for name in list(expected.corpus)[-4:]}
    )


def test_compare(capvid: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    arguments = ["score", files / "said.json", files / "wanted.json", "--metrics", "bleu,rouge,cider"]
    code, out, _ = capvid(*arguments, "--compare", files / "other.json")
    lines = out.splitlines()
    assert code == 0
    assert lines[:2] == [f"A: {files / 'said.json'}", f"B: {files / 'other.json'}"]
    assert lines[2].split("  ")[-1].strip() == "p"
    assert lines[3].split()[:3] == [
        "BLEU-1",
        *(shown(score(said, REFERENCES).corpus)[0] for said in (SAID, OTHER)),
    ]
    assert max(map(len, lines[2:])) <= 60
    assert "  A: a dog is running" in lines and "  B: a dog runs in the park" in lines
    assert "  A: a man is cooking" not in lines  # no difference
    (files / "said.json").write_text(json.dumps({**SAID, "video1": "[b]a :dog: is[/b]"}))
    assert "  A: [b]a :dog: is[/b]" in capvid(*arguments, "--compare", files / "other.json")[1].splitlines()
    (files / "said.json").write_text(json.dumps(SAID))
    _, out, _ = capvid(*arguments, "--compare", files / "other.json", "--json")
    found = json.loads(out)["compare"]
    assert found["scores"] == score(OTHER, REFERENCES).corpus
    assert found["videos"][0].keys() == {"video", "difference", "caption", "other"}
    assert capvid(*arguments, "--compare", files / "other.json", "--json")[1] == out
    _, out, _ = capvid(*arguments, "--compare", files / "said.json", "--json")
    found = json.loads(out)["compare"]
    assert found["videos"] == []
    for one in found["differences"].values():
        assert one == {"difference": 0, "low": 0, "high": 0, "p": 1}


def test_compare_skips_what_either_lacks(capvid: Run, files: Path) -> None:
    (files / "said.json").write_text(json.dumps({video: SAID[video] for video in ("video1", "video2")}))
    (files / "other.json").write_text(json.dumps({video: OTHER[video] for video in ("video1", "video3")}))
    options = ["--missing", "skip", "--metrics", "rouge", "--compare", files / "other.json", "--json"]
    code, out, _ = capvid("score", files / "said.json", files / "wanted.json", *options)
    assert code == 0
    assert json.loads(out)["counts"]["videos"] == 1
    (files / "other.json").write_text(json.dumps({"video3": "a"}))
    code, _, err = capvid("score", files / "said.json", files / "wanted.json", *options)
    assert code == 1
    assert "no video has a prediction in both files" in err


USAGE = [
    ["--metrics", "spice"],
    ["--metrics", "repetition"],
    ["--metrics", ","],
    ["--tokenizer", "moses"],
    ["--tokenizer", "ptb", "--paragraph"],
    ["--missing", "maybe"],
    ["--references-format", "xml"],
    ["--meteor-engine", "nltk"],
    ["--per-video", "scores.xlsx"],
    ["--per-video", "no/such/folder/scores.csv"],
]


@pytest.mark.parametrize("options", USAGE, ids=" ".join)
def test_usage(options: list[str], capvid: Run, files: Path) -> None:
    code, out, err = capvid("score", files / "said.json", files / "wanted.json", *options)
    assert (code, out) == (2, "")
    assert err.strip()
    assert "Traceback" not in err


@pytest.mark.parametrize("text", ["", "[", '{"video1": null}', "\xff", '{"x": "a dog"}', "a dog"])
def test_bad_files_are_one_line(text: str, capvid: Run, files: Path) -> None:
    (files / "bad.json").write_bytes(text.encode("latin-1"))
    for arguments in ([files / "bad.json", files / "wanted.json"], [files / "said.json", files / "bad.json"]):
        code, out, err = capvid("score", *arguments)
        assert (code, out) == (1, "")
        assert err.count("\n") == 1 and err.startswith("error: ")
        assert ".json" in err and ";" in err
    code, _, err = capvid("score", files / "none.json", files / "wanted.json")
    assert (code, err) == (1, f"error: {files / 'none.json'}: no such file\n")


def test_numbers_are_ids(capvid: Run, files: Path) -> None:
    (files / "said.json").write_text(
        '[{"image_id": 7, "caption": "a dog"}, {"image_id": "8", "caption": "a cat"}]'
    )
    (files / "wanted.json").write_text(
        '{"annotations": [{"image_id": "7", "caption": "a dog"}, {"image_id": 8, "caption": "a cat"}]}'
    )
    code, out, _ = capvid("score", files / "said.json", files / "wanted.json", "--metrics", "rouge")
    assert code == 0
    assert out.splitlines()[1].strip() == "100.0"


def test_long_captions(capvid: Run, files: Path) -> None:
    words = [f"word{number % 701}" for number in range(10_000)]
    long = {"a": " ".join(words), "b": "a " * 10_000, "c": "(" * 10_000, "d": "x" * 10_000}
    (files / "said.json").write_text(json.dumps(long))
    (files / "wanted.json").write_text(json.dumps({video: [text, "a dog"] for video, text in long.items()}))
    code, out, _ = capvid(
        "score", files / "said.json", files / "wanted.json", "--metrics", "bleu,rouge,cider"
    )
    assert code == 0
    assert out.splitlines()[1].split()[0] == "100.0"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the memory")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    words = [{"word": f"word{number}", "logprob": -1.25} for number in range(40)]
    count = 20_000
    with (tmp_path / "said.json").open("w") as stream:
        stream.write("[")
        for number in range(count):
            captions = [{"text": f"a dog number {number % 99}", "logprob": -9.5, "words": words}]
            row = {"video": f"clips/video{number}.mp4", "status": "ok", "captions": captions}
            stream.write(("," if number else "") + json.dumps(row) + "\n")
        stream.write("]")
    size = (tmp_path / "said.json").stat().st_size
    assert size > 30e6
    (tmp_path / "wanted.json").write_text(
        json.dumps({f"video{number}": ["a dog"] for number in range(count)})
    )
    code = (
        "import sys; from capvid.cli.app import main; code = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules;"
        "most = [line for line in open('/proc/self/status') if line.startswith('VmHWM')];"
        "print(code, most[0].split()[1])"
    )
    paths = [str(tmp_path / name) for name in ("said.json", "wanted.json")]
    done = subprocess.run(
        [sys.executable, "-c", code, "score", *paths, "--metrics", "rouge"],
        capture_output=True,
        text=True,
        check=True,
    )
    returned, kilobytes = done.stdout.splitlines()[-1].split()
    assert returned == "0"
    assert (
        int(kilobytes) * 1024 < 5 * size
    )  # the text is held once; as objects the file takes more than ten times its size


def test_a_single_video(capvid: Run, files: Path) -> None:
    (files / "said.json").write_text('{"video2": "two cats sleep"}')
    options = ["--missing", "skip", "--metrics", "cider", "--json"]
    code, out, err = capvid("score", files / "said.json", files / "wanted.json", *options)
    assert code == 0
    assert json.loads(out)["scores"] == {"CIDEr-D": 0}
    assert err == "note: CIDEr-D of a single video is 0, whatever its caption\n"


@pytest.mark.slow
def test_what_capvid_caption_writes_is_scored_alike_in_every_form(
    capvid: Run, toy: Toy, video_files: list[Path], bad_files: dict[str, Path], tmp_path: Path
) -> None:
    videos = [*video_files, bad_files["text"]]
    references = {video.stem: ["a dog is running in the park"] for video in videos}
    (tmp_path / "wanted.json").write_text(json.dumps(references))
    rest = [tmp_path / "wanted.json", "--missing", "skip", "--metrics", "bleu,cider", "--json"]
    captions = ["caption", *videos, "--model", toy.model, "--num-captions", 2]
    found = {}
    for form in ("json", "jsonl", "csv", "tsv"):
        assert capvid(*captions, "-o", tmp_path / f"all.{form}")[0] == 3
        assert capvid(*captions, "--format", form, "--output-dir", tmp_path / form)[0] == 3
        for source in (tmp_path / f"all.{form}", tmp_path / form):
            code, out, err = capvid("score", source, *rest)
            assert code == 0, err
            report = json.loads(out)
            found[source.name] = (report["scores"], report["counts"])
    first, *others = found.values()
    assert len(others) == 7 and all(other == first for other in others)
    assert first[0]["BLEU-1"] > 0 and first[1]["videos"] == len(video_files)
