"""What a repair mends, what it keeps, and that no crash in the middle of it makes anything worse."""

from __future__ import annotations

import contextlib
import errno
import json
import random

import pytest
from crc32c import crc32c

from holdfast.codec.frame import Kind
from holdfast.env import World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Busy, DiskFull, HoldfastError, InvalidRequest, NotALog
from holdfast.model import Batch
from holdfast.storage.checks.repair import plan_repair, repair
from tests.unit.logs import FOLDER, HEADER, SMALL, Logged, codes, filler

FIRST = f"{0:020d}.log"


@pytest.fixture
def logged() -> Logged:
    logged = Logged()
    logged.fill()
    assert len(logged.segments()) >= 3
    return logged


def lost_by_the_repair(logged: Logged) -> set[int]:
    """Repair, and hold the log to all that a repair promises; answers which offsets are lost."""
    before = logged.contents()
    result = logged.repair()
    changed = {name for name, content in before.items() if logged.contents().get(name) != content}
    moved = {kept.segment for kept in result.after.quarantine if kept.file == f"quarantine/{kept.segment}"}
    assert changed <= {*result.backup_files, *moved}
    for name in (*logged.segments(), "state", "epochs") if result.changed else ():
        assert logged.disk.durable(logged.path(name)) == logged.disk.contents(logged.path(name)), name
    report = logged.check(owned=False)
    assert result.after.ok
    assert report.ok
    assert not [finding for finding in report.findings if finding.severity != "note"]
    assert logged.plan().steps == ()
    found, lost = logged.readable()
    assert set(found) | lost == set(range(report.start, report.end))
    assert all(logged.values[offset] == value for offset, value in found.items())
    with logged.open() as log:
        offset = log.append([b"after the repair"]).offset
        assert offset == report.end
    with logged.open() as log:
        assert [record.value for record in log.records(offset)] == [b"after the repair"]
    assert logged.check().ok
    return lost


def test_nothing_is_done_to_a_log_that_is_whole(logged):
    before = logged.contents()
    result = logged.repair()
    assert (result.changed, result.backup, result.plan.steps) == (False, None, ())
    assert logged.contents() == before


def test_a_folder_without_a_log_is_refused():
    with pytest.raises(NotALog):
        Logged().repair()


def test_a_log_with_an_owner_is_left_alone(logged):
    logged.flip(FIRST, 10)
    log = logged.open()
    before = logged.contents()
    with pytest.raises(Busy, match="is owned by"):
        logged.repair()
    assert logged.contents() == before
    log.close()


def test_a_plan_says_what_it_costs_and_changes_nothing(logged):
    frame = logged.frames(FIRST)[2]
    logged.flip(FIRST, frame.position)
    logged.flip("epochs", 20)
    logged.disk.remove(logged.path(f"{0:020d}.idx"))
    before = logged.contents()
    plan = logged.plan()
    assert logged.contents() == before
    assert [step.action for step in plan.steps] == ["cover", "epochs", "index"]
    cover = plan.steps[0]
    assert (cover.file, cover.messages, cover.bytes) == (FIRST, 5, frame.end - frame.position)
    assert "5 messages lost (offsets 10 to 14)" in cover.cost
    assert plan.lost_messages == 5
    assert plan.backup_bytes > 4096


def test_a_damaged_stretch_becomes_a_gap_and_every_other_frame_stays_where_it_was(logged):
    frames = logged.frames(FIRST)
    damaged = frames[3]
    original = logged.disk.contents(logged.path(FIRST))
    logged.flip(FIRST, damaged.position + 30)
    damaged_log = logged.disk.contents(logged.path(FIRST))
    assert lost_by_the_repair(logged) == set(range(damaged.base_offset, damaged.next_offset))
    mended = logged.disk.contents(logged.path(FIRST))
    assert mended[: damaged.position] == original[: damaged.position]
    assert mended[damaged.end :] == original[damaged.end :]
    gap = logged.frames(FIRST)[3]
    assert gap.max_time_ns == frames[2].max_time_ns
    assert (gap.kind, gap.position, gap.end) == (Kind.GAP, damaged.position, damaged.end)
    assert (gap.base_offset, gap.next_offset) == (damaged.base_offset, damaged.next_offset)
    (kept,) = [k for k in logged.check().quarantine if k.segment == FIRST]
    assert logged.disk.contents(logged.path(kept.file)) == damaged_log[damaged.position : damaged.end]


