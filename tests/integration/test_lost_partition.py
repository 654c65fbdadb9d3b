"""A partition whose log is gone stops alone for everybody: tasks, clients of a server, its pages, the command line."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

import holdfast
from holdfast import aio
from holdfast.errors import CorruptData
from tests.integration.http_gear import serving
from tests.unit.commands import Run, runner

LOST = r"orders/1/log is missing: its messages are lost.*--part topics/orders/1/log"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A topic of three partitions with a message each; the second one is gone with all that it had."""
    folder = tmp_path / "data"
    with holdfast.open_broker(folder) as broker:
        broker.create_topic("orders", partitions=3)
        broker.group("orders", "billing")
        for number in range(3):
            broker.publish("orders", b"%d" % number, partition=number)
    shutil.rmtree(folder / "topics/orders/1")
    return folder


def test_tasks_go_on_with_the_others(data):
    async def main() -> None:
        async with await aio.open_broker(data) as broker:
            assert {(await broker.publish("orders", b"new")).partition for _ in range(4)} == {0, 2}
            with pytest.raises(CorruptData, match=LOST):
                await broker.publish("orders", b"new", partition=1)
            group = await broker.group("orders", "billing")
            assert {message.partition for message in await group.receive_many(10)} == {0, 2}
            async with broker.producer() as producer:
                sent = await producer.send("orders", b"sent", partition=1)
                with pytest.raises(CorruptData, match=LOST):
                    await sent
                assert {(await (await producer.send("orders", b"sent"))).partition for _ in range(3)} <= {0, 2}

    asyncio.run(main())


def test_clients_go_on_with_the_others_and_the_pages_tell(data):
    with serving(data, whole=True) as server, holdfast.connect(server.url) as broker:
        assert {broker.publish("orders", b"new").partition for _ in range(4)} == {0, 2}
        # A delayed message goes where its random dedup id leads: with forty of them, to both.
        assert {broker.publish("orders", b"new", delay=3600).partition for _ in range(40)} == {0, 2}
        for refused in (
            lambda: broker.publish("orders", b"new", partition=1),
            lambda: broker.publish("orders", b"new", partition=1, delay=3600),
            lambda: broker.read("orders", partition=1),
        ):
            with pytest.raises(CorruptData, match=LOST):
                refused()
        group = broker.group("orders", "billing")
        assert {message.partition for message in group.receive_many(10)} == {0, 2}
        with broker.producer() as producer:
            assert {each.partition for each in producer.send_many("orders", [b"sent"] * 5000).result(60)} == {0, 2}
        with broker.consumer("orders", group="reports") as consumer:
            assert consumer.poll(timeout=10)
        assert [bool(each.problem) for each in broker.describe_topic("orders").partitions] == [False, True, False]
        page = server.get("/ui/", headers={"accept": "text/html"})
        assert "partition 1 is stopped" in page.body.decode()


def test_the_command_line_shows_which_one_stands_still(data, run):
    shown = run("topic", "show", data, "orders")
    assert shown.code == 0
    assert "partition 1 is stopped" in shown.out
    document = run("topic", "show", data, "orders", "--json").document
    assert [bool(each["problem"]) for each in document["partitions"]] == [False, True, False]
    produce = ("produce", data, "orders", "--partition", "1", "-m", "new")
    assert "topics/orders/1/log is missing" in run(*produce).err
    assert run("repair", data, "--yes").code == 0
    assert run("check", data).code == 0
    assert run(*produce).code == 0
