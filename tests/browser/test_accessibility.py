"""axe-core finds nothing on any page that would keep people from using it, in light and dark, wide and narrow."""

from __future__ import annotations

import fcntl
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from holdfast.server.console import console_routes
from tests.browser.browsing import NARROW, WIDE, visiting
from tests.browser.test_console_pages import PAGES
from tests.integration.http_gear import Serving

AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"

MORE = [
    "/ui/search",
    "/ui/search?q=tenant%3Dacme",
    "/ui/queues/orders/redriven?ids=orders.dlq-0-0,orders.dlq-0-1",
    "/ui/queues/orders/messages/orders-0-17",
    "/ui/queues/nothing",
    "/ui/queues/orders/send?copy_of=orders-0-30",
]

INSTALL = Path(__file__).parents[2] / "tools" / "browser.sh"


@pytest.fixture(scope="module", autouse=True)
def _axe() -> None:
    """axe-core, installed as `make test` does it; one process at a time, since each has its own share of the tests."""
    with (Path(tempfile.gettempdir()) / "holdfast-axe-core.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not AXE.exists():
            ran = subprocess.run([INSTALL], capture_output=True, text=True, timeout=600, check=False)
            if not AXE.exists():
                pytest.skip(f"there is no axe-core: {ran.stderr.strip()}")


def faults(page: Page) -> list[str]:
    """What axe-core holds to be serious or critical on this page."""
    page.evaluate(AXE.read_text("utf-8"))
    found: dict[str, Any] = page.evaluate("axe.run({ resultTypes: ['violations'] })")
    return [
        f"{fault['id']}: {node['html'][:200]}"
        for fault in found["violations"]
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_axe_finds_nothing_serious(browser: Browser, day: Serving, size: tuple[int, int], dark: bool):
    with visiting(browser, f"{day.url}/ui", size=size, dark=dark) as visit:
        found = {}
        for path in [*PAGES, *MORE]:
            visit.page.goto(day.url + path)
            found[path] = faults(visit.page)
        visit.faults.clear()  # the browser itself tells of the answer 404
        assert {path: each for path, each in found.items() if each} == {}


def test_no_page_of_the_console_is_left_out():
    """A page that is added to the console is added to these lists, and so looked at by every test that uses them."""
    patterns = {route.pattern for routes in console_routes() for route in routes.all}
    patterns -= {"/", "/ui/static/{file}", "/ui/queues/{queue}/messages/{id}/body"}  # these are no pages
    shown = [path.partition("?")[0] for path in [*PAGES, *MORE]]
    asked = {pattern: re.compile(re.sub(r"[{][^}]+[}]", "[^/]+", pattern)) for pattern in patterns}
    assert [pattern for pattern, wanted in asked.items() if not any(map(wanted.fullmatch, shown))] == []


def test_axe_finds_nothing_serious_in_the_dialogs(browser: Browser, day: Serving):
    with visiting(browser, f"{day.url}/ui/queues/orders/dead") as visit:
        page = visit.page
        page.keyboard.press("Control+k")
        page.locator("#palette-list li").first.wait_for()
        assert faults(page) == []
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        page.locator("#keys").wait_for()
        assert faults(page) == []
        page.keyboard.press("Escape")
        page.locator("td").get_by_role("button", name="Redrive").first.click()
        page.locator("#ask-yes:not([disabled])").wait_for()
        assert faults(page) == []


def test_it_would_find_something(browser: Browser, day: Serving):
    with visiting(browser, f"{day.url}/ui") as visit:
        visit.page.evaluate("document.querySelector('#filter').parentElement.querySelector('label').remove()")
        visit.page.evaluate("document.querySelector('#filter').removeAttribute('placeholder')")
        assert any(fault.startswith("label:") for fault in faults(visit.page))
