"""Taskiq's results and schedules as documents."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from taskiq import AsyncResultBackend, ScheduleSource
from taskiq.depends.progress_tracker import TaskProgress
from taskiq.exceptions import ResultGetError
from taskiq.result import TaskiqResult
from taskiq.scheduler.scheduled_task import ScheduledTask

from holdfast.env.process import asyncio
from holdfast.errors import Conflict, HoldfastError, LockHeld
from holdfast.integrations.places import Tls
from holdfast.integrations.results import Expiry
from holdfast.integrations.taskiq.broker import DELIVERY, is_lost
from holdfast.integrations.taskiq.opening import AsyncPlace

logger = logging.getLogger(__name__)

_Return = TypeVar("_Return")

_DAY_S: Final = 24 * 3600.0
_SWEEP_MS: Final = 3_600_000
_LOCK: Final = "holdfast.expired"
_SCHEDULES: Final = "taskiq.schedules"


class HoldfastResultBackend(AsyncResultBackend[_Return]):
    """Results and progress of tasks, for `keep_results` seconds.

    Args:
        url: The place, such as that of the broker.
        keep_results: For how many seconds; None: until they are removed.
        tls: As for the broker.
    """

    def __init__(self, url: str, *, keep_results: float | None = 7 * _DAY_S, tls: Tls = None) -> None:
        self._place = AsyncPlace(url, tls)
        self._keep_s = keep_results
        self._results = Expiry("taskiq.result.")
        self._progress = Expiry("taskiq.progress.")
        self._sweep_at_ms = 0
        self._sweeping: Any = None

    async def shutdown(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeping
        await self._place.close()

    async def set_result(self, task_id: str, result: TaskiqResult[_Return]) -> None:
        """Store a result, unless another worker has the task by now: what that one stores counts."""
        if is_lost(result.labels.get(DELIVERY)):
            logger.warning("The lease of the task %s was lost, so its result is not kept", task_id)
            return
        value = result.model_dump(mode="json")
        value["labels"].pop(DELIVERY, None)
        await self._put(self._results, task_id, value)
        if self._results.now_ms() >= self._sweep_at_ms:
            self._sweep_at_ms = self._results.now_ms() + _SWEEP_MS
            self._sweeping = asyncio.ensure_future(self._sweep())

    async def is_result_ready(self, task_id: str) -> bool:
        return await self._get(self._results, task_id) is not None

    async def get_result(self, task_id: str, with_logs: bool = False) -> TaskiqResult[_Return]:  # noqa: FBT001, FBT002
        """The result of a task. Raises `ResultGetError` if there is none, or if it has expired."""
        found = await self._get(self._results, task_id)
        if found is None:
            raise ResultGetError
        return TaskiqResult.model_validate(found if with_logs else {**found, "log": None})

    async def set_progress(self, task_id: str, progress: TaskProgress[Any]) -> None:
        await self._put(self._progress, task_id, progress.model_dump(mode="json"))

    async def get_progress(self, task_id: str) -> TaskProgress[Any] | None:
        found = await self._get(self._progress, task_id)
        return None if found is None else TaskProgress.model_validate(found)

    async def remove_expired(self) -> int:
        """Remove the results that have expired, unless another process is doing so; returns how many."""
        broker, removed = await self._place.broker(), 0
        starts = (self._results.name(""), self._progress.name(""))
        with suppress(LockHeld):
            async with broker.locks.hold(_LOCK, wait=0):
                for name in await broker.documents.list():
                    found = await broker.documents.get(name) if name.startswith(starts) else None
                    if found is not None and self._results.expired(found.value):
                        with suppress(Conflict):  # it was stored anew meanwhile
                            removed += await broker.documents.remove(name, version=found.version)
        return removed

    async def _sweep(self) -> None:
        with suppress(HoldfastError):  # in an hour, then
            await self.remove_expired()

    async def _put(self, expiry: Expiry, task_id: str, value: dict[str, Any]) -> None:
        broker = await self._place.broker()
        await broker.documents.update(expiry.name(task_id), expiry.stored({"value": value}, self._keep_s))

    async def _get(self, expiry: Expiry, task_id: str) -> dict[str, Any] | None:
        found = await (await self._place.broker()).documents.get(expiry.name(task_id))
        return None if found is None or expiry.expired(found.value) else found.value["value"]


class HoldfastScheduleSource(ScheduleSource):
    """Schedules that programs add and delete while `taskiq scheduler` runs. One for a point in time is sent once."""

    def __init__(self, url: str, *, name: str = "default", tls: Tls = None) -> None:
        self._place = AsyncPlace(url, tls)
        self._document = Expiry(f"{_SCHEDULES}.").name(name)

    async def shutdown(self) -> None:
        await self._place.close()

    async def get_schedules(self) -> list[ScheduledTask]:
        found = await (await self._place.broker()).documents.get(self._document)
        return [] if found is None else [ScheduledTask.model_validate(each) for each in found.value.values()]

    async def add_schedule(self, schedule: ScheduledTask) -> None:
        await self._change(lambda all_: all_ | {schedule.schedule_id: schedule.model_dump(mode="json")})

    async def delete_schedule(self, schedule_id: str) -> None:
        await self._change(lambda all_: {name: each for name, each in all_.items() if name != schedule_id})

    async def post_send(self, task: ScheduledTask) -> None:
        if task.time is not None:
            await self.delete_schedule(task.schedule_id)

    async def _change(self, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        documents = (await self._place.broker()).documents
        while True:
            found = await documents.get(self._document)
            after = changed(found.value if found else {})
            with suppress(Conflict):
                await documents.update(self._document, after, version=found.version if found else 0)
                return
