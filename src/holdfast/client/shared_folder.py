"""A folder that several processes use: the first owns it, and the others connect through its socket."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.broker.folder.layout import OWNER_SOCKET, folder_path, is_store, topic_for
from holdfast.env import close_in_children, end_at_exit, real_world
from holdfast.env.process import get_logger, load_before_fork, no_fork
from holdfast.env.sockets import (
    absolute,
    answers_at,
    close_in_child,
    hang_up,
    listen_unix,
    remove_socket,
    someone_calls,
)
from holdfast.errors import Busy, HoldfastError
from holdfast.local.broker import LocalBroker
from holdfast.local.group import LocalGroup
from holdfast.local.opening import store_settings
from holdfast.settings import BrokerSettings

if TYPE_CHECKING:
    import asyncio

    from holdfast.broker.engine import BrokerEngine
    from holdfast.remote.client import Client
    from holdfast.server.audit import Audit
    from holdfast.server.server import Server


logger = get_logger(__name__)

_DRAIN_MS: Final = 1_000
_ENDED_S: Final = 5.0


def socket_of(folder: str) -> str:
    """Return the path of the socket where the owner of the folder listens."""
    return f"{folder}/{OWNER_SOCKET}"


def share(engine: BrokerEngine, audit: Audit | None = None, tokens_problem: Callable[[], str] = str) -> None:
    """Let other processes connect until the engine is closed. If no socket is possible, there is none.

    What they do is written to the audit log of an owner that has one: a server. Others write nothing down, as they
    do not when they do the same themselves. They are told of what is wrong with such a server's tokens file, too.
    """
    try:
        listening = listen_unix(socket_of(engine.folder))
    except FileExistsError as error:
        logger.warning("folder is not shared", extra={"folder": engine.folder, "why": str(error)})
        return
    except OSError as error:
        logger.debug("folder is not shared", extra={"folder": engine.folder, "why": str(error)})
        return
    sharing = Sharing(engine, listening, audit, tokens_problem)
    engine.on_close = sharing.end
    engine.stand_in = ForkedPort


class Sharing:
    """One socket, and the thread that accepts connections."""

    def __init__(
        self, engine: BrokerEngine, listening: Any, audit: Audit | None, tokens_problem: Callable[[], str] = str
    ) -> None:
        self._path = absolute(socket_of(engine.folder))
        self._listening = listening
        self._serving = _Serving(audit, tokens_problem)
        # A weak reference, so that an owner that is no longer used can be freed.
        reference = weakref.ref(engine, lambda _: hang_up(listening))
        import concurrent.futures.thread  # noqa: F401  now: Python refuses to load it once the main thread has returned

        self._thread = threading.Thread(
            target=_wait, args=(reference, listening, self._serving), name="holdfast-owner", daemon=True
        )
        close_in_children(self)
        load_before_fork(_load_for_children)
        end_at_exit(self)
        self._thread.start()

    def disown(self) -> None:
        """Forget the socket in a child after a fork: callers mean the parent."""
        self._serving.over = True
        close_in_child([self._listening, *self._serving.sockets()])

    def end(self) -> None:
        """Close the socket and all connections. Their clients find another owner, or become it."""
        if self._serving.over:
            return
        self._serving.over = True
        remove_socket(self._path)  # first: a process that comes now waits for the next owner
        if not self._serving.stop():
            hang_up(self._listening)
        if self._thread is not threading.current_thread():
            self._thread.join(_ENDED_S)


class _Serving:
    """The server of an owner, started by the first connection."""

    def __init__(self, audit: Audit | None, tokens_problem: Callable[[], str] = str) -> None:
        self.over = False
        self._audit = audit
        self._tokens_problem = tokens_problem
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._server: Server | None = None

    def stop(self) -> bool:
        """Ask it to end; returns False if it has not started."""
        loop, ending = self._loop, self._ending
        if loop is None or ending is None:
            return False
        try:
            loop.call_soon_threadsafe(ending.set)
        except RuntimeError:
            return False  # it has ended by itself
        return True

    def sockets(self) -> list[Any]:
        """Return the sockets of its connections."""
        if self._server is None:
            return []
        connections = list(self._server.http.connections)
        return [connection.socket() for connection in connections]

    def run(self, engine: BrokerEngine, listening: Any) -> None:
        """Serve until it is asked to end."""
        with no_fork():
            import asyncio

            from holdfast.server.server import event_loop

            make_loop = event_loop()
        runner = asyncio.Runner(loop_factory=make_loop)
        try:
            self._loop = runner.get_loop()
            runner.run(self._serve(engine, listening))
        finally:
            self._close(runner)

    def _close(self, runner: asyncio.Runner) -> None:
        try:
            runner.close()
        except RuntimeError:
            # The program is ending: since Python 3.12 no thread can be started then, and asyncio wants one for the end
            # of the executor. It has closed the loop all the same.
            if not self.over:
                raise

    async def _serve(self, engine: BrokerEngine, listening: Any) -> None:
        import asyncio

        from holdfast.env.threads import DaemonThreads

        self._ending = asyncio.Event()
        asyncio.get_running_loop().set_default_executor(DaemonThreads())  # works also when the main thread has returned
        with no_fork():
            self._server = server = self._make_server(engine)
        await server.http.listen_on(listening)
        if not self.over:  # it may have ended before there was anything to tell
            await self._ending.wait()
        await server.drain()

    def _make_server(self, engine: BrokerEngine) -> Server:
        # Of receipts and of locks: here, where no fork comes in between.
        import hmac  # noqa: F401

        import holdfast.local.locks  # noqa: F401
        from holdfast.client import backups, spark_commits
        from holdfast.env.process import descriptor_limit
        from holdfast.local.aio.broker import AsyncLocalBrokerPort
        from holdfast.server.audit import CallAuditor
        from holdfast.server.console import console_routes
        from holdfast.server.console.rendering import error_page
        from holdfast.server.limits import owner_connections
        from holdfast.server.server import Server
        from holdfast.settings import ServerSettings

        settings = ServerSettings(
            drain_ms=_DRAIN_MS,
            max_request_bytes=1 << 30,
            max_connections=min(owner_connections(descriptor_limit()), ServerSettings().max_connections),
            max_groups=1_000_000,
            max_partitions=10_000,
        )
        auditor = None if self._audit is None else CallAuditor(self._audit)
        pages = console_routes(self._audit)  # for `holdfast ui`, beside the owner
        more = [spark_commits.routes, backups.routes]
        server = Server(engine.world, AsyncLocalBrokerPort(engine), settings, auditor=auditor, more=[*more, *pages])
        server.service.tokens_problem = self._tokens_problem
        server.app.error_page = error_page
        return server


def _wait(reference: weakref.ref[BrokerEngine], listening: Any, serving: _Serving) -> None:
    """Until somebody calls, and then serve; or until there is nobody who owns the folder."""
    try:
        called = someone_calls(listening)
        engine = reference()
        if called and engine is not None and not serving.over:
            serving.run(engine, listening)
    except Exception:  # whatever it was: the owner goes on alone
        logger.exception("the folder can no longer be shared")
    finally:
        listening.close()


# The successor of the owner of a folder: the first client of its socket that finds nobody there.


class Successor:
    """This process, as one that may have to own a folder. All clients of the folder in it share one."""

    def __init__(self, folder: str, settings: BrokerSettings | None) -> None:
        self.folder = folder
        self.users = 0
        self._settings = settings
        self._lock = threading.Lock()
        self._engine: BrokerEngine | None = None
        close_in_children(self)

    def disown(self) -> None:
        """In a child after a fork: the parent owns the folder, if one of the two does."""
        self._lock = threading.Lock()
        self._engine = None

    def take_over(self) -> None:
        """Own the folder and let others in, if nobody else does. They, and we, come by the socket as before."""
        if not self._lock.acquire(blocking=False):
            return  # another thread is about to
        try:
            if self.users and (self._engine is None or self._engine.closed):
                self._engine = self._own()
        finally:
            self._lock.release()

    def _own(self) -> BrokerEngine | None:
        from holdfast.broker.engine import BrokerEngine

        try:
            # There may be nothing in it yet; but a folder that somebody removed is not made anew.
            there = real_world().disk.is_folder(self.folder)
            engine = BrokerEngine.open(self.folder, create=there, settings=self._settings)
        except Busy:
            return None  # another process was faster
        except (HoldfastError, OSError) as error:
            logger.warning("folder without an owner", extra={"folder": self.folder, "why": str(error)})
            return None
        logger.info("took over as owner", extra={"folder": self.folder})
        engine.keep()
        share(engine)
        return engine

    def release(self) -> None:
        """The last one here is through with the folder: another process may own it."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


