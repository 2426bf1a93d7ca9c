"""Decoding one sentence per segment, by every paragraph captioner."""

from __future__ import annotations

import pytest
import torch
from reference_decoding import beam_search, segment_next_word
from torch import Tensor
from variants import VARIANTS, clip, make

from capvid.captioners.base import CAPTIONERS, ParagraphCaptioner
from capvid.captioners.layers import pad_segments
from capvid.decoding.beam_search import decode, decode_paragraphs
from capvid.decoding.decoding_options import DecodingOptions
from capvid.text.vocabulary import BOS

PARAGRAPHS = [variant for variant, (name, _) in VARIANTS.items() if CAPTIONERS[name].paragraphs]
every_variant = pytest.mark.parametrize("variant", PARAGRAPHS)
LENGTHS = [[3, 2], [4], [2, 2, 5, 1], [3, 4, 2]]  # frames of each segment of each video
OPTIONS = [
    DecodingOptions(beam_size=1, max_length=6),
    DecodingOptions(beam_size=3, num_captions=2, max_length=5, no_repeat_ngram=2, min_length=2),
]


def make_segments(captioner: ParagraphCaptioner) -> list[list[Tensor]]:
    torch.manual_seed(9)
    return [[clip(captioner, frames) for frames in video] for video in LENGTHS]


@every_variant
@pytest.mark.parametrize("options", OPTIONS)
def test_paragraphs_match_the_reference_segment_by_segment(variant: str, options: DecodingOptions) -> None:
    captioner = make(variant)
    videos = make_segments(captioner)
    paragraphs = decode_paragraphs(captioner, *pad_segments(videos), options)
    assert [len(video) for video in paragraphs] == [len(video) for video in videos]
    for video, paragraph in zip(videos, paragraphs, strict=True):
        carried = None
        for frames, hypotheses in zip(video, paragraph, strict=True):
            features, mask = frames.unsqueeze(0), torch.ones(1, len(frames), dtype=torch.bool)
            expected = beam_search(segment_next_word(captioner, features, mask, carried), options)
            assert len(hypotheses) == options.num_captions
            for hypothesis, sentence in zip(hypotheses, expected, strict=False):
                assert hypothesis.tokens == list(sentence.tokens)
                assert hypothesis.logprobs == pytest.approx(sentence.logprobs, abs=1e-6)
            tokens = torch.tensor([[BOS, *expected[0].tokens]])
            if captioner.recurrent:
                carried = captioner.read(captioner.encode(features, mask, carried), tokens)[1]


@pytest.mark.slow
@every_variant
def test_paragraphs_do_not_depend_on_the_batch(variant: str) -> None:
    captioner = make(variant)
    videos = make_segments(captioner)
    for options in (*OPTIONS, DecodingOptions(temperature=1.0, num_captions=2, max_length=5)):
        batched = decode_paragraphs(captioner, *pad_segments(videos), options)
        for video, paragraph in zip(videos, batched, strict=True):
            (single,) = decode_paragraphs(captioner, *pad_segments([video]), options)
            assert [[h.tokens for h in s] for s in paragraph] == [[h.tokens for h in s] for s in single]


@every_variant
def test_single_segment_equals_plain_decoding(variant: str) -> None:
    captioner = make(variant)
    features, mask, counts = pad_segments([[video[0]] for video in make_segments(captioner)])
    paragraphs = decode_paragraphs(captioner, features, mask, counts, OPTIONS[1])
    expected = decode(captioner, features[:, 0], mask[:, 0], OPTIONS[1])
    assert [[h.tokens for h in s] for (s,) in paragraphs] == [[h.tokens for h in s] for s in expected]


def test_pad_segments() -> None:
    videos = [[torch.ones(2, 3)], [torch.full((1, 3), 2.0), torch.zeros(0, 3), torch.full((3, 3), 3.0)]]
    features, mask, counts = pad_segments(videos)
    assert features.shape == (2, 3, 3, 3)
    assert counts.tolist() == [1, 3]
    assert mask.sum(-1).tolist() == [[2, 0, 0], [1, 0, 3]]
    assert features.sum((-1, -2)).tolist() == [[6, 0, 0], [6, 0, 27]]
    maps, _, _ = pad_segments([[torch.ones(2, 4, 3)], [torch.ones(1, 4, 3)]])
    assert maps.shape == (2, 1, 2, 4, 3)
