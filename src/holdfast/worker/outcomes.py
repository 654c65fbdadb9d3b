"""How a handler can end, and what is done with its message then."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from holdfast.embedded.drafts import Seconds
from holdfast.embedded.times import duration_ms


class Reject(Exception):
    """Raise it in a handler: the message can never be handled, and goes straight to the dead letters."""

    def __init__(self, reason: object = "") -> None:
        super().__init__(reason)


class Retry(Exception):
    """Raise it in a handler: try again after `delay`, or after the queue's backoff. It counts as an attempt."""

    def __init__(self, reason: object = "", *, delay: Seconds | None = None) -> None:
        super().__init__(reason)
        if delay is not None:
            duration_ms(delay, "delay")  # refused where it is written
        self.delay = delay


class Settlement(msgspec.Struct, frozen=True):
    """The last thing to do with a message."""

    verb: Literal["ack", "nack", "defer", "reject"]
    error: Any = None
    delay: Seconds | None = None

    def on(self, message: Any) -> Any:
        """Do it; a message of a face for tasks answers with something to be awaited."""
        if self.verb == "nack":
            return message.nack(delay=self.delay, error=self.error)
        if self.verb == "reject":
            return message.reject(self.error)
        return message.ack() if self.verb == "ack" else message.defer()


ACK: Final = Settlement("ack")
DEFER: Final = Settlement("defer")


def settlement_after(error: BaseException | None) -> Settlement:
    """What to do with a message whose handler ended so."""
    if error is None:
        return ACK
    if isinstance(error, Reject):
        return Settlement("reject", _reason(error))
    if isinstance(error, Retry):
        return Settlement("nack", _reason(error), error.delay)
    return Settlement("nack", error)


def is_wish(error: BaseException | None) -> bool:
    """Whether the handler asked for what happens, so that nobody needs to be told of an error."""
    return isinstance(error, (Reject, Retry))


def _reason(error: BaseException) -> object:
    """What led to the wish says more than the wish."""
    return error.__cause__ or str(error)
