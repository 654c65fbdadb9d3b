"""What must never be seen in a history, whatever happened to the servers, the network, the store and the clocks.

Each check takes the calls of some kinds of clients, and what is left in the topics at the end, and returns what it
found, in words. Checks of time use one rule: something certainly held from the end of the call that got it, to the
start of the call that gave it away, or until its lease, counted from the start of the call, was over.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from tests.nemesis.history import BUG, NEVER, Event, Result
from tests.nemesis.linear import Timed, by_key, linearize
from tests.nemesis.models import Held, step, tells

MARGIN_S = 0.05  # leases are measured by a server, these times by a client
# What a caller may be told in bad times. Anything else is a fault.
EXPECTED = frozenset({
    "", "busy", "closed", "conflict", "empty", "fenced", "lease_lost", "lock_held", "queue_full", "too_many_waiters",
    "unavailable",
})  # fmt: skip


@dataclass
class Left:
    """What is stored at the end."""

    queued: list[tuple[str, str]] = field(default_factory=list)  # topic and body of each message that was not acked
    stored: dict[tuple[str, int], list[tuple[int, str]]] = field(default_factory=dict)  # offset and body, by partition


def check_errors(events: Sequence[Event], left: Left) -> list[str]:
    """Clients are told what they can act on."""
    found = Counter(event.error for event in events if event.error not in EXPECTED or event.error.startswith(BUG))
    return [f"{count} calls failed in a way that nobody expects: {error}" for error, count in found.items()]


# Queues


def check_queues(events: Sequence[Event], left: Left) -> list[str]:
    """Nothing that was acknowledged is lost; what was acked stays so; and fencing numbers tell who came later."""
    of: dict[str, dict[str, list[Event]]] = {
        op: defaultdict(list) for op in ("put", "get", "pin", "ack", "nack")
    }  # by topic and body
    for event in events:
        if event.op in of and event.key.startswith("nemesis-queue"):
            body = event.out["body"] if event.op == "get" and event.ok else event.given.get("body")
            if body is not None:
                of[event.op][f"{event.key} {body}"].append(event)
    queued = Counter(f"{topic} {body}" for topic, body in left.queued)
    found = [f"{name} was put, was not acked, and is gone" for name, puts in of["put"].items()
             if any(put.ok for put in puts) and name not in queued
             and not any(ack.result is not Result.FAIL for ack in of["ack"][name])]  # fmt: skip
    found += [f"{name} was delivered, but never put" for name in (of["get"].keys() | queued.keys()) - of["put"].keys()]
    found += [f"{name} is stored {count} times" for name, count in queued.items() if count > 1]
    for name, acks in of["ack"].items():
        done = [ack for ack in acks if ack.ok]
        if done and name in queued:
            found.append(f"{name} was acked and is still there")
        fences = {ack.given["fence"] for ack in done}
        # A client that had to repeat an ack takes it for its own if the message is done, whoever has done it meanwhile.
        if len(fences) > 1 and max(ack.began for ack in done) > min(ack.ended for ack in done):
            found.append(f"{name} was acked by the holders of {sorted(fences)}")
        for ack in done:
            if any(get.began > ack.ended for get in of["get"][name] if get.ok):
                found.append(f"{name} was delivered after it was acked")
    gets = [get for each in of["get"].values() for get in each if get.ok]
    found += _fences(gets)
    found += _two_hands(of)
    return found


def _fences(gets: Iterable[Event]) -> list[str]:
    """Every later delivery of a topic has a higher fencing number."""
    found = []
    by_topic: dict[str, list[Event]] = defaultdict(list)
    for get in gets:
        by_topic[get.key].append(get)
    for topic, each in by_topic.items():
        given = Counter(get.out["fence"] for get in each)
        found += [f"fence {fence} of {topic} was given {count} times" for fence, count in given.items() if count > 1]
        ended = sorted(each, key=lambda get: get.ended)
        highest, at = 0, 0
        for get in sorted(each, key=lambda get: get.began):
            while at < len(ended) and ended[at].ended < get.began:
                highest = max(highest, ended[at].out["fence"])
                at += 1
            if get.out["fence"] <= highest:
                found.append(f"fence {get.out['fence']} of {topic} came after {highest}")
    return found


def _two_hands(of: dict[str, dict[str, list[Event]]]) -> list[str]:
    """A lease that is known to be in the store keeps others out until it is over."""
    found = []
    for name, pins in of["pin"].items():
        for pin in pins:
            fence = pin.given["fence"]
            got = next((get for get in of["get"][name] if get.ok and get.out["fence"] == fence), None)
            if not pin.ok or got is None:
                continue
            given_away = [each.began for op in ("ack", "nack") for each in of[op][name] if each.given["fence"] == fence]
            until = min([got.began + got.given["lease"] - MARGIN_S, *given_away])
            for other in of["get"][name]:
                if other.ok and other is not got and other.began > pin.ended and other.ended < until:
                    found.append(f"{name} was held by {fence} when {other.out['fence']} got it")
    return found


# Streams and producers


def check_streams(events: Sequence[Event], left: Left) -> list[str]:
    """Offsets are used once, keys keep their order, reads and commits never go back."""
    found = _stored(events, left)
    for topic in {topic for topic, _ in left.stored}:
        mine = [event for event in events if event.key == topic]
        found += _committed(topic, [each for each in mine if each.op in ("poll", "commit")], left)
        found += _reads(topic, [each for each in mine if each.op == "read" and each.ok], left)
    return found


def _stored(events: Sequence[Event], left: Left) -> list[str]:
    """What was confirmed is where it was confirmed, once, and each key's messages are in their order."""
    found = []
    at = {(topic, partition, offset): body
          for (topic, partition), records in left.stored.items() for offset, body in records}  # fmt: skip
    copies = Counter((topic, body) for (topic, _, _), body in at.items())
    found += [f"{topic} has {body} {count} times" for (topic, body), count in copies.items() if count > 1]
    sent = [event for event in events if event.op in ("publish", "send") and event.ok]
    for event in sent:
        place = event.key, event.out["partition"], event.out["offset"]
        if at.get(place) != event.given["body"]:
            found.append(f"{event.given['body']} was stored at {place}, where {at.get(place)} is now")
    number = {event.given["body"]: event for event in events if event.op in ("publish", "send")}
    for (topic, partition), records in left.stored.items():
        last: dict[str, Event] = {}
        for offset, body in records:
            event = number.get(body)
            if event is None:
                found.append(f"{topic} {partition} has {body} at {offset}, which nobody sent")
                continue
            key = event.given.get("of", event.client)
            before = last.get(key)
            if before is not None and event.until < before.began:
                found.append(f"{body} stands behind {before.given['body']}, but had been stored before that was sent")
            if before is not None and event.op == "send" and event.given["number"] < before.given["number"]:
                found.append(f"{body} of a producer stands behind {before.given['body']}")
            last[key] = event
    return found


