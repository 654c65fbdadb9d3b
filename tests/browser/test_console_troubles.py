"""What goes wrong while a page is open is said on it, the page stays usable, and hostile content is only text."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.browsing import NARROW, WIDE, visiting
from tests.browser.test_console_pages import LOOK
from tests.integration.console_day import failed, order
from tests.integration.http_gear import Serving, serving
from tests.integration.test_http_revoked import OPS, write_tokens

EVIL = "<script>alert('x')</script>\"'><img src=x onerror=alert(1)>"
HOSTILE = [
    {"text": EVIL, "key": EVIL, "headers": [{"name": EVIL, "value": EVIL}]},
    {"text": "W" * 5_000, "key": "K" * 400, "headers": [{"name": "N" * 200, "value": "V" * 400}]},
    {"text": "a\x00b\x1b[31m", "key": "\x00"},
    {"text": "مرحبا \u202egnp.exe\u202c שלום", "key": "\u202egnp.exe"},
    {"text": '{"a":' * 300 + "1" + "}" * 300},
    {"text": "one line\n" * 3_000},
]


@contextlib.contextmanager
def signed_in(browser: Browser, url: str, token: str) -> Iterator[Page]:
    context = browser.new_context(http_credentials={"username": "me", "password": token})
    try:
        page = context.new_page()
        page.goto(url)
        yield page
    finally:
        context.close()


def test_a_token_that_is_revoked_while_the_page_is_open_is_said_on_it(browser: Browser, tmp_path: Path):
    tokens = tmp_path / "tokens.json"
    write_tokens(tokens, OPS, {"name": "eve"})
    with serving(tmp_path / "data", whole=True, tokens_file=str(tokens)) as server:
        assert server.request("PUT", "/v1/queues/orders", {}, token="ops").status == 200
        with signed_in(browser, f"{server.url}/ui/queues/orders", "eve") as page:
            expect(page.locator("#live-problem")).to_be_hidden()
            write_tokens(tokens, OPS)
            expect(page.locator("#live-problem")).to_contain_text("Your token is no longer accepted")
            page.get_by_role("button", name="Pause…").click()
            ask = page.locator("#ask")
            ask.get_by_role("button", name="Pause").click()
            expect(ask).to_contain_text("Reload the page to sign in again.")
            ask.get_by_role("button", name="Close").click()
            write_tokens(tokens, OPS, {"name": "eve"})
            while server.get("/ui", token="eve").status != 200:
                time.sleep(0.1)  # until the server has read the file
            page.get_by_role("button", name="Sign in again").click()
            expect(page.locator("#live-problem")).to_be_hidden()
            expect(page.get_by_role("heading", level=1)).to_have_text("orders")


def test_a_right_that_is_taken_away_is_said_and_comes_back(browser: Browser, tmp_path: Path):
    tokens = tmp_path / "tokens.json"
    write_tokens(tokens, OPS, {"name": "eve"})
    with serving(tmp_path / "data", whole=True, tokens_file=str(tokens)) as server:
        assert server.request("PUT", "/v1/queues/orders", {}, token="ops").status == 200
        with signed_in(browser, f"{server.url}/ui/queues/orders", "eve") as page:
            write_tokens(tokens, OPS, {"name": "eve", "role": ["read"], "topics": ["mails"]})
            expect(page.locator("#live-problem")).to_contain_text("This page is out of date.")
            expect(page.get_by_role("button", name="Sign in again")).to_be_hidden()
            write_tokens(tokens, OPS, {"name": "eve"})
            expect(page.locator("#live-problem")).to_be_hidden()


def test_a_server_that_restarts_while_the_page_is_open(browser: Browser, tmp_path: Path):
    with serving(tmp_path / "data", whole=True) as server:
        server.request("PUT", "/v1/queues/orders", {})
        order(server, 1)
        url = server.url
        context = browser.new_context(base_url=url)
        page, tail = context.new_page(), context.new_page()
        page.goto("/ui/queues/orders")
        tail.goto("/ui/queues/orders/tail")
        expect(tail.locator("#tail-state")).to_contain_text("Listening")
    try:
        expect(page.locator("#live-problem")).to_contain_text("The server has not answered since")
        expect(tail.locator("#tail-state")).to_have_text("The connection was lost. Trying again…")
        page.get_by_role("button", name="Pause…").click()
        page.locator("#ask").get_by_role("button", name="Pause").click()
        expect(page.locator("#ask")).to_contain_text("The change may or may not have been made")
        page.locator("#ask").get_by_role("button", name="Close").click()
        with serving(tmp_path / "data", whole=True, port=urlsplit(url).port) as again:
            expect(page.locator("#live-problem")).to_be_hidden()
            order(again, 2)
            expect(page.locator("#stats dd").first).to_have_text("2")
            expect(tail.locator("#tail-state")).to_contain_text("messages sent in that time are not listed")
            order(again, 3)
            expect(tail.locator("#tail tbody tr").first).to_contain_text("orders-0-2")
    finally:
        context.close()


def test_a_queue_that_is_deleted_while_its_page_is_open(browser: Browser, server: Serving):
    server.request("PUT", "/v1/queues/orders", {})
    with visiting(browser, f"{server.url}/ui/queues/orders") as visit:
        server.request("DELETE", "/v1/topics/orders")
        problem = visit.page.locator("#live-problem")
        expect(problem).to_contain_text("This page is out of date. There is no topic orders")
        server.request("PUT", "/v1/queues/orders", {})
        expect(problem).to_be_hidden()
        visit.faults.clear()  # the browser notes the answers 404


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_hostile_content_is_shown_as_text_and_breaks_no_page(browser: Browser, server: Serving, size: tuple[int, int]):
    name = "a.b_c-" + "x" * 150
    for queue in ("odd", name):
        server.request("PUT", f"/v1/queues/{queue}", {"settings": {"max_attempts": 1, "trace_sample": 1.0}})
        assert server.post(f"/v1/queues/{queue}/batch", {"messages": HOSTILE}).status == 201
        failed(server, [f"{EVIL}\n{'E' * 3_000}\u202e\x00"] * 3, queue=queue)
        server.post(f"/v1/queues/{queue}/dequeue", {"count": 1, "owner": EVIL})
        server.post(f"/v1/queues/{queue}/pause", {"reason": EVIL + "R" * 300})
        report = {"id": f"w-{len(queue)}", "name": EVIL, "host": EVIL, "version": EVIL[:20], "concurrency": 1}
        assert server.post(f"/v1/queues/{queue}/workers", report).status == 200
    assert server.post("/v1/locks/odd/acquire", {"owner": EVIL, "lease": 600}).status == 200
    assert server.request("PUT", "/v1/state/odd", {"value": {EVIL: EVIL}}).status < 300
    paths = ["/ui", "/ui/audit", "/ui/groups", "/ui/groups/default", "/ui/workers", "/ui/search?q=onerror"]
    paths += [
        "/ui/locks?document=odd",
        f"/ui/search?{urlencode({'q': EVIL})}",
        f"/ui/groups?{urlencode({'name': EVIL})}",
    ]
    for queue in ("odd", name):
        here = f"/ui/queues/{queue}"
        paths += [here, f"{here}?tab=dead", f"{here}?tab=done", f"{here}/dead", f"{here}/send?copy_of={queue}-0-0"]
        paths += [f"{here}/messages/{queue}.dlq-0-{i}" for i in range(3)]
        paths += [f"{here}/log", f"{here}/tail", f"{here}/charts", f"{here}/settings", f"{here}?tab=leased"]
        paths += [f"{here}/redriven?ids={queue}.dlq-0-0", f"{here}?{urlencode({'where': EVIL})}"]
        paths += [f"{here}/messages/{queue}-0-{i}" for i in range(3, 6)]
    with visiting(browser, f"{server.url}/ui", size=size) as visit:
        faults = {}
        for path in paths:
            visit.page.goto(server.url + path)
            faults[path] = visit.page.evaluate(LOOK)
        assert {path: found for path, found in faults.items() if found} == {}
        expect(visit.page.locator("#payload")).to_contain_text("one line")
        # The browser notes the answer 400 to a filter that is none.
        visit.faults = [fault for fault in visit.faults if "status of 400" not in fault]


def test_a_redrive_is_stopped_and_the_rest_stay_dead(browser: Browser, server: Serving):
    server.request("PUT", "/v1/queues/orders", {"settings": {"max_attempts": 1}})
    for i in range(30):
        order(server, i)
    failed(server, ["TimeoutError: 30 s"] * 30)
    with visiting(browser, f"{server.url}/ui/queues/orders/dead") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        page.locator("td").get_by_role("button", name="Redrive…", exact=True).click()
        ask.get_by_label("messages per second").fill("1")
        ask.get_by_role("button", name="Redrive 30").click()
        expect(ask).to_contain_text(re.compile(r"[1-9][0-9]* of 30 redriven; about"))
        ask.get_by_role("button", name="Stop").click()
        expect(ask).to_contain_text("The rest are still dead letters.")
        ask.get_by_role("button", name="Close").click()
        left = _settled(lambda: server.get("/v1/queues/orders/stats").body["dead"])
        assert 0 < left < 30


def _settled(read) -> int:  # type: ignore[no-untyped-def]
    """A number that no longer changes: the server notices within a step that nobody listens."""
    before = read()
    while True:
        time.sleep(3)
        now = read()
        if now == before:
            return int(now)
        before = now


def test_a_message_is_edited_and_sent_again(browser: Browser, day: Serving):
    with visiting(browser, f"{day.url}/ui/queues/orders/messages/orders-0-30") as visit:
        page = visit.page
        page.get_by_role("link", name="Edit and send again").click()
        body = page.get_by_label("Body", exact=True)
        expect(body).to_have_value(re.compile('"order":30'))
        expect(page.get_by_label("Key", exact=True)).to_have_value("c-2")
        expect(page.get_by_label("Headers, one per line")).to_have_value("tenant: acme")
        body.fill('{"order": 31}')
        page.get_by_role("button", name="Send", exact=True).click()
        page.locator("#sent a").click()
        expect(page.locator("#payload")).to_contain_text('"order": 31')


def test_the_palette_leads_to_the_pages_of_a_queue(browser: Browser, day: Serving):
    with visiting(browser, f"{day.url}/ui/health") as visit:
        page = visit.page
        page.keyboard.press("Control+k")
        page.keyboard.type("orders dead")
        expect(page.locator("#palette-list li").first).to_have_text("orders dead letters page")
        page.keyboard.press("Enter")
        expect(page).to_have_url(f"{day.url}/ui/queues/orders/dead")
