"""Running the handler for one message, in a thread or as a task, and settling the message by how it ended."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from holdfast.errors import LeaseLost
from holdfast.worker.bridge import Bridge
from holdfast.worker.health import Counts
from holdfast.worker.hooks import Hooks
from holdfast.worker.outcomes import DEFER, Reject, Retry, Settlement, is_wish, settlement_after
from holdfast.worker.runs import Run, Runs

logger = logging.getLogger(__name__)


class Handling:
    """The handler, and all that is done around it."""

    def __init__(
        self, handler: Callable[[Any], Any], *, runs: Runs, counts: Counts, hooks: Hooks, bridge: Bridge, limit: str
    ) -> None:
        self._handler = handler
        self._runs = runs
        self._counts = counts
        self._hooks = hooks
        self._bridge = bridge
        self._limit = limit

    def work(self, run: Run) -> None:
        """Handle a message in this thread."""
        if not self._runs.begin(run):
            self.give_back(run)
            return
        error = self._called(run.message)
        if not run.claim("handler"):
            return
        late = self.settle(run, settlement_after(error))
        for told in self._told(run, error, late):
            self._hooks.report(told, run.message, self._bridge)

    async def work_async(self, run: Run) -> None:
        """Handle a message in this task."""
        if not self._runs.begin(run):
            await self._give_back_async(run)
            return
        error = await self._awaited(run)
        if not run.claim("handler"):
            return
        late: Exception | None = None
        try:
            if not run.message.settled:
                await run.source.settle_async(run.message, settlement_after(error))
        except Exception as refused:
            late = refused
        for told in self._told(run, error, late):
            await self._hooks.report_async(told, run.message)

    def settle(self, run: Run, settlement: Settlement) -> Exception | None:
        """Settle a message that its handler did not settle itself; answers with what went wrong."""
        try:
            if not run.message.settled:
                run.source.settle(run.message, settlement)
        except Exception as refused:
            return refused
        return None

    def give_back(self, run: Run) -> None:
        """The handler was not begun: as if the message had not been touched."""
        if run.claim("handler"):
            self._counts.add("given_back")
            self._log_not_told(run, self.settle(run, DEFER))

    async def _give_back_async(self, run: Run) -> None:
        if run.claim("handler"):
            self._counts.add("given_back")
            try:
                await run.source.settle_async(run.message, DEFER)
            except Exception as refused:
                self._log_not_told(run, refused)

    def _called(self, message: Any) -> BaseException | None:
        """How the handler ended. Nothing that it raises may end the thread: `sys.exit` in a handler is a failure."""
        try:
            answer = self._handler(message)
            if inspect.iscoroutine(answer):
                answer.close()
                return TypeError("the handler is a plain function that returned a coroutine: make it async def")
        except BaseException as error:
            return error
        return None

    async def _awaited(self, run: Run) -> BaseException | None:
        try:
            await self._handler(run.message)
        except BaseException as error:
            return self.timeout() if run.overtime else error
        return None

    def timeout(self) -> TimeoutError:
        """What a message is nacked with whose handler had its time."""
        return TimeoutError(f"the handler ran for longer than its time limit of {self._limit}")

    def _told(self, run: Run, error: BaseException | None, late: Exception | None) -> list[BaseException]:
        """Count and log how it ended; answers with what the user is to be told of."""
        told: list[BaseException] = []
        if error is None:
            if late is None:
                self._counts.add("handled")
        elif isinstance(error, Reject):
            self._counts.add("rejected")
        elif isinstance(error, Retry):
            self._counts.add("retried")
        else:
            if not run.overtime:  # that was counted when its time was over
                self._counts.add("failed")
                logger.warning("handler failed", extra=facts(run), exc_info=error)
            told.append(error)
        if late is not None:
            self._log_not_told(run, late)
            told.append(late)
        assert not any(map(is_wish, told))
        return told

    def _log_not_told(self, run: Run, refused: Exception | None) -> None:
        if isinstance(refused, LeaseLost):
            self._counts.add("lost")
            logger.warning("lease lost before the handler ended: %s", refused, extra=facts(run))
        elif refused is not None:
            self._counts.add("unsettled")
            logger.error("message could not be settled, it will come again", extra=facts(run), exc_info=refused)


def facts(run: Run) -> dict[str, Any]:
    """Which message, for the log."""
    message = run.message
    return {"queue": str(run.lane), "id": message.id, "attempt": message.attempt}
