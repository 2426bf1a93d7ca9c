"""The report in a browser: what it shows is compared with the results that it was made of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_pages import failure, story, video
from test_report import HOSTILE
from toy import Toy, toy, toy_files, video_files

from capvid.output.report import Report
from capvid.output.results import CaptionResult
from capvid.pipeline import load

webdriver = pytest.importorskip("selenium.webdriver")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]

__all__ = ["toy", "toy_files", "video_files"]

Browser = Any


@pytest.fixture(scope="module")
def results(toy_files: Toy, video_files: list[Path]) -> list[CaptionResult]:
    """Of a captioner with random weights: several captions each, one video that failed, one in segments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAPVID_MODELS", str(toy_files.models))
        patch.setenv("CAPVID_WEIGHTS", str(toy_files.weights))
        pipeline = load(toy_files.model, attention=True, thumbnails=True, num_captions=2)
        found = list(pipeline.stream([video_files[at] for at in (1, 0, 2, 4, 3)]))
    return [*found, failure("a <b>broken<b> one.mp4", HOSTILE[0]), story(segments=6)]


@pytest.fixture(scope="module")
def page(results: list[CaptionResult], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "a report #1.html"
    with Report(path, model="soft-attention@0123456789ab", settings={"sampling": "uniform:4"}) as report:
        for result in results:
            report.add(result)
    return path


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def browser(started: Browser, page: Path) -> Iterator[Browser]:
    """The page, freshly opened at 1280 pixels on a light screen; it must say nothing in the console."""
    resize(started, 1280)
    light = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    started.execute_cdp_cmd("Emulation.setEmulatedMedia", light)
    started.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    started.get(page.as_uri())
    started.execute_script("localStorage.clear()")
    started.get_log("browser")
    started.refresh()
    yield started
    said = [
        line for line in started.get_log("browser") if "Canvas2D" not in line["message"]
    ]  # a test reads it
    assert said == []


def resize(browser: Browser, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def all_of(browser: Browser, css: str) -> list[Any]:
    return browser.find_elements("css selector", css)


def names(browser: Browser) -> list[str]:
    """Of the videos that are to be seen, in their order."""
    script = "return [...document.querySelectorAll('article:not([hidden]) .name')].map(e => e.textContent)"
    return browser.execute_script(script)


def edit_caption(browser: Browser, entry: Any, text: str) -> None:
    """Replace the caption of a video or segment in its editor."""
    click(browser, entry.find_element("css selector", ".edit"))
    field = browser.switch_to.active_element
    field.clear()
    field.send_keys(text, "\n")


def click(browser: Browser, element: Any) -> None:
    """Click where the element stands once the page has come to rest, and let it come to rest again."""
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    rest(browser)
    element.click()
    rest(browser)


def rest(browser: Browser) -> None:
    """Wait until the page was drawn a few times."""
    draw = "requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(done)))"
    browser.execute_async_script(f"const done = arguments[0]; {draw}")


def press(browser: Browser, *keys: str) -> None:
    for key in keys:
        browser.switch_to.active_element.send_keys(key)


def open_details(browser: Browser, within: Any) -> Any:
    """Open the first details within an element, which draws its charts, and return them."""
    details = within.find_element("css selector", "details.details")
    if details.get_attribute("open") is None:
        click(browser, details.find_element("css selector", "summary"))
    return details


def test_the_first_videos_are_open(browser: Browser, results: list[CaptionResult]) -> None:
    openers = all_of(browser, ".name .opener")
    assert [each.get_attribute("aria-expanded") for each in openers] == ["true"] * 3 + ["false"] * 3
    bodies = all_of(browser, ".body")
    assert [body.is_displayed() for body in bodies] == [True] * 3 + [False] * 3
    assert bodies[3].get_attribute("innerHTML") == ""  # built when it is opened
    click(browser, openers[4])
    assert openers[4].get_attribute("aria-expanded") == "true" and bodies[4].is_displayed()
    assert len(bodies[4].find_elements("css selector", ".film img")) == len(results[4].thumbnails) == 4
    click(browser, openers[4])
    assert not bodies[4].is_displayed()
    openers[4].send_keys("\n")
    assert bodies[4].is_displayed()


def test_pictures_are_loaded_and_have_texts(browser: Browser, results: list[CaptionResult]) -> None:
    images = browser.execute_async_script(
        "const done = arguments[0], images = [...document.querySelectorAll('.film img')];"
        "Promise.all(images.map(i => i.decode())).then("
        "  () => done(images.map(i => [i.alt, i.naturalWidth])), e => done(String(e)))"
    )
    shown = [(time, 64) for result in results[:3] for time in np.asarray(result.times).tolist()]
    assert images == [[f"Frame at {time:.1f} s", width] for time, width in shown]


@pytest.mark.parametrize("how", ["mouse", "keys"])
def test_a_word_shows_its_weights_on_the_frames(
    browser: Browser, results: list[CaptionResult], how: str
) -> None:
    (caption, *_), body = results[1].captions, all_of(browser, ".body")[1]
    assert not body.find_elements("css selector", ".word")  # drawn when the details are opened
    open_details(browser, body)
    assert caption.traces is not None
    weights = caption.traces["attention"]

    def shares() -> list[str]:
        script = "return [...arguments[0].querySelectorAll('.film .share')].map(e => e.innerText)"
        return browser.execute_script(script, body)

    def chosen(attribute: str) -> list[str]:
        script = "return [...arguments[0].querySelectorAll('.word')].map(e => e.getAttribute(arguments[1]))"
        return browser.execute_script(script, body, attribute)

    def as_shown(row: np.ndarray) -> list[str]:
        return [f"{100 * w:.1f}%" if w < 0.0095 else f"{np.floor(100 * w + 0.5):.0f}%" for w in row]

    assert shares() == as_shown(np.round(weights, 4).mean(0))
    words = body.find_elements("css selector", ".word")
    assert [word.text.split("\n")[0] for word in words] == [*(w.word for w in caption.words), "(end)"]
    if how == "keys":
        body.find_elements("css selector", ".choices button")[-1].send_keys("\t")
    for at, word in enumerate(words):
        if how == "mouse":
            click(browser, word)
        elif at:
            press(browser, "\ue015")  # arrow down
        assert browser.switch_to.active_element == word
        assert chosen("aria-checked") == ["true" if n == at else "false" for n in range(len(words))]
        assert chosen("tabindex") == ["0" if n == at else "-1" for n in range(len(words))]
        assert shares() == as_shown(np.round(weights[at], 4))
        best = f"{results[1].times[weights[at].argmax()]:.1f} s"  # type: ignore[index]
        (most,) = body.find_elements("css selector", ".film li.most .when")
        assert (
            most.text == best and f"looks most at {best}" in body.find_element("css selector", ".looked").text
        )
    press(browser, "\ue011")  # Home
    assert browser.switch_to.active_element == words[0]
    press(browser, "\ue00c")  # Escape
    assert shares() == as_shown(np.round(weights, 4).mean(0))


def test_strips_are_painted_by_weight(browser: Browser, results: list[CaptionResult]) -> None:
    """As strong as the weight, from nothing or, stretched, from the least to the greatest of the caption."""
    details = open_details(browser, all_of(browser, ".body")[0])
    script = (
        "return [...document.querySelector('.body').querySelectorAll('.words .word canvas')].map(c =>"
        " [...c.getContext('2d').getImageData(0, 0, c.width, 1).data].filter((_, at) => at % 4 == 3))"
    )
    assert results[0].captions[0].traces is not None
    weights = results[0].captions[0].traces["attention"]
    painted = np.array(browser.execute_script(script)) / 255
    np.testing.assert_allclose(painted, weights / weights.max(), atol=0.01)
    click(browser, details.find_element("css selector", ".stretch"))
    stretched = (weights - weights.min()) / (weights.max() - weights.min())
    np.testing.assert_allclose(np.array(browser.execute_script(script)) / 255, stretched, atol=0.02)


def test_columns_stand_under_their_frames(browser: Browser) -> None:
    open_details(browser, all_of(browser, ".body")[2])
    script = (
        "const body = document.querySelectorAll('.body')[2], box = e => e.getBoundingClientRect();"
        "const strip = box(body.querySelector('.strip'));"
        "const tiles = [...body.querySelectorAll('.film.aligned li')];"
        "return [[strip.left, strip.width], tiles.map(t => (box(t).left + box(t).right) / 2)]"
    )
    (left, width), middles = browser.execute_script(script)
    expected = left + (np.arange(len(middles)) + 0.5) * width / len(middles)
    np.testing.assert_allclose(middles, expected, atol=1)


def test_other_captions_of_a_video(browser: Browser, results: list[CaptionResult]) -> None:
    body = all_of(browser, ".body")[1]
    open_details(browser, body)
    one, two = body.find_elements("css selector", ".choices button")
    click(browser, two)
    assert (one.get_attribute("aria-pressed"), two.get_attribute("aria-pressed")) == ("false", "true")
    words = [word.text.split("\n")[0] for word in body.find_elements("css selector", ".word")]
    assert words == [*(word.word for word in results[1].captions[1].words), "(end)"]


def test_memory_and_segments(browser: Browser, results: list[CaptionResult]) -> None:
    story = results[-1]
    click(browser, all_of(browser, ".name .opener")[-1])
    body = all_of(browser, ".body")[-1]
    segments = body.find_elements("css selector", ".segment")
    assert [each.find_element("css selector", ".when").text for each in segments][:2] == [
        "0.0\u20132.0 s",
        "2.0\u20134.0 s",
    ]
    assert len(segments) == 6 and not body.find_elements("css selector", ".timeline")
    click(browser, body.find_elements("css selector", "details.details > summary")[-1])
    assert len(body.find_elements("css selector", ".timeline .row span")) == 12
    mean = story.captions[0].mean_logprob
    assert f"\N{MINUS SIGN}{-mean:.2f} per word" in body.find_elements("css selector", "details")[-1].text
    expanded = [
        each.find_element("css selector", ".opener").get_attribute("aria-expanded") for each in segments
    ]
    assert expanded == ["true"] * 4 + ["false"] * 2
    change = ", ".join(
        f"{np.floor(100 * each + 0.5):.0f}%" for each in np.round(story.segments[1].memory_change, 3)
    )
    assert f"Memory changed by {change}." in open_details(browser, segments[1]).text
    click(browser, segments[5].find_element("css selector", ".opener"))
    assert len(segments[5].find_elements("css selector", ".film li")) == 3
    open_details(browser, segments[0])
    click(browser, segments[0].find_element("css selector", ".memory summary"))
    strips = segments[0].find_elements("css selector", ".memory .strip")
    assert len(strips) == 4
    traces = story.segments[0].captions[0].traces
    assert traces is not None
    row = np.round(traces["write_text"][1], 4)
    assert strips[1].get_attribute("aria-label").startswith(f"dog: most at slot {row.argmax() + 1}, ")
    click(browser, segments[0].find_elements("css selector", ".word")[1])
    assert [line.get_attribute("data-word") for line in all_of(browser, ".memory .line.chosen")] == ["1"]


def test_filter_and_sort(browser: Browser, results: list[CaptionResult]) -> None:
    paths = [str(result.path) for result in results]
    assert names(browser) == paths
    (field,) = all_of(browser, "#filter")
    field.send_keys("V2.mp4")
    assert names(browser) == [path for path in paths if "v2.mp4" in path]
    assert all_of(browser, "#found")[0].text == "1 of 7"
    field.clear()
    field.send_keys("dog", " a ", "RUNS")
    assert str(results[-1].path) in names(browser) and str(results[5].path) not in names(browser)
    field.clear()
    field.send_keys("check the name")
    assert names(browser) == [str(results[5].path)]
    field.clear()
    field.send_keys(" ")
    assert names(browser) == paths and all_of(browser, "#found")[0].text == ""

    def ordered(value: str) -> list[str]:
        click(browser, all_of(browser, f"#sort option[value={value}]")[0])
        return names(browser)

    good = [result for result in results if result.error is None]
    mean = {
        str(result.path): result.captions[0].logprob / (len(result.captions[0].words) + len(result.segments))
        for result in good
    }
    bad = str(results[5].path)
    assert ordered("likely") == [*sorted(mean, key=lambda path: -mean[path]), bad]
    assert ordered("unlikely") == [*sorted(mean, key=lambda path: mean[path]), bad]
    assert ordered("failed") == [bad, *(path for path in paths if path != bad)]
    assert [Path(path).name for path in ordered("name")] == [
        *(f"v{at}.mp4" for at in range(5)),
        "a <b>broken<b> one.mp4",
        "v.mp4",
    ]
    assert ordered("number") == paths
    assert len(all_of(browser, ".body")[0].find_elements("css selector", ".film li")) == 4  # still open


def test_dark_and_light(browser: Browser) -> None:
    def ground() -> str:
        return browser.execute_script("return getComputedStyle(document.documentElement).backgroundColor")

    (switch,) = all_of(browser, "#theme")
    light = ground()
    click(browser, switch)
    dark = ground()
    assert switch.get_attribute("aria-pressed") == "true" and dark != light
    click(browser, switch)
    assert switch.get_attribute("aria-pressed") == "false" and ground() == light
    preferred = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", preferred)
    browser.refresh()
    assert ground() == dark and all_of(browser, "#theme")[0].get_attribute("aria-pressed") == "true"


CONTRASTS = """
const rgb = text => text.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
  .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
const ground = e => { for (; e; e = e.parentElement) {
  const found = rgb(getComputedStyle(e).backgroundColor);
  if (found.length < 4 || found[3] > 0) return found; } };
const seen = {};
for (const e of document.querySelectorAll('body *')) {
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || !e.checkVisibility()) continue;
  const [a, b] = [luminance(rgb(getComputedStyle(e).color)), luminance(ground(e))].sort((x, y) => y - x);
  const name = `${e.tagName}.${e.className}`;
  seen[name] = Math.min((a + 0.05) / (b + 0.05), seen[name] || 99);
}
return seen;
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_can_be_read(browser: Browser, theme: str) -> None:
    if theme == "dark":
        click(browser, all_of(browser, "#theme")[0])
    click(browser, all_of(browser, ".name .opener")[-1])
    click(browser, all_of(browser, "summary")[0])
    open_details(browser, all_of(browser, ".body")[0])
    click(browser, all_of(browser, ".word")[2])
    edit_caption(browser, all_of(browser, ".video")[1], "a cat")
    click(browser, all_of(browser, ".edit")[2])
    contrasts = browser.execute_script(CONTRASTS)
    assert len(contrasts) > 15
    assert {name: ratio for name, ratio in contrasts.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("width", [320, 400, 768, 1280])
def test_nothing_is_cut_off(browser: Browser, width: int) -> None:
    resize(browser, width)
    for opener in all_of(browser, ".opener[aria-expanded=false]"):
        click(browser, opener)
    while closed := all_of(browser, "details:not([open]) > summary"):  # details may hold others
        for summary in closed:
            click(browser, summary)
    click(browser, all_of(browser, ".edit")[0])
    widest = browser.execute_script("return document.documentElement.scrollWidth")
    assert widest <= width
    beyond = browser.execute_script(
        "return [...document.querySelectorAll('body *')].filter(e => !e.closest('.film')"
        " && e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML)"
    )
    assert beyond == []


def test_nothing_moves_when_a_word_is_chosen(browser: Browser) -> None:
    open_details(browser, all_of(browser, ".body")[0])
    for width in (400, 1280):
        resize(browser, width)
        script = (
            "return [...document.querySelectorAll('.word, .name')].map(e => e.getBoundingClientRect().top)"
        )
        browser.execute_script("scrollTo(0, 0)")
        rest(browser)  # videos out of sight keep the height that they had
        before = browser.execute_script(script)
        for word in all_of(browser, ".word")[:4]:
            browser.execute_script("arguments[0].click(); scrollTo(0, 0)", word)
            assert browser.execute_script(script) == before


def test_every_control_has_a_name(browser: Browser) -> None:
    controls = all_of(browser, "button, input, select, summary")
    assert len(controls) > 10
    for control in controls:
        browser.execute_script("arguments[0].scrollIntoView()", control)
        assert control.accessible_name, control.get_attribute("outerHTML")
    headings = browser.execute_script(
        "return [...document.querySelectorAll('h1,h2,h3,h4')].map(e => e.tagName)"
    )
    assert headings[0] == "H1" and headings.count("H1") == 1 and headings.count("H2") == 7


def test_captioners_and_files_that_say_less(started: Browser, tmp_path: Path) -> None:
    """Without traces; without pictures; with more frames than columns and without times."""
    plain = replace(video().captions[0], traces=None)
    silent = video(captions=(plain,), segments=(replace(video().segments[0], captions=(plain,)),))
    path = tmp_path / "p.html"
    with Report(path, model="git", settings={}) as report:
        for result in (silent, video(with_pictures=False), video(frames=150, times=None)):
            report.add(result)
    resize(started, 1280)
    started.get(path.as_uri())
    one, two, three = all_of(started, ".body")
    for body, frames in ((one, 4), (two, 0), (three, 60)):
        assert len(body.find_elements("css selector", ".film li")) == frames
        open_details(started, body)
    assert "does not say what it looked at" in one.text and not one.find_elements("css selector", "canvas")
    assert len(one.find_elements("css selector", ".film img")) == 4
    click(started, one.find_elements("css selector", ".word")[1])
    assert two.find_elements("css selector", ".film img") == []
    assert [each.text for each in two.find_elements("css selector", ".when")] == [
        *("0.3 s", "0.8 s", "1.3 s", "1.8 s")
    ]
    assert len(two.find_elements("css selector", ".word canvas")) == 4
    click(started, three.find_elements("css selector", ".word")[1])
    assert len(three.find_elements("css selector", ".film.plain li")) == 60
    last = three.find_elements("css selector", ".when")[-1]
    assert last.text == "frame 148" and "looks most at frame" in three.text
    assert started.execute_script("return document.documentElement.scrollWidth") <= 1280
    assert started.get_log("browser") == []


@pytest.mark.parametrize("width", [390, 1280])
def test_a_film_opens_with_its_time_line(started: Browser, tmp_path: Path, width: int) -> None:
    """To scale, with doubtful segments marked; a click shows a segment. No paragraph of 281 sentences."""
    film = story(segments=281)
    film = replace(film, duration=562.0)
    doubtful = replace(film.segments[200].captions[0], confidence=0.1)
    marked = replace(film.segments[200], captions=(doubtful,))
    film = replace(film, segments=(*film.segments[:200], marked, *film.segments[201:]))
    path = tmp_path / "film.html"
    with Report(path, model="mart", settings={}) as report:
        report.add(film)
        report.add(replace(film, path=Path("b.mp4")))
    resize(started, width)
    started.get(path.as_uri())
    one, two = all_of(started, "article")
    caption = one.find_element("css selector", ".caption")
    assert not caption.is_displayed()
    assert "281 segments · lowest confidence 0.10 · 1 of low confidence" in one.text
    marks = one.find_elements("css selector", ".overview rect")
    assert len(marks) == 281 and [mark for mark in marks if mark.get_attribute("class") == "low"] == [
        marks[200]
    ]
    (line,) = one.find_elements("css selector", ".overview svg")
    assert marks[140].rect["x"] == pytest.approx(line.rect["x"] + line.rect["width"] * 140 / 281, abs=1)
    title = marks[200].find_element("css selector", "title").get_property("textContent")
    assert title == "6:40\u20136:42 a dog runs"
    times = [each.text for each in one.find_elements("css selector", ".overview .axis span")]
    assert times == ["0:00", "2:20", "4:41", "7:02", "9:22"]
    for article in (one, two):  # the second is closed again
        if article == two:
            click(started, article.find_element("css selector", ".name .opener"))
            shown = article.find_element("css selector", ".caption")
            assert shown.is_displayed() and shown.rect["height"] < 80  # a few lines of the paragraph
        click(started, article.find_elements("css selector", ".overview rect")[200])
        focused = started.switch_to.active_element
        assert focused.get_attribute("aria-expanded") == "true" and "6:40.0\u20136:42.0" in focused.text
        top = started.execute_script("return arguments[0].getBoundingClientRect().top", focused)
        assert 0 < top < 900
    assert started.execute_script("return document.documentElement.scrollWidth") <= width
    assert started.get_log("browser") == []
