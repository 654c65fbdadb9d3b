"""The audit log.

Every administrative act is on disk before it is carried out. Calls that were refused go to a separate file of bounded
size.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from holdfast.broker.folder.layout import TOPICS
from holdfast.env import World
from holdfast.env.disk import File, write_fully
from holdfast.errors import BadSettings, DiskFull, Forbidden, HoldfastError, Unauthenticated, Unavailable
from holdfast.protocol.topics import BEGUN, DONE, Act
from holdfast.server.service import Call
from holdfast.settings import ServerSettings
from holdfast.storage.files import join, read_file

__all__ = ["BEGUN", "DONE", "FILE", "Act", "Audit", "open_audit", "refused_path"]


_MOST_READ: Final = 4 * 1024 * 1024  # bytes of each file that are searched for the newest lines


class AuditFile:
    """A file of lines, rotated when it reaches `most_bytes`. Safe to use from any thread."""

    def __init__(self, world: World, path: str, *, most_bytes: int, files: int) -> None:
        self.path = path
        self._world = world
        self._most_bytes = most_bytes
        self._files = files
        self._lock = threading.Lock()
        self._file: File | None = None
        self._end = 0

    def prepare(self) -> None:
        """Open or create the file. Raises OSError if that fails."""
        with self._lock:
            self._opened(0)

    def append(self, line: bytes, *, sync: bool) -> None:
        """Append a line, which must end with \\n. With `sync` it is on disk when this returns."""
        with self._lock:
            try:
                file = self._opened(len(line))
                write_fully(file, self._end, [line])
                if sync:
                    file.sync()
            except OSError:
                # After a failed sync the contents of the disk are unknown, so the next append opens the file again.
                self._close_file()
                raise
            self._end += len(line)

    def backwards(self) -> Iterator[bytes]:
        """Yield the lines, newest first. A crash may have cut one of them short."""
        for number in range(self._files + 1):
            with self._lock:
                content = read_file(self._world.disk, self._name(number))
            yield from reversed((content or b"")[-_MOST_READ:].splitlines())

    def close(self) -> None:
        with self._lock:
            self._close_file()

    def _opened(self, wanted: int) -> File:
        if self._file is not None and self._end and self._end + wanted > self._most_bytes:
            self._close_file()
            self._put_aside()
        if self._file is None:
            self._file = self._world.disk.open(self.path, write=True, create=True)
            self._world.disk.sync_folder(self.path.rpartition("/")[0] or ".")
            self._end = self._file.size()
            if self._end and self._file.read(self._end - 1, 1) != b"\n":  # a crash cut the last line short
                write_fully(self._file, self._end, [b"\n"])
                self._end += 1
        return self._file

    def _put_aside(self) -> None:
        disk = self._world.disk
        with suppress(FileNotFoundError):
            disk.remove(self._name(self._files))
        for number in range(self._files - 1, -1, -1):
            with suppress(FileNotFoundError):
                disk.rename(self._name(number), self._name(number + 1))

    def _name(self, number: int) -> str:
        return f"{self.path}.{number}" if number else self.path

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


# Lines of the log: their size is bounded, and secrets are left out.

MOST_TEXT: Final = 500
_MOST_PARAMETERS: Final = 8 * 1024
_SECRETS: Final = ("token", "secret", "password", "authorization", "sha256", "cookie", "private")


def act_of(
    world: World,
    *,
    principal: str,
    peer: str,
    action: str,
    route: str,
    target: str = "",
    parameters: Mapping[str, Any] | None = None,
    correlation_id: str = "",
) -> Act:
    """An act that starts now, with long values cut and secrets removed."""
    ids = world.ids
    return Act(
        time=now(world),
        id=f"{ids.random_u32():08x}{ids.random_u32():08x}",
        principal=principal,
        peer=peer,
        action=action,
        route=route,
        target=target[:MOST_TEXT],
        parameters=_without_secrets(parameters or {}),
        correlation_id=correlation_id[:MOST_TEXT],
    )


def is_routine(act: Act) -> bool:
    """Whether an act changed nothing: a worker that starts makes sure of its queue, and a dry run only looks."""
    is_start = act.route == "PUT /v1/queues/{queue}" and act.count == 0
    return act.outcome in (DONE, BEGUN) and (is_start or act.parameters.get("dry_run") is True)


def now(world: World) -> datetime:
    return datetime.fromtimestamp(world.clock.now_ns() / 1e9, UTC)


def line_of(act: Act) -> bytes:
    return msgspec.json.encode(act) + b"\n"


def _without_secrets(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of an act, with long values cut and secrets removed."""
    plain: dict[str, Any] = {str(name)[:100]: _plain(str(name), value) for name, value in parameters.items()}
    size = len(msgspec.json.encode(plain))
    return plain if size <= _MOST_PARAMETERS else {"left_out_bytes": size}


