"""Topics that nobody uses are closed; now and then each is looked at, so that retention holds for them, too."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.broker.broker import BrokerEngine
    from holdfast.broker.topic import Topic

logger = logging.getLogger(__name__)

_AFTER_ERROR_NS: Final = 10_000_000_000


class Sweep:
    """Goes round the closed topics, one at a time and at leisure: all of them within `retention_check_ms`."""

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = engine
        self.folder = engine.folder
        self.on_attention: Callable[[], None] = lambda: None
        self.before_close: Callable[[], None] = lambda: None
        self._letting_go = threading.Lock()
        self._round: list[str] = []
        self._every_ns = 0
        self._due_ns = engine.world.clock.monotonic_ns() + engine.settings.topic.retention_check_ms * 1_000_000

    def tick(self) -> int | None:
        """Look at the next topic if it is time; answers in how many ms more will be due."""
        self._engine.check_open()
        now_ns = self._engine.world.clock.monotonic_ns()
        if now_ns >= self._due_ns:
            if not self._round:
                self._begin()
            if self._round:
                self._visit(self._round.pop())
            self._due_ns = now_ns + self._every_ns
        return max(self._due_ns - now_ns, 0) // 1_000_000

    def let_go(self, but: Topic | None) -> None:
        """Close the topics that were not used for longest, as far as there are too many open."""
        engine, most = self._engine, self._engine.settings.open_partitions
        if self._open_partitions() <= most or not self._letting_go.acquire(blocking=False):
            return  # or another thread does so, and looks again behind each
        try:
            for topic in sorted(engine.open_topics(), key=lambda topic: topic.used_ns):
                if self._open_partitions() <= most:
                    return
                if topic is not but:
                    engine.let_go(topic)
        finally:
            self._letting_go.release()

    def _open_partitions(self) -> int:
        return sum([len(topic.partitions) for topic in self._engine.open_topics()])

    def _begin(self) -> None:
        engine = self._engine
        try:
            for name in engine.catalog.leftovers():
                with suppress(HoldfastError), engine.alone(name):  # otherwise the next round does it
                    engine.catalog.tidy(name)
            self._round = [name for name in engine.catalog.names() if not engine.is_open(name)]
        except OSError as error:  # the topics that are open must have their ticks all the same
            logger.warning("topics could not be listed", extra={"folder": engine.folder, "error": str(error)})
            self._every_ns = _AFTER_ERROR_NS
            return
        whole_ns = engine.settings.topic.retention_check_ms * 1_000_000
        self._every_ns = whole_ns // max(len(self._round), 1)

    def _visit(self, name: str) -> None:
        engine = self._engine
        if engine.is_open(name):
            return
        try:
            with engine.using(name) as topic:
                topic.tick()
                topic.retain()
                engine.space.tick(everything=True)
            engine.let_go_idle()
        except HoldfastError as error:  # it may be gone by now; if it is damaged, whoever uses it is told
            if engine.closed:
                return
            logger.warning("a closed topic could not be looked at", extra={"topic": name, "error": str(error)})
