"""What a check finds, what it calls it, and that it disturbs nobody."""

from __future__ import annotations

import errno
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from crc32c import crc32c

from holdfast.codec.columns import encode_columns, padding
from holdfast.codec.encode import Body
from holdfast.codec.frame import FrameHeader
from holdfast.env import World, real_world
from holdfast.env.disk import File
from holdfast.errors import NotALog, UnknownFormat
from holdfast.model import NO_PRODUCER, Batch
from holdfast.settings import LogSettings
from holdfast.storage.checks.check import check
from holdfast.storage.frames import parse_index
from holdfast.storage.log import Log
from tests.unit.logs import FOLDER, HEADER, SMALL, Logged, codes, filler, only

FIRST = f"{0:020d}.log"


@pytest.fixture
def logged() -> Logged:
    logged = Logged()
    logged.fill()
    assert len(logged.segments()) >= 3
    return logged


def second(logged: Logged) -> str:
    return logged.segments()[1]


def last(logged: Logged) -> str:
    return logged.segments()[-1]


def test_a_whole_log_is_ok_and_everything_in_it_is_counted(logged):
    report = logged.check()
    assert report.ok
    assert report.findings == ()
    assert (report.start, report.end) == (0, 200)
    assert report.counts.messages == 200
    assert report.counts.frames == 40
    assert report.counts.segments == len(logged.segments())
    assert report.counts.bytes == sum(len(logged.disk.contents(logged.path(n))) for n in logged.segments())
    assert report.log_id == logged.log_id


def test_a_folder_without_a_log_is_refused():
    logged = Logged()
    with pytest.raises(NotALog, match="there is no folder"):
        logged.check()
    logged.disk.make_folder(FOLDER)
    with pytest.raises(NotALog, match="holds no log"):
        logged.check()


def test_an_empty_log_is_ok():
    logged = Logged()
    logged.open().close()
    assert logged.check().ok
    assert logged.check().counts.messages == 0


@pytest.mark.parametrize("at", [0, 12, 32, 84, HEADER, HEADER + 30])
@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_flipped_byte_costs_one_frame_and_is_named_with_its_place_and_its_offsets(logged, which, at):
    name = logged.segments()[which]
    frame = logged.frames(name)[2]
    logged.flip(name, frame.position + at)
    report = logged.check()
    finding = only(report, "damage")
    assert not report.ok
    assert finding.code == "damaged_frames"
    assert (finding.file, finding.position) == (name, frame.position)
    assert (finding.first_offset, finding.next_offset) == (frame.base_offset, frame.next_offset)
    assert (finding.messages, finding.bytes) == (5, frame.end - frame.position)
    assert "5 messages lost" in finding.cost
    assert "holdfast repair /data/log" in finding.next_step
    assert report.counts.messages == 195
    assert report.lost_messages == 5


def test_neighbouring_damaged_frames_are_one_finding(logged):
    for frame in logged.frames(FIRST)[3:6]:
        logged.flip(FIRST, frame.position)
    finding = only(logged.check(), "damage")
    assert (finding.first_offset, finding.next_offset) == (15, 30)


@pytest.mark.parametrize("byte", range(4))
def test_a_spoiled_length_at_the_very_end_is_never_taken_for_a_torn_tail(logged, byte):
    frame = logged.frames(last(logged))[-1]
    logged.flip(last(logged), frame.position + 12 + byte)
    finding = only(logged.check(), "damage")
    assert "torn_tail" not in codes(logged.check())
    assert (finding.first_offset, finding.next_offset) == (frame.base_offset, 200)


@pytest.mark.parametrize("restarted", [False, True])
def test_the_loss_of_a_synced_end_is_damage_also_when_the_log_was_left_open(restarted):
    logged = Logged()
    logged.fill(10, close=False)
    (logged.restart if restarted else logged.kill)()
    logged.flip(last(logged), logged.frames(last(logged))[-1].position + 20)
    finding = only(logged.check(), "damage")
    assert finding.code == "lost_tail"
    assert (finding.first_offset, finding.next_offset) == (45, 50)
    assert codes(logged.check()) == ["lost_tail"]


