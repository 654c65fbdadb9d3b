"""The page of dead letters: counts that are kept from one visit to the next, and say the same as the letters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.codec.samples import SeriesKey, Slot
from holdfast.server.api import dead as dead_kinds
from holdfast.server.console import queues, rendering
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
        assert "20 dead letters, 1 kind of error" in page(server, "/ui/queues/orders/dead").text
    die(server, ["TimeoutError: 31 s"])
    assert "21 dead letters, 1 kind of error" in page(server, "/ui/queues/orders/dead").text
    assert read == list(range(21))


def test_a_page_that_cannot_count_all_in_time_says_so_and_goes_on(server: Serving, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queues, "_PATIENCE_NS", -1)
    die(server, ["TimeoutError: 30 s"] * 100)
    assert "64 dead letters, 1 kind of error counted so far, of 100" in page(server, "/ui/queues/orders/dead").text
    assert "100 dead letters, 1 kind of error TimeoutError" in page(server, "/ui/queues/orders/dead").text.replace(
        "Redrive 10 first… Redrive all… Purge all… Error Reason Dead letters First Last Over time Actions ", ""
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
        assert "10 dead letters, 1 kind of error" in page(server, further).text


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


ACCEPT = {"accept": "text/html"}


def known(server: Serving, path: str) -> str:
    """The ETag of a page as it is now."""
    answer = server.get(path, headers=ACCEPT)
    assert answer.status == 200
    return answer.headers["etag"]


def again(server: Serving, path: str, etag: str) -> tuple[int, bool]:
    """The status for somebody who knows the page already, and whether anything was sent."""
    answer = server.get(path, headers={**ACCEPT, "if-none-match": etag})
    return answer.status, bool(answer.body)


@pytest.fixture
def sampled(server: Serving, monkeypatch: pytest.MonkeyPatch) -> Serving:
    """A server with samples of a queue in use; those that follow are taken by the test, and no minute passes."""
    sampler = server.server.service.engine.sampler
    sampler.before_close()
    monkeypatch.setattr(rendering, "_SLIDES_NS", 10**19)
    die(server, ["TimeoutError: 30 s", "KeyError: 'a'"])
    server.post(f"{QUEUE}/enqueue", b"it waits, and its age grows")
    merge_samples(server, ago_s=(60, 55, 30, 15, 10, 5))
    return server


def merge_samples(server: Serving, *, ago_s: tuple[int, ...]) -> None:
    """Samples of a queue that takes ten messages a second in, and handles none."""
    engine = server.server.service.engine
    key = SeriesKey("queue", "orders", "default", engine.topic("orders").id)
    now_s = engine.world.clock.now_ns() // 10**9
    for each in ago_s:
        engine.sampler.store.merge(key, Slot(now_s - each, 50 if each > 20 else 0))


@pytest.mark.parametrize(
    "path",
    ["/ui/queues/orders/dead", "/ui/queues/orders?tab=dead", "/ui/queues/orders/messages/orders.dlq-0-0", "/ui/audit"],
)
def test_a_page_on_which_nothing_changed_is_not_sent_again(sampled: Serving, path: str):
    etag = known(sampled, path)
    for _ in range(3):
        merge_samples(sampled, ago_s=(0,))  # the small charts have moved, and show nothing new
        assert again(sampled, path, etag) == (304, False)


def test_dead_letters_that_come_or_go_are_sent_and_what_follows_is_not(sampled: Serving):
    path = "/ui/queues/orders/dead"
    etags = [known(sampled, path)]
    changes = (
        lambda: die(sampled, ["TimeoutError: 30 s"]),
        lambda: sampled.post(f"{QUEUE}/dead/redrive", {"limit": 1}),
        lambda: sampled.post(f"{QUEUE}/dead/purge", {"limit": 1}),
        lambda: sampled.post(f"{QUEUE}/pause", {"reason": "the shop is closed"}),
    )
    for change in changes:
        change()
        assert again(sampled, path, etags[-1]) == (200, True)
        etags.append(known(sampled, path))
        assert again(sampled, path, etags[-1]) == (304, False)
    assert len(set(etags)) == len(etags)


def test_a_small_chart_that_only_moves_is_sent_once_a_minute():
    def etag(points: str, now_s: int) -> str:
        text = f'<p>7</p><svg class="spark"><polygon points="{points}"/></svg><svg class="spark"></svg>'
        return rendering._etag(text, now_s * 10**9)

    assert etag("1,2", 60) == etag("3,4", 119) != etag("3,4", 120)
    flat = '<p>7</p><svg class="spark"></svg>'
    assert rendering._etag(flat, 0) == rendering._etag(flat, 10**12) != rendering._etag(flat.replace("7", "8"), 0)


def links_of(server: Serving, path: str, status: int = 200) -> list[str | None]:
    """Where the navigation at the top of a page leads."""
    found = page(server, path, status=status)
    return [attributes.get("href") for tag, attributes in found.tags if tag == "a" and "data-key" in attributes]


@pytest.mark.parametrize("path", ["/ui/queues/nothing", "/ui/nothing/at/all", "/ui/pipelines/nothing"])
def test_a_page_that_is_not_there_keeps_the_navigation(tmp_path: Path, path: str):
    with serving(tmp_path / "data", whole=True, lake=str(tmp_path / "lake")) as server:
        links = links_of(server, path, 404)
        assert links == links_of(server, "/ui")
        assert "/ui/pipelines" in links
    with serving(tmp_path / "data", whole=True) as server:
        links = links_of(server, path, 404)
        assert links == links_of(server, "/ui")
        pages = ["groups", "workers", "schedules", "locks", "health", "audit"]
        assert links == ["/ui", *(f"/ui/{page}" for page in pages)]


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
