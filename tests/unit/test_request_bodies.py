"""What a request's body may cost: counted before it is made, unpacked no further than it may be, read aside."""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidRequest, MessageTooLarge
from holdfast.protocol import media
from holdfast.protocol.media import (
    FRAMES,
    JSON,
    LINES,
    MOST_BATCH_COMMAS,
    MOST_VALUES,
    MSGPACK,
    SMALL_BYTES,
    Unframer,
    check_batch,
    check_values,
    framed,
)
from holdfast.server.api.enqueue import _Form, _read
from holdfast.server.http.messages import FREE_BYTES, unpacker
from holdfast.server.turns import Job, Pool, Unwanted

MIB = 1 << 20

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=6),
    max_leaves=60,
)


def form(media: str, most: int = 1_000) -> _Form:
    return _Form(media, most, [])


class Pieces:
    """A body in pieces, which counts those that were asked for."""

    def __init__(self, piece: bytes, count: int) -> None:
        self.piece, self.count, self.asked = piece, count, 0

    def __iter__(self) -> Iterator[bytes]:
        for _ in range(self.count):
            self.asked += 1
            yield self.piece


def test_of_a_bomb_of_lines_no_more_is_unframed_than_the_limit_and_one_message():
    pieces = Pieces(b"{}\n" * 100, 1_000_000)
    with pytest.raises(InvalidRequest, match=r"more than 1000 messages.*max_batch_messages"):
        _read(Job(), form(LINES), pieces)
    assert pieces.asked == 11  # the last one holds the message too many


def test_as_many_lines_as_may_be_are_all_read():
    assert _read(Job(), form(LINES), Pieces(b'{"text":"a"}\n', 1_000)) == [b"a"] * 1_000


@pytest.mark.parametrize("count", [1_001, 300_000])
@pytest.mark.parametrize("name", ["messages", "bodies"])
@pytest.mark.parametrize("media", [JSON, MSGPACK])
def test_a_batch_of_too_many_is_refused_in_every_form(media: str, name: str, count: int):
    each: Any = {} if name == "messages" else b""
    encode = msgspec.json.encode if media == JSON else msgspec.msgpack.encode
    content = encode({name: [each] * count})
    with pytest.raises(InvalidRequest, match=r"1000|100000|1,000,000"):
        _read(Job(), form(media), [content])


@pytest.mark.parametrize("media", [JSON, MSGPACK])
def test_a_large_batch_is_read_as_a_small_one_is(media: str):
    messages = [{"text": "x" * 100, "key": str(i), "headers": [{"name": "n", "value": "v"}]} for i in range(1_000)]
    encode = msgspec.json.encode if media == JSON else msgspec.msgpack.encode
    content = encode({"messages": messages})
    assert len(content) > SMALL_BYTES
    found = _read(Job(), form(media), [content])
    assert found == [each for one in messages for each in _read(Job(), form(media), [encode({"messages": [one]})])]
    broken = encode({"messages": [*messages[:-1], {"text": 7}]})
    with pytest.raises(InvalidRequest, match=r"Expected `str.*\$\.text.*Nothing was stored"):
        _read(Job(), form(media), [broken])


@pytest.mark.parametrize("media", [JSON, MSGPACK])
def test_one_message_of_too_many_values_is_refused_before_it_is_made(media: str):
    encode = msgspec.json.encode if media == JSON else msgspec.msgpack.encode
    content = encode({"messages": [{"json": [[]] * (MOST_VALUES + 1)}]})
    with pytest.raises(InvalidRequest, match=r"more than 1,000,000 values"):
        _read(Job(), form(media), [content])
    line = b'{"json":[' + b",".join([b"{}"] * (MOST_VALUES + 2)) + b"]}"
    with pytest.raises(InvalidRequest, match=r"more than 1,000,000 values"):
        _read(Job(), form(LINES), [line])


def test_what_stands_in_texts_is_not_counted():
    text = json.dumps({"a": ',[{"\\' * 200_000}).encode()
    check_values(text, JSON)
    check_batch(text, JSON)
    with pytest.raises(InvalidRequest):
        check_values(b'["' + b'","' * (MOST_VALUES + 1) + b'"]', JSON)


