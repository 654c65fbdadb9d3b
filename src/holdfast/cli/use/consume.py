"""Commands that take messages until they are stopped: consume, tail, and a worker with a handler."""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Annotated, Any, Final, Literal, TypeAlias

import holdfast
from holdfast.api.drafts import parse_duration, to_datetime, type_of
from holdfast.api.topics import to_of
from holdfast.broker.folder.layout import check_name, check_topic_name
from holdfast.broker.streams import To
from holdfast.cli import opening
from holdfast.cli.look.messages import HEADERS, ID, KEY, PRIORITY, SIZE, TIME, AnyMessage, Pages, bytes_of, document
from holdfast.cli.opening import OpeningTurns
from holdfast.cli.output import NOTHING_THERE, OK, note, print_json, safe, stdout, write_bytes
from holdfast.cli.parsing import argument, option
from holdfast.cli.places import enter, queue_of
from holdfast.cli.reading import TopicReading, time_of
from holdfast.cli.use.get import given_back_unless_shown
from holdfast.cli.use.put import separator_of
from holdfast.client.opening import is_address
from holdfast.errors import InvalidRequest
from holdfast.model import BodyKind

# `holdfast tail`: read without consuming and without a lock.


_COLUMNS: Final = (ID, TIME, KEY, HEADERS, PRIORITY, SIZE)
_LAST: Final = 10


def tail_command(
    folder: opening.QueueFolder,
    follow: Annotated[bool, option("--follow", "-f", "Keep printing new messages, until Ctrl-C.")] = False,
    begin: Annotated[
        str | None,
        option(
            "--from WHERE", "Where to begin: start, end, an offset, or a time such as -10m. By default, the last 10."
        ),
    ] = None,
    where: opening.Where = None,
    limit: opening.Limit = None,
    raw: Annotated[bool, option("--raw", "Print only the bodies, one per line.")] = False,
    topic: opening.Topic = None,
    partition: opening.PartitionNumber = None,
    as_json: opening.AsJson = False,
) -> int:
    """Print the newest messages, and follow new ones. Includes messages that are done, and takes none.

    Delayed messages appear when they are due. Needs no lock, so it works while another process owns the queue.

    Examples:
        holdfast tail jobs
        holdfast tail jobs --follow --where 'priority > 5'
        holdfast tail jobs --from -1h --raw
    """
    if raw and as_json:
        raise InvalidRequest("--raw and --json both say what is printed; give one of them")
    reading = TopicReading(folder, opening.chosen_topic(folder, topic), partition, where)
    showing = Showing(raw=raw, as_json=as_json)
    if begin is None:
        last = reading.last(_LAST if limit is None else min(limit, _LAST))
        showing.show(last)
        limit = None if limit is None else limit - len(last)
    else:
        reading.begin(begin)
    for page in reading.pages(limit, math.inf if follow else 0):
        showing.show(page)
    return OK


class Showing:
    """Prints messages as a table, as JSON lines, or as raw bodies, with their keys in front if requested."""

    def __init__(self, *, raw: bool, as_json: bool, separator: bytes | None = None) -> None:
        self._raw = raw
        self._as_json = as_json
        self._separator = separator
        self._pages = Pages(stdout(), _COLUMNS)

    def show(self, messages: Sequence[AnyMessage]) -> None:
        """Print messages, and flush them."""
        if self._as_json:
            for message in messages:
                print_json(document(message))
        elif self._raw:
            write_bytes(b"".join(map(self._line, messages)))
        else:
            self._pages.show(messages)
        sys.stdout.flush()

    def _line(self, message: AnyMessage) -> bytes:
        if self._separator is None:
            return message.raw + b"\n"
        return (bytes_of(message.key) or b"") + self._separator + message.raw + b"\n"


Mode: TypeAlias = Literal["queue", "stream"]


_AT_ONCE: Final = 100
_WAIT_S: Final = 10.0


