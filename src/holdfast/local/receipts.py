"""Messages in flight by their receipts, for callers that keep nothing else of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from holdfast.api.arguments import MessageOutcome
from holdfast.broker.delivery import Delivery
from holdfast.broker.group import QueueGroup
from holdfast.delivery.events import DEFERRED, DROPPED, Command, Extend, Nack, Receipt, Reject
from holdfast.errors import LeaseLost
from holdfast.settings import TopicSettings

CLAIMS_AT_ONCE: Final = 50  # receipts that are read before others have a turn: each is parsed, and its MAC computed
SETTLED_AT_ONCE: Final = 100  # messages that are settled before that


class Claims(NamedTuple):
    """The deliveries that receipts prove, by partition and with the text of each; and those that prove none."""

    good: dict[Delivery, dict[Receipt, str]]
    bad: list[str]
    refused: LeaseLost | None

    def add(self, more: Claims) -> Claims:
        """Both together; of a message that is in both, the first text counts."""
        for delivery, texts in more.good.items():
            first = self.good.setdefault(delivery, {})
            first.update({receipt: text for receipt, text in texts.items() if receipt not in first})
        return Claims(self.good, self.bad + more.bad, more.refused or self.refused)


def claims_of(group: QueueGroup, receipts: Iterable[str]) -> Claims:
    """What receipts prove, each message once; InvalidRequest for a text that is no receipt of this topic."""
    good: dict[Delivery, dict[Receipt, str]] = {}
    bad: list[str] = []
    for text in receipts:
        delivery, receipt = group.proof(text)
        if receipt is None:
            bad.append(text)
        else:
            good.setdefault(delivery, {}).setdefault(receipt, text)
    # One error for all of them: whoever makes up thousands should not have thousands made.
    return Claims(good, bad, group.unproven(bad[-1]) if bad else None)


def parts_of(texts: dict[Receipt, str]) -> Iterator[dict[Receipt, str]]:
    """Receipts of one partition, as many at a time as are settled in one go."""
    pairs = iter(texts.items())
    while part := dict(islice(pairs, SETTLED_AT_ONCE)):
        yield part


def command_for(outcome: MessageOutcome, settings: TopicSettings) -> Callable[[Receipt], Command]:
    """What the group is told of each message; an ack has a way of its own."""
    delay_ms, why = outcome.delay_ms, outcome.why
    match outcome.verb:
        case "nack":
            return lambda receipt: Nack(receipt, delay_ms, why)
        case "defer":
            return lambda receipt: Nack(receipt, delay_ms or 0, why=DEFERRED, counted=False)
        case "drop":
            dropped_ms = settings.dropped_delay_ms if delay_ms is None else delay_ms
            return lambda receipt: Nack(receipt, dropped_ms, why=DROPPED)
        case "reject":
            return lambda receipt: Reject(receipt, why)
        case "extend":
            lease_ms = settings.lease_ms if outcome.lease_ms is None else outcome.lease_ms
            return lambda receipt: Extend([receipt], lease_ms)
    raise ValueError(f"an {outcome.verb} is no command")


def lost_texts(texts: dict[Receipt, str], error: LeaseLost) -> list[str]:
    """The receipts that an error is about."""
    gone = set(error.offsets) or {receipt.offset for receipt in texts}
    return [text for receipt, text in texts.items() if receipt.offset in gone]
