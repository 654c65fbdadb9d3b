"""The queue for threads: put and get, with a folder and nothing else. It is a topic with one group."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from os import PathLike
from typing import Any, Generic

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.group import QueueGroup
from holdfast.broker.metrics import Observer
from holdfast.embedded.drafts import HeadersLike, NewMessage, Seconds, Text, message_of
from holdfast.embedded.face import open_face
from holdfast.embedded.group import Group
from holdfast.embedded.message import Body
from holdfast.embedded.publisher import Publisher, Stored
from holdfast.embedded.streaming import Stream, Upload, stream_options
from holdfast.env import World
from holdfast.model import CodecName, Durability
from holdfast.settings import QueueSettings


class Queue(Group[Body], Generic[Body]):
    """A durable queue in a folder. Safe to use from any thread."""

    def __init__(self, engine: BrokerEngine, group: QueueGroup, body_type: Any) -> None:
        super().__init__(engine, group, body_type)
        self._publisher = Publisher(group.topic, self._bodies, engine.world.clock)
        self._mono_ns = engine.world.clock.monotonic_ns
        self._alone = True  # whether the folder is let go with it

    def put(
        self,
        body: Body,
        *,
        key: Text | None = None,
        headers: HeadersLike | None = None,
        priority: int = 0,
        delay: Seconds | None = None,
        at: datetime | None = None,
        ttl: Seconds | None = None,
        dedup_id: Text | None = None,
        correlation_id: str | None = None,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> Stored:
        """Store a message; returns when it is as durable as asked."""
        began_ns = self._mono_ns()
        options = (key, headers, delay, at, ttl, dedup_id, correlation_id, codec)
        publisher = self._publisher
        if publisher.is_plain(body, options, priority):
            number = publisher.turn()
            appended = publisher.log(number).append_one(body, durability)  # type: ignore[arg-type]
            return publisher.plain_stored(number, body, appended, began_ns)
        message = message_of(body, key, headers, priority, delay, at, ttl, dedup_id, correlation_id)
        return self.put_many([message], durability=durability, codec=codec)[0]

    def put_many(
        self,
        messages: Iterable[Body | NewMessage],
        *,
        durability: Durability | None = None,
        codec: CodecName | None = None,
    ) -> list[Stored]:
        """Store messages, all of them or none; an item is a body or a NewMessage."""
        began_ns = self._mono_ns()
        publisher = self._publisher
        if publisher.all_plain(messages, codec):
            number = publisher.turn()
            appended = publisher.log(number).append(messages, durability=durability)  # type: ignore[arg-type]
            return publisher.plain_many(number, messages, appended, began_ns)
        self._check_open()
        parts = publisher.publish(messages, durability, codec)
        publisher.wait(parts)
        return publisher.stored(parts, began_ns)

    def put_stream(
        self, stream: Stream, *, size_hint: int | None = None, durability: Durability | None = None, **options: Any
    ) -> Stored:
        """Store what a binary file or an iterator of bytes gives as one message, without holding it in memory.

        `options` are those of `put`: key, headers, priority, delay, at, ttl, dedup_id, correlation_id. What is too
        large is refused at once where `size_hint` says how many bytes will come.
        """
        self._check_open()
        upload = Upload(self._engine.world, self._publisher, stream_options(options), None, size_hint)
        return upload.run(stream, durability)

    put_nowait = put  # it never waits for room: a disk that is full is told at once
    get = Group.receive
    get_nowait = Group.receive_nowait
    get_many = Group.receive_many

    def qsize(self) -> int:
        """How many messages are ready. Others may take or put some before you act on it."""
        return self._qsize()

    def empty(self) -> bool:
        """Whether none is ready now."""
        return self.qsize() == 0

    def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""
        self._engine.sync()

    def close(self) -> None:
        """Sync and let go of the folder; messages in hand come back at the next opening. Closing twice is fine.

        A queue of a broker is only a view: it is let go of, and the broker goes on.
        """
        if self._alone:
            self._engine.close()
        else:
            super().close()


def open_queue(
    folder: str | PathLike[str],
    *,
    create: bool = True,
    topic: str | None = None,
    durability: Durability | None = None,
    body_type: Any = None,
    settings: QueueSettings | None = None,
    observer: Observer | None = None,
    world: World | None = None,
    trust_folder: bool | None = None,
    **changes: Any,
) -> Queue[Any]:
    """Open the queue in a folder, which is made where there is none (unless create=False).

    `topic` says which one where the folder has several. `changes` are settings by name, such as max_attempts=3;
    they are kept with the queue. `body_type` is bytes, str, dict or any type that msgspec knows.
    """
    return open_face(
        Queue,
        folder,
        create=create,
        topic=topic,
        durability=durability,
        body_type=body_type,
        settings=settings,
        observer=observer,
        world=world,
        trust_folder=trust_folder,
        changes=changes,
    )
