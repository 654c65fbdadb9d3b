"""Any log of messages with and without keys, compacted at any moments: what holds of each key is what was put last."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.codec.columns import TOMBSTONE
from holdfast.codec.frame import Frame
from holdfast.model import Batch, Record
from holdfast.storage.reader import LogReader
from tests.unit.logs import FOLDER, SMALL
from tests.unit.test_compaction import Keyed

KEYS = st.sampled_from([None, None, b"", b"a", b"b", b"c", b"a key that is longer than a digest"])
ROWS = st.lists(st.tuples(KEYS, st.one_of(st.none(), st.integers(0, 60))), min_size=1, max_size=50)
CODECS = st.sampled_from([None, None, "zstd", "lz4"])
STEPS = st.one_of(
    st.tuples(st.just("put"), ROWS, CODECS, st.booleans()),
    st.tuples(st.just("put"), ROWS, CODECS, st.booleans()),
    st.tuples(st.just("roll")),
    st.tuples(st.just("compact"), st.floats(0, 1.2), st.sampled_from([0, 5, 10**9]), st.sampled_from([0, 20, 60])),
    st.tuples(st.just("wait"), st.integers(1, 10)),
    st.tuples(st.just("look")),
    st.tuples(st.sampled_from(["reopen", "kill"])),
)


class Model:
    """A log, everything that was ever put into it, and readers that began at some moment."""

    def __init__(self) -> None:
        self.keyed = Keyed()
        self.put_all: list[Record] = []
        self.readers: list[tuple[Any, int]] = []

    def put(self, rows: list[tuple[bytes | None, int | None]], codec: str | None, timed: bool) -> None:
        now_ns = self.keyed.clock.now_ns()
        batch = Batch(
            values=[b"" if size is None else bytes([65 + size]) * size for _, size in rows],
            keys=[key for key, _ in rows],
            flags=[TOMBSTONE if size is None and key is not None else 0 for key, size in rows],
            times_ns=[now_ns - 1000 * (i % 3) for i in range(len(rows))] if timed else None,
        )
        first = self.keyed.log.append(batch, codec=codec).offset
        epoch = self.keyed.log.epoch
        for i, value in enumerate(batch.values):
            time_ns = batch.times_ns[i] if batch.times_ns else now_ns
            self.put_all.append(Record(first + i, time_ns, value, batch.keys[i], flags=batch.flags[i], epoch=epoch))

    def roll(self) -> None:
        self.keyed.seal()

    def compact(self, part: float, tombstone_ms: int, percent: int) -> None:
        log = self.keyed.log
        before = int(log.end * part)
        floor = max((s.next_offset for s in log.segments()[:-1] if s.next_offset <= before), default=0)
        above = [r for r in log.records(log.start) if r.offset >= floor]
        done = log.compact_keys(before=before, tombstone_ms=tombstone_ms, min_saving_percent=percent)
        assert [r for r in log.records(log.start) if r.offset >= floor] == above
        assert done.removed_messages >= done.segments

    def wait(self, ms: int) -> None:
        self.keyed.clock.advance(ms=ms)

    def look(self) -> None:
        frames = LogReader(FOLDER, SMALL, self.keyed.world).read(0)
        first: Frame | None = next(frames, None)
        if first is not None:
            self.readers.append((frames, first.next_offset))
            self.check_frame(first)

    def reopen(self) -> None:
        self.keyed.reopen()

    def kill(self) -> None:
        self.keyed.log.sync()
        self.keyed.kill()
        self.keyed.log = self.keyed.open()
        assert not self.keyed.log.report.damage

    def check(self) -> None:
        log = self.keyed.log
        assert log.end == len(self.put_all)
        there = list(log.records(0))
        assert all(record == self.put_all[record.offset] for record in there)
        assert held(there) == held(self.put_all)
        kept = {record.offset for record in there}
        assert [r for r in self.put_all if r.key is None and r.offset not in kept] == []
        assert {r.offset for r in log.follower().records(0, log.end)} == kept
        report = self.keyed.check(owned=True)
        assert report.ok, report.findings
        assert (report.counts.messages, report.counts.removed) == (len(kept), log.end - len(kept))

    def check_frame(self, frame: Frame) -> None:
        assert [self.put_all[record.offset] for record in frame.records()] == list(frame.records())

    def check_readers(self) -> None:
        """Whoever began to read goes on without a gap, whatever has become of the files."""
        for frames, offset in self.readers:
            end = offset
            for frame in frames:
                self.check_frame(frame)
                assert frame.base_offset <= end < frame.next_offset
                end = frame.next_offset
            assert end <= len(self.put_all)


def held(records: list[Record]) -> dict[bytes, bytes]:
    """What a reader of all these messages knows of each key in the end."""
    state: dict[bytes, bytes] = {}
    for record in records:
        if record.key is not None and record.flags & TOMBSTONE:
            state.pop(record.key, None)
        elif record.key is not None:
            state[record.key] = record.value
    return state


@given(st.lists(STEPS, max_size=25))
def test_what_holds_of_each_key_is_what_was_put_last(steps: list[tuple[Any, ...]]):
    model = Model()
    for name, *arguments in steps:
        getattr(model, name)(*arguments)
        if name in ("compact", "reopen", "kill"):
            model.check()
    model.check_readers()
    model.reopen()
    model.check()


@settings(max_examples=max(settings.default.max_examples // 5, 5))
@given(ROWS, st.integers(1, 6))
def test_holding_few_keys_at_a_time_finds_the_same(rows: list[tuple[bytes | None, int | None]], most_keys: int):
    from holdfast.storage.compaction import CompactionLimits, compact_keys

    found = []
    for most in (most_keys, 1000):
        model = Model()
        model.put(rows, None, timed=False)
        model.roll()
        model.put(rows[:3], None, timed=False)
        limits = CompactionLimits(10**9, 0, 0, most_keys=most)
        compact_keys(model.keyed.world, model.keyed.log._writer, FOLDER, SMALL, limits)
        model.check()
        found.append(list(model.keyed.log.records(0)))
    assert found[0] == found[1]
