"""The console in a browser: nothing too wide, all of it readable and reachable, by hand and by keyboard."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.browser.browsing import NARROW, WIDE, arrived, visiting
from tests.browser.pictures import FOLDER, PICTURES
from tests.integration.console_day import failed, order
from tests.integration.http_gear import Serving

PAGES = [
    "/ui",
    "/ui/queues/orders",
    "/ui/queues/orders?tab=leased",
    "/ui/queues/orders?tab=delayed",
    "/ui/queues/orders?tab=dead",
    "/ui/queues/orders/charts",
    "/ui/queues/orders/charts?range=7d",
    "/ui/queues/orders/dead",
    "/ui/queues/orders/messages/orders-0-0",
    "/ui/queues/orders/messages/orders.dlq-0-0",
    "/ui/queues/orders/tail",
    "/ui/queues/orders/log",
    "/ui/queues/orders/settings?all=true",
    "/ui/queues/orders/send",
    "/ui/groups",
    "/ui/groups/default",
    "/ui/workers",
    "/ui/workers?queue=mails",
    "/ui?sort=dead",
    "/ui/locks?document=last-export",
    "/ui/schedules?schedule=nightly-export",
    "/ui/health?all=true",
    "/ui/audit",
    "/ui/pipelines",
    "/ui/pipelines/orders-land",
]

# Text whose contrast with what is behind it is below 4.5, and fields that nothing names.
LOOK = """() => {
  const channel = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const parse = (text) => {
    const numbers = text.match(/[0-9.]+/g).map(Number);
    const [r, g, b] = text.startsWith("color(") ? numbers.slice(0, 3).map((part) => part * 255) : numbers;
    return { rgb: [r, g, b], alpha: numbers[3] ?? 1 };
  };
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = parse(getComputedStyle(at).backgroundColor);
      if (found.alpha > 0.99) return found.rgb;
    }
    return [255, 255, 255];
  };
  const faults = [];
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) {
    const element = words.currentNode.parentElement;
    if (!words.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (element.closest(":disabled, .sr, .skip, dialog")) continue;
    const [one, two] = [light(parse(getComputedStyle(element).color).rgb), light(behind(element))];
    const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    if (ratio < 4.5) faults.push(`${ratio.toFixed(2)}: ${words.currentNode.data.trim().slice(0, 40)}`);
  }
  for (const field of document.querySelectorAll("input:not([type=hidden]), select, textarea")) {
    if (!field.labels?.length && !field.getAttribute("aria-label")) faults.push(`no label: ${field.outerHTML}`);
  }
  for (const button of document.querySelectorAll("button, a")) {
    if (!button.textContent.trim() && !button.getAttribute("aria-label")) faults.push(`no name: ${button.outerHTML}`);
  }
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  if (wide > 0) faults.push(`${wide} pixels too wide`);
  if (document.querySelectorAll("h1").length !== 1) faults.push("not one heading of the first level");
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  if (new Set(ids).size !== ids.length) faults.push("two elements with one id");
  return faults;
}"""


def test_every_picture_of_the_docs_is_there_and_shown():
    pages = "".join(path.read_text("utf-8") for path in FOLDER.parent.rglob("*.md"))
    for name in PICTURES:
        content = (FOLDER / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000, f"{name} shows next to nothing"
        assert f"images/{name}.png" in pages
    assert {path.stem for path in FOLDER.glob("console-*.png")} == set(PICTURES)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_every_page_fits_is_readable_and_has_names_for_everything(
    browser: Browser, day: Serving, size: tuple[int, int], dark: bool
):
    with visiting(browser, f"{day.url}/ui", size=size, dark=dark) as visit:
        faults = {}
        for path in PAGES:
            visit.page.goto(day.url + path)
            faults[path] = visit.page.evaluate(LOOK)
        assert {path: found for path, found in faults.items() if found} == {}


def test_the_keyboard_leads_everywhere(browser: Browser, day: Serving):
    with visiting(browser, f"{day.url}/ui/queues/orders") as visit:
        page = visit.page
        page.keyboard.press("/")
        expect(page.locator("#filter")).to_be_focused()
        page.keyboard.type("json.order == 30")
        page.keyboard.press("Enter")
        arrived(page, re.compile("where=json.order"))
        expect(page.locator("a.row").first).to_be_visible()
        page.keyboard.press("j")
        expect(page.locator("a.row").first).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_contain_text("orders-0-30")
        page.keyboard.press("g")
        page.keyboard.press("o")
        arrived(page, f"{day.url}/ui")
        expect(page.locator("a.row").first).to_be_visible()
        page.keyboard.press("j")
        page.keyboard.press("j")
        expect(page.locator("a.row").nth(1)).to_be_focused()
        page.keyboard.press("k")
        expect(page.locator("a.row").first).to_be_focused()
        page.keyboard.press("?")
        expect(page.locator("#keys")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#keys")).not_to_be_visible()


def test_keys_that_are_pressed_before_the_page_listens_are_not_lost(browser: Browser, day: Serving):
    with visiting(browser, f"{day.url}/ui/groups") as visit:
        page = visit.page
        held: list[Route] = []

        def hold(route: Route) -> None:
            held.append(route)

        def seen(path: str) -> None:
            """The page is there to be seen, and its script is still on its way."""
            page.goto(f"{day.url}{path}", wait_until="commit")
            expect(page.locator("a.row").first).to_be_visible()

        def bring() -> None:
            while not held:  # the browser asks for it in its own time
                page.wait_for_timeout(10)
            held.pop().continue_()

        page.route("**/console.js", hold)
        seen("/ui/queues/orders")
        page.keyboard.press("/")
        page.keyboard.type("json.order == 30")
        bring()
        expect(page.locator("#filter")).to_be_focused()
        expect(page.locator("#filter")).to_have_value("json.order == 30")

        seen("/ui")
        for key in ("j", "j", "k"):
            page.keyboard.press(key)
        bring()
        expect(page.locator("a.row").first).to_be_focused()
        page.keyboard.press("j")
        expect(page.locator("a.row").nth(1)).to_be_focused()

        seen("/ui")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        bring()
        expect(page).to_have_url(re.compile("/ui/queues/"))

        bring()
        seen("/ui")
        page.keyboard.press("g")
        page.keyboard.press("w")
        bring()
        expect(page).to_have_url(f"{day.url}/ui/workers")
        bring()

        seen("/ui")
        expect(page.locator("#palette")).to_be_attached()
        page.keyboard.press("Control+k")
        page.keyboard.type("audit")
        bring()
        expect(page.locator("#palette-list li").first).to_have_text("Audit page")


def test_clicks_that_come_before_the_page_listens_are_not_lost(browser: Browser, server: Serving):
    server.request("PUT", "/v1/queues/orders", {})
    order(server, 1)
    with visiting(browser, f"{server.url}/ui/groups") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        held: list[Route] = []

        def hold(route: Route) -> None:
            held.append(route)

        def seen_without(script: str, path: str) -> None:
            page.unroute_all()
            page.route(f"**/{script}", hold)
            page.goto(f"{server.url}{path}", wait_until="commit")

        def bring() -> None:
            while not held:  # the browser asks for it in its own time
                page.wait_for_timeout(10)
            held.pop().continue_()

        seen_without("console.js", "/ui/queues/orders")
        page.get_by_label("Select orders-0-0").check()
        page.get_by_role("button", name="Pause…").click()
        expect(ask).to_be_hidden()
        bring()
        expect(ask).to_contain_text("Pause orders, group default?")
        ask.get_by_role("button", name="Cancel").click()

        seen_without("console.js", "/ui/queues/orders")
        page.get_by_label("Select orders-0-0").check()
        bring()
        expect(page.get_by_role("button", name="Cancel selected")).to_be_enabled()

        seen_without("send.js", "/ui/queues/orders/send")
        page.get_by_label("Body", exact=True).fill("early")
        page.get_by_role("button", name="Send", exact=True).click()
        bring()
        expect(page.locator("#sent a")).to_have_text("orders-0-1")
        assert server.get("/v1/queues/orders/stats").body["ready"] == 2


def test_the_theme_follows_the_system_until_somebody_chooses(browser: Browser, day: Serving):
    with visiting(browser, f"{day.url}/ui", dark=True) as visit:
        page = visit.page
        background = "getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(background)
        page.get_by_role("button", name="Switch between light and dark").click()
        light = page.evaluate(background)
        assert light != dark
        page.reload()
        assert page.evaluate(background) == light


def test_pages_renew_themselves(browser: Browser, server: Serving):
    server.request("PUT", "/v1/queues/orders", {})
    with visiting(browser, f"{server.url}/ui") as visit:
        expect(visit.page.locator("#totals dd").first).to_have_text("0")
        for i in range(3):
            order(server, i)
        expect(visit.page.locator("#totals dd").first).to_have_text("3", timeout=20_000)


def test_the_tail_shows_what_comes_filtered_and_paused(browser: Browser, server: Serving):
    server.request("PUT", "/v1/queues/orders", {})
    with visiting(browser, f"{server.url}/ui/queues/orders/tail") as visit:
        page, rows = visit.page, visit.page.locator("#tail tbody tr:visible")
        expect(page.locator("#tail-state")).to_contain_text("Listening")
        order(server, 1)
        odd = "<img src=x onerror=alert(1)>"
        server.post("/v1/queues/orders/batch", {"messages": [{"text": odd, "key": odd}]})
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text(odd)
        page.locator("#filter").fill("onerror")
        expect(rows).to_have_count(1)
        page.locator("#filter").fill("")
        page.locator("h1").click()
        page.keyboard.press("p")
        expect(page.locator("#pause")).to_have_text("Resume")
        order(server, 2)
        expect(page.locator("#tail-state")).to_contain_text("1 not shown yet")
        expect(rows).to_have_count(2)
        page.keyboard.press("p")
        expect(rows).to_have_count(3)


def test_a_destructive_act_asks_first_and_says_how_many(browser: Browser, server: Serving):
    server.request("PUT", "/v1/queues/orders", {"settings": {"max_attempts": 1}})
    for i in range(12):
        order(server, i)
    failed(server, [f"error {i}" for i in range(12)])
    with visiting(browser, f"{server.url}/ui/queues/orders/dead") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        page.locator("td").get_by_role("button", name="Purge").click()
        expect(ask).to_contain_text("12 dead letters will be deleted")
        expect(ask).to_contain_text("and 2 more")
        expect(ask.get_by_role("button", name="Cancel")).to_be_focused()
        page.keyboard.press("Escape")
        assert server.get("/v1/queues/orders/stats").body["dead"] == 12
        page.locator("td").get_by_role("button", name="Redrive 10 first").click()
        ask.get_by_role("button", name="Redrive 10").click()
        expect(page.locator("#summary")).to_have_text("10 waiting")
        page.goto(f"{server.url}/ui/queues/orders/dead")
        page.locator("td").get_by_role("button", name="Purge").click()
        ask.get_by_role("button", name="Purge 2").click()
        expect(ask).to_contain_text("2 purged.")
        stats = server.get("/v1/queues/orders/stats").body
        assert (stats["dead"], stats["ready"]) == (0, 10)


def test_dead_letters_are_redriven_into_another_queue(browser: Browser, server: Serving):
    for name in ("orders", "repairs"):
        server.request("PUT", f"/v1/queues/{name}", {"settings": {"max_attempts": 1}})
    order(server, 1)
    failed(server, ["error 1"])
    with visiting(browser, f"{server.url}/ui/queues/orders/dead") as visit:
        page, ask = visit.page, visit.page.locator("#ask")
        page.locator("td").get_by_role("button", name="Purge").click()
        expect(ask).to_contain_text("1 dead letter will be deleted")
        expect(ask.get_by_label("Into another queue")).to_be_hidden()
        page.keyboard.press("Escape")
        page.locator("td").get_by_role("button", name="Redrive…", exact=True).click()
        ask.get_by_label("Into another queue").fill("repairs")
        ask.get_by_role("button", name="Redrive 1").click()
        expect(ask).to_contain_text("1 redriven to repairs.")
        stats = [server.get(f"/v1/queues/{name}/stats").body for name in ("orders", "repairs")]
        assert [(each["dead"], each["ready"]) for each in stats] == [(0, 0), (0, 1)]


def test_a_delayed_message_is_taken_back(browser: Browser, server: Serving):
    server.request("PUT", "/v1/queues/orders", {})
    order(server, 1, delay=3_600)
    with visiting(browser, f"{server.url}/ui/queues/orders?tab=delayed") as visit:
        visit.page.locator("td").get_by_role("button", name="Cancel").click()
        visit.page.locator("#ask").get_by_role("button", name="Cancel message").click()
        expect(visit.page.get_by_text("orders-0-d0 was cancelled")).to_be_visible()
        expect(visit.page.get_by_text("No delayed messages.")).to_be_visible()


def test_a_seek_is_looked_at_before_it_is_done(browser: Browser, server: Serving):
    server.request("PUT", "/v1/queues/orders", {})
    for i in range(5):
        order(server, i)
    found = server.post("/v1/queues/orders/dequeue", {"count": 5}).body["messages"]
    server.post("/v1/queues/orders/ack", {"receipts": [message["receipt"] for message in found]})
    with visiting(browser, f"{server.url}/ui/groups") as visit:
        page = visit.page
        page.get_by_role("button", name="Seek…").click()
        page.get_by_role("spinbutton", name="Offset").fill("2")
        page.get_by_role("button", name="Preview").click()
        expect(page.locator("#seek")).to_contain_text("3 messages would be delivered again")
        assert server.get("/v1/queues/orders/stats").body["ready"] == 0
        page.get_by_role("button", name="Seek: 3 again").click()
        expect(page.get_by_text("3 are delivered again")).to_be_visible()
        assert server.get("/v1/queues/orders/stats").body["ready"] == 3


def test_what_the_server_refuses_is_told_in_its_own_words(browser: Browser, server: Serving):
    server.request("PUT", "/v1/queues/orders", {})
    with visiting(browser, f"{server.url}/ui/queues/orders/send") as visit:
        page = visit.page
        page.get_by_label("Headers, one per line").fill("no colon")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#sent")).to_contain_text("This is not one: no colon")
        page.goto(f"{server.url}/ui")
        page.get_by_label("Name of a new queue").fill("not a name!")
        page.get_by_role("button", name="Create queue").click()
        expect(page.locator("#new-problem")).to_contain_text("not a name!")
        visit.faults.clear()  # the browser itself tells of the answer 400


def test_a_recipe_is_copied(browser: Browser, day: Serving):
    with visiting(browser, f"{day.url}/ui/queues/orders/messages/orders-0-30") as visit:
        page = visit.page
        page.get_by_role("button", name="Copy as curl").click()
        expect(page.get_by_text("Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()").startswith("curl -X POST --data-binary")