def half_written(logged: Logged) -> int:
    """Kill the owner while it writes a frame; answers where that frame begins."""
    log = logged.fill(10, close=False)
    end = logged.frames(last(logged))[-1].end
    logged.append(log, [b"never finished"], durability="os")
    logged.kill()
    frame = logged.frames(last(logged))[-1]
    assert frame.position == end
    logged.zero(last(logged), frame.position + HEADER, frame.end)
    # The state of the moment before.
    logged.write("state", 8, (50).to_bytes(8, "little"))
    return end


@pytest.mark.parametrize("restarted", [False, True])
def test_a_torn_tail_is_not_damage_and_needs_nothing_to_be_done(restarted):
    logged = Logged()
    end = half_written(logged)
    if restarted:
        logged.restart()
    report = logged.check()
    finding = only(report, "torn")
    assert report.ok
    assert finding.code == "torn_tail"
    assert (finding.file, finding.position, finding.first_offset) == (last(logged), end, 50)
    assert finding.bytes > 0
    assert finding.next_step.startswith("nothing to do: opening")
    assert finding.cost in ("no acknowledged message is lost", "no synced message is lost")
    assert report.counts.messages == 50


def test_half_a_batch_at_the_end_is_torn():
    logged = Logged()
    log = logged.fill(2, close=False)
    log.append([b"x" * 400] * 6, durability="os")  # several frames
    frames = logged.frames(FIRST)
    assert frames[-2].batch_remaining == 1
    logged.kill()
    logged.zero(FIRST, frames[-1].position, frames[-1].end)
    logged.write("state", 8, (10).to_bytes(8, "little"))
    report = logged.check()
    assert report.ok
    assert only(report, "torn").first_offset == 10
    assert report.counts.messages == 10


def test_what_is_written_but_not_published_is_a_note():
    logged = Logged()
    log = logged.fill(2, close=False)
    held(logged, log, 1)
    logged.kill()
    report = logged.check()
    assert (report.ok, report.end) == (True, 10)
    finding = only(report, "note")
    assert (finding.code, finding.first_offset, finding.next_offset) == ("unpublished", 10, 11)
    assert logged.check(owned=False).end == 11


def test_a_missing_segment_is_damage_and_its_offsets_are_known(logged):
    gone, after = second(logged), logged.segments()[2]
    logged.disk.remove(logged.path(gone))
    finding = only(logged.check(), "damage")
    assert finding.code == "missing_messages"
    assert (finding.first_offset, finding.next_offset) == (int(gone[:20]), int(after[:20]))
    assert gone in finding.what


def test_a_sealed_segment_that_was_cut_short_is_damage(logged):
    frames = logged.frames(FIRST)
    logged.disk.cut_file(logged.path(FIRST), frames[-1].position + 40)
    finding = only(logged.check(), "damage")
    assert (finding.code, finding.position) == ("damaged_frames", frames[-1].position)
    assert (finding.first_offset, finding.next_offset) == (frames[-1].base_offset, frames[-1].next_offset)


def test_zeros_where_frames_should_be_are_damage(logged):
    frames = logged.frames(FIRST)
    logged.zero(FIRST, frames[-2].position, frames[-1].end)
    finding = only(logged.check(), "damage")
    assert finding.code == "missing_messages"
    assert (finding.first_offset, finding.next_offset) == (frames[-2].base_offset, frames[-1].next_offset)


def test_an_active_segment_that_was_cut_short_after_an_orderly_end_is_damage(logged):
    frames = logged.frames(last(logged))
    logged.disk.cut_file(logged.path(last(logged)), frames[1].position)
    finding = only(logged.check(), "damage")
    assert (finding.code, finding.first_offset, finding.next_offset) == ("lost_tail", frames[1].base_offset, 200)


