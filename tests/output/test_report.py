from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from report_pages import Page, failure, images, make_caption, pictures, story, video, written
from test_records import SETTINGS, looked

from capvid.errors import VideoError
from capvid.output.report import COLUMNS, LEAST, PICTURES, Report
from capvid.output.results import CaptionResult
from capvid.output.writers import FORMATS, Document

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "]]> --> <img src=x onerror=alert(1)>",
    "a\u2028b\u2029c",
    "\"quotes' & &lt; &amp;",
    "{counts} $counts $model ${style}",
    "\u202eright to left",
    "${settings} \\u003c \\",
]


def test_every_number_is_that_of_the_result(tmp_path: Path) -> None:
    result = video(frames=5)
    (data,) = written(tmp_path / "p.html", result).data
    (segment,) = data["segments"]
    assert (data["paragraph"], data["size"], data["poster"]) == (False, [16, 12], 2)
    assert (segment["start"], segment["end"]) == (0.0, 2.5)
    assert result.times is not None
    assert segment["times"] == [round(time, 3) for time in result.times.tolist()]
    assert segment["thumbnails"] == [0, 1, 2, 3, 4] and "until" not in segment and "change" not in segment
    assert len(segment["captions"]) == 2
    for shown, caption in zip(segment["captions"], result.captions, strict=True):
        assert shown["text"] == caption.text
        assert shown["logprob"] == round(caption.logprob, 3)
        *words, end = shown["words"]
        assert words == [[word.word, round(word.logprob, 3)] for word in caption.words]
        assert end[0] is None
        assert end[1] == pytest.approx(caption.logprob - sum(w.logprob for w in caption.words), abs=1e-3)
        assert caption.traces is not None
        assert shown["traces"].keys() == caption.traces.keys()
        for name, rows in caption.traces.items():
            np.testing.assert_allclose(np.array(shown["traces"][name]) / 10_000, rows, atol=0.5001e-4)


def test_every_picture_is_there_once(tmp_path: Path) -> None:
    one, two = video(frames=5), video(frames=3, seed=7)
    page = written(tmp_path / "p.html", one, two)
    assert sorted(images(page)) == sorted(one.thumbnails + two.thumbnails)
    posters = [found for tag, found in page.tags if tag == "img"]
    for result, data, poster in zip((one, two), page.data, posters, strict=True):
        uris = {int(frame): uri for frame, uri in data["thumbnails"].items()}
        assert data["poster"] not in uris
        uris[data["poster"]] = poster["src"]
        for frame, picture in enumerate(result.thumbnails):
            assert uris[frame] == f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"
        assert poster["alt"] == f"Frame at {result.times[data['poster']]:.1f} s"  # type: ignore[index]
        assert (poster["width"], poster["height"]) == ("16", "12")


def test_a_frame_that_was_not_looked_at_has_no_column(tmp_path: Path) -> None:
    (data,) = written(tmp_path / "p.html", replace(looked(), thumbnails=pictures(5))).data
    (segment,) = data["segments"]
    assert segment["thumbnails"] == [0, 1, 3, 4] and segment["times"] == [0.0, 1.5, 4.5, 6.333]
    assert set(data["thumbnails"]) == {"0", "1", "3", "4"} and data["poster"] == 2


def test_many_frames_share_columns(tmp_path: Path) -> None:
    result = video(frames=150)
    (data,) = written(tmp_path / "p.html", result).data
    (segment,) = data["segments"]
    assert len(segment["times"]) == len(segment["until"]) == len(segment["thumbnails"]) == COLUMNS
    assert result.times is not None and result.captions[0].traces is not None
    weights = np.array(segment["captions"][0]["traces"]["attention"]) / 10_000
    for column, (first, last) in enumerate(zip(segment["times"], segment["until"], strict=True)):
        here = (result.times >= first - 1e-3) & (result.times <= last + 1e-3)
        assert here.sum() in (2, 3) and here[segment["thumbnails"][column]]
        expected = result.captions[0].traces["attention"][:, here].sum(1)
        np.testing.assert_allclose(weights[:, column], expected, atol=0.5001e-4)
    assert (segment["times"][0], segment["until"][-1]) == (0.333, round(float(result.times[-1]), 3))


