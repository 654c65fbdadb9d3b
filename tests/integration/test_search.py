"""The search over all queues: it finds messages in every phase, says what it searched, and shows nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.local import search
from holdfast.server.tokens import digest_of
from tests.integration.console_day import failed, live_a_day, order
from tests.integration.http_gear import Serving, serving
from tests.integration.test_console import page


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with messages in every phase; the tests that share it only look."""
    with serving(tmp_path_factory.mktemp("day") / "data", whole=True) as found:
        live_a_day(found)
        yield found


def found(server: Serving, q: str, **query: Any) -> dict[str, Any]:
    answer = server.get("/v1/search", query={"q": q, **query})
    assert answer.status == 200, answer.body
    return dict(answer.body)


def ids(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["id"], message.get("phase", "ready")) for message in answer["messages"]]


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        ("orders-0-30", [("orders-0-30", "ready")]),
        ("$.order=30", [("orders-0-30", "ready")]),
        ("orders.dlq-0-2", [("orders.dlq-0-2", "dead")]),
        ("orders-0-0", [("orders.dlq-0-0", "dead")]),
        ("$.order=17", [("orders-0-17", "leased")]),
        ("$.order=101", [("orders-0-d1", "delayed")]),
        ("$.order=10", [("orders-0-10", "done")]),
        ('"card 42" tenant=acme', [("orders.dlq-0-2", "dead")]),
        ("key=c-6 $.order=20", [("orders-0-20", "leased")]),
        ("enough", [("thumbnails-0-0", "ready")]),
        ("queue=mails tenant=acme", []),
        ("$.order=30 age<1h time>2020-01-01", [("orders-0-30", "ready")]),
        ("$.order=30 age>1h", []),
    ],
)
def test_a_message_is_found_in_any_queue_and_phase(day: Serving, q: str, expected: list[tuple[str, str]]):
    assert ids(found(day, q)) == expected


def test_it_says_what_was_searched(day: Serving):
    answer = found(day, "nothing-has-this")
    assert answer["messages"] == []
    assert "next" not in answer
    by_name = {each["queue"]: each for each in answer["queues"]}
    assert set(by_name) == {"orders", "mails", "thumbnails", "webhooks"}
    assert all(each["whole"] for each in by_name.values())
    assert by_name["orders"]["searched"] == by_name["orders"]["messages"] == 40 + 3 + 9
    assert answer["scanned"] == 40 + 3 + 9 + 2


def test_a_search_in_pieces_finds_what_one_in_one_piece_finds(tmp_path: Path):
    with serving(tmp_path / "data", whole=True, scan_messages=7) as server:
        live_a_day(server)
        for name in ("a", "z"):
            server.request("PUT", f"/v1/queues/{name}", {})
            server.post(f"/v1/queues/{name}/batch", {"messages": [{"text": "order of acme"}] * 10})
        seen, after, pieces, cut = [], "", 0, set()
        while True:
            answer = found(server, "order", after=after)
            assert answer.get("scanned", 0) <= 7
            seen += ids(answer)
            cut |= {each["queue"] for each in answer["queues"] if not each.get("whole")}
            pieces += 1
            after = answer.get("next", "")
            if not after:
                break
            assert pieces < 100
        assert answer["scanned_in_all"] >= 52 + 20
        assert cut >= {"a", "orders", "z"}
        died = {f"orders-0-{i}" for i in range(9)}  # done in the log, if their letter is not in the same piece
        assert sorted(set(seen)) == sorted(seen)
        assert {each for each in seen if each[0] not in died} == {
            *((f"{name}-0-{i}", "ready") for name in "az" for i in range(10)),
            *((f"orders-0-{i}", "done") for i in range(9, 17)),
            *((f"orders-0-{i}", "leased") for i in range(17, 22)),
            *((f"orders-0-{i}", "ready") for i in range(22, 40)),
            *((f"orders-0-d{i}", "delayed") for i in range(3)),
            *((f"orders.dlq-0-{i}", "dead") for i in range(9)),
        }


def test_a_page_holds_so_many_and_the_next_goes_on(day: Serving):
    first = found(day, "tenant=acme", limit=5)
    second = found(day, "tenant=acme", limit=5, after=first["next"])
    assert ids(first) == [(f"orders-0-{i}", "ready") for i in range(39, 34, -1)]  # the newest first
    assert ids(second) == [(f"orders-0-{i}", "ready") for i in range(34, 29, -1)]