def _committed(topic: str, events: Sequence[Event], left: Left) -> list[str]:
    """Nothing before a commit is read again, nothing is skipped, and what was committed is what is stored."""
    found = []
    mine = [(partition, records) for (name, partition), records in left.stored.items() if name == topic]
    stored = {(partition, offset): body for partition, records in mine for offset, body in records}
    commits = sorted((each for each in events if each.op == "commit" and each.ok), key=lambda each: each.ended)
    polls = [each for each in events if each.op == "poll" and each.ok]
    kept: dict[str, int] = {}
    at = 0
    for poll in sorted(polls, key=lambda each: each.began):
        while at < len(commits) and commits[at].ended < poll.began:
            for partition, offset in commits[at].given["offsets"].items():
                kept[partition] = max(kept.get(partition, 0), offset)
            at += 1
        for partition, offset, _ in poll.out:
            if offset < kept.get(str(partition), 0):
                found.append(f"{topic} {partition}: {offset} was read after {kept[str(partition)]} was committed")
    highest: dict[str, int] = {}
    for commit in commits:
        for partition, offset in commit.given["offsets"].items():
            highest[partition] = max(highest.get(partition, 0), offset)
    read = defaultdict(set)
    for poll in polls:
        for partition, offset, body in poll.out:
            read[str(partition), offset].add(body)
    for (partition, offset), body in stored.items():
        if offset < highest.get(str(partition), 0) and body not in read[str(partition), offset]:
            found.append(f"{topic} {partition}: {offset} was committed, but nobody read {body}")
    return found


