"""Which messages key compaction may remove: found by one pass over the keys of a log, in bounded memory.

A key is held as it is, or as a digest of 16 bytes where it is longer, with the offset of its last message: about
150 bytes for each. Where there are more keys than may be held, the pass is made several times, each for a part of
the keys. What was found is kept as bitmaps of offsets, a few bytes for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Final

from pyroaring import BitMap64

from holdfast.codec.columns import HEADERS, KEYS, TOMBSTONE, Columns
from holdfast.codec.compression import MOST_RAW_BYTES
from holdfast.codec.frame import HEADER_BYTES, Frame, FrameHeader, Kind
from holdfast.errors import CorruptData, MessageTooLarge, UnknownFormat
from holdfast.storage.epochs import Epochs
from holdfast.storage.segment import Segment
from holdfast.storage.walk import Wanted, walk

MOST_KEYS: Final = 500_000
_DIGEST_BYTES: Final = 16


class Source:
    """One segment as far as an offset: what a pass looks at."""

    def __init__(self, segment: Segment, upto: int, epochs: Epochs, go_on: Callable[[], None]) -> None:
        self.segment = segment
        self.upto = upto
        self._epochs = epochs
        self._go_on = go_on  # raises where nobody wants it any more

    def frames(self) -> Iterator[tuple[Frame, memoryview] | None]:
        """Its frames, each with its stored bytes behind the header; None where something is not as it was written."""
        segment = self.segment
        try:
            _, data, _ = segment.opened(self.upto)
        except FileNotFoundError:  # trimmed away meanwhile, or taken: readers will be told
            yield None
            return
        for found in self.frames_in(data):
            self._go_on()
            yield found

    def frames_in(self, data: memoryview) -> Iterator[tuple[Frame, memoryview] | None]:
        """The same from bytes that are to be the segment's."""
        reached = self.segment.base_offset
        for found in walk(data, Wanted(self.segment.log_id, reached, epochs=self._epochs)):
            if not isinstance(found, FrameHeader):
                if found.first_offset < self.upto:
                    yield None
                continue
            if found.base_offset >= self.upto:
                break
            reached = found.next_offset
            start = found.position + HEADER_BYTES
            body = data[start : start + found.body_bytes]
            yield Frame(found, body, max_raw_bytes=MOST_RAW_BYTES), data[start : found.end]
        if reached < self.upto:
            yield None


class KeyFacts:
    """What a pass found."""

    def __init__(self) -> None:
        self.superseded = BitMap64()  # a later message has the same key
        self.alone = BitMap64()  # tombstones with no other message of their key before or behind them
        self.young = BitMap64()  # those of them that are not old enough to go
        self.damaged: set[int] = set()  # bases of segments of which not all could be read

    def removable(self) -> BitMap64:
        return self.superseded | (self.alone - self.young)


class _TooManyKeys(Exception):
    """More keys than may be held at once."""


def look_at_keys(
    sources: Sequence[Source], *, old_ns: int, apart_header: str | None = None, most_keys: int = MOST_KEYS
) -> KeyFacts:
    """Go over the log, oldest first. A tombstone of `old_ns` or before is old enough to go.

    Messages with the header `apart_header` stay and take no other's place, as if they had no key.
    """
    parts = 1
    while True:
        facts = KeyFacts()
        try:
            for part in range(parts):
                _Pass(facts, parts, part, old_ns, apart_header, most_keys).run(sources)
        except _TooManyKeys:
            parts *= 2
        else:
            return facts


class _Pass:
    """One pass, for one part of the keys."""

    def __init__(
        self, facts: KeyFacts, parts: int, part: int, old_ns: int, apart_header: str | None, most_keys: int
    ) -> None:
        self._facts = facts
        self._parts = parts
        self._part = part
        self._old_ns = old_ns
        self._apart_header = apart_header
        self._most_keys = most_keys
        self._last: dict[bytes, int] = {}
        self._blind = False  # messages came by whose keys are not known

    def run(self, sources: Sequence[Source]) -> None:
        for source in sources:
            for found in source.frames():
                if found is None or not self._look_at(found[0]):
                    self._facts.damaged.add(source.segment.base_offset)
                    self._blind = True
                if len(self._last) > self._most_keys:
                    raise _TooManyKeys

    def _look_at(self, frame: Frame) -> bool:
        """Note the frame's keys; False where they cannot be read."""
        header = frame.header
        if header.kind != Kind.DATA or not header.columns & KEYS:
            return True
        try:
            columns = frame.columns()
            keys, flags = columns.keys() or [], columns.flags()
            if self._apart_header is not None and header.columns & HEADERS:
                _forget_apart(keys, columns, self._apart_header)
        except UnknownFormat:
            raise
        except (CorruptData, MessageTooLarge):
            return False
        superseded, alone = self._note(header.base_offset, keys, flags)
        facts = self._facts
        facts.superseded.update(superseded)
        if alone and not self._blind:
            times_ns = columns.times_ns() or [header.max_time_ns] * header.count
            facts.alone.update(alone)
            facts.young.update([at for at in alone if times_ns[at - header.base_offset] > self._old_ns])
        if facts.alone:
            facts.alone.difference_update(BitMap64(superseded))
        return True

    def _note(
        self, offset: int, keys: Sequence[bytes | None], flags: Sequence[int] | None
    ) -> tuple[list[int], list[int]]:
        """Which offsets have a later message of their key now, and which are tombstones of a key not seen before."""
        last, parts = self._last, self._parts
        superseded, alone = [], []
        for at, key in enumerate(keys, offset):
            if key is None:
                continue
            name = key if len(key) < _DIGEST_BYTES else blake2b(key, digest_size=_DIGEST_BYTES).digest()
            if parts > 1 and hash(name) % parts != self._part:
                continue
            if name in last:
                superseded.append(last[name])
            elif flags is not None and flags[at - offset] & TOMBSTONE:
                alone.append(at)
            last[name] = at
        return superseded, alone


def _forget_apart(keys: list[bytes | None], columns: Columns, name: str) -> None:
    """Take the keys of messages with this header for none."""
    span = columns.span(HEADERS)
    if span is None or name.encode() not in bytes(span):
        return
    for i, pairs in enumerate(columns.headers() or ()):
        if any(header == name for header, _ in pairs):
            keys[i] = None
