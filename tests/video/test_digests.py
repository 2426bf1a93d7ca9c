from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from capvid.utils.storage import Blob
from capvid.video import input_lists
from capvid.video.input_lists import Digests
from capvid.video.input_set import identity, in_part

PATHS = some.lists(some.text(some.characters(blacklist_categories=["Cs"]), min_size=1), unique=True)


@given(PATHS, some.integers(1, 9))
def test_parts_are_disjoint_and_together_the_whole(paths: list[str], count: int) -> None:
    for path in paths:
        assert sum(in_part(path, number, count) for number in range(1, count + 1)) == 1


@given(PATHS, PATHS, some.integers(1, 5))
def test_other_inputs_and_their_order_do_not_matter(paths: list[str], others: list[str], count: int) -> None:
    alone = {path for path in paths if in_part(path, 1, count)}
    mixed = random.Random(0).sample(paths + others, len(paths) + len(others))
    assert alone == {path for path in mixed if in_part(path, 1, count)} & set(paths)


def test_parts_are_about_equal_and_stay_what_they_are() -> None:
    paths = [f"s3://bucket/videos/{number}.mp4" for number in range(4000)]
    sizes = [sum(in_part(path, number, 4) for path in paths) for number in range(1, 5)]
    assert sum(sizes) == 4000 and min(sizes) > 900
    assert identity("videos/a.mp4").hex() == "0c5f529ffd0ca9bf2a24ad51a8a61165"
    assert [n for n in range(1, 8) if in_part("videos/a.mp4", n, 7)] == [2]


def test_a_path_is_known_by_how_it_is_written() -> None:
    assert identity(Path("s3:/b")) != identity(Blob("s3://b"))
    assert identity(Path("a/é.mp4")) == identity("a/é.mp4")
    assert identity(Blob("x.tar", "a.mp4", 512, 7)) == identity("x.tar/a.mp4")
    odd, other = Path("a\udcff.mp4"), Path("a\udcfe.mp4")  # bytes that are no text
    assert identity(odd) == identity("a\\xff.mp4") != identity(other)


@pytest.mark.parametrize("recent", [1, 3, 1000])
def test_digests_are_a_set(monkeypatch: pytest.MonkeyPatch, recent: int) -> None:
    monkeypatch.setattr(input_lists, "_RECENT", recent)
    chance = random.Random(recent)
    found, expected = Digests(), set()
    for _ in range(2000):
        digest = chance.randrange(900).to_bytes(8, "big") + chance.randrange(2).to_bytes(8, "big")
        assert (digest in found) == (digest in expected)
        assert found.add(digest) == (digest not in expected)
        expected.add(digest)
        assert len(found) == len(expected)
    assert len(expected) > 1000  # many of which share their first half
    for number in range(900):
        for half in range(2):
            digest = number.to_bytes(8, "big") + half.to_bytes(8, "big")
            assert (digest in found) == (digest in expected)


def test_the_highest_and_the_lowest_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_lists, "_RECENT", 0)
    found = Digests()
    for digest in (b"\xff" * 16, b"\0" * 16, np.array([2**63, 1], np.uint64).tobytes()):
        assert digest not in found and found.add(digest) and digest in found and not found.add(digest)
