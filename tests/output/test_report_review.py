"""Reviewing 1,000 videos in the report, in a browser: search, filters, keyboard, edits and downloads."""

from __future__ import annotations

import json
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from report_pages import Page, failure, story, video
from test_report import HOSTILE
from test_report_browser import (
    CHROMIUM,
    DRIVER,
    Browser,
    all_of,
    click,
    edit_caption,
    names,
    press,
    resize,
    rest,
    started,
)
from toy import Run, capvid

from capvid.output.report import Report
from capvid.output.results import CaptionResult, make_record
from capvid.output.writers import FORMATS, Document
from capvid.pipeline import paragraph
from capvid.scoring.predictions import read_predictions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]

__all__ = ["capvid", "started"]

SETTINGS = {"sampling": "uniform:4", "beam_size": 5, "seed": 2**53 + 1, "prefix": "film: "}
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "caption-record.schema.json").read_text())
DOWN, ENTER, ESCAPE = "\ue015", "\n", "\ue00c"
SELECT_ALL = "\ue009a\ue000"  # Ctrl+A
COUNT = 1000


def make_result(number: int) -> CaptionResult:
    """Return a result: five of 1,000 failed, some are in segments, some have no confidence."""
    if number % 200 == 7:
        return failure(f"clips/{number:04}.mp4", "not a video")
    confidence = None if number % 9 == 4 else (number * 37 % 101) / 101
    path = Path(f"clips/{number:04}.mp4")
    if number % 50 == 3:
        result = story(segments=3)
        segments = tuple(
            replace(segment, captions=(replace(segment.captions[0], confidence=each),))
            for segment, each in zip(result.segments, (0.9, confidence, 0.8), strict=True)
        )
        return replace(result, path=path, segments=segments)
    result = video(seed=number % 20)
    best = replace(result.captions[0], confidence=confidence, text=f"a dog runs {number}")
    captions = (best, *result.captions[1:])
    return replace(
        result, path=path, captions=captions, segments=(replace(result.segments[0], captions=captions),)
    )


@pytest.fixture(scope="module")
def results() -> list[CaptionResult]:
    return [make_result(number) for number in range(COUNT)]


def write_page(path: Path, results: list[CaptionResult]) -> Path:
    with Report(path, model="m3@0123456789ab", settings=SETTINGS) as report:
        for result in results:
            report.add(result)
    return path


@pytest.fixture(scope="module")
def page(results: list[CaptionResult], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("review") / "my clips.html", results)


def open_page(browser: Browser, page: Path, downloads: Path) -> None:
    """Open the page without edits of tests before, at 1280 pixels."""
    resize(browser, 1280)
    browser.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    behaviour = {"behavior": "allow", "downloadPath": str(downloads)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)
    browser.get(page.as_uri())
    browser.execute_script("localStorage.clear()")
    browser.get_log("browser")
    browser.refresh()


@pytest.fixture
def browser(started: Browser, page: Path, tmp_path: Path) -> Iterator[Browser]:
    open_page(started, page, tmp_path)
    yield started
    assert started.get_log("browser") == []


def show(browser: Browser, kind: str) -> list[str]:
    """Choose a filter by its label, and return the names of the videos that it shows."""
    click(browser, browser.find_element("css selector", f".show label:has([value={kind}])"))
    return names(browser)


def sort_by(browser: Browser, order: str) -> list[str]:
    click(browser, browser.find_element("css selector", f"#sort option[value={order}]"))
    return names(browser)


def entry(browser: Browser, number: int) -> Any:
    return browser.find_element("css selector", f"article[data-number='{number}']")


def shown_caption(browser: Browser, number: int) -> str:
    return entry(browser, number).find_element("css selector", ".caption").text


def download(browser: Browser, button: str, path: Path) -> Path:
    """Click a download button, and wait for its file."""
    click(browser, browser.find_element("id", button))
    deadline = time.monotonic() + 20
    while not path.exists() or list(path.parent.glob("*.crdownload")):
        assert time.monotonic() < deadline, list(path.parent.iterdir())
        time.sleep(0.05)
    return path


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON Lines file, each valid by the schema."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for record in records:
        validator.validate(record)
    return records


def read_texts(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name).decode("utf-8") for name in archive.namelist()}


