"""The stories of this folder once more, with the data folder in a store: a power cut is the loss of the machine.

Each story is the same function, and only its disk is another one: `ChainedDisk`. `cut` is what another machine finds,
where the last changes have arrived or not; `kill` is the same if all of them have. Faults (EIO, ENOSPC, descriptors
that run out) strike the disk of the local copy.

Each story of this folder is told here, or named in `ELSEWHERE` with the reason why it is not. Random histories are in
test_chain_cuts.py.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import holdfast.testing
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
    test_dead_letter_power_cuts,
    test_delayed_crash,
    test_disk_faults,
    test_locks,
    test_power_cuts,
    test_queries,
    test_queue_faults,
    test_queue_power_cuts,
    test_schedules,
    test_seen_in_the_originals,
    test_shortages,
    test_transactions,
)
from tests.crash.chained_disk import ChainedDisk
from tests.unit import brokers

Fewer = Callable[[Any, Any], Any]

FULL = "the reserve is a file of one machine; the next owner makes its copy on a disk of its own"
SPOILED = "a copy is made anew from objects, each of which has a checksum: tests/unit/test_chain.py"
KILLED = "with real stores: tests/integration/test_store_faults.py"
RANDOM = "random histories: test_chain_cuts.py"

# Stories, or whole files of them, that would say nothing about a store.
ELSEWHERE = {
    "test_full_disk": FULL,
    "test_transactions.test_a_full_disk_refuses_a_transaction_as_a_whole_or_finishes_it_later": FULL,
    "test_transactions.test_workers_that_are_killed_turn_each_order_into_one_invoice": KILLED,
    "test_topic_moves": "between folders in stores: tests/integration/test_cluster_moves.py",
    "test_no_reserve": FULL,
    "test_disk_faults.test_a_full_disk_refuses_publishing_and_takes_it_again_when_there_is_room": FULL,
    "test_disk_faults.test_a_message_that_fits_in_reserved_blocks_needs_no_room_on_the_disk": FULL,
    "test_disk_faults.test_free_space_is_checked_while_running_not_only_at_opening": FULL,
    "test_seen_in_the_originals.test_free_disk_is_watched_while_running": FULL,
    "test_corruption": SPOILED,
    "test_every_file": SPOILED,
    "test_queue_faults.test_a_queue_with_a_spoiled_byte_opens_or_says_what_is_wrong": SPOILED,
    "test_queue_faults.test_a_kill_inside_the_snapshot_that_follows_a_damaged_one_loses_nothing": SPOILED,
    "test_locks.test_a_journal_that_ends_at_any_byte_is_that_of_an_earlier_moment": SPOILED,
    "test_locks.test_a_journal_with_any_byte_spoiled_opens_and_no_fence_comes_twice": SPOILED,
    "test_seen_in_the_originals.test_a_torn_tail_never_keeps_a_log_from_opening": SPOILED,
    "test_seen_in_the_originals.test_one_flipped_bit_hides_one_frame_and_nothing_behind_it": SPOILED,
    "test_kill": KILLED,
    "test_queue_kill": KILLED,
    "test_broker_kill": KILLED,
    "test_dedup_kill": KILLED,
    "test_queue_load": KILLED,
    "test_large": KILLED,
    "test_idempotent_producer": KILLED,
    "test_locks.test_after_kills_every_count_stands_and_every_fence_is_higher": KILLED,
    "test_queries.test_a_query_of_another_process_holds_until_it_ends_or_its_time_out_after_a_kill": KILLED,
    "test_schedules.test_owners_that_are_killed_fire_every_second_once": KILLED,
    "test_schedules.test_two_processes_on_one_folder_fire_every_second_once_when_the_owner_is_killed": KILLED,
    "test_schedules.test_a_folder_in_a_store_fires_every_second_once_when_another_machine_takes_over": (
        "in a store itself"
    ),
    "test_power_cuts.test_no_acknowledged_message_is_lost_wherever_the_power_is_cut": RANDOM,
    "test_power_cuts.test_no_acknowledged_message_is_lost_wherever_the_process_is_killed": RANDOM,
    "test_queue_power_cuts.test_nothing_that_was_promised_is_undone_wherever_the_power_is_cut": RANDOM,
    "test_queue_power_cuts.test_nothing_that_was_answered_is_undone_wherever_the_process_is_killed": RANDOM,
    "test_broker_cuts.test_nothing_that_was_promised_is_undone_wherever_the_power_is_cut": RANDOM,
    "test_broker_cuts.test_nothing_that_was_answered_is_undone_wherever_the_process_is_killed": RANDOM,
    "test_delayed_crash.test_delayed_messages_are_released_once_wherever_the_power_is_cut": RANDOM,
    "test_delayed_crash.test_delayed_messages_are_released_once_wherever_the_process_is_killed": RANDOM,
    "test_key_order_cuts": "a disk in a store is one of its three",
    "test_tiering": "a folder in a store is its own tier: tests/unit/test_stored_tiering.py",
    "test_check_after_crashes.test_nothing_is_missed_after_a_failed_disk_was_mounted_anew_without_a_restart": (
        "for a chain, a disk that is mounted anew is a new owner"
    ),
    "test_disk_faults.test_after_a_failed_sync_writes_are_refused_and_a_fresh_open_recovers": (
        "a sync is a create in the store: tests/unit/test_chain.py"
    ),
    "test_seen_in_the_originals.test_opening_adds_no_file": "on a real disk",
}


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


def stories_of(path: Path) -> Iterator[str]:
    """The names of the tests in a file, with that of the file."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield f"{path.stem}.{node.name}"


