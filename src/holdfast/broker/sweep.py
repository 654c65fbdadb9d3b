"""Topics that nobody uses are closed; now and then each is looked at, so that retention holds for them, too."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.broker.broker import BrokerEngine

logger = logging.getLogger(__name__)


class Sweep:
    """Goes round the closed topics, one at a time and at leisure: all of them within `retention_check_ms`."""

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = engine
        self._round: list[str] = []
        self._every_ns = 0
        self._due_ns = engine.world.clock.monotonic_ns() + engine.settings.topic.retention_check_ms * 1_000_000

    def tick(self, now_ns: int) -> int | None:
        """Look at the next topic if it is time; answers in how many ms more will be due."""
        if now_ns >= self._due_ns:
            if not self._round:
                self._begin()
            if self._round:
                self._visit(self._round.pop())
            self._due_ns = now_ns + self._every_ns
        return max(self._due_ns - now_ns, 0) // 1_000_000

    def _begin(self) -> None:
        engine = self._engine
        self._round = [name for name in engine.catalog.names() if not engine.is_open(name)]
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
            engine.let_go_idle()
        except HoldfastError as error:  # it may be gone by now; if it is damaged, whoever uses it is told
            logger.warning("a closed topic could not be looked at", extra={"topic": name, "error": str(error)})
