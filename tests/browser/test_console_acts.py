"""What people do in the console: search, follow a first redrive, choose rows, take a message back, jump elsewhere."""

from __future__ import annotations

import re

from playwright.sync_api import Browser, expect

from tests.browser.browsing import arrived, visiting
from tests.integration.console_day import failed, order, taken
from tests.integration.http_gear import Serving

QUEUE = "/v1/queues/orders"


def dead(server: Serving, count: int) -> None:
    server.request("PUT", QUEUE, {"settings": {"max_attempts": 1}})
    for i in range(count):
        order(server, i)
    failed(server, ["TimeoutError: 30 s"] * count)


def test_a_message_is_found_and_opened_in_two_steps(browser: Browser, day: Serving):
    with visiting(browser, f"{day.url}/ui/groups") as visit:
        page = visit.page
        page.get_by_label("Search all queues: id").fill("$.order=30")
        page.keyboard.press("Enter")
        page.get_by_role("link", name="orders-0-30").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("orders-0-30")


def test_the_first_ten_are_followed_before_the_rest_is_redriven_at_a_rate(browser: Browser, server: Serving):
    dead(server, 12)
    with visiting(browser, f"{server.url}/ui/queues/orders/dead") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        page.locator("td").get_by_role("button", name="Redrive 10 first").click()
        ask.get_by_role("button", name="Redrive 10").click()
        arrived(page, re.compile("/redriven"))
        expect(page.locator("#summary")).to_have_text("10 waiting")
        receipts = taken(server, 10)
        server.post(f"{QUEUE}/ack", {"receipts": receipts[:7]})
        server.post(f"{QUEUE}/nack", {"receipts": receipts[7:], "error": "TimeoutError: 31 s"})
        expect(page.locator("#summary")).to_have_text("7 done, 3 failed again (same error)")
        page.get_by_role("button", name="Redrive the rest").click()
        ask.get_by_label("messages per second").fill("1000")
        ask.get_by_role("button", name="Redrive 5").click()
        expect(ask).to_contain_text("5 redriven.")
        assert server.get(f"{QUEUE}/stats").body["ready"] == 5


def test_rows_are_chosen_and_purged_together(browser: Browser, server: Serving):
    dead(server, 5)
    with visiting(browser, f"{server.url}/ui/queues/orders?tab=dead") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        expect(page.get_by_role("button", name="Purge selected")).to_be_disabled()
        page.get_by_label("Select orders.dlq-0-1").check()
        page.get_by_label("Select orders.dlq-0-3").check()
        expect(page.locator("#chosen-count")).to_have_text("2 selected")
        page.get_by_role("button", name="Purge selected").click()
        expect(ask).to_contain_text("2 dead letters will be deleted")
        ask.get_by_role("button", name="Purge 2").click()
        expect(ask).to_contain_text("2 purged.")
        ask.get_by_role("button", name="Close").click()
        expect(page.get_by_label("Select orders.dlq-0-3")).to_have_count(0)
        assert server.get(f"{QUEUE}/stats").body["dead"] == 3


def test_a_lease_is_taken_back_and_a_delayed_message_runs_now(browser: Browser, server: Serving):
    server.request("PUT", QUEUE, {})
    order(server, 1)
    taken(server)
    order(server, 2, delay=3_600)
    with visiting(browser, f"{server.url}/ui/queues/orders/messages/orders-0-0") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        page.get_by_role("button", name="Take back").click()
        ask.get_by_role("button", name="Take back").click()
        expect(page.get_by_text("orders-0-0 was taken back")).to_be_visible()
        expect(page.locator("#phase")).to_have_text("ready")
        page.goto(f"{server.url}/ui/queues/orders/messages/orders-0-d0")
        page.get_by_role("button", name="Run now").click()
        ask.get_by_role("button", name="Run now").click()
        expect(page.get_by_text("orders-0-d0 is ready")).to_be_visible()
        assert server.get(f"{QUEUE}/stats").body["ready"] == 2


def test_the_palette_leads_to_queues_pages_and_the_search(browser: Browser, day: Serving):
    with visiting(browser, f"{day.url}/ui/health") as visit:
        page, options = visit.page, visit.page.locator("#palette-list li")
        page.keyboard.press("Control+k")
        expect(options.first).to_be_visible()
        page.keyboard.type("thumb")
        expect(options).to_have_count(2)
        page.keyboard.press("Enter")
        arrived(page, f"{day.url}/ui/queues/thumbnails")
        page.keyboard.press("Control+k")
        page.keyboard.type("audit")
        expect(options.first).to_have_text("Audit page")
        page.keyboard.press("Enter")
        arrived(page, f"{day.url}/ui/audit")
        page.keyboard.press("Control+k")
        page.keyboard.type("enough of it")
        expect(options).to_have_count(1)
        page.keyboard.press("Enter")
        expect(page.get_by_role("link", name="thumbnails-0-0")).to_be_visible()
        page.goto(f"{day.url}/ui/health")
        page.keyboard.press("/")
        expect(page.locator("#find")).to_be_focused()


