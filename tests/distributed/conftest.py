"""A captioner that needs no network to look at pictures, and many short videos."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from toy import bad_files, capvid, save_toy_captioner, toy, toy_files, video_files, write_video

__all__ = ["bad_files", "capvid", "toy", "toy_files", "video_files"]

KINDS = 12  # different videos, of which the others are copies


@pytest.fixture(scope="session")
def quick_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A captioner with random weights that looks at the colours of pictures."""
    folder = tmp_path_factory.mktemp("quick") / "run"
    save_toy_captioner(folder, backbone="colour-grid")
    return folder


@pytest.fixture(scope="session")
def many_videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 160 short videos, of which 20 are broken."""
    folder = tmp_path_factory.mktemp("many") / "clips"
    kinds = [write_video(folder.parent / f"{n}.mp4", seed=n, frames=4 + n) for n in range(KINDS)]
    for number in range(140):
        path = folder / f"{number % 7}" / f"clip {number:03}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(kinds[number % KINDS], path)
    for number in range(20):
        path = folder / "broken" / f"{number:02}.mp4"
        path.parent.mkdir(exist_ok=True)
        whole = kinds[number % KINDS].read_bytes()
        path.write_bytes([b"", b"no video at all\n" * 50, whole[:200], whole[-200:]][number % 4])
    return folder
