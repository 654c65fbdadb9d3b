"""A user's typed program passes mypy in strict mode: locks, documents and consumers, in both styles and everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

PROGRAM = """
from datetime import UTC, datetime
import holdfast
from holdfast import aio


def threads(folder: str) -> int:
    with holdfast.open_broker(folder, body_type=str) as broker:
        broker.create_topic("orders", exist_ok=True)
        broker.publish("orders", "a")
        lock: holdfast.Lock = broker.locks.acquire("nightly", wait=1)
        broker.locks.keepalive(lock, 30)
        broker.locks.release(lock)
        with broker.locks.hold("nightly") as held:
            document: holdfast.Document = broker.documents.update("plan", {"a": 1}, lock=held)
            fence: int = held.fence
        infos: list[holdfast.LockInfo] = broker.locks.list()
        names: list[str] = broker.documents.list()
        with broker.consumer("orders", group="g", on_assigned=lambda places: None) as consumer:
            consumer.seek_to_time(datetime.now(UTC))
            messages: list[holdfast.StreamMessage[str]] = consumer.poll(0)
            consumer.commit(messages, durability="fsync")
            consumer.commit(offsets={("orders", 0): 1})
            for message in consumer:
                body: str = message.body
                break
            committed: int | None = consumer.committed("orders", 0)
            behind: int = sum(each.messages for each in consumer.lag())
        kept: holdfast.Consumer[str] = broker.consumer("orders", group="g")
        kept.close()
        return document.version + fence + len(infos) + len(names) + (committed or 0) + behind


async def tasks(folder: str) -> None:
    async with aio.open_broker(folder, body_type=str) as broker:
        held = await broker.locks.hold("nightly")
        await broker.locks.release(held)
        async with broker.locks.hold("nightly") as other:
            document: holdfast.Document = await broker.documents.update("plan", 1, lock=other)
            print(document.version, other.lost)
        async with broker.consumer("orders", group="g") as consumer:
            messages: list[holdfast.StreamMessage[str]] = await consumer.poll(0)
            await consumer.commit(messages)
            async for message in consumer:
                print(message.body.upper())
                break
        kept: aio.AsyncConsumer[str] = await broker.consumer("orders", group="g")
        await kept.close()


def remote(url: str) -> holdfast.Consumer[str]:
    broker = holdfast.connect(url)
    lock = broker.locks.acquire("x")
    print(lock.fence)
    return broker.consumer("orders", group="g")
"""


@pytest.mark.slow
def test_a_typed_program_with_locks_and_consumers_passes_mypy_in_strict_mode(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, "utf-8")
    options = ["--strict", "--config-file=", f"--cache-dir={tmp_path / 'cache'}"]
    options += ["--follow-imports=silent"]  # as for a package that is installed: of what is inside nothing is said
    package = Path(holdfast.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "MYPYPATH": str(package)},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
