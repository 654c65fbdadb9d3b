"""The docstrings of the public API, which make its reference: each tells its arguments, results and errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast
import holdfast.aio
from holdfast import errors
from holdfast.api.aio import message as aio_message
from holdfast.api.sync import message
from tests.tidy.repo import assert_none
from tests.tidy.test_docs import INTERNAL

THREADS = (
    holdfast.Queue, holdfast.Group, message.DeadLetters, holdfast.Message, message.State, holdfast.Broker,
    holdfast.Producer, holdfast.Consumer, message.Locks, message.Documents, holdfast.Worker,
)  # fmt: skip
TASKS = (
    holdfast.aio.AsyncQueue, holdfast.aio.AsyncGroup, aio_message.AsyncDeadLetters, holdfast.aio.AsyncMessage,
    aio_message.AsyncState, holdfast.aio.AsyncBroker, holdfast.aio.AsyncProducer, holdfast.aio.AsyncConsumer,
    aio_message.AsyncLocks, aio_message.AsyncDocuments,
)  # fmt: skip
FUNCTIONS = (
    holdfast.open, holdfast.open_broker, holdfast.connect,
    holdfast.aio.open, holdfast.aio.open_broker, holdfast.aio.connect,
)  # fmt: skip
_SECTION = re.compile(r"^(Args|Returns|Raises):\n((?:    .*\n?|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^    (\*{0,2}\w+): \S", re.MULTILINE)


def test_every_public_method_documents_its_arguments_results_and_errors():
    faults = [f"{name}: {fault}" for name, function in documented() for fault in faults_of(function)]
    assert_none(faults, "Add sections Args:, Returns: and Raises: to these docstrings, as the others have them.")


@pytest.mark.parametrize("kind", THREADS)
def test_the_docstrings_for_threads_do_not_speak_of_tasks(kind: type):
    told = [inspect.getdoc(kind) or ""]
    told += [inspect.getdoc(member) or "" for _, member in inspect.getmembers(kind, inspect.isfunction)]
    if kind is not holdfast.Worker:  # it runs handlers of both kinds
        assert [text for text in told if re.search(r"\bawait\b|\basync with\b|holdfast\.aio|Async[A-Z]", text)] == []


def documented() -> Iterator[tuple[str, Callable[..., Any]]]:
    for function in FUNCTIONS:
        yield f"{function.__module__}.{function.__name__}", function
    yield "Worker", holdfast.Worker
    for kind in (*THREADS, *TASKS):
        for name, member in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_") and name not in INTERNAL:
                yield f"{kind.__name__}.{name}", member


def faults_of(function: Callable[..., Any]) -> Iterator[str]:
    sections = dict(_SECTION.findall((inspect.getdoc(function) or "") + "\n"))
    signature = inspect.signature(function)
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    wanted = [stars.get(each.kind, "") + name for name, each in signature.parameters.items() if name != "self"]
    told = _ENTRY.findall(sections.get("Args", ""))
    if told != wanted:
        yield f"Args: tells {told}, and it has {wanted}"
    if (signature.return_annotation not in {None, "None"}) != ("Returns" in sections):
        yield "Returns: is missing, or it returns nothing"
    if wanted and "Raises" not in sections:
        yield "Raises: is missing"
    for name in _ENTRY.findall(sections.get("Raises", "")):
        if not issubclass(getattr(errors, name, int), errors.HoldfastError):
            yield f"Raises: there is no error {name}"


def test_a_docstring_that_forgets_something_is_noticed():
    def forgetful(self: object, first: int, *, second: int = 0, **rest: int) -> int:
        """Do something.

        Args:
            first: The first.

        Raises:
            NoSuchError: Never.
        """
        return first + second + len(rest)

    assert list(faults_of(forgetful)) == [
        "Args: tells ['first'], and it has ['first', 'second', '**rest']",
        "Returns: is missing, or it returns nothing",
        "Raises: there is no error NoSuchError",
    ]
