"""Any order of publishes, choices, acks, nacks, ended leases, deaths, seeks and restarts: what keys promise holds.

A model looks through all messages for each choice; the gate, which does not, must come to the same, and so must one
that is filled from a log only as far as each choice needs.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.broker.choose import Keyed, KeyedGroup
from holdfast.delivery.events import (
    Ack,
    Acked,
    Bury,
    Cancel,
    Command,
    Event,
    Expired,
    GiveUp,
    Leased,
    Lost,
    Nack,
    Opened,
    Phase,
    Receipt,
    Receive,
    Reject,
    Seek,
    Tick,
    runs_of,
)
from holdfast.delivery.key_policy import KeyPolicy
from holdfast.delivery.keys import KeyGate, KeyLimits
from holdfast.model import Record
from holdfast.settings import QueueSettings
from tests.unit.stories import BOOT, Story

RETRIES = QueueSettings(backoff_ms=40, backoff_max_ms=100, max_attempts=3)
SETTLED = (Phase.DONE, Phase.DEAD)
BUSY = (Phase.LEASED, Phase.DELAYED)

keys = st.lists(st.sampled_from([b"x/1", b"x/2", b"y/1", b"z", None]), min_size=1, max_size=8)
counts = st.integers(min_value=1, max_value=6)
times_ms = st.integers(min_value=0, max_value=120)
picks = st.integers(min_value=0, max_value=2**20)
policies = st.builds(
    KeyPolicy,
    key_order=st.booleans(),
    key_group_separator=st.sampled_from([None, "/"]),
    key_group_concurrency=st.sampled_from([None, 1, 2]),
    key_group_rate=st.sampled_from([None, None, 3.0, 20.0]),
    key_group_burst=st.integers(1, 3),
    key_group_fair=st.booleans(),
    key_lookahead=st.sampled_from([1, 4, 10_000]),
)


class Model:
    """What the policy means, in the plainest way: every message of the window is looked at each time."""

    def __init__(self, policy: KeyPolicy, story: Story) -> None:
        self.policy = policy
        self.story = story
        self.keys: list[bytes | None] = []
        self.scanned = 0
        self.gone: list[tuple[int, bytes, int]] = []  # when, which key group, after how many restarts
        self.restarts = 0

    def phase(self, offset: int) -> Phase:
        return self.story.group.phase(offset)

    def rescan(self) -> None:
        self.scanned = 0

    def fill(self) -> None:
        group = self.story.group
        self.scanned = max(self.scanned, group.floor)
        behind = sum(offset >= self.scanned for offset in (*group.leases, *group.waiting))
        known = behind + sum(self.phase(offset) not in SETTLED for offset in range(self.scanned))
        while known < self.policy.key_lookahead and self.scanned < self.story.readable:
            known += self.phase(self.scanned) is Phase.READY
            self.scanned += 1

    def past_settled(self, offset: int) -> int:
        """Where the next message lies that is not settled: the gate may pass over those that are, or not."""
        while offset < len(self.keys) and self.phase(offset) in SETTLED:
            offset += 1
        return offset

    def group_of(self, key: bytes) -> bytes:
        return key if self.policy.key_group_separator is None else key.partition(b"/")[0]

    def may_go(self, offset: int, chosen: list[int], left: dict[bytes, int]) -> bool:
        """Whether the policy lets this message go, with those chosen before it."""
        if self.phase(offset) is not Phase.READY or offset in chosen or offset >= self.scanned:
            return False
        key = self.keys[offset]
        if key is None:
            return True
        same = [other for other in range(len(self.keys)) if self.keys[other] == key]
        if self.policy.key_order:
            if any(self.phase(other) in BUSY or other in chosen for other in same):
                return False
            if any(self.phase(other) is Phase.READY for other in same if other < offset):
                return False
        name = self.group_of(key)
        of_group = [other for other, k in enumerate(self.keys) if k is not None and self.group_of(k) == name]
        held = sum(self.phase(other) is Phase.LEASED or other in chosen for other in of_group)
        most = self.policy.key_group_concurrency
        return (most is None or held < most) and sum(other in chosen for other in of_group) < left[name]

    def choose(self, count: int, left: dict[bytes, int]) -> list[int]:
        chosen: list[int] = []
        for offset in range(self.scanned):
            if len(chosen) < count and self.may_go(offset, chosen, left):
                chosen.append(offset)
        return chosen

    def leased(self, offsets: list[int]) -> None:
        for offset in offsets:
            key = self.keys[offset]
            if key is not None:
                self.gone.append((self.story.mono_ms, self.group_of(key), self.restarts))

    def hold_rates(self) -> None:
        """Between any two moments no more than a burst and what the rate allows; a restart may add one."""
        rate = self.policy.key_group_rate
        if rate is None or not self.gone:
            return
        last_ms, name, restarts = self.gone[-1]
        count = 0
        for at_ms, of, after in reversed(self.gone):
            count += of == name
            allowed = self.policy.key_group_burst + Fraction(rate) * (last_ms - at_ms) / 1000
            assert count <= allowed + (restarts - after)


class KeyLog:
    """The keys of the model as a log, in which a partition's gate looks for them itself."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.kept: dict[int, Record] = {}

    @property
    def end(self) -> int:
        return self._model.story.readable

    def follower(self) -> KeyLog:
        return self

    def kept_record(self, offset: int) -> Record:
        return Record(offset, 0, b"", self._model.keys[offset])


