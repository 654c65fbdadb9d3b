"""The public Worker class."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any, Self

from holdfast.api.drafts import Seconds, duration_ms
from holdfast.env import World, real_world
from holdfast.env.process import first_signal
from holdfast.errors import Closed, InvalidRequest
from holdfast.worker.control import Control
from holdfast.worker.handling import HealthPage, WorkerHealth
from holdfast.worker.sources import (
    Bridge,
    WorkerOptions,
    checked_concurrency,
    checked_hook,
    is_async,
    optional_seconds,
    origins_of,
    seconds,
)


class Worker:
    """Runs a handler for each message of one or more queues.

    If the handler returns, the message is acked. If it raises, the message is nacked with the error and retried.

    `queue` is an open queue or group, a folder, a URL, or a list of these. With `at` (a data folder or a server URL) it
    is the name of a queue there. A worker runs once; create a new one to run again.
    """

    def __init__(
        self,
        handler: Callable[[Any], Any],
        *,
        queue: Any,
        at: Any = None,
        group: str | None = None,
        body_type: Any = None,
        concurrency: int = 8,
        lease: Seconds | None = None,
        time_limit: Seconds | None = None,
        drain: Seconds = 25,
        poll: Seconds = 1,
        silence: Seconds = 60,
        exit_after_silence: Seconds | None = None,
        on_start: Callable[[], Any] | None = None,
        on_stop: Callable[[], Any] | None = None,
        on_error: Callable[[BaseException, Any], Any] | None = None,
        health_port: int | None = None,
        world: World | None = None,
    ) -> None:
        for_tasks = is_async(handler)
        origins = origins_of(queue, at=at, group=group, body_type=body_type, for_tasks=for_tasks)
        self._options = WorkerOptions(
            handler=handler,
            is_async=for_tasks,
            origins=origins,
            concurrency=checked_concurrency(concurrency, len(origins)),
            lease=None if lease is None else seconds(lease, "lease", minimum_ms=1),
            time_limit_ms=None if time_limit is None else duration_ms(time_limit, "time_limit", minimum_ms=1),
            drain_s=seconds(drain, "drain"),
            poll_s=seconds(poll, "poll", minimum_ms=1),
            silence_s=seconds(silence, "silence", minimum_ms=1),
            exit_after_silence_s=optional_seconds(exit_after_silence, "exit_after_silence"),
            on_start=checked_hook(on_start, "on_start"),
            on_stop=checked_hook(on_stop, "on_stop"),
            on_error=checked_hook(on_error, "on_error"),
            world=world or real_world(),
        )
        self._health_port = health_port
        self._lock = threading.Lock()
        self._control: Control | None = None
        self._page: HealthPage | None = None
        self._over = threading.Event()

    def run(self, *, signals: bool = True) -> int:
        """Work until `stop` is called or SIGTERM or SIGINT arrives; return the exit code.

        The exit code is 0 if every message that was received was also finished. A second signal ends the process at
        once. With `signals=False`, or outside the main thread, only `stop` ends the worker. Raises the error that ended
        the worker, if there was one.
        """
        # A signal handler may interrupt this thread anywhere, even while it holds a lock; SimpleQueue.put is reentrant.
        reported: SimpleQueue[int | None] = SimpleQueue()
        with first_signal(reported.put) if signals else nullcontext():
            control = self._begin(Bridge(), lambda: reported.put(None))
            try:
                while reported.get() is not None:
                    control.stop()
            except BaseException:  # KeyboardInterrupt, if we do not handle signals
                control.stop()
                self._over.wait()
                raise
        return control.result()

    async def run_async(self, *, signals: bool = True) -> int:
        """Async version of `run`; async handlers run in this event loop."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def tell(call: Callable[[], object]) -> None:
            loop.call_soon_threadsafe(call)

        with first_signal(lambda _: tell(self.stop)) if signals else nullcontext():
            control = self._begin(Bridge(loop), lambda: tell(over.set))
            try:
                await over.wait()
            except asyncio.CancelledError:
                control.stop()
                await over.wait()
                raise
        return control.result()

    def start(self) -> None:
        """Start working in the background. End it with `stop` and `wait`, or use the worker as a context manager."""
        self._begin(Bridge(), lambda: None)

    def stop(self) -> None:
        """Stop receiving, and end when the running handlers have finished or `drain` has passed. Returns at once."""
        if self._control is not None:
            self._control.stop()

    def wait(self, timeout: Seconds | None = None) -> int | None:
        """Return the exit code once the worker has ended, or None after `timeout`. Raises the error that ended it."""
        if self._control is None:
            raise InvalidRequest("the worker was not started")
        if not self._over.wait(optional_seconds(timeout, "timeout")):
            return None
        return self._control.result()

    def health(self) -> WorkerHealth:
        """Return the worker's status and counts."""
        control = self._control
        return (control or Control(self._options, Bridge())).health()

    @property
    def health_port(self) -> int | None:
        """The port of the health page, or None if there is none (yet)."""
        return None if self._page is None else self._page.port

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self.wait()

    def _begin(self, bridge: Bridge, over: Callable[[], None]) -> Control:
        with self._lock:
            if self._control is not None:
                raise Closed("a worker runs once: make a new one")
            control = Control(self._options, bridge)
            if self._health_port is not None:
                self._page = HealthPage(control.health, self._health_port)
            self._control = control

        def ended() -> None:
            if self._page is not None:
                self._page.close()
            self._over.set()
            over()

        threading.Thread(target=control.run, args=(ended,), name="holdfast-worker", daemon=True).start()
        return control
