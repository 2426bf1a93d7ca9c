from __future__ import annotations

import pytest

from capvid.cli._terminal import column_lines

HEAD = ("name", "size", "what for")
ROWS = [
    ("m3-small", "6 MB", "Multimodal memory, for a few thousand videos and a CPU"),
    ("a-much-longer-name", "-", "hub:timm/vgg16.tv_in1k@3394518cba29aee1ea82a49d971be90d2dd1dab7"),
]


@pytest.mark.parametrize("width", [None, 20, 30, 40, 60, 80, 120])
def test_no_text_is_truncated(width: int | None) -> None:
    lines = column_lines(HEAD, ROWS, width)
    words = " ".join(lines).split()
    for row in ROWS:
        for cell in row:
            assert set(cell.split()) <= set(words), (width, lines)
    for line in lines:
        assert line == line.rstrip()
        assert width is None or len(line) <= width or len(line.split()) <= 4, line  # a long word


def test_layout_adapts_to_the_width() -> None:
    assert column_lines(HEAD, ROWS[:1], None) == [
        "name      size  what for",
        "m3-small  6 MB  Multimodal memory, for a few thousand videos and a CPU",
    ]
    assert column_lines(HEAD, ROWS[:1], 50) == [
        "name      size  what for",
        "m3-small  6 MB  Multimodal memory, for a few",
        "                thousand videos and a CPU",
    ]
    assert column_lines(HEAD, ROWS[:1], 38) == [
        "m3-small",
        "  size: 6 MB",
        "  what for: Multimodal memory, for a",
        "  few thousand videos and a CPU",
    ]