class KeyMachine(RuleBasedStateMachine):
    """The gate beside a group that lives, journals and restarts as a real one does."""

    @initialize(policy=policies, first=keys, late=st.integers(0, 3))
    def begin(self, policy: KeyPolicy, first: list[bytes | None], late: int) -> None:
        self.policy = policy
        self.story = Story(policy=RETRIES)
        self.model = Model(policy, self.story)
        self.publish(first)
        if late:  # the policy comes when some are leased already, whatever their keys are
            self.story.receive(late)
        self.open_gates(new=True)

    def open_gates(self, *, new: bool) -> None:
        """The gate, and one that reads on in the log as far as each choice needs."""
        now_ms = self.story.mono_ms
        self.gate, self.fused = [KeyGate(KeyLimits(self.policy, now_mono_ms=now_ms, new=new)) for _ in range(2)]
        shared = KeyedGroup(self.policy, now_mono_ms=now_ms, new=new)
        self.keyed = Keyed(shared, KeyLog(self.model), self.story.group)  # type: ignore[arg-type]

    def command(self, command: Command) -> None:
        self.follow(self.story.when(command))

    def happen(self, event: Event) -> None:
        self.story.happen(event)
        self.follow([event])

    def follow(self, events: list[Event]) -> None:
        for event in events:
            self.gate.note(event)
            self.follow_fused(event)
        self.keyed.note(events)

    def follow_fused(self, event: Event) -> None:
        """A gate that is told of single leases and acks in the fused form."""
        match event:
            case Leased(runs=(start, stop)) if stop == start + 1:
                self.fused.lease_one(start, event.until_ms - event.lease_ms)
            case Acked(runs=(start, stop)) if stop == start + 1:
                self.fused.ack_one(start)
            case _:
                self.fused.note(event)

    def fill(self) -> None:
        for gate in (self.gate, self.fused):
            gate.fill(self.story.group, self.story.readable, lambda offset: self.model.keys[offset])
        self.model.fill()
        assert self.model.past_settled(self.gate.scanned) == self.model.past_settled(self.model.scanned)

    def choose(self, count: int) -> list[int]:
        chosen, of_keyed = [gate.choose(count, self.story.mono_ms) for gate in (self.gate, self.keyed)]
        if self.policy.key_group_fair:  # whose turn it is depends on when each key group was first seen
            assert len(of_keyed) == len(chosen)
        else:
            assert of_keyed == chosen
        now_ms = self.story.mono_ms
        assert self.fused.choose(count, now_ms) == chosen
        assert self.fused.choose_one(now_ms) == (chosen[0] if chosen else -1)
        return chosen

    def left(self) -> dict[bytes, int]:
        limits = self.gate.limits
        names = {self.model.group_of(key) for key in self.model.keys if key is not None}
        return {name: limits.left(name, self.story.mono_ms) for name in names}

    def held(self, pick: int) -> Receipt | None:
        leases = sorted(self.story.group.leases.items())
        if not leases:
            return None
        offset, lease = leases[pick % len(leases)]
        return Receipt(offset, lease.fence)

    @rule(keys=keys)
    def publish(self, keys: list[bytes | None]) -> None:
        self.model.keys += keys
        self.story.publish(*[0] * len(keys))

    @rule(count=counts, lease_ms=times_ms, taken=st.sampled_from([99, 99, 99, 0, 1]))
    def receive(self, count: int, lease_ms: int, taken: int) -> None:
        """What is chosen is what the policy means; a choice of which only a part is taken costs nothing."""
        self.fill()
        left = self.left()
        chosen = self.choose(count)
        assert self.gate.choose(count, self.story.mono_ms) == chosen
        assert self.gate.any_next(self.story.mono_ms) == bool(chosen)
        if self.policy.key_group_fair:
            for at, offset in enumerate(chosen):
                assert self.model.may_go(offset, chosen[:at], left)
            if len(chosen) < count:
                assert not any(self.model.may_go(offset, chosen, left) for offset in range(self.model.scanned))
        else:
            assert chosen == self.model.choose(count, left)
        assert self.keyed.any_next(self.story.mono_ms) == bool(chosen)
        self.command(Receive(chosen[:taken], self.story.group.cursor, lease_ms, "ann", 0))
        for at in range(len(chosen[:taken])):
            self.model.leased(chosen[at : at + 1])
            self.model.hold_rates()

    @rule(pick=picks)
    def ack(self, pick: int) -> None:
        receipt = self.held(pick)
        if receipt is not None:
            self.command(Ack([receipt]))

    @rule(pick=picks, delay_ms=times_ms)
    def nack(self, pick: int, delay_ms: int) -> None:
        receipt = self.held(pick)
        if receipt is not None:
            self.command(Nack(receipt, delay_ms))

    @rule(pick=picks)
    def reject(self, pick: int) -> None:
        receipt = self.held(pick)
        if receipt is not None:
            self.command(Reject(receipt))

    @rule(pick=picks, count=counts, what=st.sampled_from([Expired, Lost, Bury, Cancel]))
    def never_handed_out(self, pick: int, count: int, what: Any) -> None:
        ready = [offset for offset in range(len(self.model.keys)) if self.model.phase(offset) is Phase.READY]
        if ready:
            at = pick % len(ready)
            if what is Bury:
                self.command(Bury(runs_of(ready[at : at + count]), "EXPIRED"))
            elif what is Cancel:
                self.command(Cancel(ready[at]))
            else:
                self.happen(what(runs_of(ready[at : at + count])))

    @rule(pick=picks)
    def cancel_one_that_waits(self, pick: int) -> None:
        waiting = sorted(self.story.group.waiting)
        if waiting:
            self.command(Cancel(waiting[pick % len(waiting)]))

    @rule(after_ms=times_ms)
    def tick(self, after_ms: int) -> None:
        self.story.mono_ms += after_ms
        self.story.wall_ms += after_ms
        self.command(Tick())

    @rule(pick=picks)
    def seek(self, pick: int) -> None:
        self.command(Seek(pick % (len(self.model.keys) + 1)))
        self.model.rescan()

    @rule(lost=st.sampled_from([0, 0, 1, 3]), gone=st.booleans())
    def restart(self, lost: int, gone: bool) -> None:
        story = self.story
        story.reopen(boot_id=BOOT, end=max(len(story.log) - lost, 0))
        del self.model.keys[len(story.log) :]
        self.model.rescan()
        self.model.restarts += 1
        self.open_gates(new=False)
        self.follow([Opened(story.group.session, BOOT, story.mono_ms, len(story.log))])
        if gone:
            self.command(GiveUp())

    @precondition(lambda self: len(self.model.keys) < 40)
    @rule()
    def all_is_delivered_in_the_end(self) -> None:
        """Whoever waits as long as the gate says, and acks what comes, has seen everything."""
        story, group = self.story, self.story.group
        for _ in range(400):
            self.fill()
            chosen = self.choose(5)
            self.command(Receive(chosen, group.cursor, 10_000, "ann", 0))
            self.model.leased(chosen)
            held = [Receipt(offset, lease.fence) for offset, lease in group.leases.items()]
            if held:
                self.command(Ack(held))
            elif group.waiting:
                self.tick(120)
            else:
                wait_ms = self.gate.next_ms(story.mono_ms)
                assert self.keyed.next_ms(story.mono_ms) == wait_ms
                if wait_ms is None:
                    break
                assert wait_ms > 0
                self.tick(wait_ms)
                assert self.gate.any_next(story.mono_ms), "it was woken too early"
        assert group.ready_count(story.readable) == 0
        assert len(self.gate) == 0

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert self.gate.check() == []
        assert self.fused.check() == []
        assert _told(self.fused) == _told(self.gate)

    @invariant()
    def the_window_is_bounded(self) -> None:
        group = self.story.group
        assert len(self.gate) <= self.policy.key_lookahead + len(group.leases) + len(group.waiting)


