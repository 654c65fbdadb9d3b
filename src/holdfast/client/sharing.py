"""The owner of a folder lets other processes of this machine in, by a socket in the folder.

A lone owner pays for a socket and for a thread that sleeps. The server is loaded when the first one comes.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from holdfast.broker.folder.layout import OWNER_SOCKET
from holdfast.client.forked import ForkedPort
from holdfast.env import close_in_children, end_at_exit
from holdfast.env.sockets import absolute, close_in_child, hang_up, listen_unix, remove_socket, someone_calls

if TYPE_CHECKING:
    import asyncio

    from holdfast.broker.engine import BrokerEngine
    from holdfast.server.audit import Audit
    from holdfast.server.server import Server

logger = logging.getLogger(__name__)

_DRAIN_MS: Final = 1_000
_ENDED_S: Final = 5.0


def socket_of(folder: str) -> str:
    """Where the owner of the folder listens."""
    return f"{folder}/{OWNER_SOCKET}"


def share(engine: BrokerEngine, audit: Audit | None = None, tokens_problem: Callable[[], str] = str) -> None:
    """Let others in, until the engine is closed. Where there can be no socket, there is none.

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
    """One socket, and the thread that waits there."""

    def __init__(
        self, engine: BrokerEngine, listening: Any, audit: Audit | None, tokens_problem: Callable[[], str] = str
    ) -> None:
        self._path = absolute(socket_of(engine.folder))
        self._listening = listening
        self._serving = _Serving(audit, tokens_problem)
        # Weakly: an owner that nobody holds any more must be able to go.
        reference = weakref.ref(engine, lambda _: hang_up(listening))
        self._thread = threading.Thread(
            target=_wait, args=(reference, listening, self._serving), name="holdfast-owner", daemon=True
        )
        close_in_children(self)
        end_at_exit(self)
        self._thread.start()

    def disown(self) -> None:
        """In a child after a fork: whoever calls, calls the parent."""
        self._serving.over = True
        close_in_child([self._listening, *self._serving.sockets()])

    def end(self) -> None:
        """Let nobody in any more, and let those go who are. They find another owner, or become it."""
        if self._serving.over:
            return
        self._serving.over = True
        remove_socket(self._path)  # first: whoever comes now waits for the next owner
        if not self._serving.stop():
            hang_up(self._listening)
        if self._thread is not threading.current_thread():
            self._thread.join(_ENDED_S)


class _Serving:
    """The server of an owner, once somebody has come."""

    def __init__(self, audit: Audit | None, tokens_problem: Callable[[], str] = str) -> None:
        self.over = False
        self._audit = audit
        self._tokens_problem = tokens_problem
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._server: Server | None = None

    def stop(self) -> bool:
        """Ask it to end; False where it has not begun."""
        loop, ending = self._loop, self._ending
        if loop is None or ending is None:
            return False
        try:
            loop.call_soon_threadsafe(ending.set)
        except RuntimeError:
            return False  # it has ended by itself
        return True

    def sockets(self) -> list[Any]:
        """The connections that it has."""
        if self._server is None:
            return []
        connections = list(self._server.http.connections)
        return [connection.socket() for connection in connections]

    def run(self, engine: BrokerEngine, listening: Any) -> None:
        """Serve until it is asked to end."""
        import asyncio

        from holdfast.server.server import event_loop

        with asyncio.Runner(loop_factory=event_loop()) as runner:
            self._loop = runner.get_loop()
            runner.run(self._serve(engine, listening))

    async def _serve(self, engine: BrokerEngine, listening: Any) -> None:
        import asyncio

        from holdfast.client.staged import routes
        from holdfast.env.process import descriptor_limit
        from holdfast.local.aio.broker import AsyncLocalBrokerPort
        from holdfast.server.audit import CallAuditor
        from holdfast.server.console.pages import console_routes
        from holdfast.server.console.rendering import error_page
        from holdfast.server.limits import owner_connections
        from holdfast.server.server import Server
        from holdfast.settings import ServerSettings

        self._ending = asyncio.Event()
        settings = ServerSettings(
            drain_ms=_DRAIN_MS,
            max_request_bytes=1 << 30,
            max_connections=min(owner_connections(descriptor_limit()), ServerSettings().max_connections),
            max_groups=1_000_000,
            max_partitions=10_000,
        )
        auditor = None if self._audit is None else CallAuditor(self._audit)
        pages = console_routes(engine, self._audit, at_once=False)  # for `holdfast ui`, beside the owner
        self._server = server = Server(
            engine.world, AsyncLocalBrokerPort(engine), settings, auditor=auditor, more=[routes, *pages]
        )
        server.service.tokens_problem = self._tokens_problem
        server.app.error_page = error_page
        await server.http.listen_on(listening)
        if not self.over:  # it may have ended before there was anything to tell
            await self._ending.wait()
        await server.drain()


def _wait(reference: weakref.ref[BrokerEngine], listening: Any, serving: _Serving) -> None:
    """Until somebody calls, and then serve; or until there is nobody who owns the folder."""
    try:
        called = someone_calls(listening)
        engine = reference()
        if called and engine is not None and not serving.over:
            serving.run(engine, listening)
    except Exception:  # whatever it was: the owner goes on alone
        logger.exception("the folder cannot be shared any more")
    finally:
        listening.close()