def lowest_confidence(result: CaptionResult) -> float | None:
    confidences = [segment.captions[0].confidence for segment in result.segments]
    return min((each for each in confidences if each is not None), default=None)


def test_counts_filters_search_and_order_combine(
    browser: Browser, page: Path, results: list[CaptionResult]
) -> None:
    paths = [str(result.path) for result in results]
    failed = [str(result.path) for result in results if result.error]
    doubtful = [str(result.path) for result in results if result.low_confidence]
    assert len(failed) == 5 and 100 < len(doubtful) < 300
    assert any(result.paragraph and result.low_confidence for result in results)
    counts = browser.find_element("id", "counts").text
    assert counts.startswith(f"995 captioned, 5 failed, {len(doubtful)} of low confidence in ")
    labels = [" ".join(label.text.split()) for label in all_of(browser, ".show label")]
    assert labels == ["All 1000", "Failed 5", f"Low confidence {len(doubtful)}", "Edited 0"]
    assert show(browser, "failed") == failed
    assert show(browser, "low-confidence") == doubtful
    assert browser.find_element("id", "found").text == f"{len(doubtful)} of 1000"
    flagged = next(
        number for number, result in enumerate(results) if result.paragraph and result.low_confidence
    )
    click(browser, entry(browser, flagged).find_element("css selector", ".name .opener"))
    segments = entry(browser, flagged).find_elements("css selector", ".segment .review")
    assert ["low confidence" in segment.text for segment in segments] == [False, True, False]
    field = browser.find_element("id", "filter")
    field.send_keys("clips/02")
    matching = [path for path in doubtful if "clips/02" in path]
    assert names(browser) == matching
    assert browser.find_element("id", "found").text == f"{len(matching)} of 1000"
    measures = {  # of equal confidence, the least likely comes first
        str(result.path): (confidence, round(result.captions[0].mean_logprob, 4), str(result.path))
        for result in results
        if (confidence := lowest_confidence(result)) is not None
    }
    assert sort_by(browser, "confidence") == sorted(matching, key=measures.__getitem__)
    field.clear()
    field.send_keys(" ")
    everything = show(browser, "all")
    assert everything[: len(measures)] == sorted(measures, key=measures.__getitem__)
    assert everything[-5:] == failed and sorted(everything) == paths
    field.send_keys("no such words")
    assert names(browser) == [] and browser.find_element("id", "nothing").is_displayed()
    field.clear()
    field.send_keys(" ")
    assert sort_by(browser, "number") == paths and not browser.find_element("id", "nothing").is_displayed()
    assert len(Page(page.read_text(encoding="utf-8")).articles) == COUNT


def test_keyboard_alone(browser: Browser) -> None:
    def focused() -> str:
        script = "return document.activeElement.closest('article, .segment, body').innerText.split('\\n')[0]"
        return browser.execute_script(script)

    assert browser.find_element("css selector", ".keys").text.startswith("/ search")
    press(browser, "/")
    field = browser.find_element("id", "filter")
    assert browser.switch_to.active_element == field
    press(browser, "clips/000", ESCAPE)
    assert browser.switch_to.active_element != field and len(names(browser)) == 10
    press(browser, "j", "j", "j", "k", "j")
    assert "0002.mp4" in focused()
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert browser.execute_script(outline) == "solid"
    press(browser, DOWN)
    assert "0003.mp4" in focused()
    press(browser, ENTER, "j", "j")  # into its segments
    assert "2.0\u20134.0 s" in focused()
    press(browser, "e")
    assert browser.switch_to.active_element.accessible_name == "Caption of segment 2 of clips/0003.mp4"
    press(browser, "j e /", ESCAPE)
    assert "2.0\u20134.0 s" in focused() and "edited" not in entry(browser, 3).text
    press(browser, "e", SELECT_ALL, "a cat sits", ENTER)
    stop_typing()
    assert shown_caption(browser, 3) == "film: A dog runs. A cat sits. A dog runs."
    press(browser, "j", "j")
    assert "0004.mp4" in focused()
    press(browser, "j", "j", "j", "e")  # nothing to edit
    assert "0007.mp4" in focused() and not all_of(browser, ".editor")
    press(browser, "k", "e", SELECT_ALL, "one more", ENTER)
    stop_typing()
    press(browser, "k")
    assert shown_caption(browser, 6) == "one more" and "0005.mp4" in focused()
    assert browser.find_element("id", "edits").text == "2 edited"
    details = all_of(browser, ".body")[0].find_element("css selector", "details.details summary")
    browser.execute_script("arguments[0].focus()", details)
    press(browser, ENTER)
    assert all_of(browser, ".body")[0].find_elements("css selector", ".word")
    press(browser, ESCAPE)
    assert "0000.mp4" in focused()


