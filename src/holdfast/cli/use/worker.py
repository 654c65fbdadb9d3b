"""`holdfast worker`: give the messages of queues to a function of the user's."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, Final

import holdfast
from holdfast.api.bodies import type_of
from holdfast.api.times import parse_duration
from holdfast.broker.folder.layout import check_topic_name
from holdfast.cli.opening import chosen_topic, some_of, topics_of
from holdfast.cli.output import OK, command
from holdfast.cli.places import argument, enter, option, queue_of, said_or_usual, usual_place
from holdfast.client.address import is_address
from holdfast.errors import InvalidRequest
from holdfast.model import BodyKind

logger = logging.getLogger(__name__)

_FORM: Final = "write module:function, such as shop.orders:handle"


@command
def worker_command(
    handler: Annotated[str, argument("MODULE:HANDLER", "A function that takes a message.")],
    at: Annotated[str | None, option("--at DIR|URL", "The data folder, or the server; $HOLDFAST_URL.")] = None,
    queue: Annotated[
        list[str] | None,
        option("--queue NAME", "Which queue; several times for several."),
    ] = None,
    group: Annotated[str | None, option("--group NAME", "Which group of each; `default` by default.")] = None,
    body_type: Annotated[
        BodyKind | None,
        option("--body-type", "What a body is for the handler; else as the queue says: `bodies`."),
    ] = None,
    concurrency: Annotated[int, option("--concurrency", "So many handlers at once.", min=1)] = 8,
    lease: Annotated[str | None, option("--lease TIME", "Each time for so long; else as the queue says.")] = None,
    time_limit: Annotated[str | None, option("--time-limit TIME", "A handler may run for so long.")] = None,
    drain: Annotated[str, option("--drain TIME", "At the end, wait so long for handlers.")] = "25s",
    health: Annotated[int | None, option("--health PORT", "Say at http://127.0.0.1:PORT/healthz how it is.")] = None,
    exit_after_silence: Annotated[
        str | None,
        option("--exit-after-silence TIME", "End with 4 when no queue could be asked for so long."),
    ] = None,
    as_json: Annotated[bool, option("--json", "Write the log, on stderr, as JSON.")] = False,
) -> int:
    """Give messages to a function: ack when it returns, nack with the error when it raises.

    Plain functions run in threads, async ones as tasks. SIGTERM and Ctrl-C let what runs finish; a second one ends
    the process at once.
    """
    at = usual_place() if at is None else said_or_usual(at)
    if at is None:
        raise InvalidRequest("say where with --at, a folder or the address of a server, or set HOLDFAST_URL")
    enter(at)
    worker = holdfast.Worker(
        named(handler),
        queue=_names(at, queue or []),
        at=at,
        group=group,
        body_type=type_of(body_type),
        concurrency=concurrency,
        lease=_seconds(lease, "--lease"),
        time_limit=_seconds(time_limit, "--time-limit"),
        drain=parse_duration(drain, "--drain"),
        exit_after_silence=_seconds(exit_after_silence, "--exit-after-silence"),
        health_port=health,
    )
    return _run(worker, as_json=as_json)


def _names(at: str, wanted: list[str]) -> list[str]:
    """The queues that are meant; one that is named need not be there yet."""
    names = wanted or [name for name in (queue_of(at),) if name is not None]
    if not is_address(at):
        topics_of(at)
        names = names or [chosen_topic(at, None)]
    elif not names:
        raise InvalidRequest("say which queue with --queue")
    return [check_topic_name(name) for name in names]


def _run(worker: holdfast.Worker, *, as_json: bool) -> int:
    from holdfast.server.logs import start_logging

    start_logging("json" if as_json else "text", sys.stderr)
    code = worker.run()
    if code != OK:
        # What did not end in time may never end, and must not keep the process.
        logging.shutdown()
        os._exit(code)
    return code


def named(text: str) -> Callable[[Any], Any]:
    """The function that is meant by `module:function`; looked for here, too, as `python -m` does."""
    module_name, colon, path = text.partition(":")
    if not module_name or not colon or not path:
        raise InvalidRequest(f"{text} names no handler: {_FORM}")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found: Any = _module(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise InvalidRequest(f"{module_name} has no {path}{_functions_of(found)}")
        found = getattr(found, name)
    if not callable(found):
        raise InvalidRequest(f"{text} is no function but a {type(found).__name__}: {_FORM}")
    handler: Callable[[Any], Any] = found
    return handler


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise InvalidRequest(
                f"there is no module {name}, neither in {os.getcwd()} nor where Python keeps its packages: {_FORM}"
            ) from None
        raise _not_imported(name, error) from None
    except Exception as error:
        raise _not_imported(name, error) from None


def _not_imported(name: str, error: Exception) -> InvalidRequest:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return InvalidRequest(
        f"{name} cannot be imported: {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
    )


def _functions_of(module: Any) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    return f"; its functions are {some_of(names)}" if names else "; it has no function at all"


def _seconds(text: str | None, name: str) -> float | None:
    return None if text is None else parse_duration(text, name)
