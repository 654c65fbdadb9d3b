"""Arguments of calls, checked: errors name the argument, and nothing has been done by then."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from holdfast.api.drafts import Seconds, duration_ms, instant_ns, lease_of
from holdfast.broker.locks import MOST_DOCUMENT_BYTES
from holdfast.errors import InvalidRequest, MessageTooLarge
from holdfast.model import Durability

# What users ask of traces, with their times and limits.


When: TypeAlias = datetime | timedelta

_MOST_STEPS: Final = 1_000_000


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A search as it was asked."""

    topic: str | None = None
    group: str | None = None
    event: str | None = None
    holder: str | None = None
    error: str | None = None
    since: When | None = None
    until: When | None = None


def check_search(limit: object, last: object) -> None:
    """Refuse a number of steps that cannot be asked for."""
    if type(limit) is not int or not 1 <= limit <= _MOST_STEPS:
        raise InvalidRequest(f"limit={limit!r} cannot be used: give a whole number from 1 to {_MOST_STEPS}")
    switch(last, "last")


def moment_ns(value: When, name: str, now_ns: int) -> int:
    """A moment; a length of time is so long ago."""
    if isinstance(value, timedelta):
        return now_ns - duration_ms(value, name) * 1_000_000
    return instant_ns(value, name)


MOST_AT_ONCE: Final = 100_000

# Not the handler's fault: these give the message back as if it had not been touched.
INTERRUPTIONS: Final = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


class ReceiveRequest(msgspec.Struct, frozen=True, gc=False):
    """What a consumer asks for. Without a lease the group's own is meant, without a holder this process."""

    count: int
    timeout_s: float | None = None
    lease_ms: int | None = None
    holder: str | None = None
    renew: bool = False
    detached: bool = False


ONE: Final = ReceiveRequest(1)  # the next message, for as long as it takes


class MessageOutcome(msgspec.Struct, frozen=True, gc=False):
    """What became of messages in flight. What is None is as the group's settings say."""

    verb: Literal["ack", "nack", "defer", "drop", "reject", "extend"]
    delay_ms: int | None = None  # nack, defer, drop: until they are ready again; defer: None is at once
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
    """The arguments of `receive` and `receive_many`."""
    check_count(count)
    timeout_s = None if timeout is None else duration_ms(timeout, "timeout") / 1000
    lease_ms = None if lease is None else lease_of(lease)
    if holder is not None and (not isinstance(holder, str) or len(holder) > 200 or not _is_clean(holder)):
        raise InvalidRequest(f"holder={holder!r} cannot be used: give a short text")
    return ReceiveRequest(count, timeout_s, lease_ms, holder, switch(renew, "renew"), switch(detached, "detached"))


def check_count(count: object) -> None:
    """Refuse what is no number of messages to take or to look at."""
    if type(count) is not int or not 1 <= count <= MOST_AT_ONCE:
        raise InvalidRequest(f"count={count!r} cannot be used: give a whole number from 1 to {MOST_AT_ONCE}")


def switch(value: object, name: str) -> bool:
    """The argument, if it is True or False."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}={value!r} cannot be used: give True or False")
    return value


def waiting(block: object, timeout: Seconds | None) -> Seconds | None:
    """How long to wait: not at all for one who does not want to."""
    return timeout if switch(block, "block") else 0


def gives_back(lease: Seconds | None) -> bool:
    """Whether a lease of this length gives the message back now."""
    return lease is not None and lease_of(lease, minimum_ms=0) == 0


def check_id(message_id: object) -> None:
    """Refuse what is no id of a message."""
    if not isinstance(message_id, str):
        raise InvalidRequest(f"a message's id is text, not {type(message_id).__name__}")


def check_seek(to: object, offset: object, time: datetime | None) -> None:
    """Refuse what is no place to go on from."""
    if sum(argument is not None for argument in (to, offset, time)) != 1:
        raise InvalidRequest('seek takes one of "start", "end", offset=... or time=...')
    if to is not None and to not in ("start", "end"):
        raise InvalidRequest(f'seek cannot go to {to!r}; use "start", "end", offset=... or time=...')
    if offset is not None and type(offset) is not int:
        raise InvalidRequest(f"offset={offset!r} is no offset; give a whole number")
    if time is not None:
        instant_ns(time, "time")


def check_durability(durability: object) -> None:
    """Refuse what is no durability."""
    if durability is not None and not (isinstance(durability, str) and durability in get_args(Durability)):
        raise InvalidRequest(f"durability={durability!r} is not known; use one of {', '.join(get_args(Durability))}")


def check_rate(rate: object) -> None:
    """Refuse what is no number of messages a second."""
    if rate is not None and (type(rate) not in (int, float) or not 0 < rate < float("inf")):  # type: ignore[operator]
        raise InvalidRequest(f"rate={rate!r} cannot be used: give messages a second, above 0")


def chosen_ids(ids: object, where: object) -> list[str] | None:
    """The ids of dead letters that were given, each once; None where a condition chooses."""
    if ids is None:
        return None
    if where is not None:
        raise InvalidRequest("give ids or where, not both")
    if not isinstance(ids, Iterable) or isinstance(ids, bytes):
        raise InvalidRequest(f"ids must be ids of dead letters, not {type(ids).__name__}")
    return list(dict.fromkeys([ids] if isinstance(ids, str) else ids))


def messages_given(messages: object, verb: str, kind: type[Any]) -> list[Any]:
    """The messages that a call is to settle, if that is what they are."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Iterable):
        raise InvalidRequest(f"{verb}_many takes a list of messages, not {type(messages).__name__}")
    given = list(messages)
    for each in set(map(type, given)):
        if not issubclass(each, kind):
            raise InvalidRequest(f"{verb}_many takes messages, not {each.__name__}")
    return given


def error_text(error: object, most_chars: int) -> str:
    """An error as it is kept: its own line first, then where it came from, as far as there is room."""
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
    """The state of a message as it is stored; None takes it away."""
    try:
        content = None if value is None else msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"the state cannot be saved: {error}. It must be a value that JSON knows") from None
    check_state(content)
    return content


def check_state(content: bytes | None) -> None:
    """Refuse what is too large: all states are in memory while their messages are not handled."""
    if content is not None and len(content) > MOST_DOCUMENT_BYTES:
        raise MessageTooLarge(
            f"the state cannot be saved: it has {len(content)} bytes as JSON; {MOST_DOCUMENT_BYTES} are allowed. Keep "
            "what is large in messages or files, and in the state where it is"
        )


def _is_clean(text: str) -> bool:
    """Whether the text can be stored: a lone surrogate cannot."""
    return text.encode(errors="replace").decode() == text