_successors: Final[dict[str, Successor]] = {}
_lock = threading.Lock()


def successor_of(folder: str, settings: BrokerSettings | None = None) -> Successor:
    """This process's own for the folder; one more uses it from now on."""
    with _lock:
        found = _successors.get(folder)
        if found is None:
            found = _successors[folder] = Successor(folder, settings)
        found.users += 1
        return found


def leave(successor: Successor) -> None:
    """One less uses it; the last one lets go of the folder."""
    with _lock:
        successor.users -= 1
        last = successor.users == 0
        if last:
            _successors.pop(successor.folder, None)
    if last:
        successor.release()


# A folder that several processes use: the first owns it, and the others connect through its socket.


_PATIENCE_NS: Final = 500_000_000  # an owner that shares its folder can be reached by then; one that does not, never
_PAUSE_S: Final = 0.01


def open_shared(
    folder: Any, open_here: Callable[[], Any], settings: BrokerSettings | None, *, for_tasks: bool
) -> tuple[Any, Client | None]:
    """Open the folder: returns a port if this process owns it, otherwise a client of its owner."""
    until_ns = 0
    while True:
        try:
            port = open_here()
        except Busy as busy:
            if busy.is_elsewhere:
                raise  # on another machine: there is no socket to it
            load_client()  # before the owner, which may be a thread of this process, begins to load its server
            clock = real_world().clock
            path = absolute(local_folder(folder, settings))
            stored = store_settings(settings) if is_store(folder) else None
            if answers_at(socket_of(path)):
                return None, client_of_owner(path, stored or settings, for_tasks=for_tasks)
            # Another process of this machine may be waiting for its turn to own a folder in a store.
            patience_ns = _PATIENCE_NS + (0 if stored is None else stored.store_wait_ms * 1_000_000)
            until_ns = until_ns or clock.monotonic_ns() + patience_ns
            if clock.monotonic_ns() > until_ns:
                busy.add_note("its owner does not share it: it was opened with share=False, or by a command")
                raise
            clock.wait(threading.Event(), _PAUSE_S)
        else:
            share(port.engine)
            return port, None


