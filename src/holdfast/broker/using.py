"""Topics that are used for a moment, and stay open meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.broker.topic import Topic


class Using:
    """Somebody who uses a topic: around every call, and so no generator."""

    __slots__ = ("__weakref__", "_hold", "_name", "_topic")

    def __init__(self, hold: Callable[[str, object], Topic], name: str) -> None:
        self._hold = hold
        self._name = name

    def __enter__(self) -> Topic:
        self._topic = topic = self._hold(self._name, self)
        return topic

    def __exit__(self, *exc: object) -> None:
        self._topic.holders.discard(self)
