"""The stories of this folder once more, with the data folder in a store: a power cut is the loss of the machine.

Each story is the same function, and only its disk is another one: `ChainedDisk`. `cut` is what another machine finds,
where the last changes have arrived or not; `kill` is the same if all of them have. Faults (EIO, ENOSPC, descriptors
that run out) strike the disk of the local copy.

Not here, because they would say nothing about a store:

- A full disk and its reserve (test_full_disk, test_no_reserve): the reserve is a file of one machine. The next owner
  makes its copy on a disk of its own.
- Spoiled and shortened files (test_corruption, test_every_file, the second part of test_queue_faults, the journal of
  test_locks): a copy is made anew from objects, and each of those has a checksum (tests/unit/test_chain.py).
- A disk that is mounted anew while a process lives (test_check_after_crashes): for a chain, that is a new owner.
- Killed processes (test_*_kill, test_queue_load, test_large, test_idempotent_producer): with real stores that is
  tests/integration/test_store_faults.py.
- Tiering: a folder in a store is its own tier (tests/unit/test_stored_tiering.py).

Random histories are in test_chain_cuts.py, those of keys in test_key_order_cuts.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from holdfast.env.chain import ownership
from holdfast.env.chain.chain import walk
from tests.crash import (
    broker_histories,
    broker_promises,
    histories,
    queue_histories,
    queue_promises,
    queue_stories,
    test_broker_check_after_crashes,
    test_broker_cuts,
    test_catalog,
    test_check_after_crashes,
    test_compaction,
    test_delayed_crash,
    test_disk_faults,
    test_locks,
    test_power_cuts,
    test_queries,
    test_queue_faults,
    test_queue_power_cuts,
    test_shortages,
)
from tests.crash.chained_disk import ChainedDisk
from tests.unit import brokers

Fewer = Callable[[Any, Any], Any]


@pytest.fixture
def on_the_chain(monkeypatch) -> Callable[[ModuleType, str], None]:
    """Give a module's stories a disk in a store, in place of the simulated one."""
    monkeypatch.setattr(ownership, "walk", partial(walk, at_once=1))  # no threads to read ahead from memory

    def replace(module: ModuleType, folder: str) -> None:
        def disk(*, maps: bool = False) -> ChainedDisk:
            return ChainedDisk(folder)

        monkeypatch.setattr(module, "SimulatedDisk", disk)

    return replace


