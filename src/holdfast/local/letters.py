"""The dead letters of a group, to look at beside whoever owns the folder: `queue.dead` without the moves."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.api.bodies import Bodies
from holdfast.api.contents import Place
from holdfast.api.letters import DeadGroup, grouped, no_letter
from holdfast.api.listed import DeadLetter, Where, chosen, note_of
from holdfast.broker.folder.contents import Catalog, GroupNotes
from holdfast.broker.folder.layout import DEAD_SUFFIX, parse_message_id, topic_folder
from holdfast.broker.inspect.messages import letters_of
from holdfast.env import World
from holdfast.errors import UnknownGroup

list_ = list  # inside LettersBeside the name means its method


class LettersBeside:
    """Takes no lock and writes nothing; what the owner is about to bury is not there yet."""

    def __init__(self, world: World, folder: str, topic: str, group: str) -> None:
        self._world = world
        self._folder = folder
        self._topic = topic
        self._group = group
        self._bodies = Bodies(None)
        self._count = Catalog(world, folder).facts(topic).partitions
        groups = GroupNotes(world, topic_folder(folder, topic)).names(self._count)
        if group not in groups:
            there = f"there are {', '.join(groups[:10])}" if groups else "it has none yet"
            raise UnknownGroup(f"{topic} has no group {group} in queue mode; {there}")

    def list(self, *, where: Where = None, limit: int | None = None) -> list[DeadLetter[bytes]]:
        """The dead letters that the condition chooses, oldest first."""
        now_ms = self._world.clock.now_ns() // 1_000_000
        return [*chosen(self._all(), where, limit, now_ms=now_ms)]

    def groups(self, *, where: Where = None) -> list_[DeadGroup]:
        """The dead letters by reason and kind of error, the most frequent first."""
        return grouped(self.list(where=where))

    def show(self, letter_id: str) -> DeadLetter[bytes]:
        """One of them, by its id, or by the one that the message had when it was alive."""
        lived = letter_id.startswith(f"{self._topic}-")
        place = parse_message_id(letter_id, self._topic + ("" if lived else DEAD_SUFFIX))
        found = None
        for letter in self._in(place.partition) if place.partition < self._count else ():
            note = note_of(letter)
            same = note.offset == place.offset or letter_id in (note.id, note.first.id)
            if same if lived else letter.offset == place.offset:
                found = letter  # after a seek it may have died more than once: the last time counts
        if found is None:
            raise no_letter(f"of {letter_id}" if lived else letter_id)
        return found

    def _all(self) -> Iterator[DeadLetter[bytes]]:
        for number in range(self._count):
            yield from self._in(number)

    def _in(self, number: int) -> Iterator[DeadLetter[bytes]]:
        home = Place(self._topic, number)
        for seen in letters_of(self._world, self._folder, self._topic, number):
            if seen.state == "waiting" and seen.note.group == self._group:
                yield DeadLetter(home, self._bodies, seen.record, seen.note)
