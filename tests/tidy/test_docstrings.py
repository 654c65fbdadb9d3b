"""The docstrings of the public API, which make its reference: each tells its arguments, results and errors."""

from __future__ import annotations

import builtins
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast
import holdfast.aio
import holdfast.testing
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
KIT = (holdfast.Observer, holdfast.testing.QueueKit, holdfast.testing.VirtualClock)
FUNCTIONS = (
    holdfast.open, holdfast.open_broker, holdfast.connect,
    holdfast.aio.open, holdfast.aio.open_broker, holdfast.aio.connect,
    holdfast.backup, holdfast.backups, holdfast.verify, holdfast.restore,
    holdfast.aio.backup, holdfast.aio.backups, holdfast.aio.verify, holdfast.aio.restore,
)  # fmt: skip
# Of a clock, what the engine calls; and what no argument makes fail.
OF_THE_ENGINE = frozenset({"attach", "detach", "settle", "wait", "wait_async", "now_ns", "monotonic_ns"})
NEVER_FAIL = frozenset({"Observer.count", "Observer.observe", "VirtualClock.step_wall", "spark.lag", "spark.register"})
_SECTION = re.compile(r"^(Args|Returns|Raises):\n((?:    .*\n?|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^    (\*{0,2}\w+): \S", re.MULTILINE)


def test_every_public_method_documents_its_arguments_results_and_errors():
    faults = [f"{name}: {fault}" for name, function in documented() for fault in faults_of(function, name)]
    assert_none(faults, "Add sections Args:, Returns: and Raises: to these docstrings, as the others have them.")


def test_everything_of_spark_documents_its_arguments_results_and_errors():
    pytest.importorskip("pyspark")
    from holdfast import spark

    found = {name: getattr(spark, name) for name in spark.__all__}
    found |= {f"Pipeline.{name}": member for name, member in members(spark.Pipeline)}
    functions = {name: each for name, each in found.items() if not inspect.isclass(each) and callable(each)}
    assert len(functions) > 15
    faults = [f"{name}: {fault}" for name, each in functions.items() for fault in faults_of(each, f"spark.{name}")]
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
    for kind in (*THREADS, *TASKS, *KIT):
        internal = OF_THE_ENGINE if kind is holdfast.testing.VirtualClock else INTERNAL
        yield from ((f"{kind.__name__}.{name}", member) for name, member in members(kind) if name not in internal)


def members(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods of a class, also those that are called on it."""
    for name, member in inspect.getmembers(kind, lambda each: inspect.isfunction(each) or inspect.ismethod(each)):
        if not name.startswith("_"):
            yield name, member


def faults_of(function: Callable[..., Any], name: str = "") -> Iterator[str]:
    sections = dict(_SECTION.findall((inspect.getdoc(function) or "") + "\n"))
    signature = inspect.signature(function)
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    wanted = [stars.get(each.kind, "") + name for name, each in signature.parameters.items() if name != "self"]
    told = _ENTRY.findall(sections.get("Args", ""))
    if told != wanted:
        yield f"Args: tells {told}, and it has {wanted}"
    if (signature.return_annotation not in {None, "None"}) != ("Returns" in sections):
        yield "Returns: is missing, or it returns nothing"
    if wanted and "Raises" not in sections and name not in NEVER_FAIL:
        yield "Raises: is missing"
    for error in _ENTRY.findall(sections.get("Raises", "")):
        if not issubclass(getattr(errors, error, getattr(builtins, error, int)), Exception):
            yield f"Raises: there is no error {error}"


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
