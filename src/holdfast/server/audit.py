"""The audit log: every administrative act as a line of JSON, on disk before it is done.

An act that cannot be written down is refused. So each has two lines: one that says what is about to be done, synced
before anything happens, and one that says what became of it. Where a crash comes in between, the first stands alone,
and tells that the act was begun and nobody knows how far it came.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from holdfast.broker.layout import TOPICS
from holdfast.env import World
from holdfast.env.disk import File
from holdfast.errors import BadSettings, DiskFull, Unavailable
from holdfast.settings import ServerSettings
from holdfast.storage.files import join, read_file, write_fully

_log = logging.getLogger(__name__)

FILE: Final = "audit.jsonl"
BEGUN: Final = "begun"
DONE: Final = "done"

_MOST_READ: Final = 4 * 1024 * 1024
_MOST_TEXT: Final = 500
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


class Audit:
    """Appends to the file, begins a new one when it is long, and reads back the last acts."""

    def __init__(self, world: World, path: str, *, most_bytes: int = 16 * 1024 * 1024, files: int = 10) -> None:
        self._world = world
        self._path = path
        self._most_bytes = most_bytes
        self._files = files
        self._lock = threading.Lock()
        self._file: File | None = None
        self._end = 0

    def prepare(self) -> None:
        """Fail at the start of a server, rather than at the first act."""
        try:
            with self._lock:
                self._opened(0)
        except OSError as error:
            reason = error.strerror or error
            raise BadSettings(f"the audit log {self._path} cannot be written: {reason}; set audit_file") from None

    def begin(
        self,
        *,
        principal: str,
        peer: str,
        action: str,
        route: str,
        target: str = "",
        parameters: Mapping[str, Any] | None = None,
        correlation_id: str = "",
    ) -> Act:
        """Note what is about to be done. If that fails the act must not be done, and nothing of it has been."""
        ids = self._world.ids
        act = Act(
            time=self._now(),
            id=f"{ids.random_u32():08x}{ids.random_u32():08x}",
            principal=principal,
            peer=peer,
            action=action,
            route=route,
            target=target[:_MOST_TEXT],
            parameters=_without_secrets(parameters or {}),
            correlation_id=correlation_id[:_MOST_TEXT],
        )
        try:
            self._append(act)
        except OSError as error:
            kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else Unavailable
            raise kind(
                f"nothing was done: {route} would change things, and cannot be written to the audit log "
                f"{self._path}: {error.strerror or error}. Mend that, then try again"
            ) from error
        return act

    def end(self, act: Act, outcome: str = DONE, *, count: int | None = None, target: str = "") -> None:
        """Note what became of it: done, or the code of an error. It is too late to refuse, so a failure is logged."""
        ended = msgspec.structs.replace(
            act, time=self._now(), outcome=outcome, count=count, target=(target or act.target)[:_MOST_TEXT]
        )
        try:
            self._append(ended)
        except OSError as error:
            _log.error(
                "the outcome of an act cannot be written to the audit log: %s",
                error.strerror or error,
                extra={"act": act.id, "route": act.route, "outcome": outcome, "count": count},
            )

    def record(self, *, outcome: str = DONE, count: int | None = None, **facts: Any) -> None:
        """Both at once, for what has no duration: an act that was refused."""
        self.end(self.begin(**facts), outcome, count=count)

    def last(self, count: int) -> list[Act]:
        """The newest acts, the newest first, each as it ended."""
        found: dict[str, Act] = {}
        for act in self._backwards():
            if len(found) >= count and act.id not in found:
                break
            found.setdefault(act.id, act)
        return list(found.values())

    def close(self) -> None:
        with self._lock:
            self._let_go()

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._world.clock.now_ns() / 1e9, UTC)

    def _append(self, act: Act) -> None:
        line = msgspec.json.encode(act) + b"\n"
        with self._lock:
            try:
                file = self._opened(len(line))
                write_fully(file, self._end, [line])
                file.sync()
            except OSError:
                # After a sync that failed nobody knows what is on the disk: the next line begins with a new look.
                self._let_go()
                raise
            self._end += len(line)

    def _opened(self, wanted: int) -> File:
        if self._file is not None and self._end and self._end + wanted > self._most_bytes:
            self._let_go()
            self._put_aside()
        if self._file is None:
            self._file = self._world.disk.open(self._path, write=True, create=True)
            self._world.disk.sync_folder(self._path.rpartition("/")[0] or ".")
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
        return f"{self._path}.{number}" if number else self._path

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _backwards(self) -> Iterator[Act]:
        for number in range(self._files + 1):
            with self._lock:
                content = read_file(self._world.disk, self._name(number))
            for line in reversed((content or b"")[-_MOST_READ:].splitlines()):
                with suppress(msgspec.DecodeError):  # cut short by a crash, or by the limit above
                    yield msgspec.json.decode(line, type=Act)


def open_audit(world: World, folder: str, settings: ServerSettings) -> Audit:
    """The audit log of a folder that is served; BadSettings where it could never be written."""
    # A folder that holds nothing but this file would not be taken for one of ours.
    world.disk.make_folder(join(folder, TOPICS))
    path = settings.audit_file or join(folder, FILE)
    audit = Audit(world, path, most_bytes=settings.audit_bytes, files=settings.audit_files)
    audit.prepare()
    return audit


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
            return str(value)[:_MOST_TEXT]
