from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from capvid.video.frame_filter import letterbox, useful_frames
from capvid.video.frame_source import VideoInfo
from capvid.video.readers import SampledFrames

HEIGHT, WIDTH = 180, 320


def scenes(count: int, *, height: int = HEIGHT, width: int = WIDTH, seed: int = 0) -> np.ndarray:
    """Pictures (count, height, width, 3) of fields of random colours, 50 to 255, each another one."""
    generator = np.random.default_rng(seed)
    fields = generator.integers(50, 256, (count, 6, 8, 3), dtype=np.uint8)
    rows, columns = np.arange(height) * 6 // height, np.arange(width) * 8 // width
    return fields[:, rows][:, :, columns]


def flat(*colours: tuple[int, int, int]) -> np.ndarray:
    return np.stack([np.full((HEIGHT, WIDTH, 3), colour, np.uint8) for colour in colours])


def noise(frames: np.ndarray, most: int, seed: int = 0) -> np.ndarray:
    """Frames to whose values 0 to ``most`` is added."""
    added = np.random.default_rng(seed).integers(0, most + 1, frames.shape, dtype=np.uint8)
    return np.minimum(frames, 255 - most) + added


def boxed(frames: np.ndarray, top: int, bottom: int, left: int, right: int) -> np.ndarray:
    return np.pad(frames, ((0, 0), (top, bottom), (left, right), (0, 0)))


def test_black_and_flat_frames_are_left_out() -> None:
    one, two = scenes(2)
    black, white, blue = flat((0, 0, 0), (255, 255, 255), (20, 40, 200))
    frames = np.stack([black, one, white, two, blue, black])
    assert useful_frames(frames).tolist() == [1, 3]
    assert useful_frames(noise(frames, 8)).tolist() == [1, 3]


def test_colours_of_equal_brightness_are_no_flat_picture() -> None:
    frames = flat((255, 0, 0), (255, 0, 0))
    frames[1, :, 100:200] = 255, 255, 0
    assert useful_frames(frames).tolist() == [1]


def test_only_the_end_of_a_fade_is_left_out() -> None:
    strengths = np.array([1, 0.75, 0.5, 0.25, 0.1, 0.02, 0])
    frames = (scenes(1) * strengths[:, None, None, None]).astype(np.uint8)
    assert useful_frames(frames).tolist() == [0, 1, 2, 3, 4]


def test_held_stills_are_kept_once() -> None:
    one, two = scenes(2)
    frames = np.stack([one, one, one, two, two, one])
    assert useful_frames(frames).tolist() == [0, 3, 5]
    grain = np.stack([noise(frame, 1, seed) for seed, frame in enumerate(frames)])
    assert useful_frames(grain).tolist() == [0, 3, 5]


def test_a_still_after_a_fade_is_compared_with_the_last_kept() -> None:
    one, black = scenes(1)[0], flat((0, 0, 0))[0]
    assert useful_frames(np.stack([one, black, one, black])).tolist() == [0]


def test_slow_motion_is_kept() -> None:
    wide = scenes(1, width=WIDTH + 120)[0]
    pan = np.stack([wide[:, 6 * number : 6 * number + WIDTH] for number in range(20)])
    assert useful_frames(pan).tolist() == list(range(20))
    walker = scenes(1).repeat(20, axis=0)  # a small thing that crosses a still picture
    for number, frame in enumerate(walker):
        frame[100:120, 5 * number : 5 * number + 20] = 0
    assert useful_frames(walker).tolist() == list(range(20))


def test_what_is_below_the_threshold_adds_up() -> None:
    wide = scenes(1, width=WIDTH)[0].astype(np.int16)
    brighter = np.stack([(wide * 0.8 + 0.4 * number).astype(np.uint8) for number in range(10)])
    kept = useful_frames(brighter)
    assert 2 <= len(kept) < 10 and kept[0] == 0


def test_a_dark_scene_in_a_letterbox_is_not_black() -> None:
    frames = boxed((scenes(4) * 0.12).astype(np.uint8), 30, 30, 0, 0)
    assert useful_frames(frames).tolist() == [0, 1, 2, 3]
    lamp = flat((3, 3, 6)).copy()
    lamp[0, 80:100, 150:185] = 90  # a lit window in the night
    assert useful_frames(np.concatenate([flat((0, 0, 0)), lamp])).tolist() == [1]


