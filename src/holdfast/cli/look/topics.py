"""How topics and groups stand: read beside whoever owns the folder, or asked of a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from holdfast.broker.inspect.status import FolderStatus, GroupStanding, TopicStanding
from holdfast.cli.opening import asked, opened_broker
from holdfast.client.address import is_address
from holdfast.env import real_world


class ToldStanding:
    """A server at one moment, with the methods of `Standing`."""

    def __init__(self, place: str) -> None:
        self._place = place

    def topics(self) -> Iterator[TopicStanding]:
        """All of them that the caller may see."""
        return iter(self.look()[0])

    def topic(self, name: str) -> TopicStanding:
        """One of them; UnknownTopic where there is none."""
        return self.look(name)[0][0]

    def groups(self, topic: str | None = None) -> list[GroupStanding]:
        """The groups of a topic, or of all."""
        found = self.look(topic)[0]
        return sorted((group for each in found for group in each.groups), key=lambda group: (group.name, group.topic))

    def look(self, topic: str | None = None) -> tuple[list[TopicStanding], dict[str, int]]:
        """The topics, and how many messages of each wait for their time."""
        from holdfast.protocol.topics import Standings

        with opened_broker(self._place) as broker:
            told = asked(broker, Standings, "standing", topic=topic)
            topics, delayed = told.topics, told.delayed
            while told.next:
                told = asked(broker, Standings, "standing", after=told.next)
                topics, delayed = topics + told.topics, delayed | told.delayed
        return topics, delayed


AnyStanding: TypeAlias = FolderStatus | ToldStanding


def standing_of(place: str) -> AnyStanding:
    """How things stand there now."""
    return ToldStanding(place) if is_address(place) else FolderStatus(real_world(), place)
