"""`holdfast search`, `take-back` and `run-now`."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from tests.unit.commands import Run, runner


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    with holdfast.open_broker(tmp_path / "shop") as broker:
        orders = broker.queue("orders")
        orders.put_many([b'{"order": %d}' % number for number in range(5)])
        orders.put(b'{"order": 5}', delay=3600)
        broker.queue("mails").put(b"order 3 has shipped", key="customer-7")
        broker.create_topic("clicks")
    return tmp_path / "shop"


def test_a_message_is_found_in_any_queue_and_what_was_searched_is_said(run, shop):
    found = run("search", shop, "order", "3", "--json")
    assert (found.code, [each["id"] for each in found.lines]) == (0, ["mails-0-0", "orders-0-3"])
    assert {each["group"] for each in found.lines} == {"default"}
    assert [each["phase"] for each in run("search", shop, "$.order=5", "--json").lines] == ["delayed"]
    shown = run("search", shop, "key=customer-7")
    assert "mails-0-0" in shown.out
    assert "ready" in shown.out
    assert "1 message found; 7 messages searched" in shown.err
    assert "not searched, since no queue group reads them: clicks" in shown.err


def test_nothing_found_has_its_own_exit_code(run, shop):
    found = run("search", shop, "nothing-has-this")
    assert (found.code, found.out) == (3, "")
    assert "0 messages found; 7 messages searched" in found.err


def test_a_search_goes_on_where_the_one_before_stopped(run, shop):
    first = run("search", shop, "queue=orders", "order", "--limit", "2", "--json")
    assert [each["id"] for each in first.lines] == ["orders-0-4", "orders-0-3"]
    after = first.err.partition("--after ")[2].split()[0]
    second = run("search", shop, "queue=orders", "order", "--after", after, "--json")
    assert [each["id"] for each in second.lines] == ["orders-0-2", "orders-0-1", "orders-0-0", "orders-0-d0"]
    assert "--after" not in second.err


def test_what_cannot_be_understood_says_what_to_write(run, shop):
    assert "is not a time; write" in run("search", shop, "time=never").err
    assert "give a term" in run("search", shop, " ").err


def test_a_delayed_message_runs_now(run, shop):
    assert run("run-now", shop, "orders-0-d0").code == 0
    again = run("run-now", shop, "orders-0-d0", "orders-0-1", "--json")
    assert again.code == 2
    assert "is not delayed" in again.err
    assert run("ls", shop, "delayed", "--topic", "orders", "--json").out == ""


def test_a_leased_message_is_taken_back(run, shop):
    taken = run("get", shop, "--topic", "orders", "--json").document
    done = run("take-back", shop, taken["id"], "--json")
    assert (done.code, done.document) == (0, {"done": "taken back", "id": taken["id"]})
    again = run("take-back", shop, taken["id"])
    assert (again.code, "is not leased" in again.err) == (2, True)
    late = run("ack", shop, taken["receipt"], "--topic", "orders")
    assert late.code == 2
    assert run("get", shop, "--topic", "orders", "--json").document["id"] == taken["id"]