def test_every_story_is_told_here_or_said_to_be_elsewhere():
    here = Path(__file__)
    told = {ast.unparse(node) for node in ast.walk(ast.parse(here.read_text())) if isinstance(node, ast.Attribute)}
    others = [path for path in sorted(here.parent.glob("test_*.py")) if not path.stem.startswith("test_chain_")]
    stories = {story for path in others for story in stories_of(path)}
    known = {story for story in stories if story in ELSEWHERE or story.partition(".")[0] in ELSEWHERE}
    assert stories - told - known == set(), "neither told here nor in ELSEWHERE"
    assert told & known == set(), "told here, and in ELSEWHERE"
    assert set(ELSEWHERE) - stories - {path.stem for path in others} == set(), "no such story"


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


def test_a_read_of_the_copy_that_failed_is_reported_and_nothing_else_changes(on_the_chain):
    on_the_chain(test_disk_faults, histories.FOLDER)
    test_disk_faults.test_a_failed_read_is_reported_and_nothing_else_changes()


@pytest.mark.parametrize(
    "story",
    [
        test_seen_in_the_originals.test_a_kill_before_the_first_sync_leaves_a_log_that_opens,
        test_seen_in_the_originals.test_an_empty_segment_file_is_no_obstacle,
        test_seen_in_the_originals.test_an_end_published_ahead_of_lost_data_does_not_make_reading_stick,
        test_seen_in_the_originals.test_a_header_value_over_65535_bytes_leaves_the_payload_alone,
        test_seen_in_the_originals.test_retention_never_deletes_what_a_group_has_not_read,
        test_seen_in_the_originals.test_a_second_owner_is_refused_and_no_id_is_given_twice,
        partial(test_seen_in_the_originals.test_a_compressed_payload_moved_elsewhere_is_still_itself, "zstd"),
        test_seen_in_the_originals.test_a_sync_does_not_wait_for_the_next_append,
        test_seen_in_the_originals.test_a_clock_that_steps_back_does_not_break_the_search_by_time,
        test_seen_in_the_originals.test_folders_are_synced_after_creating_and_renaming,
    ],
)
def test_what_others_got_wrong(story, on_the_chain):
    on_the_chain(test_seen_in_the_originals, histories.FOLDER)
    story()


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


@pytest.mark.parametrize("shortage", test_shortages.SHORTAGES)
def test_a_dead_letter_and_a_redrive_whose_files_cannot_be_opened(shortage, on_the_chain, monkeypatch):
    on_the_chain(queue_histories, queue_promises.FOLDER)
    test_shortages.test_a_dead_letter_is_stored_once_though_the_journal_has_closed_its_files_and_cannot_open_them(
        shortage, monkeypatch
    )
    for at_rest in ("queue", "journal"):
        test_shortages.test_a_redrive_that_is_refused_leaves_the_letters_for_the_next_try_and_moves_them_once(
            at_rest, shortage, monkeypatch
        )


