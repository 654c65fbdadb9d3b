"""The page *Task queues* of Django's admin: how many tasks wait, run and failed, with links to the console."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.template.response import TemplateResponse

from holdfast.errors import HoldfastError
from holdfast.integrations.django.backend import HoldfastBackend
from holdfast.integrations.django.framework import task_backends
from holdfast.integrations.django.models import TaskQueue
from holdfast.integrations.places import place_of


class QueueRow(msgspec.Struct, frozen=True, kw_only=True):
    """A queue on the page."""

    name: str
    console: str = ""
    ready: int = 0
    delayed: int = 0
    running: int = 0
    dead: int = 0
    problem: str = ""


class BackendTable(msgspec.Struct, frozen=True, kw_only=True):
    """A backend on the page: its queues, and its console or how to start one."""

    alias: str
    url: str
    console: str
    command: str
    rows: list[QueueRow]


@admin.register(TaskQueue)
class TaskQueueAdmin(admin.ModelAdmin):
    """One page; queues are neither added nor changed here."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> TemplateResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        context = {
            **self.admin_site.each_context(request),
            "title": "Task queues",
            "opts": self.opts,
            "tables": [table(each) for each in task_backends.all() if isinstance(each, HoldfastBackend)],
            **(extra_context or {}),
        }
        return TemplateResponse(request, "admin/holdfast/task_queues.html", context)


def table(backend: HoldfastBackend) -> BackendTable:
    """What the page says of a backend."""
    place, _ = place_of(backend.settings.url)
    remote = place.startswith(("http://", "https://"))
    console = (backend.settings.console_url or (f"{place.rstrip('/')}/ui" if remote else "")).rstrip("/")
    return BackendTable(
        alias=backend.alias,
        url=backend.shown_url,
        console=console,
        command="" if console else f"holdfast ui {place} --open",
        rows=[_row(backend, name, console) for name in sorted(backend.queues)],
    )


def _row(backend: HoldfastBackend, name: str, console: str) -> QueueRow:
    link = f"{console}/queues/{quote(backend.topic(name), safe='')}" if console else ""
    try:
        stats = backend.queue(name).stats()
    except HoldfastError as error:
        return QueueRow(name=name, console=link, problem=str(error))
    return QueueRow(
        name=name, console=link, ready=stats.ready, delayed=stats.delayed, running=stats.leased, dead=stats.dead
    )