@pytest.fixture
def fewer(scale) -> Fewer:
    """Count and choose as `scale`, but look at a part only: each look at a chain replays it."""

    def chosen(usual: Any, long: Any) -> Any:
        found = scale(usual, long)
        if isinstance(found, int):
            return max(1, found // 8)
        return found / 8 if isinstance(found, float) else found

    return chosen


@pytest.fixture
def now_and_then(monkeypatch, scale) -> None:
    """Stop the history of a queue at some of its calls, and in a long run at every one."""
    rng, cut_with, chance = random.Random(7), queue_histories.QueueHistory.cut_with, scale(0.15, 1.0)

    def seldom(history: Any, stop: Callable[[Any, str], None]) -> None:
        cut_with(history, lambda history, call: stop(history, call) if rng.random() < chance else None)

    monkeypatch.setattr(queue_histories.QueueHistory, "cut_with", seldom)


# A log


def test_a_second_cut_during_the_recovery_of_a_log_loses_nothing(on_the_chain, fewer):
    on_the_chain(histories, histories.FOLDER)
    test_power_cuts.test_a_second_cut_during_recovery_loses_nothing_either(fewer)


@pytest.mark.parametrize("fault", test_disk_faults.FAULTS)
@pytest.mark.parametrize("operation", test_disk_faults.OPERATIONS, ids=lambda operation: operation.__name__)
def test_no_fault_of_the_copy_makes_a_log_lie(operation, fault, on_the_chain):
    on_the_chain(test_disk_faults, histories.FOLDER)
    test_disk_faults.test_no_fault_makes_the_log_lie(operation, fault, len(operation.__name__) % 2 == 0, maps=False)


@pytest.mark.parametrize("shortage", test_shortages.SHORTAGES)
@pytest.mark.parametrize("operation", test_shortages.LOG_OPERATIONS, ids=lambda operation: operation.__name__)
def test_what_runs_out_refuses_one_call_of_a_log(operation, shortage, on_the_chain):
    on_the_chain(test_disk_faults, histories.FOLDER)
    test_shortages.test_what_runs_out_refuses_one_call_of_a_log_and_the_same_log_goes_on(
        operation, shortage, sticky=len(operation.__name__) % 2 == 0, maps=False
    )


@pytest.mark.parametrize("end", ["power cut", "kill"])
def test_wherever_a_compaction_is_stopped_each_key_keeps_its_last_message(end, on_the_chain):
    on_the_chain(test_compaction, test_compaction.FOLDER)
    test_compaction.test_wherever_a_compaction_is_stopped_each_key_keeps_its_last_message(end, lambda usual, long: 5)


@pytest.mark.parametrize("fault", ["EIO", "ENOSPC", "short write"])
def test_no_fault_of_the_copy_costs_a_compaction_a_message(fault, on_the_chain):
    on_the_chain(test_compaction, test_compaction.FOLDER)
    test_compaction.test_no_fault_of_the_disk_costs_a_message(fault, sticky=fault == "EIO")


# A queue


def test_a_second_cut_during_the_recovery_of_a_queue_undoes_nothing(on_the_chain, fewer):
    on_the_chain(queue_histories, queue_promises.FOLDER)
    test_queue_power_cuts.test_a_second_cut_during_recovery_undoes_nothing_either(lambda usual, long: fewer(16, long))


@pytest.mark.parametrize("name", queue_stories.OPERATIONS)
def test_a_cut_inside_an_operation_of_a_queue_undoes_nothing(name, on_the_chain, now_and_then):
    on_the_chain(queue_histories, queue_promises.FOLDER)
    durability = ["fsync", "os"][len(name) % 2]
    test_queue_power_cuts.test_a_cut_inside_an_operation_undoes_nothing(name, durability, lambda usual, long: usual)


def test_a_cut_while_a_queue_is_made_leaves_one_that_opens(on_the_chain, now_and_then):
    on_the_chain(queue_histories, queue_promises.FOLDER)
    test_queue_power_cuts.test_a_cut_while_a_queue_is_made_leaves_one_that_opens()


@pytest.mark.parametrize(
    "story",
    [
        test_queue_power_cuts.test_a_message_is_never_both_ready_and_a_dead_letter,
        test_queue_power_cuts.test_a_redriven_message_is_never_among_the_dead_letters_too,
        test_queue_power_cuts.test_a_redriven_message_that_is_done_and_compacted_away_does_not_come_back,
        test_queue_power_cuts.test_a_queue_opens_though_the_tail_that_a_redrive_was_to_follow_is_lost,
        test_queue_power_cuts.test_a_synced_delayed_message_is_on_disk,
        partial(test_queue_power_cuts.test_a_released_message_that_was_settled_durably_is_not_released_again, "ack"),
        partial(test_queue_power_cuts.test_a_released_message_that_was_settled_durably_is_not_released_again, "reject"),
    ],
)
def test_what_a_queue_got_wrong_once(story, on_the_chain, monkeypatch):
    on_the_chain(queue_histories, queue_promises.FOLDER)
    monkeypatch.setattr(test_queue_power_cuts, "every_cut", lambda disk: [disk.cut(random.Random(n)) for n in range(2)])
    story()


@pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("name", queue_stories.OPERATIONS)
def test_no_fault_of_the_copy_makes_a_queue_lie(name, fault, on_the_chain, fewer):
    on_the_chain(queue_histories, queue_promises.FOLDER)
    few = lambda usual, long: fewer(usual, long) if isinstance(usual, int) else usual  # noqa: E731
    test_queue_faults.test_no_fault_makes_the_queue_lie(name, fault, len(name) % 2 == 0, few)


@pytest.mark.parametrize("name", queue_stories.OPERATIONS)
def test_what_runs_out_refuses_one_call_of_a_queue(name, on_the_chain, fewer):
    on_the_chain(queue_histories, queue_promises.FOLDER)
    test_shortages.test_what_runs_out_refuses_one_call_of_a_queue_and_the_same_queue_goes_on(
        name, list(test_shortages.SHORTAGES)[len(name) % 3], len(name) % 2 == 0, fewer
    )


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_check_misses_nothing_wherever_making_a_queue_is_cut_short(durability, on_the_chain, now_and_then):
    on_the_chain(queue_histories, queue_promises.FOLDER)
    test_check_after_crashes.test_nothing_is_missed_wherever_making_a_queue_is_cut_short(durability)


@pytest.mark.slow
@pytest.mark.parametrize("name", queue_stories.OPERATIONS)
def test_a_check_misses_nothing_wherever_an_operation_of_a_queue_is_cut_short(name, on_the_chain, now_and_then):
    on_the_chain(queue_histories, queue_promises.FOLDER)
    durability = ["os", "fsync"][len(name) % 2]
    test_check_after_crashes.test_nothing_is_missed_wherever_an_operation_is_cut_short(name, durability)


@pytest.mark.parametrize("call", ["write", "rename", "open", "remove", "reserve"])  # nothing is synced in a copy
def test_delayed_messages_survive_a_copy_that_fails_during_upkeep(call, on_the_chain, fewer):
    on_the_chain(test_delayed_crash, "data")
    test_delayed_crash.test_a_disk_that_fails_during_upkeep_loses_nothing(call, lambda usual, long: fewer(24, long))


# A broker


@pytest.mark.parametrize("stop", ["cut", "kill"])
def test_the_catalog_is_whole_wherever_it_is_stopped(stop, on_the_chain):
    on_the_chain(test_catalog, test_catalog.ROOT)
    test_catalog.test_the_catalog_is_whole_wherever_it_is_stopped(stop, lambda usual, long: usual)


def test_a_second_cut_while_the_catalog_tidies_up_leaves_nothing_half_done(on_the_chain, scale):
    on_the_chain(test_catalog, test_catalog.ROOT)
    test_catalog.test_a_second_cut_while_tidying_up_leaves_nothing_half_done_either(lambda usual, long: scale(12, 1))


@pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])
def test_after_a_fault_of_the_copy_the_catalog_is_what_it_was_or_was_to_be(fault, on_the_chain):
    on_the_chain(test_catalog, test_catalog.ROOT)
    test_catalog.test_after_a_fault_the_catalog_is_what_it_was_or_what_it_was_to_be(fault, sticky=fault == "EIO")


