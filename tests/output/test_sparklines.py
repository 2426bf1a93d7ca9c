from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_records import looked, result

from capvid.decoding.caption_generator import Caption, WordScore
from capvid.output.report import ASCII, BLOCKS, attention_lines, levels_for
from capvid.output.results import CaptionResult


def with_weights(weights: np.ndarray, *words: str) -> CaptionResult:
    """One caption of ``words`` with weights (words + 1, T) of frames one second apart."""
    scores = tuple(WordScore(word=word, logprob=-1.0) for word in words)
    caption = Caption(text=" ".join(words), logprob=-2.0, words=scores, traces={"attention": weights})
    frames = np.arange(weights.shape[1])
    made = result(captions=(caption,), duration=float(len(frames)))
    segment = replace(made.segments[0], frames=frames)
    return replace(made, segments=(segment,), times=frames.astype(float))


def test_a_word_its_chart_and_its_peak() -> None:
    assert attention_lines(looked(), width=80) == [
        "  a      ▂▄▁▁  1.5s  50%",
        "  dog    ▁▁▂▆  6.3s  70%",
        "  (end)  ▁▁▁█  6.3s 100%",
    ]
    lines = attention_lines(replace(looked(), times=None), width=80, levels=ASCII)
    assert lines[0] == "  a      .=__  frame 2  50%"


def test_the_scale_is_from_nothing_to_the_greatest_weight_of_the_caption() -> None:
    eighths = np.arange(9) / 8
    (line, end) = attention_lines(with_weights(np.stack([eighths, 0 * eighths]), "up"), width=80)
    assert line.split()[1] == "▁▁▂▃▄▅▆▇█"
    assert end.split() == ["(end)", "▁" * 9, "-"]  # nothing was looked at


@pytest.mark.parametrize("width", [10, 40, 60, 80, 200])
def test_lines_fit(width: int) -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(150), 3)
    lines = attention_lines(with_weights(weights, "a", "b" * 40), width=width)
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= max(width, 40)
    if width >= 40:
        assert len(lines[0]) == min(width, 150 + 18 + 6 + len("149.0s   9%"))


def test_neighbours_that_share_a_character_are_averaged() -> None:
    weights = np.zeros((1, 120))
    weights[0, 60:62] = 0.5
    (line,) = attention_lines(with_weights(weights), width=2 + 5 + 2 + 60 + 2 + 10)
    chart = line.split()[1]
    assert chart == "▁" * 30 + "█" + "▁" * 29 and line.endswith("60.0s  50%")


def test_several_captions_are_told_apart() -> None:
    one = looked()
    assert attention_lines(one, width=80, named=True)[0] == "in/v.mp4: a dog"
    caption = one.captions[0]
    two = replace(one.segments[0], captions=(caption, replace(caption, text="the dog")))
    lines = attention_lines(replace(one, captions=two.captions, segments=(two,)), width=80)
    assert [lines[0], lines[4]] == ["in/v.mp4: a dog", "in/v.mp4: the dog"]
    part = replace(one.segments[0], start=2.5, end=7.25)
    lines = attention_lines(replace(one, paragraph=True, segments=(part,)), width=80)
    assert lines[0] == "in/v.mp4 2.5-7.2s: a dog"
    assert attention_lines(replace(one, path=Path("caf\udce9")), width=80, named=True)[0][:7] == "caf\\xe9"


def test_captioners_without_attention_give_no_lines() -> None:
    assert attention_lines(result(duration=1.0), width=80, named=True) == []


@pytest.mark.parametrize(
    ("encoding", "levels"),
    [("utf-8", BLOCKS), ("UTF-8", BLOCKS), ("ascii", ASCII), ("latin-1", ASCII), (None, ASCII), ("?", ASCII)],
)
def test_what_a_stream_can_show(encoding: str | None, levels: str) -> None:
    assert levels_for(encoding) == levels
