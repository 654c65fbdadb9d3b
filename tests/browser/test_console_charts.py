"""Charts in a browser: they are drawn, change their range, fit a phone, and say in words what they show."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from holdfast.codec.samples import SeriesKey, Slot
from tests.browser.browsing import NARROW, WIDE, arrived, visiting
from tests.browser.pictures import sample_the_past
from tests.integration.console_day import live_a_day
from tests.integration.http_gear import Serving


@pytest.mark.parametrize(("size", "dark"), [(WIDE, False), (NARROW, True)])
def test_the_charts_of_a_queue(browser: Browser, server: Serving, size: tuple[int, int], dark: bool):
    live_a_day(server)
    sample_the_past(server)
    with visiting(browser, f"{server.url}/ui/queues/mails/charts", size=size, dark=dark) as visit:
        page = visit.page
        charts = page.get_by_role("img", name="Messages per second")
        expect(charts).to_be_visible()
        expect(page.locator("figure").first.get_by_text("▲ peak")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.get_by_text("As a table").click()
        expect(page.get_by_role("columnheader", name="Published")).to_be_visible()
        page.get_by_role("link", name="6h").click()
        expect(page.get_by_role("link", name="6h")).to_have_attribute("aria-current", "true")
        expect(page.get_by_role("img", name="Ready")).to_be_visible()


def test_the_overview_leads_from_what_needs_attention_to_where_it_is_handled(browser: Browser, server: Serving):
    live_a_day(server)
    sample_the_past(server)
    engine = server.server.service.engine
    engine.sampler.before_close()  # the only samples of the queue are these
    engine.sampler.sample()
    minute_ago_s = engine.world.clock.now_ns() // 10**9 - 60
    engine.sampler.store.merge(SeriesKey("queue", "orders", "default", engine.topic("orders").id), Slot(minute_ago_s))
    with visiting(browser, f"{server.url}/ui") as visit:
        page = visit.page
        item = page.locator(".attention li").filter(has_text="orders has new dead letters")
        expect(item).to_be_visible()
        expect(page.get_by_role("img", name="Messages per second")).to_be_visible()
        item.get_by_role("link").click()
        arrived(page, f"{server.url}/ui/queues/orders/dead")
