"""Every error that Holdfast raises on purpose, grouped by what the caller should do about it.

A message says what happened, to what, what was done about it, and what to do next. `code` is stable
and meant for programs; `retryable` tells whether the same call may succeed later.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import ClassVar


class HoldfastError(Exception):
    """The root of all errors of this package."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False


class InvalidRequest(HoldfastError):
    """The call cannot work as it is: change it."""

    code = "invalid_request"


class BadSettings(InvalidRequest, ValueError):
    """A setting is unknown, of the wrong type, or outside its limits."""

    code = "bad_settings"


class MessageTooLarge(InvalidRequest):
    """A message or a batch is larger than the settings allow, or a state (of a message, or a document) than 1 MiB."""

    code = "message_too_large"


class NotALog(InvalidRequest):
    """The folder does not exist, or holds no log."""

    code = "not_a_log"


class NotAQueue(InvalidRequest):
    """The folder does not exist, or holds no queue."""

    code = "not_a_queue"


class UnknownTopic(InvalidRequest):
    """There is no topic, or no partition of it, by this name or number."""

    code = "unknown_topic"
    brief = ""  # where the message names others that are there: the same without, for one who may not know of them


class TopicExists(InvalidRequest):
    """A topic by this name is there already."""

    code = "topic_exists"


class UnknownGroup(InvalidRequest):
    """There is no group by this name."""

    code = "unknown_group"
    brief = ""  # as with a topic


class NotInstalled(InvalidRequest):
    """A package or a program that the call needs is not on this machine."""

    code = "not_installed"


class BadBody(InvalidRequest):
    """A message's body does not fit the type that the queue was opened with."""

    code = "bad_body"


class OffsetOutOfRange(InvalidRequest):
    """The offset lies before the first kept message or beyond the end."""

    code = "offset_out_of_range"

    def __init__(self, message: str, *, offset: int, start: int, end: int) -> None:
        super().__init__(message)
        self.offset = offset
        self.start = start
        self.end = end


class Removed(OffsetOutOfRange):
    """Key compaction removed the message, and all behind it up to `next_offset`: pass over them.

    Nothing is lost by that. A later message of its key says what holds now, or the key was deleted.
    """

    code = "removed"

    def __init__(self, message: str, *, offset: int, next_offset: int, start: int, end: int) -> None:
        super().__init__(message, offset=offset, start=start, end=end)
        self.next_offset = next_offset


class TailLost(InvalidRequest):
    """A position points into a tail that a power cut (or a truncation) removed."""

    code = "tail_lost"

    def __init__(self, message: str, *, epoch: int, offset: int, epoch_end: int) -> None:
        super().__init__(message)
        self.epoch = epoch
        self.offset = offset
        self.epoch_end = epoch_end


class Conflict(InvalidRequest):
    """Somebody else has changed it meanwhile: load it again, then decide anew.

    `version` is the one that a state document has now (0: there is none), where it is about one.
    """

    code = "conflict"

    def __init__(self, message: str, *, version: int | None = None) -> None:
        super().__init__(message)
        self.version = version


class NotFound(InvalidRequest):
    """There is nothing at this address, or nothing by this name."""

    code = "not_found"


class Unauthenticated(InvalidRequest):
    """The server does not know who is calling: no token, or none that holds."""

    code = "unauthenticated"


class Forbidden(InvalidRequest):
    """The server knows who is calling, and that they may not do this."""

    code = "forbidden"


class OutOfSequence(InvalidRequest):
    """A producer's messages do not follow those that the partition has from it: some are missing in between.

    `expected` is the sequence that would be taken, `known` whether the partition has anything of this producer.
    """

    code = "out_of_sequence"

    def __init__(self, message: str, *, expected: int, given: int, known: bool = True) -> None:
        super().__init__(message)
        self.expected = expected
        self.given = given
        self.known = known


class ExpectationFailed(HoldfastError):
    """Rows do not meet what a pipeline expects of them, and it was told to stop then."""

    code = "expectation_failed"


class LeaseLost(HoldfastError):
    """The message is no longer yours: stop working on it, another consumer may have it.

    `holder`, `since_ms` and `why` say who has it now and since when, or how the lease ended.
    """

    code = "lease_lost"

    def __init__(
        self, message: str, *, offsets: Sequence[int] = (), holder: str = "", since_ms: int = 0, why: str = ""
    ) -> None:
        super().__init__(message)
        self.offsets = tuple(offsets)
        self.receipts: tuple[str, ...] = ()  # where a call was about several
        self.holder = holder
        self.since_ms = since_ms
        self.why = why


class Empty(HoldfastError, queue.Empty):
    """Nothing was there in time."""

    code = "empty"
    retryable = True


class Unavailable(HoldfastError):
    """Not now: the same call may succeed later."""

    code = "unavailable"
    retryable = True


class Busy(Unavailable):
    """Another process (or another object in this one) owns the folder."""

    code = "busy"


class LockHeld(Unavailable):
    """Somebody else holds the lock, and it did not become free in time.

    `holder` and `since_ms` say who has it and since when, `until_ms` how long at most if it is not renewed.
    """

    code = "lock_held"

    def __init__(self, message: str, *, holder: str = "", since_ms: int = 0, until_ms: int = 0) -> None:
        super().__init__(message)
        self.holder = holder
        self.since_ms = since_ms
        self.until_ms = until_ms


class PipelineFailed(Unavailable):
    """A pipeline ended with an error of Spark's, or of a function of the user's; what it had decided counts."""

    code = "pipeline_failed"


class DiskFull(Unavailable):
    """There is no room for this write; nothing of it was kept, and reading goes on."""

    code = "disk_full"


class QueueFull(Unavailable):
    """A producer's buffer has no room left: messages come faster than they can be stored."""

    code = "queue_full"


class TooManyWaiters(Unavailable):
    """So many calls wait already, for messages or for locks, that one more is not let in."""

    code = "too_many_waiters"


class Closed(HoldfastError):
    """This object is finished: open a new one."""

    code = "closed"


class Fenced(Closed):
    """Somebody newer has taken over: a producer with a later epoch, or another member of the group."""

    code = "fenced"


class DiskFailed(Closed):
    """The disk failed a write or a sync; what was not acknowledged before may be lost."""

    code = "disk_failed"


class CorruptData(HoldfastError):
    """Stored bytes are not what was written: a person must look."""

    code = "corrupt_data"


class ChecksumMismatch(CorruptData):
    """A frame's bytes do not match their checksum, or are not a frame at all."""

    code = "checksum_mismatch"


class UnknownFormat(CorruptData):
    """The bytes are of a format version, kind or column that this release cannot read."""

    code = "unknown_format"


class DamagedRange(CorruptData):
    """Messages that the log once held are damaged on disk; the messages around them are intact."""

    code = "damaged_range"

    def __init__(self, message: str, *, first_offset: int, next_offset: int) -> None:
        super().__init__(message)
        self.first_offset = first_offset
        self.next_offset = next_offset
