"""The invariants of a group's membership: tests look at them after every step."""

from __future__ import annotations

from collections import Counter

from holdfast.membership.assignment import TopicPartition, Wishes
from holdfast.membership.members import Members


def check(members: Members) -> list[str]:
    """What is wrong with the state; nothing, if all is well."""
    return [*_owners(members), *_target(members), *_epochs(members), *_names(members)]


def _owners(members: Members) -> list[str]:
    wrong: list[str] = []
    owners: dict[TopicPartition, str] = {}
    for name, member in members.members.items():
        for place in member.owned:
            if place in owners:
                wrong.append(f"{place} has two owners: {owners[place]} and {name}")
            owners[place] = name
        if bool(members.stale(member)) != (member.asked_ms is not None):
            wrong.append(f"{name} has {members.stale(member)} to give back, since {member.asked_ms}")
    if owners != members.owners:
        wrong.append("the table of owners is not what the members own")
    return wrong


def _target(members: Members) -> list[str]:
    wrong: list[str] = []
    if set(members.target) != set(members.members):
        wrong.append("the target is not for those who are members")
    wishes = Wishes({name: member.topics for name, member in members.members.items()}, members.counts)
    meant = Counter(place for places in members.target.values() for place in places)
    if meant != Counter(wishes.partitions()):
        wrong.append("the target does not have each wanted partition once")
    for name, places in members.target.items():
        wrong += [
            f"{place} shall be {name}'s, who does not want it" for place in places if not _wants(wishes, name, place)
        ]
    return wrong


def _wants(wishes: Wishes, name: str, place: TopicPartition) -> bool:
    return place[0] in wishes.topics.get(name, ())


def _epochs(members: Members) -> list[str]:
    wrong: list[str] = []
    if members.target_epoch > members.epoch:
        wrong.append(f"the target is of epoch {members.target_epoch}, the group of {members.epoch}")
    for name, member in members.members.items():
        if not member.joined_epoch <= member.epoch <= members.epoch:
            wrong.append(f"{name} is at epoch {member.epoch}, the group at {members.epoch}")
        wrong += [
            f"{name} got {place} in epoch {epoch}" for place, epoch in member.owned.items() if epoch > members.epoch
        ]
    return wrong


def _names(members: Members) -> list[str]:
    names = Counter(member.name for member in members.members.values())
    wrong = [f"{count} members are called {name}" for name, count in names.items() if count > 1]
    return wrong + [f"{name} is kept as {member.id}" for name, member in members.members.items() if name != member.id]