@pytest.mark.slow
@pytest.mark.parametrize("shortage", test_shortages.SHORTAGES)
@pytest.mark.parametrize(
    ("kind", "module"),
    [(queue_histories.QueueHistory, queue_histories), (broker_histories.BrokerHistory, broker_histories)],
    ids=["queue", "broker"],
)
def test_a_life_in_which_things_run_out_again_and_again(kind, module, shortage, on_the_chain, fewer):
    on_the_chain(module, queue_promises.FOLDER if module is queue_histories else broker_promises.FOLDER)
    test_shortages.test_a_life_in_which_things_run_out_again_and_again_ends_with_all_that_was_promised(
        kind, shortage, lambda usual, long: fewer(24, long)
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_message_that_is_moved_has_one_place_afterwards(seed, on_the_chain):
    on_the_chain(holdfast.testing, holdfast.testing._FOLDER)
    test_dead_letter_power_cuts.test_a_power_cut_after_a_reject_leaves_no_second_copy_in_the_queue(seed)
    test_dead_letter_power_cuts.test_a_power_cut_after_a_redrive_leaves_no_second_copy_among_the_dead_letters(seed)


@pytest.mark.parametrize(
    "story",
    [
        test_queue_faults.test_acks_count_though_the_journal_has_lost_what_its_snapshot_covers,
        test_queue_faults.test_retention_does_not_take_what_a_seek_has_just_brought_back,
    ],
)
def test_what_an_ack_or_a_seek_settled_stays_so(story, on_the_chain):
    on_the_chain(test_queue_faults, queue_promises.FOLDER)
    story()


def test_what_retention_took_behind_acks_is_not_missed(on_the_chain):
    on_the_chain(test_check_after_crashes, queue_promises.FOLDER)
    test_check_after_crashes.test_what_retention_took_behind_acks_is_not_missed_though_the_state_file_tells_of_an_older_end()


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "story",
    [
        test_queries.test_a_query_that_comes_at_any_moment_of_a_retention_run_keeps_all_but_the_segment_in_hand,
        test_queries.test_where_a_query_is_told_to_begin_stays_at_whichever_moment_of_a_retention_run_it_comes,
        test_queries.test_an_owner_killed_at_any_moment_leaves_what_a_query_needs_to_the_next_one,
    ],
)
def test_queries_and_retention_at_any_moment(story, on_the_chain):
    on_the_chain(brokers, brokers.FOLDER)
    story()


@pytest.mark.parametrize(
    "story",
    [
        test_broker_cuts.test_a_deleted_topic_takes_its_dead_letters_with_it_for_good,
        test_broker_cuts.test_a_deleted_group_stays_deleted_with_its_dead_letters,
        test_broker_cuts.test_a_group_that_could_not_be_made_can_be_made_later,
    ],
)
def test_what_was_deleted_or_could_not_be_made(story, on_the_chain, monkeypatch):
    on_the_chain(broker_histories, broker_promises.FOLDER)
    cuts = lambda history: [history.disk.cut(random.Random(seed)) for seed in range(3)]  # noqa: E731
    monkeypatch.setattr(test_broker_cuts, "every_cut", cuts)
    story()


@pytest.mark.slow
@pytest.mark.parametrize(
    "story",
    [
        test_broker_cuts.test_partitions_that_could_not_be_added_can_be_added_later_and_serve_every_group,
        test_broker_cuts.test_a_group_that_was_deleted_half_begins_anew_when_it_is_made_again,
    ],
)
def test_what_was_changed_by_half(story, on_the_chain, scale):
    on_the_chain(broker_histories, broker_promises.FOLDER)
    story(lambda usual, long: scale(2 * usual, long))


@pytest.mark.slow
def test_an_upgrade_that_is_cut_short(on_the_chain, fewer):
    on_the_chain(test_broker_check_after_crashes, test_broker_check_after_crashes.FOLDER)
    test_broker_check_after_crashes.test_nothing_is_missed_wherever_an_upgrade_is_cut_short(fewer)


@pytest.mark.parametrize("unlisted", ["", "/topics/orders"])
def test_a_list_that_an_upgrade_had_no_room_for(unlisted, on_the_chain, monkeypatch):
    folder = test_broker_check_after_crashes.FOLDER
    on_the_chain(test_broker_check_after_crashes, folder)
    test_broker_check_after_crashes.test_a_list_that_an_upgrade_had_no_room_for_is_not_missed(
        f"{folder}{unlisted}", monkeypatch
    )


