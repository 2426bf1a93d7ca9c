"""Captions do not depend on the device, and decoding never leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_device import FAKE_DEVICE, FakeDeviceTensor, fake_device, to_fake_device
from torch import Tensor
from variants import VARIANTS, all_real, clip, make

from capvid.captioners.base import Captioner
from capvid.decoding.beam_search import decode, decode_paragraphs
from capvid.decoding.decoding_options import DecodingOptions, Hypothesis
from capvid.decoding.rescoring import rescore

OPTIONS = {
    "beams": DecodingOptions(
        beam_size=3, num_captions=2, max_length=4, min_length=2, no_repeat_ngram=2, no_repeat_words=True
    ),
    "specificity": DecodingOptions(beam_size=2, num_captions=2, max_length=3, specificity=0.5),
    "samples": DecodingOptions(num_captions=2, max_length=4, temperature=0.8, top_p=0.9),
}
MAIN = {
    kind: variant for variant, (kind, _) in reversed(VARIANTS.items())
}.values()  # one variant of each captioner


def build_captioner(variant: str) -> Captioner:
    """Return a captioner that can rank by specificity and has function words."""
    captioner = make(variant, standardise=True)
    captioner.function_words = (5, 6)
    return captioner


def to_plain(hypotheses: Any) -> Any:
    """Convert hypotheses, in lists of any depth, to plain numbers."""
    if isinstance(hypotheses, Hypothesis):
        assert hypotheses.trace is None or not any(
            isinstance(tensor, FakeDeviceTensor) for tensor in hypotheses.trace.values()
        )
        trace = {name: tensor.tolist() for name, tensor in (hypotheses.trace or {}).items()}
        return {**vars(replace(hypotheses, trace=None)), "trace": trace}
    return [to_plain(item) for item in hypotheses]


def assert_close(actual: Any, expected: Any) -> None:
    """Assert equal tokens, and equal numbers up to rounding."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        expected, actual = list(expected.values()), list(actual.values())
    if isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-9, abs=1e-9)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for left, right in zip(actual, expected, strict=True):
            assert_close(left, right)
    else:
        assert actual == expected


def decode_and_rescore(captioner: Captioner, inputs: Sequence[Tensor], options: DecodingOptions) -> Any:
    """Return the decoded hypotheses and the same after rescoring."""
    hypotheses = decode(captioner, *inputs, options)
    return to_plain([hypotheses, rescore(captioner, *inputs, hypotheses, trace=True)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "options_name"),
    [
        (variant, options_name)
        for variant in MAIN
        for options_name in OPTIONS
        if options_name != "specificity" or not make(variant).paragraphs
    ],
)
def test_captions_are_the_same_on_another_device(variant: str, options_name: str) -> None:
    cpu_captioner, device_captioner = build_captioner(variant), build_captioner(variant)
    features, mask = clip(cpu_captioner, 2, 4), all_real(2, 4)
    mask[1, 2:] = False
    expected = decode_and_rescore(cpu_captioner, (features, mask), OPTIONS[options_name])
    with fake_device():
        actual = decode_and_rescore(
            device_captioner.to(FAKE_DEVICE),
            (features.to(FAKE_DEVICE), mask.to(FAKE_DEVICE)),
            OPTIONS[options_name],
        )
    assert_close(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in MAIN if make(name).paragraphs])
def test_paragraphs_are_the_same_on_another_device(variant: str) -> None:
    cpu_captioner, device_captioner = build_captioner(variant), build_captioner(variant)
    features, mask, segments = clip(cpu_captioner, 3, 3, 4), all_real(3, 3, 4), torch.tensor([1, 3, 2])
    expected = to_plain(decode_paragraphs(cpu_captioner, features, mask, segments, OPTIONS["beams"]))
    with fake_device():
        inputs = (features.to(FAKE_DEVICE), mask.to(FAKE_DEVICE), segments.to(FAKE_DEVICE))
        actual = to_plain(decode_paragraphs(device_captioner.to(FAKE_DEVICE), *inputs, OPTIONS["beams"]))
    assert_close(actual, expected)


def test_devices_do_not_mix() -> None:
    """Check the fake device, on which this module relies."""
    with fake_device():
        tensor = torch.ones(3, device=FAKE_DEVICE)
        assert tensor.device == FAKE_DEVICE and isinstance(tensor + 1, FakeDeviceTensor)
        assert not isinstance(tensor.cpu(), FakeDeviceTensor)
        assert (tensor * torch.tensor(2.0)).tolist() == [2.0] * 3
        assert tensor[torch.tensor([0, 1])].shape == (2,)
        for mixed_operation in (
            lambda: tensor + torch.ones(3),
            lambda: torch.ones(3)[to_fake_device(torch.tensor([0]))],
            lambda: tensor.gather(0, torch.tensor([0])),
            lambda: torch.cat([tensor, torch.ones(3)]),
        ):
            with pytest.raises(RuntimeError, match="two devices"):
                mixed_operation()
