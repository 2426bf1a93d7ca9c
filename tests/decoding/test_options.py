from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import Any

import pytest

from capvid.decoding.decoding_options import DecodingOptions, Hypothesis
from capvid.errors import UsageError


@pytest.mark.parametrize(
    "values, message",
    [
        ({"beam_size": 2, "num_captions": 3}, "3 captions cannot come from 2 beams; choose 1 to 2"),
        ({"num_captions": 0}, "num_captions must be an integer between 1 and 10000, got 0"),
        ({"num_captions": 0, "temperature": 1.0}, "num_captions must be an integer between 1"),
        ({"beam_size": 0}, "beam_size must be an integer between 1 and 1000, got 0"),
        ({"max_length": 0}, "max_length must be an integer between 1 and 1000, got 0"),
        ({"min_length": -1}, "min_length must be an integer between 0 and 1000, got -1"),
        ({"min_length": 9, "max_length": 8}, "at least 9 words and at most 8; choose a minimum"),
        ({"no_repeat_ngram": -2}, "no_repeat_ngram must be an integer between 0 and 1000, got -2"),
        ({"temperature": -0.5}, "temperature must be a number between 0 and 1000, got -0.5"),
        ({"temperature": math.inf}, "temperature must be a number between 0 and 1000, got inf"),
        ({"temperature": math.nan}, "temperature must be a number between 0 and 1000, got nan"),
        ({"length_penalty": -1.0}, "length_penalty must be a number between 0 and 100, got -1.0"),
        ({"specificity": -0.1}, "specificity must be a number between 0 and 1000, got -0.1"),
        ({"specificity": math.nan}, "specificity must be a number between 0 and 1000, got nan"),
        ({"specificity": "high"}, "specificity must be a number between 0 and 1000, got 'high'"),
        ({"seed": -1}, "seed must be an integer between 0"),
        ({"top_p": 0.5}, "of use only when words are drawn; give a temperature above 0"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p = 0.0: must be above 0 and at most 1"),
        ({"top_p": 1.5, "temperature": 1.0}, "top_p must be a number between 0 and 1, got 1.5"),
        ({"beam_size": 2.0}, "beam_size must be an integer between 1 and 1000, got 2.0"),
        ({"beam_size": True}, "beam_size must be an integer between 1 and 1000, got true"),
        ({"temperature": "hot"}, "temperature must be a number between 0 and 1000, got 'hot'"),
        ({"no_repeat_words": 1}, "no_repeat_words must be true or false, got 1"),
        ({"beams": 2}, "beams: no such decoding option; did you mean beam_size"),
    ],
)
def test_invalid_options_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        DecodingOptions.from_dict(values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_options_round_trip_through_a_dict() -> None:
    options = DecodingOptions(temperature=1, num_captions=9, top_p=0.9)
    assert DecodingOptions.from_dict(asdict(options)) == options


def test_logprob_is_the_sum_of_word_logprobs() -> None:
    assert Hypothesis([4], [-0.5, -0.25], -0.375).logprob == -0.75


def test_options_have_help_texts_and_bounds() -> None:
    for option in fields(DecodingOptions):
        assert option.metadata["help"].endswith(".")
        low, high = option.metadata.get("minimum", 0), option.metadata.get("maximum", 0)
        assert option.type == "bool" or low <= option.default <= high > 0