def test_segments_each_have_a_figure(tmp_path: Path) -> None:
    result = story(segments=3)
    page = written(tmp_path / "p.html", result)
    (data,) = page.data
    assert data["paragraph"] and "3 segments" in page.articles[0]
    assert "A dog runs. A dog runs. A dog runs." in page.articles[0].replace("a dog", "A dog")
    assert [(each["start"], each["end"]) for each in data["segments"]] == [(0, 2), (2, 4), (4, 6)]
    for at, (shown, segment) in enumerate(zip(data["segments"], result.segments, strict=True)):
        assert shown["change"] == [round(change, 3) for change in segment.memory_change]
        assert shown["thumbnails"] == [3 * at, 3 * at + 1, 3 * at + 2]
        assert shown["captions"][0]["logprob"] == round(segment.captions[0].logprob, 3)


def test_a_long_video_has_so_many_pictures_at_most(tmp_path: Path) -> None:
    segments = PICTURES // LEAST + 10
    (data,) = written(tmp_path / "p.html", story(segments=segments, frames=6)).data
    per_segment = [sum(each is not None for each in shown["thumbnails"]) for shown in data["segments"]]
    assert set(per_segment) == {LEAST}
    shown = [frame for segment in data["segments"] for frame in segment["thumbnails"] if frame is not None]
    assert {int(frame) for frame in data["thumbnails"]} | {data["poster"]} >= set(shown)
    assert data["segments"][5]["thumbnails"][0] == 30 and data["segments"][5]["thumbnails"][-1] == 35
    assert all(len(segment["times"]) == 6 for segment in data["segments"])


def test_without_pictures_or_times_or_traces(tmp_path: Path) -> None:
    bare = video(with_pictures=False, times=None, duration=None)
    plain = replace(bare.captions[0], traces=None, text="", words=())
    silent = replace(bare, captions=(plain,), segments=(replace(bare.segments[0], captions=(plain,)),))
    page = written(tmp_path / "p.html", bare, silent)
    assert images(page) == []
    for data in page.data:
        assert data["size"] is None and data["poster"] is None and data["thumbnails"] == {}
        assert data["segments"][0]["times"] is None and data["segments"][0]["thumbnails"] == [None] * 4
    assert page.data[0]["segments"][0]["captions"][0]["traces"]["attention"]
    assert page.data[1]["segments"][0]["captions"][0]["traces"] == {}
    assert "(no words)" in page.articles[1]


def test_the_list_tells_what_became_of_each_video(tmp_path: Path) -> None:
    page = written(tmp_path / "p.html", video(lost=2), failure("missing one.mp4"), video(duration=4000.0))
    good, bad, long = (" ".join(text.split()) for text in page.articles)
    best = video().captions[0]
    assert "in/v.mp4" in good and "a dog runs" in good and "2.0 s" in good and "2 frames lost" in good
    assert "failed missing one.mp4: no such file; check the name" in bad
    assert "1:06:40" in long
    assert re.fullmatch(r"2 captioned, 1 failed in \d+\.\d s", page.ids["counts"])
    assert [found.get("data-number") for tag, found in page.tags if tag == "article"] == ["0", "1", "2"]
    assert [found.get("data-likely") for tag, found in page.tags if tag == "article"] == [
        f"{best.logprob / 4:.4f}",
        None,
        f"{best.logprob / 4:.4f}",
    ]
    assert len(page.data) == 2
    settings = " ".join(re.sub("<[^>]*>", " ", page.text.split("<dl>")[1].split("</dl>")[0]).split())
    assert settings == ("model m3 revision 0123456789ab sampling uniform:28 beam size 5 length penalty 0.7")


def test_low_confidence_is_counted_and_marked(tmp_path: Path) -> None:
    def with_confidences(result: CaptionResult, *confidences: float | None) -> CaptionResult:
        captions = [replace(result.segments[0].captions[0], confidence=each) for each in confidences]
        segments = tuple(
            replace(segment, captions=(caption,))
            for segment, caption in zip(result.segments, captions, strict=True)
        )
        return replace(result, segments=segments)

    page = written(
        tmp_path / "p.html",
        with_confidences(video(), 0.1),
        with_confidences(video(), 0.2),
        with_confidences(story(segments=3), 0.5, 0.15, None),
        video(),
        failure(),
    )
    assert page.ids["counts"].startswith("4 captioned, 1 failed, 2 of low confidence in ")
    found = [attributes for tag, attributes in page.tags if tag == "article"]
    assert [each["class"] for each in found] == [
        "video low-confidence",
        "video",
        "video low-confidence segmented",
        "video",
        "video failed",
    ]
    assert [each.get("data-confidence") for each in found] == ["0.1000", "0.2000", "0.1500", "", None]
    assert "lowest confidence 0.15 · 1 of low confidence" in page.articles[2]
    assert "confidence 0.20" in page.articles[1] and "low confidence" not in page.articles[1]
    assert "confidence" not in page.articles[3] + page.articles[4]