def test_a_flat_picture_in_a_letterbox_is_left_out() -> None:
    frames = boxed(np.concatenate([scenes(3), flat((255, 255, 255))]), 30, 30, 0, 0)
    assert useful_frames(frames).tolist() == [0, 1, 2]


def test_one_frame_is_always_kept() -> None:
    colours = flat((0, 0, 0), (200, 0, 0), (0, 0, 0))
    assert useful_frames(colours).tolist() == [0]
    varied = colours.copy()
    varied[1] = noise(varied[1], 6)
    assert useful_frames(varied).tolist() == [1]
    assert useful_frames(scenes(1).repeat(5, axis=0)).tolist() == [0]
    assert useful_frames(np.zeros((3, 1, 1, 3), np.uint8)).tolist() == [0]
    with pytest.raises(ValueError, match="no frames"):
        useful_frames(np.zeros((0, 4, 4, 3), np.uint8))


@pytest.mark.parametrize(
    "borders", [(22, 22, 0, 0), (0, 0, 40, 40), (21, 23, 7, 8), (1, 1, 0, 0), (0, 12, 0, 0), (0, 0, 30, 0)]
)
@pytest.mark.parametrize("grain", [0, 20])
def test_borders_are_found(borders: tuple[int, int, int, int], grain: int) -> None:
    assert letterbox(noise(boxed(scenes(3), *borders), grain)) == borders


def test_no_borders() -> None:
    assert letterbox(scenes(3)) == (0, 0, 0, 0)
    assert letterbox(boxed(scenes(3), 0, 3, 5, 0)) == (0, 0, 0, 0)  # narrow, and on one side only
    assert letterbox(flat((0, 0, 0), (0, 0, 0))) == (0, 0, 0, 0)
    assert letterbox(np.zeros((1, 1, 1, 3), np.uint8)) == (0, 0, 0, 0)


def test_borders_are_black_in_every_useful_frame() -> None:
    frames = boxed(scenes(4), 20, 20, 0, 0)
    subtitled = frames.copy()
    subtitled[2, 203:211, 100:220] = 255  # one line of text at the bottom of one frame
    assert letterbox(subtitled)[1] < 20
    black_and_white = np.concatenate([frames, np.zeros_like(frames[:1]), np.full_like(frames[:1], 255)])
    assert letterbox(black_and_white) == (20, 20, 0, 0)


def test_dark_pictures_are_not_cut() -> None:
    night = np.zeros((4, HEIGHT, WIDTH, 3), np.uint8)
    rows = np.clip(np.arange(HEIGHT) - 40, 0, None)  # the sky is black, and grey towards the ground
    night[:] = (rows * 0.9).astype(np.uint8)[:, None, None]
    assert letterbox(night) == (0, 0, 0, 0)
    lamps = np.zeros((4, HEIGHT, WIDTH, 3), np.uint8)
    for number, frame in enumerate(lamps):
        frame[60:120, 90 + 20 * number : 130 + 20 * number] = 220  # someone in the light, all else is dark
    assert letterbox(lamps) == (0, 0, 0, 0)


def test_darkness_at_one_of_two_equal_borders() -> None:
    shade = np.clip(np.arange(HEIGHT) / 150, 0, 1)  # the ceiling is black, and less so downwards
    frames = boxed((scenes(3) * shade[:, None, None]).astype(np.uint8), 24, 24, 0, 0)
    assert letterbox(frames) == (24, 24, 0, 0)


def test_borders_are_cut_up_to_a_limit() -> None:
    upright = boxed(scenes(3, width=100), 0, 0, 110, 110)
    assert letterbox(upright) == (0, 0, 64, 64)  # 40 % of 320
    assert letterbox(boxed(scenes(3, width=100), 0, 0, 165, 55)) == (0, 0, 96, 32)


def test_a_cleaned_sample() -> None:
    one, two = scenes(2)
    info = VideoInfo(
        path=Path("v.mp4"),
        reader="decord",
        codec="h264",
        width=WIDTH,
        height=HEIGHT,
        num_frames=9,
        duration=9.0,
        fps=1.0,
    )
    times = np.arange(4) * 2.0
    sampled = SampledFrames(frames=np.stack([one * 0, one, one, two]), times=times, info=info)
    kept = sampled.take(useful_frames(sampled.frames))
    assert kept.times.tolist() == [2.0, 6.0]
    assert (kept.frames == np.stack([one, two])).all()
    assert kept.info is info