def test_the_backup_holds_the_originals_and_says_so(logged):
    logged.flip(FIRST, 10)
    logged.flip("epochs", 20)
    before = logged.contents()
    result = logged.repair()
    note = json.loads(logged.disk.contents(f"{result.backup}/backup.json"))
    assert {file["name"] for file in note["files"]} == set(result.backup_files) >= {FIRST, "state", "epochs"}
    for name in result.backup_files:
        assert logged.disk.contents(f"{result.backup}/{name}") == before[name]
        assert logged.disk.durable(f"{result.backup}/{name}") == before[name]
    changed = {name for name, content in before.items() if logged.contents().get(name) != content}
    assert changed <= set(result.backup_files)
    assert result.backup == f"{FOLDER}/backup-20231114T221320Z"


def test_a_second_backup_in_the_same_second_gets_a_name_of_its_own(logged):
    logged.flip(FIRST, 10)
    first = logged.repair().backup
    logged.flip(logged.segments()[1], 10)
    second = logged.repair().backup
    assert first != second
    assert logged.check().ok


def test_the_backup_goes_where_it_is_told_to(logged):
    logged.flip(FIRST, 10)
    before = logged.contents()
    result = logged.repair(backup="/elsewhere/kept")
    assert result.backup == "/elsewhere/kept"
    assert logged.disk.contents(f"/elsewhere/kept/{FIRST}") == before[FIRST]
    assert not [name for name in logged.disk.names(FOLDER) if name.startswith("backup")]


def test_a_backup_never_goes_over_other_files(logged):
    logged.flip(FIRST, 10)
    before = logged.contents()
    with pytest.raises(InvalidRequest, match="holds files already"):
        logged.repair(backup=FOLDER)
    assert logged.contents() == before


def test_a_repair_that_would_not_fit_on_the_disk_changes_nothing():
    logged = Logged(SimulatedDisk(capacity_bytes=1_000_000))
    logged.fill()
    logged.flip(FIRST, 10)
    before = logged.contents()
    with pytest.raises(DiskFull, match="--backup"):
        logged.repair()
    assert logged.contents() == before


def test_a_missing_segment_is_replaced_by_one_that_holds_only_a_gap(logged):
    gone, after = logged.segments()[1:3]
    logged.disk.remove(logged.path(gone))
    assert lost_by_the_repair(logged) == set(range(int(gone[:20]), int(after[:20])))
    assert [frame.kind for frame in logged.frames(gone)] == [Kind.GAP]


def test_a_segment_of_zeros_gets_a_gap_at_its_start(logged):
    name, after = logged.segments()[1:3]
    logged.zero(name, 0, 4096)
    assert lost_by_the_repair(logged) == set(range(int(name[:20]), int(after[:20])))


@pytest.mark.parametrize("left", [0, 9, 100, 200])
def test_a_sealed_segment_that_was_cut_short_ends_with_a_gap(logged, left):
    frame = logged.frames(FIRST)[-1]
    logged.disk.cut_file(logged.path(FIRST), frame.position + left)
    assert lost_by_the_repair(logged) == set(range(frame.base_offset, frame.next_offset))


def test_the_loss_of_the_end_is_marked_and_its_offsets_are_never_used_again(logged):
    name = logged.segments()[-1]
    frame = logged.frames(name)[-1]
    logged.flip(name, frame.position + HEADER)
    plan = logged.plan()
    assert "mark" in [step.action for step in plan.steps]
    assert plan.lost_messages == 5
    assert lost_by_the_repair(logged) == set(range(195, 200))


