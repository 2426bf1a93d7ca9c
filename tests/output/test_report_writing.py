from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from report_pages import MODEL, Page, failure, video, written
from test_records import SETTINGS

from capvid.output.report import Report


@pytest.mark.slow
def test_results_are_written_as_they_come(tmp_path: Path) -> None:
    """Beside the page's place, so that it is never there in part; memory does not grow with them."""
    path = tmp_path / "p.html"
    result = video(frames=28)
    tracemalloc.start()
    try:
        with Report(path, model=MODEL, settings=SETTINGS) as report:
            sizes, memory = [], []
            for _ in range(200):
                report.add(result)
                (temporary,) = tmp_path.iterdir()
                assert temporary.name.startswith(".") and not path.exists()
                sizes.append(temporary.stat().st_size)
                memory.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert np.diff(sizes).min() > sum(map(len, result.thumbnails))
    assert max(memory[20:]) - memory[20] < sizes[1] - sizes[0]
    assert list(tmp_path.iterdir()) == [path]
    assert len(Page(path.read_text()).data) == 200


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, BrokenPipeError, SystemExit])
def test_an_interrupted_page_is_whole(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "p.html"
    path.write_text("before")
    with pytest.raises(error), Report(path, model=MODEL, settings=SETTINGS) as report:
        report.add(video())
        report.add(failure())
        report._write("<article>half of one")  # an interrupt may come anywhere
        raise error
    page = Page(path.read_text())
    assert re.fullmatch(r"1 captioned, 1 failed in \d+\.\d s; stopped before the end", page.ids["counts"])
    assert len(page.articles) == 2 and "half of one" not in page.text and len(page.scripts) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_that_nothing_was_added_to_is_thrown_away(tmp_path: Path) -> None:
    path = tmp_path / "p.html"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), Report(path, model=MODEL, settings=SETTINGS):
        raise KeyboardInterrupt
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_page_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "p.html"
    path.write_text("before")
    with pytest.raises(OSError), Report(path, model=MODEL, settings=SETTINGS) as report:
        report.add(video())
        with Path("/dev/full").open("wb") as full:
            os.dup2(full.fileno(), report._stream.fileno())
            report.add(video())
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_kill_leaves_no_page_and_the_next_run_clears_up(tmp_path: Path) -> None:
    path = tmp_path / "p.html"
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\n"
        "from capvid.output.report import Report\n"
        "from report_pages import MODEL, SETTINGS, video\n"
        "with Report(Path(sys.argv[1]), model=MODEL, settings=SETTINGS) as report:\n"
        "    while True:\n"
        "        report.add(video())\n"
        "        print(flush=True)\n"
    )
    support = Path(__file__).parents[1] / "support"
    process = subprocess.Popen(
        [sys.executable, "-c", script, path, support, support.parents[1]], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    for _ in range(5):
        assert process.stdout.readline() == b"\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".p.html.") and left.stat().st_size > 5 * sum(map(len, video().thumbnails))
    written(path, video())
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real.html").touch()
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    written(tmp_path / "link.html", video())
    assert (tmp_path / "link.html").is_symlink() and len(Page((tmp_path / "real.html").read_text()).data) == 1
