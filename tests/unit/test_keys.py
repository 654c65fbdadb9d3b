"""One message of a key at a time, in order, also across retries; limits and fair turns by key group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.delivery.events import (
    Ack,
    Bury,
    Cancel,
    DeadStored,
    Lost,
    Nack,
    Receipt,
    Receive,
    Reject,
    Seek,
    Tick,
    run,
)
from holdfast.delivery.key_policy import KeyPolicy, KeyRates
from holdfast.delivery.keys import KeyGate, KeyLimits
from holdfast.settings import QueueSettings, TopicSettings
from tests.unit.stories import BOOT, PLAIN, Story


class Gated:
    """A story whose messages have keys, and the gate that says who is next."""

    def __init__(self, keys: str = "", *, new: bool = True, **policy: Any) -> None:
        self.story = Story()
        self.keys: list[bytes | None] = []
        self.policy = KeyPolicy(**policy)
        self.gate = KeyGate(KeyLimits(self.policy, now_mono_ms=self.story.mono_ms, new=new))
        self.publish(*keys)

    def publish(self, *keys: str) -> None:
        """A message for each key; "-" has none."""
        self.keys += [None if key == "-" else key.encode() for key in keys]
        self.story.publish(*[0] * len(keys))

    def choose(self, count: int = 100) -> list[int]:
        self.gate.fill(self.story.group, self.story.readable, lambda offset: self.keys[offset])
        assert self.gate.check() == []
        return self.gate.choose(count, self.story.mono_ms)

    def receive(self, count: int = 100, *, lease_ms: int = 50) -> list[int]:
        chosen = self.choose(count)
        self.when(Receive(chosen, self.story.group.cursor, lease_ms, "ann", 0))
        return chosen

    def when(self, command: Any, *, after_ms: int = 0) -> None:
        for event in self.story.when(command, after_ms=after_ms):
            self.gate.note(event)
        assert self.gate.check() == []
        self.story.hold()

    def happen(self, event: Any) -> None:
        self.story.happen(event)
        self.gate.note(event)

    def ack(self, *offsets: int) -> None:
        self.when(Ack([self.receipt(offset) for offset in offsets]))

    def nack(self, offset: int, *, delay_ms: int = 0) -> None:
        self.when(Nack(self.receipt(offset), delay_ms))

    def receipt(self, offset: int) -> Receipt:
        return Receipt(offset, self.story.group.leases[offset].fence)

    def restart(self) -> None:
        self.story.reopen(boot_id=BOOT)
        self.gate = KeyGate(KeyLimits(self.policy, now_mono_ms=self.story.mono_ms, new=False))

    def shares(self, chosen: Sequence[int]) -> str:
        return "".join((self.keys[offset] or b"-").decode()[0] for offset in chosen)


def test_one_message_of_a_key_at_a_time_in_order():
    gated = Gated("aabab", key_order=True)
    assert gated.receive() == [0, 2]
    assert gated.receive() == []
    gated.ack(2)
    assert gated.receive() == [4]
    gated.ack(0)
    assert gated.receive() == [1]
    gated.ack(1, 4)
    assert gated.receive() == [3]


def test_a_nacked_message_keeps_its_key_busy_until_it_is_done():
    gated = Gated("aab", key_order=True)
    assert gated.receive() == [0, 2]
    gated.nack(0, delay_ms=100)
    gated.when(Tick(), after_ms=10)
    assert gated.receive() == []
    gated.when(Tick(), after_ms=90)
    assert gated.receive(1) == [0]
    gated.ack(0)
    assert gated.receive() == [1]


def test_an_ended_lease_keeps_its_key_busy_until_the_retry():
    gated = Gated("aa", key_order=True)
    assert gated.receive(lease_ms=50) == [0]
    gated.when(Tick(), after_ms=50)
    assert gated.choose() == []
    gated.when(Tick(), after_ms=PLAIN.backoff_ms)
    assert gated.receive() == [0]


def test_a_dead_message_lets_the_next_of_its_key_go():
    gated = Gated("aaa", key_order=True)
    gated.receive()
    gated.when(Reject(gated.receipt(0)))
    assert gated.receive() == [1]
    gated.happen(DeadStored(run(0)))
    assert gated.choose() == []


def test_what_is_cancelled_lost_or_buried_while_it_waits_leaves_its_place():
    gated = Gated("aaaaab", key_order=True)
    gated.choose()
    gated.when(Cancel(0))
    assert gated.choose() == [1, 5]
    gated.happen(Lost(run(1)))
    gated.when(Bury((2, 3), "EXPIRED"))
    gated.when(Cancel(4))
    assert gated.receive() == [3, 5]
    gated.nack(3, delay_ms=1_000)
    gated.when(Cancel(3))
    gated.publish("a")
    assert gated.receive() == [6]


def test_messages_without_a_key_are_never_held_back():
    gated = Gated("--a-", key_order=True, key_group_concurrency=1, key_group_rate=0.001)
    assert gated.receive() == [0, 1, 2, 3]


def test_choosing_takes_nothing():
    gated = Gated("aabb", key_group_rate=1.0, key_group_burst=2, key_group_fair=True)
    assert gated.choose() == gated.choose() == gated.receive()


def test_a_policy_that_comes_late_waits_for_all_that_are_leased():
    gated = Gated("aaab", key_order=True)
    gated.story.receive(2)  # nobody asked the gate
    assert gated.receive() == [3]
    gated.ack(1)
    assert gated.choose() == []
    gated.nack(0)
    assert gated.receive() == [0]
    gated.ack(0)
    assert gated.receive() == [2]


def test_what_is_held_behind_the_window_keeps_its_key_busy():
    gated = Gated("aab" + "a" * 7, key_order=True, key_lookahead=3)
    gated.story.when(Receive([8], 0, 50, "ann", 0))
    assert gated.receive() == []  # two of a: the window has no room for b
    gated.nack(8)
    assert gated.receive() == [0, 2]
    gated.ack(0)
    assert gated.receive() == [1]  # and not 8, which is ready, too


def test_the_window_moves_on_as_messages_are_settled():
    gated = Gated("aaab", key_order=True, key_lookahead=2)
    assert gated.receive() == [0]
    assert gated.gate.room == 0
    gated.ack(0)
    assert gated.receive() == [1]
    gated.ack(1)
    assert gated.receive() == [2, 3]


def test_a_seek_back_begins_anew():
    gated = Gated("aab", key_order=True)
    assert gated.receive() == [0, 2]
    gated.ack(0, 2)
    assert gated.receive() == [1]
    gated.when(Seek(0))
    assert gated.receive() == [2]  # 1 is still leased
    gated.ack(1)
    assert gated.receive() == [0]


def test_a_seek_forward_passes_over_what_waits():
    gated = Gated("aaaab", key_order=True)
    gated.receive(1)
    gated.nack(0, delay_ms=1_000)
    gated.when(Seek(3))
    assert gated.receive() == [3, 4]


def test_a_restart_finds_the_same_keys_busy():
    gated = Gated("aabbcc", key_order=True)
    assert gated.receive() == [0, 2, 4]
    gated.nack(2, delay_ms=1_000)
    gated.ack(4)
    gated.restart()
    assert gated.receive() == [5]
    gated.ack(0)
    assert gated.receive() == [1]


def test_a_key_group_is_the_part_before_the_separator():
    gated = Gated(key_group_separator=":", key_group_concurrency=1)
    gated.publish("x:1", "x:2", "y", "x", "y:3:4", ":1", ":2")
    assert gated.receive() == [0, 2, 5]


def test_the_concurrency_of_a_key_group_counts_leases_only():
    gated = Gated("aaaab", key_group_concurrency=2)
    assert gated.receive() == [0, 1, 4]
    gated.nack(0, delay_ms=100)
    assert gated.receive() == [2]
    gated.when(Tick(), after_ms=100)
    assert gated.story.phases() == "rwwrw"  # three leases have ended with it
    assert gated.receive() == [0, 3]


def test_order_and_concurrency_hold_together():
    gated = Gated(key_order=True, key_group_separator=":", key_group_concurrency=2)
    gated.publish("x:1", "x:1", "x:2", "x:3", "y:1")
    assert gated.receive() == [0, 2, 4]
    gated.ack(2)
    assert gated.receive() == [3]
    gated.ack(0)
    assert gated.receive() == [1]


def test_a_rate_lets_a_burst_through_and_then_one_at_a_time():
    gated = Gated("aaaaab", key_group_rate=10.0, key_group_burst=2)
    assert gated.receive(lease_ms=10_000) == [0, 1, 5]
    assert gated.gate.next_ms(gated.story.mono_ms) == 100
    gated.when(Tick(), after_ms=99)
    assert gated.receive(lease_ms=10_000) == []
    assert gated.gate.next_ms(gated.story.mono_ms) == 1
    gated.when(Tick(), after_ms=1)
    assert gated.receive(lease_ms=10_000) == [2]
    gated.when(Tick(), after_ms=1_000)
    assert gated.receive(lease_ms=10_000) == [3, 4]
    assert gated.gate.next_ms(gated.story.mono_ms) is None


def test_nothing_waits_for_the_rate_of_a_key_group_that_has_nothing_to_give():
    gated = Gated("aab", key_order=True, key_group_rate=1.0)
    assert gated.receive(lease_ms=10_000) == [0, 2]
    assert gated.gate.next_ms(gated.story.mono_ms) is None  # the key is busy
    gated.ack(0)
    assert gated.gate.next_ms(gated.story.mono_ms) == 1_000
    gated.when(Cancel(1))
    assert gated.gate.next_ms(gated.story.mono_ms) is None
    gated.publish("a")
    assert gated.choose() == []
    assert gated.gate.next_ms(gated.story.mono_ms) == 1_000


def test_many_restarts_let_no_bursts_through():
    gated = Gated("a" * 20, key_group_rate=0.001, key_group_burst=5)
    assert len(gated.receive(lease_ms=10_000)) == 5
    for _ in range(3):
        gated.restart()
        assert len(gated.receive(lease_ms=10_000)) == 1


def test_a_seek_gives_no_new_burst():
    gated = Gated("aaa", key_group_rate=1.0, key_group_burst=2)
    gated.ack(*gated.receive())
    gated.when(Seek(0))
    assert gated.choose() == []


@pytest.mark.parametrize("rate", [0.001, 0.3, 1.0, 7.0, 999.9, 12_345.6, 1e9])
def test_a_rate_is_never_exceeded(rate: float):
    rates = KeyRates(rate, 3, since_ms=0, full=True)
    gone = 0
    for now_ms in [*range(50), *range(50, 20_000, 379)]:
        left = rates.left(b"a", now_ms)
        assert (left > 0) == (rates.opens_ms(b"a") <= now_ms)
        for _ in range(min(left, 1_000)):
            rates.take(b"a", now_ms)
            gone += 1
        assert gone <= max(3, rate / 1_000 + 1) + now_ms * rate / 1_000


def test_full_buckets_are_forgotten():
    rates = KeyRates(1_000.0, 1, since_ms=0, full=True)
    for number in range(10_000):
        rates.take(b"%d" % number, number)
    assert len(rates._full_at_ns) <= 1_001
    assert rates.left(b"0", 10_000) == 1


def test_key_groups_take_turns():
    gated = Gated("a" * 6 + "bbcc", key_group_fair=True)
    assert gated.shares(gated.choose()) == "abcabcaaaa"
    assert gated.choose()[:3] == [0, 6, 8]


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_turns_go_on_from_one_choice_to_the_next(batch: int):
    gated = Gated("a" * 30 + "b" * 30, key_group_fair=True)
    taken = ""
    while len(taken) < 30:
        taken += gated.shares(gated.receive(batch, lease_ms=10_000))
        assert abs(taken.count("a") - taken.count("b")) <= 1


def test_new_key_groups_do_not_keep_an_old_one_from_its_turn():
    gated = Gated("aaaa", key_group_fair=True)
    gated.receive(1)
    for number in range(8):
        gated.publish(f"new{number}", f"newer{number}")
        gated.receive(2)
    assert gated.story.phases()[:4] == "llll"


def test_a_key_group_that_was_at_its_limit_has_its_turn_when_it_is_back():
    gated = Gated("a" * 10 + "b" * 10, key_group_fair=True, key_group_concurrency=1)
    taken = ""
    for _ in range(8):
        chosen = gated.receive(1)
        taken += gated.shares(chosen)
        gated.ack(*chosen)
    assert taken == "abababab"


def test_messages_without_a_key_share_one_turn():
    gated = Gated("----ab", key_group_fair=True)
    assert gated.choose() == [0, 4, 5, 1, 2, 3]


def test_partitions_share_the_limits_of_a_key_group():
    one = Gated(key_group_separator=":", key_group_concurrency=2)
    two = Gated(key_group_separator=":", key_group_concurrency=2)
    two.gate = KeyGate(one.gate.limits)
    one.publish("x:1", "x:2", "x:3")
    two.publish("x:4", "y:1")
    assert two.choose() == [0, 1]
    assert one.receive() == [0, 1]
    assert two.choose() == [1]
    one.ack(0)
    assert two.receive() == [0, 1]
    one.ack(1)
    two.when(Seek(0))
    assert one.receive() == [2]


def test_partitions_share_the_rate_of_a_key_group():
    one = Gated("aa", key_group_rate=10.0)
    two = Gated("aa", key_group_rate=10.0)
    two.gate = KeyGate(one.gate.limits)
    assert two.choose() == [0]
    assert one.receive() == [0]
    assert two.choose() == []
    assert two.gate.next_ms(two.story.mono_ms) == 100
    two.when(Tick(), after_ms=100)
    assert two.receive() == [0]
    one.when(Tick(), after_ms=100)
    assert one.choose() == []
    assert one.gate.next_ms(one.story.mono_ms) == 100


def test_only_settings_that_ask_for_it_make_a_policy():
    assert KeyPolicy.of(QueueSettings()) is None
    assert KeyPolicy.of(TopicSettings(key_lookahead=5)) is None
    policy = KeyPolicy.of(TopicSettings(key_order=True, key_group_separator="/", key_lookahead=5))
    assert policy == KeyPolicy(key_order=True, key_group_separator="/", key_lookahead=5)


def test_a_deep_window_of_one_key_is_not_looked_through():
    gated = Gated(key_order=True)
    gated.publish(*["hot"] * 5_000, *[f"k{n}" for n in range(100)])
    assert len(gated.choose()) == 100
    gate, seen = gated.gate, 0

    class Counting(dict):  # type: ignore[type-arg]
        def __getitem__(self, offset: int) -> Any:
            nonlocal seen
            seen += 1
            return super().__getitem__(offset)

    gate._ready = Counting(gate._ready)
    assert len(gate.choose(50, 0)) == 50
    assert seen <= 100
