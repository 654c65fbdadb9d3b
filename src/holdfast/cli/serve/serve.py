"""`holdfast serve`: one process that owns a data folder and answers over HTTP until it is told to go."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Annotated, Any, Final, TypeAlias
from urllib.parse import urlsplit

import msgspec
import typer

from holdfast.api.times import parse_duration
from holdfast.broker.folder.layout import OWNER_SOCKET
from holdfast.cli.opening import topics_of, trusts_folders
from holdfast.cli.options import TlsKey
from holdfast.cli.output import DAMAGED, OK, command
from holdfast.config.settings_file import DEFAULT, Effective, Origin, read_settings
from holdfast.env import real_world
from holdfast.env.process import environment, raise_descriptor_limit
from holdfast.env.sockets import answers_at
from holdfast.errors import Busy, InvalidRequest, NotInstalled
from holdfast.settings import ServerSettings
from holdfast.storage.opening import require_own

logger = logging.getLogger(__name__)

# Whoever wants the interpreter gets it from a thread that computes after so long, instead of 5 ms. One call needs it
# some twenty times: the loop after each wait, a thread before and after each sync. Shorter is hardly shorter, for a
# thread needs that long to wake up; the switches cost nothing that could be measured.
_SWITCH_S: Final = 0.0001
# Loaded when somebody first asks for a page. A server that lacks one says so when it starts, and not to that caller.
_LATER: Final = ("jinja2", "prometheus_client", "python_multipart")
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_CONNECTIONS: Final = "server.max_connections"
_FILES: Final = "broker.open_files"
_LOOPBACK: Final = {4: "127.0.0.1", 6: "[::1]"}

TlsCert: TypeAlias = Annotated[
    str | None, typer.Option("--tls-cert", metavar="FILE", help="Speak HTTPS with this certificate (PEM).")
]
TlsClientCa: TypeAlias = Annotated[
    str | None,
    typer.Option("--tls-client-ca", metavar="FILE", help="Every client must show a certificate of these issuers."),
]

AllowedHosts: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--allowed-host", metavar="NAME", help="Answer only under this name, besides localhost. Repeatable."),
]


@command
def serve_command(
    folder: Annotated[
        str | None, typer.Argument(metavar="[DIR]", help="The data folder; data_dir of the settings by default.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="A settings file; HOLDFAST_CONFIG by default.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", metavar="HOST", help="Where to listen; 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", min=0, max=65_535, help="7700; with 0 a free one.")
    ] = None,
    socket: Annotated[str | None, typer.Option("--socket", metavar="PATH", help="A Unix socket as well.")] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="FILE", help="Who may call; `holdfast token new` makes it.")
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    allow_anonymous_network: Annotated[
        bool,
        typer.Option(
            "--allow-anonymous-network", help="Listen on other addresses than loopback, and ask nobody who they are."
        ),
    ] = False,
    allowed_hosts: AllowedHosts = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Show, and change nothing.")] = False,
    no_console: Annotated[bool, typer.Option("--no-console", help="No pages at /ui.")] = False,
    drain: Annotated[
        str | None, typer.Option("--drain", metavar="TIME", help="How long calls may take after SIGTERM; 30s.")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option("--log-format", metavar="text|json", help="How the log is written, to stderr.")
    ] = None,
) -> int:
    """Serve a data folder over HTTP, with the console at /ui. SIGTERM lets it finish what it has begun.

    Each option goes before the settings file; all other settings of a server stand there, in [server].
    """
    effective = read_settings(real_world(), environment(), config)
    changes: dict[str, Any] = {
        "host": host,
        "port": port,
        "socket": socket,
        "tokens_file": tokens,
        "tls_cert_file": tls_cert,
        "tls_key_file": tls_key,
        "tls_client_ca_file": tls_client_ca,
        "allow_anonymous_network": True if allow_anonymous_network else None,
        "allowed_hosts": tuple(allowed_hosts) if allowed_hosts else None,
        "read_only": True if read_only else None,
        "console": False if no_console else None,
        "drain_ms": None if drain is None else round(parse_duration(drain, "--drain") * 1000),
        "log_format": log_format,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    settings = msgspec.structs.replace(effective.server, **given)
    return run(folder or effective.data_dir, effective, settings)


Say: TypeAlias = Callable[[str, Sequence[str], ServerSettings], None]


def run(
    folder: str | None,
    effective: Effective,
    settings: ServerSettings,
    say: Say | None = None,
    *,
    shares: bool | None = None,
) -> int:
    """Serve until a signal comes; a second one ends it at once.

    Programs beside the server may open the folder, too: if it `shares` it, or else unless it only shows.
    """
    if folder is None:
        raise InvalidRequest("say which data folder: holdfast serve DIR, or data_dir in the settings file")
    gc.disable()  # until it listens: whatever is loaded now will stay
    try:
        return _run(
            folder, effective, settings, say or _say, shares=not settings.read_only if shares is None else shares
        )
    finally:
        gc.enable()


def _not_installed(package: str | None) -> NotInstalled:
    return NotInstalled(
        f"the server needs a package that is not installed ({package}); run: pip install 'holdfast[server]'"
    )


def _is_there(package: str) -> bool:
    with suppress(ImportError, ValueError):
        return find_spec(package) is not None
    return False


def _run(folder: str, effective: Effective, settings: ServerSettings, say: Say, *, shares: bool) -> int:
    try:
        from holdfast.client.shared_folder import share
        from holdfast.server.logs import start_logging
        from holdfast.server.process import serve
        from holdfast.server.server import event_loop
    except ImportError as error:
        raise _not_installed(error.name) from None
    for package in _LATER:
        if not _is_there(package):
            raise _not_installed(package)

    start_logging(settings.log_format, sys.stderr)
    effective, settings = _within_limits(effective, settings)
    sys.setswitchinterval(_SWITCH_S)

    def ready(addresses: Sequence[str]) -> None:
        gc.freeze()  # nor need it ever be searched for garbage, while all calls wait
        gc.enable()
        say(folder, addresses, settings)

    async def until_told() -> bool:
        loop = asyncio.get_running_loop()
        told_to_go = asyncio.Event()
        go_when_told(told_to_go, loop)
        return await serve(
            real_world(),
            folder,
            effective.broker,
            settings,
            ready=ready,
            told_to_go=loop.create_task(told_to_go.wait()),
            opened=share if shares else None,
            effective=msgspec.structs.replace(effective, server=settings, data_dir=folder),
        )

    with asyncio.Runner(loop_factory=event_loop()) as runner:
        return OK if runner.run(until_told()) else DAMAGED


def go_when_told(told_to_go: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    """Set the event when a signal asks the process to end."""
    for number in _SIGNALS:
        loop.add_signal_handler(number, _go, told_to_go, loop)


def _go(told_to_go: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    told_to_go.set()
    for number in _SIGNALS:  # the next one means it
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)


def told(folder: str, addresses: Sequence[str], settings: ServerSettings) -> list[str]:
    """Where it listens, for people and for whoever started it: with addresses that can be opened on this machine."""
    usable, everywhere = [], []
    for address in addresses:
        version, port = _all_of(address)
        usable.append(address if version is None else f"{address.partition('//')[0]}//{_LOOPBACK[version]}:{port}")
        if version is not None:
            everywhere.append(f"It listens on all IPv{version} addresses of this machine, port {port}")
    lines = [f"Holdfast serves {folder} at {', '.join(usable)}", *everywhere]
    if settings.console:
        lines.append(f"Console: {usable[0]}/ui  API: {usable[0]}/docs")
    return lines


def _all_of(address: str) -> tuple[int | None, int | None]:
    """Of which version of IP the address stands for all that this machine has, and its port."""
    parts = urlsplit(address)
    with suppress(ValueError):
        host = ipaddress.ip_address(parts.hostname or "")
        if host.is_unspecified:
            return host.version, parts.port
    return None, None


def _say(folder: str, addresses: Sequence[str], settings: ServerSettings) -> None:
    sys.stdout.write("\n".join(told(folder, addresses, settings)) + "\n")
    sys.stdout.flush()


def _within_limits(effective: Effective, settings: ServerSettings) -> tuple[Effective, ServerSettings]:
    """The settings, lowered where nobody has set them and this process may not open so many files."""
    from holdfast.server.limits import budget, read_segments
    from holdfast.storage.segment import KEPT_OPEN

    connections, files = settings.max_connections, effective.broker.open_files
    given = {path for path, origin in effective.origins.items() if origin != DEFAULT}
    found = budget(
        raise_descriptor_limit(),
        connections=connections,
        open_files=files,
        connections_set=_CONNECTIONS in given and connections == effective.server.max_connections,
        open_files_set=_FILES in given,
    )
    KEPT_OPEN.most = read_segments(found.descriptors)
    lowered = {}
    if found.connections < connections:
        lowered[_CONNECTIONS] = found.connections
    if found.open_files < files:
        lowered[_FILES] = found.open_files
    if lowered:
        logger.warning(
            "limits lowered: this process may not open more files",
            extra={"descriptors": found.descriptors, **{path.rpartition(".")[2]: n for path, n in lowered.items()}},
        )
    settings = msgspec.structs.replace(settings, max_connections=found.connections)
    origin = Origin("limit", f"{found.descriptors:,} file descriptors")
    return (
        msgspec.structs.replace(
            effective,
            broker=msgspec.structs.replace(effective.broker, open_files=found.open_files),
            server=settings,
            origins={**effective.origins, **dict.fromkeys(lowered, origin)},
        ),
        settings,
    )


# `holdfast ui`: the console of a folder in the browser, for as long as the command runs.


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
