"""What is said does not depend on the device, and nothing leaves it on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from elsewhere import ELSEWHERE, Far, elsewhere, moved
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
MAIN = {kind: variant for variant, (kind, _) in reversed(VARIANTS.items())}.values()  # one of each kind


def made(variant: str) -> Captioner:
    """A captioner that can rank by specificity, and knows words that it may repeat."""
    captioner = make(variant, standardise=True)
    captioner.function_words = (5, 6)
    return captioner


def told(found: Any) -> Any:
    """Hypotheses, in lists of any depth, as numbers."""
    if isinstance(found, Hypothesis):
        assert found.trace is None or not any(isinstance(seen, Far) for seen in found.trace.values())
        trace = {name: seen.tolist() for name, seen in (found.trace or {}).items()}
        return {**vars(replace(found, trace=None)), "trace": trace}
    return [told(each) for each in found]


def alike(found: Any, expected: Any) -> None:
    """The same tokens, and the same numbers but for rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        expected, found = list(expected.values()), list(found.values())
    if isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            alike(one, other)
    else:
        assert found == expected


def said(captioner: Captioner, given: Sequence[Tensor], options: DecodingOptions) -> Any:
    """Sentences of videos of two lengths, and the same followed."""
    found = decode(captioner, *given, options)
    return told([found, rescore(captioner, *given, found, trace=True)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "how"),
    [
        (variant, how)
        for variant in MAIN
        for how in OPTIONS
        if how != "specificity" or not make(variant).paragraphs
    ],
)
def test_sentences(variant: str, how: str) -> None:
    near, far = made(variant), made(variant)
    features, mask = clip(near, 2, 4), all_real(2, 4)
    mask[1, 2:] = False
    expected = said(near, (features, mask), OPTIONS[how])
    with elsewhere():
        found = said(far.to(ELSEWHERE), (features.to(ELSEWHERE), mask.to(ELSEWHERE)), OPTIONS[how])
    alike(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in MAIN if make(name).paragraphs])
def test_paragraphs(variant: str) -> None:
    near, far = made(variant), made(variant)
    features, mask, segments = clip(near, 3, 3, 4), all_real(3, 3, 4), torch.tensor([1, 3, 2])
    expected = told(decode_paragraphs(near, features, mask, segments, OPTIONS["beams"]))
    with elsewhere():
        given = (features.to(ELSEWHERE), mask.to(ELSEWHERE), segments.to(ELSEWHERE))
        found = told(decode_paragraphs(far.to(ELSEWHERE), *given, OPTIONS["beams"]))
    alike(found, expected)


def test_devices_do_not_mix() -> None:
    """What this file rests on."""
    with elsewhere():
        there = torch.ones(3, device=ELSEWHERE)
        assert there.device == ELSEWHERE and isinstance(there + 1, Far)
        assert not isinstance(there.cpu(), Far) and (there * torch.tensor(2.0)).tolist() == [2.0] * 3
        assert there[torch.tensor([0, 1])].shape == (2,)
        for mix in (
            lambda: there + torch.ones(3),
            lambda: torch.ones(3)[moved(torch.tensor([0]))],
            lambda: there.gather(0, torch.tensor([0])),
            lambda: torch.cat([there, torch.ones(3)]),
        ):
            with pytest.raises(RuntimeError, match="two devices"):
                mix()
