"""How far a stream is: what Spark keeps in its checkpoint, and nobody else keeps anywhere.

    {"version": 1, "topics": {"orders": {"id": 4711, "partitions": {"0": {"epoch": 1, "offset": 23}}}}}

The id tells another topic of the same name from the one that was read. The epoch tells whether the offset still
means the message that it meant: after a power cut another one may stand there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from holdfast.errors import InvalidRequest
from holdfast.model import LogPosition

_VERSION: Final = 1


class TopicPositions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where reading goes on in each partition of a topic."""

    id: int
    partitions: dict[int, LogPosition] = {}


class Positions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where reading goes on, by topic."""

    topics: dict[str, TopicPositions] = {}

    def at(self, topic: str, partition: int) -> LogPosition | None:
        """None for a partition that was not known then: it is read from its beginning."""
        known = self.topics.get(topic)
        return None if known is None else known.partitions.get(partition)

    def places(self) -> Iterator[tuple[str, int, LogPosition]]:
        for topic, known in self.topics.items():
            for partition, position in known.partitions.items():
                yield topic, partition, position

    def offsets(self) -> dict[str, tuple[int, dict[int, int]]]:
        """By topic: its id, and the offset in each partition."""
        return {
            topic: (known.id, {number: position.offset for number, position in known.partitions.items()})
            for topic, known in self.topics.items()
        }


def to_json(positions: Positions) -> dict[str, Any]:
    """As Spark keeps them, always in the same order: it compares them as text."""
    topics = {
        topic: {
            "id": known.id,
            "partitions": {
                str(number): {"epoch": position.epoch, "offset": position.offset}
                for number, position in sorted(known.partitions.items())
            },
        }
        for topic, known in sorted(positions.topics.items())
    }
    return {"version": _VERSION, "topics": topics}


def from_json(document: Mapping[str, Any]) -> Positions:
    """What a checkpoint says; refused where it is not ours, or of a newer release."""
    if document.get("version") != _VERSION:
        raise InvalidRequest(
            f"the checkpoint's offsets {str(dict(document))[:200]} were not written by this source, or by a newer "
            "release: give the query a checkpoint of its own, or upgrade"
        )
    try:
        return msgspec.convert({"topics": document.get("topics", {})}, Positions, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the checkpoint's offsets cannot be used: {error}") from None
