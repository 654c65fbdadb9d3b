"""The built documentation can be read from disk, without a network: its pages, its pictures, its search."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.browsing import browser_path, visiting
from tests.tidy.site import built

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if browser_path() is None:
        pytest.skip("there is no Chromium")
    return built(tmp_path_factory)


def test_the_site_is_searched_from_disk_and_asks_for_nothing_from_elsewhere(browser: Browser, site: Path):
    with visiting(browser, (site / "index.html").as_uri()) as visit:
        asked: list[str] = []
        visit.page.on("request", lambda request: asked.append(request.url))
        visit.page.reload()
        visit.page.locator("input[name=query]").click()
        visit.page.locator("input[name=query]").press_sequentially("redrive")
        found = visit.page.locator(".md-search-result__item a").first
        found.wait_for()
        found.click()
        visit.page.wait_for_url("**/*.html*")
        assert "redrive" in visit.page.locator("article").inner_text().lower()
        assert [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))] == []
