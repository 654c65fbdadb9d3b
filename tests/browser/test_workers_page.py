"""Draining and stopping a worker by hand, in a browser."""

from __future__ import annotations

from playwright.sync_api import Browser, expect

from tests.browser.browsing import visiting
from tests.integration.http_gear import Serving


def test_a_worker_is_told_to_drain_and_to_stop(browser: Browser, server: Serving):
    server.request("PUT", "/v1/queues/orders", {})
    report = {"id": "w1", "name": "mailer", "host": "h1", "concurrency": 4}
    server.post("/v1/queues/orders/workers", report)
    with visiting(browser, f"{server.url}/ui/workers") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        page.get_by_role("button", name="Drain…").click()
        expect(ask).to_contain_text("stays idle until you resume it")
        ask.get_by_role("button", name="Drain").click()
        expect(page.get_by_text("mailer was told to drain")).to_be_visible()
        expect(page.locator("#workers").get_by_text("told to drain")).to_be_visible()
        assert server.post("/v1/queues/orders/workers", report).body == {"order": "drain"}
        server.post("/v1/queues/orders/workers", {**report, "status": "drained"})
        expect(page.get_by_role("button", name="Resume…")).to_be_visible()
        page.get_by_role("button", name="Stop…").click()
        ask.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("mailer was told to stop")).to_be_visible()
        assert server.post("/v1/queues/orders/workers", {**report, "status": "drained"}).body == {"order": "stop"}
