"""`ddl report` in a browser: charts draw, toggle, answer the pointer and fit, without a network."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="needs the extra `report`")
pytest.importorskip("selenium", reason="needs selenium, of the extra `dev`")

from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from ddl.lab.analysis.report.page import write_report
from ddl.lab.config import ReportConfig
from tests.lab.analysis.cases import make_run
from tests.lab.analysis.report_cases import three_runs
from tests.lab.analysis.test_report_escaping import NAME, nasty_run

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SIZES = {"desktop": (1280, 900, False), "phone": (390, 844, True)}
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # containers have no user namespaces
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--renderer-process-limit=1",
    "--js-flags=--max-old-space-size=512",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no name has an address
    "--proxy-server=127.0.0.1:9",  # and nothing listens there
)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs `chromium`, as Debian packages it"),
    pytest.mark.skipif(DRIVER is None, reason="needs `chromedriver`, Debian's chromium-driver"),
]

Browser = Any  # webdriver.Chrome; selenium has no types for all that is used


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium that logs its console and its requests; all of its processes end with it."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    profile = tmp_path_factory.mktemp("profile")
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = Service(str(DRIVER), popen_kw={"start_new_session": True})
    started: Browser = None
    try:
        started = webdriver.Chrome(options=options, service=service)
        started.set_page_load_timeout(20)
        yield started
    finally:
        if started is not None:
            started.quit()
        with suppress(AttributeError, ProcessLookupError):  # the driver's session: its Chromium
            os.killpg(service.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    runs = [*three_runs(folder), make_run(folder / ("longname" * 12), losses=[2.7, 2.6])]
    out = folder / "page.html"
    write_report(ReportConfig(tuple(runs), out=out))
    return out


@pytest.fixture(params=SIZES)
def opened(request: pytest.FixtureRequest, browser: Browser, page: Path) -> Browser:
    """The page at the size of a desktop or a phone."""
    resize(browser, *SIZES[request.param])
    return open_page(browser, page)


def resize(browser: Browser, width: int, height: int, phone: bool) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})


def open_page(browser: Browser, page: Path) -> Browser:
    for log in ("browser", "performance"):
        browser.get_log(log)  # forget what was before
    browser.get(page.as_uri())
    return browser


def wait(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The first true value of the condition."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("the condition never held")


def show(browser: Browser, id: str) -> Any:
    """Scroll a chart into view; return it when it is drawn."""
    element = browser.find_element(By.ID, id)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    wait(lambda: element.find_elements(By.CSS_SELECTOR, ".main-svg"))
    return element


def curves(browser: Browser) -> int:
    return len(browser.find_elements(By.CSS_SELECTOR, "#losses .scatterlayer .trace"))


def hover(browser: Browser, chart: Any, x: float, y: float) -> str:
    """Put the pointer at a share of the chart's axes; return what the chart tells."""
    inner = chart.find_element(By.CSS_SELECTOR, ".nsewdrag").rect
    outer = chart.rect
    right = inner["x"] + x * inner["width"] - outer["x"] - outer["width"] / 2
    down = inner["y"] + y * inner["height"] - outer["y"] - outer["height"] / 2
    ActionChains(browser, 0).move_to_element_with_offset(chart, int(right), int(down)).perform()
    told = wait(lambda: chart.find_elements(By.CSS_SELECTOR, ".hoverlayer .hovertext"))
    return " ".join(text.text for text in told)


def complaints(browser: Browser) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


