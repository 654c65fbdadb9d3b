"""The options of the source and the sink, checked by name; and errors as Spark's users see them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import wraps
from typing import Any, Final, Literal, ParamSpec, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec

from holdfast.api.drafts import instant_ns, parse_duration, parse_instant
from holdfast.broker.folder.layout import is_store
from holdfast.broker.streams.queries import LEAST_TTL_MS, MOST_TTL_MS, TTL_MS
from holdfast.client.opening import is_address, refuse_almost
from holdfast.delivery.where import Expression
from holdfast.env.process import set_variable
from holdfast.env.sockets import absolute
from holdfast.errors import HoldfastError, InvalidRequest

EARLIEST: Final = -2
LATEST: Final = -1

# By topic and partition; EARLIEST and LATEST stand for where a partition begins and ends.
Places: TypeAlias = Literal["earliest", "latest"] | dict[str, dict[int, int]]
# By topic and partition, in ns since 1970.
Times: TypeAlias = dict[str, dict[int, int]]

_SUBSCRIPTIONS: Final = ("topic", "subscribe", "subscribePattern", "assign")
_WHERE: Final = ("path", "server", "tokenFile", "table", *_SUBSCRIPTIONS)
_READING: Final = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp",
                   "startingOffsetsByTimestampStrategy", "minPartitions", "maxRecordsPerPartition", "includeHeaders",
                   "includeMetadata", "includeRedriven", "failOnDataLoss", "onCorrupt")  # fmt: skip
BATCH: Final = frozenset({*_WHERE, *_READING, "endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"})
STREAM: Final = frozenset({
    *_WHERE, *_READING, "maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay",
    "groupId", "groupIdPrefix", "pinTimeout",
})  # fmt: skip

_DEFAULT_OFFSETS: Final = 1_000_000
_DEFAULT_BYTES: Final = 256 << 20
_DEFAULT_DELAY_S: Final = 15 * 60.0
_SIZE: Final = re.compile(r"([0-9]+) ?(|b|[kmg](?:i?b)?)")
_SHIFTS: Final = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30}


class Subscription(msgspec.Struct, frozen=True):
    """Which topics are read: by name, by pattern, or only some partitions of them."""

    names: tuple[str, ...] = ()
    pattern: str | None = None
    partitions: dict[str, tuple[int, ...]] | None = None

    def wants(self, topic: str, partition: int) -> bool:
        return self.partitions is None or partition in self.partitions[topic]


class ReadPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with messages that are damaged, gone, or redriven for one group only."""

    skip_corrupt: bool = False
    fail_on_data_loss: bool = True
    include_redriven: bool = False


class ReadOptions(ReadPolicy, frozen=True, kw_only=True):
    """The options of a reader. Times are in ns since 1970."""

    path: str
    subscription: Subscription
    starting: Places
    ending: Places = "latest"
    starting_ns: int | None = None
    ending_ns: int | None = None
    starting_times: Times | None = None
    ending_times: Times | None = None
    none_is_latest: bool = True  # a start at a time after which there is no message: at the end, or an error
    min_partitions: int = 0
    most_records: int | None = None
    include_headers: bool = False
    include_metadata: bool = False
    max_offsets: int | None = _DEFAULT_OFFSETS
    max_bytes: int | None = _DEFAULT_BYTES
    min_offsets: int = 0
    max_delay_ms: int = 0
    group: str | None = None
    group_prefix: str = "spark"
    pin_ms: int = TTL_MS


def check_options(given: Mapping[str, str]) -> ReadOptions:
    """Check the options before it is known whether a batch or a stream uses them. The reader checks the rest."""
    refuse_unknown(given, BATCH | STREAM)
    return _Options(given, 0).common(starting="earliest")


def batch_read_options(given: Mapping[str, str], now_ms: int) -> ReadOptions:
    """The options of a batch read, which begins at the earliest message by default."""
    options = _Options(given, now_ms)
    options.check_names(BATCH, other=STREAM, kind="stream", here="batch")
    return options.common(
        **options.start("earliest"),
        ending=options.places("endingOffsets", "latest"),
        ending_ns=options.instant("endingTimestamp", "endingOffsets"),
        ending_times=options.times("endingOffsetsByTimestamp", "endingTimestamp", "endingOffsets"),
    )


