"""The page of a comparison in a browser, with 5 systems and 700 videos."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from make_video import write_video
from test_report_browser import Browser, all_of, pytestmark, resize, started
from toy import Run, capvid

__all__ = ["capvid", "pytestmark", "started"]

WORDS = ["a", "man", "dog", "runs", "talks", "in", "the", "park", "plays", "ball", "two", "children"]
SYSTEMS = ["first", "a-system-with-a-long-name-without-spaces-" * 2, "third", "fourth", "fifth"]


@pytest.fixture
def page(tmp_path: Path, capvid: Run) -> Path:
    draw = random.Random(0)
    videos = [f"video{n}" for n in range(700)]
    captions = {
        name: {video: " ".join(draw.choices(WORDS, k=draw.randint(4, 12))) for video in videos}
        for name in SYSTEMS
    }
    references = {
        video: [captions[draw.choice(SYSTEMS)][video], " ".join(draw.choices(WORDS, k=8))] for video in videos
    }
    for name, texts in {**captions, "references": references}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(texts))
    (tmp_path / "clips").mkdir()
    clip = write_video(tmp_path / "clip.mp4", frames=8) or tmp_path / "clip.mp4"
    for video in videos[::2]:
        shutil.copyfile(clip, tmp_path / "clips" / f"{video}.mp4")
    first, *others = (tmp_path / f"{name}.json" for name in SYSTEMS)
    command = ["score", first, tmp_path / "references.json", "--metrics", "cider"]
    for other in others:
        command += ["--compare", other]
    path = tmp_path / "page.html"
    code, _, err = capvid(*command, "--report", path, "--videos", tmp_path / "clips")
    assert code == 0, err
    return path


def test_page_fits_wide_and_narrow_screens(started: Browser, page: Path) -> None:
    for width in (1280, 390):
        resize(started, width)
        started.get(page.as_uri())
        assert started.execute_script("return document.documentElement.scrollWidth") <= width
        assert len(all_of(started, "article")) == 100
        assert len(all_of(started, "article:first-of-type dl div")) == len(SYSTEMS)
        assert len(all_of(started, ".systems dd")) == len(SYSTEMS)
        images = all_of(started, "article:has(img) img")
        assert images and len(images) % 4 == 0
        started.execute_script("arguments[0].scrollIntoView()", images[0])
        assert images[0].size["width"] > 60
        summary = all_of(started, "summary")[0]
        started.execute_script("arguments[0].scrollIntoView({block: 'center'})", summary)
        summary.click()
        assert all_of(started, "details[open] li")[0].is_displayed()
    assert [line for line in started.get_log("browser") if "Canvas2D" not in line["message"]] == []
