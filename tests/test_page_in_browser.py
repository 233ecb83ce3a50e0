"""The page in a headless Chromium: no network, no errors, values under the pointer, and a script that never runs."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from paged import CARD, EVIL, RUNGS, traced, write_run
from snugfit.memory.events import Birth, Recording, Work
from snugfit.memory.reporting.attribution import CATEGORIES
from snugfit.memory.reporting.timeline import timeline
from snugfit.memory.traces import Trace
from snugfit.page import html, run_folder

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine (apt install chromium)")

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LARGEST_BYTES = 8 * 2**20


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@dataclasses.dataclass
class Opened:
    """A page in the browser, and everything that it said and asked for."""

    page: object
    file: Path
    said: list
    asked: list

    def peak(self):
        return self.page.evaluate("document.getElementById('memory').data.find(t => t.visible && t.name === 'peak')")


@pytest.fixture(scope="module")
def open_page(browser, tmp_path_factory):
    """Write a page and open it; gives the page and its file."""

    def run(details, run=None):
        file = tmp_path_factory.mktemp("page") / "page.html"
        html.write(file, details, run)
        opened = Opened(browser.new_page(viewport={"width": 1280, "height": 900}), file, [], [])
        page = opened.page
        page.on("console", lambda message: opened.said.append(message.text))
        page.on("pageerror", lambda error: opened.said.append(str(error)))
        page.on("dialog", lambda dialog: (opened.said.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: opened.asked.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_function(
            "[...document.querySelectorAll('[data-figure]')].every(e => e.querySelector('.main-svg'))"
        )
        return opened

    return run


@pytest.fixture(scope="module")
def known():
    searched = {"ladder": RUNGS, "frontier": RUNGS[1:], "runner_up": RUNGS[3].plan, "reasons": {"precision": EVIL}}
    return dataclasses.replace(traced(target=EVIL), step_time_s=2.5, **searched)


@pytest.fixture(scope="module")
def opened(open_page, known, tmp_path_factory):
    """One page with everything on it, that tests only look at."""
    folder = write_run(tmp_path_factory.mktemp("run"), predicted=known.memory.to_dict())
    return open_page(known, run_folder.read(folder))


def test_the_page_asks_for_nothing_and_has_no_error(opened):
    assert opened.said == []
    assert opened.asked == [opened.file.as_uri()]
    drawn = opened.page.evaluate("[...document.querySelectorAll('[data-figure]')].map(e => e.id)")
    assert drawn == ["loss", "step-times", "peaks", "ladder", "ladder-times", "memory", "modules", "frontier"]


def test_a_name_that_is_a_script_is_shown_and_does_not_run(opened):
    assert opened.page.evaluate("document.querySelector('h1').textContent").startswith(EVIL)
    assert opened.page.evaluate("document.querySelectorAll('img, script:not([type]), svg script').length") == 2
    boxes = opened.page.evaluate("[...document.querySelectorAll('#modules text')].map(e => e.textContent).join(' ')")
    assert "<script>alert(1)" in boxes
    assert opened.said == []


def test_the_marked_peak_is_the_reports_and_says_so_under_the_pointer(opened, known):
    assert opened.peak()["y"][0] * 2**20 == known.memory.peak_allocated_bytes
    left, top = opened.page.evaluate(
        """() => {
          const e = document.getElementById('memory'), {xaxis, yaxis} = e._fullLayout;
          const peak = e.data.find(t => t.visible && t.name === 'peak');
          e.scrollIntoView();
          const box = e.getBoundingClientRect();
          return [box.left + xaxis._offset + xaxis.l2p(peak.x[0]), box.top + yaxis._offset + yaxis.l2p(peak.y[0])];
        }"""
    )
    opened.page.mouse.move(left + 1, top + 40)
    opened.page.wait_for_selector("#memory .hoverlayer .legend text")
    texts = opened.page.evaluate("[...document.querySelectorAll('#memory .hoverlayer text')].map(e => e.textContent)")
    shown = " | ".join(texts)
    assert f"allocated : {known.memory.peak_allocated_bytes / 2**20:,.2f} MiB" in shown
    for category, num_bytes in known.memory.by_category.items():
        assert f"{category} : {num_bytes / 2**20:,.2f} MiB" in shown


def test_the_buttons_choose_the_window(opened, known):
    for number, window in enumerate(known.timeline):
        opened.page.locator("#memory .updatemenu-button").nth(number).click()
        shown = opened.page.evaluate(
            "document.getElementById('memory').data.filter(t => t.visible && t.stackgroup).map(t => t.name)"
        )
        assert shown == list(window.by_category)


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(opened, width):
    opened.page.set_viewport_size({"width": width, "height": 900})
    opened.page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width)
    widths = opened.page.evaluate(
        "[...document.querySelectorAll('.main-svg')].map(e => e.getBoundingClientRect().width)"
    )
    assert max(widths) <= width


def test_a_script_that_got_into_the_page_would_not_run(open_page, known):
    opened = open_page(known)
    opened.page.evaluate(
        """() => {
          const script = document.createElement('script');
          script.textContent = 'window.ran = 1';
          document.body.append(script);
        }"""
    )
    assert opened.page.evaluate("window.ran") is None
    assert [text for text in opened.said if "Content Security Policy" in text]


def large_trace(card, num_births=30_000):
    """As many events as two windows of a 7B model have: layers that save and free, and one short peak."""
    recording = Recording()
    for window in (1, 2):
        recording.marks += [(len(recording.events), "window"), (len(recording.events), "micro-batch")]
        first = len(recording.births)
        for number in range(num_births // 2):
            size = 2**33 if number == 9876 and window == 2 else 2**20 + number
            module = f"layers.{number % 32}.{'attn' if number % 3 else 'mlp'}.proj{number % 7}"
            category = CATEGORIES[number % len(CATEGORIES)]
            recording.births.append(Birth(size, category, "forward", module, "mm.default", window))
            recording.events.append(len(recording.births))
            recording.work.append((len(recording.events), Work("mm.default", "forward", "bfloat16", 10**9, 10**6)))
            if size == 2**33:
                recording.events.append(-len(recording.births))
        recording.marks.append((len(recording.events), "forward end"))
        recording.events += [-n - 1 for n in range(len(recording.births) - 1, first - 1, -1) if n - first != 9876]
        recording.marks += [(len(recording.events), "backward end"), (len(recording.events), "step end")]
    return Trace(recording, card, ())


def test_a_trace_of_a_large_model_stays_small_and_keeps_its_peak(open_page, known):
    trace = large_trace(dataclasses.replace(CARD, kind="cpu"))
    report = trace.report()
    windows = timeline(trace, seconds=[1e-4] * len(trace.recording.work))
    opened = open_page(dataclasses.replace(known, memory=report, timeline=windows))
    assert opened.file.stat().st_size < LARGEST_BYTES
    assert opened.said == []
    assert opened.peak()["y"][0] * 2**30 == report.peak_allocated_bytes
    assert report.peak_allocated_bytes > 2**33
    assert len(opened.peak()["x"]) == 1
    assert opened.page.evaluate("Math.max(...document.getElementById('memory').data.map(t => t.x.length))") < 2000
    assert opened.page.evaluate("document.getElementById('modules').data[0].ids.length") < 2000