def stop_typing() -> None:
    """Wait until keys are shortcuts again."""
    time.sleep(0.8)


def test_letters_typed_after_a_saving_enter_are_no_shortcuts(browser: Browser) -> None:
    """They belong to a text of several lines: nothing is opened, moved, searched or replaced."""
    first = entry(browser, 0)
    click(browser, first.find_element("css selector", ".edit"))
    press(browser, SELECT_ALL, "party", ENTER)
    expanded = first.find_element("css selector", ".opener").get_attribute("aria-expanded")
    for letter in ["second line, e/j k", ENTER, " e"]:
        press(browser, letter)
    assert not all_of(browser, ".editor") and names(browser)[:2] == ["clips/0000.mp4", "clips/0001.mp4"]
    assert browser.switch_to.active_element == first.find_element("css selector", ".opener")
    assert browser.switch_to.active_element.get_attribute("aria-expanded") == expanded
    assert browser.find_element("id", "filter").get_property("value") == ""
    assert shown_caption(browser, 0) == "party"
    stop_typing()
    press(browser, "e")
    press(browser, " of two", ENTER)  # the caret is at the end, and nothing is selected
    assert shown_caption(browser, 0) == "party of two"
    stop_typing()
    press(browser, "e", "s", "\t", " ")  # by Tab to the button that saves
    assert shown_caption(browser, 0) == "party of twos" and not all_of(browser, ".editor")


def test_edits_outlive_a_reload_and_can_be_reverted(browser: Browser, results: list[CaptionResult]) -> None:
    edit_caption(browser, entry(browser, 0), "  one   caption ")
    edit_caption(browser, entry(browser, 3), "two people")  # opens the video, and edits its first segment
    edit_caption(browser, entry(browser, 1), results[1].captions[0].text)  # as it was
    assert browser.find_element("id", "edits").text == "2 edited"
    browser.refresh()
    assert browser.find_element("id", "edits").text == "2 edited"
    assert shown_caption(browser, 0) == "one caption"
    assert shown_caption(browser, 3) == "film: Two people. A dog runs. A dog runs."
    assert "The model wrote: a dog runs 0" in entry(browser, 0).text
    assert show(browser, "edited") == ["clips/0000.mp4", "clips/0003.mp4"]
    field = browser.find_element("id", "filter")
    field.send_keys("two people")
    assert names(browser) == ["clips/0003.mp4"]
    click(browser, entry(browser, 3).find_element("css selector", ".name .opener"))
    segment = entry(browser, 3).find_element("css selector", ".segment")
    assert segment.find_element("css selector", ".said").text == "two people"
    click(browser, segment.find_element("css selector", ".revert"))
    assert (
        browser.switch_to.active_element.accessible_name == "Edit the caption of segment 1 of clips/0003.mp4"
    )
    assert shown_caption(browser, 3) == "A dog runs. A dog runs. A dog runs."
    field.clear()
    field.send_keys(" ")
    assert show(browser, "edited") == ["clips/0000.mp4"]
    click(browser, entry(browser, 0).find_element("css selector", ".revert"))
    assert shown_caption(browser, 0) == "a dog runs 0"
    assert browser.find_element("id", "edits").text == ""
    assert browser.execute_script("return localStorage.length") == 0


def test_leaving_asks_only_for_edits_that_were_not_downloaded(browser: Browser, tmp_path: Path) -> None:
    leaving = (
        "const event = new Event('beforeunload', {cancelable: true});"
        "dispatchEvent(event); return event.defaultPrevented"
    )
    assert not browser.execute_script(leaving)
    click(browser, entry(browser, 0).find_element("css selector", ".edit"))
    assert not browser.execute_script(leaving)
    press(browser, "half a caption")
    assert browser.execute_script(leaving)
    press(browser, ENTER)
    assert browser.execute_script(leaving)
    download(browser, "zip", tmp_path / "my clips.zip")
    assert not browser.execute_script(leaving)
    assert browser.find_element("id", "edits").text == "1 edited, downloaded"
    edit_caption(browser, entry(browser, 1), "another")
    assert browser.execute_script(leaving)


