"""A protocol of one's own fits on the port: examples/text_protocol.py, asked by clients that behave and that do not."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import holdfast
from holdfast.client.opening import client_of
from holdfast.local.aio.broker import AsyncLocalBrokerPort
from holdfast.local.opening import open_broker_port
from holdfast.remote.aio.broker import AsyncRemoteBrokerPort
from tests.integration.http_gear import serving

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "text_protocol.py"

# Far longer than any answer takes: only what hangs comes near it.
PATIENCE_S = 60


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("text_protocol", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


text_protocol = load()


class Caller:
    """A client that says a line and reads one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, line: str | bytes) -> str:
        self.send(line)
        return await self.answer()

    def send(self, line: str | bytes) -> None:
        self.writer.write((line.encode() if isinstance(line, str) else line) + b"\n")

    async def answer(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return (await self.reader.readline()).decode().removesuffix("\n")

    async def get(self, queue: str, seconds: float = 0) -> tuple[str, str]:
        """The receipt and the text of the next message."""
        verb, receipt, text = (await self.say(f"GET {queue} {seconds}")).split(" ", 2)
        assert verb == "MESSAGE"
        return receipt, text


Call = Callable[[], Awaitable[Caller]]


@asynccontextmanager
async def calling(broker: Any) -> AsyncIterator[Call]:
    """What connects a client to a text server on this port of a broker."""
    callers: list[Caller] = []
    try:
        async with text_protocol.served(broker) as port:

            async def call() -> Caller:
                callers.append(Caller(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)))
                return callers[-1]

            yield call
    finally:
        for caller in callers:
            caller.writer.close()
        await broker.close()


def run_story(folder: Path, story: Callable[[Call], Awaitable[None]]) -> None:
    """Run the story with a text server of the folder."""

    async def run() -> None:
        async with calling(open_broker_port(AsyncLocalBrokerPort, folder)) as call:
            await story(call)

    asyncio.run(run())


async def put_get_and_ack(call: Call) -> None:
    caller = await call()
    assert await caller.say("PUT orders two coffees, please") == "STORED orders-0-0"
    receipt, text = await caller.get("orders")
    assert text == "two coffees, please"
    assert await caller.say("STATS orders") == "READY 0 LEASED 1 DELAYED 0 DEAD 0"
    assert await caller.say("GET orders") == "EMPTY"
    assert await caller.say(f"ACK orders {receipt}") == "OK"
    assert (await caller.say(f"ACK orders {receipt}")).startswith("ERROR lease_lost ")
    assert await caller.say("STATS orders") == "READY 0 LEASED 0 DELAYED 0 DEAD 0"
    assert await caller.say("quit") == "BYE"
    assert await caller.reader.read() == b""


def test_a_message_is_put_taken_and_acked_over_lines(tmp_path: Path):
    run_story(tmp_path / "data", put_get_and_ack)


def test_the_same_face_stands_on_the_port_of_a_server(tmp_path: Path):
    async def run(url: str) -> None:
        client = await asyncio.to_thread(client_of, url, for_tasks=True)
        async with calling(AsyncRemoteBrokerPort(client)) as call:
            await put_get_and_ack(call)

    with serving(tmp_path / "data") as server:
        asyncio.run(run(server.url))


def test_a_message_that_failed_comes_again_and_any_connection_may_settle_it(tmp_path: Path):
    async def story(call: Call) -> None:
        first, second = await call(), await call()
        await first.say("PUT orders tea")
        receipt, _ = await first.get("orders")
        first.writer.close()
        assert await second.say(f"NACK orders {receipt} the kettle is broken") == "OK"
        assert (await second.say(f"NACK orders {receipt}")).startswith("ERROR lease_lost ")
        receipt, text = await second.get("orders", 60)
        assert text == "tea"
        assert await second.say(f"ACK orders {receipt}") == "OK"

    run_story(tmp_path / "data", story)


def test_who_waits_gets_what_another_puts(tmp_path: Path):
    async def story(call: Call) -> None:
        waiting, putting = await call(), await call()
        await putting.say("PUT orders first")
        await putting.get("orders")
        waiting.send("GET orders 60")
        await asyncio.sleep(0.05)
        await putting.say("PUT orders second")
        assert (await waiting.answer()).endswith(" second")

    run_story(tmp_path / "data", story)


def test_who_hangs_up_while_waiting_holds_no_message(tmp_path: Path):
    async def story(call: Call) -> None:
        gone, other = await call(), await call()
        await other.say("PUT orders first")
        await other.get("orders")
        gone.send("GET orders 60")
        await asyncio.sleep(0.05)
        gone.writer.close()
        await gone.writer.wait_closed()
        await asyncio.sleep(0.05)
        await other.say("PUT orders second")
        _, text = await other.get("orders", 20)  # the lease of one who is gone would last longer
        assert text == "second"

    run_story(tmp_path / "data", story)