def _load_for_children() -> None:
    """Import what a forked child needs to become a client of this process."""
    import asyncio  # noqa: F401

    import holdfast.client.opening
    import holdfast.local.aio.broker
    import holdfast.local.listing
    import holdfast.local.locks
    import holdfast.remote.aio.group
    import holdfast.remote.sync.group  # noqa: F401

    load_client()


def load_client() -> None:
    """Import what only clients need."""
    import holdfast.remote.aio.broker
    import holdfast.remote.sync.broker  # noqa: F401


def local_folder(place: Any, settings: BrokerSettings | None) -> str:
    """Return the folder of this machine where the owner's socket is: for a store, that of its copy."""
    if not is_store(place):
        return folder_path(place)
    from holdfast.broker.folder.stored import cache_folder
    from holdfast.env.chain.engines import parse_place

    return cache_folder(parse_place(place), store_settings(settings))


def client_of_owner(folder: str, settings: BrokerSettings | None, *, for_tasks: bool) -> Client:
    """Return a client of the folder's owner; it takes over the folder if the owner is gone."""
    from holdfast.client.opening import Address
    from holdfast.remote.client import Client

    if real_world().disk.exposure(folder) is not None:
        # Somebody trusts it by name, or we would not be here; and does so when we have to take over, too.
        settings = msgspec.structs.replace(settings or BrokerSettings(), trust_folder=True)
    address = Address(text=folder, socket=socket_of(folder))
    client = Client(real_world(), address, for_tasks=for_tasks)
    client.default_topic = topic_for(folder)
    successor = successor_of(folder, settings)
    client.inherit(successor.take_over, lambda: leave(successor))
    return client