def consume_command(
    folder: opening.DataFolder,
    topic: Annotated[str, argument("TOPIC", "The topic to read.", complete=opening.topic_names)],
    group: Annotated[str | None, option("--group NAME", "Read as this group; printed messages count as done.")] = None,
    mode: Annotated[
        Mode | None, option("--mode", "How the group reads. A new group reads as `stream` by default.")
    ] = None,
    begin: Annotated[
        str | None,
        option("--from WHERE", "Where to begin: earliest (the default), latest, an offset, or a time such as -10m."),
    ] = None,
    partition: opening.PartitionNumber = None,
    count: Annotated[int | None, option("-n", "--count N", "At most this many messages.", least=1)] = None,
    follow: Annotated[bool, option("--follow", "-f", "Keep printing new messages, until Ctrl-C.")] = False,
    timeout: Annotated[str | None, option("--timeout TIME", "How long to wait for the next message.")] = None,
    raw: Annotated[bool, option("--raw", "Print only the bodies, one per line.")] = False,
    key_separator: Annotated[
        str | None, option("--key-separator TEXT", "With --raw, print the key and this text before the body.")
    ] = None,
    wait: opening.Wait = opening.WAIT,
    as_json: opening.AsJson = False,
) -> int:
    """Print the messages of a topic, alone or as a group. Without a group nothing changes, and no lock is needed.

    With a group, messages count as done once they are printed, and the next call continues after them. Exit code: 3 if
    the group has no message.

    Examples:
        holdfast consume ./data clicks --from -10m --raw
        holdfast consume ./data clicks --group statistics --count 100 --json
        holdfast consume http://127.0.0.1:7700 clicks --follow
    """
    showing = _showing(raw, key_separator, as_json=as_json)
    if follow and timeout is not None:
        raise InvalidRequest("--follow never ends and --timeout sets an end; give one of them")
    wait_s = math.inf if follow else parse_duration(timeout or "0", "--timeout")
    name = opening.chosen_topic(folder, topic)
    if group is None:
        if mode is not None:
            raise InvalidRequest("--mode says how a group reads; give --group NAME as well")
        reading = TopicReading(folder, name, partition)
        reading.begin(begin or "earliest")
        for page in reading.pages(count, wait_s):
            showing.show(page)
        return OK
    if partition is not None:
        raise InvalidRequest("a group reads all partitions: leave out --partition, or read without --group")
    check_name(group, "group")
    if begin is not None:
        _place(begin)  # raises for an invalid place before anything is created
    taken = _GroupTaking(folder, name, group, mode, begin, showing).run(count, wait_s, wait)
    if not taken:
        note(f"no message for {safe(group)} in {safe(name)}")
    return OK if taken else NOTHING_THERE


def _showing(raw: bool, key_separator: str | None, *, as_json: bool) -> Showing:
    if raw and as_json:
        raise InvalidRequest("--raw and --json both say what is printed; give one of them")
    if key_separator is not None and not raw:
        raise InvalidRequest("--key-separator stands between key and body in what --raw prints; give --raw as well")
    return Showing(raw=raw, as_json=as_json, separator=None if key_separator is None else separator_of(key_separator))


def _place(begin: str) -> To:
    words = {"start": "earliest", "earliest": "earliest", "end": "latest", "latest": "latest"}
    if begin in words:
        return to_of(words[begin])
    if begin.isascii() and begin.isdigit():
        return To(offset=int(begin))
    return To(time_ns=time_of(begin, "--from"))


