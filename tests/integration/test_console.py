"""The console over a real socket: its pages say what the store holds, and nothing in them is taken for markup."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from holdfast.server.console import queues
from holdfast.server.console.rendering import _found as static_files
from holdfast.server.tokens import digest_of
from tests.integration.console_day import failed, live_a_day, taken
from tests.integration.http_gear import Answer, Serving, serving

SCRIPT = "<script>alert('x')</script>\"'><img src=x>"


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with messages in every phase; the tests that share it only look."""
    with serving(tmp_path_factory.mktemp("day") / "data", whole=True) as found:
        live_a_day(found)
        yield found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", whole=True) as found:
        yield found


class Text(HTMLParser):
    """What a page says, and which tags and attributes it has."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page(server: Serving, path: str, *, status: int = 200, **more: Any) -> Text:
    answer = server.get(path, headers={"accept": "text/html"}, **more)
    assert (answer.status, answer.headers["content-type"]) == (status, "text/html; charset=utf-8"), answer.body
    return Text(answer.body.decode())


PAGES = [
    "/ui",
    "/ui/",
    "/ui/queues/orders",
    "/ui/queues/orders/charts",
    "/ui/queues/orders/dead",
    "/ui/queues/orders/redriven?ids=orders.dlq-0-0",
    "/ui/queues/orders/log",
    "/ui/queues/orders/tail",
    "/ui/search?q=key%3Dc-3",
    "/ui/queues/orders/settings?all=true",
    "/ui/queues/orders/send",
    "/ui/queues/orders/messages/orders-0-0",
    "/ui/groups",
    "/ui/groups/default",
    "/ui/workers",
    "/ui/health",
    "/ui/audit",
    "/ui/locks",
    "/ui/schedules?schedule=nightly-export",
]


@pytest.mark.parametrize("path", PAGES)
def test_a_page_lets_in_nothing_but_its_own_files(day: Serving, path: str):
    answer = day.get(path)
    assert answer.status == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["cache-control"] == "no-store"
    found = Text(answer.body.decode())
    for tag, attributes in found.tags:
        assert "style" not in attributes
        assert not any(name.startswith("on") for name in attributes), attributes
        for name in ("src", "href"):
            assert (attributes.get(name) or "/").startswith(("/", "#", "?")), attributes
        if tag == "script":
            assert attributes["src"] in {f"/ui/static/{name}" for name in static_files()}


def test_the_files_name_no_other_server_and_are_kept_by_browsers(day: Serving):
    assert {"console.css", "console.js", "icon.svg", "tail.js"} <= set(static_files())
    for name, (content, _, _) in static_files().items():
        assert not re.search(rb"(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z]", re.sub(rb"(?m)^\s*//.*$", b"", content))
        first = day.get(f"/ui/static/{name}")
        again = day.get(f"/ui/static/{name}", headers={"if-none-match": first.headers["etag"]})
        assert (first.status, again.status, again.body) == (200, 304, b"")
    for name in ("nothing.js", "..%2Frendering.py", "%2Fetc%2Fpasswd"):
        assert day.get(f"/ui/static/{name}").status == 404


def test_the_bare_address_leads_to_the_overview(day: Serving):
    answer = day.get("/")
    assert (answer.status, answer.headers["location"]) == (303, "/ui")


def test_the_overview_says_what_stands_where(day: Serving):
    found = page(day, "/ui")
    for name in ("orders", "mails", "thumbnails", "webhooks"):
        assert name in found.text
    assert "ready 20" in found.text
    assert "dead 9" in found.text
    assert "orders" not in page(day, "/ui", query={"name": "MAIL"}).text.partition("Queue")[2]


@pytest.mark.parametrize(
    ("tab", "expected"),
    [
        ("ready", ["orders-0-22", "c-1"]),
        ("leased", ["worker-eu-1", "orders-0-17", "in 10 min"]),
        ("delayed", ["orders-0-d0", "in 60 min"]),
        ("dead", ["out of attempts", "PaymentDeclined: card 40"]),
        ("done", ["orders-0-16"]),
    ],
)
def test_each_phase_has_its_list(day: Serving, tab: str, expected: list[str]):
    text = page(day, "/ui/queues/orders", query={"tab": tab}).text
    for words in expected:
        assert words in text


def test_what_is_done_is_found_behind_much_that_is_not(server: Serving, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queues, "DONE_PLACES", 10)
    server.request("PUT", "/v1/queues/jobs", {})
    server.post("/v1/queues/jobs/batch", {"messages": [{"text": "x"}] * 500})
    receipts = taken(server, 7, queue="jobs")
    server.post("/v1/queues/jobs/ack", {"receipts": receipts[:3] + receipts[4:]})
    text = page(server, "/ui/queues/jobs", query={"tab": "done", "limit": 5}).text
    listed = re.findall(r"jobs-0-\d+", text)
    assert listed == [f"jobs-0-{i}" for i in (6, 5, 4, 2, 1)]


def test_what_is_done_long_ago_is_offered_to_be_looked_for(server: Serving, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queues, "DONE_PLACES", 10)
    server.request("PUT", "/v1/queues/jobs", {})
    server.post("/v1/queues/jobs/batch", {"messages": [{"text": "the first"}] + [{"text": "x"}] * 34})
    server.post("/v1/queues/jobs/ack", {"receipts": taken(server, 35, queue="jobs")})
    asked = {"tab": "done", "where": 'body == "the first"', "limit": 5}
    seen = []
    for after in ("", "10", "20"):
        text = page(server, "/ui/queues/jobs", query={**asked, "after": after}).text
        assert "No done messages" not in text
        seen.append(("older ones" in text, "Search further" in text, "jobs-0-0" in text))
    assert seen == [(True, True, False)] * 3
    last = page(server, "/ui/queues/jobs", query={**asked, "after": "30"}).text
    assert ("Search further" in last, "jobs-0-0" in last) == (False, True)
    none = page(server, "/ui/queues/jobs", query={**asked, "where": 'body == "none"', "after": "30"}).text
    assert "No done messages" in none  # now all of it was looked through
    page(server, "/ui/queues/jobs", query={**asked, "after": "x"}, status=400)


def test_the_filter_is_the_language_of_the_command_line(day: Serving):
    some = page(day, "/ui/queues/orders", query={"where": "json.order == 30"}).text
    assert "orders-0-30" in some
    assert "orders-0-31" not in some
    done = page(day, "/ui/queues/orders", query={"tab": "done", "where": 'key == "c-2"'}).text
    assert "orders-0-9" in done
    assert "orders-0-10" not in done
    wrong = page(day, "/ui/queues/orders", query={"where": "json.order =="}, status=400)
    assert any(attributes.get("aria-invalid") for _, attributes in wrong.tags)
    assert "Cannot read the expression" in wrong.text


def test_a_message_shows_its_body_in_three_ways(day: Serving):
    path = "/ui/queues/orders/messages/orders-0-20"
    assert '"name": "Grüße"' in page(day, path).text
    assert '"name":"Grüße"' in page(day, path, query={"view": "text"}).text
    assert "00000000 7b 22 6f" in page(day, path, query={"view": "hex"}).text
    picture = page(day, "/ui/queues/mails/messages/mails-0-0").text
    assert "89 50 4e 47" in picture
    assert "curl -X POST" in page(day, path).text
    assert "holdfast.connect(" in page(day, path).text


def test_the_life_of_a_message_is_told(day: Serving):
    traced = page(day, "/ui/queues/orders/messages/orders-0-0").text
    for words in ("published", "leased", "to worker-1", "moved to the dead letters", "was declined"):
        assert words in traced
    letter = page(day, "/ui/queues/orders/messages/orders.dlq-0-0").text
    assert "orders-0-0" in letter
    assert "attempt 1, out of attempts" in letter


def test_without_a_trace_the_life_is_what_is_kept_with_the_message(server: Serving):
    server.request("PUT", "/v1/queues/jobs", {"settings": {"max_attempts": 2, "backoff_ms": 0}})
    server.post("/v1/queues/jobs/enqueue", b"x")
    failed(server, ["first failure"], queue="jobs")
    assert "first failure" in page(server, "/ui/queues/jobs/messages/jobs-0-0").text
    failed(server, ["second failure"], queue="jobs")
    letter = page(server, "/ui/queues/jobs/messages/jobs.dlq-0-0").text
    for words in (
        "published",
        "first failure",
        "second failure",
        "moved to the dead letters",
        "attempt 2",
        "steps in the journal",
    ):
        assert words in letter
    original = page(server, "/ui/queues/jobs/messages/jobs-0-0").text
    assert "jobs.dlq-0-0" in original
    assert "dead" in original
    server.post("/v1/queues/jobs/dead/redrive", {})
    (again,) = server.post("/v1/queues/jobs/dequeue", {"owner": "worker-9"}).body["messages"]
    server.post("/v1/queues/jobs/ack", {"receipts": [again["receipt"]]})
    for name in ("jobs-0-0", "jobs-0-1"):
        life = page(server, f"/ui/queues/jobs/messages/{name}").text
        for words in ("first failure", "moved to the dead letters", "redriven", "jobs-0-1", "worker-9", "acked"):
            assert words in life
    assert "Last holder worker-9" in life


def test_a_big_body_is_cut_and_can_be_downloaded(server: Serving):
    server.request("PUT", "/v1/queues/files", {})
    for size in (200_000, 3_000_000):
        content = bytes(range(256)) * (size // 256)
        stored = server.post("/v1/queues/files/enqueue", content).body["id"]
        shown = page(server, f"/ui/queues/files/messages/{stored}")
        assert "Download all of it" in shown.text
        assert len(shown.text) < 400_000
        body = server.get(f"/ui/queues/files/messages/{stored}/body")
        assert body.body == content
        assert body.headers["content-disposition"] == f'attachment; filename="{stored}.bin"'
        assert body.headers["content-type"] == "application/octet-stream"


def test_dead_letters_are_grouped_with_the_condition_that_chooses_each_group(day: Serving):
    found = page(day, "/ui/queues/orders/dead")
    assert "PaymentDeclined: card … of customer … was declined" in found.text
    assert "9 dead letters, 2 kinds of error" in found.text
    acts = [attributes for _, attributes in found.tags if attributes.get("data-act") == "redrive"]
    assert len(acts) == 6
    links = [attributes["href"] for _, attributes in found.tags if "tab=dead" in (attributes.get("href") or "")]
    declined = page(day, str(links[0])).text
    assert declined.count("PaymentDeclined") == 6
    assert "TimeoutError" not in declined


def test_workers_and_waiters_are_told(day: Serving):
    text = page(day, "/ui/workers").text
    assert "worker-eu-1 orders 3 orders-0-17 orders-0-18 orders-0-19" in text
    assert "No consumer is waiting" in text


def test_groups_say_how_far_behind_they_are(day: Serving):
    text = page(day, "/ui/groups", query={"name": "orders"}).text
    assert "default orders queue 26" in text
    assert "First unhandled offset" in page(day, "/ui/groups/default").text


def test_health_says_where_each_setting_comes_from(day: Serving):
    changed = page(day, "/ui/health").text
    assert "sync p99" in changed
    assert "server.drain_ms 2000 given at startup" in changed
    text = page(day, "/ui/health", query={"all": "true"}).text
    assert "server.max_connections 10000 default" in text


def test_acts_are_in_the_audit_log(day: Serving):
    text = page(day, "/ui/audit").text
    assert "local created or changed the queue webhooks done" in text


def test_locks_and_documents_are_shown(day: Serving):
    text = page(day, "/ui/locks", query={"document": "last-export"}).text
    assert "nightly-report cron-1" in text
    assert '"rows": 1200' in text


def test_schedules_are_shown_with_their_next_times_and_firings(day: Serving):
    text = page(day, "/ui/schedules", query={"schedule": "nightly-export"}).text
    assert "0 3 * * * Europe/Berlin" in text
    assert "It has not fired yet." in text
    assert "Run now…" in text
    assert "export" in text
    assert page(day, "/ui/schedules", query={"schedule": "none"}).text.count("There is no such schedule.") == 1


def test_what_is_not_there_is_told_as_a_page_to_browsers_and_as_json_to_programs(day: Serving):
    for path in ("/ui/queues/nothing", "/ui/queues/orders/messages/orders-0-999", "/ui/nothing"):
        assert "Not found" in page(day, path, status=404).text
    answer = day.get("/ui/queues/nothing")
    assert (answer.status, answer.code) == (404, "unknown_topic")


def test_whatever_people_send_stays_text(server: Serving):
    server.request("PUT", "/v1/queues/odd", {"settings": {"max_attempts": 1, "trace_sample": 1.0}})
    message = {
        "text": SCRIPT,
        "key": SCRIPT,
        "headers": [{"name": SCRIPT, "value": SCRIPT}],
        "correlation_id": SCRIPT,
    }
    for _ in range(3):
        assert server.post("/v1/queues/odd/batch", {"messages": [message]}).status == 201
    (receipt,) = taken(server, queue="odd", owner=SCRIPT)
    server.request("PUT", "/v1/queues/odd/state", {"receipt": receipt, "version": 0, "value": {SCRIPT: SCRIPT}})
    server.post("/v1/queues/odd/nack", {"receipts": [receipt], "error": SCRIPT})
    taken(server, queue="odd", owner=SCRIPT)
    server.post("/v1/locks/odd/acquire", {"owner": SCRIPT})
    server.request("PUT", "/v1/state/odd", {"value": SCRIPT})
    answers: list[Answer] = [
        server.get("/ui", query={"name": SCRIPT}),
        server.get("/ui/groups", query={"name": SCRIPT}),
        server.get("/ui/workers"),
        server.get("/ui/audit"),
        server.get("/ui/locks", query={"document": "odd", "name": "odd"}),
        server.get("/ui/queues/odd/dead"),
        server.get("/ui/queues/odd/messages/odd.dlq-0-0"),
        server.get("/ui/queues/odd", query={"where": SCRIPT}),
        *[server.get("/ui/queues/odd", query={"tab": tab}) for tab in ("ready", "leased", "delayed", "dead", "done")],
        *[server.get(f"/ui/queues/odd/messages/odd-0-{i}") for i in range(3)],
        server.get(f"/ui/queues/{quote(SCRIPT, safe='')}", headers={"accept": "text/html"}),
    ]
    seen = 0
    for answer in answers:
        assert answer.headers["content-type"].startswith("text/html")
        content = answer.body.decode()
        assert "<script>alert" not in content
        assert "<img src=x" not in content
        found = Text(content)
        assert all(tag != "img" or attributes["src"] == "/ui/static/icon.svg" for tag, attributes in found.tags)
        seen += "alert(" in content
    assert seen >= 10


UNSEEN = "\u202egnp.exe\u202c \u2067x\u2069 \x9b"


def test_text_that_would_read_as_another_is_shown_as_what_it_is(server: Serving):
    server.request("PUT", "/v1/queues/odd", {"settings": {"max_attempts": 1}})
    message = {"text": UNSEEN, "key": UNSEEN, "headers": [{"name": "file", "value": UNSEEN}]}
    assert server.post("/v1/queues/odd/batch", {"messages": [message]}).status == 201
    failed(server, [UNSEEN + "\x00"], queue="odd")
    paths = [
        "/ui/queues/odd?tab=dead",
        "/ui/queues/odd/dead",
        "/ui/queues/odd/messages/odd.dlq-0-0",
        "/ui/search?q=exe",
    ]
    for path in paths:
        text = page(server, path).text
        assert "\\u202egnp.exe\\u202c" in text
        assert not set("\u202e\u202c\u2067\u2069\x9b\x00") & set(text)
    commands = page(server, "/ui/queues/odd/messages/odd.dlq-0-0").text
    packed = base64.b64encode(UNSEEN.encode()).decode()
    assert f"echo {packed} | base64 -d | curl" in commands
    assert f"{UNSEEN!r}.encode()" in commands


def test_a_script_of_a_page_is_not_asked_for_a_password_by_the_browser(tmp_path: Path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f'[[tokens]]\nname = "eve"\nsha256 = "{digest_of("t")}"\nrole = ["read"]\n')
    tokens.chmod(0o600)
    with serving(tmp_path / "data", whole=True, tokens_file=str(tokens)) as server:
        assert server.get("/ui").headers["www-authenticate"].startswith("Bearer")  # the last of two
        for path, headers in (
            ("/ui", {"x-requested-with": "holdfast-console"}),
            ("/v1/queues/orders/watch", {"accept": "text/event-stream"}),
        ):
            connection = server.connection()
            connection.request("GET", path, headers=headers)
            got = connection.getresponse()
            assert (got.status, got.headers.get_all("www-authenticate")) == (401, ['Bearer realm="holdfast"'])
            connection.close()


def test_a_server_that_only_shows_offers_no_acts_and_refuses_them(tmp_path: Path):
    with serving(tmp_path / "data", whole=True) as writing:
        live_a_day(writing)
    with serving(tmp_path / "data", whole=True, read_only=True) as server:
        queue = "/ui/queues/orders"
        pages = [queue, f"{queue}?tab=leased", f"{queue}?tab=dead", f"{queue}/dead", f"{queue}/settings"]
        pages += [f"{queue}/redriven?ids=orders.dlq-0-0", f"{queue}/messages/orders.dlq-0-0", f"{queue}/log"]
        pages += [f"{queue}/messages/orders-0-30", "/ui/groups/default", "/ui/workers"]
        for path in ("/ui", *pages, "/ui/groups"):
            found = page(server, path)
            assert "read-only" in found.text
            assert not [
                attributes for _, attributes in found.tags if "data-act" in attributes or "data-seek" in attributes
            ]
        assert page(server, "/ui/queues/orders/send", status=403)
        assert server.post("/v1/queues/orders/dead/redrive").code == "forbidden"


def test_a_caller_sees_the_queues_that_the_token_allows_and_no_others(tmp_path: Path):
    token, tokens = "a-token-of-eve", tmp_path / "tokens"
    tokens.write_text(f'[[tokens]]\nname = "eve"\nsha256 = "{digest_of(token)}"\nrole = ["read"]\ntopics = ["mails"]\n')
    tokens.chmod(0o600)
    with serving(tmp_path / "data", whole=True) as writing:
        live_a_day(writing)
    with serving(tmp_path / "data", whole=True, tokens_file=str(tokens)) as server:
        assert server.get("/ui").status == 401
        found = page(server, "/ui", token=token)
        assert "mails" in found.text
        assert "orders" not in found.text
        assert "Audit" not in found.text
        assert "orders" not in page(server, "/ui/workers", token=token).text
        assert "orders" not in page(server, "/ui/groups/default", token=token).text
        assert "Not allowed" in page(server, "/ui/queues/orders", token=token, status=403).text
        assert page(server, "/ui/audit", token=token, status=403)


def test_without_the_console_there_are_no_pages(tmp_path: Path):
    with serving(tmp_path / "data", whole=True, console=False) as server:
        assert server.get("/ui").status == 404
