"""Captions kept with the videos they describe: sidecars, video folders and WebDataset shards."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from toy import Run, Toy

from capvid.output.manifest import Sidecars
from capvid.utils.files import MANIFEST

TRIGGER = "ohwx, "


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CAPVID_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def clips(tmp_path: Path, video_files: list[Path], bad_files: dict[str, Path]) -> Path:
    """A folder of two videos, a third in a subfolder, and a broken one."""
    folder = tmp_path / "clips"
    (folder / "sub").mkdir(parents=True)
    for name, source in zip(("a.mp4", "b.mp4", "sub/c.mp4"), video_files, strict=False):
        shutil.copy(source, folder / name)
    shutil.copy(bad_files["text"], folder / "broken.mp4")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def texts(folder: Path) -> dict[str, str]:
    return {name: data.decode() for name, data in contents(folder).items() if name.endswith(".txt")}


def test_sidecars(capvid: Run, toy: Toy, clips: Path) -> None:
    command = ["caption", clips, "--model", toy.model, "--sidecar", "--prefix", TRIGGER]
    code, out, err = capvid(*command)
    assert (code, out) == (3, "") and err.endswith("3 captioned, 1 failed\n")
    written = texts(clips)
    assert list(written) == ["a.txt", "b.txt", "sub/c.txt"]
    assert all(text.startswith(TRIGGER) and text.count("\n") == 1 for text in written.values())
    assert not list(clips.rglob(MANIFEST))

    before = contents(clips)
    code, _, err = capvid(*command)
    assert code == 3 and err.endswith("0 captioned, 3 skipped (already done), 1 failed\n")
    assert contents(clips) == before


def test_sidecars_that_people_wrote_or_edited_stay(capvid: Run, toy: Toy, clips: Path) -> None:
    (clips / "a.txt").write_text("by hand")
    command = ["caption", clips, "--model", toy.model, "--sidecar"]
    err = capvid(*command)[2]
    assert "note: 1 text that somebody wrote or edited stays; --overwrite replaces such texts" in err
    (clips / "b.txt").write_text("edited")
    original = texts(clips)["sub/c.txt"]
    err = capvid(*command, "--suffix", " !")[2]
    assert "note: 2 texts that somebody wrote or edited stay" in err
    expected = {"a.txt": "by hand", "b.txt": "edited", "sub/c.txt": original.replace("\n", " !\n")}
    assert texts(clips) == expected
    capvid(*command, "--overwrite")
    assert texts(clips)["sub/c.txt"] == original and "by hand" not in texts(clips).values()
    assert "stay" not in capvid(*command)[2]


def test_a_video_that_breaks_keeps_the_text_it_had(
    capvid: Run, toy: Toy, clips: Path, bad_files: dict[str, Path], video_files: list[Path]
) -> None:
    command = ["caption", clips, "--model", toy.model, "--sidecar"]
    capvid(*command)
    before = texts(clips)
    shutil.copy(bad_files["text"], clips / "a.mp4")
    assert "1 captioned" not in capvid(*command)[2] and texts(clips) == before
    shutil.copy(video_files[3], clips / "a.mp4")
    assert "somebody" not in capvid(*command)[2]  # the text is still known as capvid's own


def test_sidecars_without_a_place(capvid: Run, toy: Toy, clips: Path, tmp_path: Path) -> None:
    shutil.copy(clips / "a.mp4", clips / "a.avi")
    code, _, err = capvid("caption", clips / "a.avi", clips / "a.mp4", "--model", toy.model, "--sidecar")
    assert code == 3 and f"error: {clips / 'a.mp4'}: a.txt beside it is the text of a.avi" in err
    code, _, err = capvid("caption", "https://127.0.0.1:9/v.mp4", "--model", toy.model, "--sidecar")
    assert code == 1 and "nothing can be written beside a video at an address" in err
    shutil.copy(clips / "b.mp4", clips / "video.txt")
    before = (clips / "video.txt").read_bytes()
    command = ["caption", clips / "video.txt", "--model", toy.model, "--sidecar", "--overwrite"]
    assert capvid(*command)[0] == 1 and (clips / "video.txt").read_bytes() == before
    code, _, err = capvid("caption", clips, "--sidecar", "-o", tmp_path / "x.txt")
    assert code == 2 and "exclude each other" in err


def test_sidecars_of_subtitles(capvid: Run, toy: Toy, clips: Path) -> None:
    code, _, _ = capvid(
        "caption", clips / "a.mp4", "--model", toy.model, "--sidecar", "--format", "srt", "--segments", 2
    )
    assert code == 0 and (clips / "a.srt").read_text().startswith("1\n00:00:00,000 --> ")
    command = ["caption", clips / "a.mp4", "--model", toy.model, "--sidecar", "--format", "srt"]
    assert capvid(*command, "--max-cue", 0.01, "--line-width", 3)[0] == 0  # other subtitles are written anew
    text = (clips / "a.srt").read_text()
    assert text.startswith("1\n00:00:00,000 --> 00:00:00,010\n")
    assert max(len(line) for line in text.splitlines() if "-->" not in line) <= 3
    code, _, err = capvid(*command[:-2], "--line-width", 30)
    assert (code, err) == (
        2,
        "error: --line-width is for subtitles; use --format srt or vtt, or leave it out\n",
    )


def test_video_folder_is_read_by_datasets(capvid: Run, toy: Toy, clips: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    command = ["caption", clips, "--model", toy.model, "--format", "videofolder", "--output-dir", clips]
    code, out, err = capvid(*command, "--prefix", TRIGGER)
    assert (code, out) == (3, "") and err.endswith("3 captioned, 1 failed\n")
    before = contents(clips)
    assert len(before) == 5  # nothing but the videos and metadata.jsonl
    capvid(*command, "--prefix", TRIGGER)
    assert contents(clips) == before

    options = {"data_dir": str(clips), "cache_dir": str(tmp_path / "hf"), "split": "train"}
    rows = datasets.load_dataset("videofolder", **options)
    rows = rows.cast_column("video", datasets.Video(decode=False))
    read = {Path(row["video"]["path"]).relative_to(clips).as_posix(): row["text"] for row in rows}
    captions = capvid("caption", *(clips / name for name in read), "--model", toy.model)[1].splitlines()
    expected = [TRIGGER + line.partition("\t")[2] for line in captions]
    assert list(read) == ["a.mp4", "b.mp4", "sub/c.mp4"] and list(read.values()) == expected


def test_video_folder_keeps_what_people_add(capvid: Run, toy: Toy, clips: Path, tmp_path: Path) -> None:
    command = ["caption", clips, "--model", toy.model, "--format", "videofolder", "--output-dir", clips]
    capvid(*command)
    path = clips / "metadata.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["text"], rows[1]["class"] = "edited", 7
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    capvid(*command, "--prefix", TRIGGER)
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert again[0] == rows[0] and again[1] == {**rows[1], "text": TRIGGER + rows[1]["text"]}

    good = path.read_text()
    second = good.splitlines()[0].replace("edited", "another")
    for line, problem in (
        ("not JSON\n", "not a JSON object with file_name; "),
        ('{"file_name": "a.mp4", "te', "not a JSON object with file_name; "),
        (second, "a second line for a.mp4; "),
    ):
        path.write_text(good + line)
        code, _, err = capvid(*command, "--overwrite")
        assert code == 1 and path.read_text() == good + line
        assert err.startswith(f"error: {path}, line 4: {problem}")
    path.write_text(good)
    assert capvid(*command, "--overwrite")[0] == 3
    assert len(path.read_text().splitlines()) == 3 and "edited" not in path.read_text()


def test_video_folder_without_the_videos(capvid: Run, toy: Toy, clips: Path, tmp_path: Path) -> None:
    command = ["caption", clips / "a.mp4", "--model", toy.model, "--format", "videofolder"]
    code, _, err = capvid(*command, "--output-dir", tmp_path / "elsewhere")
    assert code == 1 and f"a.mp4: is not in {tmp_path / 'elsewhere'}, the folder of the dataset" in err
    assert capvid(*command)[0] == 2


def test_shards_are_read_by_webdataset(capvid: Run, toy: Toy, clips: Path, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with tarfile.open(tmp_path / "clips.tar", "w") as tar:
        tar.add(clips, "clips")
    inputs = [tmp_path / "clips.tar", clips / "a.mp4"]
    command = ["caption", *inputs, "--model", toy.model, "--format", "webdataset"]
    command += ["--output-dir", tmp_path / "shards", "--prefix", TRIGGER]
    code, out, err = capvid(*command)
    assert (code, out) == (3, "") and "4 captioned" in err
    before = contents(tmp_path / "shards")
    assert "0 captioned, 5 skipped (already done)" in capvid(*command)[2]
    assert contents(tmp_path / "shards") == before

    shards = [str(path) for path in (tmp_path / "shards").glob("*.tar")]
    samples = {s["__key__"]: s for s in webdataset.WebDataset(shards, shardshuffle=False)}
    good = {key: sample for key, sample in samples.items() if "txt" in sample}
    assert sorted(samples) == [
        "a",
        "clips/clips/a",
        "clips/clips/b",
        "clips/clips/broken",
        "clips/clips/sub/c",
    ]
    assert samples.keys() - good.keys() == {"clips/clips/broken"}
    for key, sample in good.items():
        record = json.loads(sample["json"])
        assert sample["txt"].decode() == record["captions"][0]["text"]
        assert record["captions"][0]["text"].startswith(TRIGGER)
        if key == "a":  # the video is a file already
            assert "mp4" not in sample
        else:
            assert sample["mp4"] == (clips.parent / f"{key.removeprefix('clips/')}.mp4").read_bytes()


def test_a_finished_sidecar_keeps_its_owner(capvid: Run, toy: Toy, clips: Path) -> None:
    command = ["caption", clips, "--model", toy.model, "--sidecar"]
    capvid(*command)
    before = texts(clips)
    shutil.copy(clips / "b.mp4", clips / "a.avi")  # found before a.mp4
    for arguments in (command, [*command, "--suffix", " !"], ["caption", clips / "a.avi", *command[2:]]):
        err = capvid(*arguments)[2]
        assert f"error: {clips / 'a.avi'}: a.txt beside it is the text of a.mp4; rename one of the" in err
        assert texts(clips)["a.txt"] in (before["a.txt"], before["a.txt"].replace("\n", " !\n"))
    (clips / "a.txt").write_text("edited")
    assert "a.txt beside it is the text of a.mp4" in capvid(*command, "--overwrite")[2]
    (clips / "a.mp4").unlink()
    capvid(*command)
    assert texts(clips)["a.txt"] == before["a.txt"]  # still of a file that may come back
    (clips / "a.txt").unlink()
    capvid(*command)
    assert texts(clips)["a.txt"] == before["b.txt"]


def test_a_moved_dataset_keeps_its_texts(capvid: Run, toy: Toy, clips: Path, tmp_path: Path) -> None:
    folder = ["--format", "videofolder", "--output-dir"]
    for source, target, form in (
        (clips, tmp_path / "b", ["--sidecar"]),
        (tmp_path / "b", tmp_path / "c", folder),
    ):
        before, after = (form if form[-1] != folder[-1] else [*form, path] for path in (source, target))
        capvid("caption", source, "--model", toy.model, *before)
        source.rename(target)
        _, _, err = capvid("caption", target, "--model", toy.model, *after)
        assert "0 captioned, 3 skipped (already done)" in err and "somebody" not in err
        _, _, err = capvid("caption", target, "--model", toy.model, *after, "--suffix", " !")
        assert "3 captioned" in err and "somebody" not in err


def test_a_text_belongs_to_capvid_before_it_is_there(
    capvid: Run, toy: Toy, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that starts while another writes, or after it was killed, takes its texts for capvid's."""
    seen = []

    def put(self: Sidecars, video: Path, text: str) -> None:
        write(self, video, text)
        other = Sidecars("txt", str, {"model": "m", "settings": {}}, overwrite=False)
        seen.append((other.is_done(video), len(other.edited)))

    write = Sidecars.put
    monkeypatch.setattr(Sidecars, "put", put)
    early = Sidecars("txt", str, {"model": "m", "settings": {}}, overwrite=False)
    capvid("caption", clips, "--model", toy.model, "--sidecar")
    assert seen == [(False, 0)] * 3
    assert not any(early.is_done(clips / name) for name in ("a.mp4", "b.mp4")) and not early.edited


