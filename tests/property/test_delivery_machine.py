"""Any order of commands, publishes, clock moves, restarts, lost tails and snapshots: the promises hold.

A model that knows only phases, one for each message, goes along; choosing is held to its plain meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.delivery.choose import PriorityTurns, choose, choose_one
from holdfast.delivery.events import (
    MOVES,
    NO_SESSION,
    Ack,
    Acked,
    Buried,
    Bury,
    Cancel,
    Command,
    DeadStored,
    Event,
    Expired,
    Extend,
    Extended,
    GiveUp,
    Leased,
    Lost,
    Nack,
    Opened,
    Phase,
    Receipt,
    Receive,
    Reject,
    Released,
    Replayed,
    Returned,
    Save,
    Seek,
    Skipped,
    Tick,
    each,
    encode_event,
    next_fence,
    run,
    runs_of,
)
from holdfast.delivery.group import Group, Lease
from holdfast.delivery.image import check, group_of, image_of
from holdfast.errors import Conflict, LeaseLost
from holdfast.settings import QueueSettings
from tests.unit.stories import BOOT, Story, plain

MAX_ATTEMPTS = 3
POLICY = QueueSettings(backoff_ms=40, backoff_max_ms=100, max_attempts=MAX_ATTEMPTS)
WEIGHTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

levels = st.lists(st.sampled_from([0, 0, 0, 1, 5, 9]), min_size=1, max_size=6)
counts = st.integers(min_value=1, max_value=5)
times_ms = st.integers(min_value=0, max_value=120)
picks = st.integers(min_value=0, max_value=2**20)


class Model:
    """The phase of each message, and what the clocks will do; in the plainest way."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.phases: list[Phase] = []
        self.until_ms: dict[int, int] = {}
        self.lease_ms: dict[int, int] = {}
        self.due_ms: dict[int, int] = {}
        self.attempts: dict[int, int] = {}
        self.boot_id = 0

    def phase(self, offset: int) -> Phase:
        return self.phases[offset - self.start]

    def all_in(self, *phases: Phase) -> list[int]:
        return [offset for offset, phase in enumerate(self.phases, self.start) if phase in phases]

    def apply(self, event: Event) -> None:
        for offset in self._touched(event):
            after = MOVES[self.phase(offset), type(event)]
            self.phases[offset - self.start] = after
            if after is not Phase.LEASED:
                self.until_ms.pop(offset, None)
            if after is not Phase.DELAYED:
                self.due_ms.pop(offset, None)
            if after is Phase.DONE or isinstance(event, Replayed):
                self.attempts.pop(offset, None)
            self._note(event, offset)
        if isinstance(event, Replayed):
            held = set(self.all_in(Phase.LEASED, Phase.DEAD))
            self.attempts = {o: n for o, n in self.attempts.items() if o < event.to or o in held}
        if isinstance(event, Opened):
            self._open(event)

    def _touched(self, event: Event) -> Sequence[int]:
        if isinstance(event, Opened):
            return []
        if isinstance(event, Skipped):
            return [offset for offset in self.all_in(Phase.READY, Phase.DELAYED) if offset < event.to]
        if isinstance(event, Replayed):
            return [offset for offset in self.all_in(Phase.DONE, Phase.DELAYED) if offset >= event.to]
        runs = getattr(event, "runs", None)
        return [event.offset] if runs is None else list(each(runs))  # type: ignore[union-attr]

    def _note(self, event: Event, offset: int) -> None:
        if isinstance(event, Leased | Extended):
            self.until_ms[offset], self.lease_ms[offset] = event.until_ms, event.lease_ms
        elif isinstance(event, Returned):
            self.due_ms[offset] = event.due_ms
            self.attempts[offset] = self.attempts.get(offset, 0) + event.counted

    def _open(self, event: Opened) -> None:
        del self.phases[max(event.end - self.start, 0) :]
        for table in (self.until_ms, self.due_ms, self.attempts):
            for offset in [offset for offset in table if offset >= event.end]:
                del table[offset]
        if event.boot_id != self.boot_id:
            self.until_ms = {offset: event.mono_ms + self.lease_ms[offset] for offset in self.until_ms}
        self.boot_id = event.boot_id

    def choose(self, count: int, story: Story, aged_below: int, turns: PriorityTurns | None) -> list[int]:
        """One after the other: the oldest that is aged, else the oldest of the most urgent."""
        ready = [offset for offset in self.all_in(Phase.READY) if offset < story.readable]
        chosen: list[int] = []
        while ready and len(chosen) < count:
            if turns is not None:
                level = turns.next(sorted({story.log[offset] for offset in ready}))
                best = min(offset for offset in ready if story.log[offset] == level)
            elif ready[0] < aged_below:
                best = ready[0]
            else:
                best = min(ready, key=lambda offset: (-story.log[offset], offset))
            ready.remove(best)
            chosen.append(best)
        return chosen


