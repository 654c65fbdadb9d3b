"""What the admin needs to list queues: a model without a table."""

from __future__ import annotations

from django.db import models


class TaskQueue(models.Model):
    """A queue of tasks. It has no table: the admin shows what the broker says."""

    class Meta:
        """No table, and the permission to look."""

        managed = False
        default_permissions = ("view",)
        verbose_name = "task queue"
        verbose_name_plural = "task queues"
