from __future__ import annotations

import runpy
from pathlib import Path

import av
import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CLIP = EXAMPLES / "car.mp4"


def decode_clip(path: Path) -> tuple[list[np.ndarray], list[float]]:
    """Return all frames of a clip and their times in seconds."""
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    return [frame.to_ndarray(format="rgb24") for frame in frames], [float(frame.time) for frame in frames]


def test_clip_is_small_and_streamable() -> None:
    data = CLIP.read_bytes()
    assert len(data) <= 300_000
    assert 0 < data.find(b"moov") < data.find(b"mdat")


@pytest.mark.slow
def test_clip_matches_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "draw_clip.py"))["draw"](tmp_path / "car.mp4")
    (drawn_frames, times), (stored_frames, stored_times) = (
        decode_clip(tmp_path / "car.mp4"),
        decode_clip(CLIP),
    )
    assert times == stored_times and len(times) == 120 and times[-1] == 5.95
    assert drawn_frames[0].shape == stored_frames[0].shape == (240, 320, 3)
    for number in (0, 60, 119):  # encoders differ slightly
        assert np.abs(drawn_frames[number].astype(int) - stored_frames[number]).mean() < 8
    assert np.abs(drawn_frames[0].astype(int) - drawn_frames[119]).mean() > 8