def network(browser: Browser, method: str) -> list[dict[str, Any]]:
    """The browser's log of the network under this name."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [event["params"] for event in events if event["method"] == f"Network.{method}"]


def test_a_click_through(opened: Browser, page: Path) -> None:
    show(opened, "losses")
    assert curves(opened) == 8
    ranges = "const all = document.getElementById('losses').layout; return all.yaxis.range"
    before = opened.execute_script(ranges)
    button = opened.find_elements(By.CSS_SELECTOR, "button[data-group]")[1]
    button.click()
    wait(lambda: curves(opened) == 6)
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    wait(lambda: curves(opened) == 8)
    assert opened.execute_script(ranges) == before

    chosen = "const { data, layout } = document.getElementById('losses');"
    chosen += " return [layout.xaxis.title.text, data[0].x[0], data[0].hovertemplate]"
    select = opened.find_element(By.CSS_SELECTOR, "select[data-chart=losses]")
    for number, (title, place, told) in enumerate(
        (("tokens", 3 * 256, "%{x:,.4s} tokens"), ("step", 3, "step %{x:,}"))
    ):
        opened.execute_script(
            "arguments[0].selectedIndex = arguments[1];"
            " arguments[0].dispatchEvent(new Event('change'))",
            select,
            1 - number,
        )
        wait(lambda title=title: opened.execute_script(chosen)[0] == title)
        assert opened.execute_script(chosen)[1] == place
        assert told in opened.execute_script(chosen)[2]

    chart = show(opened, "depth-1-1")
    told = hover(opened, chart, 0.5, 0.3)
    assert "written by 0 attn, after 0 mlp" in told
    assert "0.500 is left" in told

    chart = show(opened, "training-1")
    assert "step 2" in (told := hover(opened, chart, 0.1, 0.1))
    assert "mean 2" in told
    opened.execute_script(
        "arguments[0].selectedIndex = 1; arguments[0].dispatchEvent(new Event('change'))",
        opened.find_element(By.CSS_SELECTOR, "select[data-chart=training-1]"),
    )
    opened.execute_script("Plotly.Fx.unhover('training-1')")
    wait(lambda: "mean 506" in hover(opened, chart, 0.9, 0.1))

    details = opened.find_elements(By.TAG_NAME, "details")[0]
    text = details.find_element(By.TAG_NAME, "pre")
    assert not text.is_displayed()
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", details)
    details.find_element(By.TAG_NAME, "summary").click()
    wait(text.is_displayed)
    assert text.text == "early text of plain-s1"

    assert complaints(opened) == []
    urls = {sent["request"]["url"] for sent in network(opened, "requestWillBeSent")}
    assert {url for url in urls if not url.startswith(("data:", "blob:"))} == {page.as_uri()}


def test_the_page_fits(opened: Browser) -> None:
    for id in opened.execute_script(
        "return [...document.querySelectorAll('.chart')].map(e => e.id)"
    ):
        chart = show(opened, id)
        drawn = chart.find_element(By.CSS_SELECTOR, ".main-svg").rect
        assert drawn["width"] == pytest.approx(chart.rect["width"], abs=1), id
        assert least_gap(opened, chart) >= 3, id
    inner, needed = opened.execute_script(
        "return [document.documentElement.clientWidth, document.documentElement.scrollWidth]"
    )
    assert needed <= inner
    for box in opened.find_elements(By.CSS_SELECTOR, ".scroll"):
        assert box.rect["width"] <= inner
    comparison = opened.find_element(By.CSS_SELECTOR, ".scroll")
    inner, needed = opened.execute_script(
        "return [arguments[0].clientWidth, arguments[0].scrollWidth]", comparison
    )
    assert needed <= inner or opened.execute_script("return innerWidth") < 1280


def least_gap(browser: Browser, chart: Any) -> float:
    """Pixels between two neighbours among the labels below a chart; infinite if they stand."""
    boxes = browser.execute_script(
        """return [...arguments[0].querySelectorAll(".xtick text")].map(
            e => e.getBoundingClientRect()).map(box => [box.left, box.right, box.height])""",
        chart,
    )
    lying = sorted((left, right) for left, right, height in boxes if height < 20)
    return min((b[0] - a[1] for a, b in itertools.pairwise(lying)), default=math.inf)


def test_charts_follow_the_window(browser: Browser, page: Path) -> None:
    resize(browser, *SIZES["desktop"])
    open_page(browser, page)
    chart = show(browser, "losses")
    wide = chart.find_element(By.CSS_SELECTOR, ".main-svg").rect["width"]
    resize(browser, *SIZES["phone"])
    wait(lambda: chart.find_element(By.CSS_SELECTOR, ".main-svg").rect["width"] < 390 < wide)


def test_dark_and_printed(browser: Browser, page: Path) -> None:
    """The chart's first colour is black on a light page and on paper, white on a dark page."""
    resize(browser, *SIZES["desktop"])
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    line = "#losses .scatterlayer .trace .js-line"

    def is_stroked(colour: str) -> bool:
        found = browser.find_element(By.CSS_SELECTOR, line).value_of_css_property("stroke")
        return bool(found == colour)

    open_page(browser, page)
    show(browser, "losses")
    wait(lambda: is_stroked("rgb(0, 0, 0)"))
    try:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
        wait(lambda: is_stroked("rgb(255, 255, 255)"))
        browser.execute_script("dispatchEvent(new Event('beforeprint'))")
        assert is_stroked("rgb(0, 0, 0)")
        undrawn = "return document.querySelectorAll('.chart:not(.js-plotly-plot)').length"
        assert browser.execute_script(undrawn) == 0
        assert (
            browser.execute_script("return document.querySelector('.main-svg').clientWidth") == 680
        )
        assert browser.find_elements(By.CSS_SELECTOR, "details:not([open])") == []
        browser.execute_script("dispatchEvent(new Event('afterprint'))")
        assert len(browser.find_elements(By.CSS_SELECTOR, "details:not([open])")) == 2
        assert is_stroked("rgb(255, 255, 255)")
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_markup_in_a_run_is_text(browser: Browser, tmp_path: Path) -> None:
    run = nasty_run(tmp_path)
    out = tmp_path / "page.html"
    write_report(ReportConfig((run,), out=out))
    resize(browser, *SIZES["desktop"])
    open_page(browser, out)
    shown = NAME.translate({0x202E: 0xFFFD, 0x1B: 0xFFFD})
    assert browser.title == f"Report: {shown}"
    assert browser.find_element(By.TAG_NAME, "h1").text == f"Report: {shown}"
    chart = show(browser, "losses")
    assert shown in hover(browser, chart, 0.95, 0.95) or shown in hover(browser, chart, 0.5, 0.5)
    show(browser, "depth-0-0")
    labels = browser.find_elements(By.CSS_SELECTOR, "#depth-0-0 .ytick text")
    assert labels[0].text.startswith("</script><i")
    assert browser.find_elements(By.CSS_SELECTOR, "main img, main b, main a[href^=http]") == []
    assert complaints(browser) == []