def test_ready_and_delayed_rows_are_chosen_and_cancelled_or_run_together(browser: Browser, server: Serving):
    server.request("PUT", QUEUE, {})
    for i in range(14):
        order(server, i, delay=3_600 if i > 10 else 0)
    with visiting(browser, f"{server.url}/ui/queues/orders") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        expect(page.get_by_role("button", name="Cancel selected")).to_be_disabled()
        page.get_by_label("Select all rows").check()
        page.get_by_label("Select orders-0-3").uncheck()
        taken(server)  # somebody is quicker with the first
        page.get_by_role("button", name="Cancel selected").click()
        expect(ask).to_contain_text("10 messages: never delivered.")
        expect(ask).to_contain_text("orders-0-0")
        ask.get_by_role("button", name="Cancel 10 messages").click()
        expect(ask).to_contain_text("9 cancelled. 1 too late")
        ask.get_by_role("button", name="Close").click()
        expect(page.get_by_label("Select orders-0-3")).to_have_count(1)
        expect(page.get_by_label("Select orders-0-4")).to_have_count(0)
        page.goto(f"{server.url}/ui/queues/orders?tab=delayed")
        page.get_by_label("Select all rows").check()
        page.get_by_role("button", name="Run selected now").click()
        ask.get_by_role("button", name="Run 3 messages").click()
        expect(ask).to_contain_text("3 ready.")
        stats = server.get(f"{QUEUE}/stats").body
        assert (stats["ready"], stats["delayed"], stats["leased"]) == (4, 0, 1)


def test_live_updates_are_paused_by_a_button_and_stay_so_in_this_tab(browser: Browser, server: Serving):
    server.request("PUT", QUEUE, {})
    with visiting(browser, f"{server.url}/ui") as visit:
        page, ready = visit.page, visit.page.locator("#totals dd").first
        button = page.get_by_role("button", name="Pause live updates")
        button.click()
        expect(button).to_have_attribute("aria-pressed", "true")
        page.reload()
        expect(button).to_have_attribute("aria-pressed", "true")
        order(server, 1)
        page.wait_for_timeout(7_000)  # longer than the pages take to renew themselves
        expect(ready).to_have_text("0")
        page.keyboard.press("p")
        expect(button).to_have_attribute("aria-pressed", "false")
        expect(ready).to_have_text("1")
        page.goto(f"{server.url}/ui/search")
        expect(button).to_be_hidden()


def test_a_body_is_copied_and_a_time_is_shown_on_ones_own_clock(browser: Browser, day: Serving):
    with visiting(browser, f"{day.url}/ui/queues/orders/messages/orders-0-30") as visit:
        page = visit.page
        page.get_by_role("button", name="Copy the body").click()
        expect(page.get_by_text("Copied")).to_be_visible()
        assert '"order": 30' in page.evaluate("navigator.clipboard.readText()")
        page.locator("#facts time").first.hover()
        zone = page.evaluate("Intl.DateTimeFormat().resolvedOptions().timeZone")
        expect(page.locator("#facts time").first).to_have_attribute("title", re.compile(re.escape(f"({zone})")))


def test_queues_are_sorted_by_a_column_and_the_address_keeps_it(browser: Browser, day: Serving):
    with visiting(browser, f"{day.url}/ui?range=1h") as visit:
        page, names = visit.page, visit.page.locator("#queues a.row")
        assert names.all_inner_texts() == ["mails", "orders", "thumbnails", "webhooks"]
        page.get_by_role("link", name="Dead", exact=True).click()
        arrived(page, f"{day.url}/ui?sort=dead&range=1h")
        expect(names.first).to_have_text("orders")
        expect(page.get_by_role("columnheader", name="Dead")).to_have_attribute("aria-sort", "descending")
        page.get_by_label("Queues whose names contain this").fill("s")
        page.keyboard.press("Enter")
        arrived(page, f"{day.url}/ui?name=s&sort=dead&range=1h")
        expect(names.first).to_have_text("orders")
        page.get_by_role("link", name="Queue", exact=True).click()
        expect(names.first).to_have_text("mails")


def test_the_workers_of_one_queue_are_a_click_away(browser: Browser, day: Serving):
    with visiting(browser, f"{day.url}/ui/queues/orders") as visit:
        page = visit.page
        page.locator(".sections").get_by_role("link", name="Workers").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Workers of orders")
        expect(page.get_by_role("row", name="worker-eu-1")).to_be_visible()
        page.goto(f"{day.url}/ui/workers?queue=mails")
        expect(page.get_by_text("No messages are in flight.")).to_be_visible()
        expect(page.get_by_text("holdfast worker")).to_be_visible()


