"""A power cut at random disk calls of random queue histories, and at every call of the moves that span two logs."""

from __future__ import annotations

import random

import pytest

from tests.crash.queue_histories import QueueHistory, check_after_cut

SLICES = 8


@pytest.mark.parametrize("durability", ["fsync", "os"])
@pytest.mark.parametrize("part", range(SLICES))
def test_nothing_that_was_promised_is_undone_wherever_the_power_is_cut(durability, part, scale):
    wanted = scale(600, 60_000) // SLICES
    states, seed = 0, part * 1_000_000
    while states < wanted:
        states += cut_here_and_there(seed, durability)
        seed += 1


def cut_here_and_there(seed: int, durability: str) -> int:
    """Run one history, and look at one possible disk after some of its write points."""
    rng = random.Random(seed)
    states = 0

    def cut(history: QueueHistory, call: str) -> None:
        nonlocal states
        if rng.random() < 0.04:
            states += 1
            check_after_cut(history, history.disk.cut(rng))

    try:
        QueueHistory(seed, durability=durability, maps=seed % 2 == 0, on_cut_point=cut).run(steps=rng.choice([5, 20, 60]))
    except BaseException as error:
        error.add_note(f"history seed {seed}, {durability}, state {states}")
        raise
    return states
