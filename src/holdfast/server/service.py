"""State shared by all handlers of a server: the port, open groups, waiting calls, limits."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.broker.topic import Topic
from holdfast.config.settings_file import Effective
from holdfast.env import World
from holdfast.local.aio.broker import AsyncLocalBrokerPort
from holdfast.local.aio.locks import AsyncLocalLocksPort
from holdfast.server.http.messages import ANSWER_BYTES
from holdfast.server.limits import ANSWERS_EACH, BODIES_EACH, Room, check_new_group
from holdfast.server.members import ServedMembers
from holdfast.server.publishing import ServedPublishing
from holdfast.server.served import ServedGroup
from holdfast.server.turns import Pool, Scans
from holdfast.server.waiting import Attempts, WaitLimit, Windows
from holdfast.settings import ServerSettings

if TYPE_CHECKING:
    from holdfast.server.calls import Call

_Found = TypeVar("_Found")


class Service:
    """State of one served data folder."""

    def __init__(self, world: World, port: AsyncLocalBrokerPort, settings: ServerSettings) -> None:
        self.world = world
        self.port = port
        self.engine: BrokerEngine = port.engine
        self.settings = settings
        self.waits = WaitLimit(settings.max_waiters, settings.max_waiters_per_principal)
        self.windows = Windows()
        self.attempts = Attempts()
        self.scans = Scans(settings.scan_workers, settings.scan_messages)
        self.locks: AsyncLocalLocksPort = self.port.locks()
        self.members = ServedMembers(self.engine)
        self.pool = Pool()
        self.room = Room(BODIES_EACH * settings.max_request_bytes)
        self.answers = Room(ANSWERS_EACH * 2 * ANSWER_BYTES)
        self.publishing = ServedPublishing(self.port, self.pool)
        self.leaving = False
        self.began_ns = world.clock.now_ns()
        self.began_monotonic_ns = world.clock.monotonic_ns()
        self.connections: Callable[[], int] = int  # how many there are; whoever listens knows
        self.tokens_problem: Callable[[], str] = str  # why the tokens file cannot be used; whoever reads it knows
        self.effective: Effective | None = None  # where the settings come from, if whoever starts it says so
        self._waiting: set[asyncio.Task[Any]] = set()
        self._groups: OrderedDict[tuple[str, str], ServedGroup] = OrderedDict()

    @property
    def folder(self) -> str:
        return self.port.place

    def known_group(self, topic: str, name: str) -> ServedGroup | None:
        """The group if it is open, else None."""
        group = self._groups.get((topic, name))
        if group is not None and group.closed:
            del self._groups[topic, name]
            return None
        if group is not None:
            self._groups.move_to_end((topic, name))
        return group

    def groups(self) -> list[ServedGroup]:
        """All open groups."""
        return [group for group in self._groups.values() if not group.closed]

    async def group(self, topic: str, name: str | None = None) -> ServedGroup:
        """The group in queue mode, made where there is none."""
        name = name or DEFAULT_GROUP
        group = self.known_group(topic, name)
        if group is None:
            group = await self.port.served_group(ServedGroup, topic, name, check=self.check_group)
            raced = self.known_group(topic, name)
            if raced is not None:
                await group.close()
                return raced
            self._groups[topic, name] = group
            await self._let_go()
        return group

    def check_group(self, engine: BrokerEngine, topic: Topic, name: str) -> None:
        """Refuse a group beyond the limit. Runs on the topic's own thread, where groups are created one by one."""
        check_new_group(engine, topic, name, self.settings.max_groups)

    async def _let_go(self) -> None:
        """Close the least recently used groups that nobody waits for, so that their topics can be closed."""
        parts = {place: len(group.deliveries) for place, group in self._groups.items()}
        extra = sum(parts.values()) - self.port.settings.open_partitions
        for place, group in list(self._groups.items())[:-1]:  # the last one is about to be used
            if extra <= 0:
                return
            if not group.queue_group.waiters.standing and not self.windows.of(group) and place in self._groups:
                extra -= parts[place]
                del self._groups[place]
                await group.close()

    async def wait(self, call: Call, waiting: Awaitable[_Found], nothing: _Found) -> _Found:
        """What a call waits for; nothing, as soon as the server goes; an error, when the caller may not go on.

        Whoever hands out what was found confirms the caller before, and gives it back where that fails.
        """
        if self.leaving:  # since the call began
            if isinstance(waiting, Coroutine):
                waiting.close()
            return nothing
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            return await waiting
        except asyncio.CancelledError:
            ended = call.why_ended()
            if ended is not None:
                raise ended from None
            if task in self._waiting:
                raise  # the client went away
            task.uncancel()
            return nothing
        finally:
            self._waiting.discard(task)

    def leave(self) -> None:
        """The server is stopping: end all calls that wait for messages."""
        self.leaving = True
        waiting = list(self._waiting)
        self._waiting.clear()
        for task in waiting:
            task.cancel()
