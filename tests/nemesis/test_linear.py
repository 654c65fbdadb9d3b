"""The model checker itself: histories that are known to be good or bad, and small ones compared with all orders."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.nemesis.history import Event, Result
from tests.nemesis.linear import NEVER, Timed, by_key, linearize
from tests.nemesis.models import Held, step, tells

# A register: ("write", value), ("read", value), ("swap", old, new)


def register(state: int, call: tuple) -> Iterator[int]:
    match call:
        case ("write", value):
            yield value
        case ("read", value) if value == state:
            yield state
        case ("swap", old, new) if old == state:
            yield new


def good(*calls: tuple[tuple, float, float]) -> bool:
    return linearize([Timed(*call) for call in calls], 0, register).good


def test_calls_that_overlap_may_have_happened_in_any_order():
    assert good((("write", 1), 0, 10), (("read", 0), 1, 2), (("read", 1), 3, 4))
    assert good((("write", 1), 0, 10), (("write", 2), 0, 10), (("read", 1), 11, 12))
    assert good()


def test_a_read_that_goes_back_is_found():
    assert not good((("write", 1), 0, 10), (("read", 1), 1, 2), (("read", 0), 3, 4))


def test_a_write_that_is_over_is_seen_by_all_later_reads():
    assert not good((("write", 1), 0, 1), (("read", 0), 2, 3))


def test_two_swaps_of_one_value_cannot_both_succeed():
    assert not good((("swap", 0, 1), 0, 10), (("swap", 0, 2), 0, 10))
    assert good((("swap", 0, 1), 0, 10), (("swap", 1, 2), 0, 10))


def test_a_call_whose_outcome_is_not_known_may_have_happened_late_or_not_at_all():
    lost = (("write", 1), 0, NEVER)
    assert good(lost, (("read", 0), 1, 2))
    assert good(lost, (("read", 0), 1, 2), (("read", 1), 3, 4))
    assert not good(lost, (("read", 1), 1, 2), (("read", 0), 3, 4))
    assert not good((("read", 1), 0, 1), (("write", 1), 2, NEVER))


def test_many_calls_without_an_outcome_do_not_make_the_search_long():
    calls = [Timed(("swap", -1, number), 0, NEVER) for number in range(40)]
    calls += [Timed(("swap", number, number + 1), number, number + 0.5) for number in range(200)]
    found = linearize(calls, 0, register)
    assert found.good
    assert found.steps < 20_000


def test_what_cannot_follow_is_named():
    found = linearize([Timed(("write", 1), 0, 1), Timed(("read", 7), 2, 3)], 0, register)
    assert (found.longest, found.stuck) == ([("write", 1)], [("read", 7)])


def test_a_search_that_takes_too_long_says_so():
    calls = [Timed(("write", number), 0, 100) for number in range(12)] + [Timed(("read", 99), 101, 102)]
    assert linearize(calls, 0, register, most_steps=1_000).gave_up


def test_keys_are_apart():
    assert by_key([Timed(("a", 1), 0, 1), Timed(("b", 2), 0, 1)], lambda call: call[0]).keys() == {"a", "b"}


CALLS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 2)),
    st.tuples(st.just("read"), st.integers(0, 2)),
    st.tuples(st.just("swap"), st.integers(0, 2), st.integers(0, 2)),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Timed]:
    found = []
    for call in draw(st.lists(CALLS, max_size=5)):
        began = draw(st.integers(0, 8))
        ended = NEVER if call[0] != "read" and draw(st.booleans()) else began + draw(st.integers(0, 6))
        found.append(Timed(call, began, ended))
    return found


def possible(calls: list[Timed]) -> bool:
    """The same by trying each order of each choice of those that may not have happened."""
    certain = [each for each in calls if each.ended != NEVER]
    lost = [each for each in calls if each.ended == NEVER]
    for chosen in range(1 << len(lost)):
        mine = certain + [each for at, each in enumerate(lost) if chosen >> at & 1]
        for order in permutations(mine):
            if any(later.ended < earlier.began for at, earlier in enumerate(order) for later in order[at + 1 :]):
                continue
            state: int | None = 0
            for each in order:
                state = next(register(state, each.call), None)
                if state is None:
                    break
            if state is not None:
                return True
    return False


@given(histories())
def test_it_agrees_with_trying_all_orders(calls: list[Timed]):
    assert linearize(calls, 0, register).good == possible(calls)


@given(st.lists(st.tuples(CALLS, st.floats(0, 3), st.floats(0, 3)), max_size=60))
def test_what_one_caller_after_the_other_saw_is_good_however_the_calls_overlap(steps: list):
    state, calls = 0, []
    for at, (call, before, after) in enumerate(steps):
        if call[0] == "read":
            call = ("read", state)
        elif call[0] == "swap":
            call = ("swap", state, call[2])
        (state,) = register(state, call)
        calls.append(Timed(call, at - before, at + after))
    assert linearize(calls, 0, register).good


# The model of a lock and its document


def call(op: str, began: float, ended: float, out: object = None, error: str = "", **given_: object) -> Event:
    result = Result.FAIL if error else Result.OK
    return Event("c", op, "lock", given_, out, result, error, began, ended)


def lost(op: str, began: float, **given_: object) -> Event:
    return Event("c", op, "lock", given_, None, Result.UNKNOWN, "unavailable", began)


def fits(*events: Event) -> bool:
    calls = [Timed(event, event.began, event.until) for event in events if tells(event)]
    return linearize(calls, Held(), step).good


def acquire(fence: int, began: float) -> Event:
    return call("acquire", began, began + 1, {"fence": fence}, lease=3)


def update(value: str, made: int, began: float, /, **given_: object) -> Event:
    return call("update", began, began + 1, {"version": made}, value=value, **given_)


def get(value: str | None, version: int, began: float) -> Event:
    return call("get", began, began + 1, {"value": value, "version": version})


@pytest.mark.parametrize(
    ("is_good", "events"),
    [
        (True, [acquire(1, 0), update("a", 5, 2, fence=1), get("a", 5, 4), acquire(2, 6), update("b", 6, 8, fence=2)]),
        (False, [acquire(1, 0), acquire(2, 2), update("a", 5, 4, fence=1)]),  # the fence was not asked for
        (False, [acquire(2, 0), acquire(1, 2)]),  # a fencing number that goes back
        (False, [acquire(1, 0), acquire(1, 2)]),  # one that is given twice
        (False, [acquire(1, 0), acquire(2, 2), call("keepalive", 4, 5, fence=1)]),
        (True, [update("a", 3, 0, version=0), update("b", 7, 2, version=3), get("b", 7, 4)]),
        (False, [update("a", 3, 0, version=0), update("b", 7, 0, version=0)]),  # both found nothing
        (False, [update("a", 3, 0, version=0), get(None, 0, 2)]),  # a read that goes back
        (False, [update("a", 3, 0, version=0), update("b", 2, 2, version=3)]),  # and a version
        (True, [lost("update", 0, value="a", version=0), get(None, 0, 1), get("a", 4, 3)]),
        (True, [lost("update", 0, value="a", version=0), update("b", 9, 5, version=4)]),
        (False, [lost("update", 0, value="a", version=0), get("a", 4, 1), get(None, 0, 3)]),
        (False, [lost("update", 0, value="a", version=0), get("a", 4, 1), get("a", 5, 3)]),  # one write, two versions
        (True, [update("a", 3, 0, version=0), call("update", 2, 3, error="conflict", value="b", version=1)]),
        (False, [update("a", 3, 0, version=0), call("update", 2, 3, error="conflict", value="b", version=3)]),
        (True, [acquire(1, 0), lost("acquire", 2), call("update", 4, 5, error="lease_lost", value="a", fence=1)]),
    ],
)  # fmt: skip
def test_the_model_of_a_lock_and_its_document(is_good: bool, events: list[Event]):
    assert fits(*events) is is_good