@pytest.mark.slow
@pytest.mark.parametrize("name", test_broker_cuts.OPERATIONS)
def test_a_cut_or_a_kill_inside_an_operation_of_a_broker_undoes_nothing(name, on_the_chain, fewer):
    on_the_chain(broker_histories, broker_promises.FOLDER)
    test_broker_cuts.test_a_cut_or_a_kill_inside_an_operation_undoes_nothing(name, fewer)


@pytest.mark.slow
@pytest.mark.parametrize("name", test_broker_cuts.OPERATIONS)
def test_no_fault_of_the_copy_makes_a_broker_lie(name, on_the_chain, fewer):
    on_the_chain(broker_histories, broker_promises.FOLDER)
    test_broker_cuts.test_no_fault_makes_the_broker_lie(name, ["EIO", "ENOSPC"][len(name) % 2], fewer)


@pytest.mark.slow
@pytest.mark.parametrize("operate", test_broker_check_after_crashes.OPERATIONS, ids=lambda operate: operate.__name__)
def test_a_check_misses_nothing_wherever_an_operation_of_a_broker_is_cut_short(operate, on_the_chain, fewer):
    on_the_chain(test_broker_check_after_crashes, test_broker_check_after_crashes.FOLDER)
    test_broker_check_after_crashes.test_nothing_is_missed_wherever_an_operation_is_cut_short(operate, fewer)


@pytest.mark.parametrize("killed", [False, True], ids=["cut", "killed"])
def test_no_lock_or_document_that_was_answered_is_undone(killed, on_the_chain, fewer):
    on_the_chain(brokers, brokers.FOLDER)
    test_locks.test_nothing_that_was_answered_is_undone_wherever_the_power_is_cut_or_the_process_killed(killed, fewer)


@pytest.mark.parametrize(
    "story",
    [
        test_locks.test_a_lock_that_was_answered_is_held_after_a_power_cut,
        test_locks.test_a_lease_that_was_made_longer_is_as_long_after_a_power_cut,
        test_locks.test_a_document_that_was_seen_is_the_same_after_a_power_cut,
    ],
)
def test_locks_after_one_cut(story, on_the_chain, monkeypatch):
    on_the_chain(brokers, brokers.FOLDER)
    monkeypatch.setattr(test_locks, "SEEDS", range(4))
    story()


def test_whatever_a_cut_leaves_of_a_query_it_is_kept_for_its_time(on_the_chain, fewer):
    on_the_chain(test_queries, test_queries.ROOT)
    test_queries.test_whatever_a_power_cut_leaves_of_a_query_it_is_kept_for_its_time_and_no_longer(fewer)
    test_queries.test_a_query_killed_at_any_moment_of_a_move_leaves_its_old_place_or_its_new_one()
