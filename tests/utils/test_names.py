from __future__ import annotations

import pytest

from capvid.utils.registry import did_you_mean

KNOWN = ["m3", "mart", "m3-small", "m3-tiny", "vgg16", "vgg19", "resnet50", "MIT"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vgg-16", "did you mean vgg16 or vgg19?"),
        ("vgg99", "did you mean vgg19 or vgg16?"),
        ("M3", "did you mean m3?"),
        ("m4", "did you mean m3?"),
        ("m3-", "did you mean m3, m3-tiny or m3-small?"),
        ("resnet", "did you mean resnet50?"),
        ("m3_smal", "did you mean m3-small?"),
        ("mit", "did you mean MIT?"),
        ("abacus", ""),
        ("", ""),
    ],
)
def test_close_names(name: str, said: str) -> None:
    assert did_you_mean(name, KNOWN) == said
