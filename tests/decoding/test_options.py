from __future__ import annotations

import math
from typing import Any

import pytest

from capvid.decoding import DecodingOptions, Hypothesis
from capvid.errors import UsageError


@pytest.mark.parametrize(
    "values, message",
    [
        ({"beam_size": 2, "num_captions": 3}, "3 captions cannot come from 2 beams; choose 1 to 2"),
        ({"num_captions": 0}, "0 captions: at least 1"),
        ({"num_captions": 0, "temperature": 1.0}, "0 captions: at least 1"),
        ({"beam_size": 0}, "must be at least 1"),
        ({"max_length": 0}, "must be at least 1"),
        ({"min_length": -1}, "min_length = -1: must be 0 or more"),
        ({"min_length": 9, "max_length": 8}, "at least 9 words and at most 8; choose a minimum"),
        ({"no_repeat_ngram": -2}, "no_repeat_ngram = -2: must be 0 or more"),
        ({"temperature": -0.5}, "temperature = -0.5: must be 0 or more"),
        ({"temperature": math.inf}, "temperature = inf"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"length_penalty": -1.0}, "length_penalty = -1.0: must be 0 or more"),
        ({"specificity": -0.1}, "specificity = -0.1: must be 0 or more"),
        ({"specificity": math.nan}, "specificity = nan: must be 0 or more"),
        ({"specificity": "high"}, "specificity = 'high': expected a number"),
        ({"seed": -1}, "seed = -1: must be 0 or more"),
        ({"top_p": 0.5}, "of use only when words are drawn; give a temperature above 0"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p = 0.0: must be above 0 and at most 1"),
        ({"top_p": 1.5, "temperature": 1.0}, "top_p = 1.5: must be above 0 and at most 1"),
        ({"beam_size": 2.0}, "beam_size = 2.0: expected a whole number"),
        ({"beam_size": True}, "beam_size = True: expected a whole number"),
        ({"temperature": "hot"}, "temperature = 'hot': expected a number"),
        ({"trace": 1}, "trace = 1: expected true or false"),
        ({"beams": 2}, "beams: no such decoding option; known are beam_size, max_length"),
    ],
)
def test_options_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        DecodingOptions.from_dict(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_go_through_plain_values() -> None:
    options = DecodingOptions(temperature=1, num_captions=9, top_p=0.9)
    assert DecodingOptions.from_dict(options.to_dict()) == options
    assert options.sampling and not DecodingOptions().sampling


def test_the_logprob_of_a_sentence() -> None:
    assert Hypothesis([4], [-0.5, -0.25], -0.375).logprob == -0.75
