from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from capvid.errors import CapvidError, DataError
from capvid.video.frame_sampling import RateSampling, UniformSampling
from capvid.video.segmentation import EqualSegments, frames_within, read_segments

TIMES = np.arange(100) / 10  # 10 s
NOTHING = np.zeros((0, 4))


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_equal_segments_cover_the_video() -> None:
    spans = EqualSegments(3).spans(Path("v.mp4"), NOTHING, TIMES, 10.0)
    assert [start for start, _ in spans] == pytest.approx([0, 10 / 3, 20 / 3]) and spans[-1][1] == 10
    assert all(end == start for (_, end), (start, _) in pairwise(spans))


def test_each_segment_is_sampled_like_a_video() -> None:
    chosen = EqualSegments(2).choose(Path("v.mp4"), TIMES, 10.0, UniformSampling(4))
    first, second = UniformSampling(4).choose(TIMES[:50]), 50 + UniformSampling(4).choose(TIMES[50:])
    assert chosen.tolist() == [*first, *second]
    rate = EqualSegments(2).choose(Path("v.mp4"), TIMES, 10.0, RateSampling(2))
    assert len(rate) == 20


def test_a_picture_stays_whole() -> None:
    assert EqualSegments(4).spans(Path("v.mp4"), NOTHING, np.zeros(1), 0.0) == [(0.0, 0.0)]
    assert EqualSegments(4).choose(Path("v.mp4"), np.zeros(1), 0.0, UniformSampling(4)).tolist() == [0]


def test_more_segments_than_frames() -> None:
    many = EqualSegments(10**12)
    assert len(many.choose(Path("v.mp4"), TIMES, 10.0, UniformSampling(4))) == 4
    with pytest.raises(DataError, match=r"v\.mp4: 1000000000000 segments, but only 100 frames"):
        many.spans(Path("v.mp4"), NOTHING, TIMES, 10.0)


def test_frames_belong_to_the_segment_in_which_they_are_shown() -> None:
    times = np.array([0.0, 1.0, 2.0, 3.0])
    assert frames_within((0.0, 2.0), times, 4.0).tolist() == [0, 1]
    assert frames_within((2.0, 4.0), times, 4.0).tolist() == [2, 3]
    assert frames_within((2.0, 2.9), np.array([0.0, 1.0, 3.2]), 2.9).tolist() == [2]  # the last segment
    assert frames_within((1.2, 1.9), times, 4.0).tolist() == [2]  # none: the nearest to 1.55
    assert frames_within((1.1, 1.4), times, 4.0).tolist() == [1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '[{"start": 4, "end": 9.5}, {"start": 0, "end": 4}]'),
        ("b.json", "[[0, 4], [4, 9.5]]"),
        ("c.csv", "start,end\n4,9.5\n0,4\n"),
        ("d.csv", "0,4\n\n4.0,9.5\n"),
        ("e.tsv", "end\tstart\n4\t0\n9.5\t4\n"),
        ("f.csv", "0:00,00:04\n0:04,00:00:09.5\n"),
        ("g.jsonl", '{"start": 0, "end": 4}\n{"start": 4, "end": 9.5}\n'),
    ],
)
def test_segments_for_every_video(tmp_path: Path, name: str, text: str) -> None:
    found = read_segments(written(tmp_path, name, text))
    assert found.spans(Path("any.mp4"), NOTHING, TIMES, 10.0) == [(0.0, 4.0), (4.0, 9.5)]
    assert found.spec.startswith(f"{name}@") and len(found.spec) == len(name) + 13


SCENES = """\
Timecode List:,00:00:08.900
Scene Number,Start Frame,Start Timecode,Start Time (seconds),End Frame,End Timecode,End Time (seconds),\
Length (frames),Length (timecode),Length (seconds)
1,1,00:00:00.000,0.000,267,00:00:08.900,8.900,267,00:00:08.900,8.900
2,268,00:00:08.900,8.900,310,00:00:10.333,10.333,43,00:00:01.433,1.433
"""  # written by PySceneDetect 0.7.2


