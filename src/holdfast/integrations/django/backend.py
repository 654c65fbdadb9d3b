"""The backend of Django's tasks: `"BACKEND": "holdfast.django.HoldfastBackend"` in `TASKS`.

A Django queue is a Holdfast queue of the same name. A task is a message, and its result is a document: it is written
before the message, changes when the task starts and ends, and expires. The document decides what happened: once it says
that a task succeeded, a message that is delivered again is acked without running anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, Literal

import msgspec
from asgiref.sync import sync_to_async
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.utils import timezone
from django.utils.crypto import get_random_string
from django.utils.module_loading import import_string

import holdfast
from holdfast.errors import InvalidRequest
from holdfast.integrations.django.framework import (
    BaseTaskBackend,
    Task,
    TaskError,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_enqueued,
)
from holdfast.integrations.places import Shared, masked, places, topic_name
from holdfast.integrations.results import Results

MOST_DELIVERIES: Final = 20  # of one task: its worker died, or it was retried
_DAY_S: Final = 24 * 3600.0


class TaskOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `OPTIONS` may have."""

    url: str
    prefix: str = ""  # of the names of topics and documents
    enqueue_on_commit: bool | str = False  # True: of the default database; or the alias of a database
    attempts: int = 1  # how often a task runs that raises
    keep_results: float = 7 * _DAY_S  # in seconds; 0: there are no results
    durability: Literal["fsync", "interval", "os"] = "fsync"
    queue_settings: dict[str, Any] = {}
    console_url: str = ""
    tls: str | None = None