def test_bytes_behind_the_last_frame_of_a_sealed_segment_cost_no_message(logged):
    end = logged.frames(FIRST)[-1].end
    logged.write(FIRST, end + 3, b"dust")
    finding = only(logged.check(), "damage")
    assert (finding.code, finding.cost, finding.messages) == ("bytes_behind_end", "no message is lost", 0)


def test_a_frame_of_another_log_is_damage(logged):
    other = Logged()
    other.ids.random_u32()
    other.fill()
    logged.write(second(logged), 0, other.disk.contents(other.path(second(other))))
    finding = only(logged.check(), "damage")
    assert "belongs to another log" in finding.what
    assert finding.messages == logged.check().lost_messages > 50


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda logged, name: logged.disk.remove(logged.path(name)), "index_missing"),
        (lambda logged, name: logged.flip(name, 60), "index_damaged"),
        (lambda logged, name: logged.disk.cut_file(logged.path(name), 10), "index_damaged"),
    ],
    ids=["missing", "flipped", "cut"],
)
@pytest.mark.parametrize("which", [0, -1])
def test_a_missing_or_damaged_index_is_only_a_note(logged, damage, code, which):
    name = logged.segments()[which].replace(".log", ".idx")
    damage(logged, name)
    report = logged.check()
    finding = only(report, "note")
    assert report.ok
    assert (finding.code, finding.file, finding.cost) == (code, name, "no message is lost")
    assert "will be rebuilt" in finding.what


def test_a_whole_index_that_does_not_agree_with_its_segment_is_a_note(logged):
    # The index of another log's segment, which has the same base and other frames.
    other = Logged()
    log = other.open()
    log.append([b"x" * 300] * 3)
    log.append([b"x" * 300] * 3)
    log.close()
    other_content = other.disk.contents(other.path(f"{0:020d}.idx"))
    logged.disk.remove(logged.path(f"{0:020d}.idx"))
    logged.write(f"{0:020d}.idx", 0, other_content)
    assert only(logged.check(), "note").code == "index_disagrees"


@pytest.mark.parametrize("field", ["offsets", "times", "positions", "next_offset", "max_time_ns", "end"])
def test_every_field_of_an_index_is_held_against_the_frames(logged, field):
    name = f"{0:020d}.idx"
    index = parse_index(logged.disk.contents(logged.path(name)), logged.log_id, 0, 512)
    assert index is not None
    if field in ("offsets", "times", "positions"):
        getattr(index, field)[1] += 1
    else:
        setattr(index, field, getattr(index, field) + 1)
    logged.write(name, 0, index.encode(logged.log_id))
    assert only(logged.check(), "note").code == "index_disagrees"


def test_an_index_that_knows_only_the_first_part_of_its_segment_is_fine():
    logged = Logged()
    logged.fill(3)
    log = logged.open()
    logged.append(log, [b"more"])
    logged.kill()
    assert logged.disk.exists(logged.path(f"{0:020d}.idx"))
    assert logged.check().findings == ()


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda logged: logged.disk.remove(logged.path("state")), "state_missing"),
        (lambda logged: logged.flip("state", 0), "state_damaged"),
        (lambda logged: logged.disk.cut_file(logged.path("state"), 100), "state_damaged"),
        (lambda logged: logged.flip("state", 8, 0x08), "state_wrong"),
        (lambda logged: logged.flip("state", 9, 0x01), "state_wrong"),
        (lambda logged: logged.flip("state", 16, 0x08), "state_wrong"),
    ],
    ids=["missing", "magic", "cut", "readable-less", "readable-more", "synced-less"],
)
def test_a_spoiled_state_file_is_damage_that_loses_no_message(logged, damage, code):
    logged.open().close()  # both slots are in use
    damage(logged)
    report = logged.check()
    finding = only(report, "damage")
    assert (finding.code, finding.file) == (code, "state")
    assert "no message is lost" in finding.cost
    assert report.counts.messages == 200


