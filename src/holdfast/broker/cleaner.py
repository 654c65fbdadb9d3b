"""Key compaction as time goes by, on a thread of its own: it reads much, and leases must not wait for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.errors import Closed, HoldfastError

if TYPE_CHECKING:
    from holdfast.broker.broker import BrokerEngine
    from holdfast.broker.topic import Topic

logger = logging.getLogger(__name__)

_LOOK_AGAIN_MS: Final = 60_000


class Cleaner:
    """Compacts the open topics that ask for it, whenever segments were sealed or tombstones have had their time."""

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = engine
        self.folder = engine.folder
        self.on_attention: Callable[[], None] = lambda: None
        self.before_close: Callable[[], None] = lambda: None
        self._done: dict[str, tuple[int, int]] = {}  # topic -> (sealed up to there, at this time)

    def tick(self) -> int | None:
        """Compact what is due; answers in how many ms to look again."""
        self._engine.check_open()
        for topic in self._engine.open_topics():
            if topic.settings.cleanup != "delete":
                try:
                    if self._is_due(topic):
                        self._compact(topic)
                except (HoldfastError, OSError) as error:
                    if self._engine.closed:
                        raise Closed(str(error)) from error
                    if topic.closed:
                        continue  # meanwhile: it is nobody's trouble
                    logger.warning("key compaction failed", extra={"topic": topic.name, "error": str(error)})
        return _LOOK_AGAIN_MS

    def _is_due(self, topic: Topic) -> bool:
        sealed, at_ms = self._done.get(topic.name, (-1, 0))
        return _sealed(topic) != sealed or self._now_ms() - at_ms > max(topic.settings.tombstone_ms, _LOOK_AGAIN_MS)

    def _compact(self, topic: Topic) -> None:
        self._done[topic.name] = _sealed(topic), self._now_ms()
        with self._engine.using(topic.name) as held:
            if held is topic:
                topic.compact_keys()

    def _now_ms(self) -> int:
        return self._engine.world.clock.now_ns() // 1_000_000


def _sealed(topic: Topic) -> int:
    """Up to where the partitions are sealed, as one number that changes with any of them."""
    return sum(segments[-1].base_offset for p in topic.partitions if (segments := p.log.segments()))
