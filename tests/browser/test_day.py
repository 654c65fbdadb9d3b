"""A day's work in the console: publish, see it, let it fail, read the error, redrive, see it done."""

from __future__ import annotations

from playwright.sync_api import Browser, expect

from tests.browser.browsing import visiting
from tests.integration.http_gear import Serving

ERROR = "ValueError: there is no card 4711\n  in charge(), line 12"


def work(server: Serving, *, error: str = "") -> None:
    """What a worker does with the next message."""
    (message,) = server.post("/v1/queues/orders/dequeue", {"owner": "worker-7", "wait": 10}).body["messages"]
    if error:
        answer = server.post("/v1/queues/orders/nack", {"receipts": [message["receipt"]], "error": error})
    else:
        answer = server.post("/v1/queues/orders/ack", {"receipts": [message["receipt"]]})
    assert answer.status == 200


def test_a_days_work(browser: Browser, server: Serving):
    with visiting(browser, f"{server.url}/ui") as visit:
        page = visit.page
        page.get_by_label("Name of a new queue").fill("orders")
        page.get_by_role("button", name="Create queue").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("orders")
        change = {"settings": {"max_attempts": 1, "trace_sample": 1.0}}
        assert server.request("PATCH", "/v1/topics/orders/settings", change).status == 200

        page.get_by_role("link", name="Send", exact=True).click()
        page.get_by_label("Body", exact=True).fill('{"order": 17, "card": "4711"}')
        page.get_by_label("Key", exact=True).fill("customer-3")
        page.get_by_label("Headers, one per line").fill("tenant: acme")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("link", name="orders-0-0").click()
        expect(page.locator(".payload")).to_contain_text('"card": "4711"')
        expect(page.locator("#phase")).to_have_text("ready")

        work(server, error=ERROR)
        expect(page.locator("#phase")).to_have_text("dead", timeout=15_000)  # by itself
        page.get_by_role("link", name="Queues").first.click()
        row = page.get_by_role("row", name="orders")
        row.get_by_role("link", name="1", exact=False).last.click()
        expect(page.get_by_role("heading", level=1)).to_have_text("orders")
        page.get_by_role("link", name="ValueError: there is no card …").click()
        page.get_by_role("link", name="orders.dlq-0-0").click()
        expect(page.locator("#error-title + pre")).to_have_text(ERROR)
        expect(page.locator(".life")).to_contain_text("worker-7")

        page.get_by_role("link", name="Queues").first.click()
        page.get_by_role("link", name="orders", exact=True).click()
        page.get_by_role("link", name="Dead letters").click()
        page.locator("td").get_by_role("button", name="Redrive…", exact=True).click()
        ask = page.locator("#ask")
        expect(ask).to_contain_text("1 dead letter will be redriven")
        expect(ask).to_contain_text("orders.dlq-0-0")
        ask.get_by_role("button", name="Redrive 1").click()
        expect(ask).to_contain_text("1 redriven.")
        ask.get_by_role("button", name="Close").click()
        expect(page.get_by_text("No dead letters.")).to_be_visible()

        work(server)
        page.get_by_role("link", name="Messages").click()
        page.get_by_role("link", name="Done").click()
        page.get_by_role("link", name="orders-0-1").click()
        expect(page.locator("#phase")).to_have_text("done")
        for step in ("published", "moved to the dead letters", "redriven", "acked"):
            expect(page.locator(".life")).to_contain_text(step)

        page.get_by_role("link", name="Audit").click()
        expect(page.get_by_role("row", name="redrove 1 message of orders").first).to_contain_text("done")