class HoldfastBackend(BaseTaskBackend):
    """Tasks as messages of a folder, a server or a store."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        try:
            self._settings: TaskOptions | None = msgspec.convert(self.options, TaskOptions)
            self._fault = ""
        except msgspec.ValidationError as error:
            self._settings, self._fault = None, str(error)
        if self._settings is not None:
            self.supports_get_result = self._settings.keep_results > 0
        self.results = Results(lambda: self.shared.broker, f"{self.prefix}django.result.")

    @property
    def settings(self) -> TaskOptions:
        """The options of this backend, which `check` reports if they cannot be used."""
        if self._settings is None:
            raise ImproperlyConfigured(f"the OPTIONS of TASKS[{self.alias!r}] cannot be used: {self._fault}")
        return self._settings

    @property
    def prefix(self) -> str:
        return self._settings.prefix if self._settings else ""

    @property
    def shared(self) -> Shared:
        """The broker at the URL, opened when it is first used."""
        return places.at(self.settings.url, {} if self.settings.tls is None else {"tls": self.settings.tls})

    def topic(self, queue_name: str) -> str:
        return topic_name(self.prefix + queue_name)

    def queue(self, queue_name: str) -> holdfast.Queue[bytes]:
        """The queue for tasks with this `queue_name`."""
        return self.shared.queue(self.prefix + queue_name, self._new_queue)

    def open_queue(self, queue_name: str) -> holdfast.Queue[bytes]:
        """As `queue`, in an object of its own."""
        return self.shared.open_queue(self.prefix + queue_name, self._new_queue)

    @property
    def _new_queue(self) -> dict[str, Any]:
        # One more than may run: the last delivery records in the result that the task was given up.
        most = max(self.settings.attempts, MOST_DELIVERIES) + 1
        return {"max_attempts": most} | self.settings.queue_settings

    @property
    def shown_url(self) -> str:
        """The URL, without its token."""
        return masked(self.settings.url)

    # Enqueueing

    def enqueue(self, task: Task, args: Any, kwargs: Any) -> TaskResult:
        """Store a task, and return when it is on disk; with `enqueue_on_commit`, when the transaction is committed."""
        self.validate_task(task)
        result = TaskResult(
            task=task,
            id=get_random_string(32),
            status=TaskResultStatus.READY,
            enqueued_at=None,
            started_at=None,
            last_attempted_at=None,
            finished_at=None,
            args=args,
            kwargs=kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        using = self.settings.enqueue_on_commit
        if using is False:
            self._put(result)
        else:
            alias = DEFAULT_DB_ALIAS if using is True else str(using)
            transaction.on_commit(lambda: self._put(result), using=alias)
        return result

    async def aenqueue(self, task: Task, args: Any, kwargs: Any) -> TaskResult:
        return await sync_to_async(self.enqueue, thread_sensitive=True)(task, args, kwargs)

    def _put(self, result: TaskResult) -> None:
        task = result.task
        set_fields(result, enqueued_at=timezone.now())
        stored = stored_result(result)
        if self.supports_get_result:
            self.results.put(result.id, stored, keep_s=self._keep_s(task))
        try:
            self.queue(task.queue_name).put(
                msgspec.json.encode(stored),
                priority=level(task.priority),
                at=_aware(task.run_after),
                headers={"task": task.module_path, "id": result.id},
                durability=self.settings.durability,
            )
        except BaseException:
            if self.supports_get_result:
                self.results.remove(result.id)
            raise
        task_enqueued.send(type(self), task_result=result)

    def _keep_s(self, task: Task) -> float:
        """How long to keep a result that is not finished: that time begins when the task is due."""
        due = _aware(task.run_after)
        wait_s = 0.0 if due is None else max(0.0, (due - timezone.now()).total_seconds())
        return self.settings.keep_results + wait_s

    # Results

    def get_result(self, result_id: str) -> TaskResult:
        """The result with this id. Raises `TaskResultDoesNotExist` if there is none, or if it has expired."""
        if not self.supports_get_result:
            raise NotImplementedError(f"TASKS[{self.alias!r}] keeps no results: its option keep_results is 0")
        try:
            found = self.results.get(result_id)
        except InvalidRequest:  # no result can have such a name
            found = None
        if found is None:
            raise TaskResultDoesNotExist(result_id)
        return self.loaded(found)

    def loaded(self, stored: dict[str, Any]) -> TaskResult:
        """The result that was stored as these fields."""
        try:
            task = import_string(stored["task"])
        except ImportError as error:
            raise TaskNotFound(f"there is no task {stored['task']}: {error}") from error
        if not isinstance(task, Task):
            raise TaskNotFound(f"{stored['task']} is not a task")
        result = TaskResult(
            task=task.using(
                priority=stored["priority"],
                queue_name=stored["queue_name"],
                run_after=_time(stored["run_after"]),
                backend=self.alias,
            ),
            id=stored["id"],
            status=TaskResultStatus[stored["status"]],
            enqueued_at=_time(stored["enqueued_at"]),
            started_at=_time(stored["started_at"]),
            last_attempted_at=_time(stored["last_attempted_at"]),
            finished_at=_time(stored["finished_at"]),
            args=stored["args"],
            kwargs=stored["kwargs"],
            backend=self.alias,
            errors=[TaskError(exception_class_path=path, traceback=text) for path, text in stored["errors"]],
            worker_ids=stored["worker_ids"],
        )
        set_fields(result, _return_value=stored.get("return_value"))
        return result

    # Checks

    def check(self, **kwargs: Any) -> Iterable[checks.CheckMessage]:
        where = f"TASKS[{self.alias!r}]"
        if self._settings is None:
            yield checks.Error(
                f"{where}: the OPTIONS cannot be used: {self._fault}",
                hint='Give "url", such as "/var/lib/app/jobs" or "http://host:7700".',
                id="holdfast.E001",
            )
            return
        using = self._settings.enqueue_on_commit
        if isinstance(using, str) and using not in connections:
            yield checks.Error(
                f"{where}: there is no database {using!r}",
                hint="Set enqueue_on_commit to True, or to an alias in DATABASES.",
                id="holdfast.E002",
            )
        if self._settings.attempts < 1 or self._settings.keep_results < 0:
            yield checks.Error(f"{where}: attempts must be at least 1, and keep_results at least 0", id="holdfast.E003")
        try:
            msgspec.convert(self._new_queue, holdfast.TopicSettings)
        except msgspec.ValidationError as error:
            yield checks.Error(f"{where}: queue_settings cannot be used: {error}", id="holdfast.E004")


class TaskNotFound(Exception):
    """The task of a message or a result is not in this program."""


def set_fields(result: TaskResult, **changes: Any) -> None:
    """Change a result, which is frozen for those who use it."""
    for name, value in changes.items():
        object.__setattr__(result, name, value)


def stored_result(result: TaskResult) -> dict[str, Any]:
    """A result as JSON."""
    stored = {
        "id": result.id,
        "task": result.task.module_path,
        "queue_name": result.task.queue_name,
        "priority": result.task.priority,
        "run_after": _text(result.task.run_after),
        "args": result.args,
        "kwargs": result.kwargs,
        "status": result.status.name,
        "enqueued_at": _text(result.enqueued_at),
        "started_at": _text(result.started_at),
        "last_attempted_at": _text(result.last_attempted_at),
        "finished_at": _text(result.finished_at),
        "errors": [[error.exception_class_path, error.traceback] for error in result.errors],
        "worker_ids": result.worker_ids,
    }
    if result.status == TaskResultStatus.SUCCESSFUL:
        stored["return_value"] = result.return_value
    return stored


def level(priority: int) -> int:
    """Django's priority, -100 to 100, as one of ours. 0 is 4, everything below it less, everything above it more."""
    if priority > 0:
        return 5 + (priority - 1) * 5 // 100
    return 4 + priority // 25


def _aware(time: datetime | None) -> datetime | None:
    return timezone.make_aware(time) if time is not None and timezone.is_naive(time) else time


def _text(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
