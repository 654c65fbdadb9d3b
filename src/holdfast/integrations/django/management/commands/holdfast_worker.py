"""`manage.py holdfast_worker`: runs the tasks of a backend until it is told to stop."""

from __future__ import annotations

import argparse
import sys
import threading
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

import holdfast
from holdfast.env import real_world
from holdfast.errors import HoldfastError, Unavailable
from holdfast.integrations.django.backend import HoldfastBackend
from holdfast.integrations.django.framework import DEFAULT_TASK_BACKEND_ALIAS, task_backends
from holdfast.integrations.django.running import TaskRunner

_PAUSES_S: Final = (0.5, 30.0)


class Command(BaseCommand):
    """Run the tasks of a Holdfast backend."""

    help = "Runs the tasks of a Holdfast backend. On SIGTERM it finishes what it is doing, and returns the rest."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--backend", default=DEFAULT_TASK_BACKEND_ALIAS, help="its alias in TASKS")
        parser.add_argument(
            "--queue", action="append", default=[], help="run the tasks of this queue only; may be repeated"
        )
        parser.add_argument("--concurrency", type=int, default=8, help="how many tasks run at once, each in a thread")
        parser.add_argument("--name", help="what lists of workers call it; default: host and process id")
        parser.add_argument("--lease", type=float, help="seconds until a dead worker's tasks go to another")
        parser.add_argument("--time-limit", type=float, help="seconds until a task counts as failed")
        parser.add_argument("--drain", type=float, default=25, help="seconds for running tasks at the end")
        parser.add_argument("--health", type=int, metavar="PORT", help="report health at http://127.0.0.1:PORT/healthz")
        parser.add_argument(
            "--exit-after-silence", type=float, metavar="SECONDS", help="exit with 4 after this long without an answer"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        backend = self._backend(options["backend"])
        names = options["queue"] or sorted(backend.queues)
        if unknown := sorted(set(names) - backend.queues if backend.queues else ()):
            raise CommandError(f"there is no queue {unknown[0]!r} in QUEUES of TASKS[{backend.alias!r}]: add it there")
        if not names:
            raise CommandError("QUEUES is empty, so any queue is allowed: name those to work on with --queue")
        if options["concurrency"] < 1:
            raise CommandError(f"--concurrency {options['concurrency']} cannot be used: give at least 1")
        try:
            code = self._run(backend, names, options)
        except (HoldfastError, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error
        if code:
            sys.exit(code)

    def _run(self, backend: HoldfastBackend, names: list[str], options: dict[str, Any]) -> int:
        process = real_world().ids.process_note()
        name = options["name"] or f"{process['host']}:{process['pid']}"
        worker = holdfast.Worker(
            TaskRunner(backend, name),
            queue=self._opened(backend, names),
            name=name,
            concurrency=max(options["concurrency"], len(names)),
            lease=options["lease"],
            time_limit=options["time_limit"],
            drain=options["drain"],
            health_port=options["health"],
            exit_after_silence=options["exit_after_silence"],
        )
        self.stdout.write(f"Working on {', '.join(names)} at {backend.shown_url}. Stop with Ctrl-C.")
        self.stdout.flush()
        return worker.run()

    def _backend(self, alias: str) -> HoldfastBackend:
        if alias not in task_backends.settings:
            known = ", ".join(sorted(task_backends.settings))
            raise CommandError(f"there is no {alias!r} in TASKS: --backend takes one of {known}")
        backend = task_backends[alias]
        if not isinstance(backend, HoldfastBackend):
            raise CommandError(f"TASKS[{alias!r}] is not a Holdfast backend: name another one with --backend")
        return backend

    def _opened(self, backend: HoldfastBackend, names: list[str]) -> list[holdfast.Queue[bytes]]:
        """The queues, as soon as the place can be opened: a server may start after its workers."""
        pause_s, longest_s = _PAUSES_S
        while True:
            try:
                return [backend.open_queue(name) for name in names]
            except Unavailable as error:
                self.stderr.write(f"Waiting for {backend.shown_url}: {error}")
                threading.Event().wait(pause_s)
                pause_s = min(2 * pause_s, longest_s)
