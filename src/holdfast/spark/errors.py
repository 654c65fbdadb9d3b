"""Errors as Spark's users see them: one sentence, not a stack of two languages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from holdfast.env.process import set_variable
from holdfast.errors import HoldfastError

Given = ParamSpec("Given")
Answer = TypeVar("Answer")

# Spark's Python workers send the traceback along unless this is set. One that fails ends, so nobody else is affected.
_WITHOUT_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"


def in_one_sentence(function: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """Let an error of ours reach the user as its sentence alone."""

    @wraps(function)
    def wrapped(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
        with plainly():
            return function(*args, **kwargs)

    return wrapped


@contextmanager
def plainly() -> Iterator[None]:
    """The same around a few lines, or around what a generator does."""
    try:
        yield
    except HoldfastError as error:
        set_variable(_WITHOUT_TRACEBACK, "1")
        raise error from None
