"""Large messages: read and written piece by piece, and otherwise messages like any other."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import random
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

import holdfast
from holdfast import aio
from holdfast.codec.encode import PLAIN, encode_batch
from holdfast.codec.frame import Kind
from holdfast.env import ManualClock, SeededIds, World, real_world
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import ChecksumMismatch, DiskFull, InvalidRequest, MessageTooLarge, Unavailable
from holdfast.large import LARGE_BYTES, LargeValue
from holdfast.model import Batch
from holdfast.settings import LogSettings
from holdfast.storage import LogReader, open_log
from holdfast.storage.batches import Spool
from holdfast.storage.checks.check import check
from holdfast.storage.log import Log
from tests.unit.queues import Place

VALUE = random.Random(7).randbytes(3 * LARGE_BYTES + 12_345)
APART = random.Random(8).randbytes(17 * LARGE_BYTES + 3)  # large enough for a segment of its own


def pieces(value: bytes = VALUE, size: int = 100_000) -> Iterator[bytes]:
    for at in range(0, len(value), size):
        yield value[at : at + size]


async def async_pieces(value: bytes = VALUE) -> AsyncIterator[bytes]:
    for piece in pieces(value):
        await asyncio.sleep(0)
        yield piece


def spools(place: Place) -> list[str]:
    return [name for name in place.files() if "spool" in name]


def real_spools(folder: Path) -> list[Path]:
    return list(folder.rglob("spool*"))


def large(content: bytes, *, before: bytes = b"head", behind: bytes = b"\0\0\0") -> LargeValue:
    start, end = len(before), len(before) + len(content)
    checked = before + content + b"tail"
    return LargeValue(memoryview(checked), start, end, crc32c(checked + behind), behind)


def test_a_large_value_is_read_in_many_ways():
    value = large(VALUE)
    assert len(value) == len(VALUE)
    assert bytes(value) == VALUE
    assert b"".join(value.pieces()) == VALUE
    assert b"".join(value.chunks(1000)) == VALUE
    with value.open() as file:
        assert file.read(10) == VALUE[:10]
        assert file.read() == VALUE[10:]
        assert file.read(1) == b""
    assert value.first(5) == VALUE[:5]


@pytest.mark.parametrize("read", ["bytes", "pieces", "chunks", "open", "open in steps"])
def test_nobody_reads_a_spoiled_value_to_its_end(read):
    content = b"head" + VALUE
    for at in (0, 4, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[at] ^= 1
        value = LargeValue(memoryview(damaged), 4, len(content), crc32c(content))
        seen = bytearray()
        with pytest.raises(ChecksumMismatch, match="does not match its checksum"):
            if read == "bytes":
                bytes(value)
            elif read == "pieces":
                for piece in value.pieces():
                    seen += piece
            elif read == "chunks":
                for piece in value.chunks():
                    seen += piece
            elif read == "open":
                value.open().read()
            else:
                with value.open() as file:
                    while piece := file.read(1000):
                        seen += piece
        assert len(seen) < len(VALUE)


def test_a_large_value_gets_a_frame_of_its_own_and_is_not_copied():
    value = large(VALUE)
    values = [b"a", value, b"b", b"c", value]
    bodies = encode_batch(Batch(values=values), 0, packing=PLAIN, cap_bytes=16 << 20, kind=Kind.DATA)
    assert [body.count for body in bodies] == [1, 1, 2, 1]
    assert bodies[1].parts[1].obj is value.view.obj


@pytest.mark.parametrize("value", [VALUE, APART], ids=["beside others", "apart"])
def test_a_stream_becomes_one_message(tmp_path, value):
    with holdfast.open(tmp_path, max_message_bytes=64 << 20) as q:
        q.put(b"before")
        stored = q.put_stream(
            pieces(value), size_hint=len(value), key="k", headers={"a": "b"}, correlation_id="c", ttl=3600
        )
        q.put(b"behind")
        assert (stored.offset, stored.durability) == (1, "fsync")
        before, message, behind = q.get_many(3)
        assert (before.body, behind.body) == (b"before", b"behind")
        assert (message.key, message.headers["a"], message.correlation_id) == ("k", "b", "c")
        assert message.size == len(value)
        assert message.raw == message.body == value
        assert message.open().read() == value
        assert b"".join(message.chunks(1 << 20)) == value
        assert repr(value[:40]) in repr(message)
        for each in (before, message, behind):
            each.ack()
    assert real_spools(tmp_path) == []
    log = next(tmp_path.rglob("log"))
    assert check(str(log)).ok
    assert [record.value for record in LogReader(log).records(0)] == [b"before", value, b"behind"]


def test_a_file_is_a_stream(tmp_path):
    (tmp_path / "file").write_bytes(VALUE)
    with holdfast.open(tmp_path / "q") as q, (tmp_path / "file").open("rb") as file:
        q.put_stream(file)
        with q.get() as message:
            assert message.raw == VALUE


def test_a_small_stream_needs_no_file():
    place = Place()
    seen: list[str] = []
    place.disk.on_call = lambda call: seen.extend(spools(place))
    place.q.put_stream([b"a", bytearray(b"b"), memoryview(b"c")])
    place.q.put_stream([])
    assert [message.raw for message in place.q.get_many(2)] == [b"abc", b""]
    assert seen == []


def test_small_messages_are_opened_and_cut_the_same_way():
    place = Place()
    place.q.put(b"0123456789")
    with place.q.get() as message:
        assert message.size == 10
        assert message.open().read(3) == b"012"
        assert list(message.chunks(4)) == [b"0123", b"4567", b"89"]
        with pytest.raises(InvalidRequest, match="size=0 cannot be used"):
            message.chunks(0)


def test_a_stream_of_a_typed_queue_is_stored_as_it_comes():
    place = Place(body_type=dict)
    place.q.put_stream([b'{"a": ', b"1}"])
    with place.q.get() as message:
        assert message.body == {"a": 1}


def test_the_brokers_take_streams(tmp_path):
    with holdfast.open_broker(tmp_path) as broker:
        broker.create_topic("t", partitions=4)
        stored = broker.publish_stream("t", pieces(), key="k")
        assert broker.publish_stream("t", pieces(), len(VALUE), partition=2).partition == 2
        (found,) = broker.read("t", partition=stored.partition, limit=1)
        assert found.size == len(VALUE)
        assert found.open().read() == VALUE


def test_tasks_send_and_read_streams(tmp_path):
    async def run() -> None:
        async with aio.open_broker(tmp_path) as broker:
            await broker.create_topic("t", max_message_bytes=64 << 20)
            await broker.publish_stream("t", async_pieces(), len(VALUE), key="k")
            await broker.publish_stream("t", async_pieces(APART))
            await broker.publish_stream("t", io.BytesIO(VALUE))
            group = await broker.group("t", "g")
            for value in (VALUE, APART, VALUE):
                async with await group.receive() as message:
                    assert b"".join([chunk async for chunk in message.chunks(256 * 1024)]) == value

    asyncio.run(run())
    assert real_spools(tmp_path) == []


def test_the_queue_for_tasks_takes_streams(tmp_path):
    async def run() -> None:
        async with aio.open(tmp_path) as q:
            await q.put_stream(async_pieces(), priority=3)
            await q.put_stream([b"small"])
            async with await q.get() as message:
                assert message.raw == VALUE
            async with await q.get() as message:
                assert [chunk async for chunk in message.chunks()] == [b"small"]

    asyncio.run(run())


def test_a_task_that_is_cancelled_leaves_nothing(tmp_path):
    async def run() -> None:
        async with aio.open(tmp_path) as q:
            begun = asyncio.Event()

            async def endless() -> AsyncIterator[bytes]:
                yield VALUE
                begun.set()
                await asyncio.Event().wait()

            task = asyncio.create_task(q.put_stream(endless()))
            await begun.wait()
            assert len(real_spools(tmp_path)) == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert real_spools(tmp_path) == []
            assert (await q.stats()).ready == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("stream", "options", "words"),
    [
        (b"bytes", {}, "a stream must be a binary file or an iterable of bytes, not bytes"),
        ("text", {}, "of bytes, not str"),
        (5, {}, "of bytes, not int"),
        (["text"], {}, "a stream must yield bytes, not str"),
        (io.StringIO("text"), {}, "a stream must yield bytes, not str"),
        ([b""], {"codec": "zstd"}, "a stream is stored as it is; compress it first"),
        ([b""], {"colour": 1}, "colour cannot be used here"),
        ([b""], {"priority": 11}, "priority=11 cannot be used"),
        ([b""], {"size_hint": -1}, "size_hint=-1 cannot be used"),
    ],
)
def test_what_is_no_stream_is_refused(stream: Any, options: dict[str, Any], words: str):
    place = Place()
    with pytest.raises(InvalidRequest, match=words):
        place.q.put_stream(stream, **options)
    assert place.q.stats().ready == 0
    assert spools(place) == []


def test_what_is_wrong_with_a_message_is_said_before_its_first_byte_is_read():
    def never() -> Iterator[bytes]:
        raise AssertionError("it was read")
        yield b""

    place = Place()
    with pytest.raises(InvalidRequest):
        place.q.put_stream(never(), delay="soon")
    with pytest.raises(MessageTooLarge, match="11,000,000 bytes or more, the limit is 10,485,760"):
        place.q.put_stream(never(), size_hint=11_000_000)


def test_a_stream_that_grows_too_large_is_cut_off():
    place = Place(max_message_bytes=2 * LARGE_BYTES)
    given = 0

    def endless() -> Iterator[bytes]:
        nonlocal given
        while True:
            given += 1
            yield bytes(100_000)

    with pytest.raises(MessageTooLarge, match="raise max_message_bytes"):
        place.q.put_stream(endless())
    assert given <= 2 * LARGE_BYTES // 100_000 + 1
    assert spools(place) == []
    assert place.q.stats().ready == 0


def test_a_stream_that_fails_leaves_nothing():
    def failing() -> Iterator[bytes]:
        yield VALUE
        raise RuntimeError("the line is cut")

    place = Place()
    with pytest.raises(RuntimeError, match="the line is cut"):
        place.q.put_stream(failing())
    assert spools(place) == []
    assert place.q.stats().ready == 0


def test_a_full_disk_in_the_middle_of_a_stream_leaves_nothing():
    place = Place()
    place.q.put(b"before")
    used = sum(map(len, place.files().values()))
    place.disk._capacity_bytes = used + 2 * LARGE_BYTES
    with pytest.raises(DiskFull, match="no room for a large message"):
        place.q.put_stream(pieces())
    assert spools(place) == []
    place.disk._capacity_bytes = None
    place.q.put_stream(pieces())
    assert [message.size for message in place.q.get_many(2)] == [6, len(VALUE)]


def test_a_disk_that_would_be_too_full_is_noticed_at_once():
    place = Place(min_free_bytes=1 << 60)
    with pytest.raises(DiskFull, match="must stay free"):
        place.q.put_stream(pieces())
    with pytest.raises(DiskFull, match="must stay free"):
        place.q.put_stream(pieces(), size_hint=len(VALUE))
    assert spools(place) == []


@pytest.mark.parametrize("call", ["open", "write", "view"])
def test_a_disk_that_fails_while_a_stream_comes_refuses_this_message_only(call):
    place = Place()
    place.disk.faults.fail(1, errno.EIO, sticky=False, calls={call})
    with pytest.raises(Unavailable, match="could not be written"):
        place.q.put_stream(pieces())
    place.disk.faults.clear()
    place.q.put_stream(pieces())
    with place.q.get() as message:
        assert message.raw == VALUE


def test_spools_of_a_dead_process_are_removed_at_the_next_opening():
    place = Place()
    place.q.put(b"there")

    def dying() -> Iterator[bytes]:
        yield VALUE
        assert len(spools(place)) == 1
        place.kill()
        raise SystemExit

    with pytest.raises(SystemExit):
        place.q.put_stream(dying())
    assert spools(place) == []
    with place.q.get() as message:
        assert message.raw == b"there"


@pytest.mark.parametrize("value", [VALUE, APART], ids=["beside others", "apart"])
def test_a_large_dead_letter_comes_back_byte_by_byte(value):
    place = Place(max_message_bytes=64 << 20)
    place.q.put_stream(pieces(value), key="k", headers={"a": "b"})
    place.q.get().reject("no good")
    place.tick()
    (letter,) = place.q.dead.list()
    assert letter.size == len(value)
    assert letter.open().read() == value
    assert place.q.dead.redrive().done == 1
    with place.q.get() as message:
        assert (message.raw, message.key, message.headers["a"]) == (value, "k", "b")


def test_many_large_dead_letters_are_moved_some_at_a_time():
    place = Place()
    for n in range(12):
        place.q.put_stream([bytes([n]) * (3 << 20)])
    for message in place.q.get_many(12):
        message.reject("no good")
    place.tick()
    assert len(place.q.dead.list()) == 12
    assert place.q.dead.redrive().done == 12
    for n, message in enumerate(place.q.get_many(12)):
        assert message.raw == bytes([n]) * (3 << 20)
        message.ack()


@pytest.mark.parametrize("value", [VALUE, APART], ids=["beside others", "apart"])
@pytest.mark.parametrize("spilled", [False, True], ids=["intake", "spilled"])
def test_a_large_message_may_be_delayed(value, spilled):
    place = Place(max_message_bytes=64 << 20)
    place.q.put_many([holdfast.NewMessage(body=b"%d" % n, delay=60 + n) for n in range(5)])
    stored = place.q.put_stream(pieces(value), delay=62, key="k")
    assert stored.delayed_id is not None
    if spilled:
        store = place.q._port.publisher.partitions[0].delayed
        store.spill(place.clock.now_ns() // 1_000_000)
        place.reopen()
    assert place.q.stats().ready == 0
    place.after(seconds=61)
    place.after(seconds=9)
    found = place.q.get_many(6)
    assert [message.size for message in found] == [1, 1, 1, len(value), 1, 1]
    assert (found[3].raw, found[3].key, found[3].id) == (value, "k", stored.id)


def test_a_large_message_is_stored_once_by_its_dedup_id():
    place = Place(max_message_bytes=64 << 20)
    first = place.q.put_stream(pieces(APART), dedup_id="one")
    again = place.q.put_stream(pieces(APART), dedup_id="one")
    assert (again.duplicate, again.offset) == (True, first.offset)
    assert place.q.stats().ready == 1
    assert spools(place) == []


def test_key_compaction_keeps_the_last_large_message(tmp_path):
    with holdfast.open_broker(tmp_path) as broker:
        broker.create_topic("t", cleanup="compact", max_message_bytes=64 << 20, segment_bytes=1 << 20)
        for key, value in [("a", VALUE), ("b", VALUE[::-1]), ("a", APART), ("c", b"small")]:
            broker.publish_stream("t", pieces(value), key=key)
        broker.compact_topic("t")
        found = broker.read("t")
        assert [(message.key, message.size) for message in found] == [("b", len(VALUE)), ("a", len(APART)), ("c", 5)]
        assert [message.raw for message in found] == [VALUE[::-1], APART, b"small"]


def test_a_large_message_goes_with_its_segment(tmp_path):
    with open_log(tmp_path, LogSettings(max_message_bytes=64 << 20, durability="os")) as log:
        for n in range(3):
            log.append([APART])
            log.append([b"%d" % n])
        # Each large one has a segment of its own, to which small ones are added.
        assert [(s.base_offset, s.next_offset) for s in log.segments()] == [(0, 2), (2, 4), (4, 6)]
        assert log.trim(4).segments == 2
        assert [len(record.value) for record in log.records(4)] == [len(APART), 1]


def test_behind_an_empty_segment_a_large_message_takes_the_plain_way(tmp_path):
    with open_log(tmp_path, LogSettings(max_message_bytes=64 << 20, durability="os")) as log:
        log.append([b"first"])
        log.roll()
        with Spool(real_world(), str(tmp_path), log.settings, head_bytes=8) as spool:
            for piece in pieces(APART):
                if spool.add(piece):
                    spool.write_gathered()
            log.append(Batch(values=[spool.value()]))
        assert [s.base_offset for s in log.segments()] == [0, 1]
        assert next(log.records(1)).value == APART
    assert real_spools(tmp_path) == []


def simulated_log() -> tuple[SimulatedDisk, Log]:
    disk = SimulatedDisk()
    log = Log.open("log", LogSettings(min_free_bytes=0), World(clock=ManualClock(), disk=disk, ids=SeededIds(1)))
    log._writer.apart_bytes = 1000
    log.append([b"first"])
    return disk, log


def stream_into(log: Log, value: bytes) -> None:
    with Spool(log._world, "log", log.settings, head_bytes=8, file_bytes=500) as spool:
        for piece in pieces(value, 700):
            if spool.add(piece):
                spool.write_gathered()
        log.append(Batch(values=[spool.value()]))


def test_others_append_while_a_large_message_is_written():
    disk, log = simulated_log()
    held: list[bool] = []

    def beside(call: str) -> None:
        if call == "sync" and not held:
            held.append(log._writer.lock.locked())
            if not held[0]:
                log.append([b"beside"], durability="os")

    disk.on_call = beside
    stream_into(log, b"x" * 5000)
    assert held == [False]
    assert [record.value for record in log.records(0)] == [b"first", b"beside", b"x" * 5000]


def test_a_large_message_that_is_interrupted_anywhere_leaves_the_log_sound():
    for nth in count(1):
        disk, log = simulated_log()
        left = nth

        def interrupt(call: str) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt

        disk.on_call = interrupt
        with contextlib.suppress(KeyboardInterrupt):
            stream_into(log, b"x" * 5000)
        disk.on_call = None
        log.append([b"next"])
        there = [record.value for record in log.records(0)]
        assert there in ([b"first", b"next"], [b"first", b"x" * 5000, b"next"])
        log.close()
        world = World(clock=ManualClock(), disk=disk, ids=SeededIds(1))
        with Log.open("log", log.settings, world) as again:
            assert again.report.clean
            assert [record.value for record in again.records(0)] == there
            assert not [name for name in disk.names("log") if name.endswith(".tmp")]
        if left > 0:
            assert nth > 8
            return


def test_large_values_stay_in_their_file_unless_they_are_asked_for(tmp_path):
    with open_log(tmp_path, LogSettings(durability="os")) as log:
        log.append([VALUE])
        (record,) = log.records(0)
        assert record.value == VALUE
        (record,) = log.records(0, whole=False)
        assert isinstance(record.value, LargeValue)
        (frame,) = log.read(0)
        assert frame.is_large
        assert frame.values() == [VALUE]


def test_a_flipped_byte_in_a_large_message_is_noticed_when_it_is_taken(tmp_path):
    with holdfast.open(tmp_path) as q:
        q.put_stream(pieces())
        q.put(b"next")
        flip(tmp_path, len(VALUE) // 2)
        with q.get() as message:
            assert message.raw == b"next"
    assert not check(str(next(tmp_path.rglob("log")))).ok


def test_a_byte_that_flips_after_that_is_noticed_before_the_end(tmp_path):
    with holdfast.open(tmp_path) as q:
        q.put_stream(pieces())
        with q.get() as message:
            flip(tmp_path, len(VALUE) // 2)
            seen = 0
            with pytest.raises(ChecksumMismatch):
                for chunk in message.chunks():
                    seen += len(chunk)
            assert seen < len(VALUE)
            with pytest.raises(ChecksumMismatch):
                message.open().read()
            flip(tmp_path, len(VALUE) // 2)


def flip(folder: Path, position: int) -> None:
    """Flip a byte of the first segment, where it lies."""
    path = min(folder.rglob("log/*.log"))
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0xFF]))
