"""All interleavings of two and three owners of one chain, on small cases; and planted mistakes, which must be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from holdfast.env import ManualClock
from holdfast.env.chain.chain import Chain, ChainTimes, OwnershipLost, Position, key_of, walk
from holdfast.env.chain.engines import MemoryStore
from holdfast.env.chain.format import BadObject, ObjectKind, replay

Action = tuple[int, str, int]  # who, what, which object


@dataclass
class Rules:
    """How owners behave; the defaults are right, each other value is a mistake."""

    skips_behind_fence: bool = True
    answers_in_order: bool = True
    fences: bool = True
    window_beyond: int = 0  # how many objects more than allowed are in flight
    store_keeps_condition: bool = True


class _CarelessStore(MemoryStore):
    def create(self, key: str, content: bytes) -> bool:
        self.remove(key)
        return super().create(key, content)


class _Names:
    """What a replayed object holds: the names of its records."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def make(self, path: str) -> None:
        self.found.append(path)

    def __getattr__(self, name: str) -> Callable[..., None]:
        def refuse(*_: object) -> None:
            raise AssertionError(name)

        return refuse


@dataclass
class OneOwner:
    number: int
    records: int
    window: int
    tail: Position | None = None
    chain: Chain | None = None
    taken: dict[int, str] = field(default_factory=dict)  # object -> its record
    in_flight: dict[int, bytes] = field(default_factory=dict)
    answered: list[str] = field(default_factory=list)
    is_over: bool = False

    def key(self) -> tuple[object, ...]:
        chain = self.chain
        state = None if chain is None else (chain.next_number, chain.committed, chain.failure is None, chain.epoch)
        return (self.tail, state, tuple(self.taken), tuple(self.in_flight), tuple(self.answered), self.is_over)


class Run:
    """One interleaving, step by step."""

    def __init__(self, owners: int, records: int, window: int, rules: Rules) -> None:
        self.rules = rules
        self.store: MemoryStore = MemoryStore() if rules.store_keeps_condition else _CarelessStore()
        self.owners = [OneOwner(i, records, window) for i in range(owners)]

    def choices(self) -> Iterator[Action]:
        for owner in self.owners:
            i, chain = owner.number, owner.chain
            if owner.is_over:
                continue
            if chain is None:
                yield (i, "walk", 0) if owner.tail is None else (i, "fence", 0)
                continue
            room = chain.next_number < chain.committed + chain.window + self.rules.window_beyond
            if len(owner.taken) < owner.records and room:
                yield i, "take", 0
            for number in owner.in_flight:
                yield i, "put", number
                yield i, "put unanswered", number

    def do(self, action: Action) -> None:
        i, what, number = action
        owner = self.owners[i]
        if what == "walk":
            owner.tail = self.tail()
        elif what == "fence":
            self._fence(owner)
        elif what == "take":
            self._take(owner)
        else:
            self._put(owner, number, answered=what == "put")

    def tail(self) -> Position:
        at = Position()
        for header, _ in walk(self.store, "", at, at_once=1):
            at = at.after(header)
        return at

    def committed(self) -> list[str]:
        names = _Names()
        for header, payload in walk(self.store, "", Position(), at_once=1):
            if header.kind == ObjectKind.DATA:
                replay(payload, names)  # type: ignore[arg-type]
        return names.found

    def check(self) -> None:
        there = self.committed()
        assert len(there) == len(set(there)), f"stored twice: {there}"
        for owner in self.owners:
            kept = [name for name in there if name in owner.answered]
            assert kept == owner.answered, f"answered {owner.answered}, and the chain has {there}"

    def _fence(self, owner: OneOwner) -> None:
        at, rules = owner.tail, self.rules
        assert at is not None
        writer = bytes([owner.number]) * 16
        if not rules.skips_behind_fence:
            at = Position(number=at.number, epoch=at.epoch, window=1)
        if not rules.fences and at.epoch:
            owner.chain = Chain(self.store, "", ManualClock(), at=at, writer=writer)
            return
        owner.chain = Chain.take_over(
            self.store, "", ManualClock(), at=at, writer=writer, window=owner.window, note=writer
        )
        owner.tail = None

    def _take(self, owner: OneOwner) -> None:
        chain = owner.chain
        assert chain is not None
        name = f"{owner.number}-{len(owner.taken)}"
        chain.batch.make(name)
        number, content = chain._take(ObjectKind.DATA)
        owner.taken[number] = name
        owner.in_flight[number] = content

    def _put(self, owner: OneOwner, number: int, *, answered: bool) -> None:
        chain = owner.chain
        assert chain is not None
        content = owner.in_flight.pop(number)
        if not answered:  # the owner is gone by the time it arrives
            self.store.create(key_of("", number), content)
            owner.is_over = True
            return
        try:
            chain._put(number, content)
        except OwnershipLost:
            owner.is_over = True
            return
        reached = number + 1 if not self.rules.answers_in_order else chain.committed
        names = [name for n, name in owner.taken.items() if n < reached and n not in owner.in_flight]
        owner.answered += [name for name in names if name not in owner.answered]
        if self.rules.answers_in_order:
            owner.answered.sort()

    def key(self) -> tuple[object, ...]:
        objects = tuple((key, self.store.read(key)) for key in self.store.keys(""))
        return (objects, *(owner.key() for owner in self.owners))


