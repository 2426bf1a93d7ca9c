from __future__ import annotations

import csv
import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pysrt
import pytest
import signal_at
from toy import Run, Toy, save_toy_captioner, write_video

from capvid.cli.app import main
from capvid.utils.files import MANIFEST
from capvid.video.readers import open_video


@pytest.fixture
def captions(toy: Toy, video_files: list[Path]) -> dict[Path, str]:
    """Map each video to the caption that the library gives it."""
    from capvid.pipeline import load

    return {result.path: result.captions[0].text for result in load(toy.model).stream(video_files)}


def test_one_video_prints_its_caption_only(
    capvid: Run, toy: Toy, video_files: list[Path], captions: dict[Path, str]
) -> None:
    code, out, err = capvid("caption", video_files[2], "--model", toy.model)
    assert (code, out, err) == (0, captions[video_files[2]] + "\n", "")


def test_weights_option_replaces_environment_variable(
    capvid: Run, toy: Toy, video_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CAPVID_WEIGHTS")
    monkeypatch.setenv("CAPVID_CACHE", str(toy.model))
    code, out, err = capvid("caption", video_files[0], "--model", toy.model)
    assert (code, out) == (1, "")
    assert "toy.safetensors" in err
    assert "--weights" in err
    assert err.count("\n") == 1
    code, out, _ = capvid("caption", video_files[0], "--model", toy.model, "--weights", toy.weights)
    assert code == 0
    assert len(out.split()) >= 1


def test_several_videos_print_paths_and_captions(
    capvid: Run, toy: Toy, video_files: list[Path], captions: dict[Path, str]
) -> None:
    code, out, err = capvid("caption", *video_files, "--model", toy.model)
    assert (code, err) == (0, "5 captioned\n")
    assert out.splitlines() == [f"{path}\t{captions[path]}" for path in video_files]


@pytest.mark.slow
def test_feature_file_is_captioned_like_its_video(
    capvid: Run, toy: Toy, video_files: list[Path], captions: dict[Path, str], tmp_path: Path
) -> None:
    assert capvid("extract", video_files[3], "--backbone", "toy", "--frames", 4, "-o", tmp_path)[0] == 0
    (features,) = tmp_path.glob("*.safetensors")
    code, out, _ = capvid("caption", features, "--model", toy.model)
    assert (code, out) == (0, captions[video_files[3]] + "\n")


def test_features_with_other_sampling_are_refused(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path
) -> None:
    capvid("extract", video_files[3], "--backbone", "toy", "--frames", 5, "-o", tmp_path)
    (features,) = tmp_path.glob("*.safetensors")
    code, out, err = capvid("caption", features, "--model", toy.model)
    assert (code, out) == (1, "")
    assert "sampling: trained on uniform:4, got uniform:5" in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_json_record_of_one_video(
    capvid: Run, toy: Toy, video_files: list[Path], captions: dict[Path, str]
) -> None:
    arguments = ["--model", toy.model, "--format", "json", "--beam", 4, "--num-captions", 3]
    code, out, _ = capvid("caption", video_files[1], *arguments)
    record = json.loads(out)
    assert code == 0
    assert (record["schema_version"], record["status"], record["error"]) == (1, "ok", None)
    assert record["video"] == str(video_files[1])
    assert record["model"]["name"] == "soft-attention"
    assert len(record["model"]["revision"]) == 12
    assert record["settings"]["beam_size"] == 4
    assert len({caption["text"] for caption in record["captions"]}) == 3
    for caption in record["captions"]:
        assert caption["text"] == " ".join(word["word"] for word in caption["words"])
        assert caption["logprob"] <= sum(word["logprob"] for word in caption["words"]) <= 0


@pytest.mark.slow
def test_sampling_and_length_options(capvid: Run, toy: Toy, video_files: list[Path]) -> None:
    sampling_options = ("--temperature", 1.5, "--top-p", 0.9, "--num-captions", 6)
    command = ("caption", video_files[1], "--model", toy.model, "--format", "json")
    code, out, _ = capvid(*command, *sampling_options, "--seed", 3)
    texts = [caption["text"] for caption in json.loads(out)["captions"]]
    assert (code, len(texts)) == (0, 6)
    assert len(set(texts)) > 1
    assert json.loads(out)["settings"]["seed"] == 3
    assert capvid(*command, *sampling_options, "--seed", 3)[1] == out
    assert capvid(*command, *sampling_options, "--seed", 4)[1] != out
    length_options = (
        "--min-length",
        4,
        "--max-length",
        5,
        "--no-repeat-ngram",
        1,
        "--specificity",
        0.5,
        "--no-repeat-words",
    )
    _, out, _ = capvid(*command, *length_options)
    assert json.loads(out)["settings"]["specificity"] == 0.5
    words = json.loads(out)["captions"][0]["text"].split()
    assert 4 <= len(words) == len(set(words)) <= 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-p", 0.5), "top_p = 0.5 is of use only when words are drawn"),
        (("--min-length", 9, "--max-length", 3), "at least 9 words and at most 3"),
        (("--num-captions", 9), "9 captions cannot come from 5 beams"),
    ],
)
def test_invalid_decoding_options_are_usage_errors(
    capvid: Run, toy: Toy, video_files: list[Path], options: tuple, message: str
) -> None:
    code, out, err = capvid("caption", video_files[0], "--model", toy.model, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_bad_files_do_not_stop_a_batch(
    capvid: Run,
    toy: Toy,
    video_files: list[Path],
    captions: dict[Path, str],
    bad_files: dict[str, Path],
) -> None:
    inputs = [video_files[0], *bad_files.values(), video_files[1]]
    code, out, err = capvid("caption", *inputs, "--model", toy.model)
    assert code == 3
    lines = out.splitlines()
    assert [lines[0], lines[-1]] == [f"{path}\t{captions[path]}" for path in video_files[:2]]
    assert all(
        line.startswith(f"{path}\t\terror: {path}: ")
        for line, path in zip(lines[1:-1], bad_files.values(), strict=True)
    )
    *errors, summary = err.splitlines()
    assert [line.split(": ")[:2] for line in errors] == [["error", str(path)] for path in bad_files.values()]
    assert summary == "2 captioned, 3 failed"

    code, out, _ = capvid("caption", *inputs, "--model", toy.model, "--format", "json")
    records = json.loads(out)
    assert code == 3
    assert [record["status"] for record in records] == ["ok", "error", "error", "error", "ok"]
    assert records[3]["error"]["kind"] == "missing"


@pytest.mark.parametrize("kind", ["text", "empty", "missing"])
def test_unreadable_video_prints_one_error_line(
    capvid: Run, toy: Toy, bad_files: dict[str, Path], kind: str
) -> None:
    code, out, err = capvid("caption", bad_files[kind], "--model", toy.model)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {bad_files[kind]}: ")
    assert err.count("\n") == 1


def test_folder_without_videos_is_an_error(
    capvid: Run, toy: Toy, tmp_path: Path, video_files: list[Path]
) -> None:
    (tmp_path / "notes.txt").write_text("nothing\n")
    code, out, err = capvid("caption", tmp_path, "--model", toy.model)
    assert (code, out) == (1, "")
    assert err.splitlines()[0].startswith(f"error: {tmp_path}: ")
    assert err.splitlines()[1:] == ["0 captioned, 1 failed"]
    code, out, err = capvid("caption", tmp_path, video_files[0], "--model", toy.model)
    assert code == 3
    assert out.startswith(f"{video_files[0]}\t")


def test_fail_fast_stops_at_first_failure(
    capvid: Run, toy: Toy, video_files: list[Path], bad_files: dict[str, Path]
) -> None:
    inputs = [video_files[0], bad_files["empty"], video_files[1], bad_files["text"]]
    code, out, err = capvid("caption", *inputs, "--model", toy.model, "--fail-fast")
    assert code == 3
    assert len(out.splitlines()) == 2
    assert err.splitlines()[-1] == "1 captioned, 1 failed"


@pytest.mark.slow
def test_no_recursive_skips_subfolders(
    capvid: Run, toy: Toy, tmp_path: Path, video_files: list[Path], captions: dict[Path, str]
) -> None:
    inner = tmp_path / "sub" / "b.mp4"
    inner.parent.mkdir()
    shutil.copy(video_files[1], inner)
    shutil.copy(video_files[0], tmp_path / "a.mp4")
    outer_line = f"{tmp_path / 'a.mp4'}\t{captions[video_files[0]]}"
    inner_line = f"{inner}\t{captions[video_files[1]]}"
    assert capvid("caption", tmp_path, "--model", toy.model)[1].splitlines() == [outer_line, inner_line]
    _, out, _ = capvid("caption", tmp_path, "--model", toy.model, "--no-recursive")
    assert out.splitlines() == [outer_line]


def test_output_dir_skips_finished_videos(
    capvid: Run, toy: Toy, tmp_path: Path, video_files: list[Path], captions: dict[Path, str]
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    for number, folder in enumerate(("one", "two")):  # the same name in two folders
        (source / folder).mkdir(parents=True)
        shutil.copy(video_files[number], source / folder / "clip.mp4")
    arguments = ["caption", source, "--model", toy.model, "--output-dir", out, "--format", "json"]
    assert capvid(*arguments) == (0, "", "2 captioned\n")
    files = sorted(out.rglob("*.json"))
    assert [json.loads(file.read_text())["captions"][0]["text"] for file in files] == [
        captions[video_files[0]],
        captions[video_files[1]],
    ]
    assert capvid(*arguments) == (0, "", "0 captioned, 2 skipped (already done)\n")
    files[0].unlink()
    assert capvid(*arguments) == (0, "", "1 captioned, 1 skipped (already done)\n")
    assert capvid(*arguments, "--beam", 2) == (0, "", "2 captioned\n")  # other settings
    assert json.loads(files[0].read_text())["settings"]["beam_size"] == 2
    assert capvid(*arguments, "--beam", 2, "--overwrite") == (0, "", "2 captioned\n")
    save_toy_captioner(tmp_path / "other", weights=toy.weights, seed=2)
    arguments[3] = tmp_path / "other"
    assert capvid(*arguments, "--beam", 2) == (0, "", "2 captioned\n")  # another captioner
    others = sorted(path.name for path in out.rglob("*") if path.is_file())
    assert others == [MANIFEST, "clip.json", "clip.json"]


@pytest.mark.slow
def test_manifest_decides_which_text_files_are_done(
    capvid: Run, toy: Toy, tmp_path: Path, video_files: list[Path]
) -> None:
    videos = [shutil.copy(path, tmp_path / path.name) for path in video_files[:2]]
    arguments = ["caption", *videos, "--model", toy.model, "--output-dir", tmp_path / "out"]
    assert capvid(*arguments)[0] == 0
    files = sorted((tmp_path / "out").glob("*.txt"))
    files[0].write_text("edited\n")
    assert capvid(*arguments) == (0, "", "0 captioned, 2 skipped (already done)\n")
    assert files[0].read_text() == "edited\n"
    assert capvid(*arguments, "--beam", 2) == (0, "", "2 captioned\n")
    assert capvid(*arguments) == (0, "", "2 captioned\n")  # only the settings of the last run are remembered
    shutil.copy(video_files[2], videos[0])  # another video of the same name
    assert capvid(*arguments) == (0, "", "1 captioned, 1 skipped (already done)\n")
    (tmp_path / "out" / MANIFEST).unlink()
    assert capvid(*arguments) == (0, "", "2 captioned\n")


@pytest.mark.slow
def test_failed_video_is_retried(
    capvid: Run, toy: Toy, tmp_path: Path, bad_files: dict[str, Path], video_files: list[Path]
) -> None:
    bad = bad_files["empty"]
    arguments = ["caption", bad, "--model", toy.model, "--output-dir", tmp_path / "out", "--format", "json"]
    assert capvid(*arguments)[0] == 1
    (file,) = (tmp_path / "out").glob("*.json")
    assert json.loads(file.read_text())["status"] == "error"
    (line,) = map(json.loads, (tmp_path / "out" / MANIFEST).read_text().splitlines())
    assert line["status"] == "error" and str(bad) in line["error"] and line["output"] == file.name
    shutil.copy(video_files[0], bad)
    assert capvid(*arguments)[0] == 0
    assert json.loads(file.read_text())["status"] == "ok"


def test_video_named_like_the_manifest(
    capvid: Run, toy: Toy, tmp_path: Path, video_files: list[Path]
) -> None:
    video = tmp_path / "in" / "capvid-manifest.mp4"
    video.parent.mkdir()
    shutil.copy(video_files[0], video)
    arguments = [
        "caption",
        video,
        "--model",
        toy.model,
        "--output-dir",
        tmp_path / "out",
        "--format",
        "jsonl",
    ]
    assert capvid(*arguments)[0] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "capvid-manifest.jsonl",
        f"{video.name}.jsonl",
    ]
    assert "captions" in json.loads((tmp_path / "out" / f"{video.name}.jsonl").read_text())
    assert "1 skipped" in capvid("caption", video.parent, *arguments[2:])[2]


@pytest.mark.slow
def test_output_file_and_symlink(
    capvid: Run, toy: Toy, tmp_path: Path, video_files: list[Path], captions: dict[Path, str]
) -> None:
    target = tmp_path / "captions.jsonl"
    assert capvid("caption", *video_files, "--model", toy.model, "-o", target) == (0, "", "5 captioned\n")
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [record["captions"][0]["text"] for record in records] == [captions[path] for path in video_files]
    target = tmp_path / "caption.txt"
    target.touch()
    (tmp_path / "link.txt").symlink_to(target)
    assert capvid("caption", video_files[0], "--model", toy.model, "-o", tmp_path / "link.txt") == (0, "", "")
    assert target.read_text() == captions[video_files[0]] + "\n"
    assert (tmp_path / "link.txt").is_symlink()


def test_failure_keeps_existing_output_file(
    capvid: Run, toy: Toy, tmp_path: Path, bad_files: dict[str, Path]
) -> None:
    target = tmp_path / "caption.txt"
    target.write_text("before\n")
    assert capvid("caption", bad_files["text"], "--model", toy.model, "-o", target)[0] == 1
    assert target.read_text() == "before\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "{tmp}/none/x.txt"], "there is no folder"),
        (["-o", "{tmp}"], "is a folder"),
        (["-o", "{tmp}/x.txt", "--output-dir", "{tmp}/d"], "exclude each other"),
        (["--output-dir", "{tmp}/file"], "is a file, not a folder"),
        (["--output-dir", "/proc/none"], "cannot be made"),
        (["-o", "/proc/x.txt"], "cannot be written"),
        (["--num-captions", "6"], "6 captions"),
        (["--device", "abacus"], "abacus"),
        (["--device", "cuda:99"], "cuda:99"),
    ],
)
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc as a folder nobody can write in")
def test_invalid_options_are_usage_errors(
    capvid: Run, toy: Toy, tmp_path: Path, video_files: list[Path], arguments: list[str], message: str
) -> None:
    (tmp_path / "file").touch()
    options = [option.replace("{tmp}", str(tmp_path)) for option in arguments]
    code, out, err = capvid("caption", video_files[0], "--model", toy.model, *options)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("content", [None, {}, {"captioner.json": "{"}])
