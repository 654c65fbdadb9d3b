"""Calls that concern all shards: each shard answers for itself, and the answers are put together here.

All shards must answer, or the call fails: an answer that left one out would be wrong without saying so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.broker.samples import Sample, Samples
from holdfast.broker.streams import GroupFacts
from holdfast.protocol.messages import ScheduleList
from holdfast.protocol.topics import (
    Acts,
    DocumentNames,
    GroupOffsets,
    Groups,
    GroupTold,
    HeldLocks,
    Standings,
    Topics,
    WaitersTold,
    WorkersOrdered,
    WorkersTold,
)

_LIMIT: Final = 1_000  # the usual number of entries in an answer
_SUMS: Final = ("published_rate", "handled_rate", "failed_rate", "ready", "dead")
_HIGHEST: Final = ("oldest_seconds", "handle_p50_seconds", "handle_p99_seconds")
_STATES: Final = ("empty", "stable", "rebalancing")


class ShardAnswer(NamedTuple):
    """What one shard answered, and which node it is on."""

    shard: int
    node: str
    value: Any


Merge = Callable[[Sequence[ShardAnswer], dict[str, str]], Any]


class MergedCall(NamedTuple):
    """How a call to all shards is answered. Shards that answer with the error `missing` are left out if others do not.

    With a `topic` in the query, or in the body, the call is for the shard of that topic alone.
    """

    kind: Any
    merge: Merge
    missing: str = ""
    by_topic: bool = False


def _limit(query: dict[str, str], usual: int = _LIMIT) -> int:
    return int(query.get("limit", usual))  # each shard has checked it


def _each(answers: Iterable[ShardAnswer], field: str) -> list[Any]:
    return [entry for answer in answers for entry in getattr(answer.value, field)]


def _topics(answers: Sequence[ShardAnswer], query: dict[str, str]) -> Topics:
    found = sorted(_each(answers, "topics"), key=lambda info: info.name)
    most = _limit(query)
    return Topics(topics=found[:most], more=len(found) > most or any(answer.value.more for answer in answers))


def _standings(answers: Sequence[ShardAnswer], query: dict[str, str]) -> Standings:
    """The first topics by name. A shard with more of them names its last one: beyond that it may have others."""
    found = sorted(_each(answers, "topics"), key=lambda topic: topic.name)
    ends = [answer.value.next for answer in answers if answer.value.next]
    known = [topic for topic in found if not ends or topic.name <= min(ends)]
    shown = known[: _limit(query)]
    more = bool(ends) or len(known) > len(shown)
    delayed = {name: count for answer in answers for name, count in answer.value.delayed.items()}
    names = {topic.name for topic in shown}
    return Standings(
        topics=shown,
        delayed={name: count for name, count in delayed.items() if name in names},
        next=(shown[-1].name if len(known) > len(shown) else min(ends)) if more else "",
    )


def _groups(answers: Sequence[ShardAnswer], query: dict[str, str]) -> Groups:
    found = sorted(_each(answers, "groups"), key=lambda info: (info.topic, info.name))
    return Groups(groups=found[: _limit(query)])


def _group(answers: Sequence[ShardAnswer], _: dict[str, str]) -> GroupTold:
    streams = [(answer.shard, answer.value.stream) for answer in answers if answer.value.stream is not None]
    return GroupTold(name=answers[0].value.name, topics=_each(answers, "topics"), stream=joined_stream(streams))


def joined_stream(found: Sequence[tuple[int, GroupFacts]]) -> GroupFacts | None:
    """A stream group with members on topics of several shards."""
    if not found:
        return None
    members = [
        msgspec.structs.replace(member, id=f"{shard}-{member.id}") for shard, facts in found for member in facts.members
    ]
    _, first = found[0]
    return msgspec.structs.replace(
        first,
        state=max((facts.state for _, facts in found), key=_STATES.index),
        epoch=max(facts.epoch for _, facts in found),
        members=members,
        lag=[lag for _, facts in found for lag in facts.lag],
    )


def _waiters(answers: Sequence[ShardAnswer], query: dict[str, str]) -> WaitersTold:
    lines = sorted(_each(answers, "lines"), key=lambda line: -line.waiters)
    nodes = {answer.node: answer.value for answer in answers}  # the shards of a node count together
    return WaitersTold(
        waiting=sum(value.waiting for value in nodes.values()),
        max_waiters=sum(value.max_waiters for value in nodes.values()),
        lines=lines[: _limit(query, 100)],
    )


def _acts(answers: Sequence[ShardAnswer], query: dict[str, str]) -> Acts:
    most = _limit(query, 100)
    acts, refused = (
        sorted(_each(answers, field), key=lambda act: act.time, reverse=True)[:most] for field in ("acts", "refused")
    )
    return Acts(acts=acts, refused=refused)


def _schedules(answers: Sequence[ShardAnswer], _: dict[str, str]) -> ScheduleList:
    return ScheduleList(schedules=sorted(_each(answers, "schedules"), key=lambda each: each.name))


def merged_samples(answers: Sequence[Samples]) -> Samples:
    """The samples of all shards together: rates and levels add up; of ages and handling times, the highest counts."""
    steps: dict[datetime, list[Sample]] = {}
    for samples in answers:
        for sample in samples.samples:
            steps.setdefault(sample.at, []).append(sample)
    return msgspec.structs.replace(
        answers[0],
        since=min(each.since for each in answers),
        until=max(each.until for each in answers),
        samples=[_together(at, some) for at, some in sorted(steps.items())],
    )


def _together(at: datetime, some: Sequence[Sample]) -> Sample:
    sums: dict[str, Any] = {name: sum(getattr(each, name) for each in some) for name in _SUMS}
    most: dict[str, Any] = {
        name: max((value for each in some if (value := getattr(each, name)) is not None), default=None)
        for name in _HIGHEST
    }
    return Sample(at=at, **sums, **most)


def _nothing(_: Sequence[ShardAnswer], __: dict[str, str]) -> None:
    return None


MERGED: Final[dict[tuple[str, str], MergedCall]] = {
    ("GET", "/v1/topics"): MergedCall(Topics, _topics),
    ("GET", "/v1/standing"): MergedCall(Standings, _standings, by_topic=True),
    ("GET", "/v1/groups"): MergedCall(Groups, _groups, by_topic=True),
    ("GET", "/v1/groups/{group}"): MergedCall(GroupTold, _group, missing="unknown_group"),
    ("DELETE", "/v1/groups/{group}"): MergedCall(None, _nothing, missing="unknown_group", by_topic=True),
    ("GET", "/v1/groups/{group}/offsets"): MergedCall(
        GroupOffsets,
        lambda answers, _: GroupOffsets(offsets=_each(answers, "offsets")),
        missing="unknown_group",
        by_topic=True,
    ),
    ("GET", "/v1/locks"): MergedCall(
        HeldLocks, lambda answers, _: HeldLocks(locks=sorted(_each(answers, "locks"), key=lambda lock: lock.name))
    ),
    ("GET", "/v1/state"): MergedCall(
        DocumentNames, lambda answers, _: DocumentNames(names=sorted(_each(answers, "names")))
    ),
    ("GET", "/v1/workers"): MergedCall(WorkersTold, lambda answers, _: WorkersTold(workers=_each(answers, "workers"))),
    ("GET", "/v1/admin/waiters"): MergedCall(WaitersTold, _waiters),
    ("GET", "/v1/admin/audit"): MergedCall(Acts, _acts),
    ("GET", "/v1/schedules"): MergedCall(ScheduleList, _schedules),
    ("GET", "/v1/samples"): MergedCall(
        Samples, lambda answers, _: merged_samples([answer.value for answer in answers])
    ),
    ("POST", "/v1/admin/sync"): MergedCall(None, _nothing),
    **{
        ("POST", f"/v1/workers/{{worker}}/{order}"): MergedCall(
            WorkersOrdered, lambda answers, _: WorkersOrdered(ids=_each(answers, "ids")), missing="not_found"
        )
        for order in ("drain", "resume", "stop")
    },
}
