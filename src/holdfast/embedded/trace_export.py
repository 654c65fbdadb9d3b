"""Traces on their way out: a thread makes spans of the steps and hands them on, and nobody waits for it.

    publish, receive, ack   --steps-->   a queue with an end   --thread-->   spans, in batches   -->   an outlet

Where the outlet is slow or gone the queue fills up, and what finds no place in it is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, Protocol

from holdfast.broker.broker import BrokerEngine
from holdfast.broker.traces import TraceStep
from holdfast.embedded.trace_spans import SpanFacts, SpanMaker

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 20_000
_MOST_TOGETHER: Final = 512
_NS: Final = 1_000_000_000


class Outlet(Protocol):
    """Where spans go."""

    def send(self, spans: Sequence[SpanFacts]) -> bool:
        """Hand them on; answers whether they arrived. It may take its time."""

    def shutdown(self) -> None:
        """Give up whatever is under way."""


class TraceExport:
    """Exports the traces of one engine until it is closed, or the engine is."""

    def __init__(
        self,
        engine: BrokerEngine,
        outlet: Outlet,
        *,
        every_s: float = 1.0,
        close_s: float = 5.0,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._clock = engine.world.clock
        self._log = engine.traces.log
        self._outlet = outlet
        self._every_ns = round(every_s * _NS)
        self._close_s = close_s
        self._most_waiting = most_waiting
        # Not a Queue: steps may come from a finalizer, at any point of any thread.
        self._queue: SimpleQueue[tuple[Sequence[TraceStep], int] | None] = SimpleQueue()
        self._put = self._taken = 0  # steps
        self._maker = SpanMaker(most_waiting)
        self._exported = self._failed = self._dropped = 0
        self._told = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="holdfast-otel", daemon=True)
        self._thread.start()
        self._log.listeners = (*self._log.listeners, self._listen)
        engine.at_close(self.close)

    def counts(self) -> dict[str, int]:
        """Spans that arrived, and that did not; steps that found no place, of which there are no spans."""
        return {"exported": self._exported, "failed": self._failed, "dropped": self._dropped + self._maker.forgotten}

    def _listen(self, steps: Sequence[TraceStep]) -> None:
        count = len(steps)
        if self._put - self._taken + count > self._most_waiting:
            self._dropped += count
            return
        self._put += count
        self._queue.put((steps, self._clock.now_ns()))

    def _run(self) -> None:
        spans: list[SpanFacts] = []
        due_ns: int | None = None
        going_on = True
        while going_on:
            with suppress(Empty):
                found = self._queue.get(timeout=None if due_ns is None else max(due_ns - self._mono_ns(), 0) / _NS)
                if found is None:
                    going_on = False
                else:
                    spans += self._maker.spans(*found)
                    self._taken += len(found[0])
            if spans and due_ns is None:
                due_ns = self._mono_ns() + self._every_ns
            if spans and (len(spans) >= _MOST_TOGETHER or not going_on or self._is_over(due_ns)):
                self._send(spans)
                spans, due_ns = [], None

    def _is_over(self, due_ns: int | None) -> bool:
        return due_ns is not None and self._mono_ns() >= due_ns

    def _mono_ns(self) -> int:
        return self._clock.monotonic_ns()

    def _send(self, spans: Sequence[SpanFacts]) -> None:
        for first in range(0, len(spans), _MOST_TOGETHER):
            some = spans[first : first + _MOST_TOGETHER]
            try:
                arrived = self._outlet.send(some)
            except Exception as error:  # whatever it is: the next ones may arrive
                arrived = False
                self._tell(repr(error))
            if arrived:
                self._exported += len(some)
                self._told = False
            else:
                self._failed += len(some)
                self._tell("they were not taken")

    def _tell(self, error: str) -> None:
        if not self._told:  # once, until it works again
            self._told = True
            logger.warning("spans of traces could not be exported", extra={"error": error})

    def close(self) -> None:
        """Send what is there, for a few seconds at most, and end. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._log.listeners = tuple(each for each in self._log.listeners if each != self._listen)
        self._queue.put(None)
        self._thread.join(self._close_s)
        self._outlet.shutdown()
        self._thread.join(1.0)

    def __enter__(self) -> TraceExport:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
