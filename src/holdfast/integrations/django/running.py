"""What a worker does with a message: run the task in it, and record in its result what became of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from traceback import format_exception
from typing import Any, Final, NoReturn

import msgspec
from django.db import close_old_connections, reset_queries
from django.utils import timezone

import holdfast
from holdfast.errors import Conflict, MessageTooLarge, Unavailable
from holdfast.integrations.django.backend import HoldfastBackend, TaskNotFound, set_fields, stored_result
from holdfast.integrations.django.framework import (
    TaskContext,
    TaskError,
    TaskResult,
    TaskResultStatus,
    normalize_json,
    task_finished,
    task_started,
)

logger = logging.getLogger(__name__)

_PAUSES_S: Final = (0.1, 5.0)  # the first and the longest pause while the result cannot be stored


class WorkerDied(Exception):
    """A task was given up: every worker that ran it died, or it was retried too often."""


class TaskRunner:
    """The handler of a worker: runs the tasks of one backend."""

    def __init__(self, backend: HoldfastBackend, worker_id: str) -> None:
        self._backend = backend
        self._worker_id = worker_id

    def __call__(self, message: holdfast.Message[bytes]) -> None:
        close_old_connections()
        try:
            self._handle(message)
        finally:
            reset_queries()
            close_old_connections()

    def _handle(self, message: holdfast.Message[bytes]) -> None:
        try:
            sent = msgspec.json.decode(message.raw, type=dict[str, Any])
            if missing := {"id", "task", "status"} - sent.keys():
                raise msgspec.ValidationError(f"a task has a field {min(missing)}, and this message has none")
            found = self._backend.results.find(sent["id"]) if self._backend.supports_get_result else None
        except msgspec.MsgspecError as error:
            raise holdfast.Reject("the message is not a task") from error
        stored = sent if found is None else found.value
        if stored["status"] == TaskResultStatus.SUCCESSFUL.name:
            logger.info("task had succeeded before its message was acked", extra={"id": sent["id"]})
            return
        version = 0 if found is None else found.version
        try:
            result = self._backend.loaded(stored)
        except TaskNotFound as error:
            failed = stored | {"status": "FAILED", "errors": [*stored["errors"], list(_told(error))]}
            self._store(message, sent["id"], failed, version)
            raise holdfast.Reject(str(error)) from error
        if result.status == TaskResultStatus.FAILED:  # its dead letter was redriven
            result.errors.clear()
        if found is None:
            result.worker_ids.extend([""] * (message.attempt - 1))
        TaskRun(self._backend, result, message, version, self._store).run(self._worker_id)

    def _store(self, message: holdfast.Message[bytes], result_id: str, value: dict[str, Any], version: int) -> int:
        """Store a result in place of this version, for as long as it takes while the message is ours."""
        if not self._backend.supports_get_result:
            return 0
        pause_s, longest_s = _PAUSES_S
        while True:
            try:
                keep_s = self._backend.settings.keep_results
                stored = self._backend.results.put(result_id, value, keep_s=keep_s, version=version)
                self._backend.results.sweep()
                return stored.version
            except Unavailable as error:
                if message.lost:
                    raise
                logger.warning("cannot store the result of a task, trying again: %s", error)
                threading.Event().wait(pause_s)
                pause_s = min(2 * pause_s, longest_s)


class TaskRun:
    """One attempt at a task."""

    def __init__(
        self,
        backend: HoldfastBackend,
        result: TaskResult,
        message: holdfast.Message[bytes],
        version: int,
        store: Callable[[holdfast.Message[bytes], str, dict[str, Any], int], int],
    ) -> None:
        self._backend = backend
        self._result = result
        self._message = message
        self._version = version
        self._store = store

    def run(self, worker_id: str) -> None:
        """Run the task. Raises Retry or Reject if it failed, so that the worker settles the message."""
        result, now = self._result, timezone.now()
        most = self._backend.queue(result.task.queue_name).settings.max_attempts
        if most is not None and self._message.attempt >= most:
            died = WorkerDied(f"the task was delivered {most} times and never finished")
            self._record(died)
            self._give_up(died)
        set_fields(
            result,
            status=TaskResultStatus.RUNNING,
            started_at=result.started_at or now,
            last_attempted_at=now,
            finished_at=None,
        )
        result.worker_ids.append(worker_id)
        self._save()
        task_started.send(type(self._backend), task_result=result)
        try:
            set_fields(result, _return_value=normalize_json(self._call()))
        except BaseException as error:
            self._failed(error)
            return
        try:
            self._end(TaskResultStatus.SUCCESSFUL)
        except MessageTooLarge as error:
            self._failed(error)
            return
        task_finished.send(type(self._backend), task_result=result)

    def _call(self) -> Any:
        result = self._result
        arguments = (TaskContext(task_result=result),) if result.task.takes_context else ()
        return result.task.call(*arguments, *result.args, **result.kwargs)

    def _failed(self, error: BaseException) -> None:
        """Record an error, and retry or give up. Called where the error is being handled: receivers may log it."""
        self._record(error)
        if isinstance(error, holdfast.Retry) or (not isinstance(error, holdfast.Reject) and self._may_retry()):
            self._end(TaskResultStatus.READY)
            if isinstance(error, holdfast.Retry):
                raise error
            raise holdfast.Retry(str(error)) from error
        self._give_up(error)

    def _may_retry(self) -> bool:
        attempts = self._backend.settings.attempts
        if self._backend.supports_get_result:
            return len(self._result.errors) < attempts
        return self._message.attempt < attempts

    def _record(self, error: BaseException) -> None:
        path, text = _told(error)
        self._result.errors.append(TaskError(exception_class_path=path, traceback=text))

    def _give_up(self, error: BaseException) -> NoReturn:
        self._end(TaskResultStatus.FAILED)
        task_finished.send(type(self._backend), task_result=self._result)
        if isinstance(error, holdfast.Reject):
            raise error
        raise holdfast.Reject(str(error)) from error

    def _end(self, status: TaskResultStatus) -> None:
        finished = None if status == TaskResultStatus.READY else timezone.now()
        set_fields(self._result, status=status, finished_at=finished)
        self._save()

    def _save(self) -> None:
        try:
            self._version = self._store(self._message, self._result.id, stored_result(self._result), self._version)
        except Conflict as error:
            # The lease was lost, and another worker has the task: what it records counts.
            raise holdfast.Retry("another worker has changed the result of the task") from error


def _told(error: BaseException) -> tuple[str, str]:
    kind = type(error)
    return f"{kind.__module__}.{kind.__qualname__}", "".join(format_exception(error))
