"""kill -9 at random moments of every operation of a queue: what was answered counts, each message is there once."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast import Queue
from holdfast.delivery.events import Phase
from holdfast.env import real_world
from tests.crash.queue_process import ANSWERED, BEGUN, WORKLOADS, Did, dedup_id, kill_queue, live, only_open
from tests.crash.queue_promises import check_invariants, look, number_of, where
from tests.crash.writer_process import Journal, Note, started

PATIENCE_S = 120
KILLS_IN_A_FOLDER = 8
MOST_NOTES = 250
MOST_NOTES_OF_SLOW_CALLS = 60  # each of them waits for many syncs

ENDS = {Did.ACK, Did.PURGE, Did.CANCEL}


@dataclass
class Promises:
    """What must be in the queue, and what may be, by the notes of all the processes that owned it."""

    put: set[int] = field(default_factory=set)
    putting: dict[int, int] = field(default_factory=dict)  # first number -> how many: begun, not answered
    ended: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)  # of the last delivery, as far as it counts
    unsure: dict[int, Did] = field(default_factory=dict)  # number -> what was begun with it, and not answered
    taking: int = 0  # a get was begun: so many may have been handed out without a note
    fence: int = 0
    next_number: int = 0

    def learn(self, notes: Iterable[Note]) -> None:
        for note in notes:
            did, number = Did(note.what), note.first
            if did == Did.PUT:
                self._learn_put(note)
            elif did == Did.GET:
                self.taking = note.count if note.writer == BEGUN else 0
            elif did == Did.TAKEN:
                self._learn_taken(note)
            elif did == Did.OTHER:
                pass
            elif note.writer == BEGUN:
                self.unsure[number] = did
            else:
                del self.unsure[number]
                if note.writer == ANSWERED:
                    self._learn_answer(did, number)

    def _learn_put(self, note: Note) -> None:
        if note.writer == BEGUN:
            self.putting[note.first] = note.count
            self.next_number = note.first + note.count
        else:
            count = self.putting.pop(note.first)
            self.put |= set(range(note.first, note.first + count))

    def _learn_taken(self, note: Note) -> None:
        number, attempt = note.first, note.count
        assert number in self.put, f"{number} was handed out before it was put"
        assert number not in self.ended, f"{number} was done, and came back"
        assert number not in self.dead, f"{number} was a dead letter, and came back"
        assert note.offset >= self.fence, f"{number} has a fencing number below the last one"
        expected = self.attempts.get(number, 0) + 1
        assert attempt == expected, f"{number} came with attempt {attempt}, not {expected}"
        self.attempts[number], self.fence = attempt, note.offset

    def _learn_answer(self, did: Did, number: int) -> None:
        if did in ENDS:
            self.ended.add(number)
            self.dead.discard(number)
        elif did == Did.DEFER:
            self.attempts[number] -= 1
        elif did == Did.REJECT:
            self.dead.add(number)
        elif did == Did.REDRIVE:
            self.dead.discard(number)
            self.attempts.pop(number, None)

    def check(self, q: Queue[bytes]) -> None:
        """Hold what is there against what was promised; from now on all of it is promised."""
        check_invariants(q)
        found = look(q)
        for number, count in found.all.items():
            assert count == 1, f"{number} is there {count} times ({where(found, number)})"
        for first, count in self.putting.items():
            batch = set(range(first, first + count))
            assert not batch & set(found.all) or batch <= set(found.all), f"half of the batch from {first} on"
            self.put |= batch & set(found.all)
        for number in sorted(self.put - self.ended - {n for n, did in self.unsure.items() if did in ENDS}):
            assert found.all[number], f"{number} was put, and is lost"
        for number in sorted(self.ended):
            assert not found.all[number], f"{number} was done, and is back ({where(found, number)})"
        assert set(found.all) <= self.put, f"nobody put {set(found.all) - self.put}"
        for number in sorted(self.dead - set(self.unsure)):
            assert found.dead[number], f"{number} was a dead letter, and is not ({where(found, number)})"
        self._check_attempts(attempts_in(q))
        for number in sorted(n for n in self.put if dedup_id(n))[-5:]:
            assert q.put(b"", dedup_id=dedup_id(number)).duplicate, f"{number} can be put twice"
        self._know(found)

    def _check_attempts(self, found: dict[int, int]) -> None:
        more = 0
        for number, attempts in found.items():
            known, doing = self.attempts.get(number, 0), self.unsure.get(number)
            if doing == Did.REDRIVE and attempts == 0:
                self.attempts[number] = 0
            elif doing == Did.DEFER and attempts == known - 1:
                self.attempts[number] = attempts
            elif attempts == known + 1:
                more += 1
                self.attempts[number] = attempts
            else:
                assert attempts == known, f"{number}: {attempts} attempts were counted, it was handed out {known} times"
        assert more <= self.taking, f"{more} messages have an attempt too many, a get of {self.taking} was begun"

    def _know(self, found) -> None:
        """Of what was begun it is known now what came of it."""
        for number, did in self.unsure.items():
            if did in ENDS and not found.all[number]:
                self.ended.add(number)
        self.dead = set(found.dead)
        self.putting.clear()
        self.unsure.clear()
        self.taking = 0


def attempts_in(q: Queue[bytes]) -> dict[int, int]:
    """How many attempts the queue has counted, of every message that is not done."""
    group, log = q._port.deliveries[0].group, q._port.deliveries[0].partition.log
    live = {
        number_of(record.value): group.attempts(record.offset)
        for record in log.records(max(group.floor, log.start))
        if group.phase(record.offset) is not Phase.DONE
    }
    return live | {number_of(letter.raw): letter.attempts for letter in q.dead.list()}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_what_a_queue_answered_counts_when_its_owner_is_killed(workload, tmp_path, scale):
    rng = random.Random(workload)
    kills = scale(16, 4_000)
    for folder in range(kills // KILLS_IN_A_FOLDER):
        seed = rng.getrandbits(32)
        try:
            kill_again_and_again(str(tmp_path / f"queue{folder}"), workload, seed)
        except BaseException as error:
            error.add_note(f"{workload}, seed {seed}")
            raise


def kill_again_and_again(folder: str, workload: str, seed: int) -> None:
    rng, promises = random.Random(seed), Promises()
    most = MOST_NOTES_OF_SLOW_CALLS if workload in ("snapshot", "compact") else MOST_NOTES
    for _ in range(KILLS_IN_A_FOLDER):
        journal = Journal()
        promises.learn(
            killed(
                journal,
                rng,
                rng.randint(0, most),
                live,
                folder,
                rng.getrandbits(32),
                promises.next_number,
                workload,
            )
        )
        while rng.random() < 0.3:
            killed(Journal(), rng, rng.randint(0, 2), only_open, folder)
        with kill_queue(folder, world=real_world()) as q:
            promises.check(q)
    check_drained(folder, promises)


def killed(
    journal: Journal, rng: random.Random, wanted: int, run: Callable[..., None], *arguments: object
) -> list[Note]:
    """The notes of a process that was killed at a random moment."""
    deadline = time.monotonic() + PATIENCE_S
    with started(run, journal, *arguments) as process:
        while len(journal) < wanted and process.is_alive():
            assert time.monotonic() < deadline, f"{len(journal)} notes of {wanted}: the process hangs"
            time.sleep(0.0005)
        time.sleep(rng.random() ** 2 * 0.008)  # not for anything to happen: the moment is random
        process.kill()
        process.join()
    assert process.exitcode == -9, "the process ended by itself; its error is in the captured stderr"
    return journal.notes()


def check_drained(folder: str, promises: Promises) -> None:
    """Everything that is left comes, each message once, and then nothing more: also after another opening."""
    delivered: Counter[int] = Counter()
    with kill_queue(folder) as q:
        later = {number_of(message.raw) for message in q.messages("delayed", where=is_far_off)}
        expected = promises.put - promises.ended - promises.dead - later
        while len(delivered) < len(expected):
            messages = q.get_many(100, timeout=PATIENCE_S)
            assert messages, f"{expected - set(delivered)} did not come"
            for message in messages:
                number = number_of(message.raw)
                delivered[number] += 1
                assert message.attempt == promises.attempts.get(number, 0) + 1
            q.ack_many(messages)
    assert delivered == Counter(expected)
    with kill_queue(folder) as q:
        assert q.stats().ready == q.stats().leased == 0
        assert set(look(q).all) == promises.dead | later


def is_far_off(message: Any) -> bool:
    return message.due_at > datetime.now(UTC) + timedelta(seconds=60)


def test_the_promises_notice_what_a_broken_queue_would_do(tmp_path):
    """The judge is judged: each kind of loss is seen."""
    folder = str(tmp_path / "queue")
    with kill_queue(folder, world=real_world()) as q:
        q.put_many([b"0 ", b"1 ", b"2 ", b"0 "])
        q.get_nowait().reject("never")
        q.get_nowait().nack(delay=0)

    def verdict(*notes: Note) -> str:
        promises = Promises()
        with kill_queue(folder, world=real_world()) as q, pytest.raises(AssertionError) as caught:
            promises.learn(notes)
            promises.check(q)
        return str(caught.value)

    put = [Note(Did.PUT, how, 3, 0) for how in (BEGUN, ANSWERED)]
    taken = Note(Did.TAKEN, ANSWERED, 1, 1, 7)
    acked = [Note(Did.ACK, how, 0, 1) for how in (BEGUN, ANSWERED)]
    assert "0 is there 2 times (live 1, delayed 0, dead 1)" in verdict(*put)
    with kill_queue(folder, world=real_world()) as q:
        q.dead.purge()
    assert "1 messages have an attempt too many" in verdict(*put)
    assert "1 was done, and is back" in verdict(*put, taken, *acked)
    assert "3 was put, and is lost" in verdict(*put, Note(Did.PUT, BEGUN, 1, 3), Note(Did.PUT, ANSWERED, 1, 3))
    assert "half of the batch from 2 on" in verdict(*put[:1], Note(Did.PUT, BEGUN, 2, 2))
    assert "nobody put" in verdict()
    assert "2 was a dead letter, and is not" in verdict(
        *put, taken, *[Note(Did.REJECT, how, 0, 2) for how in (BEGUN, ANSWERED)]
    )
    assert "came with attempt 1, not 2" in verdict(*put, taken, taken)
