"""The table of limits for docs/reference/limits.md: every number is taken from where it holds.

`python -m tests.tidy.limits_reference --write` renews the page; without `--write` it prints.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, get_type_hints

import msgspec

from holdfast import scheduling
from holdfast.api import arguments, drafts, topics
from holdfast.api.schedules import LONGEST_JITTER_S
from holdfast.api.transactions import LONGEST_S, MOST_OPERATIONS
from holdfast.broker import locks, schedules, transactions, workers
from holdfast.broker import samples as store
from holdfast.broker.folder import layout
from holdfast.codec import samples
from holdfast.delivery import group, where
from holdfast.large import LARGE_BYTES
from holdfast.local import schedules as schedule_views
from holdfast.model import MOST_DOCUMENT_BYTES
from holdfast.protocol import media, messages
from holdfast.server import forms, limits, served, turns, waiting
from holdfast.server.http import connection
from holdfast.server.http import messages as unpack
from holdfast.server.limits import ConnectionLimits
from holdfast.server.tokens import TokenEntry, principal_of
from holdfast.settings import LogSettings, QueueSettings, ServerSettings, TopicSettings
from holdfast.storage import segment
from tests.tidy.repo import ROOT, with_part

PAGE = ROOT / "docs" / "reference" / "limits.md"
BEGIN = "<!-- {name}: made by `python -m tests.tidy.limits_reference --write` from the code -->"
END = "<!-- end of {name} -->"
_TOKEN = principal_of(TokenEntry(name="one", sha256="0" * 64, role="consumer"))


class Limit(NamedTuple):
    """What is limited, to how much, and how that can be changed."""

    what: str
    value: str
    change: str = "no"


def rendered() -> dict[str, list[Limit]]:
    """The tables by name."""
    return {"messages": _messages(), "calls": _calls(), "server": _server(), "locks": _locks(), "samples": _samples()}


def with_limits(page: str) -> str:
    """The page, with every part between two marks made anew."""
    for name, rows_of in rendered().items():
        rows = "\n".join(f"| {each.what} | {each.value} | {each.change} |" for each in rows_of)
        made = f"| | limit | can be changed |\n|---|---|---|\n{rows}"
        page = with_part(page, BEGIN.format(name=name), END.format(name=name), made)
    return page


def _messages() -> list[Limit]:
    return [
        _setting("a message, with its key and headers", LogSettings, "max_message_bytes", "queues-and-logs"),
        _setting("the messages of one call, which are all stored or none", LogSettings, "max_batch_bytes"),
        _setting("a compressed frame, decompressed", LogSettings, "max_raw_bytes"),
        Limit("bodies that are read into memory only on request", f"over {_size(LARGE_BYTES)}"),
        Limit("memory mapped for reading, for all logs of a process", f"about {_size(segment.MOST_BYTES)}"),
        Limit("a dedup id, a correlation id", _size(drafts._MOST_ID_BYTES)),
        Limit("a priority", f"0 to {_most(messages.Priority)}"),
        Limit("a delay, a time to live", f"{drafts.MAX_DURATION_MS // _YEAR_MS} years"),
        _setting("a lease, unless the call sets it", QueueSettings, "lease_ms"),
        Limit("a lease, at most", f"{_most(messages.Lease) // (24 * 3600)} days"),
        _setting("failed deliveries before a message becomes a dead letter", QueueSettings, "max_attempts"),
        Limit("errors kept with a message", f"the last {group._MOST_FAILURES}"),
        _setting("characters kept of each error", QueueSettings, "max_error_chars"),
        Limit("the state of a message, as JSON", _size(MOST_DOCUMENT_BYTES)),
        Limit("the name of a topic", f"{200 - len(layout.DEAD_SUFFIX)} characters: letters, digits, `_`, `-` and `.`"),
        Limit("the name of a group", f"{_meta(messages.Name, 'max_length')} of the same characters"),
        _setting("partitions per topic", TopicSettings, "partitions", "topics"),
        Limit("a condition (`where`)", f"{where.MAX_CHARACTERS:,} characters, {where.MAX_DEPTH} levels deep"),
        _setting("done messages kept for replay, per partition", TopicSettings, "retention_done_bytes"),
        Limit("disk space that is always left free", _size(LogSettings().min_free_bytes), _named("min_free_bytes")),
    ]


def _calls() -> list[Limit]:
    receipts = get_type_hints(messages.Receipts, include_extras=True)["receipts"]
    prefetch = get_type_hints(messages.Subscribe, include_extras=True)["prefetch"]
    return [
        Limit("messages per get or receive, in your process", f"{arguments.MOST_AT_ONCE:,}"),
        Limit("messages per receive, over HTTP", f"{_most(messages.Count):,}"),
        Limit("messages per poll, in your process", f"{topics._MOST_POLLED:,}"),
        _setting("messages per call over HTTP, in any form", ServerSettings, "max_batch_messages", "server"),
        Limit(
            "values in one message, or in any other body; a list, a map or a name counts as three",
            f"{media.MOST_VALUES:,}",
        ),
        Limit(
            "commas in a batch sent as one JSON text (a batch sent as lines has no such limit)",
            f"{media.MOST_BATCH_COMMAS:,}",
        ),
        Limit("values in a batch in MessagePack", f"{media.MOST_BATCH_VALUES:,}"),
        Limit("an `attempt_id`", f"{_meta(messages.AttemptId, 'max_length')} ASCII characters, without spaces"),
        Limit("receives with an `attempt_id` that are remembered per caller", f"the last {waiting.MOST_IDS:,}"),
        Limit("messages of these receives", f"the last {waiting.MOST_MESSAGES:,}"),
        Limit("receipts per ack, nack, reject or extend", f"{_meta(receipts, 'max_length'):,}"),
        Limit("unsettled messages that a stream may have sent (`prefetch`)", f"{_most(prefetch):,}"),
        Limit("items in the response to a list", f"{_most(messages.Limit):,}"),
        Limit(
            "size of one response to a receive",
            f"{_size(served._MOST_BYTES)}, or one message; the rest goes back to the queue",
        ),
        Limit("size of one response to a poll", f"{_size(unpack.ANSWER_BYTES)}, or one message"),
        Limit("size of one response to a read by offset", f"{_size(unpack.ANSWER_BYTES)}, or one message"),
        Limit("headers of a message sent over HTTP", f"{messages.MOST_HEADERS:,}"),
        Limit("the `options` of a form", _size(forms._MOST_OPTIONS_BYTES)),
        Limit("pipelined requests per connection", f"{connection._MOST_WAITING}; the client then waits"),
    ]


def _server() -> list[Limit]:
    return [
        _setting("connections", ServerSettings, "max_connections", "server"),
        Limit(
            "connections from one address",
            f"{ConnectionLimits().per_address:,}",
            _named("max_connections_per_address", "server"),
        ),
        Limit("connections beyond that, for health checks and admins", f"{ConnectionLimits().reserve}"),
        _setting("the request line and all headers", ServerSettings, "max_header_bytes", "server"),
        _setting("the body of a request, also when decompressed", ServerSettings, "max_request_bytes", "server"),
        Limit(
            "its decompressed size, above " + _size(unpack.FREE_BYTES),
            f"{ServerSettings().max_unpack_ratio} times its compressed size",
            _named("max_unpack_ratio", "server"),
        ),
        Limit("headers of a request", f"{connection._MOST_FIELDS:,}"),
        Limit(
            f"chunks of a body, if they have less than {connection._PIECE_BYTES} bytes on average",
            f"{connection._MOST_PIECES:,}",
        ),
        _setting("time to send the headers of a request", ServerSettings, "header_timeout_ms", "server"),
        _setting("time to send its body", ServerSettings, "body_timeout_ms", "server"),
        _setting("plus one second for each", ServerSettings, "min_body_bytes_per_s", "server"),
        _setting(
            "time without reading a response before the client is disconnected",
            ServerSettings,
            "write_timeout_ms",
            "server",
        ),
        _setting("time without a request before the connection is closed", ServerSettings, "idle_timeout_ms", "server"),
        _setting("how long one call may wait", ServerSettings, "max_wait_ms", "server"),
        _setting("groups per topic that callers may create", ServerSettings, "max_groups", "server"),
        _setting("partitions per topic that callers may request", ServerSettings, "max_partitions", "server"),
        _setting("waiting calls", ServerSettings, "max_waiters", "server"),
        Limit(
            "waiting calls per token",
            f"{waiting.WaitLimit(ServerSettings().max_waiters).share(_TOKEN):,}",
            _named("max_waiters_per_principal", "server"),
        ),
        Limit(
            "memory for request bodies above 64 KiB, per token; further bodies wait",
            f"{limits.BODIES_EACH} times `max_request_bytes`",
        ),
        Limit(
            "memory for responses above 64 KiB, per token; further calls are refused",
            _size(limits.ANSWERS_EACH * 2 * unpack.ANSWER_BYTES),
        ),
        Limit("request bodies waiting for memory, per token", f"{limits.MOST_WAITING}"),
        Limit("waiting calls of admins, beyond `max_waiters`", f"{waiting.ADMIN_RESERVE}"),
        _setting("time for running calls to finish after SIGTERM", ServerSettings, "drain_ms", "server"),
        _setting("searches running at the same time", ServerSettings, "scan_workers", "server"),
        _setting("messages examined per call", ServerSettings, "scan_messages", "server"),
        Limit("waiting searches per caller", f"{turns.MOST_WAITING}"),
        Limit(
            "listed workers; their queues in total",
            f"{workers.MOST_WORKERS:,}; {workers.MOST_REPORTS:,} (per caller {workers.MOST_WORKERS_EACH:,}; "
            f"{workers.MOST_REPORTS_EACH:,})",
        ),
        _setting("size of the audit log before it is rotated", ServerSettings, "audit_bytes", "server"),
        _setting("rotated audit logs kept", ServerSettings, "audit_files", "server"),
    ]


def _samples() -> list[Limit]:
    return [
        Limit("groups and topics with their own samples", f"{store.MOST_SERIES - 1}, the busiest"),
        *(
            Limit(f"samples of {_time(ring.step_s * 1000)}", f"the last {_time(ring.span_s * 1000)}")
            for ring in samples.RINGS
        ),
        Limit("the file of samples", f"{samples.HEADER_BYTES + store.MOST_SERIES * samples.SERIES_BYTES:,} bytes"),
    ]


def _locks() -> list[Limit]:
    return [
        Limit("a state document, as JSON", _size(MOST_DOCUMENT_BYTES)),
        Limit("all state documents of a folder", _size(locks._MOST_BYTES)),
        Limit("callers waiting for locks", f"{locks._MOST_WAITERS:,}"),
        Limit("a lock's lease", f"{_most(messages.Lease) // (24 * 3600)} days"),
        Limit("transactions of a folder that have a name", f"{transactions.MOST_TRANSACTIONS:,}"),
        Limit("operations of a transaction", f"{MOST_OPERATIONS:,}"),
        Limit("all that a transaction publishes and acks", _size(transactions.MOST_BYTES)),
        Limit("a transaction's `timeout`", _time(LONGEST_S * 1000)),
        Limit("schedules of a folder", f"{schedules.MOST_SCHEDULES:,}"),
        Limit("the message of a schedule, with key and headers", _size(schedule_views.MOST_BYTES)),
        Limit("a schedule's jitter", _time(LONGEST_JITTER_S * 1000)),
        Limit('firings that `misfire="all"` catches up on at once', f"{scheduling.MOST_CAUGHT_UP:,}"),
    ]


_YEAR_MS = 365 * 24 * 3600 * 1000


def _setting(what: str, kind: type[msgspec.Struct], name: str, anchor: str = "queues-and-logs") -> Limit:
    value: int = getattr(kind(), name)
    most = _most(get_type_hints(kind, include_extras=True)[name])
    unit = _time if name.endswith("_ms") else _size if "bytes" in name else _plain
    up_to = f", up to {unit(most)}" if most is not None and most < 2**53 else ""
    return Limit(what, unit(value), f"{_named(name, anchor)}{up_to}")


def _named(name: str, anchor: str = "queues-and-logs") -> str:
    return f"[`{name}`](settings.md{'' if anchor == 'queues-and-logs' else f'#{anchor}'})"


def _meta(kind: Any, name: str) -> Any:
    """A limit of an annotated type."""
    for each in (kind, *getattr(kind, "__args__", ())):
        for meta in getattr(each, "__metadata__", ()):
            if getattr(meta, name, None) is not None:
                return getattr(meta, name)
    return None


def _most(kind: Any) -> Any:
    return _meta(kind, "le")


def _plain(value: int) -> str:
    return f"{value:,}"


def _size(value: int) -> str:
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= factor and value % factor == 0:
            return f"{value // factor:,} {unit}"
    return f"{value:,} bytes"


def _time(value: int) -> str:
    for factor, unit in ((24 * 3_600_000, "day"), (3_600_000, "hour"), (60_000, "minute"), (1_000, "second")):
        if value >= factor and value % factor == 0:
            return f"{value // factor:,} {unit}{'' if value == factor else 's'}"
    return f"{value:,} ms"


if __name__ == "__main__":
    renewed = with_limits(PAGE.read_text("utf-8"))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(renewed, "utf-8")
    else:
        sys.stdout.write(renewed)
