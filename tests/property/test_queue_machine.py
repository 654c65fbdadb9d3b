"""Any order of calls, clock moves, restarts and kills: a queue does what the model does, and replay equals live."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import holdfast
from holdfast import LeaseLost, NewMessage
from holdfast.broker.choose import Supply
from holdfast.broker.folder.layout import DEAD_SUFFIX, DEFAULT_GROUP, group_folder, partition_folder
from holdfast.broker.journal import Journal
from holdfast.delivery.image import check, image_of
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.storage.log import Log
from tests.property.queue_model import DELAYED, LEASED, READY, Entry, Model, Waiting
from tests.unit.stories import plain

FOLDER, TOPIC = "data/orders", "orders"
LEASE_MS = 10_000
SETTINGS = {
    "segment_bytes": 4096,
    "frame_bytes": 1024,
    "index_bytes": 512,
    "min_free_bytes": 0,
    "lease_ms": LEASE_MS,
    "max_attempts": 3,
    "backoff_jitter_percent": 50,
    "promote_after_ms": None,
    "retention_ms": None,
    "snapshot_events": 100,
}

picks = st.integers(min_value=0, max_value=2**20)
durabilities = st.sampled_from([None, None, "os", "fsync", "interval"])
options = st.fixed_dictionaries(
    {"size": st.sampled_from([0, 0, 30, 900])},
    optional={
        "key": st.sampled_from(["a", "b"]),
        "headers": st.just({"h": "x"}),
        "priority": st.integers(min_value=0, max_value=9),
        "delay": st.sampled_from([0.5, 5, 3_600]),
        "ttl": st.sampled_from([1, 100]),
        "dedup_id": st.sampled_from(["x", "y", "z"]),
    },
)


class QueueMachine(RuleBasedStateMachine):
    """The public face of a queue on a simulated disk, beside the model."""

    @initialize(durability=st.sampled_from(["os", "fsync"]), maps=st.booleans())
    def begin(self, durability: str, maps: bool) -> None:
        self.durability = durability
        self.disk = SimulatedDisk(maps=maps)
        self.clock = ManualClock()
        self.ids = SeededIds(1)
        self.hands: list[Any] = []
        self.receipts: list[tuple[str, int, int]] = []  # of detached leases
        self.sent = 0
        self.fence = 0
        self.paused = False
        self.open()
        self.model = Model(self.clock, self.q.settings)

    def open(self) -> None:
        world = World(clock=self.clock, disk=self.disk, ids=self.ids)
        self.hands.clear()
        self.q = holdfast.open(FOLDER, world=world, durability=self.durability, **SETTINGS)

    def message(self, size: int, **given: Any) -> NewMessage:
        self.sent += 1
        return NewMessage(body=b"%d " % self.sent + bytes(size), **given)

    @property
    def end(self) -> int:
        return self.q.stats().end

    # Publishing

    @rule(given=options, durability=durabilities)
    def put(self, given: dict[str, Any], durability: Any) -> None:
        message = self.message(**given)
        arguments = {name: getattr(message, name) for name in message.__struct_fields__ if name != "body"}
        stored = self.q.put(message.body, **arguments, durability=durability)
        self.model.put([message], [stored])

    @rule(given=st.lists(options, min_size=1, max_size=5), durability=durabilities)
    def put_many(self, given: list[dict[str, Any]], durability: Any) -> None:
        messages = [self.message(**each) for each in given]
        stored = self.q.put_many(messages, durability=durability)
        self.model.put(messages, stored)

    # Consuming

    @rule(count=st.integers(1, 4), lease_ms=st.sampled_from([None, 1_000]), detached=st.booleans())
    def get(self, count: int, lease_ms: int | None, detached: bool) -> None:
        expected = self.model.get(count, self.end)
        peeked = [message.offset for message in self.q.peek(count)]
        lease = None if lease_ms is None else lease_ms / 1000
        messages = self.q.get_many(count, timeout=0, lease=lease, detached=detached)
        assert peeked == expected, "a pause hides nothing from those who only look"
        assert [message.offset for message in messages] == ([] if self.paused else expected)
        for message in messages:
            entry = self.model.entries[message.offset]
            assert (message.raw, message.priority) == (entry.body, entry.priority)
            assert message.attempt == entry.attempts + 1
            assert message.fence > self.fence, "a fencing number came again"
            self.model.lease(message.offset, message.fence, lease_ms or LEASE_MS, detached=detached)
            if detached:
                self.receipts.append((message.receipt, message.offset, message.fence))
        self.hands += messages
        self.fence = max((message.fence for message in messages), default=self.fence)

    @rule(pick=picks)
    def resume(self, pick: int) -> None:
        if not self.receipts:
            return
        receipt, offset, fence = self.receipts[pick % len(self.receipts)]
        if self.model.holds(offset, fence):
            message = self.q.resume(receipt)
            assert message.raw == self.model.entries[offset].body
            self.hands.append(message)
        else:
            with pytest.raises(LeaseLost):
                self.q.resume(receipt)

    @rule()
    def pause_or_go_on(self) -> None:
        assert (self.q.resume() if self.paused else self.q.pause(reason="why not")) is True
        assert (self.q.pause() if not self.paused else self.q.resume()) is False
        self.paused = not self.paused

    def hand(self, pick: int) -> Any:
        """A message in hand: also one whose lease has ended long ago."""
        return self.hands[pick % len(self.hands)]

    def settle(self, message: Any, call: Any, effect: Any) -> None:
        """What is held is settled; a stale receipt changes nothing."""
        if self.model.holds(message.offset, message.fence):
            call()
            effect()
        else:
            with pytest.raises(LeaseLost):
                call()

    @precondition(lambda self: self.hands)
    @rule(pick=picks, durability=st.sampled_from([None, None, "fsync"]))
    def ack(self, pick: int, durability: Any) -> None:
        m = self.hand(pick)
        self.settle(m, lambda: m.ack(durability=durability), lambda: self.model.end(m.offset))

    @precondition(lambda self: self.hands)
    @rule(chosen=st.sets(picks, min_size=1, max_size=4))
    def ack_many(self, chosen: set[int]) -> None:
        messages = list({(m.offset, m.fence): m for m in map(self.hand, sorted(chosen))}.values())
        stale = [m.offset for m in messages if not self.model.holds(m.offset, m.fence)]
        for m in messages:
            if self.model.holds(m.offset, m.fence):
                self.model.end(m.offset)
        if stale:
            with pytest.raises(LeaseLost) as lost:
                self.q.ack_many(messages)
            assert sorted(set(lost.value.offsets)) == sorted(set(stale))
        else:
            self.q.ack_many(messages)

    @precondition(lambda self: self.hands)
    @rule(pick=picks, delay=st.sampled_from([None, 0, 3]))
    def nack(self, pick: int, delay: int | None) -> None:
        m, delay_ms = self.hand(pick), None if delay is None else delay * 1000
        self.settle(
            m,
            lambda: m.nack(delay=delay, error="no"),
            lambda: self.model.give_back(m.offset, delay_ms, counted=True),
        )

    @precondition(lambda self: self.hands)
    @rule(pick=picks, delay=st.sampled_from([0, 2]))
    def defer(self, pick: int, delay: int) -> None:
        m = self.hand(pick)
        self.settle(
            m, lambda: m.defer(delay=delay), lambda: self.model.give_back(m.offset, delay * 1000, counted=False)
        )

    @precondition(lambda self: self.hands)
    @rule(pick=picks)
    def reject(self, pick: int) -> None:
        m = self.hand(pick)
        self.settle(m, lambda: m.reject("never"), lambda: self.model.bury(m.offset))

    @precondition(lambda self: self.hands)
    @rule(pick=picks, seconds=st.sampled_from([1, 60]))
    def extend(self, pick: int, seconds: int) -> None:
        m = self.hand(pick)
        until_ms = self.model.mono_ms + seconds * 1000
        self.settle(m, lambda: m.extend(seconds), lambda: setattr(self.model.entries[m.offset], "until_ms", until_ms))

    @precondition(lambda self: self.hands)
    @rule(pick=picks, document=st.sampled_from([None, {"step": 1}, {"step": 2}]))
    def save_state(self, pick: int, document: Any) -> None:
        m = self.hand(pick)
        if self.model.holds(m.offset, m.fence):
            assert m.state.load() == self.model.entries[m.offset].document
        self.settle(
            m, lambda: m.state.save(document), lambda: setattr(self.model.entries[m.offset], "document", document)
        )

    # Operating

    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        model = self.model
        places = [(offset, e.delayed_id) for offset, e in model.entries.items() if not model.is_expired(e)]
        places += [(None, delayed_id) for delayed_id in model.store]
        if places:
            offset, delayed_id = places[pick % len(places)]
            name = f"{TOPIC}-0-{offset}" if delayed_id is None else f"{TOPIC}-0-d{delayed_id}"
            assert self.q.cancel(name) == model.cancel(offset, delayed_id)

    @rule(pick=picks)
    def seek(self, pick: int) -> None:
        stats = self.q.stats()
        to = stats.start + pick % (stats.end - stats.start + 1)
        assert self.q.seek(offset=to) == to
        self.model.seek(to)

    @rule(chosen=st.sets(picks, min_size=1, max_size=3), purge=st.sampled_from([False, False, True]))
    def redrive(self, chosen: set[int], purge: bool) -> None:
        known = sorted(self.model.letters)
        if not known:
            return
        ids = {known[pick % len(known)] for pick in chosen}
        names = [f"{TOPIC}{DEAD_SUFFIX}-0-{letter_id}" for letter_id in ids]
        done = (self.q.dead.purge(names) if purge else self.q.dead.redrive(names)).done
        assert done == len(ids)
        if purge:
            for letter_id in ids:
                del self.model.letters[letter_id]
        else:
            self.model.redrive(ids)

    @rule()
    def compact(self) -> None:
        self.q.compact()
        self.model.trim(self.q.stats().start)

    @rule()
    def snapshot(self) -> None:
        self.q._port.deliveries[0].save()

    @rule()
    def spill(self) -> None:
        partition = self.q._port.deliveries[0].partition
        if partition.delayed is not None:
            partition.release()  # a spill would do it, if it found anything to move
            self.model.release()
            partition.delayed.spill(self.model.now_ms)

    # Time and restarts

    @rule(ms=st.sampled_from([1, 400, 1_100, 6_000, 30_000, 4_000_000]))
    def wait(self, ms: int) -> None:
        self.clock.advance(ms=ms)

    @rule()
    def tick(self) -> None:
        self.q._port.engine.tick()
        assert not self.q._port.queue_group.topic.logged_error, (
            f"upkeep failed: {self.q._port.queue_group.topic.logged_error}"
        )
        self.model.tick()

    @rule()
    def reopen(self) -> None:
        self.q.close()
        self.model.restart(killed=False)
        self.open()

    @rule()
    def kill(self) -> None:
        self.disk = self.disk.kill()
        self.model.restart(killed=True)
        self.open()

    # What must hold after every step

    @invariant()
    def the_queue_is_what_the_model_says(self) -> None:
        model, stats = self.model, self.q.stats()
        fresh = {o: facts(e) for o, e in model.in_phase(READY, end=stats.end).items() if not model.is_expired(e)}
        ready = {m.offset: (m.raw, m.priority, m.attempts) for m in self.q.messages("ready")}
        expired = {offset for offset in ready if offset not in fresh}
        assert fresh.items() <= ready.items()
        assert all(model.is_expired(model.entries[offset]) for offset in expired)
        assert stats.ready == len(ready)
        leased = {m.offset: (m.raw, m.priority, m.attempts) for m in self.q.messages("leased")}
        assert leased == {offset: facts(entry) for offset, entry in model.in_phase(LEASED).items()}
        delayed = sorted((m.raw, m.priority, m.attempts) for m in self.q.messages("delayed"))
        waiting = [*model.in_phase(DELAYED).values(), *model.store.values()]
        assert delayed == sorted(map(facts, waiting))
        assert (stats.leased, stats.delayed) == (len(leased), len(delayed))
        assert (stats.paused is not None) == self.paused

    @invariant()
    def the_dead_letters_are_what_the_model_says(self) -> None:
        found = [(m.offset, m.raw, m.original_offset, m.attempts, m.priority, m.state) for m in self.q.dead.list()]
        assert found == [
            (key, each.body, each.original_offset, each.attempts, each.priority, each.document)
            for key, each in sorted(self.model.letters.items())
        ]
        assert self.q.stats().dead == len(found)

    @invariant()
    def the_state_is_sound_and_replay_equals_live(self) -> None:
        delivery, copy = self.q._port.deliveries[0], self.disk.kill()
        parts = [(TOPIC, delivery)]
        if delivery.dead.dead_log is not None:
            parts.append((TOPIC + DEAD_SUFFIX, delivery.dead.dead_log.letters))
        for topic, part in parts:
            assert check(part.group) == []
            assert replayed(copy, topic, part) == without_scanned(part.group)
        if delivery.partition.delayed is not None:
            delivery.partition.delayed.check()


def facts(each: Entry | Waiting) -> tuple[bytes, int, int]:
    return each.body, each.priority, each.attempts


def replayed(disk: SimulatedDisk, topic: str, delivery: Any) -> dict[str, Any]:
    """The state that the files on the disk add up to."""
    world = World(clock=ManualClock(), disk=disk, ids=SeededIds(2))
    log = Log.open(f"{partition_folder(FOLDER, topic)}/log", delivery.settings, world)
    _, group = Journal.open(world, group_folder(FOLDER, topic, 0, DEFAULT_GROUP), delivery.settings, log.start)
    Supply(log, group, delivery.settings).scan()
    return without_scanned(group)


def without_scanned(group: Any) -> dict[str, Any]:
    state = plain(image_of(group))
    state["numbers"] = state["numbers"][:-1]
    return state


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=settings.default.max_examples // 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_long_histories(seed, scale):
    """The same rules, at random and many of them: what Hypothesis, which likes short histories, seldom reaches."""
    rng = Random(seed)
    for _ in range(scale(3, 300)):
        machine = QueueMachine()
        machine.begin(rng.choice(["os", "fsync"]), rng.random() < 0.5)
        for _ in range(scale(80, 200)):
            name = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            if machine.hands or name not in NEED_A_HAND:
                getattr(machine, name)(**ARGUMENTS.get(name, lambda rng: {})(rng))
            machine.the_queue_is_what_the_model_says()
            machine.the_dead_letters_are_what_the_model_says()
            machine.the_state_is_sound_and_replay_equals_live()


def some_options(rng: Random) -> dict[str, Any]:
    choices = {
        "key": ["a", "b"],
        "priority": range(10),
        "delay": [0.5, 5, 3_600],
        "ttl": [1, 100],
        "dedup_id": "vwxyz",
    }
    drawn = {name: rng.choice(choice) for name, choice in choices.items() if rng.random() < 0.2}
    return {"size": rng.choice([0, 30, 900]), **drawn}


WEIGHTS = {
    "put": 4, "put_many": 3, "get": 8, "ack": 3, "ack_many": 1, "nack": 3, "defer": 2, "reject": 3, "extend": 1,
    "save_state": 2, "cancel": 1, "seek": 0.4, "redrive": 2, "compact": 1, "snapshot": 1, "spill": 1, "wait": 4,
    "tick": 4, "reopen": 1, "kill": 1, "resume": 1,
    "pause_or_go_on": 0.5,
}  # fmt: skip
NEED_A_HAND = {"ack", "ack_many", "nack", "defer", "reject", "extend", "save_state"}
ARGUMENTS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "put": lambda rng: {"given": some_options(rng), "durability": rng.choice([None, "os", "fsync"])},
    "put_many": lambda rng: {"given": [some_options(rng) for _ in range(rng.randint(1, 5))], "durability": None},
    "get": lambda rng: {
        "count": rng.randint(1, 4),
        "lease_ms": rng.choice([None, 1_000]),
        "detached": rng.random() < 0.2,
    },
    "ack": lambda rng: {"pick": rng.randrange(99), "durability": rng.choice([None, "fsync"])},
    "ack_many": lambda rng: {"chosen": {rng.randrange(99) for _ in range(3)}},
    "nack": lambda rng: {"pick": rng.randrange(99), "delay": rng.choice([None, 0, 3])},
    "defer": lambda rng: {"pick": rng.randrange(99), "delay": rng.choice([0, 2])},
    "reject": lambda rng: {"pick": rng.randrange(99)},
    "extend": lambda rng: {"pick": rng.randrange(99), "seconds": rng.choice([1, 60])},
    "save_state": lambda rng: {"pick": rng.randrange(99), "document": rng.choice([None, {"step": 1}])},
    "cancel": lambda rng: {"pick": rng.randrange(99)},
    "seek": lambda rng: {"pick": rng.randrange(99)},
    "resume": lambda rng: {"pick": rng.randrange(99)},
    "redrive": lambda rng: {"chosen": {rng.randrange(99) for _ in range(2)}, "purge": rng.random() < 0.2},
    "wait": lambda rng: {"ms": rng.choice([1, 400, 1_100, 6_000, 30_000])},
}


def test_a_message_behind_one_that_is_being_synced_can_be_cancelled():
    world = World(clock=ManualClock(), disk=SimulatedDisk(), ids=SeededIds(1))
    queue = holdfast.open(FOLDER, world=world, durability="os")
    waiting = queue._port.deliveries[0].partition.log.write([b"first"], durability="fsync")
    stored = queue.put(b"second")
    assert (stored.offset, queue.stats().end) == (1, 0)  # it can be read when the first one can
    assert queue.cancel(stored.id)
    queue._port.deliveries[0].partition.log.wait(waiting)
    assert [message.raw for message in queue.get_many(5, timeout=0)] == [b"first"]
