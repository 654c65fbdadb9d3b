"""Key compaction: the last message of each key stays, offsets never change, and everything else goes on."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import pytest

from holdfast.codec.columns import REMOVED, TOMBSTONE
from holdfast.codec.frame import MAY_HOLD_SHORT, Frame, Kind
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Closed, DamagedRange, DiskFull, InvalidRequest, Removed, Unavailable
from holdfast.model import NO_PRODUCER, Batch, Producer, Record
from holdfast.settings import LogSettings
from holdfast.storage.compaction import CompactionLimits, KeysCompacted, compact_keys
from holdfast.storage.log import Log
from holdfast.storage.reader import LogReader
from tests.unit.logs import FOLDER, SMALL, Logged, codes

DAY_MS = 24 * 3600 * 1000


class Keyed(Logged):
    """An open log of messages with keys; each segment is sealed by hand."""

    def __init__(self, settings: LogSettings = SMALL, disk: SimulatedDisk | None = None) -> None:
        super().__init__(disk)
        self.settings = settings
        self.log = self.open(settings)

    def put(self, *rows: tuple[str | None, str | None], codec: str | None = None, producer=NO_PRODUCER) -> int:
        """Messages of (key, value) as one batch; a value of None is a tombstone."""
        batch = Batch(
            values=[(value or "").encode() for _, value in rows],
            keys=[None if key is None else key.encode() for key, _ in rows],
            flags=[TOMBSTONE if value is None else 0 for _, value in rows],
        )
        return self.log.append(batch, codec=codec, producer=producer).offset

    def seal(self) -> None:
        self.log.roll()

    def compact(self, log: Log | None = None, **options) -> KeysCompacted:
        log = log or self.log
        return log.compact_keys(**{"before": log.end, "tombstone_ms": DAY_MS, "min_saving_percent": 0} | options)

    def reopen(self) -> None:
        self.log.close()
        self.log = self.open(self.settings)

    def there(self) -> dict[int, tuple[str | None, str]]:
        return {r.offset: (r.key.decode() if r.key is not None else None, r.value.decode()) for r in self.all()}

    def all(self) -> list[Record]:
        return list(self.log.records(self.log.start))

    def kinds(self) -> list[tuple[int, int, int]]:
        """Kind, first offset and count of each frame."""
        return [(f.header.kind, f.base_offset, f.count) for f in self.log.read(self.log.start)]


def two_segments() -> Keyed:
    keyed = Keyed()
    keyed.put(("a", "1"), (None, "x"), ("b", "1"), (None, "y"))
    keyed.put(("a", "2"))
    keyed.seal()
    keyed.put(("a", "3"), ("c", "1"))
    return keyed


def test_the_last_message_of_each_key_stays_where_it_is():
    keyed = two_segments()
    before = keyed.there()
    assert keyed.compact() == KeysCompacted(1, 2, keyed_freed(keyed))
    assert keyed.there() == {offset: before[offset] for offset in (1, 2, 3, 5, 6)}


def keyed_freed(keyed: Keyed) -> int:
    """What the first segment has lost of the bytes that were reserved for it."""
    return 4096 - len(keyed.disk.contents(keyed.path(keyed.segments()[0])))


def test_messages_without_a_key_all_stay():
    keyed = Keyed()
    for n in range(20):
        keyed.put((None, f"plain {n}"), ("", f"empty key {n}"))
    keyed.seal()
    keyed.put((None, "the last"))
    keyed.compact()
    plain = [value for key, value in keyed.there().values() if key is None]
    assert plain == [*(f"plain {n}" for n in range(20)), "the last"]
    assert [value for key, value in keyed.there().values() if key == ""] == ["empty key 19"]


def test_the_log_is_open_all_the_time_and_goes_on_with_the_next_offset():
    keyed = two_segments()
    end = keyed.log.end
    keyed.compact()
    assert (keyed.log.start, keyed.log.end) == (0, end)
    assert keyed.put(("a", "4")) == end
    keyed.seal()
    keyed.put(("z", "1"))
    keyed.compact()
    keyed.reopen()
    assert keyed.log.report.clean
    assert keyed.there()[end] == ("a", "4")
    assert sorted(keyed.there()) == [1, 2, 3, 6, 7, 8]
    assert keyed.put(("b", "9")) == 9


def test_a_tombstone_removes_what_was_before_it_and_goes_when_it_is_old_and_nothing_is_left():
    keyed = Keyed()
    keyed.put(("a", "1"), ("b", "1"))
    keyed.put(("a", None))
    keyed.seal()
    keyed.put(("c", "1"))
    keyed.compact()
    assert keyed.there() == {1: ("b", "1"), 2: ("a", ""), 3: ("c", "1")}
    keyed.clock.advance(ms=DAY_MS - 1)
    assert keyed.compact().segments == 0
    keyed.clock.advance(ms=1)
    assert keyed.compact().removed_messages == 1
    assert keyed.there() == {1: ("b", "1"), 3: ("c", "1")}


def test_an_old_tombstone_stays_while_anything_of_its_key_is_before_it():
    keyed = Keyed()
    keyed.put(("a", "1"))
    keyed.seal()
    keyed.put(("a", None))
    keyed.seal()
    keyed.put(("b", "1"))
    # One round takes what was before it; only the next finds that nothing is left.
    assert keyed.compact(tombstone_ms=0).removed_messages == 1
    assert sorted(keyed.there()) == [1, 2]
    assert keyed.compact(tombstone_ms=0).removed_messages == 1
    assert sorted(keyed.there()) == [2]


def test_a_tombstone_does_not_outlive_a_new_message_of_its_key():
    keyed = Keyed()
    keyed.put(("a", None), ("b", "1"))
    keyed.seal()
    keyed.put(("a", "new"))
    keyed.compact()
    assert keyed.there() == {1: ("b", "1"), 2: ("a", "new")}


def test_a_segment_waits_until_all_of_its_tombstones_may_go():
    keyed = Keyed()
    keyed.put(*[(f"k{n}", "x" * 50) for n in range(20)], ("a", None))
    keyed.clock.advance(ms=DAY_MS // 2)
    keyed.put(("b", None))
    keyed.seal()
    keyed.put(("z", ""))
    keyed.clock.advance(ms=DAY_MS // 2)
    assert keyed.compact(min_saving_percent=20).segments == 0
    keyed.clock.advance(ms=DAY_MS // 2)
    assert keyed.compact(min_saving_percent=20).removed_messages == 2


def test_a_tombstone_that_was_followed_counts_as_any_other_message():
    keyed = Keyed()
    keyed.put(*[(f"k{n}", "x" * 50) for n in range(20)], ("a", None))
    keyed.seal()
    keyed.put(("a", "new"))
    assert keyed.compact(tombstone_ms=0, min_saving_percent=20).segments == 0


def test_the_active_segment_is_never_touched():
    keyed = Keyed()
    keyed.put(("a", "1"))
    keyed.put(("a", "2"))
    assert keyed.compact() == KeysCompacted(0, 0, 0)
    assert sorted(keyed.there()) == [0, 1]


def test_only_whole_segments_below_the_floor_are_touched():
    keyed = Keyed()
    for n in range(4):
        keyed.put(("a", f"{n}"), (None, "-"))
        keyed.seal()
    keyed.put(("a", "last"))
    keyed.compact(before=5)
    assert sorted(keyed.there()) == [1, 3, 4, 5, 6, 7, 8]
    keyed.log.pin("group", 6)
    keyed.compact()
    assert sorted(keyed.there()) == [1, 3, 5, 6, 7, 8]
    keyed.log.unpin("group")
    keyed.compact()
    assert sorted(keyed.there()) == [1, 3, 5, 7, 8]


def test_a_segment_is_written_anew_only_where_it_pays():
    keyed = Keyed()
    keyed.put(("a", "x" * 100), *[(f"k{n}", "x" * 100) for n in range(9)])
    keyed.seal()
    keyed.put(("a", "2"))
    assert keyed.compact(min_saving_percent=20).segments == 0
    assert keyed.compact(min_saving_percent=9) == KeysCompacted(1, 1, keyed_freed(keyed))


def test_progress_is_told():
    keyed = Keyed()
    for n in range(3):
        keyed.put(("a", f"{n}"))
        keyed.seal()
    keyed.put(("a", "last"))
    steps: list[tuple[int, int]] = []
    keyed.compact(progress=lambda done, total: steps.append((done, total)))
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("wrong", [{"before": -1}, {"tombstone_ms": -1}, {"min_saving_percent": 101}])
def test_wrong_arguments_are_refused(wrong: dict[str, int]):
    with pytest.raises(InvalidRequest, match="cannot compact"):
        Keyed().compact(**wrong)


def test_short_runs_keep_their_rows_and_long_ones_become_a_hole():
    keyed = Keyed()
    keyed.put(("a", "0"), ("b", "0"), *[("c", f"{n}") for n in range(40)], ("d", "0"))
    keyed.seal()
    keyed.put(("a", "1"))
    keyed.compact()
    frames = list(keyed.log.read(0))
    assert [(f.header.kind, f.base_offset, f.count, list(f.offsets())) for f in frames] == [
        (Kind.DATA, 0, 2, [1]),
        (Kind.HOLE, 2, 39, []),
        (Kind.DATA, 41, 2, [41, 42]),
        (Kind.DATA, 43, 1, [43]),
    ]
    assert [f.is_sparse for f in frames] == [True, True, False, False]
    assert [f.values() for f in frames] == [[b"0"], [], [b"39", b"0"], [b"1"]]
    assert frames[0].header.columns & REMOVED


def test_holes_that_touch_become_one_and_later_rounds_go_on_from_there():
    keyed = Keyed()
    for n in range(12):
        keyed.put(("a" if n % 4 else f"k{n}", f"{n}"))
    keyed.seal()
    keyed.put(("a", "last"))
    keyed.compact()
    holes = [(first, count) for kind, first, count in keyed.kinds() if kind == Kind.HOLE]
    assert holes == [(1, 3), (5, 3), (9, 3)]
    keyed.put(("k4", "new"), ("k8", "new"))
    keyed.compact()
    assert [(first, count) for kind, first, count in keyed.kinds() if kind == Kind.HOLE] == [(1, 11)]
    assert keyed.there()[0] == ("k0", "0")


def test_frames_keep_their_epoch_and_their_producer():
    keyed = Keyed()
    one, two = Producer(7, 1, 2**32 - 3), Producer(8, 0, 5)
    keyed.put(*[("a", f"{n}") for n in range(40)], ("b", "0"), producer=one)
    keyed.put(("a", "40"), producer=one.after(41))
    keyed.put(("a", "41"), producer=two)
    keyed.put(("a", "42"))
    keyed.kill()
    keyed.log = keyed.open()  # another epoch
    keyed.put(("a", "43"))
    keyed.put(("a", "44"))
    keyed.seal()
    keyed.put(("a", "last"))
    before = written_by(keyed)
    assert keyed.compact().removed_messages == 45
    assert [count for kind, _, count in keyed.kinds() if kind == Kind.HOLE] == [40, 1, 1, 1, 2]
    assert written_by(keyed) == before


def written_by(keyed: Keyed) -> dict[int, tuple[int, int, int, int]]:
    """For each offset, also of removed messages: epoch, producer, its epoch and sequence."""
    found = {}
    for header in (frame.header for frame in keyed.log.read(0)):
        producer = Producer(header.producer_id, header.producer_epoch, header.first_sequence)
        for row in range(header.count):
            sequence = producer.after(row).first_sequence
            found[header.base_offset + row] = (header.epoch, header.producer_id, header.producer_epoch, sequence)
    return found


def test_every_column_of_what_stays_is_as_it_was():
    keyed = Keyed()
    keyed.log.append(
        Batch(
            values=[b"0", b"1", b"2", b""],
            times_ns=[5, 900, 7, -3],
            keys=[b"a", b"a", None, b"c"],
            headers=[[("h", b"0")], [("h", b"1"), ("h", b"2")], [], [("", b"")]],
            priorities=[1, 2, 3, 255],
            expires_at_ms=[1, 2, 0, 4],
            due_at_ms=[9, 8, 7, 0],
            flags=[0, 254, 255, 128],
        )
    )
    keyed.log.append(Batch(values=[b"control"], keys=[b"a"]), kind=Kind.CONTROL)
    keyed.seal()
    keyed.put(("z", "1"))
    before = keyed.all()
    keyed.compact()
    assert keyed.all() == [record for record in before if record.offset != 0]
    assert before[1].flags == 254
    columns = next(keyed.log.read(0)).columns()
    assert (columns.priorities()[0], columns.expires_at_ms()[0], columns.keys()[0]) == (0, 0, None)


@pytest.mark.parametrize("codec", ["zstd", "lz4", "gzip"])
def test_packed_frames_stay_packed(codec: str):
    keyed = Keyed(SMALL_PACKED)
    keyed.put(*[(f"k{n % 5}", "text " * n) for n in range(15)], codec=codec)
    keyed.seal()
    keyed.put(("k0", "last"))
    before = keyed.there()
    assert next(keyed.log.read(0)).header.codec
    keyed.compact()
    assert keyed.there() == {offset: row for offset, row in before.items() if offset >= 11}
    assert next(keyed.log.read(0)).header.codec


SMALL_PACKED = LogSettings(segment_bytes=4096, index_bytes=512, codec_min_bytes=64, min_free_bytes=0)


def test_a_follower_passes_over_what_was_removed_and_says_so_when_asked():
    keyed = Keyed(LogSettings(min_free_bytes=0))
    keyed.put(("a", "0"), ("a", "1"), ("b", "0"))
    for n in range(2, 40):
        keyed.put(("a", f"{n}"))
    keyed.seal()
    keyed.put(("a", "last"))
    keyed.compact()
    follower = keyed.log.follower()
    assert [r.offset for r in follower.records(0, keyed.log.end)] == [2, 41]
    assert [r.offset for r in follower.records(0, 2)] == []
    assert [r.offset for r in follower.records(1, 3)] == [2]
    assert follower.record(2).key == b"b"
    for offset, next_offset in ((0, 2), (1, 2), (3, 41), (20, 41)):
        with pytest.raises(Removed, match="skip it") as removed:
            follower.record(offset)
        assert (removed.value.offset, removed.value.next_offset) == (offset, next_offset)
        assert follower.frame(offset).base_offset <= offset
    assert follower.record(41).value == b"last"


def test_a_follower_that_was_there_before_goes_on():
    keyed = Keyed()
    for n in range(6):
        keyed.put((f"{n % 2}", f"{n}"))
    keyed.seal()
    keyed.put(("0", "6"), ("1", "7"))
    follower = keyed.log.follower()
    assert follower.record(0).value == b"0"
    keyed.compact()
    # It has the old file, and goes on with it to its end.
    assert [r.value for r in follower.records(1, 8)] == [b"%d" % n for n in range(1, 8)]
    assert [r.value for r in keyed.log.follower().records(0, 8)] == [b"6", b"7"]


def test_no_time_finds_a_removed_message():
    keyed = Keyed()
    times = []
    for n in range(6):
        keyed.clock.advance(seconds=1)
        times.append(keyed.clock.now_ns())
        keyed.put(("a", f"{n}"), ("b" if n == 2 else "a", f"{n}"))
    keyed.seal()
    keyed.clock.advance(seconds=1)
    keyed.put(("a", "last"))
    assert keyed.log.find_time(times[1]) == 2
    keyed.compact()
    assert [keyed.log.find_time(time) for time in times] == [5, 5, 5, 12, 12, 12]
    assert LogReader(FOLDER, SMALL, keyed.world).find_time(times[3]) == 12


def test_times_of_single_messages_are_looked_at_where_there_are_any():
    keyed = Keyed()
    keyed.log.append(Batch(values=[b""] * 3, keys=[b"a", b"b", b"a"], times_ns=[10, 20, 5]))
    keyed.seal()
    keyed.log.append(Batch(values=[b""], keys=[b"b"], times_ns=[1]))
    keyed.compact()
    assert keyed.log.find_time(5) == 2
    assert keyed.log.find_time(6) == 4


def test_a_reader_that_has_the_old_file_goes_on_and_a_new_one_sees_the_new_file():
    keyed = two_segments()
    reader = LogReader(FOLDER, SMALL, keyed.world)
    frames = reader.read(0)
    first = next(frames)
    keyed.compact()
    assert [r.offset for r in first.records()] == [0, 1, 2, 3]
    assert [r.offset for f in frames for r in f.records()] == [4, 5, 6]
    assert [r.offset for r in LogReader(FOLDER, SMALL, keyed.world).records(0)] == [1, 2, 3, 5, 6]
    reader.refresh()
    assert [r.offset for r in reader.records(0)] == [1, 2, 3, 5, 6]


def test_an_index_of_the_old_file_is_never_used_with_the_new_one():
    keyed = Keyed()
    for n in range(80):
        keyed.put((f"{n % 50}", f"{n}" * 10))
        keyed.clock.advance(seconds=1)
    bases = [segment.base_offset for segment in keyed.log.segments()]
    assert len(bases) > 2
    reader = LogReader(FOLDER, SMALL, keyed.world)
    assert len(reader.segments()) == len(bases)  # has loaded the indexes
    stale = {base: keyed.disk.contents(keyed.path(f"{base:020d}.idx")) for base in bases[:-1]}
    for segment in reader._segments:
        segment._file = None  # as if it had been let go of for another one
        segment._proven = None
    keyed.compact()
    wanted = {record.offset for record in keyed.all()}
    assert len(wanted) < 80
    assert {r.offset for r in reader.records(0)} == wanted
    for base, content in stale.items():
        keyed.write(f"{base:020d}.idx", 0, content)
    for start in range(keyed.log.end):
        fresh = LogReader(FOLDER, SMALL, keyed.world)
        assert {r.offset for r in fresh.records(start)} == {offset for offset in wanted if offset >= start}


def test_a_reader_finds_by_time_though_its_index_is_of_the_old_file():
    keyed = Keyed()
    for n in range(40):
        keyed.put((f"{n % 30}", f"{n}" * 10))
        keyed.clock.advance(seconds=1)
    reader = LogReader(FOLDER, SMALL, keyed.world)
    reader.segments()
    for segment in reader._segments:
        segment._file = None
        segment._proven = None
    keyed.compact()
    for record in keyed.all():
        assert reader.find_time(record.timestamp_ns) == record.offset


def test_check_finds_nothing_wrong_and_counts_what_is_there():
    keyed = Keyed()
    for n in range(60):
        keyed.put((f"{n % 7}", f"{n}" * 9), (None, f"{n}"))
    keyed.compact()
    report = keyed.check(owned=True)
    assert (codes(report), report.ok) == ([], True)
    messages = len(keyed.all())
    assert (report.counts.messages, report.counts.removed) == (messages, 120 - messages)
    keyed.log.close()
    assert codes(keyed.check()) == []
    assert keyed.plan().steps == ()


def test_a_compacted_segment_can_be_damaged_and_repaired():
    keyed = Keyed()
    for n in range(30):
        keyed.put(("a" if n % 3 else f"k{n}", f"{n}"))
    keyed.seal()
    keyed.put(("a", "last"))
    keyed.compact()
    name = keyed.segments()[0]
    frames = keyed.frames(name)
    before = keyed.there()
    keyed.log.close()
    for header in (frames[0], frames[3]):  # a data frame, and a hole
        keyed.flip(name, header.position + 50)
    assert not keyed.check().ok
    assert keyed.repair().after.ok
    keyed.log = keyed.open()
    with pytest.raises(DamagedRange):
        list(keyed.log.records(0))
    there = {r.offset: r.value.decode() for r in keyed.log.records(0, on_damage="skip")}
    assert there == {offset: value for offset, (_, value) in before.items() if offset != 0}
    keyed.put(("k3", "new"))
    keyed.compact()
    assert 3 not in {r.offset for r in keyed.log.records(0, on_damage="skip")}
    assert keyed.check(owned=True).lost_messages == 3


def test_a_damaged_segment_is_left_alone_and_tombstones_behind_it_stay():
    keyed = Keyed()
    keyed.put(("a", "1"))
    keyed.put(("b", "1"))
    keyed.seal()
    keyed.put(("b", None), ("c", "1"), ("c", "2"))
    keyed.seal()
    keyed.put(("d", "1"))
    first = keyed.segments()[0]
    header = keyed.frames(first)[1]
    keyed.flip(first, header.end - 9)
    content = keyed.disk.contents(keyed.path(first))
    keyed.reopen()
    assert keyed.compact(tombstone_ms=0) == KeysCompacted(1, 1, 4096 - len(keyed.contents()[keyed.segments()[1]]))
    assert keyed.disk.contents(keyed.path(first)) == content
    assert [r.offset for r in keyed.log.records(2)] == [2, 4, 5]


def test_trimming_retention_and_truncating_work_on_a_compacted_log():
    keyed = Keyed()
    for n in range(6):
        keyed.put(*[(f"k{k}", f"{n}") for k in range(3)], (f"only {n}", "x"))
        keyed.seal()
    keyed.put(("k0", "last"))
    keyed.compact()
    assert [r.offset for r in keyed.all()] == [3, 7, 11, 15, 19, 21, 22, 23, 24]
    assert keyed.log.trim(9).start == 8
    assert [r.offset for r in keyed.all()] == [11, 15, 19, 21, 22, 23, 24]
    keyed.log.truncate(20)
    assert keyed.put(("k0", "again")) == 20
    keyed.seal()
    keyed.put(("k1", "again"))
    keyed.compact()
    keyed.reopen()
    assert [r.offset for r in keyed.all()] == [11, 15, 19, 20, 21]
    keyed.log.truncate(12)  # a compacted segment becomes the active one
    assert keyed.put(("k2", "again")) == 12
    keyed.reopen()
    assert keyed.log.report.clean
    assert [r.offset for r in keyed.all()] == [11, 12]
    assert keyed.check(owned=True).ok


def test_segments_that_are_trimmed_meanwhile_are_passed_over():
    keyed = Keyed()
    for n in range(4):
        keyed.put(("a", f"{n}"), (None, f"{n}"))
        keyed.seal()
    keyed.put(("a", "last"))
    assert keyed.compact(progress=lambda done, total: keyed.log.trim(4)).segments == 2
    assert sorted(keyed.there()) == [5, 7, 8]


def test_segments_that_are_trimmed_while_their_new_file_is_written_are_passed_over():
    keyed = two_segments()

    def trim(call: str) -> None:
        if call == "sync" and any(name.endswith(".tmp") for name in keyed.disk.names(FOLDER)):
            keyed.disk.on_call = None
            keyed.log.trim(5)

    keyed.log.sync()
    keyed.disk.on_call = trim
    assert keyed.compact() == KeysCompacted(0, 0, 0)
    assert keyed.segments() == ["00000000000000000005.log"]
    assert sorted(keyed.there()) == [5, 6]
    keyed.reopen()
    assert sorted(keyed.there()) == [5, 6]


@pytest.mark.parametrize("offset", [1, 2])
def test_nothing_is_put_in_place_once_the_tail_was_truncated(offset: int):
    keyed = Keyed()
    keyed.put(("a", "1"))
    keyed.seal()
    keyed.put(("b", "1"))
    keyed.seal()
    keyed.put(("a", "2"))

    def truncate(done: int, total: int) -> None:
        if keyed.log.end > offset:
            keyed.log.truncate(offset)

    assert keyed.compact(progress=truncate) == KeysCompacted(0, 0, 0)
    assert keyed.there()[0] == ("a", "1")
    assert not [name for name in keyed.disk.names(FOLDER) if name.endswith(".tmp")]


def test_closing_ends_a_compaction_and_leaves_nothing_behind():
    keyed = two_segments()
    with pytest.raises(Closed):
        keyed.compact(progress=lambda done, total: keyed.log.close())
    assert not [name for name in keyed.disk.names(FOLDER) if name.endswith(".tmp")]
    keyed.log = keyed.open()
    assert len(keyed.there()) == 7
    keyed.log.close()
    with pytest.raises(Closed):
        keyed.compact()


def test_what_a_crash_left_of_a_compaction_is_removed_by_opening():
    keyed = two_segments()
    keyed.log.close()
    keyed.write("00000000000000000000.keys.tmp", 0, b"half a segment")
    assert codes(keyed.check()) == ["leftover_file"]
    keyed.log = keyed.open()
    assert "00000000000000000000.keys.tmp" not in keyed.disk.names(FOLDER)
    assert len(keyed.there()) == 7


def test_without_room_for_the_new_file_nothing_is_changed():
    keyed = Keyed(disk=SimulatedDisk(capacity_bytes=30_000))
    for n in range(10):
        keyed.put(("a", f"{n}" * 300))
    before = keyed.there()
    filler = keyed.disk.open(keyed.path("filler"), write=True, create=True)
    filler.write(0, [bytes(keyed.disk.room_bytes() - 100)])
    with pytest.raises(DiskFull, match=r"stays as it was|Nothing was changed"):
        keyed.compact()
    assert keyed.there() == before
    keyed.disk.remove(keyed.path("filler"))
    assert keyed.compact().segments
    assert keyed.there()[9] == before[9]


def test_a_disk_that_cannot_write_the_new_file_costs_nothing():
    keyed = two_segments()
    before = keyed.there()
    keyed.disk.faults.fail(1, errno.EIO, sticky=False, calls=frozenset({"rename"}))
    with pytest.raises(Unavailable, match="stays as it was"):
        keyed.compact()
    assert keyed.there() == before
    assert not [name for name in keyed.disk.names(FOLDER) if name.endswith(".tmp")]
    assert keyed.compact().segments == 1


def test_more_keys_than_may_be_held_at_once_are_taken_in_parts():
    def compacted(most_keys: int) -> list[Record]:
        keyed = Keyed()
        for n in range(50):
            keyed.put((f"{n % 23}", f"{n}"), (f"a long key of many bytes {n % 11}", None if n % 5 else f"{n}"))
        keyed.log.sync()
        limits = CompactionLimits(keyed.log.end, 0, 0, most_keys=most_keys)
        compact_keys(keyed.world, keyed.log._writer, FOLDER, SMALL, limits)
        return keyed.all()

    assert compacted(3) == compacted(1000)
    assert len(compacted(3)) < 60


def test_messages_with_the_header_apart_stay_and_take_no_place():
    keyed = Keyed()
    for header in ((), (("apart", b""),), ()):
        keyed.log.append(Batch(values=[b""], keys=[b"a"], headers=[header]))
    keyed.log.append(Batch(values=[b""], keys=[b"b"]))
    keyed.log.append(Batch(values=[b""], keys=[b"b"], headers=[[("apart", b"")]]))
    keyed.seal()
    keyed.put(("z", ""))
    keyed.compact(apart_header="apart")
    assert sorted(keyed.there()) == [1, 2, 3, 4, 5]


def test_an_older_release_refuses_a_compacted_segment_at_its_first_frame():
    keyed = two_segments()
    keyed.compact()
    keyed.put(("b", "2"))
    keyed.compact()
    header = keyed.frames(keyed.segments()[0])[0]
    assert header.flags == MAY_HOLD_SHORT + 2  # it was rewritten twice; the first releases know no flag


def test_frames_with_removed_messages_can_be_had_as_arrow():
    pytest.importorskip("pyarrow")
    from holdfast.codec.arrow import values_to_arrow

    keyed = Keyed()
    keyed.put(("a", "0"), ("b", "0"), ("a", "1"))
    keyed.put(("b", "1"))
    keyed.seal()
    keyed.put(("b", "2"))
    keyed.compact()
    frames: Sequence[Frame] = list(keyed.log.read(0))
    assert [values_to_arrow(frame).to_pylist() for frame in frames] == [[b"1"], [], [b"2"]]
    assert [list(frame.offsets()) for frame in frames] == [[2], [], [4]]


def test_a_log_without_messages_has_nothing_to_compact():
    keyed = Keyed()
    assert keyed.compact() == KeysCompacted(0, 0, 0)
    keyed.put((None, "1"))
    keyed.seal()
    assert keyed.compact() == KeysCompacted(0, 0, 0)