def test_a_document_of_a_mebibyte_is_not_too_many_values():
    check_values(b'{"value":[' + b",".join([b'{"a":1}'] * (MIB // 8)) + b"]}", JSON)


def test_commas_are_counted_up_to_the_limit_and_not_further():
    check_batch(b"," * MOST_BATCH_COMMAS, JSON)
    with pytest.raises(InvalidRequest):
        check_batch(b"," * (MOST_BATCH_COMMAS + 1), JSON)


def count_of(value: Any) -> int:
    """Values as MessagePack has them: lists and maps count three times, texts twice."""
    if isinstance(value, dict):
        return 3 + 2 * len(value) + sum(map(count_of, value.values()))
    if isinstance(value, list):
        return 3 + sum(map(count_of, value))
    return 2 if isinstance(value, str) else 1


@given(ANYTHING)
def test_a_count_of_messagepack_is_that_of_its_values(value: Any):
    assert sum(media._packed(msgspec.msgpack.encode(value))) == count_of(value)


def test_a_count_of_messagepack_knows_every_kind_of_value():
    kinds = [b"x" * 10, b"x" * 300, b"x" * 70_000, "y" * 10, "y" * 40, "y" * 300, "y" * 70_000, 1.5, -1, -200, 2**40]
    extensions = [msgspec.msgpack.Ext(5, bytes(size)) for size in (1, 2, 4, 8, 16, 3, 300, 70_000)]
    everything = [*kinds, *extensions, list(range(20)), list(range(70_000)), {str(i): i for i in range(20)}]
    content = msgspec.msgpack.encode(everything)
    assert sum(media._packed(content)) == 3 + len(kinds) + 4 + len(extensions) + 23 + 70_003 + 63


@given(ANYTHING, st.integers(1, 7))
def test_a_count_of_json_is_never_below_the_values_that_are_not_names(value: Any, size: int):
    content = msgspec.json.encode([value])
    before, media._SLICE = media._SLICE, size  # type: ignore[misc]  # every place is the edge of a slice
    try:
        counted = sum(media._written(content, media._VALUES, -(10**9)))
    finally:
        media._SLICE = before  # type: ignore[misc]
    assert counted >= leaves(value)


def leaves(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(leaves, value.values())) or 1
    return (sum(map(leaves, value)) or 1) if isinstance(value, list) else 1


@pytest.mark.parametrize("media", [LINES, FRAMES])
@given(st.lists(st.dictionaries(st.text(max_size=5), st.integers(0, 10**9), max_size=3)), st.integers(1, 40))
def test_a_stream_is_cut_apart_wherever_its_pieces_end(media: str, given_values: list[Any], size: int):
    content = b"".join(framed(each, media) for each in given_values)
    unframer = Unframer(media)
    found = [each for i in range(0, len(content), size) for each in unframer.feed(content[i : i + size])]
    decode: Any = msgspec.msgpack.decode if media == FRAMES else msgspec.json.decode
    assert [decode(each) for each in found] == given_values


def gzip(content: bytes) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return packer.compress(content) + packer.flush()


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_unpacking_stops_at_the_ratio(name: str):
    content = bytes(200 * MIB)
    packed = gzip(content) if name == "gzip" else zstandard.compress(content)
    unpacking = unpacker(name, 1 << 30, 100)
    assert unpacking is not None
    out = 0
    with pytest.raises(MessageTooLarge, match=r"100 times.*max_unpack_ratio"):
        for piece in unpacking.feed(packed):
            out += len(piece)
    assert out <= FREE_BYTES


def test_what_unpacks_to_little_may_be_packed_as_well_as_it_can_be():
    packed = zstandard.compress(bytes(FREE_BYTES))
    assert 1_000 * len(packed) < FREE_BYTES
    unpacking = unpacker("zstd", 1 << 30, 10)
    assert unpacking is not None
    assert sum(map(len, unpacking.feed(packed))) == FREE_BYTES
    unpacking.end()


def test_unpacking_stops_at_the_size_whatever_the_ratio_is():
    unpacking = unpacker("gzip", 10_000, 1_000_000)
    assert unpacking is not None
    with pytest.raises(MessageTooLarge, match="more than 10000 bytes"):
        list(unpacking.feed(gzip(bytes(10_001))))


def test_work_that_nobody_waits_for_any_more_ends_at_its_next_look():
    begun, looked = threading.Event(), threading.Event()
    ended: list[type[BaseException]] = []

    def work(job: Job) -> None:
        begun.set()
        assert looked.wait(30)
        try:
            job.check()
        except Unwanted:
            ended.append(Unwanted)

    async def story() -> None:
        pool = Pool()
        running = asyncio.ensure_future(pool.run(work))
        await asyncio.to_thread(begun.wait, 30)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        looked.set()
        await asyncio.to_thread(pool._threads.shutdown, wait=True)
        pool.close()

    asyncio.run(story())
    assert ended == [Unwanted]
