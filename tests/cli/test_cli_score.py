from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from toy import Run, Toy

from capvid.scoring.diversity import diversity
from capvid.scoring.scorer import score, score_paragraphs
from capvid.text.tokenization import ptb_tokenize

REFERENCES = {
    "video1": ["a dog runs in the park", "the dog is running"],
    "video2": ["two cats sleep on a bed"],
    "video3": ["a man slices a potato", "someone is cooking"],
}
PREDICTIONS = {"video1": "a dog is running", "video2": "cats on a bed", "video3": "a man is cooking"}
OTHER_PREDICTIONS = {"video1": "a dog runs in the park", "video2": "two dogs", "video3": "a man is cooking"}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "references.json").write_text(json.dumps(REFERENCES))
    (tmp_path / "predictions.json").write_text(json.dumps(PREDICTIONS))
    (tmp_path / "other.json").write_text(json.dumps(OTHER_PREDICTIONS))
    return tmp_path


def percentages(values: dict[str, float]) -> list[str]:
    return [f"{100 * value:.1f}" for value in values.values()]


def test_table_of_scores(capvid: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setitem(sys.modules, "capvid.metrics.meteor.meteor_scorer", None)
    code, out, err = capvid("score", files / "predictions.json", files / "references.json")
    head, numbers, measures, diversity, count = out.splitlines()
    assert code == 0
    assert head.split() == ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE_L", "CIDEr-D"]
    assert numbers.split() == percentages(score(PREDICTIONS, REFERENCES).corpus)
    assert measures.split() == ["distinct", "words", "distinct-1", "distinct-2", "length"]
    assert diversity.split()[0] == "100.0"
    assert count == "3 videos, 5 references; scores are times 100"
    assert max(map(len, out.splitlines())) <= 60
    assert err == "note: METEOR is left out: METEOR is not available; pip install 'capvid[meteor]'\n"


def test_copies_of_training_captions(capvid: Run, files: Path) -> None:
    training = [
        {"id": "t1", "split": "train", "captions": ["A dog is running!", "a bird"]},
        {"id": "t2", "split": "val", "captions": ["a man is cooking"]},
    ]
    path = files / "training.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in training))
    command = ["score", files / "predictions.json", files / "references.json", "--metrics", "cider"]
    for split, share in (("#split=train", 1 / 3), ("", 2 / 3)):
        code, out, err = capvid(*command, "--training", f"{path}{split}", "--format=json")
        assert code == 0, err
        assert json.loads(out)["diversity"]["in_training"] == pytest.approx(share)
    out = capvid(*command, "--training", path, "--compare", files / "other.json")[1]
    rows = [line.split() for line in out.splitlines() if line[:2] in ("A ", "B ")]
    assert [row[-1] for row in rows] == ["66.7", "33.3"]


def test_page_of_a_comparison(capvid: Run, files: Path) -> None:
    page = files / "page.html"
    command = ["score", files / "predictions.json", files / "references.json", "--metrics", "cider"]
    code, out, err = capvid(*command, "--report", page)
    assert code == 2 and "--report needs several systems" in err and not page.exists()
    command += ["--compare", files / "other.json"]
    for options, message in (
        (["--encoder", "clip"], "--encoder needs the videos"),
        (["--videos", files / "absent", "--report", page], "absent: no such folder"),
    ):
        code, out, err = capvid(*command, *options)
        assert code == 2 and message in err
    code, out, err = capvid(*command, "--report", page)
    assert code == 0, err
    text = page.read_text()
    assert text.count("<article") == 2 and "The 2 videos that differ most in CIDEr-D" in text
    assert "a man slices a potato" not in text  # both systems say the same of this video
    assert out.splitlines()[-1] in text


def test_ranking_of_several_systems(capvid: Run, files: Path) -> None:
    (files / "constant.json").write_text(json.dumps(dict.fromkeys(PREDICTIONS, "a man")))
    command = ["score", files / "predictions.json", files / "references.json", "--metrics", "cider,rouge"]
    command += ["--compare", files / "other.json", "--compare", files / "constant.json"]
    code, out, err = capvid(*command, "--format=json")
    assert code == 0, err
    ranking = json.loads(out)["ranking"]
    ranked = [system["predictions"] for system in ranking["systems"]]
    scores = [system["scores"]["CIDEr-D"] for system in ranking["systems"]]
    assert scores == sorted(scores, reverse=True) and ranked[-1] == str(files / "constant.json")
    assert [bool(system["from_next"]) for system in ranking["systems"]] == [True, True, False]

    code, out, err = capvid(*command)
    lines = out.splitlines()
    assert [line[:3] for line in lines[:3]] == ["A: ", "B: ", "C: "]
    assert lines[3].split() == ["CIDEr-D", "95", "%", "interval", "p", "of", "lead", "ROUGE_L"]
    letters = {
        f"{files / name}.json": letter
        for name, letter in zip(("predictions", "other", "constant"), "ABC", strict=True)
    }
    assert [line[0] for line in lines[4:7]] == [letters[path] for path in ranked]
    assert [float(line.split()[1]) for line in lines[4:7]] == [
        pytest.approx(100 * s, abs=0.06) for s in scores
    ]


def test_tables_for_papers(capvid: Run, files: Path) -> None:
    command = ["score", files / "predictions.json", files / "references.json", "--metrics", "rouge"]
    command += ["--compare", files / "other.json"]
    text = capvid(*command)[1]
    cells = next(line for line in text.splitlines() if line.startswith("ROUGE_L")).split()
    code, out, err = capvid(*command, "--format", "latex")
    assert err == f"note: A is {files / 'predictions.json'}\nnote: B is {files / 'other.json'}\n"
    assert code == 0 and out.startswith(
        "\\begin{tabular}{lrrrrr}\n\\toprule\n & A & B & A - B & 95 \\% interval"
    )
    assert f"ROUGE\\_L & {cells[1]} & {cells[2]} & {cells[3]} & " in out
    assert out.count("\\bottomrule") == 2
    _, out, _ = capvid(*command, "--format", "markdown")
    head, rule, row = out.splitlines()[:3]
    assert (
        head == "|  | A | B | A - B | 95 % interval | p |"
        and rule == "| --- | ---: | ---: | ---: | ---: | ---: |"
    )
    assert row.startswith(f"| ROUGE_L | {cells[1]} | {cells[2]} | {cells[3]} |")
    _, out, _ = capvid(*command, "--format", "csv")
    assert next(csv.reader(out.splitlines()[1:2]))[:4] == ["ROUGE_L", *cells[1:4]]


def test_scripts_without_spaces_are_noted(capvid: Run, tmp_path: Path) -> None:
    (tmp_path / "references.json").write_text(json.dumps({"a": ["一个男人在唱歌"], "b": ["狗在跑"]}))
    (tmp_path / "predictions.json").write_text(json.dumps({"a": "一个男人在唱歌", "b": "猫"}))
    command = ["score", tmp_path / "predictions.json", tmp_path / "references.json", "--metrics", "rouge"]
    code, _, err = capvid(*command)
    assert code == 0 and "note: captions in a script without spaces between words" in err
    (tmp_path / "predictions.json").write_text(json.dumps({"a": "a man sings", "b": "a cat"}))
    assert capvid(*command)[2] == ""


def test_json_report(capvid: Run, files: Path) -> None:
    (files / "predictions.json").write_text(json.dumps({**PREDICTIONS, "more": "a bird"}))
    code, out, err = capvid(
        "score",
        files / "predictions.json",
        files / "references.json",
        "--metrics",
        "cider, BLEU",
        "--format=json",
    )
    report = json.loads(out)
    assert code == 0
    assert report["scores"] == score(PREDICTIONS, REFERENCES, metrics=["bleu", "cider"]).corpus
    captions = [" ".join(ptb_tokenize(PREDICTIONS[video])) for video in REFERENCES]
    assert report["diversity"] == asdict(diversity(captions))
    assert report["predictions"] == str(files / "predictions.json")
    assert report["references"] == [str(files / "references.json")]
    assert report["counts"] == {"videos": 3, "references": 5, "missing": 0, "extra": 1}
    assert report["tokenizer"] == "builtin"
    assert set(report["versions"]) == {"capvid", "python"}
    assert err == f"note: {files / 'predictions.json'}: 1 not in the references, left out: more\n"


PREDICTION_FILES: dict[str, tuple[str, str]] = {
    "records": (
        "predictions.json",
        json.dumps(
            [
                {"video": f"clips/{video}.mp4", "status": "ok", "captions": [{"text": text, "logprob": -1}]}
                for video, text in PREDICTIONS.items()
            ]
        ),
    ),
    "record lines": (
        "predictions.jsonl",
        "".join(
            json.dumps({"video": f"clips/{video}.mp4", "captions": [{"text": text}]}) + "\n"
            for video, text in PREDICTIONS.items()
        ),
    ),
    "csv": (
        "predictions.csv",
        "video,caption,logprob\n" + "".join(f"a/{v}.mp4,{text},-1\n" for v, text in PREDICTIONS.items()),
    ),
    "tsv": (
        "predictions.tsv",
        "video\tcaption\tlogprob\n" + "".join(f"{v}\t{text}\t-1\n" for v, text in PREDICTIONS.items()),
    ),
    "coco": (
        "predictions.json",
        json.dumps([{"image_id": v, "caption": text} for v, text in PREDICTIONS.items()]),
    ),
}
REFERENCE_FILES: dict[str, str] = {
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


@pytest.mark.parametrize("form", PREDICTION_FILES)
def test_prediction_formats(form: str, capvid: Run, files: Path) -> None:
    name, text = PREDICTION_FILES[form]
    (files / name).write_text(text)
    code, out, _ = capvid(
        "score", files / name, files / "references.json", "--format=json", "--metrics", "bleu,rouge,cider"
    )
    assert code == 0
    assert json.loads(out)["scores"] == score(PREDICTIONS, REFERENCES).corpus


@pytest.mark.parametrize("form", REFERENCE_FILES)
def test_reference_formats(form: str, capvid: Run, files: Path) -> None:
    (files / "references").write_text(REFERENCE_FILES[form])
    arguments = [
        "score",
        files / "predictions.json",
        files / "references",
        "--format=json",
        "--metrics",
        "bleu,rouge,cider",
    ]
    for more in ([], ["--references-format", form]):
        code, out, _ = capvid(*arguments, *more)
        assert code == 0
        assert json.loads(out)["scores"] == score(PREDICTIONS, REFERENCES).corpus


def test_missing_predictions(capvid: Run, files: Path) -> None:
    failed = {"video": "a/video2.mp4", "status": "error", "captions": [], "error": {"kind": "truncated"}}
    rows = [
        {"video": "video1", "caption": PREDICTIONS["video1"]},
        failed,
        {"video": "video3", "caption": PREDICTIONS["video3"]},
    ]
    (files / "predictions.json").write_text(json.dumps(rows))
    predictions = {video: text for video, text in PREDICTIONS.items() if video != "video2"}
    arguments = [
        "score",
        files / "predictions.json",
        files / "references.json",
        "--format=json",
        "--metrics",
        "rouge,cider",
    ]
    code, out, err = capvid(*arguments)
    assert (code, out) == (1, "")
    assert err == (
        f"error: {files / 'predictions.json'}: no prediction for 1 of 3 videos "
        "(1 of the predictions failed): video2; caption them too, or choose --missing empty or skip\n"
    )
    for missing in ("empty", "skip"):
        code, out, err = capvid(*arguments, "--missing", missing)
        report = json.loads(out)
        assert code == 0
        assert (
            report["scores"]
            == score(predictions, REFERENCES, missing=missing, metrics=["rouge", "cider"]).corpus
        )
        assert report["counts"]["missing"] == 1
        assert report["counts"]["videos"] == (3 if missing == "empty" else 2)
        assert "1 failed to be captioned: a/video2.mp4" in err


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "tsv"])
def test_per_video_scores(suffix: str, capvid: Run, files: Path) -> None:
    predictions = {**PREDICTIONS, "video1": 'a "dog",\tis\nrunning'}
    (files / "predictions.json").write_text(json.dumps(predictions))
    path = files / f"scores.{suffix}"
    path.write_text("old")
    options = ["--metrics", "bleu,rouge", "--per-video", path]
    code, _, _ = capvid("score", files / "predictions.json", files / "references.json", *options)
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
    expected = score(predictions, REFERENCES, metrics=["bleu", "rouge"]).per_video
    assert [row["video"] for row in rows] == list(REFERENCES)
    assert rows[0]["caption"] == (
        predictions["video1"] if suffix in ("json", "jsonl") else 'a "dog",\\tis\\nrunning'
    )
    for row in rows:
        assert {name: float(row[name]) for name in list(row)[2:]} == expected[row["video"]]
    assert [file.name for file in files.iterdir() if file.name.endswith(".tmp")] == []


