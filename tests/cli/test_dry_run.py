"""``--dry-run`` lists what a command would do, and writes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from toy import Run, Toy


@pytest.fixture
def clips(tmp_path: Path, video_files: list[Path], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copy videos into the current folder; return their relative paths."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAPVID_CACHE", str(tmp_path / "cache"))
    Path("clips").mkdir()
    names = [f"clips/{name}.mp4" for name in "abc"]
    for name, video in zip(names, video_files, strict=False):
        shutil.copy(video, name)
    return names


def contents() -> dict[str, tuple[int, bytes]]:
    """Return each file with its time and bytes, and each folder."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in Path().rglob("*")
        if "cache" not in path.parts
    }


@pytest.mark.parametrize(
    ("options", "outputs"),
    [
        (["--output-dir", "out"], ["out/a.txt", "out/b.txt", "out/c.txt"]),
        (["--sidecar"], ["clips/a.txt", "clips/b.txt", "clips/c.txt"]),
        (["--output-dir", "clips", "--format", "videofolder"], None),
        (["--output-dir", "out", "--videos-per-file", 2], None),
        (["--output-dir", "out", "--report", "page.html"], ["out/a.txt", "out/b.txt", "out/c.txt"]),
    ],
    ids=["folder", "sidecar", "videofolder", "shards", "report"],
)
def test_caption(
    capvid: Run, toy: Toy, clips: list[str], options: list[object], outputs: list[str] | None
) -> None:
    command = ["caption", "--model", toy.model, *options]
    ends = [f"\t{output}" for output in outputs] if outputs else ["", "", ""]
    plan = "".join(f"todo\t{clip}{end}\n" for clip, end in zip(clips, ends, strict=True))
    before = contents()
    assert capvid(*command, "clips", "--dry-run") == (0, plan, "3 to caption\n")
    assert contents() == before
    capvid(*command, *clips[:2])
    before = contents()
    plan = plan.replace("todo", "done", 2)
    summary = "1 to caption, 2 skipped (already done)\n"
    assert capvid(*command, "clips", "--dry-run") == (0, plan, summary)
    code, out, err = capvid(*command, *clips, "gone.mp4", "--dry-run")
    assert (code, len(out.splitlines())) == (3, 3) and err.startswith("error: gone.mp4: no such file; check")
    assert capvid(*command, "clips", "--dry-run", "--overwrite")[1] == plan.replace("done", "todo")
    assert contents() == before


def test_failed_videos_stay_in_their_shards(capvid: Run, toy: Toy, clips: list[str]) -> None:
    Path(clips[1]).write_text("no video")
    command = ["caption", "clips", "--model", toy.model, "--output-dir", "out", "--videos-per-file", 3]
    capvid(*command)
    before = contents()
    code, out, _ = capvid(*command, "--retry-failed", "--dry-run")
    assert (code, out) == (0, f"done\t{clips[0]}\ntodo\t{clips[1]}\ndone\t{clips[2]}\n")
    assert contents() == before


def test_caption_to_stdout_or_one_file(capvid: Run, clips: list[str]) -> None:
    """The captioner need not be there: nothing can be done already."""
    for options in ([], ["-o", "captions.jsonl"], ["--output-dir", "new/folder"]):
        code, out, err = capvid("caption", "clips", "--model", "missing-run", *options, "--dry-run")
        assert (code, [line.split("\t")[:2] for line in out.splitlines()], err) == (
            0,
            [["todo", clip] for clip in clips],
            "3 to caption\n",
        )
    assert list(Path().iterdir()) == [Path("clips")]
    assert capvid("caption", "gone.mp4", "--dry-run")[0] == 1


def test_extract(capvid: Run, toy: Toy, clips: list[str]) -> None:
    command = ["extract", "--backbone", "toy", "--frames", 4, "-o", "features"]
    plan = "".join(f"todo\t{clip}\tfeatures/{Path(clip).stem}.safetensors\n" for clip in clips)
    before = contents()
    assert capvid(*command, "clips", "--dry-run") == (0, plan, "3 to extract\n")
    assert contents() == before
    capvid(*command, clips[0])
    before = contents()
    plan = plan.replace("todo", "done", 1)
    summary = "2 to extract, 1 skipped (already done)\n"
    assert capvid(*command, "clips", "--dry-run") == (0, plan, summary)
    assert capvid(*command[:-4], "--frames", 5, "-o", "features", "clips", "--dry-run")[2] == "3 to extract\n"
    assert contents() == before