class DeliveryMachine(RuleBasedStateMachine):
    """Commands in any order; `hold` is asked after each."""

    @initialize(start=st.sampled_from([0, 0, 3]), some=st.integers(4, 12), urgent=st.booleans(), fair=st.booleans())
    def begin(self, start: int, some: int, urgent: bool, fair: bool) -> None:
        self.urgent = urgent
        self.turns = (PriorityTurns(WEIGHTS), PriorityTurns(WEIGHTS)) if fair else None
        self.story = Story(start=start, policy=POLICY)
        self.model = Model(start)
        self.model.boot_id = BOOT
        self.boot_id = BOOT
        self.receipts: list[Receipt] = []
        self.fence = 0
        self.publish([0] * some, True)

    def command(self, command: Command) -> list[Event]:
        return self.follow(lambda: self.story.when(command))

    def happen(self, event: Event) -> None:
        self.follow(lambda: self.story.happen(event) or [event])

    def follow(self, act: Callable[[], list[Event]]) -> list[Event]:
        was_done = set(self.model.all_in(Phase.DONE))
        events = act()
        for event in events:
            self.model.apply(event)
        if not any(isinstance(event, Replayed | Opened) for event in events):
            assert was_done <= set(self.model.all_in(Phase.DONE)), "done came back without a seek"
        return events

    def held(self) -> list[Receipt]:
        leases = self.story.group.leases
        return [receipt for receipt in self.receipts if is_held(leases, receipt)]

    def pick(self, pick: int) -> Receipt | None:
        held = self.held()
        return held[pick % len(held)] if held else None

    # What happens to the log and the clocks.

    @rule(levels=levels, readable=st.booleans())
    def publish(self, levels: list[int], readable: bool) -> None:
        levels = levels if self.urgent else [0] * len(levels)
        self.story.publish(*levels, readable=readable)
        self.model.phases += [Phase.READY] * len(levels)

    @precondition(lambda self: self.urgent)
    @rule(level=st.integers(1, 9), readable=st.booleans())
    def publish_fused(self, level: int, readable: bool) -> None:
        """The hot path of a message with a priority."""
        story, offset = self.story, len(self.story.log)
        plainly = group_of(image_of(story.group))
        plainly.arrive(offset, [level])
        story.log.append(level)
        story.group.arrive_one(offset, level)
        assert_alike(story.group, plainly)
        if readable:
            story.readable = len(story.log)
        self.model.phases.append(Phase.READY)

    @precondition(lambda self: self.story.readable < len(self.story.log))
    @rule()
    def become_readable(self) -> None:
        self.story.readable = len(self.story.log)

    @rule(wall_ms=times_ms, mono_ms=times_ms)
    def tick(self, wall_ms: int, mono_ms: int) -> None:
        story, model = self.story, self.model
        story.wall_ms += wall_ms
        story.mono_ms += mono_ms
        ended = {offset for offset, until_ms in model.until_ms.items() if until_ms <= story.mono_ms}
        due = {offset for offset, due_ms in model.due_ms.items() if due_ms <= story.wall_ms}
        events = self.command(Tick())
        assert {event.offset for event in events if isinstance(event, Returned | Buried)} == ended
        released = [offset for event in events if isinstance(event, Released) for offset in each(event.runs)]
        assert len(released) == len(set(released))
        assert set(released) - ended == due
        assert self.command(Tick()) == [], "one tick does all there is to do"

    @rule(back_ms=st.integers(min_value=1, max_value=300))
    def wall_clock_is_put_back(self, back_ms: int) -> None:
        self.story.wall_ms -= back_ms

    # Commands.

    @rule(count=counts, lease_ms=times_ms, mine=st.booleans(), aged=st.sampled_from([0, 0, 2, 5, 99]))
    def receive(self, count: int, lease_ms: int, mine: bool, aged: int) -> None:
        story = self.story
        turns, reference = self.turns or (None, None)
        before = plain(image_of(story.group))
        chosen = choose(story.group, count, story.readable, aged_below=aged, turns=turns)
        if not story.group.lanes.filled and not story.group.ahead:
            aged, reference = 0, None  # there is one lane only, and nobody to share the turns with
        assert list(chosen.offsets) == self.model.choose(count, story, aged, reference)
        assert plain(image_of(story.group)) == before, "choosing changes nothing"
        session = story.group.session if mine else NO_SESSION
        events = self.command(Receive(chosen.offsets, chosen.cursor, lease_ms, "ann", session))
        assert bool(events) == bool(chosen.offsets)
        self.receipts += [Receipt(offset, story.group.fence) for offset in chosen.offsets]

    @rule(count=counts, pick=picks)
    def receive_not_all_that_was_chosen(self, count: int, pick: int) -> None:
        """Some of them could not be read just then: they must come again."""
        chosen = choose(self.story.group, count, self.story.readable)
        offsets = [offset for at, offset in enumerate(chosen.offsets) if not pick >> at & 1]
        self.command(Receive(offsets, chosen.cursor, 50, "ann"))
        self.receipts += [Receipt(offset, self.story.group.fence) for offset in offsets]

    @rule(lease_ms=times_ms, aged=st.sampled_from([0, 0, 2, 5, 99]))
    def receive_fused(self, lease_ms: int, aged: int) -> None:
        """The hot path chooses the same message, writes the same event, and takes a short cut into the state."""
        story, group = self.story, self.story.group
        chosen = choose(group, 1, story.readable, aged_below=aged)
        offset, cursor = choose_one(group, story.readable, aged)
        assert list(chosen.offsets) == ([] if offset < 0 else [offset])
        if offset < 0:
            return
        assert cursor == chosen.cursor
        fence, until_ms = next_fence(group.fence), story.mono_ms + lease_ms
        event = Leased(run(offset), cursor, fence, 0, lease_ms, until_ms, story.wall_ms, "bob")
        plainly = group_of(image_of(group))
        plainly.apply(event)
        story.journal.append(encode_event(event))
        group.lease_one(offset, cursor, Lease(fence, 0, lease_ms, until_ms, story.wall_ms, "bob"))
        assert_alike(group, plainly)
        self.model.apply(event)
        self.receipts.append(Receipt(offset, fence))

    @precondition(lambda self: self.story.group.leases)
    @rule(pick=picks)
    def ack_fused(self, pick: int) -> None:
        receipt = self.pick(pick)
        if receipt is not None:
            event = Acked(run(receipt.offset))
            plainly = group_of(image_of(self.story.group))
            plainly.apply(event)
            self.story.journal.append(encode_event(event))
            self.story.group.ack_one(receipt.offset)
            assert_alike(self.story.group, plainly)
            self.model.apply(event)

    @precondition(lambda self: self.story.group.leases)
    @rule(picks=st.sets(picks, min_size=1, max_size=4))
    def ack(self, picks: set[int]) -> None:
        receipts = list({receipt for pick in picks if (receipt := self.pick(pick))})
        if receipts:
            assert self.command(Ack(receipts)) == [Acked(runs_of(receipt.offset for receipt in receipts))]

    @precondition(lambda self: self.story.group.leases)
    @rule(pick=picks, delay_ms=st.none() | times_ms, counted=st.booleans())
    def nack(self, pick: int, delay_ms: int | None, counted: bool) -> None:
        receipt = self.pick(pick)
        if receipt is not None:
            self.command(Nack(receipt, delay_ms, "oh", counted=counted))

    @precondition(lambda self: self.story.group.leases)
    @rule(pick=picks)
    def reject(self, pick: int) -> None:
        receipt = self.pick(pick)
        if receipt is not None:
            self.command(Reject(receipt, "never"))
            assert self.model.phase(receipt.offset) is Phase.DEAD

    @precondition(lambda self: self.story.group.leases)
    @rule(picks=st.sets(picks, min_size=1, max_size=3), lease_ms=times_ms)
    def extend(self, picks: set[int], lease_ms: int) -> None:
        receipts = list({receipt for pick in picks if (receipt := self.pick(pick))})
        if receipts:
            self.command(Extend(receipts, lease_ms))

    @precondition(lambda self: self.story.group.leases)
    @rule(pick=picks, document=st.none() | st.binary(max_size=3), right=st.booleans())
    def save(self, pick: int, document: bytes | None, right: bool) -> None:
        receipt = self.pick(pick)
        if receipt is None:
            return
        known = self.story.group.documents.get(receipt.offset)
        expected = 0 if known is None else known.version
        if right:
            self.command(Save(receipt, expected, document))
        else:
            with pytest.raises(Conflict):
                self.command(Save(receipt, expected + 1, document))

    @precondition(lambda self: len(self.receipts) > len(self.story.group.leases))
    @rule(pick=picks)
    def a_stale_receipt_changes_nothing(self, pick: int) -> None:
        stale = [receipt for receipt in self.receipts if not is_held(self.story.group.leases, receipt)]
        if not stale:
            return
        receipt = stale[pick % len(stale)]
        before = plain(image_of(self.story.group))
        commands: list[Command] = [
            Ack([*self.held(), receipt]),
            Nack(receipt, 0),
            Reject(receipt),
            Extend([*self.held(), receipt], 10),
            Save(receipt, 0, b"x"),
        ]
        for command in commands:
            with pytest.raises(LeaseLost):
                self.command(command)
        assert plain(image_of(self.story.group)) == before

    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        if self.model.phases:
            offset = self.model.start + pick % len(self.model.phases)
            free = self.model.phase(offset) in (Phase.READY, Phase.DELAYED)
            assert bool(self.command(Cancel(offset))) == free

    @rule(pick=picks, count=counts, what=st.sampled_from([Expired, Lost, Bury]))
    def never_handed_out(self, pick: int, count: int, what: type) -> None:
        ready = self.model.all_in(Phase.READY)
        if ready:
            at = pick % len(ready)
            offsets = ready[at : at + count]
            if what is Bury:
                self.command(Bury(runs_of(offsets), "EXPIRED"))
            else:
                self.happen(what(runs_of(offsets)))

    @precondition(lambda self: self.story.group.burials)
    @rule(count=counts)
    def store_dead(self, count: int) -> None:
        dead = self.model.all_in(Phase.DEAD)[:count]
        if dead:
            self.happen(DeadStored(runs_of(dead)))

    @rule(pick=picks)
    def seek(self, pick: int) -> None:
        to = self.story.start + pick % (len(self.model.phases) + 1)
        held = set(self.model.all_in(Phase.LEASED, Phase.DEAD))
        self.command(Seek(to))
        for offset in range(self.story.start, len(self.story.log)):
            if offset not in held:
                assert self.model.phase(offset) is (Phase.DONE if offset < to else Phase.READY)

    @precondition(lambda self: self.story.group.leases)
    @rule()
    def give_up(self) -> None:
        leases = dict(self.story.group.leases)
        gone = {o for o, lease in leases.items() if lease.session not in (NO_SESSION, self.story.group.session)}
        self.command(GiveUp())
        assert set(self.story.group.leases) == set(leases) - gone

    # What happens to the owner.

    @rule()
    def snapshot(self) -> None:
        self.story.snapshot()

    @rule(reboot=st.booleans(), lost=st.sampled_from([0, 0, 0, 1, 2, 5, 99]), uptime_ms=times_ms)
    def reopen(self, reboot: bool, lost: int, uptime_ms: int) -> None:
        story = self.story
        if reboot:
            self.boot_id += 1
            story.mono_ms = uptime_ms
        end = max(story.start, len(story.log) - lost)
        self.follow(lambda: self._reopen(end))

    def _reopen(self, end: int) -> list[Event]:
        story = self.story
        story.reopen(boot_id=self.boot_id, end=end)
        return [Opened(story.group.session, self.boot_id, story.mono_ms, end)]

    @rule(pick=picks, count=counts)
    def a_damaged_journal_loses_no_message(self, pick: int, count: int) -> None:
        """Whatever it says is done, by events that were seen; all else comes, or is held by somebody."""
        story = self.story
        first = pick % len(story.journal)
        group = story.replayed_without(first, first + count)
        assert check(group) == []
        ready = set(choose(group, 10**6, len(story.log)).offsets)
        for offset in range(story.start, len(story.log)):
            assert (group.phase(offset) is Phase.READY) == (offset in ready)

    # What holds after every step.

    @invariant()
    def nothing_is_wrong_and_replay_equals_live(self) -> None:
        self.story.hold()

    @invariant()
    def each_message_is_in_the_phase_it_should_be_in(self) -> None:
        group, model = self.story.group, self.model
        assert len(model.phases) == len(self.story.log) - model.start
        assert [group.phase(offset) for offset in range(model.start, len(self.story.log))] == model.phases
        assert group.ready_count(len(self.story.log)) == len(model.all_in(Phase.READY))
        assert {offset: lease.until_ms for offset, lease in group.leases.items()} == model.until_ms
        assert group.waiting == model.due_ms

    @invariant()
    def attempts_are_counted_and_bounded(self) -> None:
        for offset in self.model.all_in(Phase.READY, Phase.LEASED, Phase.DELAYED):
            assert self.story.group.attempts(offset) == self.model.attempts.get(offset, 0) < MAX_ATTEMPTS

    @invariant()
    def fences_only_rise(self) -> None:
        fences = [receipt.fence for receipt in self.receipts]
        assert fences == sorted(fences)
        assert len(set(self.receipts)) == len(self.receipts)
        assert self.story.group.fence >= max(self.fence, *fences, 0)
        self.fence = self.story.group.fence

    @invariant()
    def every_ready_message_would_come(self) -> None:
        chosen = choose(self.story.group, 10**6, self.story.readable)
        assert list(chosen.offsets) == self.model.choose(10**6, self.story, 0, None)


