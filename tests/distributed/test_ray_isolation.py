"""A bad input on Ray costs no more than itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy import write_video
from webdataset_reader import read_webdataset

from capvid.backbones.backbone import load_backbone
from capvid.features.extraction import extract
from capvid.output.shards import Row, ShardFolder, WebDataset, features_row
from capvid.video.frame_sampling import UniformSampling

SUPPORT = Path(__file__).parents[1] / "support"

pytest.importorskip("ray")


def test_a_row_that_cannot_be_encoded_costs_its_video(tmp_path: Path) -> None:
    from ray_failing_job import FailingWebDataset

    from capvid.distributed.ray_engine import Writing, pack, unpack

    clip = write_video(tmp_path / "clip.mp4", seed=0)
    (result,) = extract(clip, "colour-grid", UniformSampling(2))
    folder = ShardFolder(str(tmp_path), kind="features", form=FailingWebDataset(), head={})
    folder.begin(overwrite=False)
    rows = [
        Row(video=name, key=name, record={"video": name, "status": "ok"}, features=result.features)
        for name in ("a", "odd", "c")
    ]
    counted = list(unpack(Writing(folder, os.getcwd())(pack(rows))))  # noqa: PTH109
    assert all(isinstance(each, Row) and not each.record and each.features is None for each in counted)
    assert [each.error is None for each in counted] == [True, False, True]
    assert str(counted[1].error).startswith("odd: internal error: ValueError: boom; please report")
    assert counted[1].trace.startswith("Traceback")
    assert len(folder.shards()) == 1 and len(folder.done()) == 3 and len(folder.done(retry_failed=True)) == 2


@pytest.mark.slow
def test_bad_videos_leave_their_neighbours_alone(tmp_path: Path) -> None:
    names = ("a", "bad", "c", "odd", "e")
    paths = [write_video(tmp_path / f"{name}.mp4", seed=n) for n, name in enumerate(names)]
    command = [sys.executable, str(SUPPORT / "ray_failing_job.py"), str(tmp_path / "out")]
    path = os.pathsep.join([*sys.path, str(SUPPORT)])
    done = subprocess.run(
        [*command, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    counted = {
        Path(video).stem: (error, trace) for video, error, trace in map(json.loads, done.stdout.splitlines())
    }
    assert set(counted) == set(names)
    for name, (error, trace) in counted.items():
        if name in ("bad", "odd"):
            assert f"{name}.mp4: internal error: ValueError: boom; please report" in error
            assert 'raise ValueError("boom")' in trace
        else:
            assert (error, trace) == (None, "")

    backbone = load_backbone("colour-grid")
    expected = [features_row(result) for result in extract(paths, [backbone], UniformSampling(4))]
    found = {}
    for shard in (tmp_path / "out").glob("*.tar"):
        for record, features in read_webdataset(shard.read_bytes()):
            found[Path(record["video"]).stem] = (record["status"], features)
    for name, row in zip(names, expected, strict=True):
        status, features = found[name]
        assert status == ("error" if name in ("bad", "odd") else "ok")
        if features is not None:
            ((_, whole),) = read_webdataset(WebDataset().encode([row]))
            assert whole is not None
            assert (features.streams[0] == whole.streams[0]).all()
