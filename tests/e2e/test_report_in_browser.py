"""The report as a browser shows it: complete in itself, no errors, readable on a desk and on a phone."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from browser import chromium, open_tab
from draftsmith.artifacts import Plan, Stage
from draftsmith.progress import Progress
from draftsmith.recipe import ReportSettings
from draftsmith.report.compare import compare_page
from draftsmith.report.page import build
from toy_run import make_draft, make_measure, make_run, make_traces

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no chromium on this machine"),
]

ON_FIRST_SCREEN = """[...document.querySelectorAll('.fact .value')].map(e => e.getBoundingClientRect())
    .map(box => box.top >= 0 && box.bottom <= innerHeight && box.left >= 0 && box.right <= innerWidth)"""
TEXT_CUT_OFF = """[...document.querySelectorAll('h1, h2, p, dd, dt, li, summary, .text')]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"""
CHARTS_DRAWN = "[...document.querySelectorAll('.chart')].map(e => e.querySelectorAll('svg.main-svg').length > 0)"
CHARTS_FIT = "[...document.querySelectorAll('.chart')].every(e => e.scrollWidth <= e.clientWidth + 1)"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("report") / "toy-run")
    work = run / "report"
    work.mkdir()
    build(Stage(run, Plan("report", {}, {}), work), ReportSettings(), Progress(quiet=True))
    return work / "report.html"


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (400, 800)])
@pytest.mark.parametrize("dark", [False, True])
async def test_the_report_is_complete_and_readable(report: Path, width: int, height: int, dark: bool) -> None:
    async with open_tab() as tab:
        await tab.open(report.as_uri(), width, height, dark)
        picture = await tab.screenshot()
        assert tab.errors == []
        assert [url for url in tab.requests if not url.startswith("data:")] == [report.as_uri()]
        assert await tab.evaluate("document.documentElement.scrollWidth") <= width
        assert await tab.evaluate(TEXT_CUT_OFF) == 0
        assert await tab.evaluate(ON_FIRST_SCREEN) == [True] * 4
        assert await tab.evaluate("document.querySelector('.fact .value').textContent") == "1.93"
        assert await tab.evaluate(CHARTS_DRAWN) == [True] * 5
        assert await tab.evaluate(CHARTS_FIT)
        assert struct.unpack(">II", picture[16:24]) == (width, height)
        assert len(picture) > 10_000  # an empty page of this size is a tenth of that


async def test_charts_take_the_colours_of_the_scheme_and_follow_a_change(report: Path) -> None:
    async with open_tab() as tab:
        await tab.open(report.as_uri(), 1280, 800)
        colour = "document.getElementById('chart-positions').data[0].marker.color"
        light = await tab.evaluate(colour)
        assert light == await tab.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--overall')")
        await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        await tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        assert await tab.evaluate(colour) != light


async def test_the_keyboard_reaches_every_part(report: Path) -> None:
    async with open_tab() as tab:
        await tab.open(report.as_uri(), 1280, 800)
        await tab.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        assert await tab.evaluate("document.activeElement.className") == "skip"
        focusable = "document.querySelectorAll('nav a, summary, [tabindex=\"0\"]').length"
        assert await tab.evaluate(focusable) > 15
        assert await tab.evaluate("[...document.querySelectorAll('.scroll')].every(e => e.tabIndex === 0)")


async def test_hostile_text_in_a_trace_is_shown_and_never_run(tmp_path: Path) -> None:
    run = tmp_path / "<img src=x onerror=console.error(1)>"
    make_traces(run, 3, text="</script><script>console.error('run')</script><img src=http://example.com/x.png>")
    (run / "report").mkdir()
    build(Stage(run, Plan("report", {}, {}), run / "report"), ReportSettings(), Progress(quiet=True))
    page = (run / "report" / "report.html").as_uri()
    async with open_tab() as tab:
        await tab.open(page, 1280, 800)
        assert tab.errors == []
        assert [url for url in tab.requests if not url.startswith("data:")] == [page]
        assert await tab.evaluate("document.querySelectorAll('main script, main img').length") == 0
        assert "<script>console.error" in await tab.evaluate("document.getElementById('traces').textContent")


@pytest.mark.parametrize("width", [1280, 400])
async def test_the_comparison_is_complete_and_readable(tmp_path: Path, width: int) -> None:
    for arm, length in (("static", 1.31), ("captured", 1.82)):
        make_traces(tmp_path / arm, 10)
        make_draft(tmp_path / arm)
        make_measure(tmp_path / arm, acceptance_length=length)
    page = compare_page(tmp_path, ["static", "captured"]).as_uri()
    async with open_tab() as tab:
        await tab.open(page, width, 800)
        assert tab.errors == []
        assert [url for url in tab.requests if not url.startswith("data:")] == [page]
        assert await tab.evaluate("document.documentElement.scrollWidth") <= width
        assert await tab.evaluate(ON_FIRST_SCREEN) == [True, True]
        assert await tab.evaluate(CHARTS_DRAWN) == [True]
