"""All interleavings of two and three owners of one chain, on small cases; and planted mistakes, which must be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from holdfast.env import ManualClock
from holdfast.env.chain.chain import Chain, OwnershipLost, Position, key_of, walk
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
