"""The broker of taskiq: a queue of ours, and a lease for each message until taskiq acks it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import suppress
from itertools import count
from typing import Any, Final, Literal
from weakref import WeakValueDictionary

from taskiq import AckableMessage, AsyncBroker, BrokerMessage

import holdfast
from holdfast.env.process import asyncio
from holdfast.errors import Closed, HoldfastError, LeaseLost, Unavailable, UnknownTopic
from holdfast.integrations.places import Tls, topic_name
from holdfast.integrations.taskiq.opening import AsyncPlace

logger = logging.getLogger(__name__)

# Retries are taskiq's, as new messages. An attempt here is a delivery whose worker died.
_QUEUE_SETTINGS: Final = {"max_attempts": 20}
_MOST_PRIORITY: Final = 9
_PAUSES_S: Final = (0.1, 5.0)

DELIVERY: Final = "holdfast_delivery"  # the label that tells the deliveries of one task apart
_deliveries: MutableMapping[str, Ack] = WeakValueDictionary()
_numbers = count()


def is_lost(delivery: str | None) -> bool:
    """Whether this process had a task and lost its lease, so that another worker has it or will get it."""
    ack = None if delivery is None else _deliveries.get(delivery)
    return ack is not None and ack.message.lost


class HoldfastBroker(AsyncBroker):
    """A broker on a folder, a server or a store.

    A task's labels say how it is sent: `delay` in seconds, `priority` from 0 to 9, where 9 is the most urgent, and
    `queue_name` for another queue.

    Args:
        url: A folder, the address of a server, or a store.
        queue_name: The queue from which workers take tasks.
        lease: How long a dead worker keeps its messages, in seconds; by default the queue's `lease_ms`.
        durability: What `kiq` survives: "fsync", "interval" or "os".
        queue_settings: Settings for new queues.
        tls: For a server whose certificate comes from an authority of your own.
    """

    def __init__(
        self,
        url: str,
        *,
        queue_name: str = "taskiq",
        lease: float | None = None,
        durability: Literal["fsync", "interval", "os"] = "fsync",
        queue_settings: dict[str, Any] | None = None,
        tls: Tls = None,
    ) -> None:
        super().__init__()
        self.queue_name = queue_name
        self._lease = lease
        self._durability = durability
        self._new_queue = _QUEUE_SETTINGS | (queue_settings or {})
        self._place = AsyncPlace(url, tls)
        self._queues: dict[str, holdfast.aio.AsyncQueue[bytes]] = {}
        # Weak: a message that taskiq drops, because a middleware failed or a label was wrong, returns to its queue.
        self._held: MutableMapping[str, Ack] = WeakValueDictionary()
        self._ending = False

    async def startup(self) -> None:
        self._ending = False
        await self._queue(self.queue_name)
        await super().startup()

    async def shutdown(self) -> None:
        """Put back what was taken and not acked, and close the place."""
        self._ending = True
        await super().shutdown()
        held = list(self._held.values())
        self._held.clear()
        for ack in held:
            with suppress(HoldfastError):  # it returns when its lease ends
                await ack.message.defer()
        self._queues.clear()
        await self._place.close()

    async def kick(self, message: BrokerMessage) -> None:
        """Store a task; it is on disk when this returns."""
        labels = message.labels
        name = str(labels.get("queue_name") or self.queue_name)
        delay = labels.get("delay")
        put: dict[str, Any] = {
            "delay": None if delay is None else max(0.0, float(delay)),
            "priority": min(_MOST_PRIORITY, max(0, int(labels.get("priority") or 0))),
            "headers": {"task": message.task_name, "id": message.task_id},
            "durability": self._durability,
        }
        try:
            await (await self._queue(name)).put(message.message, **put)
        except (UnknownTopic, Closed):
            self._queues.pop(name, None)  # it was deleted, or the place closed, since we opened it
            await (await self._queue(name)).put(message.message, **put)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Take one message at a time: taskiq asks for the next when it has room for it."""
        while True:
            yield await self._take()

    async def _take(self) -> AckableMessage:
        pause_s, longest_s = _PAUSES_S
        while True:
            try:
                queue = await self._queue(self.queue_name)
                message = await queue.receive(lease=self._lease, renew=True)
            except (Unavailable, UnknownTopic, Closed) as error:
                if self._ending:
                    raise
                if not isinstance(error, Unavailable):
                    self._queues.pop(self.queue_name, None)  # it was deleted, or the place closed, since we opened it
                logger.warning("cannot take tasks of the queue %s, trying again: %s", self.queue_name, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
                continue
            pause_s = _PAUSES_S[0]
            delivery = str(next(_numbers))
            try:
                data = self._labelled(message.raw, delivery)
            except LookupError as fault:
                with suppress(HoldfastError):
                    await message.reject(str(fault))
                continue
            ack = self._held[message.receipt] = _deliveries[delivery] = Ack(self._held, message)
            return AckableMessage(data=data, ack=ack)

    def _labelled(self, data: bytes, delivery: str) -> bytes:
        """The task with a label for this delivery, which taskiq passes on to the result.

        Raises LookupError for what taskiq would drop. It becomes a dead letter instead.
        """
        try:
            task = self.formatter.loads(data)
            task.labels[DELIVERY] = delivery
            labelled: bytes = self.formatter.dumps(task).message
            task.parse_labels()
        except Exception as error:
            raise LookupError(f"the message is not a task: {error}") from error
        if self.find_task(task.task_name) is None:
            raise LookupError(f"there is no task {task.task_name} in this worker")
        return labelled

    async def _queue(self, name: str) -> holdfast.aio.AsyncQueue[bytes]:
        found = self._queues.get(name)
        if found is None:
            broker = await self._place.broker()
            await broker.create_topic(topic_name(name), exist_ok=True, **self._new_queue)
            found = self._queues[name] = await broker.queue(topic_name(name))
        return found


class Ack:
    """Acks a message. Taskiq calls it when it is received, executed or saved, or when the task says so."""

    def __init__(self, held: MutableMapping[str, Ack], message: holdfast.aio.AsyncMessage[bytes]) -> None:
        self._held = held
        self.message = message

    async def __call__(self) -> None:
        self._held.pop(self.message.receipt, None)
        pause_s, longest_s = _PAUSES_S
        while True:
            try:
                await self.message.ack()
                return
            except LeaseLost as error:
                logger.warning("a task was handled, but its lease was lost, so it may run again: %s", error)
                return
            except Unavailable as error:
                logger.warning("cannot ack a task, trying again: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
