"""Checks of the arguments of calls. Errors name the argument, and are raised before anything is done."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from holdfast.api.drafts import Seconds, duration_ms, instant_ns, lease_of
from holdfast.broker.folder.layout import check_topic_name
from holdfast.env.process import asyncio
from holdfast.errors import InvalidRequest, MessageTooLarge
from holdfast.later import traceback
from holdfast.model import DURABILITY_OF_ACKS, MOST_DOCUMENT_BYTES, Durability

# Searches in traces, with their times and limits.


When: TypeAlias = datetime | timedelta

_MOST_STEPS: Final = 1_000_000


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A search in the traces, as the caller gave it."""

    topic: str | None = None
    group: str | None = None
    event: str | None = None
    holder: str | None = None
    error: str | None = None
    since: When | None = None
    until: When | None = None


def check_search(limit: object, last: object) -> None:
    """Refuse a bad number of steps."""
    if type(limit) is not int or not 1 <= limit <= _MOST_STEPS:
        raise InvalidRequest(f"limit={limit!r} cannot be used: give a whole number from 1 to {_MOST_STEPS}")
    switch(last, "last")


def moment_ns(value: When, name: str, now_ns: int) -> int:
    """Convert a moment to nanoseconds since 1970; a timedelta means that long before now."""
    if isinstance(value, timedelta):
        return now_ns - duration_ms(value, name) * 1_000_000
    return instant_ns(value, name)


# Searches for messages, in all queues.


MOST_FOUND: Final = 1_000  # by one call


def check_search_request(text: object, limit: object, after: object) -> None:
    """Refuse arguments of the wrong types, and a limit that one call cannot have."""
    for name, value in (("text", text), ("after", after)):
        if not isinstance(value, str):
            raise InvalidRequest(f"{name} is a text, not {type(value).__name__}: give it as a str")
    if type(limit) is not int or not 1 <= limit <= MOST_FOUND:
        raise InvalidRequest(f"limit={limit!r} cannot be used: give a whole number from 1 to {MOST_FOUND}")


def span_of(last: Seconds) -> int:
    """Convert the time that samples are wanted of to milliseconds."""
    from holdfast.codec.samples import LONGEST_S  # for these calls only

    return duration_ms(last, "last", minimum_ms=1, maximum_ms=LONGEST_S * 1000)


MOST_AT_ONCE: Final = 100_000
MOST_REASON_CHARS: Final = 500


def is_interruption(error: BaseException) -> bool:
    """Whether it is not the handler's fault: the message returns to the queue without counting an attempt."""
    if isinstance(error, Exception):
        return False
    return isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError))


class ReceiveRequest(msgspec.Struct, frozen=True, gc=False):
    """What a consumer asks for. The lease defaults to the group's own, the holder to this process."""

    count: int
    timeout_s: float | None = None
    lease_ms: int | None = None
    holder: str | None = None
    renew: bool = False
    detached: bool = False


ONE: Final = ReceiveRequest(1)  # the next message, without a timeout


class MessageOutcome(msgspec.Struct, frozen=True, gc=False):
    """How messages in flight are settled. None means the default of the group's settings."""

    verb: Literal["ack", "nack", "defer", "drop", "reject", "extend"]
    delay_ms: int | None = None  # nack, defer, drop: until they are ready again; for defer, None means at once
    why: str = ""  # nack: the error; reject: the reason
    lease_ms: int | None = None  # extend


ACK: Final = MessageOutcome("ack")


def wanted_of(
    count: int,
    timeout: Seconds | None,
    lease: Seconds | None,
    holder: object,
    *,
    renew: object = False,
    detached: object = False,
) -> ReceiveRequest:
    """Check the arguments of `receive` and `receive_many`."""
    check_count(count)
    timeout_s = None if timeout is None else duration_ms(timeout, "timeout") / 1000
    lease_ms = None if lease is None else lease_of(lease)
    if holder is not None and (not isinstance(holder, str) or len(holder) > 200 or not _is_clean(holder)):
        raise InvalidRequest(f"holder={holder!r} cannot be used: give a short text")
    return ReceiveRequest(count, timeout_s, lease_ms, holder, switch(renew, "renew"), switch(detached, "detached"))


def check_count(count: object) -> None:
    """Refuse a bad number of messages to receive or peek at."""
    if type(count) is not int or not 1 <= count <= MOST_AT_ONCE:
        raise InvalidRequest(f"count={count!r} cannot be used: give a whole number from 1 to {MOST_AT_ONCE}")


def sampled_ms(topic: str | None, group: str | None, last: Seconds) -> int:
    """Return how far back samples are wanted. Raises InvalidRequest also for a group without its topic."""
    if topic is not None:
        check_topic_name(topic)
    elif group is not None:
        raise InvalidRequest(f"group={group!r} cannot be used without a topic: pass the topic that it reads")
    return span_of(last)


def check_shard(shard: object, *, needed: bool = False) -> None:
    """Refuse what cannot be the number of a shard."""
    if (shard is not None or needed) and (type(shard) is not int or shard < 0):
        raise InvalidRequest(f"{shard!r} cannot be the number of a shard: they count from 0")