def test_paragraph_scores(capvid: Run, files: Path) -> None:
    predictions = {"v": ["A dog runs.", "It runs, fast."], "w": ["rain"]}
    annotations = [{"v": "A dog runs fast.", "w": "It rains."}, {"v": "The dog runs.", "x": "Snow."}]
    (files / "predictions.json").write_text(
        json.dumps({"results": {v: [{"sentence": s} for s in x] for v, x in predictions.items()}})
    )
    for number, annotation in enumerate(annotations):
        (files / f"{number}.json").write_text(json.dumps(annotation))
    arguments = [
        "score",
        files / "predictions.json",
        files / "0.json",
        files / "1.json",
        "--paragraph",
        "--missing",
        "empty",
    ]
    code, out, _ = capvid(*arguments, "--metrics", "bleu,rouge,cider,repetition", "--format=json")
    references = {"v": ["A dog runs fast.", "The dog runs."], "w": ["It rains."], "x": ["Snow."]}
    report = json.loads(out)
    assert code == 0
    expected = score_paragraphs(predictions, references, missing="empty", repetition_of=annotations[0])
    assert report["scores"] == expected.corpus
    assert report["tokenizer"] == "mart"
    assert report["counts"] == {"videos": 3, "references": 4, "missing": 1, "extra": 0}
    _, out, _ = capvid(*arguments, "--metrics", "repetition")
    assert out.splitlines()[0].split() == ["R@1", "R@2", "R@3", "R@4"]
    assert out.splitlines()[1].split() == percentages(
        {name: expected.corpus[name] for name in list(expected.corpus)[-4:]}
    )


