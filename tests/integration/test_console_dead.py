"""The page of dead letters: counts that are kept from one visit to the next, and say the same as the letters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.server.api import dead as dead_kinds
from holdfast.server.console import queues
from tests.integration.http_gear import Serving, serving
from tests.integration.test_console import page

QUEUE = "/v1/queues/orders"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", whole=True) as found:
        assert found.request("PUT", QUEUE, {"settings": {"max_attempts": 1}}).status == 200
        yield found


def die(server: Serving, errors: list[str], *, group: str | None = None) -> None:
    """A message for each error, which dies of it."""
    messages = [{"json": {"order": i}} for i in range(len(errors))]
    assert server.post(f"{QUEUE}/batch", {"messages": messages}).status == 201
    more = {} if group is None else {"group": group}
    taken = server.post(f"{QUEUE}/dequeue", {"count": len(errors), **more}).body["messages"]
    for message, error in zip(taken, errors, strict=True):
        nack = {"receipts": [message["receipt"]], "error": error, **more}
        assert server.post(f"{QUEUE}/nack", nack).status == 200


def groups(server: Serving, **query: Any) -> list[tuple[str, int, str]]:
    found = server.get(f"{QUEUE}/dead/groups", query=query).body["groups"]
    return [(each["error"], each["count"], each["example"]) for each in found]


def agree(server: Serving) -> list[tuple[str, int, str]]:
    """The counts that are kept, which must be those of all letters read anew."""
    kept, anew = (
        server.get(f"{QUEUE}/dead/groups").body,
        server.get(f"{QUEUE}/dead/groups", query={"where": "attempts >= 0"}).body,
    )
    assert kept == anew
    return groups(server)


def test_kept_counts_stay_those_of_the_letters(server: Serving):
    assert agree(server) == []
    die(server, ["TimeoutError: 30 s"] * 3 + ["KeyError: 'a'"] * 2)
    assert [(error, count) for error, count, _ in agree(server)] == [("TimeoutError: … s", 3), ("KeyError: …", 2)]
    die(server, ["KeyError: 'b'"] * 2)
    assert agree(server)[0] == ("KeyError: …", 4, "orders.dlq-0-6")
    server.post(f"{QUEUE}/dead/redrive", {"ids": ["orders.dlq-0-6", "orders.dlq-0-3"]})
    assert agree(server)[1] == ("KeyError: …", 2, "orders.dlq-0-5")
    server.post(f"{QUEUE}/dead/purge", {"where": 'error ~ "Timeout"'})
    assert [(error, count) for error, count, _ in agree(server)] == [("KeyError: …", 2)]


def test_each_group_has_counts_of_its_own(server: Serving):
    assert server.request("PUT", "/v1/topics/orders/groups/mails", {}).status < 300
    die(server, ["ValueError: 1"] * 2)
    die(server, ["OSError: 2"], group="mails")
    assert [(error, count) for error, count, _ in groups(server)] == [("ValueError: …", 2)]
    assert [(error, count) for error, count, _ in groups(server, group="mails")] == [("OSError: …", 1)]


def test_a_letter_is_read_once_however_often_the_page_is_shown(server: Serving, monkeypatch: pytest.MonkeyPatch):
    read = []
    note_of = dead_kinds.note_in
    monkeypatch.setattr(dead_kinds, "note_in", lambda record: (read.append(record.offset), note_of(record))[1])
    die(server, ["TimeoutError: 30 s"] * 20)
    for _ in range(3):
        assert "20 dead letters in 1 group" in page(server, "/ui/queues/orders/dead").text
    die(server, ["TimeoutError: 31 s"])
    assert "21 dead letters in 1 group" in page(server, "/ui/queues/orders/dead").text
    assert read == list(range(21))


def test_a_page_that_cannot_count_all_in_time_says_so_and_goes_on(server: Serving, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queues, "_PATIENCE_NS", -1)
    die(server, ["TimeoutError: 30 s"] * 100)
    assert "64 dead letters in 1 group counted so far, of 100" in page(server, "/ui/queues/orders/dead").text
    assert "100 dead letters in 1 group TimeoutError" in page(server, "/ui/queues/orders/dead").text.replace(
        "First 10 Redrive all Purge all Error Reason Dead letters First Last Over time Actions ", ""
    )


def test_a_filter_looks_at_a_bounded_number_and_offers_the_rest(tmp_path: Path):
    with serving(tmp_path / "data", whole=True, scan_messages=30) as server:
        assert server.request("PUT", QUEUE, {"settings": {"max_attempts": 1}}).status == 200
        die(server, ["TimeoutError: 30 s"] * 40)
        found = page(server, "/ui/queues/orders/dead", query={"where": 'error ~ "Timeout"'})
        assert "30 dead letters were searched, and there are more" in found.text
        (further,) = [
            attributes["href"] for tag, attributes in found.tags if "after=" in (attributes.get("href") or "")
        ]
        assert further is not None
        assert "10 dead letters in 1 group" in page(server, further).text


def test_kinds_are_shown_over_time(server: Serving):
    die(server, ["TimeoutError: 30 s"] * 4)
    found = page(server, "/ui/queues/orders/dead")
    (chart,) = [attributes for tag, attributes in found.tags if attributes.get("class") == "spark bars"]
    label = chart["aria-label"] or ""
    assert sum(map(int, label.rpartition(": ")[2].split(", "))) == 4


def test_many_kinds_of_errors_are_bounded(server: Serving, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dead_kinds, "MOST_KINDS", 3)
    die(server, [f"Error{letter}" for letter in "abcde"])
    assert sorted((error, count) for error, count, _ in groups(server)) == [
        ("(other errors)", 2),
        ("Errora", 1),
        ("Errorb", 1),
        ("Errorc", 1),
    ]


def test_a_page_on_which_nothing_changed_is_not_sent_again(server: Serving):
    die(server, ["TimeoutError: 30 s"])
    accept = {"accept": "text/html"}

    def again(path: str) -> tuple[int, bytes]:
        etag = server.get(path, headers=accept).headers["etag"]
        answer = server.get(path, headers={**accept, "if-none-match": etag})
        return answer.status, answer.body

    for path in ("/ui/queues/orders/dead", "/ui/queues/orders/messages/orders.dlq-0-0"):
        # Now and then a sample of the rates is taken in between, and the small chart has changed.
        assert (304, b"") in [again(path) for _ in range(20)]
    etag = server.get("/ui/queues/orders/dead", headers=accept).headers["etag"]
    die(server, ["TimeoutError: 30 s"])
    assert server.get("/ui/queues/orders/dead", headers={**accept, "if-none-match": etag}).status == 200


@pytest.mark.parametrize("path", ["/ui/queues/nothing", "/ui/nothing/at/all"])
def test_a_page_that_is_not_there_keeps_the_navigation(server: Serving, path: str):
    found = page(server, path, status=404)
    links = {attributes.get("href") for tag, attributes in found.tags if tag == "a"}
    assert {"/ui", "/ui/groups", "/ui/workers", "/ui/locks", "/ui/health", "/ui/audit"} <= links


def test_a_redrive_of_a_few_is_followed_to_its_end(server: Serving):
    die(server, ["TimeoutError: 30 s"] * 7)
    letters = [f"orders.dlq-0-{i}" for i in range(5)]
    tried = {"ids": ",".join(letters), "where": 'error ~ "Timeout"'}
    assert "5 not redriven" in page(server, "/ui/queues/orders/redriven", query=tried).text
    assert server.post(f"{QUEUE}/dead/redrive", {"ids": letters}).body["done"] == 5
    assert "5 waiting" in page(server, "/ui/queues/orders/redriven", query=tried).text
    taken = server.post(f"{QUEUE}/dequeue", {"count": 5}).body["messages"]
    assert "5 running" in page(server, "/ui/queues/orders/redriven", query=tried).text
    receipts = [message["receipt"] for message in taken]
    assert server.post(f"{QUEUE}/ack", {"receipts": receipts[:2]}).status == 200
    assert server.post(f"{QUEUE}/nack", {"receipts": receipts[2:4], "error": "TimeoutError: 31 s"}).status == 200
    found = page(server, "/ui/queues/orders/redriven", query=tried)
    assert "2 done, 2 failed again (same error), 1 running" in found.text
    assert server.post(f"{QUEUE}/nack", {"receipts": receipts[4:], "error": "KeyError: 'a'"}).status == 200
    found = page(server, "/ui/queues/orders/redriven", query=tried)
    assert "3 failed again (2 with the same error), 2 done" in found.text
    links = {attributes.get("href") for tag, attributes in found.tags if tag == "a"}
    assert {f"/ui/queues/orders/messages/{each}?" for each in ("orders-0-7", "orders.dlq-0-7")} <= links
    (rest,) = [attributes for tag, attributes in found.tags if attributes.get("data-title") == "Redrive the rest?"]
    assert "Timeout" in (rest["data-body"] or "")


def test_a_redrive_that_is_followed_must_name_letters(server: Serving):
    page(server, "/ui/queues/orders/redriven", query={"ids": "nonsense"}, status=404)
    page(server, "/ui/queues/orders/redriven", status=400)
