"""Random histories of a queue on a simulated disk, to be cut anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from holdfast import LeaseLost, NewMessage, Queue
from holdfast.delivery.events import Phase
from holdfast.env import ManualClock, SeededIds
from holdfast.env.sim.disk import SimulatedDisk
from tests.crash.queue_promises import Found, Promises, check_promises, look, number_of, small_queue

# How often each thing is done.
WEIGHTS: dict[str, float] = {
    "put": 8, "put_many": 3, "get": 7, "ack": 4, "ack_many": 2, "nack": 3, "defer": 1, "reject": 2, "extend": 1,
    "save_state": 1, "cancel": 1, "seek": 0.3, "redrive": 1, "purge": 0.4, "compact": 0.5, "sync": 1, "wait": 4,
    "snapshot": 1, "reopen": 0.6, "kill": 0.6, "power_cut": 0.5,
}  # fmt: skip


class QueueHistory:
    """One random life of a queue; `on_cut_point` is called after every change of the disk."""

    def __init__(
        self, seed: int, *, durability: str, maps: bool = True, on_cut_point: Any = None, disk: Any = None
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.durability = durability
        self.disk = disk or SimulatedDisk(maps=maps)
        self.ids = SeededIds(seed)
        self.clock = ManualClock()
        self.clock.advance(seconds=5_000)
        self.promises = Promises()
        self.held: dict[int, Any] = {}
        self.detached: set[int] = set()
        self._on_cut_point = on_cut_point
        self.steps: list[str] = []
        self.verdict: Exception | None = None
        self._hook()
        self.q = self.open()

    def open(self) -> Queue[bytes]:
        return small_queue(self.disk, self.clock, self.ids, durability=self.durability)

    def run(self, steps: int, *, without: str | None = None) -> None:
        weights = {name: weight for name, weight in WEIGHTS.items() if name != without}
        for _ in range(steps):
            self.step(self.rng.choices(list(weights), list(weights.values()))[0])
        self.step("close")

    def step(self, name: str) -> None:
        self.steps.append(name)
        self.do(getattr(self, name))

    def do(self, call: Callable[[], object]) -> None:
        """One thing to do. What a look behind a cut has found is raised here, not where the queue would hide it."""
        try:
            call()
        finally:
            if self.verdict is not None:
                raise self.verdict

    # Publishing

    def put(self, **options: Any) -> int:
        message = self.new_message(**options)
        self._put([message], lambda how: [self.q.put(message.body, **_arguments(message), durability=how)])
        return number_of(message.body)

    def put_many(self) -> None:
        messages = [self.new_message() for _ in range(self.rng.randint(2, 4))]
        self._put(messages, lambda how: self.q.put_many(messages, durability=how))

    def new_message(self, **options: Any) -> NewMessage:
        n, rng = self.promises.next, self.rng
        self.promises.next += 1
        if not options:
            options = {
                name: value()
                for name, value in {
                    "key": lambda: f"k{rng.randint(0, 2)}",
                    "headers": lambda: {"h": "x" * rng.randint(0, 50)},
                    "priority": lambda: rng.randint(1, 9),
                    "delay": lambda: rng.choice([0.5, 5, 60]),
                    "ttl": lambda: rng.choice([2, 100]),
                    "dedup_id": lambda: f"d{rng.randint(0, 12)}",
                }.items()
                if rng.random() < 0.2
            }
        return NewMessage(body=b"%d " % n + bytes(rng.choice([0, 0, 30, 300, 900])), **options)

    def _put(self, messages: list[NewMessage], call: Any) -> None:
        promises, how = self.promises, self.rng.choice([None, None, "fsync", "os", "interval"])
        for message in messages:
            if message.ttl is not None:
                due_ms = self.clock.now_ns() // 1_000_000 + round((message.delay or 0) * 1000)
                promises.expires_ms[number_of(message.body)] = due_ms + round(message.ttl * 1000)
        for message, stored in zip(messages, call(how), strict=True):
            n = number_of(message.body)
            if stored.duplicate:
                assert message.dedup_id in promises.dedup, (
                    f"{message.dedup_id} was never put, and counts as a duplicate"
                )
                n = promises.dedup[message.dedup_id]
            elif message.dedup_id is not None:
                assert message.dedup_id not in promises.dedup, f"{message.dedup_id} was put twice"
                promises.dedup[message.dedup_id] = n
            promises.put.add(n)
            if stored.durability == "fsync":
                promises.durable.add(n)

    # Consuming

    def get(self, count: int | None = None) -> None:
        detached = self.rng.random() < 0.15
        self.promises.taking = True
        taken = self.q.get_many(count or self.rng.randint(1, 3), timeout=0, detached=detached)
        self.promises.taking = False
        for message in taken:
            self._took(message)
            if detached:
                self.detached.add(number_of(message.raw))

    def _took(self, message: Any) -> None:
        n, promises = number_of(message.raw), self.promises
        assert n not in promises.ended or n in promises.replayed, f"{n} was done, and came back"
        assert message.fence >= promises.fence, "a fencing number fell"
        promises.fence = message.fence
        promises.attempts[n] = message.attempt
        promises.deferred.discard(n)
        self.held[n] = message

    def ack(self) -> None:
        self._ack(self._pick(1))

    def ack_many(self) -> None:
        self._ack(self._pick(3))

    def _ack(self, numbers: list[int]) -> None:
        if not numbers:
            return
        durability = self.rng.choice([None, None, "fsync"])
        messages = [self.held.pop(n) for n in numbers]
        self._begin_end(numbers)
        try:
            if len(messages) == 1:
                messages[0].ack(durability=durability)
            else:
                self.q.ack_many(messages, durability=durability)
        except LeaseLost as lost:
            gone = [n for n, m in zip(numbers, messages, strict=True) if m.offset in lost.offsets]
            assert gone
            self.promises.ended |= set(numbers) - set(gone)
            return
        self.promises.ended |= set(numbers)
        if durability == "fsync":
            self.promises.journal_synced()

    def nack(self) -> None:
        self._settle(lambda m: m.nack(delay=self.rng.choice([None, 0, 3]), error="no"))

    def defer(self) -> None:
        def defer(message: Any) -> None:
            self.promises.deferred.add(number_of(message.raw))
            self.promises.deferred_since.add(number_of(message.raw))
            message.defer(delay=self.rng.choice([0, 2]))

        self._settle(defer)

    def reject(self) -> None:
        n = self._settle(lambda m: m.reject("never"))
        if n is not None and n not in self.promises.replayed:
            self.promises.buried.add(n)

    def extend(self) -> None:
        self._settle(lambda m: m.extend(20), keep=True)

    def save_state(self) -> None:
        self._settle(lambda m: m.state.save({"step": self.rng.randint(0, 9)}), keep=True)

    def _settle(self, call: Any, *, keep: bool = False) -> int | None:
        for n in self._pick(1):
            message = self.held[n] if keep else self.held.pop(n)
            try:
                call(message)
            except LeaseLost:
                self.held.pop(n, None)
                return None
            return n
        return None

    def _pick(self, most: int) -> list[int]:
        held = sorted(self.held)
        return self.rng.sample(held, min(most, len(held)))

    # Operating

    def cancel(self) -> None:
        listed = [*self.q.messages("ready"), *self.q.messages("delayed")]
        if listed:
            chosen = self.rng.choice(listed)
            n = number_of(chosen.raw)
            self._begin_end([n])
            if self.q.cancel(chosen.id):
                self.promises.ended.add(n)

    def seek(self) -> None:
        log, group = self.q._port.deliveries[0].partition.log, self.q._port.deliveries[0].group
        to = self.rng.randint(log.start, log.end)
        records = list(log.records(log.start))
        before = {number_of(r.value) for r in records if r.offset < to and group.phase(r.offset) is not Phase.DONE}
        held = set(group.leases)  # also those of detached holders, from before a restart
        skipped = {number_of(r.value) for r in records if r.offset < to and r.offset not in held}
        self._begin_end(before)
        self.promises.begin_replay({number_of(r.value) for r in records if r.offset >= to})
        self.q.seek(offset=to)
        self.promises.ended |= before & skipped - set(self.held) - self.promises.replayed

    def redrive(self) -> None:
        self._with_letters(self.q.dead.redrive, ends=False)

    def purge(self) -> None:
        self._with_letters(self.q.dead.purge, ends=True)

    def _with_letters(self, call: Any, *, ends: bool) -> None:
        letters = self.q.dead.list()
        chosen = self.rng.sample(letters, min(len(letters), self.rng.randint(1, 3)))
        numbers = {number_of(letter.raw) for letter in chosen}
        self.promises.buried -= numbers
        self.promises.dead -= numbers
        for n in numbers:
            self.promises.forget_attempts(n)
        if ends:
            self._begin_end(numbers)
        assert call([letter.id for letter in chosen]).done == len(chosen)
        if ends:
            self.promises.purged |= numbers
            self.promises.ended |= numbers - self.promises.replayed

    def _begin_end(self, numbers: Any) -> None:
        self.promises.ending |= set(numbers)

    def compact(self) -> None:
        self.q.compact()

    def sync(self) -> None:
        self.q.sync()
        self.promises.all_synced()

    def snapshot(self) -> None:
        self.q._port.deliveries[0].save()
        self.promises.journal_synced()

    def wait(self) -> None:
        self.clock.advance(ms=self.rng.choice([1, 200, 1_100, 6_000, 30_000]))
        self.q._port.engine.tick()

    # Restarts

    def reopen(self) -> None:
        self.close()
        self.promises.all_synced()
        self._restart()

    def close(self) -> None:
        """What is in hand goes back, and that is no attempt."""
        given_back = set(self.held) - self.detached
        self.promises.deferred |= given_back
        self.promises.deferred_since |= given_back
        self.q.close()

    def kill(self) -> None:
        """kill -9: what the kernel had is all there."""
        self.disk = self.disk.kill()
        self._hook()
        self._restart()
        check_promises(self, self.q, killed=True)
        self.promises.all_synced()  # by those who opened the logs anew

    def power_cut(self) -> None:
        """Go on with what a cut leaves."""
        self.disk = self.disk.cut(self.rng)
        self._hook()
        self.ids.reboot()
        clock = ManualClock(self.clock.now_ns())
        self.clock = clock
        self._restart()
        check_promises(self, self.q)
        self._learn(look(self.q))

    def _learn(self, found: Found) -> None:
        """What is there now will stay; what is not is gone for ever."""
        promises = self.promises
        promises.put, promises.durable = set(found.all), set(found.all)
        promises.ended = set(range(promises.next)) - promises.put - promises.replayed
        promises.ending -= promises.put
        promises.buried = set(found.dead) - promises.replayed
        promises.done, promises.dead = set(promises.ended), set(promises.buried)
        promises.attempts, promises.synced_attempts = {}, {}
        promises.dedup = {name: n for name, n in promises.dedup.items() if n in found.stored or n in promises.put}

    def _restart(self) -> None:
        self.held.clear()
        self.detached.clear()
        self.q = self.open()

    def cut_with(self, on_cut_point: Any) -> None:
        """From now on."""
        self._on_cut_point = on_cut_point
        self._hook()

    def _hook(self) -> None:
        if self._on_cut_point is not None:
            self.disk.on_call = self._cut_point

    def _cut_point(self, call: str) -> None:
        try:
            if self.verdict is None:
                self._on_cut_point(self, call)
        except Exception as error:
            error.add_note(f"after: {', '.join(self.steps)}; inside a call of {call}")
            self.verdict = error


def _arguments(message: NewMessage) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__ if name != "body"}