@pytest.mark.slow
@pytest.mark.parametrize("form", [["--sidecar"], ["--format", "videofolder", "--output-dir", "."]])
def test_two_runs_at_once(toy: Toy, tmp_path: Path, video_files: list[Path], form: list[str]) -> None:
    for number in range(12):
        shutil.copy(video_files[number % 3], tmp_path / f"{number:02}.mp4")
    command = [sys.executable, "-m", "capvid", "caption", ".", "--model", str(toy.model), *form]
    runs = [
        subprocess.Popen(
            [*command, "--batch-size", "1", *more], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        for more in ([], [], ["--suffix", " !"])
    ]
    for run in runs:
        err = run.communicate()[1]
        assert run.returncode == 0 and "somebody" not in err, err
    if "--sidecar" not in form:
        rows = [json.loads(line) for line in (tmp_path / "metadata.jsonl").read_text().splitlines()]
        assert len({row["file_name"] for row in rows}) == len(rows) == 12
    last = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert last.returncode == 0 and "somebody" not in last.stderr


def test_a_link_to_the_metadata_stays_one(capvid: Run, toy: Toy, clips: Path, tmp_path: Path) -> None:
    command = ["caption", clips, "--model", toy.model, "--format", "videofolder", "--output-dir", clips]
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "metadata.jsonl"
    (clips / "metadata.jsonl").symlink_to(target)
    for _ in range(2):
        capvid(*command, "--overwrite")
        assert (clips / "metadata.jsonl").is_symlink() and len(target.read_text().splitlines()) == 3


@pytest.mark.parametrize("form", [["--sidecar"], ["--format", "videofolder", "--output-dir"]])
def test_a_cache_that_cannot_be_made(
    capvid: Run, toy: Toy, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("CAPVID_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    before = contents(clips)
    form = [*form, clips] if form[-1] == "--output-dir" else form
    code, _, err = capvid("caption", clips, "--model", toy.model, *form)
    assert code == 2 and err.count("\n") == 1 and contents(clips) == before
    assert "cannot be written (Not a directory)" in err and "set CAPVID_CACHE" in err


def test_samples_keep_what_they_hold(capvid: Run, toy: Toy, clips: Path, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    own = {
        "json": b'{"url": "https://example.org/a"}',
        "txt": b"an alt text",
        "cls": b"7",
        "left.jpg": b"\xff\xd8",
    }
    hostile = "b\n\u202e\\..\\x"
    with tarfile.open(tmp_path / "clips.tar", "w") as tar:
        for name, data in (
            *((f"s/a.{extension}", data) for extension, data in own.items()),
            ("s/a.mp4", (clips / "a.mp4").read_bytes()),
            ("s/other.json", b"{}"),
            (f"s/{hostile}.mp4", (clips / "b.mp4").read_bytes()),
            ("s/bad.mp4", b"no video"),
            ("s/bad.json", b'{"url": "https://example.org/bad"}'),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    for source, target in ((tmp_path / "clips.tar", "one"), (tmp_path / "one", "two")):
        command = ["caption", source, "--model", toy.model, "--format", "webdataset"]
        command += ["--output-dir", tmp_path / target]
        code, _, err = capvid(*command)
        assert code == (3 if target == "one" else 0), err
        assert "0 captioned" in capvid(*command)[2]
        assert "0 captioned" in capvid(*command, "--retry-failed")[2]
    names, samples = [], {}
    for path in (tmp_path / "one").glob("*.tar"):
        with tarfile.open(path) as tar:
            names += tar.getnames()
        samples |= {
            s["__key__"].rpartition("/")[2]: s for s in webdataset.WebDataset(str(path), shardshuffle=False)
        }
    assert all(name.isprintable() and "\\" not in name for name in names)
    sample = samples["a"]
    assert sample["original.json"] == own["json"] and sample["original.txt"] == own["txt"]
    assert sample["cls"] == own["cls"] and sample["left.jpg"] == own["left.jpg"]
    assert json.loads(sample["json"])["captions"][0]["text"] == sample["txt"].decode()
    assert sample["mp4"] == (clips / "a.mp4").read_bytes()
    assert "bad" in samples and "txt" not in samples["bad"]
    assert len(samples) == 3 and "other" not in samples
