from __future__ import annotations

import re
from pathlib import Path

import pytest
from make_video import turn, write_numbers
from toy import Run, Toy

from capvid.features.feature_file import load_header


def test_info_lists_the_sampled_frames(capvid: Run, video_files: list[Path]) -> None:
    code, out, err = capvid("info", video_files[4], "--sampling", "uniform:4")
    assert (code, err) == (0, "")
    assert re.search(r"^reader: +pyav \(default\)$", out, re.M)
    assert re.search(r"^size: +64 x 48$", out, re.M)
    assert "rotation:" not in out and "lost:" not in out
    assert re.search(r"^duration: +1\.900 s$", out, re.M)
    assert re.search(r"^frames: +19 \(10\.000 per second", out, re.M)
    sampled = re.findall(r"frame +(\d+) +at (\d+\.\d+) s", out)
    # the quarters of 1.9 s are centred at 0.2375, 0.7125, 1.1875 and 1.6625 s; frames are 0.1 s apart
    assert [int(frame) for frame, _ in sampled] == [2, 7, 12, 17]
    assert [float(time) for _, time in sampled] == pytest.approx([0.2, 0.7, 1.2, 1.7])


def test_info_reports_rotation_and_lost_frames(capvid: Run, tmp_path: Path) -> None:
    path = turn(write_numbers(tmp_path / "v.mp4", "mpeg4", container={"movflags": "faststart"}), 90)
    _, out, _ = capvid("info", path)
    assert re.search(r"^size: +64 x 96$", out, re.M)
    assert re.search(r"^rotation: +turned by 90 degrees clockwise$", out, re.M)
    path.write_bytes(path.read_bytes()[:-2000])
    code, out, err = capvid("info", path)
    assert (code, err) == (0, "")
    assert re.search(r"^reader: +pyav \(the file is damaged\)$", out, re.M)
    frames, lost = (int(re.search(rf"^{name}: +(\d+)", out, re.M)[1]) for name in ("frames", "lost"))  # type: ignore[index]
    assert lost > 0 and frames + lost == 120


@pytest.mark.shared
def test_info_reports_what_differs_from_the_stored_frames(capvid: Run, shared_data: Path) -> None:
    for name, line in {
        "mediabunny__sar_2x1.mp4": r"pixels: +2:1, made square",
        "media__sample_rotate_and_reflect.mp4": r"mirrored: +top to bottom, before any rotation",
        "format-corpus__hdv-720p60.mov": r"aperture: +1248 x 702 of the stored frame, not applied",
        "media__sample_with_av1c.mp4": r"color: +HLG BT.2020, peak 1000 cd/m2, converted to BT.709 SDR",
    }.items():
        code, out, _ = capvid("info", shared_data / "media" / name)
        assert code == 0 and re.search(f"^{line}$", out, re.M), out


@pytest.mark.parametrize("kind", ["text", "empty", "missing"])
def test_unreadable_video_prints_one_error_line(capvid: Run, bad_files: dict[str, Path], kind: str) -> None:
    code, out, err = capvid("info", bad_files[kind])
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {bad_files[kind]}: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("reader", ["pyav", "decord"])
def test_reader_option_selects_the_reader(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path, reader: str
) -> None:
    code, out, _ = capvid("info", video_files[4], "--reader", reader)
    assert code == 0 and re.search(rf"^reader: +{reader} \(requested\)$", out, re.M)
    code, _, err = capvid(
        "extract", video_files[4], "--backbone", "colour-grid", "-o", tmp_path, "--reader", reader
    )
    assert code == 0, err
    assert load_header(tmp_path / f"{video_files[4].stem}.safetensors").reader == reader
    captions = [
        capvid("caption", video_files[4], "--model", toy.model, *options)[:2]
        for options in ((), ("--reader", reader))
    ]
    assert captions[0] == captions[1] and captions[0][0] == 0


def test_unknown_reader_is_refused(capvid: Run, video_files: list[Path]) -> None:
    for command in ("info", "caption", "extract"):
        code, out, err = capvid(command, video_files[4], "--reader", "vlc")
        assert (code, out) == (2, "") and "'vlc' is not one of 'auto', 'pyav', 'decord'" in err