def test_leased_rows_are_chosen_and_taken_back_together(browser: Browser, server: Serving):
    server.request("PUT", QUEUE, {})
    for i in range(3):
        order(server, i)
    taken(server, 3)
    with visiting(browser, f"{server.url}/ui/queues/orders?tab=leased") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        page.get_by_label("Select orders-0-0").check()
        page.get_by_label("Select orders-0-2").check()
        page.get_by_role("button", name="Take back selected").click()
        ask.get_by_role("button", name="Take back 2 messages").click()
        expect(ask).to_contain_text("2 taken back.")
        assert server.get(f"{QUEUE}/stats").body["leased"] == 1


def test_a_setting_is_changed_a_queue_purged_and_then_deleted(browser: Browser, server: Serving):
    server.request("PUT", QUEUE, {})
    order(server, 1)
    with visiting(browser, f"{server.url}/ui/queues/orders/settings?all=true") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        row = page.get_by_role("row", name="max_attempts")
        row.get_by_role("button", name="Change").click()
        expect(ask.get_by_label("max_attempts")).to_have_value("5")
        ask.get_by_label("max_attempts").fill("3")
        ask.get_by_role("button", name="Change").click()
        expect(row).to_contain_text("3")
        assert server.get("/v1/topics/orders").body["settings"]["max_attempts"] == 3
        page.get_by_role("button", name="Purge messages").click()
        expect(ask).to_contain_text("1 ready and 0 delayed messages will be dropped")
        ask.get_by_role("button", name="Purge").click()
        expect(page.get_by_text("orders, group default, was purged")).to_be_visible()
        assert server.get(f"{QUEUE}/stats").body["ready"] == 0
        page.get_by_role("button", name="Delete queue").click()
        expect(ask.get_by_role("button", name="Delete")).to_be_disabled()
        ask.get_by_label("Type orders to confirm").fill("orders")
        ask.get_by_role("button", name="Delete").click()
        arrived(page, f"{server.url}/ui")
        assert server.get("/v1/topics").body["topics"] == []


def test_a_setting_that_cannot_be_is_refused_in_the_dialog(browser: Browser, server: Serving):
    server.request("PUT", QUEUE, {"settings": {"max_attempts": 4}})
    with visiting(browser, f"{server.url}/ui/queues/orders/settings") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        page.get_by_role("row", name="max_attempts").get_by_role("button", name="Change").click()
        ask.get_by_label("max_attempts").fill("many")
        ask.get_by_role("button", name="Change").click()
        expect(ask).to_contain_text("cannot be used")
        visit.faults.clear()  # the browser notes that the call was refused
        assert server.get("/v1/topics/orders").body["settings"]["max_attempts"] == 4


def test_a_lock_is_taken_from_a_stuck_holder(browser: Browser, server: Serving):
    server.post("/v1/locks/report/acquire", {"owner": "stuck", "lease": 600})
    with visiting(browser, f"{server.url}/ui/locks") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        page.get_by_role("button", name="Release").click()
        ask.get_by_role("button", name="Release").click()
        expect(page.get_by_text("report was released")).to_be_visible()
        assert server.get("/v1/locks").body["locks"] == []


def test_a_schedule_is_run_paused_resumed_and_deleted_from_its_page(browser: Browser, server: Serving):
    server.request("PUT", QUEUE, {})
    schedule = {"topic": "orders", "text": "daily", "cron": "0 3 1 1 *", "timezone": "Europe/Berlin"}
    assert server.request("PUT", "/v1/schedules/report", schedule).status == 200
    with visiting(browser, f"{server.url}/ui/schedules") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        for button, done in (("Run now", "was run"), ("Pause", "was paused"), ("Resume", "was resumed")):
            page.get_by_role("button", name=f"{button}…").click()
            ask.get_by_role("button", name=button.removesuffix(" now")).click()
            expect(page.get_by_text(f"report {done}")).to_be_visible()
        expect(page.get_by_role("link", name="orders-0-0")).to_be_visible()
        page.get_by_role("link", name="report", exact=True).click()
        expect(page.get_by_role("heading", name="Next times")).to_be_visible()
        page.get_by_role("button", name="Delete").click()
        ask.get_by_role("button", name="Delete").click()
        expect(page.get_by_text("report was deleted")).to_be_visible()
        assert server.get("/v1/schedules").body["schedules"] == []


def test_a_group_is_deleted_from_its_page_once_its_name_is_typed(browser: Browser, server: Serving):
    server.request("PUT", QUEUE, {})
    server.request("PUT", "/v1/topics/orders/groups/billing", {})
    with visiting(browser, f"{server.url}/ui/groups/billing") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        page.get_by_role("button", name="Delete").click()
        ask.get_by_label("Type billing to confirm").fill("billing")
        ask.get_by_role("button", name="Delete").click()
        arrived(page, f"{server.url}/ui/groups")
        assert server.get("/v1/topics/orders").body["groups"] == ["default"]
