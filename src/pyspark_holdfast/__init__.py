"""Spark finds the source `holdfast` here by itself: it imports every module `pyspark_*` and asks for `DefaultSource`.

One module that fails at this hides all others from Spark, so nothing is loaded before it is asked for, and a part
that is missing is told in the log, not raised.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    if name == "DefaultSource":
        try:
            from holdfast.spark.source import HoldfastSource
        except ImportError as error:
            log.warning("Spark cannot read or write Holdfast: %s; run `pip install 'holdfast[spark]'`", error)
        else:
            return HoldfastSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