def _told(gate: KeyGate) -> tuple[object, ...]:
    """What a gate knows, as values."""
    held = [{offset: key.name for offset, key in table.items()} for table in (gate._ready, gate._leased, gate._waiting)]
    groups = [(name, [*group.offered], group.size, group.leased, group.head) for name, group in gate._groups.items()]
    return held, groups, {turn: [*heads] for turn, heads in gate._line.items()}, gate.scanned, gate._now_ms


TestKeys = KeyMachine.TestCase


@given(
    backlogs=st.lists(st.integers(1, 30), min_size=2, max_size=6),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    acks=st.integers(0, 2**20),
    concurrency=st.sampled_from([None, 20]),
    order=st.booleans(),
)
def test_key_groups_with_a_backlog_are_served_alike(
    backlogs: list[int], counts: list[int], acks: int, concurrency: int | None, order: bool
) -> None:
    """As long as two of them have something to give, neither is more than one message ahead."""
    policy = KeyPolicy(key_group_fair=True, key_group_separator="/", key_group_concurrency=concurrency, key_order=order)
    gate = KeyGate(KeyLimits(policy, now_mono_ms=0, new=True))
    of: dict[int, int] = {}
    for number, backlog in enumerate(backlogs):
        for at in range(backlog):
            offset = len(of)
            of[offset] = number
            gate.feed(offset, b"%d/%d" % (number, at), Phase.READY)
    served: Counter[int] = Counter()
    for turn, count in enumerate(counts):
        for offset in (chosen := gate.choose(count, turn)):
            served[of[offset]] += 1
            open_ = [number for number, backlog in enumerate(backlogs) if served[number] < min(backlog, 20)]
            if len(open_) > 1:
                assert max(served[n] for n in open_) - min(served[n] for n in open_) <= 1
        if chosen:
            gate.note(Leased(runs_of(chosen), 0, 1, 0, 50, turn + 50, 0, "ann"))
        if chosen and acks >> turn & 1 and concurrency is None:
            gate.note(Acked(runs_of(chosen)))
        assert gate.check() == []


