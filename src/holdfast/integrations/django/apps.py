"""The Django app: the worker's command, a system check, and a page in the admin."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core import checks


class HoldfastConfig(AppConfig):
    """The app `holdfast`, as `INSTALLED_APPS` has it."""

    name = "holdfast.integrations.django"
    label = "holdfast"
    verbose_name = "Holdfast"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        checks.register(check_backends)


def check_backends(**kwargs: Any) -> list[checks.CheckMessage]:
    """Report an app without a backend: its command would have nothing to work on."""
    from holdfast.integrations.django.backend import HoldfastBackend
    from holdfast.integrations.django.framework import task_backends

    if any(isinstance(backend, HoldfastBackend) for backend in task_backends.all()):
        return []
    hint = 'TASKS = {"default": {"BACKEND": "holdfast.django.HoldfastBackend", "OPTIONS": {"url": "..."}}}'
    return [
        checks.Warning("holdfast.django is installed, but no backend in TASKS uses it", hint=hint, id="holdfast.W001")
    ]