def pages(server: Serving, q: str, **query: Any) -> list[dict[str, Any]]:
    """All pieces of a search, up to its end."""
    answers = [found(server, q, **query)]
    while after := answers[-1].get("next", ""):
        answers.append(found(server, q, after=after, **query))
        assert len(answers) < 100
    return answers


def test_a_piece_ends_in_time_too_and_yet_every_piece_gets_further(day: Serving, monkeypatch: pytest.MonkeyPatch):
    whole = ids(found(day, "enough"))
    monkeypatch.setattr(search, "MOST_NS", 0)
    answers = pages(day, "enough")
    assert answers[0]["left"] == ["orders", "thumbnails", "webhooks"]
    assert [each for answer in answers for each in ids(answer)] == whole != []


def test_a_piece_holds_only_so_many_bytes_of_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with serving(tmp_path / "data", whole=True) as server:
        server.request("PUT", "/v1/queues/big", {})
        server.post("/v1/queues/big/batch", {"messages": [{"text": f"{i} " + "x" * 1000} for i in range(10)]})
        monkeypatch.setattr(search, "MOST_BYTES", 2_500)
        answers = pages(server, "xxx")
        assert [len(ids(answer)) for answer in answers[:5]] == [2] * 5
        assert [each for answer in answers for each in ids(answer)] == [
            (f"big-0-{i}", "ready") for i in range(9, -1, -1)
        ]


def test_redriven_messages_are_found_once_for_the_group_that_has_them(tmp_path: Path):
    with serving(tmp_path / "data", whole=True) as server:
        server.request("PUT", "/v1/queues/orders", {"settings": {"max_attempts": 1}})
        assert server.request("PUT", "/v1/topics/orders/groups/mails", {}).status < 300
        order(server, 1)
        failed(server, ["error"])
        assert server.post("/v1/queues/orders/dead/redrive", {}).body["done"] == 1
        assert ids(found(server, "$.order=1")) == [("orders-0-1", "ready"), ("orders-0-0", "done")]


def test_what_the_token_does_not_allow_is_neither_found_nor_named(tmp_path: Path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(
        f'[[tokens]]\nname = "mailer"\nsha256 = "{digest_of("mails-only")}"\nrole = ["read"]\ntopics = ["mails"]\n'
        f'[[tokens]]\nname = "all"\nsha256 = "{digest_of("all")}"\nrole = ["publish", "read", "admin", "consume"]\n'
    )
    tokens.chmod(0o600)
    with serving(tmp_path / "data", whole=True, tokens_file=str(tokens)) as server:
        for name in ("mails", "orders"):
            body = {"messages": [{"text": f"secret of {name}"}]}
            assert server.request("PUT", f"/v1/queues/{name}", {}, token="all").status == 200
            assert server.post(f"/v1/queues/{name}/batch", body, token="all").status == 201
        for q in ("secret", "orders-0-0"):
            answer = server.get("/v1/search", query={"q": q}, token="mails-only")
            assert answer.status == 200
            assert "orders-0" not in str(answer.body["messages"])
            assert "orders" not in [each["queue"] for each in answer.body["queues"]]
        text = server.get("/ui/search", query={"q": "secret"}, token="mails-only").body.decode()
        assert "secret of mails" in text
        assert "orders-0" not in text.replace("orders-0-42", "")


def place(mark: str) -> str:
    return search.SearchPlace("orders", "default", "log", mark).text


@pytest.mark.parametrize(
    "query",
    [
        {"q": "time=never"},
        {"q": "where ("},
        {"q": "x", "after": "???"},
        {"q": "x", "after": place("a.b")},
        {"q": "x", "after": place("0")},
        {"q": "x", "after": place("0.-1")},
        {"q": "x", "after": place("0." + "9" * 50)},
        {"q": ""},
        {},
    ],
)
def test_what_cannot_be_searched_is_refused_with_a_reason(day: Serving, query: dict[str, str]):
    answer = day.get("/v1/search", query=query)
    assert (answer.status, answer.code) == (400, "invalid_request")


def test_the_box_is_on_every_page_and_its_page_is_honest(day: Serving):
    for path in ("/ui", "/ui/queues/orders/dead", "/ui/groups", "/ui/health", "/ui/nothing"):
        answer = day.get(path, headers={"accept": "text/html"})
        assert b'action="/ui/search"' in answer.body
    text = page(day, "/ui/search", query={"q": "nothing-has-this"}).text
    assert "54 messages searched for this page" in text
    assert "orders (52)" in text
    assert "No messages match" in text
    assert "is not a time" in page(day, "/ui/search", query={"q": "time=never"}, status=400).text
    assert "What you can search for" in page(day, "/ui/search").text
