"""What the user wants to be told of. An error in a hook is told of, too, and never ends the worker."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any

from holdfast.worker.bridge import Bridge
from holdfast.worker.health import Counts

logger = logging.getLogger(__name__)


class Hooks:
    """The functions of the user, plain or async."""

    def __init__(
        self,
        counts: Counts,
        on_start: Callable[[], Any] | None,
        on_stop: Callable[[], Any] | None,
        on_error: Callable[[BaseException, Any], Any] | None,
    ) -> None:
        self._counts = counts
        self._on_start = on_start
        self._on_stop = on_stop
        self._on_error = on_error

    def start(self, bridge: Bridge) -> None:
        """Raises what the hook raises: nothing may be taken before it went well."""
        try:
            if self._on_start is not None:
                bridge.wait(self._on_start())
        except Exception as error:
            self._failed("on_start", error)
            raise

    def stop(self, bridge: Bridge) -> bool:
        """Answers whether it went well."""
        try:
            if self._on_stop is not None:
                bridge.wait(self._on_stop())
        except Exception as error:
            self._failed("on_stop", error)
            self.report(error, None, bridge)
            return False
        return True

    def report(self, error: BaseException, message: Any, bridge: Bridge) -> None:
        """Tell of an error, from a thread."""
        try:
            if self._on_error is not None:
                bridge.wait(self._on_error(error, message))
        except Exception as failure:
            self._failed("on_error", failure)

    async def report_async(self, error: BaseException, message: Any) -> None:
        """The same from a task."""
        try:
            if self._on_error is not None:
                answer = self._on_error(error, message)
                if inspect.isawaitable(answer):
                    await answer
        except (Exception, asyncio.CancelledError) as failure:
            self._failed("on_error", failure)

    def _failed(self, name: str, error: BaseException) -> None:
        self._counts.add("hook_errors")
        logger.error("hook %s failed", name, exc_info=error)
