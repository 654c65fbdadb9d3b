"""kill -9 at random moments: what was acknowledged is there, in order, once, and the log goes on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from holdfast.env import real_world
from holdfast.storage import Log
from holdfast.storage.examine import examine
from holdfast.storage.files import segment_name
from holdfast.storage.state import LogState
from tests.crash import writer_process
from tests.crash.writer_process import Head, Journal, Note, What, kill_settings, parse_value, started, value_of

# A process has this long to make its notes: far more than it takes, but not for ever.
PATIENCE_S = 120

# Writers in the processes have lower numbers than the one who looks after the kill.
AFTER_THE_KILL = 200


@dataclass
class Promises:
    """What must be in the log, and what may be, by the notes of all the processes that owned it."""

    acked: dict[int, tuple[int, int]] = field(default_factory=dict)  # offset -> (writer, number)
    begun: dict[tuple[int, int], int] = field(default_factory=dict)  # (writer, number) -> count, not acknowledged
    cut: tuple[int, int] | None = None  # (offset, end before) of a truncation that was not finished
    trimmed_below: int = 0
    next_number: int = 0

    def learn(self, notes: Iterable[Note]) -> None:
        for note in notes:
            message = (note.writer, note.first)
            if note.what == What.OPENED:
                self._settle_cut(note.offset)
            elif note.what == What.BEGUN:
                self.begun[message] = note.count
                self.next_number = max(self.next_number, note.first + note.count)
            elif note.what == What.ACKED:
                assert self.begun.pop(message) == note.count
                for i in range(note.count):
                    assert note.offset + i not in self.acked, f"offset {note.offset + i} was given out twice"
                    self.acked[note.offset + i] = (note.writer, note.first + i)
            elif note.what == What.TRIMMING:
                self.trimmed_below = max(self.trimmed_below, note.offset)
            elif note.what == What.TRUNCATING:
                self.cut = (note.offset, note.first)
            elif note.what == What.TRUNCATED:
                self._settle_cut(note.offset)

    def check(self, log: Log, *, keeps_segments: int | None = None) -> None:
        """Hold what is there against what was promised; from now on all of it is promised."""
        assert log.report.damage == (), log.report
        assert log.report.lost_tail is None, log.report
        self._settle_cut(log.end)
        found = {record.offset: parse_value(record.value)[:2] for record in log.records(log.start)}
        assert list(found) == list(range(log.start, log.end)), "offsets have holes"
        assert log.end == log.written_end == log.synced_end
        assert len(set(found.values())) == len(found), "a message is there twice"
        if keeps_segments is None or len(log.segments()) < keeps_segments:
            assert log.start <= self.trimmed_below, "more was trimmed than was asked for"
        for offset, message in self.acked.items():
            if offset >= log.start:
                assert found.get(offset) == message, f"acknowledged message {message} is not at offset {offset}"
        self._check_order(found)
        self._check_extra({message for offset, message in found.items() if offset not in self.acked})
        self.acked, self.begun, self.trimmed_below = found, {}, log.start

    def _check_order(self, found: dict[int, tuple[int, int]]) -> None:
        """Each writer waited for one message before it sent the next."""
        last: dict[int, int] = {}
        for writer, number in found.values():
            assert number > last.get(writer, -1), f"messages of writer {writer} are not in order"
            last[writer] = number

    def _check_extra(self, extra: set[tuple[int, int]]) -> None:
        """What is there without an acknowledgement are batches in flight, each of them wholly."""
        for (writer, first), count in self.begun.items():
            batch = {(writer, first + i) for i in range(count)}
            assert not batch & extra or batch <= extra, f"half of the batch {first} of writer {writer}"
            extra -= batch
        assert not extra, f"messages that nobody sent: {extra}"

    def _settle_cut(self, end: int) -> None:
        """A truncation happened or it did not: there is nothing in between."""
        if self.cut is None:
            return
        offset, end_before = self.cut
        assert end in (offset, end_before), f"truncated at {offset} of {end_before}, and the log ends at {end}"
        if end == offset:
            self.acked = {kept: message for kept, message in self.acked.items() if kept < offset}
        self.cut = None


@dataclass(frozen=True)
class Workload:
    """What a process does, after how many notes it is killed, and whether what it leaves is always looked at."""

    run: Callable[[Journal, str, int, int], None]
    most_notes: int
    checked: float = 1.0  # how often; otherwise the next process finds what is there
    torn: float = 0.0  # how often a torn frame is put behind the end, for the next opening to cut
    keeps_segments: int | None = None


WORKLOADS = {
    "writing": Workload(writer_process.write, most_notes=250),
    "in a crowd": Workload(
        writer_process.write_in_a_crowd, most_notes=400, keeps_segments=writer_process.RETAINED_SEGMENTS
    ),
    "truncating": Workload(writer_process.truncate, most_notes=150, checked=0.6),
    "opening and closing": Workload(writer_process.reopen, most_notes=12, checked=0.3, torn=0.5),
}
SLICES = [(name, part) for name in WORKLOADS for part in range(3)]
KILLS_IN_A_FOLDER = 12


@pytest.mark.parametrize(("name", "part"), SLICES)
def test_no_acknowledged_message_is_lost_when_the_owner_is_killed(name, part, tmp_path, scale):
    kills = scale(300, 10_000) // len(SLICES)
    rng = random.Random(f"{name} {part}")
    done = 0
    while done < kills:
        seed = rng.getrandbits(32)
        in_this_folder = min(KILLS_IN_A_FOLDER, kills - done)
        try:
            kill_again_and_again(str(tmp_path / f"log{done}"), WORKLOADS[name], seed, in_this_folder)
        except BaseException as error:
            error.add_note(f"{name}, seed {seed}, kills in a row {in_this_folder}")
            raise
        done += in_this_folder


def kill_again_and_again(folder: str, workload: Workload, seed: int, kills: int) -> None:
    rng = random.Random(seed)
    promises = Promises()
    for n in range(kills):
        promises.learn(killed(folder, workload, rng, promises.next_number))
        if rng.random() < workload.torn:
            tear(folder, rng)
        if n == kills - 1 or rng.random() < workload.checked:
            look(folder, workload, promises)


def killed(folder: str, workload: Workload, rng: random.Random, first: int) -> list[Note]:
    """The notes of a process that was killed at a random moment."""
    journal = Journal()
    wanted = rng.randint(0, workload.most_notes)
    deadline = time.monotonic() + PATIENCE_S
    with started(workload.run, journal, folder, rng.getrandbits(32), first) as process:
        while len(journal) < wanted and process.is_alive():
            assert time.monotonic() < deadline, f"{len(journal)} notes of {wanted}: the process hangs"
            time.sleep(0.0005)
        time.sleep(rng.random() ** 2 * 0.008)  # not for anything to happen: the moment is random
        process.kill()
        process.join()
    assert process.exitcode == -9, "the process ended by itself; its error is in the captured stderr"
    return journal.notes()


def look(folder: str, workload: Workload, promises: Promises) -> None:
    """Open what the killed process left, check it, and write on."""
    with Log.open(folder, kill_settings()) as log:
        promises.check(log, keeps_segments=workload.keeps_segments)
        number, promises.next_number = promises.next_number, promises.next_number + 1
        appended = log.append_one(value_of(Head(AFTER_THE_KILL, number), 50), "fsync")
        promises.acked[appended.offset] = (AFTER_THE_KILL, number)


def tear(folder: str, rng: random.Random) -> None:
    """What a kill in the middle of a store leaves: bytes behind the last frame that are no frame."""
    world = real_world()
    state = LogState.open(world.disk, folder, write=False)
    if state is None:
        return
    findings = examine(world, folder, state, index_bytes=512)
    if findings.bases and findings.cut is None:
        file = world.disk.open(f"{folder}/{segment_name(findings.active_base)}", write=True)
        file.write(findings.active_position, [rng.randbytes(rng.randint(1, 200))])
        file.close()


def test_a_truncation_needs_no_index_that_a_killed_process_did_not_save(tmp_path):
    values = [value_of(Head(0, number), 300) for number in range(40)]
    with Log.open(tmp_path, kill_settings()) as log:
        for value in values:
            log.append_one(value)
    for path in tmp_path.glob("*.idx"):
        path.unlink()
    for cut in (35, 20, 19, 5, 0):
        with Log.open(tmp_path, kill_settings()) as log:
            log.truncate(cut)
            log.append_one(values[cut])
            assert [record.value for record in log.records(0)] == values[: cut + 1]
        for path in tmp_path.glob("*.idx"):
            path.unlink()


def test_the_promises_notice_what_a_broken_log_would_do(tmp_path):
    """The judge is judged: each kind of loss is seen."""
    folder = str(tmp_path / "log")
    with Log.open(folder, kill_settings()) as log:
        for number in range(3):
            log.append_one(value_of(Head(0, number), 20))

    def verdict(*notes: Note) -> str:
        promises = Promises()
        promises.learn(notes)
        with Log.open(folder, kill_settings()) as log, pytest.raises(AssertionError) as caught:
            promises.check(log)
        return str(caught.value)

    sent = [note for n in range(4) for note in (Note(What.BEGUN, 0, 1, n), Note(What.ACKED, 0, 1, n, n))]
    assert "acknowledged message (0, 3) is not at offset 3" in verdict(*sent)
    assert "nobody sent" in verdict(*sent[:4])
    assert "half of the batch" in verdict(*sent[:4], Note(What.BEGUN, 0, 2, 2))
    assert "not at offset" in verdict(Note(What.BEGUN, 0, 1, 1), Note(What.ACKED, 0, 1, 1, 0))
    assert "the log ends at 3" in verdict(*sent[:6], Note(What.TRUNCATING, first=4, offset=1))