def test_a_state_that_is_ahead_of_the_frames_after_a_power_cut_is_not_damage():
    logged = Logged()
    log = logged.fill(4, close=False)
    frames = logged.frames(FIRST)
    log.append([b"published, not synced"], durability="os")
    lost = logged.frames(FIRST)[-1]
    logged.restart()
    logged.zero(FIRST, lost.position, lost.end)  # its page never reached the disk, the state's did
    report = logged.check()
    assert report.ok
    assert report.end == frames[-1].next_offset


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda logged: logged.disk.remove(logged.path("epochs")), "epochs_missing"),
        (lambda logged: logged.flip("epochs", 20), "epochs_damaged"),
        (lambda logged: logged.disk.cut_file(logged.path("epochs"), 5), "epochs_damaged"),
    ],
    ids=["missing", "flipped", "cut"],
)
def test_a_spoiled_table_of_epochs_is_damage_that_loses_no_message(logged, damage, code):
    damage(logged)
    report = logged.check()
    finding = only(report, "damage")
    assert (finding.code, finding.file) == (code, "epochs")
    assert report.counts.messages == 200


def test_a_table_of_epochs_that_was_made_anew_is_noted_and_makes_no_message_void():
    logged = Logged()
    logged.fill(3, close=False)
    logged.kill()
    logged.fill(3)  # a second epoch
    logged.flip("epochs", 20)
    logged.open().close()
    report = logged.check()
    assert report.ok
    assert report.counts.messages == 30
    finding = only(report, "note")
    assert (finding.code, finding.first_offset, finding.next_offset) == ("epochs_incomplete", 0, 30)


def test_epochs_never_fall(logged):
    frame = logged.frames(FIRST)[3]
    body = plain_body(frame)
    logged.forge(FIRST, frame, body, epoch=frame.epoch - 1)
    finding = only(logged.check(), "damage")
    assert finding.first_offset == frame.base_offset
    assert "left over" in finding.what


def plain_body(frame: FrameHeader, batch: Batch | None = None) -> Body:
    """A body for other messages that takes exactly the room of this frame."""
    room = frame.end - frame.position - HEADER
    batch = batch or Batch(values=[b""] * frame.count)
    columns, parts = encode_columns(batch)
    used = sum(map(len, parts))
    assert used <= room
    values = [*batch.values[:-1], b"x" * (room - used)]
    columns, parts = encode_columns(msgspec.structs.replace(batch, values=values))
    content = b"".join(parts)
    assert len(content) == room
    assert padding(room) == b""
    return Body([content], room, room, frame.count, columns, 0, frame.max_time_ns, crc32c(content))


def test_a_body_that_cannot_be_taken_apart_is_damage_though_its_checksums_are_right(logged):
    frame = logged.frames(FIRST)[3]
    logged.forge(FIRST, frame, filler(frame.end - frame.position, count=frame.count, columns=1 << 3))
    finding = only(logged.check(), "damage")
    assert finding.code == "undecodable_frame"
    assert (finding.first_offset, finding.messages) == (frame.base_offset, 5)


def test_a_body_longer_than_its_values_is_damage(logged):
    frame = logged.frames(FIRST)[3]
    logged.forge(FIRST, frame, filler(frame.end - frame.position, count=frame.count))
    assert only(logged.check(), "damage").code == "undecodable_frame"


def test_a_compressed_body_over_what_anybody_packs_is_a_note(monkeypatch):
    logged = Logged()
    log = logged.open()
    log.append([b"a" * 200_000], codec="zstd")
    log.close()
    tight = LogSettings(max_message_bytes=1000, max_raw_bytes=64 * 1024)
    assert logged.check(tight).findings == ()
    monkeypatch.setattr("holdfast.storage.checks.finding.MOST_RAW_BYTES", 64 * 1024)
    report = logged.check(tight)
    assert report.ok
    assert only(report, "note").code == "too_large"


def test_a_batch_that_lacks_its_last_frames_is_damage(logged):
    frame = logged.frames(FIRST)[3]
    logged.forge(FIRST, frame, plain_body(frame), batch_remaining=2)
    finding = only(logged.check(), "damage")
    assert (finding.code, finding.cost) == ("half_batch", "no message is lost")