def test_compare_two_prediction_files(capvid: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    arguments = [
        "score",
        files / "predictions.json",
        files / "references.json",
        "--metrics",
        "bleu,rouge,cider",
    ]
    code, out, _ = capvid(*arguments, "--compare", files / "other.json")
    lines = out.splitlines()
    assert code == 0
    assert lines[:2] == [f"A: {files / 'predictions.json'}", f"B: {files / 'other.json'}"]
    assert lines[2].split("  ")[-1].strip() == "p"
    assert lines[3].split()[:3] == [
        "BLEU-1",
        *(
            percentages(score(predictions, REFERENCES).corpus)[0]
            for predictions in (PREDICTIONS, OTHER_PREDICTIONS)
        ),
    ]
    assert max(map(len, lines[2:])) <= 60
    assert "  A: a dog is running" in lines and "  B: a dog runs in the park" in lines
    assert "  A: a man is cooking" not in lines  # captions that do not differ are not listed
    (files / "predictions.json").write_text(json.dumps({**PREDICTIONS, "video1": "[b]a :dog: is[/b]"}))
    assert "  A: [b]a :dog: is[/b]" in capvid(*arguments, "--compare", files / "other.json")[1].splitlines()
    (files / "predictions.json").write_text(json.dumps(PREDICTIONS))
    _, out, _ = capvid(*arguments, "--compare", files / "other.json", "--format=json")
    comparison = json.loads(out)["compare"]
    assert comparison["scores"] == score(OTHER_PREDICTIONS, REFERENCES).corpus
    assert comparison["videos"][0].keys() == {"video", "difference", "caption", "other"}
    assert capvid(*arguments, "--compare", files / "other.json", "--format=json")[1] == out
    _, out, _ = capvid(*arguments, "--compare", files / "predictions.json", "--format=json")
    comparison = json.loads(out)["compare"]
    assert comparison["videos"] == []
    for interval in comparison["differences"].values():
        assert interval == {"difference": 0, "low": 0, "high": 0, "p": 1}


def test_compare_uses_videos_of_both_files(capvid: Run, files: Path) -> None:
    (files / "predictions.json").write_text(
        json.dumps({video: PREDICTIONS[video] for video in ("video1", "video2")})
    )
    (files / "other.json").write_text(
        json.dumps({video: OTHER_PREDICTIONS[video] for video in ("video1", "video3")})
    )
    options = [
        "--missing",
        "skip",
        "--metrics",
        "rouge",
        "--compare",
        files / "other.json",
        "--format=json",
    ]
    code, out, _ = capvid("score", files / "predictions.json", files / "references.json", *options)
    assert code == 0
    assert json.loads(out)["counts"]["videos"] == 1
    (files / "other.json").write_text(json.dumps({"video3": "a"}))
    code, _, err = capvid("score", files / "predictions.json", files / "references.json", *options)
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
def test_usage_errors(options: list[str], capvid: Run, files: Path) -> None:
    code, out, err = capvid("score", files / "predictions.json", files / "references.json", *options)
    assert (code, out) == (2, "")
    assert err.strip()
    assert "Traceback" not in err


@pytest.mark.parametrize("text", ["", "[", '{"video1": null}', "\xff", '{"x": "a dog"}', "a dog"])
def test_invalid_files_print_one_error_line(text: str, capvid: Run, files: Path) -> None:
    (files / "bad.json").write_bytes(text.encode("latin-1"))
    for arguments in (
        [files / "bad.json", files / "references.json"],
        [files / "predictions.json", files / "bad.json"],
    ):
        code, out, err = capvid("score", *arguments)
        assert (code, out) == (1, "")
        assert err.count("\n") == 1 and err.startswith("error: ")
        assert ".json" in err and ";" in err
    code, _, err = capvid("score", files / "none.json", files / "references.json")
    assert (code, err) == (1, f"error: {files / 'none.json'}: no such file\n")


def test_numeric_and_string_ids_match(capvid: Run, files: Path) -> None:
    (files / "predictions.json").write_text(
        '[{"image_id": 7, "caption": "a dog"}, {"image_id": "8", "caption": "a cat"}]'
    )
    (files / "references.json").write_text(
        '{"annotations": [{"image_id": "7", "caption": "a dog"}, {"image_id": 8, "caption": "a cat"}]}'
    )
    code, out, _ = capvid(
        "score", files / "predictions.json", files / "references.json", "--metrics", "rouge"
    )
    assert code == 0
    assert out.splitlines()[1].strip() == "100.0"


def test_very_long_captions(capvid: Run, files: Path) -> None:
    words = [f"word{number % 701}" for number in range(10_000)]
    long = {"a": " ".join(words), "b": "a " * 10_000, "c": "(" * 10_000, "d": "x" * 10_000}
    (files / "predictions.json").write_text(json.dumps(long))
    (files / "references.json").write_text(
        json.dumps({video: [text, "a dog"] for video, text in long.items()})
    )
    code, out, _ = capvid(
        "score", files / "predictions.json", files / "references.json", "--metrics", "bleu,rouge,cider"
    )
    assert code == 0
    assert out.splitlines()[1].split()[0] == "100.0"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the memory")
def test_memory_is_bounded_by_the_file_size(tmp_path: Path) -> None:
    words = [{"word": f"word{number}", "logprob": -1.25} for number in range(40)]
    count = 20_000
    with (tmp_path / "predictions.json").open("w") as stream:
        stream.write("[")
        for number in range(count):
            captions = [{"text": f"a dog number {number % 99}", "logprob": -9.5, "words": words}]
            row = {"video": f"clips/video{number}.mp4", "status": "ok", "captions": captions}
            stream.write(("," if number else "") + json.dumps(row) + "\n")
        stream.write("]")
    size = (tmp_path / "predictions.json").stat().st_size
    assert size > 30e6
    (tmp_path / "references.json").write_text(
        json.dumps({f"video{number}": ["a dog"] for number in range(count)})
    )
    code = (
        "import sys; from capvid.cli.app import main; code = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules;"
        "peak = [line for line in open('/proc/self/status') if line.startswith('VmHWM')];"
        "print(code, peak[0].split()[1])"
    )
    paths = [str(tmp_path / name) for name in ("predictions.json", "references.json")]
    completed = subprocess.run(
        [sys.executable, "-c", code, "score", *paths, "--metrics", "rouge"],
        capture_output=True,
        text=True,
        check=True,
    )
    returned, kilobytes = completed.stdout.splitlines()[-1].split()
    assert returned == "0"
    assert (
        int(kilobytes) * 1024 < 5 * size
    )  # parsed into objects, the file would take over ten times its size


def test_cider_of_a_single_video_is_zero(capvid: Run, files: Path) -> None:
    (files / "predictions.json").write_text('{"video2": "two cats sleep"}')
    options = ["--missing", "skip", "--metrics", "cider", "--format=json"]
    code, out, err = capvid("score", files / "predictions.json", files / "references.json", *options)
    assert code == 0
    assert json.loads(out)["scores"] == {"CIDEr-D": 0}
    assert err == "note: CIDEr-D of a single video is 0, whatever its caption\n"


@pytest.mark.slow
def test_caption_outputs_score_equally_in_every_format(
    capvid: Run, toy: Toy, video_files: list[Path], bad_files: dict[str, Path], tmp_path: Path
) -> None:
    videos = [*video_files, bad_files["text"]]
    references = {video.stem: ["a dog is running in the park"] for video in videos}
    (tmp_path / "references.json").write_text(json.dumps(references))
    score_arguments = [
        tmp_path / "references.json",
        "--missing",
        "skip",
        "--metrics",
        "bleu,cider",
        "--format=json",
    ]
    caption_command = ["caption", *videos, "--model", toy.model, "--num-captions", 2]
    results = {}
    for form in ("json", "jsonl", "csv", "tsv"):
        assert capvid(*caption_command, "-o", tmp_path / f"all.{form}")[0] == 3
        assert capvid(*caption_command, "--format", form, "--output-dir", tmp_path / form)[0] == 3
        for source in (tmp_path / f"all.{form}", tmp_path / form):
            code, out, err = capvid("score", source, *score_arguments)
            assert code == 0, err
            report = json.loads(out)
            results[source.name] = (report["scores"], report["counts"])
    first, *others = results.values()
    assert len(others) == 7 and all(other == first for other in others)
    assert first[0]["BLEU-1"] > 0 and first[1]["videos"] == len(video_files)