class _GroupTaking:
    """Prints what a group has not handled yet; what is printed counts as handled."""

    def __init__(
        self, folder: str, topic: str, name: str, mode: Mode | None, begin: str | None, showing: Showing
    ) -> None:
        self._folder = folder
        self._topic = topic
        self._name = name
        self._mode = mode
        self._begin = begin
        self._showing = showing

    def run(self, count: int | None, timeout_s: float, wait: str) -> int:
        """Print what there is and what arrives, until nothing has arrived for `timeout_s`; return the number."""
        turns = OpeningTurns(self._folder, self._topic, timeout_s, wait)
        left: float = math.inf if count is None else count
        taken = 0
        with closing(turns.each(patient=True)) as brokers:
            for broker, wait_s in brokers:
                found = self._take(broker, left - taken, wait_s)
                taken += found
                if found:
                    turns.begin()
                if taken >= left:
                    break
        return taken

    def _take(self, broker: holdfast.Broker, left: float, timeout_s: float) -> int:
        mode = self._known_mode(broker) or self._make(broker)
        taken, idle_from = 0, time.monotonic()
        some = self._from_stream if mode == "stream" else self._from_queue
        with self._opened(broker, mode) as source:
            while taken < left:
                wait_s = min(max(timeout_s - (time.monotonic() - idle_from), 0), _WAIT_S)
                found = some(source, int(min(left - taken, _AT_ONCE)), wait_s)
                if found:
                    taken, idle_from = taken + found, time.monotonic()
                elif time.monotonic() - idle_from >= timeout_s:
                    break
        return taken

    def _known_mode(self, broker: holdfast.Broker) -> str | None:
        """Return how the group reads the topic; None if it does not yet."""
        info = broker.describe_topic(self._topic)
        known = "queue" if self._name in info.groups else "stream" if self._name in info.stream_groups else None
        if known is not None and self._mode not in (None, known):
            raise InvalidRequest(
                f"the group {self._name} reads {self._topic} in {known} mode; choose another name, or delete that "
                "group first"
            )
        if known is not None and self._begin is not None:
            raise InvalidRequest(
                f"the group {self._name} has its place in {self._topic} already; --from is for a new one. Move it with "
                f"`holdfast group reset {self._folder} {self._name} --to {self._begin}`"
            )
        return known

    def _make(self, broker: holdfast.Broker) -> str:
        """Create the group at its starting position; return its mode."""
        place, mode = _place(self._begin or "earliest"), self._mode or "stream"
        self._begin = None
        start, since = place.end or "earliest", None if place.time_ns is None else to_datetime(place.time_ns)
        if mode == "queue":
            group = broker.group(self._topic, self._name, start=start)
            for number, offset in self._offsets(broker, place.offset):
                group.seek(offset=offset, partition=number)
            if since is not None:
                group.seek(time=since)
            return mode
        with self._opened(broker, mode, start=start) as consumer:
            for number, offset in self._offsets(broker, place.offset):
                consumer.seek(self._topic, number, offset)
            if since is not None:
                consumer.seek_to_time(since)
            consumer.commit()  # saves its position, though it has read nothing yet
        return mode

    def _offsets(self, broker: holdfast.Broker, offset: int | None) -> Iterator[tuple[int, int]]:
        """Yield the offset in each partition, or the nearest that is kept there."""
        for each in () if offset is None else broker.describe_topic(self._topic).partitions:
            yield each.number, max(each.start, min(offset or 0, each.end))

    def _opened(self, broker: holdfast.Broker, mode: str, **options: Any) -> Any:
        if mode == "queue":
            return broker.group(self._topic, self._name)
        return broker.consumer(self._topic, group=self._name, auto_commit=False, **options)

    def _from_stream(self, consumer: Any, most: int, wait_s: float) -> int:
        messages = consumer.poll(timeout=wait_s, max_records=most)
        if messages:
            self._showing.show(messages)
            consumer.commit()
        return len(messages)

    def _from_queue(self, group: Any, most: int, wait_s: float) -> int:
        messages = group.receive_many(most, timeout=wait_s)
        with given_back_unless_shown(messages):
            self._showing.show(messages)
        if messages:
            group.ack_many(messages)
        return len(messages)


# `holdfast worker`: pass the messages of queues to a function of the user's.


logger = logging.getLogger(__name__)