def stream_read_options(given: Mapping[str, str], now_ms: int) -> ReadOptions:
    """The options of a stream, which begins after the latest message by default."""
    options = _Options(given, now_ms)
    options.check_names(STREAM, other=BATCH, kind="batch", here="stream")
    return options.common(
        **options.start("latest"),
        max_offsets=options.limit("maxOffsetsPerTrigger", _DEFAULT_OFFSETS),
        max_bytes=options.limit("maxBytesPerTrigger", _DEFAULT_BYTES),
        min_offsets=options.min_offsets(),
        max_delay_ms=options.delay_ms("maxTriggerDelay"),
        group=given.get("groupId") or None,
        group_prefix=given.get("groupIdPrefix") or "spark",
        pin_ms=options.pin_ms("pinTimeout"),
    )


class TableOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a table's reader. Without a subscription it reads all topics."""

    path: str
    subscription: Subscription
    all_topics: bool
    starting_ns: int | None = None
    ending_ns: int | None = None


def table_options(given: Mapping[str, str], now_ms: int, *, timed: bool) -> TableOptions:
    """The options of a table other than the messages. Only some tables (`timed`) take times."""
    known = frozenset({*_WHERE, *(("startingTimestamp", "endingTimestamp") if timed else ())} - {"assign"})
    for name in sorted((BATCH | STREAM) - known):
        if name in given:
            raise InvalidRequest(f'option "{name}" is not for table {given.get("table")}: leave it out')
    refuse_unknown(given, known)
    options = _Options(given, now_ms)
    all_topics = not any(given.get(name) for name in _SUBSCRIPTIONS)
    return TableOptions(
        path=required_path(given),
        subscription=Subscription(pattern=".*") if all_topics else options.subscription(),
        all_topics=all_topics,
        starting_ns=options.instant("startingTimestamp", "startingOffsets"),
        ending_ns=options.instant("endingTimestamp", "endingOffsets"),
    )


def required_path(given: Mapping[str, str]) -> str:
    """The data folder, by its absolute path or as the URL of a store, or the address of a server."""
    path, server = given.get("path"), given.get("server")
    if path and server:
        raise InvalidRequest('options "path" and "server" are both given: choose one of them')
    if server and not is_address(server):
        raise InvalidRequest(f'option "server" is {server!r}: give its address, such as http://host:7700')
    path = path or server
    if not path:
        raise InvalidRequest(
            'option "path" is missing: name the data folder, .option("path", "/data/shop"), or the address of a server'
        )
    if is_address(path):
        return path
    if is_store(path) and not path.startswith("file:"):
        if urlsplit(path).password is not None:
            raise InvalidRequest(
                'option "path" has a password, which would show up in plans and logs: set PGPASSWORD or a password '
                "file where the driver and the tasks run, and leave it out"
            )
        return path
    refuse_almost(path)
    return absolute(path.removeprefix("file://").removeprefix("file:"))


def as_meant(given: Mapping[str, str]) -> dict[str, str]:
    """The options by their own names, which Spark passes in lower case, and the place as the driver understands it.

    Tasks may run in another folder. Raises nothing: who reads the options says what is wrong with them.
    """
    names = {name.lower(): name for name in BATCH | STREAM}
    found = {names.get(name.lower(), name): value for name, value in given.items()}
    with suppress(InvalidRequest):
        found["path"] = required_path(given)
        found.pop("server", None)
    return found


def refuse_unknown(given: Mapping[str, str], known: frozenset[str]) -> None:
    """Raise InvalidRequest for an unknown option, and suggest a known one. Spark passes names in lower case."""
    names = {name.lower(): name for name in known}
    for option in given:
        if option.lower().startswith("kafka."):
            raise InvalidRequest(
                f'option "{option}" is for a Kafka server: leave it out, and name a folder or a Holdfast server'
            )
        if option.lower() == "token":
            raise InvalidRequest(
                'option "token" would show up in plans and logs: set HOLDFAST_TOKEN where the driver runs, or name a '
                'file with the option "tokenFile"'
            )
        if option.lower() not in names and not option.lower().startswith("spark."):
            near = get_close_matches(option.lower(), names, n=1)
            meant = f'; did you mean "{names[near[0]]}"?' if near else f"; known ones: {', '.join(sorted(known))}"
            raise InvalidRequest(f'option "{option}" is not known{meant}')


