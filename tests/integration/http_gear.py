"""A real server on a free port, in a thread of its own, and a small client of it that knows nothing of ours."""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlencode, urlsplit

from holdfast.env import World, real_world
from holdfast.local.aio.broker import open_broker_async
from holdfast.server.http.messages import Meter
from holdfast.server.routing import Routes
from holdfast.server.server import Auditor, Server, event_loop, make_server
from holdfast.settings import BrokerSettings, ServerSettings

_Result = TypeVar("_Result")

_STARTED_S = 30


class Answer(NamedTuple):
    """What came back. `body` is the decoded JSON where it is JSON, else the bytes."""

    status: int
    headers: dict[str, str]
    body: Any

    @property
    def code(self) -> str:
        """The code of an error."""
        return str(self.body["error"]["code"])


class Caller:
    """Calls a server by its address, in a way that knows nothing of ours."""

    def __init__(self, url: str) -> None:
        self.url = url

    def connection(self, timeout_s: float = 60) -> http.client.HTTPConnection:
        """A connection of one's own, for what needs one: streams, and clients that go away."""
        return http.client.HTTPConnection(str(urlsplit(self.url).netloc), timeout=timeout_s)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | Sequence[tuple[str, Any]] = (),
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
        timeout_s: float = 60,
    ) -> Answer:
        """One call on a connection of its own. Bytes go as they are, anything else as JSON."""
        given = {name.lower(): value for name, value in (headers or {}).items()}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            given.setdefault("content-type", "application/json")
        if token is not None:
            given["authorization"] = f"Bearer {token}"
        connection = self.connection(timeout_s)
        try:
            connection.request(method, f"{path}?{urlencode(query)}" if query else path, body, given)
            got = connection.getresponse()
            content = got.read()
            found = {name.lower(): value for name, value in got.getheaders()}
            is_json = found.get("content-type", "").startswith("application/json")
            return Answer(got.status, found, json.loads(content) if is_json and content else content)
        finally:
            connection.close()

    def get(self, path: str, **more: Any) -> Answer:
        return self.request("GET", path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> Answer:
        return self.request("POST", path, {} if body is None else body, **more)


class Serving(Caller):
    """A server that runs."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop, url: str) -> None:
        super().__init__(url)
        self.server = server
        self.loop = loop

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Do something on the server's own loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)


@contextmanager
def serving(
    folder: Path,
    *,
    more: Callable[[], Sequence[Routes]] = tuple,
    meter: Meter | None = None,
    auditor: Auditor | None = None,
    tls: ssl.SSLContext | None = None,
    whole: bool = False,
    world: World | None = None,
    broker: BrokerSettings | None = None,
    **settings: Any,
) -> Iterator[Serving]:
    """A server of the folder; `settings` are those of ServerSettings, on a free port of 127.0.0.1.

    A `whole` one is what `holdfast serve` starts: with metrics, audit log and console. In a `world` of its own time
    must run by itself.
    """
    chosen = ServerSettings(**{"port": 0, "drain_ms": 2_000, **settings})
    started = threading.Event()
    found: list[Serving] = []
    failed: list[BaseException] = []

    async def serve() -> None:
        ending = asyncio.Event()
        async with open_broker_async(folder, settings=broker, world=world) as opened:
            if world is not None:
                opened._port.engine.keep()
            if whole:
                server = make_server(world or real_world(), opened._port, chosen)
            else:
                server = Server(world or real_world(), opened._port, chosen, meter=meter, auditor=auditor, more=more())
            addresses = await server.listen(tls)
            loop = asyncio.get_running_loop()
            made = Serving(server, loop, addresses[0])
            endings.append(lambda: loop.call_soon_threadsafe(ending.set))
            found.append(made)
            started.set()
            await ending.wait()
            await server.close()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=event_loop()) as runner:
                runner.run(serve())
        except BaseException as error:
            failed.append(error)
        finally:
            started.set()

    endings: list[Callable[[], object]] = []
    thread = threading.Thread(target=run, name="server")
    thread.start()
    assert started.wait(_STARTED_S), "the server did not start"
    try:
        if failed:
            raise failed[0]
        yield found[0]
    finally:
        for end in endings:
            end()
        thread.join(_STARTED_S)
        assert not thread.is_alive(), "the server does not end"
        if found and failed:
            raise failed[0]
