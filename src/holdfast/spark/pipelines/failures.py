"""What goes wrong inside of Spark, as one sentence: the cause, without two languages' stacks."""

from __future__ import annotations

import re
from typing import Final

from holdfast.errors import BadSettings, HoldfastError, PipelineFailed

# How an error of ours reads when it has been through Spark's Python workers.
_OURS: Final = re.compile(r"holdfast\.errors\.(\w+): (.+)")
_LAST: Final = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Full|Failed|Lost|Request)): (.+)$", re.MULTILINE)
_STATE: Final = re.compile(r"\s*SQLSTATE: \w+.*", re.DOTALL)


def keep_pyspark_quiet() -> None:
    """PySpark logs its errors on stderr before it raises them; whoever catches one decides what is said."""
    from pyspark.logger import PySparkLogger

    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True


def in_words(error: Exception, where: str) -> Exception:
    """The same error, where it is one of ours; else one that says what happened."""
    if isinstance(error, HoldfastError | OSError | KeyboardInterrupt):
        return error
    from pyspark.errors import AnalysisException, ParseException, PySparkException

    if not isinstance(error, PySparkException):
        return PipelineFailed(f"{where}: {type(error).__name__}: {error}")
    text = str(error)
    ours = _OURS.search(text)
    if ours is not None:
        from holdfast import errors

        kind = getattr(errors, ours[1], PipelineFailed)
        try:
            return kind(f"{where}: {ours[2].strip()}")
        except TypeError:  # one that wants to know more
            return PipelineFailed(f"{where}: {ours[2].strip()}")
    if isinstance(error, AnalysisException | ParseException):
        return BadSettings(f"{where}: {_STATE.sub('', text).strip().splitlines()[0]}")
    causes = _LAST.findall(text)
    words = f"{causes[-1][0]}: {causes[-1][1]}" if causes else text.strip().splitlines()[0]
    return PipelineFailed(f"{where}: {_STATE.sub('', words)}")