@pytest.mark.parametrize("restarted", [False, True])
def test_the_loss_of_the_end_of_a_log_that_was_left_open_is_marked_too(restarted):
    logged = Logged()
    logged.fill(close=False)
    (logged.restart if restarted else logged.kill)()
    name = logged.segments()[-1]
    logged.flip(name, logged.frames(name)[-1].position + HEADER)
    assert lost_by_the_repair(logged) == set(range(195, 200))


def test_a_torn_tail_is_cut_and_kept():
    logged = Logged()
    log = logged.fill(4, close=False)
    log.append([b"x" * 400] * 6, durability="os")
    logged.restart()
    torn = logged.frames(FIRST)[-1]
    logged.flip(FIRST, torn.end - 1)
    assert [step.action for step in logged.plan().steps] == ["cut"]
    assert lost_by_the_repair(logged) == set()
    assert len(logged.check().quarantine) == 1


def test_bytes_behind_the_end_of_a_sealed_segment_become_zeros_and_are_kept(logged):
    end = logged.frames(FIRST)[-1].end
    whole = logged.disk.contents(logged.path(FIRST))
    logged.write(FIRST, end + 3, b"dust")
    assert lost_by_the_repair(logged) == set()
    assert logged.disk.contents(logged.path(FIRST)) == whole
    (kept,) = logged.check().quarantine
    assert b"dust" in logged.disk.contents(logged.path(kept.file))


@pytest.mark.parametrize("which", [3, -1])
@pytest.mark.parametrize("segment", [0, -1])
def test_a_frame_that_cannot_be_taken_apart_becomes_a_gap(logged, segment, which):
    name = logged.segments()[segment]
    frame = logged.frames(name)[which]
    logged.forge(name, frame, filler(frame.end - frame.position, count=frame.count, columns=1 << 3))
    assert lost_by_the_repair(logged) == set(range(frame.base_offset, frame.next_offset))


@pytest.mark.parametrize("name", ["state", "epochs"])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_state_and_epochs_are_written_anew(logged, name, how):
    if how == "flip":
        logged.flip(name, 0)
    elif how == "cut":
        logged.disk.cut_file(logged.path(name), 9)
    else:
        logged.disk.remove(logged.path(name))
    assert lost_by_the_repair(logged) == set()


def test_indexes_are_written_anew_and_agree(logged):
    for name in logged.disk.names(FOLDER):
        if name.endswith(".idx"):
            logged.flip(name, 30)
    assert {finding.code for finding in logged.check().findings} == {"index_damaged"}
    assert lost_by_the_repair(logged) == set()
    assert not [code for code in codes(logged.check()) if code.startswith("index")]


def test_several_kinds_of_damage_in_several_epochs_at_once():
    logged = Logged()
    logged.fill(20, close=False)
    logged.kill()
    logged.fill(20, close=False)
    logged.restart()
    logged.fill(20)
    names = logged.segments()
    expected = set()
    for name, which in [(names[0], 0), (names[0], 4), (names[2], -1), (names[-1], 1)]:
        frame = logged.frames(name)[which]
        expected |= set(range(frame.base_offset, frame.next_offset))
        logged.flip(name, frame.position + 3)
    frame = logged.frames(names[1])[0]
    logged.disk.remove(logged.path(names[1]))
    expected |= set(range(int(names[1][:20]), int(names[2][:20])))
    logged.disk.remove(logged.path("state"))
    logged.flip("epochs", 20)
    assert lost_by_the_repair(logged) == expected


def test_what_cannot_be_mended_is_named_and_left(logged):
    frame = logged.frames(FIRST)[3]
    from tests.unit.test_check import plain_body

    logged.forge(FIRST, frame, plain_body(frame), batch_remaining=2)
    plan = logged.plan()
    assert plan.steps == ()
    assert [finding.code for finding in plan.left] == ["half_batch"]
    result = logged.repair()
    assert (result.changed, result.after.ok) == (False, False)


def test_offsets_that_jump_between_two_frames_leave_no_room_for_a_gap(logged):
    from tests.unit.test_check import plain_body

    frame = logged.frames(FIRST)[-1]
    logged.forge(FIRST, frame, plain_body(frame), base_offset=frame.base_offset + 2)
    logged.flip(FIRST, 10)
    result = logged.repair()
    assert [finding.code for finding in result.plan.left] == ["missing_messages"]
    assert codes(result.after).count("missing_messages") == 1
    assert "damaged_frames" not in codes(result.after)


