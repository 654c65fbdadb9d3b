"""A power cut right after a move between a queue and its dead letters leaves the message in one place, not in both."""

from __future__ import annotations

import pytest

from holdfast.testing import QueueKit

SEEDS = range(20)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_power_cut_after_a_reject_leaves_no_second_copy_in_the_queue(seed: int):
    with QueueKit(seed=seed) as kit:
        kit.queue.put(b"never works")
        kit.queue.get().reject("no")
        stats = kit.power_cut().stats()
        assert (stats.ready + stats.delayed + stats.leased, stats.dead) == (0, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_power_cut_after_a_redrive_leaves_no_second_copy_among_the_dead_letters(seed: int):
    with QueueKit(seed=seed) as kit:
        kit.queue.put(b"works by now")
        kit.queue.get().reject("no")
        kit.clock.advance(seconds=5)
        assert kit.queue.dead.redrive().done == 1
        stats = kit.power_cut().stats()
        assert (stats.ready, stats.dead) == (1, 0)