def test_a_batch_that_ends_with_its_segment_too_early_is_damage(logged):
    frame = logged.frames(FIRST)[-1]
    logged.forge(FIRST, frame, plain_body(frame), batch_remaining=1)
    assert only(logged.check(), "damage").code == "half_batch"


def test_a_latest_time_that_is_not_that_of_the_messages_is_damage():
    logged = Logged()
    log = logged.open()
    for _ in range(3):
        log.append(Batch(values=[b"a" * 64], times_ns=[5]))
    log.close()
    frame = logged.frames(FIRST)[1]
    body = plain_body(frame, Batch(values=[b""], times_ns=[6]))
    logged.forge(FIRST, frame, body)
    assert only(logged.check(), "damage").code == "wrong_time"


def test_a_claim_to_have_synced_what_came_later_is_damage(logged):
    frame = logged.frames(FIRST)[3]
    logged.forge(FIRST, frame, plain_body(frame), synced_offset=frame.base_offset + 1)
    assert only(logged.check(), "damage").code == "wrong_sync"


def test_offsets_that_jump_between_frames_are_damage(logged):
    frame = logged.frames(FIRST)[-1]
    logged.forge(FIRST, frame, plain_body(frame), base_offset=frame.base_offset + 2)
    logged.disk.remove(logged.path(f"{0:020d}.idx"))
    report = logged.check()
    finding = next(f for f in report.findings if f.severity == "damage")
    assert finding.code == "missing_messages"
    assert (finding.first_offset, finding.next_offset) == (frame.base_offset, frame.base_offset + 2)


def test_a_segment_that_reaches_into_the_next_one_is_damage(logged):
    logged.write(f"{10:020d}.log", 0, b"")
    report = logged.check()
    assert not report.ok
    assert "overlap" in codes(report)


def test_a_frame_of_a_newer_release_is_neither_torn_nor_damaged_but_must_be_upgraded_for(logged):
    frame = logged.frames(FIRST)[3]
    logged.forge(FIRST, frame, filler(frame.end - frame.position, count=frame.count, kind=77))
    with pytest.raises(UnknownFormat, match="upgrade"):
        logged.check()


def test_files_that_do_not_belong_are_mentioned_and_are_no_error(logged):
    logged.write("notes.txt", 0, b"hello")
    logged.write("123.log", 0, b"hello")
    logged.write("state.tmp", 0, b"half")
    logged.write(f"{77:020d}.idx", 0, b"orphan")
    logged.disk.make_folder(logged.path("backup-20260101T000000Z"))
    report = logged.check()
    assert report.ok
    assert {(f.code, f.file) for f in report.findings} == {
        ("foreign_file", "notes.txt"),
        ("foreign_file", "123.log"),
        ("leftover_file", "state.tmp"),
        ("leftover_file", f"{77:020d}.idx"),
        ("backup", "backup-20260101T000000Z"),
    }
    assert {f.severity for f in report.findings} == {"note"}


def test_what_lies_in_quarantine_is_listed():
    logged = Logged()
    end = half_written(logged)
    logged.open().close()
    (kept,) = logged.check().quarantine
    assert (kept.segment, kept.position, kept.first_offset) == (FIRST, end, 50)
    assert kept.file.startswith("quarantine/")
    assert kept.bytes > 0
    logged.write("quarantine/stray.bin", 0, b"dust")
    assert [k.reason for k in logged.check().quarantine if k.file == "quarantine/stray.bin"] == [
        "its note is missing or damaged"
    ]


def test_a_check_changes_nothing_and_takes_no_lock(logged):
    for name in (FIRST, "epochs", second(logged).replace(".log", ".idx")):
        logged.flip(name, 20)
    log = logged.open()
    before, lock = logged.contents(), logged.disk.contents(logged.path("lock"))
    calls = {"write", "truncate", "rename", "remove", "make_folder", "lock", "sync", "reserve"}
    counted = {call: logged.disk.calls[call] for call in calls}
    logged.check()
    assert {call: logged.disk.calls[call] for call in calls} == counted
    assert (logged.contents(), logged.disk.contents(logged.path("lock"))) == (before, lock)
    log.close()


