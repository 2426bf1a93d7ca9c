from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from capvid.backbones.catalog import BUNDLED as BUNDLED
from capvid.captioners.base import Captioner, build
from capvid.captioners.checkpoint import load_checkpoint
from capvid.decoding.beam_search import decode
from capvid.decoding.caption_generator import Caption
from capvid.decoding.decoding_options import DecodingOptions, Hypothesis
from capvid.decoding.rescoring import Calibration, average_logprobs
from capvid.errors import CheckpointError
from capvid.text.vocabulary import BOS, EOS

WIDTH = 6
CALIBRATION: dict[str, Any] = {
    "average": [0.1, -0.2, 0.3, 0.0, 0.5, -1.0],
    "intercept": 1.0,
    "per_logprob": 2.0,
    "per_information": 0.5,
    "videos": 100,
    "right": 0.3,
    "flagged": 0.4,
    "right_flagged": 0.1,
    "right_others": 0.5,
}
SIZES: dict[str, dict[str, Any]] = {
    "m3": {"embedding": 8, "hidden": 12, "attention": 8, "output": 8, "memory_rows": 3, "memory_width": 4},
    "ham": {"embedding": 8, "hidden": 12, "attention": 8, "memory_width": 6, "bottleneck": 4, "locations": 4},
}


def build_captioner(name: str) -> Captioner:
    torch.manual_seed(0)
    captioner = build(name, {"vocabulary_size": 20, "feature_width": WIDTH, **SIZES[name]}).eval()
    with torch.no_grad():
        for parameter in captioner.parameters():
            parameter.mul_(3)
    return captioner


def stepwise_logprob(captioner: Captioner, frame: torch.Tensor, tokens: list[int]) -> float:
    state, total, word = captioner.encode(frame, torch.ones(1, 1, dtype=torch.bool)), 0.0, BOS
    for following in [*tokens, EOS]:
        logits, state, _ = captioner.step(torch.tensor([word]), state)
        total += logits[0].double().log_softmax(-1)[following].item()
        word = following
    return total


@pytest.mark.parametrize("name", ["m3", "ham"])
@pytest.mark.parametrize("tokens", [[5, 7, 9], [4], []])
def test_average_video_is_one_frame(name: str, tokens: list[int]) -> None:
    captioner = build_captioner(name)
    frame = torch.tensor(CALIBRATION["average"]).view(1, 1, -1)
    if name == "ham":
        frame = frame.view(1, 1, 1, -1).repeat(1, 1, 4, 1)
    with torch.no_grad():
        expected = stepwise_logprob(captioner, frame, tokens)
    assert average_logprobs(captioner, CALIBRATION["average"], [tokens]) == [
        pytest.approx(expected, abs=1e-4)
    ]


@pytest.mark.parametrize("average", [-900.0, -8.0, -6.0, 0.0, 900.0])
def test_confidence_is_a_logistic_curve_of_both_signals(average: float) -> None:
    calibration = Calibration.of({"confidence": CALIBRATION})
    assert calibration is not None
    hypothesis = Hypothesis([5, 7], [-1.0, -2.0, -3.0], 0.0)
    odds = 1.0 + 2.0 * (-6.0 / 3) + 0.5 * (-6.0 - average)
    expected = 1 / (1 + math.exp(min(700, -odds)))
    assert calibration.confidence(hypothesis, average) == pytest.approx(expected, abs=1e-12)
    assert Calibration.of({"confidence": calibration.to_dict()}) == calibration


@pytest.mark.parametrize(("confidence", "low"), [(None, False), (0.199, True), (0.2, False)])
def test_low_confidence_is_flagged(confidence: float | None, low: bool) -> None:
    assert Caption(text="a", logprob=-1.0, words=(), confidence=confidence).low_confidence is low


def test_uncalibrated_checkpoint_has_no_calibration() -> None:
    assert Calibration.of({"epoch": 3}) is None


@pytest.mark.parametrize(
    "damage",
    [
        None,
        [1, 2],
        {},
        {**CALIBRATION, "average": []},
        {**CALIBRATION, "average": None},
        {**CALIBRATION, "average": [0.0, "1"]},
        {**CALIBRATION, "per_logprob": math.nan},
        {**CALIBRATION, "per_logprob": "x"},
        {**CALIBRATION, "more": 1},
        {name: value for name, value in CALIBRATION.items() if name != "intercept"},
    ],
)
def test_damaged_calibration_is_refused(damage: Any) -> None:
    with pytest.raises(CheckpointError, match="calibration is damaged"):
        Calibration.of({"confidence": damage})


def test_calibration_for_other_features_is_refused() -> None:
    with pytest.raises(CheckpointError, match="features of width 5, and it takes 6"):
        average_logprobs(build_captioner("m3"), [1.0] * 5, [[5]])


def test_bundled_captioner_is_unsure_of_the_average_video() -> None:
    checkpoint = load_checkpoint(BUNDLED / "m3")
    calibration = Calibration.of(checkpoint.info)
    assert calibration is not None and calibration.videos == 268
    assert calibration.per_logprob > 0 and calibration.per_information > 0
    frame = torch.tensor(calibration.average).view(1, 1, -1)
    mask = torch.ones(1, 1, dtype=torch.bool)
    best = decode(checkpoint.captioner, frame, mask, DecodingOptions())[0][0]
    (average_logprob,) = average_logprobs(checkpoint.captioner, calibration.average, [best.tokens])
    assert best.logprob == pytest.approx(average_logprob, abs=1e-4)
    assert calibration.confidence(best, average_logprob) < 0.3
