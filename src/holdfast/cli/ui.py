"""`holdfast ui`: the console of a folder in the browser, for as long as the command runs."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from holdfast.broker.layout import OWNER_SOCKET
from holdfast.cli.opened import topics_of, trusts_folders
from holdfast.cli.output import OK, command
from holdfast.cli.serve import go_when_told, run
from holdfast.embedded.settings_file import read_settings
from holdfast.env import real_world
from holdfast.env.environ import environment
from holdfast.env.sockets import answers_at
from holdfast.errors import Busy
from holdfast.settings import ServerSettings
from holdfast.storage.opening import require_own


@command
def ui_command(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The data folder.")],
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65_535, help="A free one by default.")] = 0,
    read_only: Annotated[bool, typer.Option("--read-only", help="Show, and change nothing.")] = False,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> int:
    """Show the console of a data folder at a port of this machine, and print its address. Ctrl-C ends it.

    Where another process owns the folder, it is asked through its socket; where none does, this command owns it, and
    lets others in by the same way.
    """
    topics_of(folder)
    settings = _settings(port, read_only=read_only)

    def say(_folder: str, addresses: Sequence[str], _settings: object) -> None:
        address = f"{addresses[0]}/ui"
        sys.stdout.write(f"Console of {folder}: {address}\nCtrl-C ends it.\n")
        sys.stdout.flush()
        if open_browser:
            import webbrowser

            webbrowser.open(address)

    require_own(real_world(), folder, trusted=trusts_folders())
    owner = os.path.join(os.path.abspath(folder), OWNER_SOCKET)
    if not answers_at(owner):
        try:
            return run(folder, read_settings(real_world(), environment()), settings, say, shares=True)
        except Busy:
            if not answers_at(owner):
                raise
    return _beside(owner, settings, lambda addresses: say(folder, addresses, settings))


def _settings(port: int, *, read_only: bool) -> ServerSettings:
    """Those of a server for one person: at a port of this machine, whatever the settings file says."""
    return ServerSettings(host="127.0.0.1", port=port, read_only=read_only, drain_ms=1_000)


def _beside(owner: str, settings: ServerSettings, ready: Any) -> int:
    """Through the socket of the process that owns the folder."""
    from holdfast.server.console.relay import relay
    from holdfast.server.server import event_loop

    async def until_told() -> None:
        loop = asyncio.get_running_loop()
        told_to_go = asyncio.Event()
        go_when_told(told_to_go, loop)
        await relay(owner, settings, ready=ready, told_to_go=told_to_go.wait())

    with asyncio.Runner(loop_factory=event_loop()) as runner:
        runner.run(until_told())
    return OK