def test_downloads_hold_the_corrected_captions(
    browser: Browser, results: list[CaptionResult], capvid: Run, tmp_path: Path
) -> None:
    edit_caption(browser, entry(browser, 0), "größer \N{SNOWMAN} \"than\" <b>'before'")
    edit_caption(browser, entry(browser, 3), "two people.")
    records = read_records(download(browser, "jsonl", tmp_path / "my clips.jsonl"))
    expected = [make_record(result, SETTINGS) for result in results]
    assert [at for at in range(COUNT) if records[at] != expected[at]] == [0, 3]
    (best, *others), first = records[0]["captions"], expected[0]["captions"]
    text = "größer \N{SNOWMAN} \"than\" <b>'before'"
    assert best == {"text": text, "logprob": None, "mean_logprob": None, "words": [], "edited": True}
    assert others == first[1:] and records[0].keys() == expected[0].keys()
    assert records[3]["captions"][0]["text"] == "film: Two people. A dog runs. A dog runs."
    assert [each["caption"] for each in records[3]["segments"]] == ["two people.", "a dog runs", "a dog runs"]
    assert [each["captions"][0].get("edited") for each in records[3]["segments"]] == [True, None, None]
    assert records[3]["segments"][1:] == expected[3]["segments"][1:]

    predictions = read_predictions(tmp_path / "my clips.jsonl")
    assert predictions.sentences["clips/0000.mp4"] == [text] and len(predictions.failed) == 5
    references = tmp_path / "references.json"
    references.write_text(json.dumps({name: [one] for name, (one,) in predictions.sentences.items()}))
    command = ["score", tmp_path / "my clips.jsonl", references, "--metrics", "bleu", "--missing", "skip"]
    code, out, err = capvid(*command)
    assert (code, "100.0" in out) == (0, True), err

    texts = read_texts(download(browser, "zip", tmp_path / "my clips.zip"))
    good = [result for result in results if result.error is None]
    assert list(texts) == [str(result.path.with_suffix(".txt")) for result in good]
    writer = FORMATS["txt"]
    with Document(form=writer, stream=(tmp_path / "x").open("w"), many=False, settings=SETTINGS) as document:
        for result in good[1:3] + good[4:]:
            assert texts[str(result.path.with_suffix(".txt"))] == document.render(result)
    assert texts["clips/0000.txt"] == f"{text}\n{results[0].captions[1].text}\n"
    assert texts["clips/0003.txt"] == "film: Two people. A dog runs. A dog runs.\n"


def test_hostile_names_and_captions_stay_text(started: Browser, tmp_path: Path) -> None:
    paths = [
        "../../up.mp4",
        "/abs/a.mp4",
        "/abs/A.webm",
        "s3://bucket/x.mp4",
        "C:\\clips\\b.mp4",
        "..",
        ".hidden",
        "same.mp4",
        "same.mp4.txt",
        "./a/./../same.mp4",
        "dir. /new\nline?.mp4",
        *HOSTILE,
    ]
    results = []
    for number, path in enumerate(paths):
        best = replace(video().captions[0], text=f"{HOSTILE[number % len(HOSTILE)]}\n\x1b[1m")
        segment = replace(video().segments[0], captions=(best,))
        changes = {"captions": (best,), "segments": (segment,)}
        results.append(video(path=path, **changes))  # as an address it is text
    segment = replace(story(segments=2).segments[0], captions=results[0].captions)
    results.append(
        replace(story(segments=2), segments=(segment,) * 2, captions=(paragraph(results[0].captions * 2),))
    )
    started.switch_to.new_window("tab")
    open_page(started, write_page(tmp_path / "hostile.html", results), tmp_path)
    texts = read_texts(download(started, "zip", tmp_path / "hostile.zip"))
    assert len({name.casefold() for name in texts}) == len(texts) == len(results)
    for name, result in zip(texts, results, strict=True):
        parts = name.split("/")
        assert name.endswith(".txt") and name.isprintable() and not set(name) & set('\\:*?"<>|')
        assert all(part and part.strip(".") and not part.endswith(" ") for part in parts), name
        with Document(form=FORMATS["txt"], stream=(tmp_path / "x").open("w"), many=False, settings={}) as one:
            assert texts[name] == one.render(result)
    assert list(texts)[:5] == ["up.txt", "abs/a.mp4.txt", "abs/A.webm.txt", "bucket/x.txt", "C_/clips/b.txt"]
    records = read_records(download(started, "jsonl", tmp_path / "hostile.jsonl"))
    assert records == [make_record(result, SETTINGS) for result in results]

    started.get(tmp_path.joinpath("hostile.html").as_uri())
    elements = "return document.querySelectorAll('img, script, b').length"
    before = started.execute_script(elements)
    for number, text in enumerate(HOSTILE):
        edit_caption(started, entry(started, number), text)
    edit_caption(started, entry(started, len(paths)), HOSTILE[0])
    frames = len(results[-1].segments[0].frames) * 2
    assert started.execute_script(elements) == before + frames
    for number, text in enumerate(HOSTILE):
        shown = entry(started, number).find_element("css selector", ".caption bdi")
        assert shown.get_property("textContent") == " ".join(text.split())
    (tmp_path / "hostile.jsonl").unlink()
    records = read_records(download(started, "jsonl", tmp_path / "hostile.jsonl"))
    for record, text in zip(records, HOSTILE, strict=False):
        assert record["captions"][0]["text"] == " ".join(text.split())
    assert started.get_log("browser") == []


