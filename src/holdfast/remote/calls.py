"""Calls to a server, for tasks and for threads: the one core of the transport, awaited or run to its end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.api.bodies import Bodies
from holdfast.api.drafts import NewMessage, Stored
from holdfast.api.streams import AsyncStream
from holdfast.client.calling import packed
from holdfast.client.client import Client
from holdfast.client.http import Ask
from holdfast.client.streams import publish_stream
from holdfast.client.ways import run
from holdfast.model import CodecName, Durability


class AsyncCalls:
    """The calls of tasks."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, ask: Ask) -> Any:
        """The answer's value; what the server refuses is raised."""
        return await self.client.caller.call(ask)

    async def ask(self, method: str, path: str, answers: Any, body: Any = None, **options: Any) -> Any:
        """The same for a body that is one of the wire's values; `options` are those of `ask_of`."""
        return await self.client.caller.call(ask_of(method, path, answers, body, **options))

    async def publish(
        self,
        topic: str,
        messages: Iterable[Any],
        bodies: Bodies,
        durability: Durability | None,
        codec: CodecName | None,
        *,
        partition: int | None = None,
        verb: str = "put_many",
    ) -> list[Stored]:
        """Store messages."""
        publish = self.client.publishing.publish
        return await publish(
            topic, messages, bodies, partition=partition, durability=durability, codec=codec, verb=verb
        )

    async def upload(
        self,
        topic: str,
        stream: AsyncStream,
        options: NewMessage,
        size_hint: int | None,
        durability: Durability | None,
        *,
        partition: int | None = None,
    ) -> Stored:
        """Store all that a stream gives as one message."""
        return await publish_stream(self.client.publishing, topic, stream, options, partition, size_hint, durability)

    async def close(self) -> None:
        """Close the client."""
        await self.client.close_async()


class Calls:
    """The calls of threads."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def call(self, ask: Ask) -> Any:
        """The answer's value; what the server refuses is raised."""
        return run(self.client.caller.call(ask))

    def ask(self, method: str, path: str, answers: Any, body: Any = None, **options: Any) -> Any:
        """The same for a body that is one of the wire's values; `options` are those of `ask_of`."""
        return run(self.client.caller.call(ask_of(method, path, answers, body, **options)))

    def publish(
        self,
        topic: str,
        messages: Iterable[Any],
        bodies: Bodies,
        durability: Durability | None,
        codec: CodecName | None,
        *,
        partition: int | None = None,
        verb: str = "put_many",
    ) -> list[Stored]:
        """Store messages."""
        publish = self.client.publishing.publish
        return run(publish(topic, messages, bodies, partition=partition, durability=durability, codec=codec, verb=verb))

    def upload(
        self,
        topic: str,
        stream: Any,
        options: NewMessage,
        size_hint: int | None,
        durability: Durability | None,
        *,
        partition: int | None = None,
    ) -> Stored:
        """Store all that a stream gives as one message."""
        return run(publish_stream(self.client.publishing, topic, stream, options, partition, size_hint, durability))

    def close(self) -> None:
        """Close the client."""
        self.client.close()


def ask_of(method: str, path: str, answers: Any, body: Any = None, *, wait_s: float = 0.0, again: bool = True) -> Ask:
    """The request for a call whose body is one of the wire's values."""
    content = b"" if body is None else packed(body)
    return Ask(method=method, path=path, body=content, answers=answers, wait_s=wait_s, again=again)
