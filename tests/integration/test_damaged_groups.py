"""A group that cannot be opened stands still alone; wherever groups are listed, it is there with what is wrong."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import aio
from tests.integration.http_gear import serving
from tests.unit.commands import Run, runner


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Groups in both modes, two that are well and two that cannot be opened: a journal is damaged, another is gone."""
    folder = tmp_path / "data"
    with holdfast.open_broker(folder) as broker:
        broker.create_topic("orders")
        broker.create_topic("other")
        for n in range(5):
            broker.publish("orders", b"message %d" % n)
        for name in ("billing", "shipping"):
            group = broker.group("orders", name)
            group.ack_many(group.receive_many(2))
            group.compact()
        for name in ("archive", "reports"):
            with broker.consumer("orders", group=name) as consumer:
                consumer.poll(0)
                consumer.commit()
    for file in (folder / "topics/orders/0/groups/billing").iterdir():
        file.write_bytes(bytes(file.stat().st_size))
    shutil.rmtree(folder / "groups/reports")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def check(infos: Iterable[Any]) -> None:
    on_orders = {info.name: info for info in infos if info.topic == "orders"}
    assert sorted(on_orders) == ["archive", "billing", "reports", "shipping"]
    assert {name for name, info in on_orders.items() if info.problem} == {"billing", "reports"}
    assert on_orders["billing"].mode == "queue"
    assert on_orders["reports"].mode == "stream"
    assert "groups/billing" in on_orders["billing"].problem
    assert "groups/reports" in on_orders["reports"].problem
    for name in ("billing", "reports"):
        assert (on_orders[name].lag, on_orders[name].members) == (5, 0)  # how far it came nobody knows
        assert "restore" in on_orders[name].problem.lower()


def test_spoiled_groups_are_listed_with_what_is_wrong(data):
    with holdfast.open_broker(data) as broker:
        check(broker.groups())
        check(broker.groups("orders"))
        broker.delete_group("billing", "orders")
        broker.delete_group("reports")
        assert {info.name for info in broker.groups()} == {"archive", "shipping"}


def test_spoiled_groups_are_listed_for_tasks(data):
    async def main() -> None:
        async with await aio.open_broker(data) as broker:
            check(await broker.groups())

    asyncio.run(main())


def test_spoiled_groups_are_listed_over_http_and_on_the_pages(data):
    with serving(data, whole=True) as server, holdfast.connect(server.url) as broker:
        check(broker.groups("orders"))
        for name in ("billing", "reports"):
            answer = server.get(f"/v1/groups/{name}")
            assert answer.status == 200
            assert answer.body["topics"][0]["problem"]
            assert server.get(f"/v1/groups/{name}/offsets").body == {"offsets": []}
            for path in ("/ui/groups", f"/ui/groups/{name}"):
                page = server.get(path, headers={"accept": "text/html"})
                assert page.status == 200
                assert f"groups/{name}" in page.body.decode()
        broker.delete_group("billing", "orders")
        broker.delete_group("reports")
        assert {info.name for info in broker.groups()} == {"archive", "shipping"}


def test_the_command_line_lists_spoiled_groups(data, run):
    done = run("group", "ls", data)
    assert done.code == 0
    for name in ("billing", "reports"):
        assert name in done.out
        assert f"groups/{name}" in done.err
        shown = run("group", "show", data, name, "--topic", "orders")
        assert shown.code == 0
        assert f"groups/{name}" in shown.err
    wrong = {each["name"]: each["wrong"] for each in run("group", "ls", data, "--json").lines}
    assert wrong["billing"]
    assert wrong["reports"]
    assert not wrong["shipping"]
