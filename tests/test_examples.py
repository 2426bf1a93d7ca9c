from __future__ import annotations

import runpy
from pathlib import Path

import av
import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CLIP = EXAMPLES / "car.mp4"


def decoded(path: Path) -> tuple[list[np.ndarray], list[float]]:
    """All pictures of a clip and their times in seconds."""
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    return [frame.to_ndarray(format="rgb24") for frame in frames], [float(frame.time) for frame in frames]


def test_the_clip_is_small_and_can_be_played_as_it_comes() -> None:
    data = CLIP.read_bytes()
    assert len(data) <= 300_000
    assert 0 < data.find(b"moov") < data.find(b"mdat")


@pytest.mark.slow
def test_the_clip_is_what_its_script_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "draw_clip.py"))["draw"](tmp_path / "car.mp4")
    (drawn, times), (kept, kept_times) = decoded(tmp_path / "car.mp4"), decoded(CLIP)
    assert times == kept_times and len(times) == 120 and times[-1] == 5.95
    assert drawn[0].shape == kept[0].shape == (240, 320, 3)
    for number in (0, 60, 119):  # encoders differ a little
        assert np.abs(drawn[number].astype(int) - kept[number]).mean() < 8
    assert np.abs(drawn[0].astype(int) - drawn[119]).mean() > 8