def test_the_old_index_is_gone_before_the_mended_segment_takes_its_place(logged):
    logged.flip(FIRST, 10)
    damaged_content = logged.disk.contents(logged.path(FIRST))
    seen = []

    def look(_: str) -> None:
        if not seen and logged.disk.contents(logged.path(FIRST)) != damaged_content:
            seen.append(logged.disk.exists(logged.path(f"{0:020d}.idx")))

    logged.disk.on_call = look
    logged.repair()
    assert seen == [False]


def test_a_failing_disk_is_not_written_to(logged):
    from tests.unit.test_check import _BadSectors

    bad = World(logged.clock, _BadSectors(logged, FIRST, 0, 1), logged.ids)
    plan = plan_repair(FOLDER, bad, SMALL)
    assert (plan.steps, plan.left[0].code) == ((), "unreadable")
    before = logged.contents()
    assert not repair(FOLDER, bad, SMALL).changed
    assert logged.contents() == before


def test_leftovers_go_and_stay_in_the_backup(logged):
    logged.write("epochs.tmp", 0, b"half of a table")
    result = logged.repair()
    assert [step.action for step in result.plan.steps] == ["remove"]
    assert not logged.disk.exists(logged.path("epochs.tmp"))
    assert logged.disk.contents(f"{result.backup}/epochs.tmp") == b"half of a table"


class PowerCut(BaseException):
    """The lights go out."""


def damaged_log(seed: int) -> Logged:
    """A log with damage of every kind: in a sealed segment, a missing one, in the active one, in the small files."""
    logged = Logged()
    logged.fill(20, close=False)
    logged.kill()
    logged.fill(25, close=seed % 2 == 0)
    if seed % 2:
        logged.kill()
    names = logged.segments()
    logged.flip(names[0], logged.frames(names[0])[2].position + 5)
    logged.flip(names[0], logged.frames(names[0])[-1].position + HEADER)
    logged.flip(names[-1], logged.frames(names[-1])[0].position + 7)
    logged.flip(names[0].replace(".log", ".idx"), 33)
    logged.disk.remove(logged.path(names[1]))
    if seed % 3 == 0:
        logged.flip("epochs", 20)
    if seed % 3 == 1:
        logged.flip("state", 0)
    if seed % 3 == 2:
        name = names[-1]
        logged.flip(name, logged.frames(name)[-1].position + HEADER)
    return logged


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slow
def test_a_power_cut_at_any_step_of_a_repair_costs_nothing_and_the_next_repair_ends_it(seed, scale):
    baseline = damaged_log(seed)
    report = baseline.check()
    good = set(baseline.values) - {
        offset for f in report.findings if f.severity == "damage" and f.messages for offset in _range(f)
    }
    steps, rng = 0, random.Random(seed)
    while True:
        steps += scale(2, 1)
        logged = damaged_log(seed)
        originals = {name: content for name, content in logged.contents().items() if name.endswith(".log")}
        if not cut_at(logged, steps, rng):
            break
        assert all_bytes_are_somewhere(logged, originals), steps
        check_backups(logged)
        logged.repair()
        after = logged.check()
        assert after.ok, (seed, steps, after)
        assert not [f for f in after.findings if f.severity != "note"], (seed, steps)
        found, lost = logged.readable()
        assert all(logged.values[offset] == value for offset, value in found.items())
        assert set(found) >= good, (seed, steps, good - set(found))
        assert not lost & good
        assert all_bytes_are_somewhere(logged, originals), steps
    assert steps > 50


def _range(finding) -> range:
    return range(finding.first_offset, finding.next_offset)


def cut_at(logged: Logged, call: int, rng: random.Random) -> bool:
    """Repair, and pull the plug after so many changes; answers whether it came to that."""
    seen = 0

    def count(_: str) -> None:
        nonlocal seen
        seen += 1
        if seen == call:
            raise PowerCut

    logged.disk.on_call = count
    try:
        logged.repair()
    except PowerCut:
        logged.disk = logged.disk.cut(rng)
        logged.ids.reboot()
        return True
    return False


