"""A search over all queues: what people type, and what is found.

    orders-0-42                  the message with this id
    key=customer-7               its key
    tenant=acme                  a header
    $.order.id=7                 a part of a JSON body, as a number or as text
    time=2026-11-17              published (or dead) on this day; also time>..., time<..., age<1h, age>2d
    queue=orders                 only in queues with this in their names
    card declined                each word in body, key, error, id or correlation id, in upper or lower case
    "card declined"              these words in this order
    where attempts > 3           a condition as `holdfast ls --where` takes it

Several terms must all hold. They are translated to a condition in the language of `where`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.api.listing import Listed
from holdfast.delivery.where import moment_of, seconds_of
from holdfast.errors import InvalidRequest
from holdfast.later import pattern

MOST_FOUND: Final = 1_000  # by one call


class SearchHit(NamedTuple):
    """A message that a search found, with its phase, and the group that it has this phase in."""

    message: Listed[Any]
    group: str


class SearchedQueue(msgspec.Struct, kw_only=True):
    """How many messages of a queue a call looked at, of how many; `whole` if it reached the end."""

    queue: str
    searched: int = 0
    messages: int = 0
    whole: bool = False
    problem: str = ""


class SearchPage(msgspec.Struct, kw_only=True):
    """The messages that one call found, and what it looked at.

    One call looks at a limited number of messages. Pass `next` as `after` to search further; it is empty once
    everything was searched. `left` are queues that were not reached, and `left_out` is how many more there are. Topics
    without a group in queue mode (`not_queues`) are not searched. `where` is the condition that was searched for.
    """

    messages: list[SearchHit]
    next: str = ""
    scanned: int = 0
    scanned_in_all: int = 0
    queues: list[SearchedQueue] = []
    left: list[str] = []
    left_out: int = 0
    not_queues: list[str] = []
    where: str = ""


def check_search_request(text: object, limit: object, after: object) -> None:
    """Refuse arguments of the wrong types, and a limit that one call cannot have."""
    for name, value in (("text", text), ("after", after)):
        if not isinstance(value, str):
            raise InvalidRequest(f"{name} is a text, not {type(value).__name__}: give it as a str")
    if type(limit) is not int or not 1 <= limit <= MOST_FOUND:
        raise InvalidRequest(f"limit={limit!r} cannot be used: give a whole number from 1 to {MOST_FOUND}")


_TERM: Final = pattern(r'"((?:[^"\\]|\\.)*)"|((?:[^\s"]|"(?:[^"\\]|\\.)*")+)')
_PAIR: Final = pattern(r"(time|age)(>=|<=|>|<|=)(.+)|(\$[^=]*|[^=<>\s]+)=(.*)", re.DOTALL)
_PATH: Final = pattern(r"""\.([^.\[\]]+)|\[([0-9]+)\]|\[["']([^"'\]]+)["']\]""")
_NUMBER: Final = pattern(r"-?[0-9]+(?:\.[0-9]+)?")
_ID: Final = pattern(r"[^\s=\"$]+-[0-9]+-d?[0-9]+")
_WHERE: Final = "where "


class SearchTerms(NamedTuple):
    """A search: the condition on messages, the text in the names of queues, and the id if it may be one."""

    where: str
    queue: str = ""
    id: str = ""


def parse_search(text: str) -> SearchTerms:
    """Read what somebody typed. Raises InvalidRequest for what cannot be understood."""
    text = text.strip()
    if not text:
        raise InvalidRequest("type what to search for: an id, key=..., a header as name=value, $.path=..., or a text")
    if text.lower().startswith(_WHERE):
        return SearchTerms(text[len(_WHERE) :].strip())
    conditions, queue = [], ""
    for quoted, plain in _TERM.findall(text):
        if not plain:
            conditions.append(_contains(_unescaped(quoted)))
            continue
        pair = _PAIR.fullmatch(plain)
        if pair is None:
            conditions.append(_contains(plain.replace('"', "")))
        elif pair[1] is not None:
            conditions.append(_when(pair[1], pair[2], _unquoted(pair[3])))
        elif pair[4] == "queue":
            queue = _unquoted(pair[5])
        else:
            conditions.append(_equals(pair[4], _unquoted(pair[5])))
    return SearchTerms(" and ".join(conditions), queue, text if _ID.fullmatch(text) else "")


def _contains(word: str) -> str:
    text = literal(f"(?i){re.escape(word)}")
    named = literal(word)
    return f"(body ~ {text} or key ~ {text} or error ~ {text} or id == {named} or correlation_id == {named})"


def _equals(name: str, value: str) -> str:
    if name.startswith("$"):
        path = "json" + "".join(_parts(name))
        if value in ("true", "false", "null"):
            return f"({path} == {value} or {path} == {literal(value)})"
        if _NUMBER.fullmatch(value):
            return f"({path} == {value} or {path} == {literal(value)})"
        return f"{path} == {literal(value)}"
    if name in ("key", "id", "holder", "reason", "correlation_id"):
        return f"{name} == {literal(value)}"
    return f"header[{literal(name)}] == {literal(value)}"


def _parts(path: str) -> Iterator[str]:
    at = 1
    while at < len(path):
        found = _PATH.match(path, at)
        if found is None:
            raise InvalidRequest(f"the path {path} cannot be read at {path[at:]!r}; write it as $.order.items[0].id")
        at = found.end()
        name = found[1] or found[3]
        yield f"[{found[2]}]" if name is None else f"[{literal(name)}]"


def _when(name: str, relation: str, value: str) -> str:
    if name == "age":
        if seconds_of(value) is None:
            raise InvalidRequest(f"age{relation}{value} is no length of time; write it as 30s, 5m, 2h or 7d")
        return f"age {'==' if relation == '=' else relation} {value}"
    moment = moment_of(value)
    if moment is None:
        raise InvalidRequest(f"{value!r} is no time; write it as 2026-11-17, 2026-11-17T10:30 or 2026-11-17T10:30:15Z")
    if relation != "=":
        return f"time {relation} {literal(moment.isoformat())}"
    since = f"time >= {literal(moment.isoformat())}"
    try:
        return f"{since} and time < {literal((moment + _precision(value)).isoformat())}"
    except OverflowError:  # the last day of the year 9999 has no day after it
        return since


def _precision(value: str) -> timedelta:
    """The length of the span that a time without its smaller parts stands for."""
    _, _, clock = value.replace(" ", "T").partition("T")
    parts = re.sub(r"(Z|[+-][0-9:]+)$", "", clock).count(":")
    if not clock:
        return timedelta(days=1)
    return (timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1))[min(parts, 2)]


def literal(text: str) -> str:
    """A text as a literal of the language."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] == '"':
        return _unescaped(value[1:-1])
    return value


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)