def explore(owners: int, records: int, window: int, rules: Rules) -> int:
    """Visit every state that some interleaving leads to; returns how many there are."""
    seen: set[object] = set()
    paths: list[tuple[Action, ...]] = [()]
    while paths:
        path = paths.pop()
        run = Run(owners, records, window, rules)
        for action in path:
            run.do(action)
        key = run.key()
        if key in seen:
            continue
        seen.add(key)
        try:
            run.check()
        except AssertionError as error:
            error.add_note(" > ".join(f"{who} {what} {number}" for who, what, number in path))
            raise
        paths += [(*path, action) for action in run.choices()]
    return len(seen)


@pytest.mark.slow
def test_two_owners_lose_and_double_nothing_in_any_interleaving(scale):
    assert explore(2, scale(4, 5), 3, Rules()) > 5_000


@pytest.mark.slow
def test_three_owners_lose_and_double_nothing_in_any_interleaving(scale):
    assert explore(3, scale(1, 2), 2, Rules()) > 1_000


@pytest.mark.parametrize(
    "mistake",
    [
        Rules(skips_behind_fence=False),
        Rules(answers_in_order=False),
        Rules(fences=False),
        Rules(window_beyond=1),
        Rules(store_keeps_condition=False),
    ],
    ids=["no skip behind the fence", "answers out of order", "no fence", "window off by one", "condition ignored"],
)
def test_a_planted_mistake_is_found(mistake):
    with pytest.raises((AssertionError, BadObject)):
        explore(2, 3, 2, mistake)


# Leases in time. An owner hands out only while it is current; its successor begins only after the lease. So two owners
# are never current at once, however long what they send is on its way, and however long they are stopped.

STEP_NS = 1_000_000_000
LEASE_STEPS = 3
RENEWALS = 2  # of each owner


@dataclass
class LeaseRules:
    """How leases are kept; the defaults are right, each other value is a mistake."""

    renews_if_absent: bool = True  # otherwise over whatever is there, as a heartbeat object would be
    counts_from_sending: bool = True  # otherwise from the answer
    challenger_waits: bool = True


class _OwnClock(ManualClock):
    """What an owner reads: the time of all, or when it sent what is being answered."""

    def __init__(self, times: LeaseRun) -> None:
        super().__init__()
        self._times = times
        self.sent_ns: int | None = None

    def monotonic_ns(self) -> int:
        return self._times.now_ns if self.sent_ns is None else self.sent_ns

    def now_ns(self) -> int:
        return self.monotonic_ns()


class _OwnStore:
    """The store as one owner sees it while a call of its own is answered."""

    def __init__(self, objects: MemoryStore, rules: LeaseRules, clock: _OwnClock) -> None:
        self.name, self.read, self.keys = objects.name, objects.read, objects.keys
        self.remove, self.close = objects.remove, objects.close
        self._objects, self._rules, self._clock = objects, rules, clock

    def create(self, key: str, content: bytes) -> bool:
        made = self._objects.create(key, content)
        self._clock.sent_ns = None  # the answer is there now
        return made

    def arrive(self, key: str, content: bytes) -> None:
        """Let a renewal take effect; its owner does not know yet."""
        if not self._rules.renews_if_absent:
            self._objects.remove(key)
        self._objects.create(key, content)


@dataclass
class LeaseOwner:
    clock: _OwnClock
    store: _OwnStore
    chain: Chain | None = None
    tail: Position | None = None
    saw_ns: int = 0
    sent: tuple[int, bytes, int] | None = None  # a renewal on its way: number, bytes, when
    has_arrived: bool = False
    renewals: int = 0