def _plain(name: str, value: Any) -> Any:
    if any(word in name.lower() for word in _SECRETS):
        return "(not shown)"
    match value:
        case None | bool() | int() | float():
            return value
        case bytes() | bytearray() | memoryview():
            return f"({len(value)} bytes)"
        case dict():
            return {str(inner)[:100]: _plain(str(inner), each) for inner, each in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain("", each) for each in value]
        case msgspec.Struct():
            return _plain("", msgspec.structs.asdict(value))
        case _:
            return str(value)[:MOST_TEXT]


_log = logging.getLogger(__name__)

FILE: Final = "audit.jsonl"


class Audit:
    """The audit log: two lines for each act, one before it starts and one when it has ended."""

    def __init__(self, world: World, path: str, *, most_bytes: int = 16 * 1024 * 1024, files: int = 10) -> None:
        self._world = world
        self._file = AuditFile(world, path, most_bytes=most_bytes, files=files)
        self.refusals = Refusals(world, refused_path(path), most_bytes=most_bytes)

    def prepare(self) -> None:
        """Raise BadSettings if the log cannot be written: when the server starts, not at the first act."""
        try:
            self._file.prepare()
        except OSError as error:
            reason = error.strerror or error
            raise BadSettings(f"the audit log {self._file.path} cannot be written: {reason}; set audit_file") from None

    def begin(self, **facts: Any) -> Act:
        """Write that an act is about to start. If this raises, the act must not be carried out."""
        act = act_of(self._world, **facts)
        try:
            self._file.append(line_of(act), sync=True)
        except OSError as error:
            kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else Unavailable
            raise kind(
                f"nothing was done: {act.route} would change something, but cannot be recorded in the audit log "
                f"{self._file.path}: {error.strerror or error}. Fix that, then try again"
            ) from error
        return act

    def end(self, act: Act, outcome: str = DONE, *, count: int | None = None, target: str = "") -> None:
        """Write the outcome of an act: done, or an error code. A failure is only logged: the act cannot be undone."""
        ended = msgspec.structs.replace(
            act, time=now(self._world), outcome=outcome, count=count, target=(target or act.target)[:MOST_TEXT]
        )
        try:
            self._file.append(line_of(ended), sync=True)
        except OSError as error:
            _log.error(
                "the outcome of an act cannot be written to the audit log: %s",
                error.strerror or error,
                extra={"act": act.id, "route": act.route, "outcome": outcome, "count": count},
            )

    def last(self, count: int) -> list[Act]:
        """The latest acts, newest first, each with its outcome."""
        found: dict[str, Act] = {}
        for line in self._file.backwards():
            with suppress(msgspec.DecodeError):  # cut short by a crash, or by the limit on the bytes read
                act = msgspec.json.decode(line, type=Act)
                if len(found) >= count and act.id not in found:
                    break
                found.setdefault(act.id, act)
        return list(found.values())

    def close(self) -> None:
        self.refusals.close()
        self._file.close()


def open_audit(world: World, folder: str, settings: ServerSettings) -> Audit:
    """Open the audit log of a served folder. Raises BadSettings if it cannot be written."""
    # A folder that holds only this file would not be recognized as a data folder.
    world.disk.make_folder(join(folder, TOPICS))
    path = settings.audit_file or join(folder, FILE)
    audit = Audit(world, path, most_bytes=settings.audit_bytes, files=settings.audit_files)
    audit.prepare()
    return audit


