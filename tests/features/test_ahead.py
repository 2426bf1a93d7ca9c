from __future__ import annotations

import os
from pathlib import Path

import misbehaving
import pytest
from toy import write_video

from capvid.backbones.catalog import backbone_entry
from capvid.errors import VideoError
from capvid.features import prefetch as ahead
from capvid.features.prefetch import DecodeStage, View
from capvid.video.frame_sampling import UniformSampling
from capvid.video.segmentation import parse_segments
from capvid.video.worker_pool import WorkerPool


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_process_that_hangs_or_dies_costs_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(ahead, "decode_video", misbehaving.decode)
    names = ["a", "sleeps", "b", "killed", "c", "crashes", "d", "crashes once", "e"]
    paths = [write_video(tmp_path / f"{name}.mp4", seed=1, frames=3) for name in names]
    views = (View(preprocess=backbone_entry("colour-grid").preprocess),)
    stage = DecodeStage(views=views, sampling=UniformSampling(3), frames=8)
    with WorkerPool(workers, timeout=10) as pool:
        videos = list(stage.videos(pool, paths))
    assert [video.name for video in videos] == names
    failed = {video.name: str(video.error) for video in videos if video.error is not None}
    assert list(failed) == ["sleeps", "killed", "crashes"]
    assert all(isinstance(video.error, VideoError) for video in videos if video.error)
    assert "not decoded within 10 seconds" in failed["sleeps"]
    assert "was ended (SIGKILL)" in failed["killed"] and "was ended (SIGSEGV)" in failed["crashes"]
    assert all(
        video.decoded is not None and len(video.decoded.times) == 3
        for video in videos
        if video.name not in failed
    )


@pytest.mark.slow
def test_a_video_whose_timeline_hangs_is_not_decoded_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "read_timeline", misbehaving.timeline)
    monkeypatch.setattr(ahead, "decode_video", misbehaving.decode)  # which would raise ValueError
    paths = [write_video(tmp_path / f"{name}.mp4", seed=1, frames=3) for name in ("a", "raises")]
    views = (View(preprocess=backbone_entry("colour-grid").preprocess),)
    stage = DecodeStage(views=views, sampling=UniformSampling(3), segmentation=parse_segments("2"), frames=8)
    with WorkerPool(1, timeout=10) as pool:
        videos = list(stage.videos(pool, paths))
    assert [video.error is None for video in videos] == [True, False]
    assert "not decoded within 10 seconds" in str(videos[1].error)