_FORM: Final = "write module:function, such as shop.orders:handle"


def worker_command(
    folder: opening.DataFolder,
    handler: Annotated[str, argument("MODULE:HANDLER", "The function to call with each message.")],
    queue: Annotated[
        list[str] | None,
        option("--queue NAME", "The queue to work on, if the place has several."),
    ] = None,
    group: Annotated[str | None, option("--group NAME", "The group of each queue; `default` by default.")] = None,
    name: Annotated[
        str | None, option("--name TEXT", "Its name in `holdfast workers`; by default, the host and the process id.")
    ] = None,
    body_type: Annotated[
        BodyKind | None,
        option("--body-type", "The type of the body that the handler gets; the queue's `bodies` setting by default."),
    ] = None,
    concurrency: Annotated[int, option("--concurrency", "How many handlers may run at the same time.", least=1)] = 8,
    lease: Annotated[
        str | None, option("--lease TIME", "How long a message is leased; the queue's setting by default.")
    ] = None,
    time_limit: Annotated[str | None, option("--time-limit TIME", "How long a handler may run.")] = None,
    drain: Annotated[str, option("--drain TIME", "On shutdown, how long to wait for running handlers.")] = "25s",
    health: Annotated[int | None, option("--health PORT", "Report health at http://127.0.0.1:PORT/healthz.")] = None,
    exit_after_silence: Annotated[
        str | None,
        option("--exit-after-silence TIME", "Exit with code 4 if no queue could be reached for this long."),
    ] = None,
    as_json: Annotated[bool, option("--json", "Write the log on stderr as JSON.")] = False,
) -> int:
    """Run a Python function on each message. If it returns, the message is acked; if it raises, the message is retried.

    Plain functions run in threads, async functions as tasks. On SIGTERM or Ctrl-C the worker finishes what it is
    running and exits; a second signal ends it at once.

    Examples:
        holdfast worker jobs shop.orders:handle
        holdfast worker http://127.0.0.1:7700 shop.orders:handle --queue orders --queue mails --concurrency 32
    """
    enter(folder)
    worker = holdfast.Worker(
        named(handler),
        queue=_names(folder, queue or []),
        name=name,
        at=folder,
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
    """Return the queues to work on; one that is named need not exist yet."""
    names = wanted or [name for name in (queue_of(at),) if name is not None]
    if not is_address(at):
        opening.topics_of(at)
        names = names or [opening.chosen_topic(at, None)]
    elif not names:
        raise InvalidRequest("choose a queue with --queue")
    return [check_topic_name(name) for name in names]


def _run(worker: holdfast.Worker, *, as_json: bool) -> int:
    from holdfast.server.metrics import start_logging

    start_logging("json" if as_json else "text", sys.stderr)
    code = worker.run()
    if code != OK:
        # A handler that did not end in time may never end, and must not keep the process alive.
        logging.shutdown()
        os._exit(code)
    return code


def named(text: str) -> Callable[[Any], Any]:
    """Import the function named by `module:function`; also looks in the working directory, as `python -m` does."""
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
        raise InvalidRequest(f"{text} is not a function but a {type(found).__name__}: {_FORM}")
    handler: Callable[[Any], Any] = found
    return handler


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise InvalidRequest(
                f"there is no module {name}, neither in {os.getcwd()} nor among the installed packages: {_FORM}"
            ) from None
        raise _not_imported(name, error) from None
    except Exception as error:
        raise _not_imported(name, error) from None


def _not_imported(name: str, error: Exception) -> InvalidRequest:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return InvalidRequest(
        f"{name} cannot be imported: {type(error).__name__}: {error} ({last.filename}, line {last.lineno}). Correct "
        "the module, then start the worker again"
    )


def _functions_of(module: Any) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    return f"; its functions are {opening.some_of(names)}" if names else "; it has no functions"


def _seconds(text: str | None, name: str) -> float | None:
    return None if text is None else parse_duration(text, name)
