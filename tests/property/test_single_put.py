"""The fused path of a single message writes the same bytes as the plain one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.storage.log import Log
from tests.crash.histories import FOLDER, small_settings

puts = st.lists(
    st.tuples(
        st.binary(max_size=1200),
        st.sampled_from(["os", "fsync", "interval"]),
        st.integers(min_value=-50, max_value=5_000_000),
    ),
    max_size=12,
)


@given(puts, st.booleans(), st.sampled_from([{}, {"segment_messages": 3}, {"segment_ms": 3}]))
def test_fused_and_plain_agree_to_the_byte(history, maps, settings):
    fused, plain = SimulatedDisk(maps=maps), SimulatedDisk(maps=maps)
    ends = []
    for disk in (fused, plain):
        clock = ManualClock()
        log = Log.open(FOLDER, small_settings(**settings), World(clock=clock, disk=disk, ids=SeededIds(3)))
        for value, durability, step_ns in history:
            clock.step_wall(ns=step_ns)
            if disk is fused:
                appended = log.append_one(value, durability)
            else:
                appended = log.append([value], durability=durability)
            ends.append((appended, log.end, log.synced_end))
        log.close()
    half = len(ends) // 2
    assert ends[:half] == ends[half:]
    assert fused.names(FOLDER) == plain.names(FOLDER)
    for name in fused.names(FOLDER):
        assert fused.contents(f"{FOLDER}/{name}") == plain.contents(f"{FOLDER}/{name}"), name