def assert_alike(fused: Group, plainly: Group) -> None:
    assert plain(image_of(fused)) == plain(image_of(plainly))
    assert fused.ahead == plainly.ahead
    assert (fused.lanes.used, fused.lanes.filled) == (plainly.lanes.used, plainly.lanes.filled)


def is_held(leases: dict[int, Lease], receipt: Receipt) -> bool:
    lease = leases.get(receipt.offset)
    return lease is not None and lease.fence == receipt.fence


TestDelivery = DeliveryMachine.TestCase


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_long_histories(seed, scale):
    """The same rules, at random and many of them: what Hypothesis, which likes short histories, seldom reaches."""
    rng = Random(seed)
    for _ in range(scale(3, 300)):
        machine = DeliveryMachine()
        machine.begin(rng.choice([0, 3]), 8, rng.random() < 0.6, rng.random() < 0.3)
        for _ in range(scale(80, 200)):
            take_a_step(machine, rng)
            for name in INVARIANTS:
                getattr(machine, name)()


INVARIANTS = [name for name, part in vars(DeliveryMachine).items() if hasattr(part, "hypothesis_stateful_invariant")]


def take_a_step(machine: DeliveryMachine, rng: Random) -> None:
    pick, ms, yes = rng.randrange(2**20), rng.choice([0, 1, 20, 40, 63, 64, 120]), rng.random() < 0.5
    some = {rng.randrange(2**20) for _ in range(rng.randint(1, 4))}
    count = rng.randint(1, 5)
    steps: list[tuple[int, Callable[[], object]]] = [
        (4, lambda: machine.publish([rng.choice([0, 0, 1, 5, 9]) for _ in range(count)], rng.random() < 0.8)),
        (2, lambda: machine.publish_fused(rng.randint(1, 9), yes) if machine.urgent else None),
        (1, machine.become_readable),
        (4, lambda: machine.tick(ms, rng.choice([ms, 0, 50]))),
        (1, lambda: machine.wall_clock_is_put_back(1 + ms)),
        (6, lambda: machine.receive(count, ms, yes, rng.choice([0, 0, 5, 20, 999]))),
        (2, lambda: machine.receive_not_all_that_was_chosen(count, pick)),
        (4, lambda: machine.receive_fused(ms, rng.choice([0, 0, pick % 9]))),
        (3, lambda: machine.ack_fused(pick)),
        (3, lambda: machine.ack(some)),
        (4, lambda: machine.nack(pick, rng.choice([None, 0, ms]), yes)),
        (1, lambda: machine.reject(pick)),
        (2, lambda: machine.extend(some, ms)),
        (1, lambda: machine.save(pick, rng.choice([None, b"x"]), yes)),
        (1, lambda: machine.a_stale_receipt_changes_nothing(pick)),
        (1, lambda: machine.cancel(pick)),
        (2, lambda: machine.never_handed_out(pick, count, rng.choice([Expired, Lost, Bury]))),
        (2, lambda: machine.store_dead(count)),
        (1, lambda: machine.seek(pick)),
        (1, machine.give_up),
        (1, machine.snapshot),
        (1, lambda: machine.reopen(yes, rng.choice([0, 0, 1, 3]), ms)),
        (1, lambda: machine.a_damaged_journal_loses_no_message(pick, count)),
    ]
    weights = [weight for weight, _ in steps]
    rng.choices([step for _, step in steps], weights)[0]()