# A queue or a broker that was opened before a fork, in the child: from its first use on, a client of the owner.
#
# A forked child has the parent's objects and not its files, its lock or its threads. What it can have is what any
# second process has: a connection by the owner's socket. So a face gets another port, with the program's own body type
# and promises. That is left to the first use: most children never use it, and a client takes a while to load. What the
# parent has in flight stays the parent's.


_becoming = threading.RLock()  # a finalizer may be the next to use another one, in the same thread


class ForkedPort:
    """The port of a group or a broker that the parent has: a client of it, made when it is first used."""

    def __init__(self, parents: LocalGroup | LocalBroker) -> None:
        """In a child after a fork. Takes no lock, and loads nothing."""
        self._parents = parents  # kept: what ends with it is the parent's to end
        self._path = absolute(parents.place)  # the child may go to another folder before it uses it
        self._made: Any = None

    def after_fork(self) -> Any:
        """In a child of the child: the thread that was at it, if any, is not here."""
        global _becoming  # noqa: PLW0603  a lock cannot be taken from a thread that is gone
        _becoming = threading.RLock()
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made or self._remote(), name)

    def _remote(self) -> Any:
        """The first use, of which there may be several at once: a server of many threads forks before it has them."""
        with _becoming:
            if self._made is None:
                self._made = _port_of(self._parents, self._path)
            return self._made


def _port_of(parents: LocalGroup | LocalBroker, path: str) -> Any:
    from holdfast.local.aio.broker import AsyncLocalBrokerPort
    from holdfast.local.aio.group import AsyncLocalGroupPort

    for_tasks = isinstance(parents, (AsyncLocalGroupPort, AsyncLocalBrokerPort))
    client = _client_of(parents.engine, path, for_tasks=for_tasks)
    if isinstance(parents, LocalGroup):
        return _group_port(parents, client, for_tasks=for_tasks)
    from holdfast.remote.aio.broker import AsyncRemoteBrokerPort
    from holdfast.remote.sync.broker import RemoteBrokerPort

    kind = AsyncRemoteBrokerPort if for_tasks else RemoteBrokerPort
    return kind(client, parents.body_type, parents.settings.topic.durability)


def _group_port(parents: LocalGroup, client: Client, *, for_tasks: bool) -> Any:
    from holdfast.remote.aio.group import AsyncRemoteGroupPort
    from holdfast.remote.sync.group import RemoteGroupPort

    kind, settings = AsyncRemoteGroupPort if for_tasks else RemoteGroupPort, parents.settings
    return kind(
        client,
        parents.topic,
        parents.group,
        parents.bodies,
        settings,
        durability=settings.durability,
        ack_durability=settings.ack_durability,
        alone=parents.alone,
        closed=parents.view_closed,
    )


def _client_of(engine: BrokerEngine, path: str, *, for_tasks: bool) -> Client:
    """The one that all faces of the folder share here, as they shared the engine."""

    client: Client | None = engine.client_in_child
    if client is None:
        client = client_of_owner(path, engine.settings, for_tasks=for_tasks)
        if engine.closed_before_fork:
            client.close()
        engine.client_in_child = client
    return client
