"""Pausing and resuming a queue by hand, in a browser."""

from __future__ import annotations

from playwright.sync_api import Browser, expect

from tests.browser.browsing import visiting
from tests.integration.http_gear import Serving


def test_a_queue_is_paused_with_a_reason_and_resumed(browser: Browser, server: Serving):
    server.request("PUT", "/v1/queues/orders", {})
    with visiting(browser, f"{server.url}/ui/queues/orders") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        page.get_by_role("button", name="Pause…").click()
        expect(ask).to_contain_text("No messages are delivered until you resume it")
        ask.get_by_label("Reason").fill("the printer burns")
        ask.get_by_role("button", name="Pause").click()
        expect(page.get_by_text("orders, group default, was paused")).to_be_visible()
        expect(page.locator("#handing-out")).to_contain_text("the printer burns")
        assert server.get("/v1/queues/orders/stats").body["paused"]["reason"] == "the printer burns"
        page.get_by_role("button", name="Resume…").click()
        expect(ask.get_by_label("Reason")).to_be_hidden()
        ask.get_by_role("button", name="Resume").click()
        expect(page.get_by_text("orders, group default, was resumed")).to_be_visible()
        expect(page.get_by_role("button", name="Pause…")).to_be_visible()
        assert server.get("/v1/queues/orders/stats").body.get("paused") is None


def test_a_group_is_paused_from_the_list_of_groups(browser: Browser, server: Serving):
    server.request("PUT", "/v1/queues/orders", {})
    with visiting(browser, f"{server.url}/ui/groups") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        page.get_by_role("button", name="Pause…").click()
        ask.get_by_role("button", name="Pause").click()
        expect(page.locator("#groups").get_by_text("paused")).to_be_visible()