@pytest.mark.parametrize("owned", [None, True])
def test_beside_a_living_owner_only_what_is_published_is_looked_at(owned):
    logged = Logged()
    log = logged.fill(3, close=False)
    (frame,) = held(logged, log, 1)
    logged.zero(FIRST, frame.position + HEADER, frame.end)  # half written at this moment
    report = logged.check(owned=owned)
    assert (report.ok, report.end, report.counts.messages) == (True, 15, 15)
    if owned:
        assert report.findings == ()


@pytest.mark.parametrize("owned", [None, True])
def test_beside_a_living_owner_damage_to_published_messages_is_found(owned):
    logged = Logged()
    logged.fill(5, close=False)
    logged.flip(FIRST, logged.frames(FIRST)[2].position)
    assert only(logged.check(owned=owned), "damage").first_offset == 10


def held(logged: Logged, log: Log, count: int) -> list[FrameHeader]:
    """Frames that are written and wait for a sync, each with one message."""
    for n in range(count):
        bodies = log._encoder.encode([b"held %d" % n], 0, codec=None, kind=1)
        log._writer.append(bodies, 0, producer=NO_PRODUCER, hold=True)
    return logged.frames(last(logged))[-count:]


def test_beside_a_living_owner_damage_is_counted_only_up_to_the_published_end():
    logged = Logged()
    log = logged.fill(3, close=False)
    frames = held(logged, log, 3)
    published = logged.frames(FIRST)[2]
    logged.flip(FIRST, published.position)
    logged.flip(FIRST, frames[0].position)
    finding = only(logged.check(owned=True), "damage")
    assert (finding.first_offset, finding.next_offset) == (10, 15)


def test_a_frame_that_an_owner_was_just_writing_is_not_taken_for_damage():
    logged = Logged()
    log = logged.fill(3, close=False)
    first, second_, _ = held(logged, log, 3)
    body = logged.disk.contents(logged.path(FIRST))[first.position + HEADER : first.end]
    logged.zero(FIRST, first.position + HEADER, first.end)
    assert logged.frames(FIRST)[-2] == second_
    report = in_the_middle(logged, lambda: logged.write(FIRST, first.position + HEADER, body))
    assert report.ok
    logged.zero(FIRST, first.position + HEADER, first.end)
    assert not logged.check().ok  # for good, that is damage


def in_the_middle(logged: Logged, call: Callable[[], None], **options: object):
    """A check during which something happens, once, after its first segment."""
    done = []

    def progress(_done: int, _total: int) -> None:
        if not done:
            done.append(True)
            call()

    report = logged.check(progress=progress, **options)
    assert done
    return report


@pytest.mark.parametrize("owned", [None, True])
def test_an_owner_that_truncates_while_a_check_looks_causes_no_alarm(owned):
    logged = Logged()
    log = logged.fill(close=False)
    report = in_the_middle(logged, lambda: log.truncate(50), owned=owned)
    assert (report.ok, report.end, report.counts.messages) == (True, 50, 50)


@pytest.mark.parametrize("owned", [None, True])
def test_an_owner_that_trims_while_a_check_looks_causes_no_alarm(owned):
    logged = Logged()
    log = logged.fill(close=False)
    report = in_the_middle(logged, lambda: log.trim(150), owned=owned)
    assert report.ok
    assert report.findings == ()
    assert report.start == log.start > 0
    assert report.counts.messages == 200 - log.start


def test_an_owner_that_appends_and_closes_while_a_check_looks_causes_no_alarm():
    logged = Logged()
    log = logged.fill(close=False)

    def more() -> None:
        logged.append(log, [b"more"] * 3)
        log.close()

    report = in_the_middle(logged, more)
    assert (report.ok, report.end) == (True, 203)