def switch(value: object, name: str) -> bool:
    """Return the argument if it is True or False; otherwise raise InvalidRequest."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}={value!r} cannot be used: give True or False")
    return value


def waiting(block: object, timeout: Seconds | None) -> Seconds | None:
    """Return how long to wait: 0 with block=False."""
    return timeout if switch(block, "block") else 0


def gives_back(lease: Seconds | None) -> bool:
    """Return whether a lease of this length returns the message to the queue now."""
    return lease is not None and lease_of(lease, minimum_ms=0) == 0


def check_id(message_id: object) -> None:
    """Refuse anything that is not the id of a message."""
    if not isinstance(message_id, str):
        raise InvalidRequest(f"a message's id must be a str, not {type(message_id).__name__}: pass `message.id`")


def check_seek(to: object, offset: object, time: datetime | None) -> None:
    """Refuse anything but exactly one valid position to seek to."""
    if sum(argument is not None for argument in (to, offset, time)) != 1:
        raise InvalidRequest('seek takes one of "start", "end", offset=... or time=...')
    if to is not None and to not in ("start", "end"):
        raise InvalidRequest(f'seek cannot go to {to!r}; use "start", "end", offset=... or time=...')
    if offset is not None and type(offset) is not int:
        raise InvalidRequest(f"offset={offset!r} is not an offset; give a whole number")
    if time is not None:
        instant_ns(time, "time")


def check_reason(reason: object) -> None:
    """Refuse anything that is not a short text, as it is shown to people."""
    if not isinstance(reason, str) or len(reason) > MOST_REASON_CHARS or not _is_clean(reason):
        raise InvalidRequest(f"reason={reason!r} cannot be used: give a text of up to {MOST_REASON_CHARS} characters")


def check_durability(durability: object) -> None:
    """Refuse anything that is not a durability, or None."""
    if durability is not None and not (isinstance(durability, str) and durability in get_args(Durability)):
        raise InvalidRequest(f"durability={durability!r} is not known; use one of {', '.join(get_args(Durability))}")


def durability_of(acks: object, durability: Durability | None) -> Durability | None:
    """The durability that `acks` asks for: another name for it, so only one of the two can be given."""
    if acks is None:
        return durability
    if durability is not None:
        raise InvalidRequest(f"acks={acks!r} and durability={durability!r} say the same: give one of them")
    if not (isinstance(acks, str) and acks in DURABILITY_OF_ACKS):
        raise InvalidRequest(f"acks={acks!r} is not known; use one of {', '.join(DURABILITY_OF_ACKS)}")
    return DURABILITY_OF_ACKS[acks]


def check_rate(rate: object) -> None:
    """Refuse anything that is not a number of messages per second, or None."""
    if rate is not None and (type(rate) not in (int, float) or not 0 < rate < float("inf")):  # type: ignore[operator]
        raise InvalidRequest(f"rate={rate!r} cannot be used: give messages per second, above 0")


def chosen_ids(ids: object, where: object) -> list[str] | None:
    """Return the given ids of dead letters without duplicates; None if a condition selects them."""
    if ids is None:
        return None
    if where is not None:
        raise InvalidRequest("give ids or where, not both")
    if not isinstance(ids, Iterable) or isinstance(ids, bytes):
        raise InvalidRequest(f"ids must be ids of dead letters, not {type(ids).__name__}: pass a list of strings")
    return list(dict.fromkeys([ids] if isinstance(ids, str) else ids))


def messages_given(messages: object, verb: str, kind: type[Any]) -> list[Any]:
    """Return the messages that a call is to settle, checked."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Iterable):
        raise InvalidRequest(f"{verb}_many takes a list of messages, not {type(messages).__name__}: pass [message]")
    given = list(messages)
    for each in set(map(type, given)):
        if not issubclass(each, kind):
            raise InvalidRequest(f"{verb}_many takes messages, not {each.__name__}: pass what `get_many` returned")
    return given


def error_text(error: object, most_chars: int) -> str:
    """Return an error as it is stored: its own line first, then its traceback, cut to `most_chars`."""
    if error is None:
        return ""
    if isinstance(error, BaseException):
        summary = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error)).strip()
        text = summary if trace == summary else f"{summary}\n\n{trace}"
    else:
        text = str(error)
    return text.encode(errors="backslashreplace").decode()[:most_chars]


def state_content(value: Any) -> bytes | None:
    """Return the state of a message as it is stored; None removes it."""
    try:
        content = None if value is None else msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"the state cannot be saved: {error}. Use only values that JSON can hold") from None
    check_state(content)
    return content


def check_state(content: bytes | None) -> None:
    """Refuse a state that is too large: states are in memory until their messages are handled."""
    if content is not None and len(content) > MOST_DOCUMENT_BYTES:
        raise MessageTooLarge(
            f"the state cannot be saved: it has {len(content)} bytes as JSON; {MOST_DOCUMENT_BYTES} are allowed. Keep "
            "large data in messages or files, and a reference to it in the state"
        )


def _is_clean(text: str) -> bool:
    """Return whether the text can be stored: a lone surrogate cannot."""
    return text.encode(errors="replace").decode() == text