@pytest.mark.parametrize("text", ['a dog\'s "day"', *HOSTILE])
def test_each_entry_has_the_json_line_of_its_video(tmp_path: Path, text: str) -> None:
    caption = make_caption(words=text)
    named = video(path=text, captions=(caption,), lost=1)  # as an address it is text
    results = [replace(named, segments=(replace(named.segments[0], captions=(caption,)),)), failure(text)]
    page = written(tmp_path / "p.html", *results, story(segments=2), settings={**SETTINGS, "prompt": text})
    with Document(
        form=FORMATS["jsonl"], stream=io.StringIO(), many=True, settings={**SETTINGS, "prompt": text}
    ) as lines:
        assert [f"{record}\n" for record in page.records] == [
            lines.render(result) for result in (*results, story(segments=2))
        ]


def test_the_digest_is_that_of_the_results(tmp_path: Path) -> None:
    def digest(*results: CaptionResult) -> str | None:
        (found,) = (each for tag, each in written(tmp_path / "p.html", *results).tags if tag == "data")
        return found["value"]

    one = digest(video(), failure())
    assert one == digest(video(), failure()) != digest(failure(), video())
    assert len({one, digest(video(seed=1), failure()), digest(video()), digest()}) == 4


@pytest.mark.parametrize("count", [0, 1, 4])
def test_the_script_stands_once_before_the_videos(tmp_path: Path, count: int) -> None:
    page = written(tmp_path / "p.html", *[video()] * count)
    assert len(page.scripts) == 1 and len(page.data) == len(page.articles) == count
    assert "<article" not in page.text[: page.text.index(page.scripts[0])]
    assert page.text.endswith("</main>\n</body>\n</html>\n")


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_breaks_out(tmp_path: Path, text: str) -> None:
    caption = make_caption(words=text)
    harmless = [tag for tag, _ in written(tmp_path / "a.html", video(), failure()).tags]
    result = video(path=Path(text), captions=(caption,), model=text)
    result = replace(result, segments=(replace(result.segments[0], captions=(caption,)),))
    error = VideoError(text, text, remedy=text, kind="missing")
    path = tmp_path / "p.html"
    with Report(path, model=text, settings={**SETTINGS, text: text}) as report:
        report.add(result)
        report.add(replace(failure(), path=Path(text), error=error))
    page = Page(path.read_text(encoding="utf-8"))
    more = ["div", "dt", "dd"]  # of the setting
    at = harmless.index("noscript")
    assert [tag for tag, _ in page.tags] == [*harmless[:at], *more, *harmless[at:]]
    (data,) = page.data
    assert [word for word, _ in data["segments"][0]["captions"][0]["words"]] == [*text.split(), None]
    assert data["segments"][0]["captions"][0]["text"] == text
    shown = str(Path(text))
    assert shown in page.articles[0] and text in page.articles[0]
    assert " ".join(text.split()) in page.articles[1]
    between = page.text.split('type="application/json">')[1].split("</script>")[0]
    assert not re.search("[<>&\u2028\u2029]", between) and between.isascii()


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    bad = "caf\udce9.mp4"
    page = written(tmp_path / "p.html", video(path=Path(bad)), failure(bad))
    assert all("caf\\xe9.mp4" in text for text in page.articles)
    assert "caf\\xe9.mp4: no such file" in page.articles[1]


def test_nothing_is_fetched(tmp_path: Path) -> None:
    page = written(tmp_path / "p.html", video(), story(segments=2), failure())
    assert "://" not in re.sub(r"base64,[A-Za-z0-9+/=]+", "", page.text)
    (policy,) = [
        found["content"] for tag, found in page.tags if "content-security-policy" in str(found).lower()
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in str(policy).split(";"))

    def allowed(texts: Iterable[str]) -> str:
        (text,) = texts
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert rules == {
        "default-src": "'none'",
        "style-src": allowed(page.styles),
        "script-src": allowed(page.scripts),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    for tag, found in page.tags:
        assert not [name for name in found if name.startswith("on") or name == "style"], tag
        assert all(str(found[name]).startswith("data:") for name in ("src", "href") if name in found)
    assert dict(page.tags)["html"] == {"lang": "en"}
