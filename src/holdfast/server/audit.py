"""The audit log: every administrative act as a line of JSON, on disk before it is done.

An act that cannot be written down is refused. So each has two lines: one that says what is about to be done, synced
before anything happens, and one that says what became of it. Where a crash comes in between, the first stands alone,
and tells that the act was begun and nobody knows how far it came.

Calls that were refused are in another file, `refusals`: they cannot push the acts out of this one.
"""

from __future__ import annotations

import errno
import logging
from contextlib import suppress
from typing import Any, Final

import msgspec

from holdfast.broker.layout import TOPICS
from holdfast.env import World
from holdfast.errors import BadSettings, DiskFull, Unavailable
from holdfast.server.acts import BEGUN, DONE, MOST_TEXT, Act, act_of, line_of, now
from holdfast.server.audit_file import AuditFile
from holdfast.server.refusals import Refusals
from holdfast.settings import ServerSettings
from holdfast.storage.files import join

__all__ = ["BEGUN", "DONE", "FILE", "Act", "Audit", "open_audit", "refused_path"]

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
