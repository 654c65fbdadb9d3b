"""Every error that Holdfast raises on purpose, grouped by what the caller should do about it.

`code` is a stable string for programs; `retryable` says whether the same call may succeed later. Every message says
what happened, to what, what was done about it, and what to do next.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import ClassVar


class HoldfastError(Exception):
    """Base class of every error that this package raises."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False


class InvalidRequest(HoldfastError):
    """The call is wrong and will fail again: change it before you retry."""

    code = "invalid_request"


class BadSettings(InvalidRequest, ValueError):
    """A setting is unknown, of the wrong type, or outside its limits."""

    code = "bad_settings"


class MessageTooLarge(InvalidRequest):
    """A message or a batch exceeds the limits in the settings, or a message state or document exceeds 1 MiB."""

    code = "message_too_large"


class NotALog(InvalidRequest):
    """The folder does not exist or does not contain a log."""

    code = "not_a_log"


class NotAQueue(InvalidRequest):
    """The folder does not exist or does not contain a queue."""

    code = "not_a_queue"


class UnknownTopic(InvalidRequest):
    """No topic has this name, or the topic has no partition with this number."""

    code = "unknown_topic"
    brief = ""  # the message without the names of other topics, for callers who may not see them


class TopicExists(InvalidRequest):
    """A topic with this name already exists."""

    code = "topic_exists"


class UnknownGroup(InvalidRequest):
    """No group has this name."""

    code = "unknown_group"
    brief = ""  # the message without the names of other groups, as in UnknownTopic


class NotInstalled(InvalidRequest):
    """The call needs a package or a program that is not installed on this machine."""

    code = "not_installed"


class BadBody(InvalidRequest):
    """A message body does not match the type that the queue was opened with."""

    code = "bad_body"


class SchemaMismatch(BadBody):
    """A message is not a value of its schema, or does not name one that it may have."""

    code = "schema_mismatch"


class InvalidSchema(InvalidRequest):
    """The text is not a schema of its type, refers to something that is missing, or cannot be checked in bounds."""

    code = "invalid_schema"


class IncompatibleSchema(InvalidRequest):
    """The schema is not compatible with earlier versions of its subject; `problems` says why, one by one."""

    code = "incompatible_schema"

    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class OffsetOutOfRange(InvalidRequest):
    """The offset is before the first retained message or past the end."""

    code = "offset_out_of_range"

    def __init__(self, message: str, *, offset: int, start: int, end: int) -> None:
        super().__init__(message)
        self.offset = offset
        self.start = start
        self.end = end


class Removed(OffsetOutOfRange):
    """Key compaction removed this message and all that follow it up to `next_offset`: continue from there.

    Nothing is lost: a later message with the same key replaced it, or the key was deleted.
    """

    code = "removed"

    def __init__(self, message: str, *, offset: int, next_offset: int, start: int, end: int) -> None:
        super().__init__(message, offset=offset, start=start, end=end)
        self.next_offset = next_offset


class TailLost(InvalidRequest):
    """The position points into a tail that was lost in a power cut or removed by a truncation."""

    code = "tail_lost"

    def __init__(self, message: str, *, epoch: int, offset: int, epoch_end: int) -> None:
        super().__init__(message)
        self.epoch = epoch
        self.offset = offset
        self.epoch_end = epoch_end


class Conflict(InvalidRequest):
    """It was changed by someone else in the meantime: load it again and redo your change.

    For a state document, `version` is its current version (0 if it does not exist).
    """

    code = "conflict"

    def __init__(self, message: str, *, version: int | None = None) -> None:
        super().__init__(message)
        self.version = version


class NotFound(InvalidRequest):
    """Nothing exists at this address or under this name."""

    code = "not_found"


class SchemaNotFound(NotFound):
    """There is no such subject, version or schema in the registry; `reason` says which, in one word or two."""

    code = "schema_not_found"

    def __init__(self, message: str, *, reason: str = "schema") -> None:
        super().__init__(message)
        self.reason = reason


class NotInCluster(InvalidRequest):
    """A cluster cannot do this, or not yet: the message says what to do instead. A single server can."""

    code = "not_in_cluster"