def refused_path(path: str) -> str:
    """The path of the file for refused calls, in the same folder: audit-refused.jsonl."""
    folder, slash, name = path.rpartition("/")
    stem, dot, kind = name.rpartition(".")
    return f"{folder}{slash}{stem or name}-refused{dot if stem else ''}{kind if stem else ''}"


# Refused calls.
#
# A refused call has changed nothing, so its line is not synced. It goes to a separate file, so that no number of
# refused calls can push out the acts that were carried out. Each caller gets `LINES` lines per `WINDOW_S`; the rest are
# counted, and the count is written as one line when the window ends.

LINES: Final = 30
WINDOW_S: Final = 60.0
MOST_LINE_BYTES: Final = 2_048
FILES: Final = 1  # rotated files that are kept besides the current one

# All callers without a known token count as one: they could use a new name or address for each call.
UNKNOWN: Final = "(unknown)"
_OTHERS: Final = "(others)"
_MOST_CALLERS: Final = 10_000

_MOST_NAME: Final = 100
_MOST_PARAMETERS_REFUSALS: Final = 512


class _Window(msgspec.Struct):
    """The refused calls of one caller since `began_ns` on the monotonic clock."""

    began_ns: int
    written: int = 0
    left_out: int = 0

    def is_over(self, now_ns: int) -> bool:
        return now_ns - self.began_ns >= WINDOW_S * 1e9


class Refusals:
    """Writes refused calls, up to a limit for each caller. Safe to use from any thread."""

    def __init__(self, world: World, path: str, *, most_bytes: int) -> None:
        self._world = world
        self._file = AuditFile(world, path, most_bytes=most_bytes, files=FILES)
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}
        self._unreported: dict[str, int] = {}  # calls left out, by caller, in windows that have ended

    @property
    def path(self) -> str:
        return self._file.path

    def admit(self, caller: str) -> bool:
        """Whether to write one more refusal of this caller. If not, it is counted."""
        now_ns = self._world.clock.monotonic_ns()
        with self._lock:
            window = self._window(caller, now_ns)
            if window.written < LINES:
                window.written += 1
                return True
            window.left_out += 1
            return False

    def write(self, *, outcome: str, **facts: Any) -> None:
        """Write a refusal that was admitted."""
        self.tell_rest()
        parameters = facts.pop("parameters", None) or {}
        act = act_of(self._world, parameters=parameters, **facts)
        self._append(msgspec.structs.replace(act, outcome=outcome))

    def tell_rest(self, *, ended: bool = True) -> bool:
        """Write the counts of what was left out, of windows that have `ended` or of all. Returns whether any remain."""
        now_ns = self._world.clock.monotonic_ns()
        with self._lock:
            for caller, window in list(self._windows.items()):
                if not ended or window.is_over(now_ns):
                    self._end(caller, window)
            unreported, self._unreported = self._unreported, {}
            left = any(window.left_out for window in self._windows.values())
        for caller, count in unreported.items():
            self._append(_rest(self._world, caller, count))
        return left

    def last(self, count: int) -> list[Act]:
        """The latest refusals, newest first."""
        self.tell_rest()
        found: list[Act] = []
        for line in self._file.backwards():
            if len(found) >= count:
                break
            try:
                found.append(msgspec.json.decode(line, type=Act))
            except msgspec.DecodeError:  # cut short by a crash
                continue
        return found

    def close(self) -> None:
        self.tell_rest(ended=False)
        self._file.close()

    def _window(self, caller: str, now_ns: int) -> _Window:
        if caller not in self._windows and len(self._windows) >= _MOST_CALLERS:
            caller = _OTHERS
        window = self._windows.get(caller)
        if window is not None and window.is_over(now_ns):
            self._end(caller, window)
            window = None
        if window is None:
            window = self._windows[caller] = _Window(now_ns)
        return window

    def _end(self, caller: str, window: _Window) -> None:
        del self._windows[caller]
        if window.left_out:
            self._unreported[caller] = self._unreported.get(caller, 0) + window.left_out

    def _append(self, act: Act) -> None:
        try:
            self._file.append(_short(act), sync=False)
        except OSError as error:  # the call stays refused, whether or not its line can be written
            _log.error(
                "a refusal cannot be written to %s: %s",
                self.path,
                error.strerror or error,
                extra={"principal": act.principal, "route": act.route},
            )