def test_a_check_beside_a_real_owner_that_writes_all_the_time_finds_nothing_wrong(tmp_path: Path):
    import threading

    stop = threading.Event()
    log = Log.open(str(tmp_path), SMALL)

    def write() -> None:
        while not stop.is_set():
            log.append([b"x" * 700] * 3, durability="os")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(15):
            report = check(str(tmp_path), settings=SMALL)
            assert report.ok, report
    finally:
        stop.set()
        thread.join()
        log.close()
    assert check(str(tmp_path), settings=SMALL).findings == ()


def test_progress_runs_from_the_first_byte_to_the_last(logged):
    steps: list[tuple[int, int]] = []
    logged.check(progress=lambda done, total: steps.append((done, total)))
    total = sum(len(logged.disk.contents(logged.path(name))) for name in logged.segments())
    assert {each for _, each in steps} == {total}
    assert steps[-1] == (total, total)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


class _BadSectors:
    """A disk that cannot read some bytes of one file."""

    def __init__(self, logged: Logged, name: str, start: int, end: int) -> None:
        self._disk = logged.disk
        self._path = logged.path(name)
        self._bad = range(start, end)

    def __getattr__(self, name: str) -> object:
        return getattr(self._disk, name)

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        file = self._disk.open(path, write=write, create=create)
        return _BadFile(file, self._bad) if path == self._path else file


class _BadFile:
    def __init__(self, file: File, bad: range) -> None:
        self._file = file
        self._bad = bad

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def read(self, position: int, length: int) -> bytes:
        if position < self._bad.stop and self._bad.start < position + length:
            raise OSError(errno.EIO, "Input/output error")
        return self._file.read(position, length)

    def view(self, position: int, length: int) -> memoryview:
        raise AssertionError("a page that cannot be read would kill the process (SIGBUS)")


def test_what_the_disk_cannot_read_is_damage_and_does_not_kill_the_process():
    logged = Logged()
    log = logged.open(LogSettings(segment_bytes=64 * 1024, min_free_bytes=0))
    for n in range(400):
        log.append([b"%d" % n * 100])
    log.close()
    assert len(logged.segments()) > 1
    bad = _BadSectors(logged, FIRST, 8192, 8200)
    report = check(FOLDER, World(logged.clock, bad, logged.ids), SMALL)
    unreadable = next(f for f in report.findings if f.code == "unreadable")
    assert (unreadable.file, unreadable.position, unreadable.bytes) == (FIRST, 8192, 4096)
    assert "copy" in unreadable.next_step
    assert not report.ok
    assert report.counts.messages > 350


def test_an_end_that_the_disk_cannot_read_is_not_judged(logged):
    bad = _BadSectors(logged, last(logged), 0, 1)
    report = check(FOLDER, World(logged.clock, bad, logged.ids), SMALL)
    assert not report.ok
    assert {"unreadable", "unjudged_end"} <= set(codes(report))


def test_findings_of_a_log_that_is_damaged_all_over_are_cut_off_but_counted(logged, monkeypatch):
    monkeypatch.setattr("holdfast.storage.checks.check._MOST_FINDINGS", 3)
    for name in logged.segments():
        for frame in logged.frames(name)[1:-1:2]:
            logged.flip(name, frame.position)
    report = logged.check()
    assert len(report.findings) == 3
    assert report.hidden_findings > 0
    assert report.lost_messages == 5 * (3 + report.hidden_findings)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_log(tmp_path: Path):
    def peak(messages: int) -> int:
        folder = str(tmp_path / str(messages))
        with Log.open(folder, LogSettings(segment_bytes=256 * 1024, min_free_bytes=0)) as log:
            for _ in range(messages):
                log.append([b"x" * 40], durability="os")
        check(folder)  # imports and caches are not what is measured
        tracemalloc.start()
        assert check(folder).counts.messages == messages
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    small, large = peak(2_000), peak(16_000)
    assert large < small * 1.5 + 64 * 1024


def test_a_check_on_the_real_disk_of_a_log_that_was_left_open(tmp_path: Path):
    log = Log.open(str(tmp_path), SMALL, real_world())
    log.append([b"a"] * 10)
    assert check(str(tmp_path)).ok
    assert check(tmp_path, owned=True).counts.messages == 10
    log.close()