@pytest.mark.slow
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for-a-while"])
@pytest.mark.parametrize("shortage", test_shortages.SHORTAGES)
def test_what_runs_out_refuses_one_call_of_a_broker(shortage, sticky, on_the_chain, fewer):
    on_the_chain(test_shortages, test_shortages.FOLDER)
    test_shortages.test_what_runs_out_refuses_one_call_of_a_broker_and_the_same_broker_goes_on(
        shortage, sticky, lambda usual, long: fewer(24, long)
    )


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["kill", "cut"])
def test_every_due_fires_once_wherever_the_owner_is_stopped(stop, on_the_chain, monkeypatch):
    on_the_chain(brokers, brokers.FOLDER)
    monkeypatch.setattr(test_schedules, "CUTS", 1)
    test_schedules.test_every_due_fires_once_wherever_the_owner_is_stopped(stop, 30.0, lambda usual, long: usual)


@pytest.mark.slow
def test_what_a_schedule_fires_after_a_second_stop_or_a_long_time(on_the_chain):
    on_the_chain(brokers, brokers.FOLDER)
    test_schedules.test_a_second_stop_while_catching_up_fires_nothing_twice_either(lambda usual, long: usual)
    test_schedules.test_a_firing_that_was_not_noted_is_found_after_the_window_of_its_topic(1_000)


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["kill", "cut"])
def test_a_transaction_is_whole_wherever_its_owner_is_stopped(stop, on_the_chain, monkeypatch):
    on_the_chain(brokers, brokers.FOLDER)
    monkeypatch.setattr(test_transactions, "CUTS", 1)
    monkeypatch.setattr(test_transactions, "EVERY", 3)
    test_transactions.test_a_transaction_is_there_as_a_whole_or_not_at_all_wherever_its_owner_is_stopped(
        stop, lambda usual, long: usual
    )


@pytest.mark.slow
def test_what_a_transaction_left_is_finished_after_a_second_stop_or_a_long_time(on_the_chain, monkeypatch):
    on_the_chain(brokers, brokers.FOLDER)
    monkeypatch.setattr(test_transactions, "EVERY", 4)
    test_transactions.test_a_second_stop_while_a_transaction_is_finished_changes_nothing(lambda usual, long: usual)
    test_transactions.test_what_is_decided_is_finished_after_the_window_of_its_topic(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["kill", "cut"])
def test_what_was_registered_is_there_wherever_the_owner_is_stopped(stop, on_the_chain, monkeypatch):
    pytest.importorskip("fastavro")
    from tests.crash import test_registry

    on_the_chain(brokers, brokers.FOLDER)
    monkeypatch.setattr(test_registry, "CUTS", 1)
    test_registry.test_what_was_registered_is_there_wherever_the_owner_is_stopped(stop, lambda usual, long: 2 * usual)


# Spark's sink, which needs two packages


@pytest.fixture
def spark_writes(on_the_chain) -> ModuleType:
    for package in ("pyarrow", "pyspark"):
        pytest.importorskip(package)
    from tests.crash import test_spark_writes
    from tests.unit import sinks

    on_the_chain(sinks, sinks.ROOT)
    return test_spark_writes


@pytest.mark.slow
@pytest.mark.parametrize("story", ["plain", "delayed", "unique"])
@pytest.mark.parametrize("stop", ["cut", "kill"])
def test_every_row_is_there_once_wherever_a_commit_is_stopped(stop, story, spark_writes, fewer):
    test_spark_writes = spark_writes
    test_spark_writes.test_every_row_is_there_once_wherever_the_commit_is_stopped(stop, story, fewer)


@pytest.mark.slow
@pytest.mark.parametrize("story", ["plain", "delayed"])
def test_a_commit_that_is_stopped_twice_or_whose_copy_fails(story, spark_writes, fewer):
    test_spark_writes = spark_writes
    test_spark_writes.test_a_second_stop_while_the_first_one_is_made_good_doubles_nothing_either(
        story, lambda usual, long: fewer(16, long)
    )
    test_spark_writes.test_a_disk_that_fails_once_doubles_nothing("EIO", story, lambda usual, long: usual)
