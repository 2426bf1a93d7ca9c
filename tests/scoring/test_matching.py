from __future__ import annotations

import pytest

from capvid.scoring.predictions import activitynet_id, is_activitynet, match_ids


@pytest.mark.parametrize(
    ("predicted", "video"),
    [
        ("video7", "video7"),
        ("video7.mp4", "video7"),
        ("a/b/video7.mp4", "video7"),
        ("a\\b\\video7.mp4", "video7"),
        ("a/b/video7", "video7"),
        ("a/video7.mp4", "a/video7"),
        ("elsewhere/video7.mp4", "a/video7"),
        ("video7.mp4", "a/video7.avi"),
        ("a/v.1.mp4", "v.1"),
        ("v.1", "v.1"),
        ("7", "7"),
    ],
)
def test_paths_match_ids(predicted: str, video: str) -> None:
    matches = match_ids([predicted], [video, "other"])
    assert matches.videos == {video: predicted}
    assert not matches.extra


def test_exact_id_is_matched_first() -> None:
    matches = match_ids(["a/v.mp4", "v", "w"], ["v", "x"])
    assert matches.videos == {"v": "v"}
    assert matches.extra == ["w", "a/v.mp4"] or matches.extra == ["a/v.mp4", "w"]
    matches = match_ids(["b/v.mp4", "a/v.mp4"], ["a/v", "b/v"])
    assert matches.videos == {"a/v": "a/v.mp4", "b/v": "b/v.mp4"}
    assert not matches.ambiguous


def test_ambiguous_names_are_not_matched() -> None:
    matches = match_ids(["a/v.mp4", "b/v.mp4"], ["v"])
    assert not matches.videos
    assert sorted(matches.extra) == sorted(matches.ambiguous) == ["a/v.mp4", "b/v.mp4"]
    matches = match_ids(["v.mp4"], ["a/v", "b/v"])
    assert not matches.videos
    assert matches.ambiguous == matches.extra == ["v.mp4"]
    matches = match_ids(["a/v.mp4", "c/v.mp4"], ["a/v", "b/v"])
    assert matches.videos == {"a/v": "a/v.mp4"}  # the other is not b/v because only that is left
    assert matches.ambiguous == matches.extra == ["c/v.mp4"]


def test_aliases_match_their_videos() -> None:
    matches = match_ids(["x/clip_1_2.avi"], ["vid1"], {"clip_1_2": "vid1", "clip_2_3": "vid2"})
    assert matches.videos == {"vid1": "x/clip_1_2.avi"}
    assert match_ids(["clip_2_3"], ["vid1"], {"clip_2_3": "vid2"}).extra == ["clip_2_3"]


def test_activitynet_ids_are_recognized_and_prefixed() -> None:
    assert is_activitynet(["x", "v_bXdq2zI1Ms0"])
    assert not is_activitynet(["v_abcdefghi", "xHr8X2Wpmno"])
    assert activitynet_id("bXdq2zI1Ms0") == activitynet_id("v_bXdq2zI1Ms0") == "v_bXdq2zI1Ms0"
