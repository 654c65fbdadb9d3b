"""The audit log: every administrative act, on disk before it is done; refused calls in a bounded file."""

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
from holdfast.env.disk import File
from holdfast.errors import BadSettings, DiskFull, Forbidden, HoldfastError, Unauthenticated, Unavailable
from holdfast.server.service import Call
from holdfast.settings import ServerSettings
from holdfast.storage.files import join, read_file, write_fully

__all__ = ["BEGUN", "DONE", "FILE", "Act", "Audit", "open_audit", "refused_path"]


# A file of lines that is put aside when it is long; the newest lines are read back first.


_MOST_READ: Final = 4 * 1024 * 1024


class AuditFile:
    """Appends lines, and begins a new file when this one is long. Safe to use from any thread."""

    def __init__(self, world: World, path: str, *, most_bytes: int, files: int) -> None:
        self.path = path
        self._world = world
        self._most_bytes = most_bytes
        self._files = files
        self._lock = threading.Lock()
        self._file: File | None = None
        self._end = 0

    def prepare(self) -> None:
        """Have the file; OSError where that cannot be."""
        with self._lock:
            self._opened(0)

    def append(self, line: bytes, *, sync: bool) -> None:
        """Add a line, which ends with \\n; with `sync` it is on disk then."""
        with self._lock:
            try:
                file = self._opened(len(line))
                write_fully(file, self._end, [line])
                if sync:
                    file.sync()
            except OSError:
                # After a sync that failed nobody knows what is on the disk: the next line begins with a new look.
                self._let_go()
                raise
            self._end += len(line)

    def backwards(self) -> Iterator[bytes]:
        """The lines, the newest first; one of them may have been cut short by a crash."""
        for number in range(self._files + 1):
            with self._lock:
                content = read_file(self._world.disk, self._name(number))
            yield from reversed((content or b"")[-_MOST_READ:].splitlines())

    def close(self) -> None:
        with self._lock:
            self._let_go()

    def _opened(self, wanted: int) -> File:
        if self._file is not None and self._end and self._end + wanted > self._most_bytes:
            self._let_go()
            self._put_aside()
        if self._file is None:
            self._file = self._world.disk.open(self.path, write=True, create=True)
            self._world.disk.sync_folder(self.path.rpartition("/")[0] or ".")
            self._end = self._file.size()
            if self._end and self._file.read(self._end - 1, 1) != b"\n":  # a line that a crash cut short
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

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


# What the audit log says of one act: short, and without what nobody else should read.


BEGUN: Final = "begun"
DONE: Final = "done"

MOST_TEXT: Final = 500
_MOST_PARAMETERS: Final = 8 * 1024
_SECRETS: Final = ("token", "secret", "password", "authorization", "sha256", "cookie", "private")


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `count` is how many messages, or other things, it concerned."""

    time: datetime
    id: str
    principal: str
    peer: str
    action: str
    route: str
    target: str
    parameters: dict[str, Any]
    correlation_id: str
    outcome: str = BEGUN
    count: int | None = None


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
    """An act that begins now."""
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


def now(world: World) -> datetime:
    return datetime.fromtimestamp(world.clock.now_ns() / 1e9, UTC)


def line_of(act: Act) -> bytes:
    return msgspec.json.encode(act) + b"\n"


def _without_secrets(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What an act was asked with, short, and without what nobody else should read."""
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
    """Appends to the file, begins a new one when it is long, and reads back the last acts."""

    def __init__(self, world: World, path: str, *, most_bytes: int = 16 * 1024 * 1024, files: int = 10) -> None:
        self._world = world
        self._file = AuditFile(world, path, most_bytes=most_bytes, files=files)
        self.refusals = Refusals(world, refused_path(path), most_bytes=most_bytes)

    def prepare(self) -> None:
        """Fail at the start of a server, rather than at the first act."""
        try:
            self._file.prepare()
        except OSError as error:
            reason = error.strerror or error
            raise BadSettings(f"the audit log {self._file.path} cannot be written: {reason}; set audit_file") from None

    def begin(self, **facts: Any) -> Act:
        """Note what is about to be done. If that fails the act must not be done, and nothing of it has been."""
        act = act_of(self._world, **facts)
        try:
            self._file.append(line_of(act), sync=True)
        except OSError as error:
            kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else Unavailable
            raise kind(
                f"nothing was done: {act.route} would change things, and cannot be written to the audit log "
                f"{self._file.path}: {error.strerror or error}. Mend that, then try again"
            ) from error
        return act

    def end(self, act: Act, outcome: str = DONE, *, count: int | None = None, target: str = "") -> None:
        """Note what became of it: done, or the code of an error. It is too late to refuse, so a failure is logged."""
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
        """The newest acts, the newest first, each as it ended."""
        found: dict[str, Act] = {}
        for line in self._file.backwards():
            with suppress(msgspec.DecodeError):  # cut short by a crash, or by the limit on what is read
                act = msgspec.json.decode(line, type=Act)
                if len(found) >= count and act.id not in found:
                    break
                found.setdefault(act.id, act)
        return list(found.values())

    def close(self) -> None:
        self.refusals.close()
        self._file.close()


def open_audit(world: World, folder: str, settings: ServerSettings) -> Audit:
    """The audit log of a folder that is served; BadSettings where it could never be written."""
    # A folder that holds nothing but this file would not be taken for one of ours.
    world.disk.make_folder(join(folder, TOPICS))
    path = settings.audit_file or join(folder, FILE)
    audit = Audit(world, path, most_bytes=settings.audit_bytes, files=settings.audit_files)
    audit.prepare()
    return audit


