"""The way of every call, without a server: which of several failed tries is told of."""

from __future__ import annotations

import pytest

from holdfast.client.address import parse_address
from holdfast.client.calling import Caller, Cut, Unsent
from holdfast.client.http import Answer, Ask
from holdfast.client.ways import ThreadWays, run
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Unavailable


@pytest.mark.parametrize("kind", [Cut, Unsent])
def test_a_last_try_that_our_own_time_cuts_short_tells_less_than_the_one_before(kind: type[Exception]):
    world = World(clock=ManualClock(), disk=SimulatedDisk(), ids=SeededIds(1))
    caller = Caller(world, ThreadWays(world.clock), parse_address("http://127.0.0.1:1"), timeout_s=5)
    tries = 0

    async def attempt(left_s: float) -> Answer:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise kind("it hung up") from ConnectionResetError()
        world.clock.advance(seconds=left_s)
        raise kind("it timed out") from TimeoutError()

    with pytest.raises(Unavailable, match="it hung up"):
        run(caller.answered(Ask(method="GET", path="/healthz"), attempt))
    assert tries == 3