def all_bytes_are_somewhere(logged: Logged, originals: dict[str, bytes]) -> bool:
    """Each segment is as it was, or its original is in a backup that was finished."""
    contents = logged.contents()
    return all(
        contents.get(name) == content
        or any(kept == content and place.endswith("/" + name) for place, kept in contents.items())
        for name, content in originals.items()
    )


def check_backups(logged: Logged) -> None:
    """A backup that says that it is whole is whole."""
    contents = logged.contents()
    for place, note in contents.items():
        if place.endswith("/backup.json"):
            for file in json.loads(note)["files"]:
                copy = contents[f"{place.removesuffix('/backup.json')}/{file['name']}"]
                assert (len(copy), crc32c(copy)) == (file["bytes"], file["crc32c"])


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.slow
def test_a_disk_that_fails_at_any_call_of_a_repair_is_reported_and_the_next_repair_ends_it(code, scale):
    nth = 0
    while True:
        nth += scale(5, 1)
        logged = damaged_log(0)
        good = set(logged.values) - {
            offset for f in logged.check().findings if f.severity == "damage" and f.messages for offset in _range(f)
        }
        logged.disk.faults.fail(nth, code, sticky=False)
        with contextlib.suppress(HoldfastError):
            logged.repair()
        fired = logged.disk.faults.fired
        logged.disk.faults.clear()
        if not fired:
            break
        logged.kill()
        logged.repair()
        assert logged.check().ok, (nth, fired)
        assert set(logged.readable()[0]) >= good, (nth, fired)
    assert nth > 50


def random_log(rng: random.Random) -> Logged:
    logged = Logged()
    for _ in range(rng.randint(1, 3)):
        log = logged.open()
        for _ in range(rng.randint(1, 25)):
            values = [rng.randbytes(rng.randint(0, 400)) for _ in range(rng.randint(1, 5))]
            keys = [rng.choice([None, b"k"]) for _ in values] if rng.random() < 0.3 else None
            appended = log.append(Batch(values=values, keys=keys), durability=rng.choice(["fsync", "os"]))
            logged.values |= dict(enumerate(values, appended.offset))
        if rng.random() < 0.5:
            log.close()
        elif rng.random() < 0.3:
            logged.restart()
        else:
            logged.kill()
    return logged


def damage_somewhere(logged: Logged, rng: random.Random) -> None:
    names = [name for name in logged.disk.names(FOLDER) if name != "lock"]
    if not names:
        return
    name = rng.choice(names)
    size = min(len(logged.disk.contents(logged.path(name))), 4096)
    how = rng.choice(["flip", "flip", "cut", "remove", "zero"])
    if how == "remove":
        logged.disk.remove(logged.path(name))
    elif size:
        at = rng.randrange(size)
        if how == "flip":
            logged.flip(name, at, 1 << rng.randrange(8))
        elif how == "cut":
            logged.disk.cut_file(logged.path(name), at)
        else:
            logged.zero(name, at, min(size, at + rng.randint(1, 600)))


@pytest.mark.slow
def test_whatever_is_spoiled_a_repair_makes_the_log_whole(scale):
    for seed in range(scale(150, 5_000)):
        rng = random.Random(seed)
        logged = random_log(rng)
        assert logged.check().ok, seed
        for _ in range(rng.randint(1, 4)):
            damage_somewhere(logged, rng)
        if logged.segments():
            lost_by_the_repair(logged)


def test_a_gap_is_a_note_with_what_it_cost(logged):
    frame = logged.frames(FIRST)[2]
    logged.flip(FIRST, frame.position)
    logged.repair()
    finding = next(f for f in logged.check().findings if f.code == "gap")
    assert (finding.severity, finding.messages) == ("note", 5)
    assert (finding.position, finding.first_offset) == (frame.position, frame.base_offset)
    assert "5 messages lost earlier" in finding.cost
    assert logged.check().lost_messages == 5
