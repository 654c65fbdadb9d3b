"""Unix sockets that a server listens at: long names, and files that belong to whoever made them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from holdfast.env.sockets import listen_unix
from holdfast.server.http.listening import HttpServer
from holdfast.server.limits import limits_of
from holdfast.server.server import event_loop
from holdfast.settings import ServerSettings


class Counted:
    """Nobody who counts."""

    def connection_opened(self) -> None: ...

    def connection_closed(self) -> None: ...

    def connection_refused(self, reason: str) -> None: ...


def http_server() -> HttpServer:
    async def unused(request: object) -> object:
        raise NotImplementedError

    return HttpServer(unused, None, limits_of(ServerSettings()), Counted())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["short", "long" * 30])
@pytest.mark.parametrize("loop", [event_loop(), asyncio.new_event_loop], ids=["usual", "asyncio"])
def test_a_server_that_ends_leaves_the_file_to_whoever_made_the_socket(tmp_path: Path, name: str, loop: object):
    path = tmp_path / name / "socket"
    path.parent.mkdir()
    listening = listen_unix(str(path))
    # What was opened for the long name is closed; the number may belong to anything by now.
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]

    async def story() -> None:
        server = http_server()
        await server.listen_on(listening)
        await server.close(1)

    with asyncio.Runner(loop_factory=loop) as runner:  # type: ignore[arg-type]
        runner.run(story())
    listening.close()
    for descriptor in opened:
        os.close(descriptor)
    assert path.is_socket()