def _reads(topic: str, reads: Sequence[Event], left: Left) -> list[str]:
    """What one read has shown, every later one shows."""
    found = []
    for partition in {read.given["partition"] for read in reads}:
        mine = sorted((each for each in reads if each.given["partition"] == partition), key=lambda each: each.ended)
        records = left.stored.get((topic, partition), [])
        stored = dict(records)
        seen: dict[int, str] = {}
        for read in mine:
            for offset, body in read.out:
                if seen.setdefault(offset, body) != body or stored.get(offset) != body:
                    now = stored.get(offset)
                    found.append(f"{topic} {partition}: {offset} was {body}, and later {seen[offset]}, and is {now}")
        highest, at = -1, 0
        for read in sorted(mine, key=lambda each: each.began):
            while at < len(mine) and mine[at].ended < read.began:
                highest = max([highest, *(offset for offset, _ in mine[at].out)])
                at += 1
            last = max((offset for offset, _ in read.out), default=-1)
            if len(read.out) < 50 and last < highest and read.given["offset"] <= highest:
                found.append(f"{topic} {partition}: a read from {read.given['offset']} ended at {last}, not {highest}")
    return found


# Locks and documents


def check_locks(events: Sequence[Event], left: Left) -> list[str]:
    """Two never hold a lock at one time."""
    found = []
    locks: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.op in ("acquire", "keepalive", "release") and event.key.startswith("nemesis-lock"):
            locks[event.key].append(event)
    for name, calls in locks.items():
        spans = sorted(_held(calls))
        for (_, until, fence), (began, _, other) in pairwise(spans):
            if began < until:
                found.append(f"{name} was held by {fence} until {until:.3f}, and by {other} from {began:.3f}")
    return found


def _held(calls: Sequence[Event]) -> list[tuple[float, float, int]]:
    """When each holder certainly had the lock."""
    spans = []
    for call in calls:
        if call.op != "acquire" or not call.ok:
            continue
        fence = call.out["fence"]
        until = call.began + call.given["lease"] - MARGIN_S
        for other in sorted(calls, key=lambda each: each.began):
            if other.given.get("fence") != fence:
                continue
            if other.op == "keepalive" and other.ok:
                until = max(until, other.began + other.given["lease"] - MARGIN_S)
            if other.op == "release":
                until = min(until, other.began)
        if until > call.ended:
            spans.append((call.ended, until, fence))
    return spans


def check_linearizable(events: Sequence[Event], left: Left) -> list[str]:
    """There is an order of the calls of each lock and document in which each did what it said."""
    ops = ("acquire", "keepalive", "release", "get", "update")
    names = ("nemesis-lock", "nemesis-document")
    chosen = [event for event in events if event.op in ops and event.key.startswith(names) and tells(event)]
    mine = [Timed(event, event.began, event.until) for event in chosen]
    found = []
    for name, calls in by_key([*mine, *_written_twice(mine)], lambda event: event.key).items():
        outcome = linearize(calls, Held(), step)
        if outcome.gave_up:
            found.append(f"{name}: whether {len(calls)} calls have an order was not found in {outcome.steps} steps")
        elif not outcome.good:
            stuck = "; ".join(f"{each.client} {each.op} {each.given} -> {each.out}" for each in outcome.stuck[:6])
            found.append(f"{name}: after {len(outcome.longest)} of {len(calls)} calls there is no next one: {stuck}")
    return found


def _written_twice(calls: Sequence[Timed[Event]]) -> list[Timed[Event]]:
    """Writes without a version that were seen with another one than they got in the end.

    A client that gets no answer repeats such a write, as is documented; then it may happen twice.
    """
    seen: dict[str, set[int]] = defaultdict(set)
    for each in calls:
        if each.call.op == "get":
            seen[each.call.out["value"]].add(each.call.out["version"])
    return [
        Timed(replace(each.call, out=None, result=Result.UNKNOWN), each.began, NEVER)
        for each in calls
        if each.call.op == "update" and each.call.ok and "version" not in each.call.given
        and seen[each.call.given["value"]] - {each.call.out["version"]}
    ]  # fmt: skip


CHECKS: dict[str, Callable[[Sequence[Event], Left], list[str]]] = {
    each.__name__.removeprefix("check_"): each
    for each in (check_errors, check_queues, check_streams, check_locks, check_linearizable)
}


def check_all(events: Sequence[Event], left: Left) -> dict[str, list[str]]:
    """What each check found."""
    return {name: found for name, check in CHECKS.items() if (found := check(events, left))}


def tally(events: Sequence[Event]) -> dict[str, str]:
    """How many calls of each kind succeeded, were refused, and ended unknown."""
    counts: dict[str, Counter[Result]] = defaultdict(Counter)
    for event in events:
        counts[event.op][event.result] += 1
    return {op: "/".join(str(each[result]) for result in Result) for op, each in sorted(counts.items())}