@pytest.mark.parametrize(
    "line",
    [
        "",
        " ",
        "PUT",
        "PUT orders",
        "PUT  no name",
        "PUT ../etc text",
        "PUT __ours text",
        "PUT orders.dlq text",
        "GET",
        "GET orders soon",
        "GET orders -1",
        "GET orders nan",
        "GET orders 1e9",
        "GET orders 1 2",
        "ACK orders",
        "ACK orders made-up",
        "ACK orders orders-0-0@ÄÖÜ",
        "ACK orders orders-9-0@AQAAAYAAAAAB6olLq-VgVpNxRczQhrQs",
        "NACK orders",
        "STATS",
        "STATS nowhere",
        "GET nowhere",
        "QUIT now",
        "DELETE orders",
        b"PUT orders \xff\xfe",
        b"\x00\x01\x02",
        b"PUT orders " + b"x" * text_protocol.MOST_BYTES,
        b"x" * (5 * text_protocol.MOST_BYTES),
    ],
    ids=lambda line: repr(line[:30]),
)
def test_a_bad_line_gets_an_error_in_one_line_and_the_connection_goes_on(tmp_path: Path, line: str | bytes):
    async def story(call: Call) -> None:
        caller = await call()
        await caller.say("PUT orders good")
        verb, code, what = (await caller.say(line)).split(" ", 2)
        assert (verb, code != "internal", bool(what)) == ("ERROR", True, True)
        assert str(tmp_path) not in what
        assert await caller.say("STATS orders") == "READY 1 LEASED 0 DELAYED 0 DEAD 0"

    run_story(tmp_path / "data", story)


def test_the_longest_line_that_fits_is_taken_as_it_is(tmp_path: Path):
    async def story(call: Call) -> None:
        caller = await call()
        text = "ü" * ((text_protocol.MOST_BYTES - len("PUT orders ")) // 2)
        assert await caller.say(f"PUT orders {text}\r") == "STORED orders-0-0"
        assert (await caller.get("orders"))[1] == text
        assert await caller.say("PUT orders ") == "STORED orders-0-1"
        assert (await caller.get("orders"))[1] == ""

    run_story(tmp_path / "data", story)


def test_a_line_that_was_cut_off_is_not_done(tmp_path: Path):
    async def story(call: Call) -> None:
        cut, other = await call(), await call()
        await other.say("PUT orders whole")
        cut.writer.write(b"PUT orders hal")
        cut.writer.write_eof()
        assert await cut.reader.read() == b""
        assert await other.say("STATS orders") == "READY 1 LEASED 0 DELAYED 0 DEAD 0"

    run_story(tmp_path / "data", story)


def test_a_receipt_of_another_queue_settles_nothing(tmp_path: Path):
    async def story(call: Call) -> None:
        caller = await call()
        for queue in ("orders", "returns"):
            await caller.say(f"PUT {queue} tea")
        receipt, _ = await caller.get("orders")
        other, _ = await caller.get("returns")
        for verb in ("ACK", "NACK"):
            assert (await caller.say(f"{verb} returns {receipt}")).startswith("ERROR invalid_request ")
            forged = f"{other.partition('@')[0]}@{receipt.partition('@')[2]}"
            assert (await caller.say(f"{verb} returns {forged}")).startswith("ERROR lease_lost ")
        for queue in ("orders", "returns"):
            assert await caller.say(f"STATS {queue}") == "READY 0 LEASED 1 DELAYED 0 DEAD 0"
        assert await caller.say(f"ACK orders {receipt}") == "OK"

    run_story(tmp_path / "data", story)


def test_what_no_line_can_hold_is_given_back_as_failed(tmp_path: Path):
    with holdfast.open_broker(tmp_path / "data") as broker, broker.queue("orders", max_attempts=1) as orders:
        for body in (b"two\nlines", b"\xff", b"x" * (text_protocol.MOST_BYTES + 1), b"good"):
            orders.put(body)

    async def story(call: Call) -> None:
        caller = await call()
        for _ in range(3):
            assert "not a line of text" in await caller.say("GET orders")
        assert (await caller.get("orders"))[1] == "good"
        assert await caller.say("STATS orders") == "READY 0 LEASED 1 DELAYED 0 DEAD 3"

    run_story(tmp_path / "data", story)


def test_one_who_does_not_read_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_protocol, "STUCK_S", 0.5)

    async def story(call: Call) -> None:
        stuck, other = await call(), await call()
        await other.say("PUT orders tea")
        stuck.writer.transport.pause_reading()
        lines = b"?\n" * 1000
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                while True:  # until the server lets it go
                    stuck.writer.write(lines)
                    await asyncio.wait_for(stuck.writer.drain(), PATIENCE_S)
                    assert await other.say("STATS orders") == "READY 1 LEASED 0 DELAYED 0 DEAD 0"
        assert (await other.get("orders"))[1] == "tea"

    run_story(tmp_path / "data", story)


def test_a_server_that_ends_lets_go_of_who_waits_and_of_the_folder(tmp_path: Path):
    async def story(call: Call) -> None:
        waiting = await call()
        await waiting.say("PUT orders first")
        await waiting.get("orders")
        waiting.send("GET orders 60")
        await asyncio.sleep(0.05)

    run_story(tmp_path / "data", story)
    with holdfast.open_broker(tmp_path / "data", share=False) as broker:
        assert broker.topics() == ["orders"]


def test_a_fault_of_the_face_is_logged_and_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def broken(*_: object) -> str:
        raise ZeroDivisionError("secret")

    async def story(call: Call) -> None:
        caller = await call()
        monkeypatch.setattr(text_protocol.TextFace, "answer", broken)
        said = await caller.say("STATS orders")
        assert said.startswith("ERROR internal ")
        assert "secret" not in said
        assert "secret" in caplog.text

    run_story(tmp_path / "data", story)


def test_it_uses_no_private_name():
    used = {
        name
        for node in ast.walk(ast.parse(EXAMPLE.read_text("utf-8")))
        for name in (
            [node.attr]
            if isinstance(node, ast.Attribute)
            else [*(node.module or "").split("."), *(each.name for each in node.names)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert {"take", "settle", "AsyncGroupPort", "opening"} <= used
    assert not {name for name in used if name.startswith("_")}