@pytest.mark.parametrize("skip_cuts", [False, True])
def test_scenes_of_pyscenedetect(tmp_path: Path, skip_cuts: bool) -> None:
    text = SCENES.split("\n", 1)[1] if skip_cuts else SCENES
    found = read_segments(written(tmp_path, "v-Scenes.csv", text))
    assert found.spans(Path("v.mp4"), NOTHING, TIMES, 10.3) == [(0.0, 8.9), (8.9, 10.3)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"v one": [[0, 4], [3, 8]], "w.mp4": [[0, 1]]}'),
        ("b.json", '{"v one": {"timestamps": [[0, 4], [3, 8]], "sentences": ["a", "b"]},'
                   ' "w": {"timestamps": [[0, 1]]}}'),
        ("c.json", '[{"video": "in/v one.mp4", "segments": [{"start": 0, "end": 4}, {"start": 3, "end": 8}]},'
                   ' {"video": "w.mp4", "status": "ok", "segments": [[0, 1]]}]'),
        ("d.jsonl", '{"id": "v one", "segments": [[0, 4], [3, 8]]}\n{"id": "w", "segments": [[0, 1]]}\n'
                    '{"id": "x", "status": "error", "captions": []}\n'),
        ("e.csv", "video,start,end,caption,logprob\nin/v one.mp4,0,4,a man,-1\n"
                  "in/v one.mp4,3,8,a,-1\nw,0,1,b,-2\n"),
    ],
)  # fmt: skip
def test_segments_by_video(tmp_path: Path, name: str, text: str) -> None:
    found = read_segments(written(tmp_path, name, text))
    assert found.spans(Path("in/v one.mp4"), NOTHING, TIMES, 10.0) == [(0.0, 4.0), (3.0, 8.0)]
    assert found.spans(Path("w.mp4"), NOTHING, TIMES, 10.0) == [(0.0, 1.0)]
    with pytest.raises(DataError, match=r"y\.mp4: .* has no segments for it"):
        found.spans(Path("y.mp4"), NOTHING, TIMES, 10.0)
    assert found.choose(Path("y.mp4"), TIMES, 10.0, UniformSampling(3)).tolist() == [17, 50, 83]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no segments in this file"),
        ("[]", "no segments in this file"),
        ("[[0, 4], [4]]", "segment 2 1: no start and end"),
        ('[{"start": 0, "end": 4}, {"start": 5}]', "segment 2: no start and end"),
        ('{"v": [[0, "x"]]}', "v, segment 1: no start and end"),
        ("[[4, 4]]", "segment 1: from 4 to 4 s"),
        ("[[-1, 4]]", "segment 1: from -1 to 4 s"),
        ("start,end\n0,4\n5,nan\n", "line 3: no start and end"),
        ("start,end\n0,4\n9,5\n", "line 3: from 9 to 5 s"),
        ("[[0, true]]", "no start and end"),
        ('{"v": 3}', "no start and end"),
        ("[[0, 1", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[" * 900 + "]" * 900, "nested|no segments"),
        ("hello\n", "line 1: no start and end"),
    ],
)
def test_what_is_no_segment_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_segments(written(tmp_path, "s", text))
    assert caught.value.remedy


def test_segments_and_the_end_of_the_video(tmp_path: Path) -> None:
    found = read_segments(written(tmp_path, "s.csv", "0,4\n4,99\n"))
    assert found.spans(Path("v.mp4"), NOTHING, TIMES, 10.0) == [(0.0, 4.0), (4.0, 10.0)]
    with pytest.raises(DataError, match=r"a segment from 4 to 99 s, but the video is 3\.500 s long"):
        found.spans(Path("v.mp4"), NOTHING, TIMES[:35], 3.5)
    assert len(found.choose(Path("v.mp4"), TIMES[:35], 3.5, UniformSampling(4))) == 4


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes(b"caf\xe9,0,1\n")
    for name in ("latin.csv", "missing.csv"):
        with pytest.raises(CapvidError, match="cannot be read"):
            read_segments(tmp_path / name)
