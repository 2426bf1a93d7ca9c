from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from make_video import write_video
from report_pages import pictures

from capvid.scoring.comparison_page import (
    PAGE_VIDEOS,
    ComparedVideo,
    locate_videos,
    most_different,
    read_thumbnails,
    write_page,
)

HOSTILE = ["</style><script>alert(1)</script>", "$title ${videos} & &lt;", "\"quotes'", "\u202eright to left"]


class Texts(HTMLParser):
    """Collects tags and texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_videos_are_ordered_by_the_spread_of_their_scores() -> None:
    scores = [
        {"a": {"CIDEr-D": 1.0}, "b": {"CIDEr-D": 0.5}, "c": {"CIDEr-D": 3.0}},
        {"a": {"CIDEr-D": 1.5}, "b": {"CIDEr-D": 0.5}, "c": {"CIDEr-D": 2.9}},
        {"a": {"CIDEr-D": 0.9}, "b": {"CIDEr-D": 0.5}, "c": {"CIDEr-D": 5.0}},
    ]
    assert most_different(scores, "CIDEr-D") == ["c", "a"]
    many = [{str(n): {"BLEU-4": n * which} for n in range(1, 500)} for which in range(2)]
    assert most_different(many, "BLEU-4") == [str(n) for n in range(499, 499 - PAGE_VIDEOS, -1)]


def test_page_shows_texts_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    videos = [
        ComparedVideo(
            name=text, captions=[("B", 1.25, text), ("A", 0.5, "")], references=[text, "x"], frames=frames
        )
        for text, frames in zip(HOSTILE, [pictures(2), (), (), ()], strict=True)
    ]
    systems = list(zip("AB", HOSTILE, strict=False))
    write_page(
        path, systems=systems, tables=[(["", "x"], [["A", "<b>"]])], by="CIDEr-D", counts="4", videos=videos
    )
    page = Texts(path.read_text(encoding="utf-8"))
    assert page.tags.count("img") == 2 and page.tags.count("article") == len(HOSTILE)
    assert "script" not in page.tags and "b" not in page.tags
    for text in HOSTILE:
        assert "".join(page.texts).count(text) >= 3
    assert "The 4 videos that differ most in CIDEr-D" in page.texts
    assert "CIDEr-D 125.0 by B, 50.0 by A" in page.texts


def test_thumbnails_of_the_videos_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write_video(tmp_path / "a.mp4")
    write_video(tmp_path / "sub" / "b.mp4", frames=3)
    (tmp_path / "broken.mp4").write_bytes(b"not a video " * 100)
    paths = locate_videos(tmp_path)
    assert sorted(paths) == ["a", "broken", "sub/b"]
    frames, unreadable = read_thumbnails(paths)
    assert {name: len(files) for name, files in frames.items()} == {"a": 4, "sub/b": 3}
    assert unreadable == ["broken"]
