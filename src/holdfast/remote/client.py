"""A client of a server: its calls for tasks and for threads, its publisher, and the thread that keeps its leases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.broker.folder.layout import DEFAULT_TOPIC
from holdfast.client.address import Address
from holdfast.client.calling import Caller, packed
from holdfast.client.http import Ask
from holdfast.client.network import Network, TaskNetwork, ThreadNetwork, run
from holdfast.env import World, close_in_children, end_at_exit
from holdfast.remote.leases import LeaseThread
from holdfast.remote.publisher import RemotePublisher

if TYPE_CHECKING:
    import ssl


_Result = TypeVar("_Result")


class Client:
    """What all faces of one connection share."""

    def __init__(
        self,
        world: World,
        address: Address,
        *,
        for_tasks: bool,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        threads = ThreadNetwork(world.clock)
        ways: Network = TaskNetwork(world.clock) if for_tasks else threads
        self.world = world
        self.default_topic = DEFAULT_TOPIC  # the name of a queue that is made without one
        self.caller = Caller(world, ways, address, token=token, tls=tls, timeout_s=timeout_s)
        # The thread has connections of its own: a task's are of its loop only.
        self.beside = Caller(world, threads, address, token=token, tls=tls, timeout_s=timeout_s)
        self.publishing = RemotePublisher(self.caller)
        self.upkeep = LeaseThread(self.beside)
        self._on_close: Callable[[], None] | None = None
        self._note()
        close_in_children(self)
        end_at_exit(self)

    def inherit(self, take_over: Callable[[], None], on_close: Callable[[], None]) -> None:
        """What to do when there is no server any more; and when this client is closed."""
        self.caller.on_broken = self.beside.on_broken = take_over
        self._on_close = on_close

    def _note(self) -> None:
        note = self.world.ids.process_note()
        self.holder = f"{note['host']}:{note['pid']}"
        self._own = self.world.ids.random_bytes(8).hex()
        self._numbers = count(1)
        # Takes that may have been done, by what they asked for. They are this process's: a child that gave one its name
        # again would have the messages that the parent has.
        self.unanswered: dict[tuple[Any, ...], str] = {}

    def attempt_id(self) -> str:
        """A name for a take that no other one has."""
        return f"{self._own}-{next(self._numbers)}"

    def disown(self) -> None:
        """In a child after a fork: connections, lanes and the thread are the parent's; the child makes its own."""
        for caller in (self.caller, self.beside):
            caller.forget_idle()
        self.publishing.disown()
        self.upkeep.disown()
        self._note()

    def end(self) -> None:
        """The program ends, and nobody closed us: what was dropped is given back now, and not when its lease ends."""
        self.upkeep.end(1.0)

    def close(self) -> None:
        """Give back what was dropped, and end. Closing twice is fine."""
        self.caller.close()
        self._end()

    def _end(self) -> None:
        self.upkeep.end()
        self.beside.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    async def close_async(self) -> None:
        """The same for a task: the thread is waited for aside."""
        self.caller.close()
        await asyncio.to_thread(self._end)


# Calls to a server, for tasks and for threads: the one core of the transport, awaited or run to its end.


class AsyncCalls:
    """The calls of tasks."""

    def __init__(self, client: Client) -> None:
        self._call = client.caller.call

    async def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """What the work of the client comes to."""
        return await work

    async def call(self, ask: Ask) -> Any:
        """The answer's value; what the server refuses is raised."""
        return await self._call(ask)

    async def ask(self, method: str, path: str, answers: Any, body: Any = None, **options: Any) -> Any:
        """The same for a body that is one of the wire's values; `options` are those of `ask_of`."""
        return await self._call(ask_of(method, path, answers, body, **options))


class Calls:
    """The calls of threads."""

    def __init__(self, client: Client) -> None:
        self._call = client.caller.call

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """What the work of the client comes to."""
        return run(work)

    def call(self, ask: Ask) -> Any:
        """The answer's value; what the server refuses is raised."""
        return run(self._call(ask))

    def ask(self, method: str, path: str, answers: Any, body: Any = None, **options: Any) -> Any:
        """The same for a body that is one of the wire's values; `options` are those of `ask_of`."""
        return run(self._call(ask_of(method, path, answers, body, **options)))


def ask_of(method: str, path: str, answers: Any, body: Any = None, *, wait_s: float = 0.0, again: bool = True) -> Ask:
    """The request for a call whose body is one of the wire's values."""
    content = b"" if body is None else packed(body)
    return Ask(method=method, path=path, body=content, answers=answers, wait_s=wait_s, again=again)