def refused_path(path: str) -> str:
    """The file of the calls that were refused, beside the audit log: audit-refused.jsonl."""
    folder, slash, name = path.rpartition("/")
    stem, dot, kind = name.rpartition(".")
    return f"{folder}{slash}{stem or name}-refused{dot if stem else ''}{kind if stem else ''}"


# Calls that were refused: a file of their own, in which no caller can write much.
#
# A refused act has changed nothing, so its line is not synced, and it stands apart from the acts that were done:
# however many calls are refused, those stay. Each caller has so many lines a minute. What goes beyond is counted, and
# told in one line when the minute is over.


LINES: Final = 30  # of one caller,
WINDOW_S: Final = 60.0  # in this time
MOST_LINE_BYTES: Final = 2_048
FILES: Final = 1  # put aside, besides the one that is written

# All whose token is not known are one caller: they could take a new name, or address, for each call.
UNKNOWN: Final = "(unknown)"
_OTHERS: Final = "(others)"
_MOST_CALLERS: Final = 10_000

_MOST_NAME: Final = 100
_MOST_PARAMETERS_REFUSALS: Final = 512


class _Window(msgspec.Struct):
    """What one caller was refused since a moment, by the clock that nobody sets."""

    began_ns: int
    written: int = 0
    left_out: int = 0

    def is_over(self, now_ns: int) -> bool:
        return now_ns - self.began_ns >= WINDOW_S * 1e9


class Refusals:
    """Notes refused calls, some of each caller. Safe to use from any thread."""

    def __init__(self, world: World, path: str, *, most_bytes: int) -> None:
        self._world = world
        self._file = AuditFile(world, path, most_bytes=most_bytes, files=FILES)
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}
        self._untold: dict[str, int] = {}  # of windows that are over

    @property
    def path(self) -> str:
        return self._file.path

    def admit(self, caller: str) -> bool:
        """Whether one more refusal of this caller is to be written down; otherwise it is counted."""
        now_ns = self._world.clock.monotonic_ns()
        with self._lock:
            window = self._window(caller, now_ns)
            if window.written < LINES:
                window.written += 1
                return True
            window.left_out += 1
            return False

    def write(self, *, outcome: str, **facts: Any) -> None:
        """Write down a refusal that was admitted."""
        self.tell_rest()
        parameters = facts.pop("parameters", None) or {}
        act = act_of(self._world, parameters=parameters, **facts)
        self._append(msgspec.structs.replace(act, outcome=outcome))

    def tell_rest(self, *, ended: bool = True) -> bool:
        """Write down how many more there were, of the windows that have `ended` or of all; are there any left?"""
        now_ns = self._world.clock.monotonic_ns()
        with self._lock:
            for caller, window in list(self._windows.items()):
                if not ended or window.is_over(now_ns):
                    self._end(caller, window)
            untold, self._untold = self._untold, {}
            left = any(window.left_out for window in self._windows.values())
        for caller, count in untold.items():
            self._append(_rest(self._world, caller, count))
        return left

    def last(self, count: int) -> list[Act]:
        """The newest refusals, the newest first."""
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
            self._untold[caller] = self._untold.get(caller, 0) + window.left_out

    def _append(self, act: Act) -> None:
        try:
            self._file.append(_short(act), sync=False)
        except OSError as error:  # refused it is, whether or not that can be written down
            _log.error(
                "a refusal cannot be written to %s: %s",
                self.path,
                error.strerror or error,
                extra={"principal": act.principal, "route": act.route},
            )


def _short(act: Act) -> bytes:
    """A line of a bounded size, whatever the caller put into names and values."""
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
    if len(line) > MOST_LINE_BYTES:  # signs that are written as six each
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


# Calls in the audit log: what of a call is written down, and when.


# What a caller proves a lease with: whoever reads the log must not be able to.
_PROOFS: Final = frozenset({"lease_id", "receipt", "receipts"})


class CallAuditor:
    """Writes down each call of a route that is an act, off the loop, since it waits for the disk."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        self._telling: asyncio.Task[None] | None = None

    async def begin(self, call: Call) -> None:
        """Before anything is done; an error here means that nothing may be."""
        facts = _facts(call)
        facts["parameters"] |= _given(call.body)
        call.act = await asyncio.to_thread(self.audit.begin, **facts)

    async def end(self, call: Call, error: HoldfastError | None, *, failed: bool = False) -> None:
        """What became of it. A refusal is noted, too, in another file and not without end."""
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
        """Say how many more there were, when the time is over in which so few are written down."""
        left = True
        while left:
            await asyncio.sleep(WINDOW_S)
            left = await asyncio.to_thread(self.audit.refusals.tell_rest)


def _facts(call: Call) -> dict[str, Any]:
    """What is known of a call before its body is read; of a refused one that is all that is written down."""
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
    """What an act is about, as far as that can be seen before it is done."""
    if call.route.named is not None:
        return call.path.get(call.route.named, "")
    return getattr(call.body, "name", "") or call.path.get("group", "")


def _given(value: Any) -> dict[str, Any]:
    """What was said, without what was left out."""
    if not isinstance(value, msgspec.Struct):
        return {}
    return {
        name: each
        for name, each in msgspec.structs.asdict(value).items()
        if each not in (None, "", [], {}) and name not in _PROOFS
    }
