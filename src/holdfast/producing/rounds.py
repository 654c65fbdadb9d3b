"""Rounds: what is due is sent and answered, again and again, by a thread or by a task of the producer's own.

A task writes to a data folder in the loop's time, which is short, and awaits the disk. Where a port blocks, since it
asks a server, a thread does the rounds for tasks as well: no loop waits for it, and it goes on when a loop has ended.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Any, Final

from holdfast.env import Clock, end_at_exit
from holdfast.env.process import asyncio, get_logger
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.producing.core import ProducerCore, Writing

logger = get_logger(__name__)

_AFTER_ERROR_NS: Final = 1_000_000_000


class ThreadRounds:
    """Rounds on a thread. With `thread=False`, for simulated time, the caller that waits runs them."""

    def __init__(self, core: ProducerCore[Any], *, thread: bool = True) -> None:
        self._core = core
        self._clock = core.clock
        self._with_thread = thread
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._in_round: int | None = None  # the thread that does one
        self.stopping = False
        core.accumulator.on_work = self.wake
        end_at_exit(self)

    @property
    def busy(self) -> bool:
        """Return whether anything is left to send."""
        return bool(self._core.accumulator.active)

    def begin(self) -> None:
        """Check that it may be used here: anywhere."""

    def wake(self) -> None:
        """There is something to do, now or soon; called under the accumulator's lock."""
        if self._thread is None and self._with_thread:
            self._start()
        if not self._work.is_set():
            self._work.set()

    def round(self) -> int | None:
        """Send what is due now; returns when more will be, in ns of the monotonic clock."""
        core = self._core
        with self._lock:
            self._in_round = threading.get_ident()
            try:
                for parcel, waiting in core.write_due(self._clock.monotonic_ns()):
                    try:
                        core.port.wait(waiting)
                    except Exception as error:
                        core.fail(parcel, error)
                    else:
                        core.accumulator.settle(parcel)
                return core.next_ns(self._clock.monotonic_ns())
            finally:
                self._in_round = None

    def help(self, left_s: float | None) -> float | None:
        """Do the work of the thread if there is none; returns how long to wait for more."""
        later_ns = None if self._with_thread else self.round()
        if later_ns is None:
            return left_s
        later_s = max(later_ns - self._clock.monotonic_ns(), 0) / 1e9
        return later_s if left_s is None else min(later_s, left_s)

    def check_outside(self) -> None:
        """Refuse to wait inside a callback: the one who calls it is the one who would be waited for."""
        if self._in_round == threading.get_ident():
            raise InvalidRequest(
                "a callback of a producer must not wait for it, nor close it; let another thread do so"
            )

    def stop(self) -> None:
        """Stop the rounds, and answer what is left."""
        self.stopping = True
        self._work.set()
        if self._core.port.blocks and self.busy:
            self._core.finish()  # a server that does not answer is not waited for
            return
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            self._core.finish()

    async def stop_async(self) -> None:
        """Async version of `stop`."""
        await asyncio.to_thread(self.stop)

    def end(self) -> None:
        """At program exit, send what is left, for at most as long as a send would wait."""
        core = self._core
        if core.closed or core.port.backing.closed:
            return
        from holdfast.api.sync.producer import ProducerWaits  # also for tasks: no event loop runs any more

        core.close()
        try:
            ProducerWaits(core, self).answered_all(core.accumulator.hurry(), core.settings.block_ms / 1000)
            self.stop()
            core.raise_unseen()
        except HoldfastError as error:
            logger.error("messages were not stored at the end of the program: %s", error)

    def _start(self) -> None:
        work = self._work
        # A weak reference: a producer that is no longer used must end once nothing is left to send.
        me = weakref.ref(self, lambda _: work.set())
        self._thread = threading.Thread(
            target=_run, args=(me, self._clock, work), name="holdfast-producer", daemon=True
        )
        self._thread.start()


def _run(me: weakref.ref[ThreadRounds], clock: Clock, work: threading.Event) -> None:
    while (rounds := me()) is not None and not rounds.stopping:
        work.clear()
        try:
            later_ns = rounds.round()
        except Exception:  # whatever it was: without its thread a producer would stand still, and nobody knew
            logger.exception("a round failed")
            later_ns = clock.monotonic_ns() + _AFTER_ERROR_NS
        left_s = None if later_ns is None else max(later_ns - clock.monotonic_ns(), 0) / 1e9
        if not rounds.busy:
            del rounds
        if left_s is None or left_s > 0:
            clock.wait(work, left_s)


class TaskRounds:
    """Rounds by a task of one event loop."""

    def __init__(self, core: ProducerCore[Any]) -> None:
        self._core = core
        self._clock = core.clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._work = asyncio.Event()
        core.accumulator.on_work = self._work.set

    def begin(self) -> None:
        """Check that it may be used here; the task begins with the first message."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise InvalidRequest("this producer belongs to another event loop; create one for each loop")
        if self._task is None:
            self._task = loop.create_task(self._run(), name="holdfast-producer")

    def help(self, left_s: float | None) -> float | None:
        """How long to wait: the task does its work by itself."""
        return left_s

    def check_outside(self) -> None:
        """Nothing: no callback of a task's producer is called by its rounds."""

    async def stop_async(self) -> None:
        """Stop the rounds, and answer what is left."""
        self._stopping = True
        self._work.set()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._core.finish()

    async def _run(self) -> None:
        while not self._stopping:
            self._work.clear()
            try:
                later_ns = await self._round()
            except Exception:  # whatever it was: without its task a producer would stand still, and nobody knew
                logger.exception("a round failed")
                later_ns = self._clock.monotonic_ns() + _AFTER_ERROR_NS
            left_s = None if later_ns is None else max(later_ns - self._clock.monotonic_ns(), 0) / 1e9
            if left_s is None or left_s > 0:
                await self._clock.wait_async(self._work, left_s)
            else:
                await asyncio.sleep(0)

    async def _round(self) -> int | None:
        now_ns = self._clock.monotonic_ns()
        await self._prepare(now_ns)
        await asyncio.gather(*[self._finish(writing) for writing in self._core.write_due(now_ns)])
        return self._core.next_ns(now_ns)

    async def _prepare(self, now_ns: int) -> None:
        """Load what partitions know about producers before writing to them, off the event loop."""
        port, idempotent = self._core.port, self._core.settings.idempotent
        for outbox in list(self._core.accumulator.active):
            if not idempotent or not outbox.queue or outbox.queue[0].due_ns > now_ns:
                continue
            with suppress(Exception):  # then writing meets it again, and answers with it
                if not port.is_prepared(outbox):
                    await asyncio.to_thread(port.prepare, outbox)

    async def _finish(self, writing: Writing) -> None:
        parcel, waiting = writing
        try:
            await self._core.port.wait_async(waiting)
        except Exception as error:
            self._core.fail(parcel, error)
        else:
            self._core.accumulator.settle(parcel)
