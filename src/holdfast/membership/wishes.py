"""What the members of a group want, in one fixed order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

TopicPartition: TypeAlias = tuple[str, int]
Target: TypeAlias = dict[str, tuple[TopicPartition, ...]]


class Wishes:
    """Members and topics in order of their names; a topic without partitions or without takers is no topic."""

    def __init__(self, wants: Mapping[str, Collection[str]], counts: Mapping[str, int]) -> None:
        self.members = sorted(wants)
        self.counts = {topic: counts[topic] for topic in sorted(counts) if counts[topic] > 0}
        self.topics = {m: frozenset(topic for topic in wants[m] if topic in self.counts) for m in self.members}
        self.takers = {
            topic: takers for topic in self.counts if (takers := [m for m in self.members if topic in self.topics[m]])
        }

    def partitions(self) -> Iterator[TopicPartition]:
        """Every partition that somebody wants."""
        for topic in self.takers:
            for partition in range(self.counts[topic]):
                yield topic, partition

    def kept(self, current: Mapping[str, Collection[TopicPartition]]) -> dict[TopicPartition, str]:
        """Who has each partition now and still wants it; of two who claim it the first by name."""
        owners: dict[TopicPartition, str] = {}
        for member in self.members:
            for topic, partition in current.get(member, ()):
                if topic in self.topics[member] and 0 <= partition < self.counts[topic]:
                    owners.setdefault((topic, partition), member)
        return owners
