"""A power cut at every write point of thousands of random histories."""

from __future__ import annotations

import random

import pytest

from tests.crash.histories import History, check_after_cut, check_after_kill, cut_while_opening

# Each slice is a test of its own, so that they spread over the cores.
SLICES = 20


@pytest.mark.parametrize("part", range(SLICES))
def test_no_acknowledged_message_is_lost_wherever_the_power_is_cut(part, scale):
    wanted = scale(100_000, 3_000_000) // SLICES
    states = 0
    seed = part * 1_000_000
    while states < wanted:
        states += cut_everywhere(seed)
        seed += 1
    assert states >= wanted


def test_a_second_cut_during_recovery_loses_nothing_either(scale):
    for seed in range(scale(60, 3_000)):
        rng = random.Random(seed)
        states = 0

        def cut(history: History, call: str, rng: random.Random = rng, seed: int = seed) -> None:
            nonlocal states
            states += 1
            if states % 12 == 0:
                for disk in cut_while_opening(history, history.disk.cut(rng), seed, rng):
                    check_after_cut(history, disk, seed, write_again=False)

        History(seed, maps=seed % 2 == 1, on_cut_point=cut).run(steps=10)


def test_no_acknowledged_message_is_lost_wherever_the_process_is_killed(scale):
    for seed in range(scale(120, 6_000)):
        stop_everywhere(seed, lambda history, rng: history.disk.kill(), check_after_kill)


def cut_everywhere(seed: int) -> int:
    """Run one history and look at one possible disk after each of its write points."""
    return stop_everywhere(seed, lambda history, rng: history.disk.cut(rng), check_after_cut)


def stop_everywhere(seed: int, left_over, check) -> int:
    rng = random.Random(seed)
    states = 0

    def stop(history: History, call: str) -> None:
        nonlocal states
        states += 1
        check(history, left_over(history, rng), seed, write_again=states % 8 == 0)

    try:
        History(seed, maps=seed % 2 == 0, on_cut_point=stop).run(steps=rng.choice([1, 2, 3, 4, 9]))
    except BaseException as error:
        error.add_note(f"history seed {seed}, state {states}")
        raise
    return states
