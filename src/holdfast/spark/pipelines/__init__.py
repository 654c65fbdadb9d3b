"""Ready pipelines from queues to tables and back: declared once, run from a shell or from Python."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import functions as f
else:

    class _Functions:
        """`pyspark.sql.functions`, imported at its first use: it takes half a second, and many commands run no SQL."""

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("pyspark.sql.functions"), name)

    f = _Functions()

__all__ = ["f"]
