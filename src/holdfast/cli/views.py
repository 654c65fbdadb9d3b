"""The queues that the ids or receipts of one call belong to: they say of which topic they are."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import holdfast
from holdfast.broker.layout import DEFAULT_GROUP
from holdfast.cli.opened import some_of, topic_named, view
from holdfast.cli.remote import is_remote
from holdfast.errors import Forbidden, HoldfastError, InvalidRequest


class Views:
    """Queues of one place, each opened when it is needed."""

    def __init__(self, broker: holdfast.Broker, place: str, topic: str | None, group: str | None) -> None:
        self._broker = broker
        self._place = place
        self._topic = topic
        self._group = group
        self._known: dict[tuple[str, str | None], holdfast.Queue[bytes]] = {}

    def of_id(self, message_id: str) -> holdfast.Queue[bytes]:
        """The queue of a message or a dead letter."""
        return self._view(topic_named(self._place, self._topic, message_id), self._group)

    def of_receipt(self, receipt: str) -> holdfast.Queue[bytes]:
        """The queue of a delivery: of the group that was said, or else of the one that has the message."""
        topic = topic_named(self._place, self._topic, receipt.partition("@")[0])
        return self._view(topic, self._group or self._holding(topic, receipt))

    def _holding(self, topic: str, receipt: str) -> str | None:
        """The group whose delivery the receipt proves; None where that is nobody's any more."""
        groups, holding = self._asked(topic, receipt) if is_remote(self._broker) else self._found(topic, receipt)
        if len(holding) > 1:
            raise InvalidRequest(
                f"{receipt} may be of {len(holding)} groups; say which with --group: {some_of(holding)}"
            )
        if holding:
            return holding[0]
        return None if DEFAULT_GROUP in groups else next(iter(groups), None)

    def _found(self, name: str, receipt: str) -> tuple[list[str], list[str]]:
        topic = self._broker._engine.open_topic(name)
        holding: list[str] = []
        with suppress(HoldfastError):  # what is wrong with it will be said
            holding = sorted(group.name for group in topic.groups.values() if group.holds(receipt))
        return sorted(topic.groups), holding

    def _asked(self, topic: str, receipt: str) -> tuple[list[str], list[str]]:
        groups: list[str] = []
        with suppress(Forbidden):  # one who may only consume is not told which there are
            groups = self._broker.describe_topic(topic).groups
        if len(groups) < 2:
            return groups, []
        holding = []
        for group in groups:
            with suppress(HoldfastError):
                message: Any = self._view(topic, group).resume(receipt)
                holding.append(group)
                del message
        return groups, holding

    def _view(self, topic: str, group: str | None) -> holdfast.Queue[bytes]:
        if (topic, group) not in self._known:
            self._known[topic, group] = view(self._broker, topic, group)
        return self._known[topic, group]