def flag(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    """The value of an option that is true or false."""
    text = (given.get(name) or str(default)).strip().lower()
    if text not in ("true", "false"):
        raise InvalidRequest(f'option "{name}" is {given.get(name)!r}: use true or false')
    return text == "true"


def whole_number(given: Mapping[str, str], name: str, default: int, *, least: int = 1) -> int:
    """The value of an option that is a count."""
    text = (given.get(name) or "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise InvalidRequest(f'option "{name}" is {text!r}: give a whole number, {least} or more')
    return int(text)


def moment_ns(text: str, now_ms: int, what: str, name: str) -> int:
    """The time in ns since 1970 of ISO 8601, `-10m` from now, or milliseconds, as Spark's Kafka source takes them."""
    if text.isascii() and text.isdigit() and len(text) >= 10:
        return int(text) * 1_000_000
    return instant_ns(parse_instant(text, now_ms, what), name)


class _Options:
    def __init__(self, given: Mapping[str, str], now_ms: int) -> None:
        self._given = given
        self._now_ms = now_ms

    def check_names(self, known: frozenset[str], *, other: frozenset[str], kind: str, here: str) -> None:
        for name in sorted(other - known):
            if name in self._given:
                raise InvalidRequest(f'option "{name}" is for a {kind} read, and this is a {here} read: leave it out')
        refuse_unknown(self._given, known)

    def common(self, **more: Any) -> ReadOptions:
        corrupt = self._given.get("onCorrupt", "fail").lower()
        if corrupt not in ("fail", "skip"):
            raise InvalidRequest(f'option "onCorrupt" is {corrupt!r}: use "fail" or "skip"')
        return ReadOptions(
            path=required_path(self._given),
            subscription=self.subscription(),
            min_partitions=whole_number(self._given, "minPartitions", 0),
            most_records=whole_number(self._given, "maxRecordsPerPartition", 0) or None,
            include_headers=flag(self._given, "includeHeaders", default=False),
            include_metadata=flag(self._given, "includeMetadata", default=False),
            include_redriven=flag(self._given, "includeRedriven", default=False),
            fail_on_data_loss=flag(self._given, "failOnDataLoss", default=True),
            skip_corrupt=corrupt == "skip",
            **more,
        )

    def limit(self, name: str, default: int) -> int | None:
        """The value of a limit of messages or bytes; None if it is "none"."""
        text = self._given.get(name)
        if text is None:
            return default
        if text.lower() == "none":
            return None
        found = _SIZE.fullmatch(text.strip().lower())
        if found is None or not int(found[1]) or (found[2] and "Bytes" not in name):
            such = "256m" if "Bytes" in name else "100000"
            raise InvalidRequest(f'option "{name}" is {text!r}: give a number of 1 or more, such as {such}, or none')
        return int(found[1]) << _SHIFTS[found[2][:1]]

    def min_offsets(self) -> int:
        least = whole_number(self._given, "minOffsetsPerTrigger", 0)
        most = self.limit("maxOffsetsPerTrigger", _DEFAULT_OFFSETS)
        if most is not None and least > most:
            raise InvalidRequest(
                f'option "minOffsetsPerTrigger" is {least}, and "maxOffsetsPerTrigger" is {most}: the first must not '
                "exceed the second"
            )
        return least

    def delay_ms(self, name: str) -> int:
        text = self._given.get(name)
        return round((_DEFAULT_DELAY_S if text is None else parse_duration(text.strip(), f'option "{name}"')) * 1000)

    def pin_ms(self, name: str) -> int:
        text = self._given.get(name)
        if text is None:
            return TTL_MS
        found = round(parse_duration(text.strip(), f'option "{name}"') * 1000)
        if not LEAST_TTL_MS <= found <= MOST_TTL_MS:
            raise InvalidRequest(f'option "{name}" is {text!r}: give a second (1s) to a week (1w)')
        return found

    def start(self, default: Literal["earliest", "latest"]) -> dict[str, Any]:
        """Where reading begins."""
        times = self.times("startingOffsetsByTimestamp", "startingTimestamp", "startingOffsets")
        name = "startingOffsetsByTimestampStrategy"
        # As in Kafka's source for times by partition; a time for all partitions may lie in the future of some.
        strategy = (self._given.get(name) or ("error" if times is not None else "latest")).strip().lower()
        if strategy not in ("error", "latest"):
            raise InvalidRequest(f'option "{name}" is {strategy!r}: use "error" or "latest"')
        return {
            "starting": self.places("startingOffsets", default),
            "starting_ns": self.instant("startingTimestamp", "startingOffsets"),
            "starting_times": times,
            "none_is_latest": strategy == "latest",
        }

    def times(self, name: str, *instead_of: str) -> Times | None:
        """Times by topic and partition, in ns; None if they are not given."""
        text = (self._given.get(name) or "").strip()
        if not text:
            return None
        for other in instead_of:
            if self._given.get(other) is not None:
                raise InvalidRequest(f'options "{name}" and "{other}" are both given: choose one of them')
        found: Times | None = _json_of(text, dict[str, dict[int, int]])
        if found is None or any(time < 0 for places in found.values() for time in places.values()):
            raise InvalidRequest(
                f'option "{name}" is {text!r}: give milliseconds since 1970 by topic and partition, such as '
                '{"orders": {"0": 1767225600000}}'
            )
        return {
            topic: {number: time_ms * 1_000_000 for number, time_ms in places.items()}
            for topic, places in found.items()
        }

    def instant(self, name: str, instead_of: str) -> int | None:
        """The time of an option; None if it is not given. Raises InvalidRequest if offsets are given, too."""
        text = (self._given.get(name) or "").strip()
        if not text:
            return None
        if self._given.get(instead_of) is not None:
            raise InvalidRequest(f'options "{name}" and "{instead_of}" are both given: choose one of them')
        return moment_ns(text, self._now_ms, f'option "{name}"', name)

    def places(self, name: str, default: Literal["earliest", "latest"]) -> Places:
        text = (self._given.get(name) or default).strip()
        for word in ("earliest", "latest"):
            if text.lower() == word:
                return word
        found: dict[str, dict[int, int]] | None = _json_of(text, dict[str, dict[int, int]])
        if found is None or any(offset < EARLIEST for places in found.values() for offset in places.values()):
            raise InvalidRequest(
                f'option "{name}" is {text!r}: use earliest, latest, or offsets by topic and partition such as '
                '{"orders": {"0": 23, "1": -2}} (-2 is earliest, -1 is latest)'
            )
        return found

    def subscription(self) -> Subscription:
        given = [name for name in _SUBSCRIPTIONS if self._given.get(name)]
        if len(given) != 1:
            said = f"{' and '.join(given)} are" if given else "none is"
            raise InvalidRequest(
                f"choose what to read with one of the options {', '.join(_SUBSCRIPTIONS)}; {said} given"
            )
        name, text = given[0], self._given[given[0]]
        if name == "subscribePattern":
            try:
                Expression(text)
            except InvalidRequest as error:
                raise InvalidRequest(f'option "subscribePattern" cannot be {text!r}: {error}. Correct it') from None
            return Subscription(pattern=text)
        if name == "assign":
            partitions = _json_of(text, dict[str, tuple[int, ...]])
            if not partitions or not all(partitions.values()):
                raise InvalidRequest(
                    f'option "assign" is {text!r}: give partitions by topic, such as {{"orders": [0, 1]}}'
                )
            return Subscription(names=tuple(sorted(partitions)), partitions=partitions)
        names = tuple(sorted({part.strip() for part in text.split(",")} - {""}))
        if not names:
            raise InvalidRequest(f'option "{name}" is {text!r}: name a topic, or several with commas between them')
        return Subscription(names=names)


def _json_of(text: str, kind: Any) -> Any:
    """The value of a JSON text, or None if it is not of this type."""
    try:
        return msgspec.convert(json.loads(text), kind, strict=False)
    except (ValueError, RecursionError):
        return None


# Errors as Spark's users see them: one sentence, not a stack of two languages.


Given = ParamSpec("Given")
Answer = TypeVar("Answer")

# Spark's Python workers send the traceback along unless this is set. A worker that fails ends, so it affects no other.
_WITHOUT_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"


def in_one_sentence(function: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """Make errors of ours reach the user of Spark as one sentence, without a traceback."""

    @wraps(function)
    def wrapped(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
        with plainly():
            return function(*args, **kwargs)

    return wrapped


@contextmanager
def plainly() -> Iterator[None]:
    """Do the same for the errors of a block, which may be in a generator."""
    try:
        yield
    except HoldfastError as error:
        set_variable(_WITHOUT_TRACEBACK, "1")
        raise error from None
