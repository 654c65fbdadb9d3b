"""Django's tasks in Holdfast: `TASKS = {"default": {"BACKEND": "holdfast.django.HoldfastBackend", ...}}`.

Put `"holdfast.django"` into `INSTALLED_APPS` for `manage.py holdfast_worker` and the page in the admin.
"""

from typing import TYPE_CHECKING

from holdfast.later import names

if TYPE_CHECKING:
    from holdfast.integrations.django.backend import HoldfastBackend

__all__ = ["HoldfastBackend"]

__getattr__ = names(
    "holdfast.django",
    {"HoldfastBackend": "holdfast.integrations.django.backend"},
)