def test_without_storage_edits_last_as_long_as_the_page(browser: Browser) -> None:
    deny = (
        "for (const name of ['getItem', 'setItem', 'removeItem'])"
        " Storage.prototype[name] = () => { throw new DOMException('denied', 'SecurityError') }"
    )
    browser.execute_script(deny)
    edit_caption(browser, entry(browser, 0), "one caption")
    assert shown_caption(browser, 0) == "one caption"
    assert browser.find_element("id", "edits").text == "1 edited"
    browser.refresh()
    assert shown_caption(browser, 0) == "a dog runs 0"


def test_edits_belong_to_one_page(browser: Browser, results: list[CaptionResult], tmp_path: Path) -> None:
    edit_caption(browser, entry(browser, 0), "one caption")
    same = write_page(tmp_path / "same.html", results)
    other = write_page(tmp_path / "other.html", results[:10])
    browser.get(other.as_uri())
    assert shown_caption(browser, 0) == "a dog runs 0"
    browser.get(same.as_uri())
    assert shown_caption(browser, 0) == "one caption"


OVERLAPS = """
const rows = 'header.page > *, .controls > *, article:not([hidden]) .review > *';
const parts = [...document.querySelectorAll(rows)];
const boxes = parts.filter(e => e.checkVisibility()).map(e => [e, e.getBoundingClientRect()]);
const near = boxes.filter(([e, box]) => box.width && box.top < innerHeight);
return near.flatMap(([a, one], at) => near.slice(at + 1)
  .filter(([b, two]) => !a.contains(b) && Math.min(one.right, two.right) - Math.max(one.left, two.left) > 1
    && Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top) > 1)
  .map(([b]) => `${a.outerHTML} / ${b.outerHTML}`));
"""


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overlaps_or_is_cut_off(browser: Browser, width: int) -> None:
    resize(browser, width)
    edit_caption(browser, entry(browser, 0), "a caption " * 20)
    edit_caption(browser, entry(browser, 3), "a_caption_without_spaces" * 10)
    for number in (1, 3):
        click(browser, entry(browser, number).find_elements("css selector", ".edit")[-1])
    for chosen in ("all", "low-confidence", "failed", "edited"):
        show(browser, chosen)
        browser.execute_script("scrollTo(0, 0)")
        rest(browser)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.execute_script(OVERLAPS) == []


def test_entries_out_of_sight_are_not_laid_out(browser: Browser) -> None:
    skipped = (
        "return [...document.querySelectorAll('article')].filter(each => {"
        " const skips = !each.querySelector('.name').checkVisibility({contentVisibilityAuto: true});"
        " return skips}).length"
    )
    rest(browser)
    assert browser.execute_script(skipped) > 950
    images = "return [...document.querySelectorAll('img')].filter(each => each.loading !== 'lazy').length"
    assert browser.execute_script(images) == 0
    assert not all_of(browser, "canvas")