class LeaseRun:
    """Owners that renew their leases and replace each other, step by step."""

    def __init__(self, owners: int, rules: LeaseRules) -> None:
        self.rules, self.now_ns = rules, 0
        self.objects = MemoryStore()
        clocks = [_OwnClock(self) for _ in range(owners)]
        self.owners = [LeaseOwner(clock, _OwnStore(self.objects, rules, clock)) for clock in clocks]

    def choices(self, last: int) -> Iterator[Action]:
        if self.now_ns < last * STEP_NS:
            yield -1, "time passes", 0
        for i, owner in enumerate(self.owners):
            if owner.chain is None:
                tail = self.tail()
                if owner.tail != tail:
                    yield i, "look", 0
                elif self._may_fence(owner):
                    yield i, "fence", 0
            elif owner.chain.failure is None:
                if owner.sent is not None:
                    yield i, "answer" if owner.has_arrived else "arrive", 0
                elif owner.renewals < RENEWALS:
                    yield i, "send", 0

    def do(self, action: Action) -> None:
        i, what, _ = action
        if what == "time passes":
            self.now_ns += STEP_NS
            return
        owner = self.owners[i]
        if what == "look":
            owner.tail, owner.saw_ns = self.tail(), self.now_ns
        elif what == "fence":
            times = ChainTimes(lease_s=LEASE_STEPS, slowest_s=1000)
            writer = bytes([i + 1]) * 16
            owner.chain = Chain.take_over(
                owner.store, "", owner.clock, at=owner.tail or Position(), writer=writer, window=1, times=times
            )
            owner.tail = None
        elif what == "send":
            assert owner.chain is not None
            owner.sent = (*owner.chain._take(ObjectKind.NOOP), self.now_ns)
            owner.renewals += 1
        elif what == "arrive":
            assert owner.sent is not None
            owner.has_arrived = True
            owner.store.arrive(key_of("", owner.sent[0]), owner.sent[1])
        else:
            self._answer(owner)

    def _answer(self, owner: LeaseOwner) -> None:
        assert owner.sent is not None
        assert owner.chain is not None
        number, content, sent_ns = owner.sent
        owner.sent, owner.has_arrived = None, False
        owner.clock.sent_ns = sent_ns if self.rules.counts_from_sending else None
        try:
            owner.chain._put(number, content)
        except OwnershipLost:
            return
        finally:
            owner.clock.sent_ns = None

    def tail(self) -> Position:
        at = Position()
        try:
            for header, _ in walk(self.objects, "", at, at_once=1):
                at = at.after(header)
        except BadObject:  # an object of one who is not the owner: readers stop there
            pass
        return at

    def _may_fence(self, owner: LeaseOwner) -> bool:
        if owner.tail is not None and owner.tail.number == 0:
            return True
        waited = self.now_ns - owner.saw_ns >= LEASE_STEPS * STEP_NS
        return waited or not self.rules.challenger_waits

    def check(self) -> None:
        current = [i for i, owner in enumerate(self.owners) if owner.chain is not None and self._hands_out(owner.chain)]
        assert len(current) <= 1, f"at {self.now_ns // STEP_NS}, all of {current} hand out"

    def _hands_out(self, chain: Chain) -> bool:
        return chain.failure is None and chain.is_current()

    def key(self) -> tuple[object, ...]:
        objects = tuple((key, self.objects.read(key)) for key in self.objects.keys(""))
        states = tuple(
            (owner.tail, owner.saw_ns, owner.sent, owner.has_arrived, owner.renewals)
            + (
                ()
                if owner.chain is None
                else (owner.chain._confirmed_ns, owner.chain.committed, owner.chain._failure is None)
            )
            for owner in self.owners
        )
        return self.now_ns, objects, states


def explore_leases(owners: int, last: int, rules: LeaseRules) -> int:
    """Visit every state up to a time; returns how many there are."""
    seen: set[object] = set()
    paths: list[tuple[Action, ...]] = [()]
    while paths:
        path = paths.pop()
        run = LeaseRun(owners, rules)
        for action in path:
            run.do(action)
        key = run.key()
        if key in seen:
            continue
        seen.add(key)
        try:
            run.check()
        except AssertionError as error:
            error.add_note(" > ".join(f"{who} {what}" for who, what, _ in path))
            raise
        paths += [(*path, action) for action in run.choices(last)]
    return len(seen)


@pytest.mark.slow
def test_two_owners_never_hand_out_at_the_same_time(scale):
    assert explore_leases(2, scale(4, 6), LeaseRules()) > 5_000


@pytest.mark.slow
def test_three_owners_never_hand_out_at_the_same_time(long):
    if not long:
        pytest.skip("takes minutes: --long")
    assert explore_leases(3, 3, LeaseRules()) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [
        LeaseRules(renews_if_absent=False),
        LeaseRules(counts_from_sending=False),
        LeaseRules(challenger_waits=False),
    ],
    ids=["unconditional renewal", "counted from the answer", "no wait"],
)
def test_a_mistake_with_leases_is_found(mistake):
    with pytest.raises(AssertionError, match="hand out"):
        explore_leases(2, 6, mistake)
