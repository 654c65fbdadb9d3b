"""Load over HTTP on a server that is killed with -9 and started again every few seconds: every promise holds."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

import holdfast
from tests.integration.kills_gear import EVENTS, JOBS, LEASE_S, PARTITIONS, Clients, Kill, Notes, number_of
from tests.integration.process_gear import ServerProcess, say, server_process

pytestmark = [pytest.mark.serial, pytest.mark.slow, pytest.mark.timeout(3 * 3600)]

SECONDS, LONG_SECONDS = 60, 30 * 60
KILL_EVERY_S = 10.0
SERVED_S = 20.0  # 2 s on a quiet machine; this one may be busy


def test_every_promise_holds_while_the_server_is_killed_again_and_again(tmp_path: Path, scale):
    seconds = scale(SECONDS, LONG_SECONDS)
    with server_process(tmp_path / "data", "--no-console") as server:
        make_topics(server.url)
        clients = Clients(server.url)
        clients.start()
        try:
            kill_again_and_again(server, clients.notes, seconds)
            clients.finish()
        finally:
            clients.stop()
        notes = clients.notes
        assert not notes.errors, notes.errors
        report(notes, seconds)
        check_events(notes, stored_events(server.url))
        check_jobs(notes)
        with holdfast.open(server.url, topic=JOBS) as queue:
            stats = queue.stats()
            assert (stats.ready, stats.leased, stats.delayed, stats.dead) == (0, 0, 0, 0)
    waits = notes.seconds_until_served()
    assert len(notes.kills) >= seconds / KILL_EVERY_S / 2
    assert max(waits) < SERVED_S, f"back in service after {waits}"
    assert len(notes.deliveries) > 20 * seconds, "this was no load"
    assert len(notes.reads) > 20 * seconds, "this was no load"
    assert sum(delivery.abandoned for delivery in notes.deliveries) > seconds / 10, "no lease had to run out"


def make_topics(url: str) -> None:
    """Segments and snapshots end often enough that kills hit them."""
    small = {"segment_bytes": 256 * 1024, "snapshot_events": 5_000}
    with holdfast.connect(url) as broker:
        broker.create_topic(EVENTS, partitions=PARTITIONS, **small)
        broker.create_topic(
            JOBS, key_order=True, max_attempts=None, retention_ms=2_000, retention_check_ms=500, **small
        )


def kill_again_and_again(server: ServerProcess, notes: Notes, seconds: float) -> None:
    rng = random.Random(7)
    until = time.monotonic() + seconds
    while time.monotonic() < until and not notes.errors:
        time.sleep(KILL_EVERY_S * rng.uniform(0.7, 1.1))
        kill = Kill(time.monotonic())
        server.kill()
        notes.kills.append(kill)
        kill.started_at = time.monotonic()
        server.start()
        kill.listening_at = time.monotonic()


def stored_events(url: str) -> list[list[tuple[str, int]]]:
    """What each partition holds in the end."""
    found = []
    with holdfast.connect(url) as broker:
        for partition in range(PARTITIONS):
            bodies: list[bytes] = []
            while more := list(broker.read(EVENTS, partition=partition, offset=len(bodies), limit=5_000)):
                bodies += [event.body for event in more]
            found.append([number_of(body) for body in bodies])
    return found


def check_events(notes: Notes, stored: list[list[tuple[str, int]]]) -> None:
    """Stored once and in order, read by somebody, and never again after a commit."""
    everything = [number for partition in stored for number in partition]
    assert len(everything) == len(set(everything)), "an idempotent producer's message is there twice"
    assert set(everything) == set(notes.sent[EVENTS]), "lost, or never sent"
    for partition in stored:
        check_keys_in_order(partition)
    seen: dict[int, set[int]] = defaultdict(set)
    last: dict[tuple[float, int], int] = {}
    for read in notes.reads:
        assert stored[read.partition][read.offset] == read.number, "an offset means two messages"
        seen[read.partition].add(read.offset)
        before = last.get((read.asked_at, read.partition))
        assert before is None or read.offset == before + 1, "a poll was not in order"
        last[read.asked_at, read.partition] = read.offset
    for number, partition in enumerate(stored):
        assert seen[number] == set(range(len(partition))), f"partition {number} was not read as a whole"
    check_commits(notes)


def check_commits(notes: Notes) -> None:
    """What was committed before somebody asked does not come to him."""
    commits, committed = sorted(notes.commits, key=lambda each: each.at), dict.fromkeys(range(PARTITIONS), 0)
    i = 0
    for read in sorted(notes.reads, key=lambda each: each.asked_at):
        while i < len(commits) and commits[i].at < read.asked_at:
            for partition, offset in commits[i].offsets.items():
                committed[partition] = max(committed[partition], offset)
            i += 1
        assert read.offset >= committed[read.partition], f"{read} comes after it was committed"


def check_keys_in_order(numbers: list[tuple[str, int]]) -> None:
    counts: dict[str, int] = defaultdict(int)
    for key, count in numbers:
        assert count == counts[key], f"key {key}: {count} comes where {counts[key]} is expected"
        counts[key] += 1


def check_jobs(notes: Notes) -> None:
    """Each job is handled; again only if it was in hand at a kill, or left to itself, and never in two hands."""
    by_number = defaultdict(list)
    by_key = defaultdict(list)
    for delivery in sorted(notes.deliveries, key=lambda each: each.fence):
        by_number[delivery.number].append(delivery)
        by_key[delivery.number[0]].append(delivery)
    assert set(by_number) == set(notes.sent[JOBS]), "lost, or never sent"
    for number, deliveries in by_number.items():
        assert len({each.offset for each in deliveries}) == 1, f"{number} was stored twice"
        for earlier, later in pairwise(deliveries):
            assert earlier.fence < later.fence
            assert not earlier.acked, f"{earlier} was acked and comes again: {later}"
            in_hand = [kill for kill in notes.kills if earlier.asked_at <= kill.at <= earlier.ended_at]
            assert in_hand or earlier.abandoned, f"{earlier} comes again, and was not in hand at a kill: {later}"
            # The lease began after it was asked for, and nobody else had the job before its end.
            assert later.got_at >= earlier.asked_at + LEASE_S, f"in two hands at once: {earlier}, {later}"
        last = deliveries[-1]
        assert last.acked or any(last.asked_at <= kill.at <= last.ended_at for kill in notes.kills), f"{last} is open"
    for key, deliveries in by_key.items():
        counts = [each.number[1] for each in deliveries]
        assert counts == sorted(counts), f"key {key} was handed out of order"


def report(notes: Notes, seconds: float) -> None:
    listening = [kill.listening_at - kill.started_at for kill in notes.kills]
    served = notes.seconds_until_served()
    again = len(notes.deliveries) - len(notes.sent[JOBS])
    unheard = sum(delivery.attempt > 1 for delivery in notes.deliveries) - again
    say(
        f"{len(notes.kills)} kills in {seconds:.0f} s: {len(notes.sent[EVENTS])} events sent, {len(notes.reads)} read; "
        f"{len(notes.sent[JOBS])} jobs, {again} of them handed out again "
        f"({sum(delivery.abandoned for delivery in notes.deliveries)} had been left to themselves), "
        f"{unheard} after an answer that nobody heard; "
        f"listening after {statistics.median(listening):.2f} s (at most {max(listening):.2f}), "
        f"a message stored after {statistics.median(served):.2f} s (at most {max(served):.2f})"
    )