def test_invalid_model_folder_prints_one_error_line(
    capvid: Run, toy: Toy, tmp_path: Path, video_files: list[Path], content: dict[str, str] | None
) -> None:
    model = tmp_path / "model"
    if content is not None:
        model.mkdir()
        for name, text in content.items():
            (model / name).write_text(text)
    code, out, err = capvid("caption", video_files[0], "--model", model)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {model}: ")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_interrupt_prints_progress(toy: Toy, tmp_path: Path) -> None:
    for number in range(40):
        write_video(tmp_path / f"{number:02}.mp4", seed=number)
    arguments = ["caption", tmp_path, "--model", toy.model, "--batch-size", 1]
    command = signal_at.command(signal.SIGINT, "stdout", "\t", 2, *arguments)
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (completed.returncode, completed.stderr) == (130, "interrupted: 2 of 40 captioned\n")
    first, second = completed.stdout.splitlines()
    assert first.startswith(f"{tmp_path / '00.mp4'}\t") and second.startswith(f"{tmp_path / '01.mp4'}\t")


@pytest.mark.slow
def test_subtitles_and_tables(
    capvid: Run, toy: Toy, video_files: list[Path], captions: dict[Path, str], tmp_path: Path
) -> None:
    """Subtitles span the video; --output-dir writes one file per video, and CSV one row per video."""
    code, out, _ = capvid("caption", video_files[0], "--model", toy.model, "--format", "srt")
    assert code == 0
    cues = pysrt.from_string(out)  # a long caption is shown in several
    with open_video(video_files[0]) as source:
        duration = source.info.duration
    assert " ".join(cue.text.replace("\n", " ") for cue in cues) == captions[video_files[0]]
    assert (cues[0].start.ordinal, cues[-1].end.ordinal) == (0, round(1000 * duration))
    assert capvid("extract", video_files[0], "--backbone", "toy", "--frames", 4, "-o", tmp_path / "f")[0] == 0
    (features,) = (tmp_path / "f").glob("*.safetensors")
    assert capvid("caption", features, "--model", toy.model, "--format", "srt")[1] == out

    code, _, err = capvid("caption", *video_files, "--model", toy.model, "--format", "vtt")
    assert code == 2 and "vtt holds the subtitles of one video; give --output-dir for several" in err
    command = [
        "caption",
        *video_files,
        "--model",
        toy.model,
        "--format",
        "vtt",
        "--output-dir",
        tmp_path / "v",
    ]
    assert capvid(*command)[0] == 0
    assert len(list((tmp_path / "v").rglob("*.vtt"))) == len(video_files)

    assert capvid("caption", *video_files, "--model", toy.model, "-o", tmp_path / "all.csv")[0] == 0
    with (tmp_path / "all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["video"], row["caption"]) for row in rows] == [(str(p), captions[p]) for p in video_files]
    assert rows[0]["end"] == f"{duration:.3f}"


def test_summary_reports_duration_and_rate(
    toy: Toy, video_files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["caption", *map(str, video_files), "--model", str(toy.model)]) == 0
    match = re.fullmatch(r"5 captioned in (\d+\.\d) s \((\d+\.\d) a second\)\n", capsys.readouterr().err)
    assert match and float(match[2]) == pytest.approx(5 / float(match[1]), rel=0.2)


def test_a_finished_output_keeps_its_owner(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clips").mkdir()
    monkeypatch.chdir(tmp_path)
    shutil.copy(video_files[0], "clips/car.mp4")
    command = ["caption", "--model", toy.model, "--output-dir", "out"]
    capvid(*command, "clips")
    first = Path("out/car.txt").read_text()
    shutil.copy(video_files[1], "clips/car.mov")  # found before car.mp4
    shutil.copy(video_files[2], "clips/car.avi")
    for inputs, done in (
        (["clips/car.mov"], "0 skipped"),
        (["clips"], "2 skipped"),
        (["clips"], "3 skipped"),
        (["clips/car.mov", "clips/car.mp4"], "2 skipped"),
        ([tmp_path / "clips"], ""),
    ):
        err = capvid(*command, *inputs)[2]
        assert f"{done} (already done)" in err or done in ("", "0 skipped"), err
        assert Path("out/car.txt").read_text() == first
    names = {"car.txt", "car.avi.txt", "car.mov.txt", MANIFEST}
    assert {path.name for path in Path("out").iterdir()} == names
    Path("clips/car.mp4").unlink()  # its name is free
    Path("clips/car.mov").unlink()
    capvid(*command, "clips", "--overwrite")
    assert {path.name for path in Path("out").iterdir()} == names


def test_the_note_of_low_confidence_counts_segments(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path
) -> None:
    curve = {"average": [0.0] * 1280, "intercept": -9.0, "per_logprob": 0.0, "per_information": 0.0}
    shares = dict.fromkeys(("videos", "right", "flagged", "right_flagged", "right_others"), 1)
    save_toy_captioner(tmp_path / "run", weights=toy.weights, confidence={**curve, **shares})
    command = ["caption", "--model", tmp_path / "run", *video_files[:1]]
    assert capvid(*command)[2] == "note: low confidence: this caption may well be wrong\n"
    note = "2 of 2 segments"
    err = capvid(*command, "--segments", 2)[2]
    assert err == f"note: low confidence: {note}, see low_confidence in csv\n"
    err = capvid(*command, video_files[1], "--segments", 2)[2].splitlines()[-1]
    assert err == f"note: low confidence: {video_files[0]} ({note}), {video_files[1]} ({note})"