class Unauthenticated(InvalidRequest):
    """The server could not authenticate the caller: the token is missing or not valid."""

    code = "unauthenticated"


class Forbidden(InvalidRequest):
    """The caller is authenticated but not allowed to do this."""

    code = "forbidden"


class OutOfSequence(InvalidRequest):
    """A producer's messages leave a gap after the last one that the partition has from it.

    `expected` is the sequence number the partition would accept next, `known` whether it has any message from this
    producer.
    """

    code = "out_of_sequence"

    def __init__(self, message: str, *, expected: int, given: int, known: bool = True) -> None:
        super().__init__(message)
        self.expected = expected
        self.given = given
        self.known = known


class ExpectationFailed(HoldfastError):
    """Rows do not meet an expectation of the pipeline, and the pipeline is set to stop in that case."""

    code = "expectation_failed"


class LeaseLost(HoldfastError):
    """The message is no longer leased to you: stop working on it, since another consumer may have it.

    `holder` and `since_ms` say who has it now and since when; `why` says how your lease ended.
    """

    code = "lease_lost"

    def __init__(
        self, message: str, *, offsets: Sequence[int] = (), holder: str = "", since_ms: int = 0, why: str = ""
    ) -> None:
        super().__init__(message)
        self.offsets = tuple(offsets)
        self.receipts: tuple[str, ...] = ()  # the receipts that were lost, if the call named several
        self.holder = holder
        self.since_ms = since_ms
        self.why = why


class Empty(HoldfastError, queue.Empty):
    """No message became available before the timeout."""

    code = "empty"
    retryable = True


class Unavailable(HoldfastError):
    """The call cannot succeed right now; the same call may succeed later."""

    code = "unavailable"
    retryable = True


class Busy(Unavailable):
    """Another process, or another object in this process, has the folder open."""

    code = "busy"
    is_elsewhere = False  # its owner is on another machine, and cannot be reached by the folder's socket


class LockHeld(Unavailable):
    """Someone else holds the lock, and it did not become free in time.

    `holder` and `since_ms` say who holds it and since when; `until_ms` is when it expires unless it is renewed.
    """

    code = "lock_held"

    def __init__(self, message: str, *, holder: str = "", since_ms: int = 0, until_ms: int = 0) -> None:
        super().__init__(message)
        self.holder = holder
        self.since_ms = since_ms
        self.until_ms = until_ms


class PipelineFailed(Unavailable):
    """A pipeline stopped on an error from Spark or from a user function; batches it had committed still count."""

    code = "pipeline_failed"


class DiskFull(Unavailable):
    """The disk has no room for this write. Nothing of it was kept; reading still works."""

    code = "disk_full"


class QueueFull(Unavailable):
    """A producer's buffer is full: messages arrive faster than they can be stored."""

    code = "queue_full"


class TooManyWaiters(Unavailable):
    """The limit on calls waiting for messages or locks has been reached."""

    code = "too_many_waiters"


class Closed(HoldfastError):
    """This object is closed: open a new one."""

    code = "closed"


class Fenced(Closed):
    """Replaced by a newer one: a producer with a later epoch, or another member of the group."""

    code = "fenced"


class DiskFailed(Closed):
    """A write or a sync failed on disk; messages that were not yet acknowledged may be lost."""

    code = "disk_failed"


class CorruptData(HoldfastError):
    """Stored bytes are not what was written: someone has to look at the data."""

    code = "corrupt_data"


class ChecksumMismatch(CorruptData):
    """The bytes of a frame do not match their checksum, or are not a frame at all."""

    code = "checksum_mismatch"


class UnknownFormat(CorruptData):
    """The data has a format version, kind or column that this release cannot read."""

    code = "unknown_format"


class DamagedRange(CorruptData):
    """Messages that the log once held are damaged on disk; those around them are intact."""

    code = "damaged_range"

    def __init__(self, message: str, *, first_offset: int, next_offset: int) -> None:
        super().__init__(message)
        self.first_offset = first_offset
        self.next_offset = next_offset
