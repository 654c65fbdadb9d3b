"""Locks and state documents as users and the protocol see them, and their arguments, checked."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Protocol

import msgspec

from holdfast.api.arguments import switch
from holdfast.api.drafts import Seconds, duration_ms, lease_of
from holdfast.broker.folder.layout import check_name, parse_lease
from holdfast.errors import InvalidRequest, MessageTooLarge
from holdfast.model import MOST_DOCUMENT_BYTES


class Lock(msgspec.Struct, frozen=True, kw_only=True):
    """A lock that you hold until `expires_at`, unless it is kept alive. `lease` is in seconds.

    `fence` is higher than that of every earlier holder: whatever the lock protects can refuse lower ones.
    """

    name: str
    owner: str
    fence: int
    lease_id: str
    lease: float
    acquired_at: datetime
    expires_at: datetime


class LockInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a lock. The times, the owner and the fence are those of its holder, if there is one."""

    name: str
    held: bool
    owner: str | None = None
    fence: int | None = None
    acquired_at: datetime | None = None
    expires_at: datetime | None = None
    waiting: int = 0
    document_version: int = 0


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A state document: any JSON value, and its version."""

    name: str
    value: Any
    version: int
    updated_at: datetime


class KeptLock(Protocol):
    """A lock whose lease is renewed, as the port keeps it."""

    lock: Lock

    @property
    def lost(self) -> bool:
        """Whether the lease has ended, as far as this process knows."""

    def end(self) -> None:
        """Stop renewing it. A finalizer calls this, on any thread: it neither waits nor raises."""


# The arguments of locks and state documents, checked once for every face and for the server.


LEASE_S: Final = 30.0
_MOST_OWNER: Final = 200


class LockRequest(msgspec.Struct, frozen=True):
    """The lock to acquire, for whom and for how long; `wait_ms` is None to wait without a limit."""

    name: str
    owner: str
    lease_ms: int
    wait_ms: int | None
    if_not_exists: bool = False

    @property
    def waits(self) -> bool:
        """Whether the caller waits in line for the lock."""
        return self.wait_ms != 0 and not self.if_not_exists


def lock_request(
    name: str, owner: object, lease: Seconds, wait: Seconds | None, *, if_not_exists: bool = False
) -> LockRequest:
    """Check the arguments of `acquire`. Raises InvalidRequest if one of them cannot be used."""
    if not isinstance(owner, str) or not 1 <= len(owner) <= _MOST_OWNER or not owner.isprintable():
        raise InvalidRequest(
            f"owner={owner!r:.80} cannot be used: give a printable text of 1 to {_MOST_OWNER} characters"
        )
    return LockRequest(
        check_name(name, "lock"),
        owner,
        lease_of(lease),
        None if wait is None else duration_ms(wait, "wait"),
        switch(if_not_exists, "if_not_exists"),
    )


def lease_id_of(lock: object) -> str:
    """Return the lease id of a Lock, of a held lock, or given as text."""
    lease_id = getattr(lock, "lease_id", lock)
    parse_lease(lease_id)
    return str(lease_id)


def check_version(version: object) -> int | None:
    """Return the expected version of a document, checked; None accepts any."""
    if version is not None and (type(version) is not int or not 0 <= version < 2**63):
        raise InvalidRequest(f"version={version!r:.80} cannot be used: give the number that `get` returned, or 0")
    return version


def document_content(name: str, value: Any) -> bytes:
    """Return the value of a document as JSON. Raises InvalidRequest if that is impossible, and MessageTooLarge."""
    try:
        content = msgspec.json.encode(value)
        msgspec.msgpack.encode(msgspec.json.decode(content))  # it is sent in both
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequest(
            f"document {name} cannot be written: {error}. Use only values that JSON can hold"
        ) from None
    if len(content) > MOST_DOCUMENT_BYTES:
        raise MessageTooLarge(
            f"document {name} has {len(content)} bytes as JSON; {MOST_DOCUMENT_BYTES} are allowed. Keep large data in "
            "messages or files, and a reference to it in the document"
        )
    return content
