"""Where a message goes: a key always to its partition, the others evenly, and by hand only where there is one."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from holdfast.broker.messages import RoundRobin, check_partition, partition_for, partitions_for
from holdfast.errors import UnknownTopic

# Values of MurmurHash3_x86_32 with seed 0, as published with the algorithm's ports.
KNOWN = {b"": 0, b"foo": 4138058784, b"hello": 613153351, b"hello, world": 345750399, b"aaaa": 2129582471}


@pytest.mark.parametrize(("key", "digest"), KNOWN.items())
def test_a_keys_partition_is_its_murmur3_hash_modulo_the_partitions(key, digest):
    for partitions in (1, 2, 3, 7, 10_000):
        assert partition_for(key, partitions) == digest % partitions


def test_the_hash_is_taken_as_unsigned():
    high = [key for key, digest in KNOWN.items() if digest >= 2**31]
    assert high
    assert all(partition_for(key, 2**31) >= 0 for key in high)
    assert partition_for(b"foo", 2**32) == KNOWN[b"foo"]


def test_many_keys_go_where_each_of_them_goes():
    keys = [b"order-%d" % i for i in range(500)]
    assert partitions_for(keys, 7) == [partition_for(key, 7) for key in keys]
    assert partitions_for([], 7) == []


def test_keys_spread_evenly():
    counts = Counter(partitions_for([b"customer-%d" % i for i in range(30_000)], 10))
    assert set(counts) == set(range(10))
    assert max(counts.values()) < 1.1 * min(counts.values())


def test_a_partition_by_hand_must_be_there():
    assert check_partition(2, "orders", 3) == 2
    for wrong in (3, -1, True, 1.0, "1", None):
        with pytest.raises(UnknownTopic, match=r"topic orders has no partition .*: its partitions are 0 to 2"):
            check_partition(wrong, "orders", 3)
    with pytest.raises(UnknownTopic, match="its only partition is 0"):
        check_partition(1, "orders", 1)


def test_turns_go_round():
    turns = RoundRobin()
    assert [turns.take(3) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_turns_may_stick_to_a_partition_for_a_while():
    turns = RoundRobin(2, start=1)
    assert [turns.take(3) for _ in range(8)] == [1, 1, 2, 2, 0, 0, 1, 1]


def test_turns_of_a_list_are_the_turns_of_its_messages():
    for stick in (1, 3, 100):
        one, many = RoundRobin(stick), RoundRobin(stick)
        for count in (0, 1, 2, 5, 250, 7):
            expected = [one.take(4) for _ in range(count)]
            runs = list(many.spread(count, 4))
            assert [partition for partition, first, end in runs for _ in range(first, end)] == expected
            assert [first for _, first, _ in runs][:1] == [0][:count]
            assert all(end == first for (_, _, end), (_, first, _) in pairwise(runs))


def test_partitions_that_are_added_get_their_turns():
    turns = RoundRobin()
    assert [turns.take(2) for _ in range(3)] == [0, 1, 0]
    assert [turns.take(4) for _ in range(4)] == [1, 2, 3, 0]


@pytest.mark.slow
def test_importing_holdfast_does_not_load_the_hash():
    listing = "import sys, holdfast, holdfast.broker.messages; print('mmh3' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True)
    assert done.stdout.strip() == "False"