@given(st.data())
def test_partitions_share_their_limits(data: st.DataObject) -> None:
    """Never above a limit, whichever partition gives; and nothing that may go stays behind."""
    most, rate = data.draw(st.sampled_from([None, 1, 3])), data.draw(st.sampled_from([None, 5.0]))
    policy = KeyPolicy(
        key_group_separator="/", key_group_concurrency=most, key_group_rate=rate, key_group_burst=2, key_order=True
    )
    limits = KeyLimits(policy, now_mono_ms=0, new=True)
    gates = [KeyGate(limits) for _ in range(3)]
    names: list[list[bytes]] = [[], [], []]
    leased: list[set[int]] = [set(), set(), set()]
    settled: list[set[int]] = [set(), set(), set()]
    now_ms = 0
    for _ in range(data.draw(st.integers(1, 25))):
        at = data.draw(st.integers(0, 2))
        gate, now_ms = gates[at], now_ms + data.draw(st.sampled_from([0, 0, 50, 200]))
        what = data.draw(st.sampled_from(["feed", "feed", "lease", "lease", "ack", "clear"]))
        if what == "feed":
            names[at].append(data.draw(st.sampled_from([b"x", b"y"])))
            gate.feed(len(names[at]) - 1, b"%s/%d" % (names[at][-1], len(names[at]) % 3), Phase.READY)
        elif what == "lease":
            chosen = gate.choose(data.draw(st.integers(1, 3)), now_ms)
            if chosen:
                gate.note(Leased(runs_of(chosen), 0, 1, 0, 50, now_ms + 50, 0, "ann"))
            leased[at].update(chosen)
        elif what == "ack" and leased[at]:
            offset = data.draw(st.sampled_from(sorted(leased[at])))
            leased[at].remove(offset)
            settled[at].add(offset)
            gate.note(Acked(runs_of([offset])))
        elif what == "clear":
            gate.clear()
            for offset, name in enumerate(names[at]):
                if offset not in settled[at]:
                    phase = Phase.LEASED if offset in leased[at] else Phase.READY
                    gate.feed(offset, b"%s/%d" % (name, (offset + 1) % 3), phase)
        held = Counter(names[number][offset] for number in range(3) for offset in leased[number])
        assert not policy.limited or limits._leased == held
        assert most is None or not held or max(held.values()) <= most
        for number, each in enumerate(gates):
            assert each.check() == []
            each.choose(1, now_ms)
            for offset, name in enumerate(names[number]):
                same = [other for other in range(offset % 3, len(names[number]), 3) if names[number][other] == name]
                first = [other for other in same if other not in settled[number]][:1] == [offset]
                idle = not leased[number].intersection(same)
                if first and idle and limits.left(name, now_ms) > 0:
                    assert each.any_next(now_ms)