def test_no_button_sends_a_chart_away(browser: Browser, page: Path) -> None:
    resize(browser, *SIZES["desktop"])
    open_page(browser, page)
    buttons = show(browser, "losses").find_elements(By.CSS_SELECTOR, ".modebar-btn")
    names = {button.get_attribute("data-attr") for button in buttons}
    titles = " ".join(button.get_attribute("data-title") or "" for button in buttons)
    assert (len(buttons), names) == (4, {None, "dragmode", "zoom"})
    assert "hare" not in titles


def test_a_script_that_is_not_ours_does_not_run(browser: Browser, page: Path) -> None:
    """Were markup of a run ever to come through, the policy would still stop its scripts."""
    open_page(browser, page)
    assert complaints(browser) == []
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.ours = 1';"
        "document.body.append(s); document.body.insertAdjacentHTML('beforeend',"
        " '<img src=http://127.0.0.1:9/x.png onerror=\"window.ours = 2\">')"
    )
    said = wait(lambda: complaints(browser))
    assert "Content Security Policy" in said[0]
    assert browser.execute_script("return window.ours") is None
    assert [failed["blockedReason"] for failed in network(browser, "loadingFailed")] == ["csp"]


def test_a_finger_on_a_chart_scrolls_the_page(browser: Browser, page: Path) -> None:
    resize(browser, *SIZES["phone"])
    open_page(browser, page)
    box = show(browser, "losses").find_element(By.CSS_SELECTOR, ".nsewdrag")
    x, y = browser.execute_script(
        "const box = arguments[0].getBoundingClientRect();"
        "return [box.x + box.width / 2, box.y + box.height / 2]",
        box,
    )
    before = browser.execute_script("return scrollY")
    path = [{"x": x, "y": y - moved} for moved in range(0, 200, 20)]
    kinds = ["touchStart", *["touchMove"] * len(path[1:])]
    for kind, point in zip(kinds, path, strict=True):
        touch(browser, kind, [point])
    touch(browser, "touchEnd", [])
    wait(lambda: browser.execute_script("return scrollY") > before + 100)


def touch(browser: Browser, kind: str, points: list[dict[str, float]]) -> None:
    event = {"type": kind, "touchPoints": points}
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", event)
