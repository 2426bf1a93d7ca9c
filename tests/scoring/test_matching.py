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
def test_paths_and_ids(predicted: str, video: str) -> None:
    found = match_ids([predicted], [video, "other"])
    assert found.videos == {video: predicted}
    assert not found.extra


def test_the_same_id_comes_first() -> None:
    found = match_ids(["a/v.mp4", "v", "w"], ["v", "x"])
    assert found.videos == {"v": "v"}
    assert found.extra == ["w", "a/v.mp4"] or found.extra == ["a/v.mp4", "w"]
    found = match_ids(["b/v.mp4", "a/v.mp4"], ["a/v", "b/v"])
    assert found.videos == {"a/v": "a/v.mp4", "b/v": "b/v.mp4"}
    assert not found.ambiguous


def test_names_that_fit_several() -> None:
    found = match_ids(["a/v.mp4", "b/v.mp4"], ["v"])
    assert not found.videos
    assert sorted(found.extra) == sorted(found.ambiguous) == ["a/v.mp4", "b/v.mp4"]
    found = match_ids(["v.mp4"], ["a/v", "b/v"])
    assert not found.videos
    assert found.ambiguous == found.extra == ["v.mp4"]
    found = match_ids(["a/v.mp4", "c/v.mp4"], ["a/v", "b/v"])
    assert found.videos == {"a/v": "a/v.mp4"}  # the other is not b/v because only that is left
    assert found.ambiguous == found.extra == ["c/v.mp4"]


def test_aliases() -> None:
    found = match_ids(["x/clip_1_2.avi"], ["vid1"], {"clip_1_2": "vid1", "clip_2_3": "vid2"})
    assert found.videos == {"vid1": "x/clip_1_2.avi"}
    assert match_ids(["clip_2_3"], ["vid1"], {"clip_2_3": "vid2"}).extra == ["clip_2_3"]


def test_ids_of_activitynet() -> None:
    assert is_activitynet(["x", "v_bXdq2zI1Ms0"])
    assert not is_activitynet(["v_abcdefghi", "xHr8X2Wpmno"])
    assert activitynet_id("bXdq2zI1Ms0") == activitynet_id("v_bXdq2zI1Ms0") == "v_bXdq2zI1Ms0"