def _short(act: Act) -> bytes:
    """The line of an act, at most `MOST_LINE_BYTES` long whatever the caller sent."""
    act = msgspec.structs.replace(
        act,
        principal=act.principal[:_MOST_NAME],
        peer=act.peer[:_MOST_NAME],
        target=act.target[:_MOST_NAME],
        correlation_id=act.correlation_id[:_MOST_NAME],
    )
    size = len(msgspec.json.encode(act.parameters))
    if size > _MOST_PARAMETERS_REFUSALS:
        act = msgspec.structs.replace(act, parameters={"left_out_bytes": size})
    line = line_of(act)
    if len(line) > MOST_LINE_BYTES:  # characters that JSON writes as six
        plain = act.principal.encode("ascii", "replace").decode()
        line = line_of(
            msgspec.structs.replace(
                act, principal=plain, target="", correlation_id="", parameters={"left_out_bytes": size}
            )
        )
    return line


def _rest(world: World, caller: str, count: int) -> Act:
    act = act_of(world, principal=caller, peer="", action="", route=f"and {count:,} more refused calls")
    return msgspec.structs.replace(act, outcome="forbidden", count=count)


# Proofs of a lease: with one of them, a reader of the log could settle another caller's messages.
_PROOFS: Final = frozenset({"lease_id", "receipt", "receipts"})


class CallAuditor:
    """Writes HTTP calls to the audit log, on a thread because that waits for the disk."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        self._telling: asyncio.Task[None] | None = None

    async def begin(self, call: Call) -> None:
        """Write that a call is about to start. If this raises, the call must not be carried out."""
        facts = _facts(call)
        facts["parameters"] |= _given(call.body)
        call.act = await asyncio.to_thread(self.audit.begin, **facts)

    async def end(self, call: Call, error: HoldfastError | None, *, failed: bool = False) -> None:
        """Write the outcome of a call. A refused call goes to the file for refusals, within its limits."""
        outcome = "internal" if failed else DONE if error is None else error.code
        if call.act is not None:
            await asyncio.to_thread(self.audit.end, call.act, outcome, count=call.count, target=call.target)
        elif isinstance(error, Forbidden | Unauthenticated):
            facts = _facts(call)
            if self.audit.refusals.admit(facts["principal"]):
                await asyncio.to_thread(self.audit.refusals.write, outcome=outcome, **facts)
            elif self._telling is None or self._telling.done():
                self._telling = asyncio.get_running_loop().create_task(self._tell_rest())

    async def _tell_rest(self) -> None:
        """Write the counts of what was left out, as each window ends."""
        left = True
        while left:
            await asyncio.sleep(WINDOW_S)
            left = await asyncio.to_thread(self.audit.refusals.tell_rest)


def _facts(call: Call) -> dict[str, Any]:
    """What is known of a call before its body is read. Nothing more is written of a refused call."""
    route = call.route
    return {
        "principal": getattr(call.principal, "name", UNKNOWN),
        "peer": call.request.peer,
        "action": route.action,
        "route": f"{route.method} {route.pattern}",
        "target": call.target or _target(call),
        "parameters": {**call.path, **_given(call.query)},
        "correlation_id": call.correlation_id,
    }


def _target(call: Call) -> str:
    """The name of what a call acts on, as far as it is known beforehand."""
    if call.route.named is not None:
        return call.path.get(call.route.named, "")
    return getattr(call.body, "name", "") or call.path.get("group", "")


def _given(value: Any) -> dict[str, Any]:
    """The fields of a struct that were given, without proofs of a lease."""
    if not isinstance(value, msgspec.Struct):
        return {}
    return {
        name: each
        for name, each in msgspec.structs.asdict(value).items()
        if each not in (None, "", [], {}) and name not in _PROOFS
    }
