"""One queue of a worker: a thread that takes messages whenever slots are free, and never gives up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from holdfast.embedded.drafts import Seconds
from holdfast.env import World
from holdfast.errors import Closed, HoldfastError, UnknownTopic
from holdfast.worker.backoff import Backoff
from holdfast.worker.bridge import Bridge
from holdfast.worker.runs import Run
from holdfast.worker.slots import Slots
from holdfast.worker.sources import Origin, Source

logger = logging.getLogger(__name__)

_LOOK_FOR_QUEUE_S: Final = 5.0  # so long after it was made its first message may wait


class Lane:
    """Takes from one queue. `start_run` is given what was taken, `failed` every error, `broken` the last one."""

    def __init__(
        self,
        origin: Origin,
        *,
        world: World,
        bridge: Bridge,
        poll_s: float,
        lease: Seconds | None,
        alone: bool,
        start_run: Callable[[Run], None],
        failed: Callable[[Exception], None],
        broken: Callable[[Exception], None],
    ) -> None:
        self._origin = origin
        self._clock = world.clock
        self._bridge = bridge
        self._poll_s = poll_s
        self._lease = lease
        self._alone = alone
        self._start_run = start_run
        self._failed = failed
        self._broken = broken
        self._backoff = Backoff(world.ids)
        self._missing = Backoff(world.ids, _LOOK_FOR_QUEUE_S)
        self._told_missing = False
        self._stopping = threading.Event()
        self._source: Source | None = None
        self._answered_ns = self._clock.monotonic_ns()
        self._asking_since_ns: int | None = self._answered_ns
        self._thread = threading.Thread(target=self._live, name=f"holdfast-lane-{self}", daemon=True)

    def __str__(self) -> str:
        return self._origin.name

    def start(self, slots: Slots) -> None:
        """Begin to take messages."""
        self._slots = slots
        self._thread.start()

    def stop(self) -> None:
        """Take nothing more; what is just being taken is given back."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def close(self) -> None:
        """Let go of the queue, if it is ours."""
        self._origin.close(self._bridge)

    @property
    def given(self) -> bool:
        """Whether somebody else opened the queue, and will close it."""
        return self._origin.given

    @property
    def unanswered_s(self) -> float:
        """How long ago the queue answered, be it with nothing."""
        return (self._clock.monotonic_ns() - self._answered_ns) / 1e9

    @property
    def silent_s(self) -> float:
        """For how long it has been asked without an answer. While no slot is free it is not asked."""
        since_ns = self._asking_since_ns
        return 0.0 if since_ns is None else (self._clock.monotonic_ns() - since_ns) / 1e9

    def _live(self) -> None:
        while not self._stopping.is_set():
            try:
                self._round()
            except Exception as error:
                if self._stopping.is_set():
                    return  # it was closed below us: that is how waiting ends
                if self._source is None and isinstance(error, UnknownTopic):
                    self._wait_for_queue(error)
                elif self._is_final(error):
                    self._broken(error)
                    return
                else:
                    self._wait_after(error)

    def _round(self) -> None:
        """Take what is there, once; with several queues the shared slots are held only for what is there already."""
        source = self._open()
        if self._alone:
            self._take(source, self._slots.total, self._poll_s)
        elif not self._take(source, self._slots.total, 0):
            self._take(source, 1, self._poll_s)

    def _open(self) -> Source:
        if self._source is None or (self._source.closed and not self._origin.given):
            self._source = self._origin.open(self._bridge)
        return self._source

    def _take(self, source: Source, most: int, timeout_s: float) -> bool:
        """Take messages for the slots that are free; answers whether there were any."""
        held = self._slots.take(self, most)
        if not held:
            return True  # the end
        taken: list[Any] = []
        try:
            if self._asking_since_ns is None:
                self._asking_since_ns = self._clock.monotonic_ns()
            taken = source.take(held, timeout_s=timeout_s, lease=self._lease)
            self._answered_ns = self._clock.monotonic_ns()
            self._asking_since_ns = None
            self._backoff.reset()
        finally:
            self._slots.give(self, held - len(taken))
        for message in taken:
            self._start_run(Run(message, source, self))
        return bool(taken)

    def _is_final(self, error: Exception) -> bool:
        """Whether no later try can go better: a mistake in the call, or a queue that somebody else has closed."""
        if self._source is None:
            return not (isinstance(error, OSError) or (isinstance(error, HoldfastError) and error.retryable))
        return self._origin.given and isinstance(error, Closed) and self._source.closed

    def _wait_for_queue(self, error: UnknownTopic) -> None:
        """Whoever makes it, or sends its first message, may start after us; that is told once."""
        if not self._told_missing:
            self._told_missing = True
            logger.warning("the queue is not there yet, waiting for it: %s", error, extra={"queue": str(self)})
            self._failed(error)
        self._pause(self._missing.next_s())

    def _wait_after(self, error: Exception) -> None:
        pause_s = self._backoff.next_s()
        logger.warning(
            "receiving failed, trying again in %.1f s: %s: %s",
            pause_s,
            type(error).__name__,
            error,
            extra={"queue": str(self)},
        )
        self._failed(error)
        self._pause(pause_s)

    def _pause(self, pause_s: float) -> None:
        until_ns = self._clock.monotonic_ns() + round(pause_s * 1e9)
        while not self._stopping.is_set() and (left_ns := until_ns - self._clock.monotonic_ns()) > 0:
            self._clock.wait(self._stopping, left_ns / 1e9)
