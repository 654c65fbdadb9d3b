"""`holdfast serve` and `holdfast ui`, and what a server tells: `status`, `waiters`, `workers`, `audit`."""

from __future__ import annotations

import gc
import ipaddress
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias
from urllib.parse import quote, urlsplit

import msgspec

from holdfast.api import port_of
from holdfast.api.drafts import parse_duration
from holdfast.broker.folder.layout import DEFAULT_GROUP, OWNER_SOCKET, is_store
from holdfast.cli import output
from holdfast.cli.opening import WAIT, AsJson, DataFolder, TlsKey, Wait, asked, opened_broker, topics_of, trusts_folders
from holdfast.cli.parsing import argument, option
from holdfast.client.opening import is_address, parse_address
from holdfast.config.settings_file import DEFAULT, Effective, Origin, read_settings
from holdfast.env import real_world
from holdfast.env.process import asyncio, environment, raise_descriptor_limit
from holdfast.env.sockets import answers_at
from holdfast.errors import Busy, InvalidRequest, NotFound, NotInstalled
from holdfast.model import count_of
from holdfast.settings import ServerSettings
from holdfast.storage.files import join, require_own

if TYPE_CHECKING:
    from holdfast.broker.workers import WorkerInfo
    from holdfast.env.chain.ownership import StoreStanding
    from holdfast.protocol.topics import StoreStatus

logger = logging.getLogger(__name__)

# How long a thread may compute before another one gets the interpreter, instead of 5 ms. One call switches about twenty
# times: the loop after each wait, a thread before and after each sync. A shorter interval gains nothing, since a thread
# takes that long to wake up; the cost of the switches was too small to measure.
_SWITCH_S: Final = 0.0001
# Imported for the first page. A server that lacks one of them reports it at startup.
_LATER: Final = ("jinja2", "prometheus_client", "python_multipart")
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_CONNECTIONS: Final = "server.max_connections"
_FILES: Final = "broker.open_files"
# Few enough that a search for garbage among them holds up no call.
_OBJECTS_BETWEEN_SEARCHES: Final = 2_000
_LOOPBACK: Final = {4: "127.0.0.1", 6: "[::1]"}

Lake: TypeAlias = Annotated[str | None, option("--lake FOLDER", "Show the pipeline runs of this lake in the console.")]
TlsCert: TypeAlias = Annotated[str | None, option("--tls-cert FILE", "Serve HTTPS with this certificate (PEM).")]
TlsClientCa: TypeAlias = Annotated[
    str | None,
    option("--tls-client-ca FILE", "Require client certificates of these issuers."),
]

Port: TypeAlias = Annotated[
    int | None, option("--port N", "The port; 7700 by default, 0 for a free one.", least=0, most=65_535)
]
GrpcPort: TypeAlias = Annotated[
    int | None, option("--grpc-port N", "Also serve gRPC on this port; 0 for a free one.", least=0, most=65_535)
]
Drain: TypeAlias = Annotated[
    str | None, option("--drain TIME", "How long calls may take after SIGTERM; 30s by default.")
]
StoreUrl: TypeAlias = Annotated[
    str | None, option("--store URL", "The folder in a store to serve, such as s3://bucket/jobs, instead of DIR.")
]
ClusterUrl: TypeAlias = Annotated[
    str | None, option("--cluster URL", "Be a node of the cluster in this store; see `holdfast cluster init`.")
]
Advertise: TypeAlias = Annotated[
    str | None, option("--advertise URL", "Where the other nodes of the cluster reach this one, if not as --host.")
]
NodeId: TypeAlias = Annotated[
    str | None, option("--node-id NAME", "The node's name in the cluster; its host and port by default.")
]
Zone: TypeAlias = Annotated[
    str | None, option("--zone NAME", "The node's zone: standbys are in another one, if there is one.")
]
Weight: TypeAlias = Annotated[
    str | None, option("--weight N", "The node's share of the shards, compared with 1 of the others.")
]
MaxShards: TypeAlias = Annotated[int | None, option("--max-shards N", "The most shards the node may own.", least=1)]
Host: TypeAlias = Annotated[str | None, option("--host HOST", "The address to listen on; 127.0.0.1 by default.")]
TokensFile: TypeAlias = Annotated[
    str | None, option("--tokens FILE", "The file with the tokens of callers; see `holdfast token new`.")
]
Anonymous: TypeAlias = Annotated[
    bool, option("--allow-anonymous-network", "Let everyone on the network call without a token.")
]
AllowedHosts: TypeAlias = Annotated[
    list[str] | None,
    option("--allowed-host NAME", "Answer only requests for this host name, besides localhost."),
]


def serve_command(
    folder: Annotated[str | None, argument("DIR", "The data folder; the setting `data_dir` by default.")] = None,
    store: StoreUrl = None,
    cluster: ClusterUrl = None,
    advertise: Advertise = None,
    node_id: NodeId = None,
    zone: Zone = None,
    weight: Weight = None,
    max_shards: MaxShards = None,
    config: Annotated[str | None, option("--config FILE", "A settings file; $HOLDFAST_CONFIG by default.")] = None,
    host: Host = None,
    port: Port = None,
    socket: Annotated[str | None, option("--socket PATH", "Also listen on this Unix socket.")] = None,
    grpc_port: GrpcPort = None,
    tokens: TokensFile = None,
    lake: Lake = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    allow_anonymous_network: Anonymous = False,
    allowed_hosts: AllowedHosts = None,
    read_only: Annotated[bool, option("--read-only", "Refuse all changes.")] = False,
    no_console: Annotated[bool, option("--no-console", "Do not serve the console.")] = False,
    drain: Drain = None,
    log_format: Annotated[str | None, option("--log-format text|json", "The format of the log on stderr.")] = None,
) -> int:
    """Serve a data folder over HTTP, with the console at /ui. On SIGTERM it finishes the calls in progress.

    Options take precedence over the settings file; other settings of the server are in its [server] section.

    Examples:
        holdfast serve ./data
        holdfast serve --store s3://bucket/jobs
        holdfast serve --cluster s3://bucket/jobs --host 0.0.0.0 --advertise http://10.0.0.5:7700 --tokens tokens.toml
        holdfast serve ./data --host 0.0.0.0 --tokens tokens.toml --tls-cert cert.pem --tls-key key.pem
    """
    effective = read_settings(real_world(), environment(), config)
    changes: dict[str, Any] = {
        "host": host,
        "port": port,
        "socket": socket,
        "grpc_port": grpc_port,
        "tokens_file": tokens,
        "tls_cert_file": tls_cert,
        "tls_key_file": tls_key,
        "tls_client_ca_file": tls_client_ca,
        "allow_anonymous_network": True if allow_anonymous_network else None,
        "allowed_hosts": tuple(allowed_hosts) if allowed_hosts else None,
        "read_only": True if read_only else None,
        "console": False if no_console else None,
        "lake": lake,
        "drain_ms": None if drain is None else round(parse_duration(drain, "--drain") * 1000),
        "log_format": log_format,
    }
    settings = _changed(effective.server, changes)
    of_node = (advertise, node_id, zone, weight, max_shards)
    if cluster is not None:
        return _serve_node(cluster, folder or store, effective, settings, *of_node)
    _refuse_any(*of_node)
    return run(_served(folder, store) or effective.data_dir, effective, settings)


def _changed(settings: ServerSettings, changes: dict[str, Any]) -> ServerSettings:
    return msgspec.structs.replace(settings, **{name: value for name, value in changes.items() if value is not None})


def _serve_node(
    url: str, other: str | None, effective: Effective, settings: ServerSettings, advertise: str | None,
    node_id: str | None, zone: str | None, weight: str | None, max_shards: int | None,
) -> int:  # fmt: skip
    from holdfast.cli.operate.cluster import serve_cluster, traits_of

    return serve_cluster(url, other, effective, settings, advertise, node_id, traits_of(zone, weight, max_shards))


def _refuse_any(*of_nodes: object) -> None:
    if any(given is not None for given in of_nodes):
        raise InvalidRequest(
            "--advertise, --node-id, --zone, --weight and --max-shards are for a node of a cluster: give --cluster "
            "URL, too"
        )


def _served(folder: str | None, store: str | None) -> str | None:
    """Return the place that was given to serve, as a folder or as a store; raises InvalidRequest."""
    if store is None:
        return folder
    from holdfast.broker.folder.stored import shown_place

    if not is_store(store):
        raise InvalidRequest(
            f"--store {store} is not a store: give a URL such as s3://bucket/jobs; a folder goes without it"
        )
    if folder is not None and folder.rstrip("/") != store.rstrip("/"):
        raise InvalidRequest(
            f"there are two places to serve, {shown_place(folder)} and --store {shown_place(store)}: give one of them"
        )
    return store


Say: TypeAlias = Callable[[str, Sequence[str], ServerSettings], None]


def run(
    folder: str | None,
    effective: Effective,
    settings: ServerSettings,
    say: Say | None = None,
    *,
    shares: bool | None = None,
) -> int:
    """Serve until a signal comes; a second one ends the process at once.

    With `shares`, other processes may open the folder as well; by default they may unless the server is read-only.
    """
    if folder is None:
        raise InvalidRequest(
            "name the data folder: holdfast serve DIR or --store URL, or data_dir in the settings file"
        )
    gc.disable()  # until it listens: everything loaded until then stays
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


def begin_serving(effective: Effective, settings: ServerSettings) -> tuple[Effective, ServerSettings]:
    """Make this process ready to serve; returns the settings within its limits. Raises NotInstalled."""
    try:
        from holdfast.server.metrics import start_logging
    except ImportError as error:
        raise _not_installed(error.name) from None
    for package in _LATER:
        if not output.is_installed(package):
            raise _not_installed(package)
    start_logging(settings.log_format, sys.stderr)
    sys.setswitchinterval(_SWITCH_S)
    return _within_limits(effective, settings)


def now_serving() -> None:
    """Nothing that is loaded by now needs to be searched for garbage, which would hold up all calls."""
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_SEARCHES)
    gc.enable()


def _run(folder: str, effective: Effective, settings: ServerSettings, say: Say, *, shares: bool) -> int:
    effective, settings = begin_serving(effective, settings)
    try:
        from holdfast.broker.folder.stored import shown_place
        from holdfast.client.shared_folder import share
        from holdfast.client.spark_commits import routes as spark_routes
        from holdfast.server.server import event_loop, serve
    except ImportError as error:
        raise _not_installed(error.name) from None

    shown = shown_place(folder)  # for people, here and by the API: without a password

    def ready(addresses: Sequence[str]) -> None:
        now_serving()
        say(shown, addresses, settings)

    async def until_stopped() -> bool:
        loop = asyncio.get_running_loop()
        stop_asked = asyncio.Event()
        stop_on_signals(stop_asked, loop)
        return await serve(
            real_world(),
            folder,
            effective.broker,
            settings,
            ready=ready,
            stop_asked=loop.create_task(stop_asked.wait()),
            opened=share if shares else None,
            effective=msgspec.structs.replace(effective, server=settings, data_dir=shown),
            more=[spark_routes],
        )

    with asyncio.Runner(loop_factory=event_loop()) as runner:
        return output.OK if runner.run(until_stopped()) else output.DAMAGED


def stop_on_signals(stop_asked: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    """Set the event when a signal asks the process to end."""
    for number in _SIGNALS:
        loop.add_signal_handler(number, _ask_to_stop, stop_asked, loop)


def _ask_to_stop(stop_asked: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    stop_asked.set()
    for number in _SIGNALS:  # the next signal ends the process
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)


def announcement(folder: str, addresses: Sequence[str], settings: ServerSettings) -> list[str]:
    """Return the lines printed when the server listens, with addresses that can be opened on this machine."""
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
    """Return the IP version of a wildcard address, and its port."""
    parts = urlsplit(address)
    with suppress(ValueError):
        host = ipaddress.ip_address(parts.hostname or "")
        if host.is_unspecified:
            return host.version, parts.port
    return None, None


def _say(folder: str, addresses: Sequence[str], settings: ServerSettings) -> None:
    sys.stdout.write("\n".join(announcement(folder, addresses, settings)) + "\n")
    sys.stdout.flush()


def _within_limits(effective: Effective, settings: ServerSettings) -> tuple[Effective, ServerSettings]:
    """Return the settings, with defaults lowered to the number of files that this process may open."""
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


# `holdfast ui`: the console of a folder in the browser, as long as the command runs.


def ui_command(
    folder: DataFolder,
    port: Annotated[int, option("--port N", "The port; a free one by default.", least=0, most=65_535)] = 0,
    read_only: Annotated[bool, option("--read-only", "Refuse all changes.")] = False,
    open_browser: Annotated[bool, option("--open", "Open it in your browser.")] = False,
) -> int:
    """Open the console of a data folder on this machine. Prints its address, and runs until Ctrl-C.

    If another process owns the folder, the console connects to it. Otherwise this command owns the folder, and other
    processes connect to it. A server has its own console: given its URL, this prints the console's address and
    exits.

    Examples:
        holdfast ui ./data --open
        holdfast ui http://127.0.0.1:7700 --open
    """
    settings = _settings(port, read_only=read_only)

    def show(address: str, more: str = "") -> None:
        sys.stdout.write(f"Console of {folder}: {address}\n{more}")
        sys.stdout.flush()
        if open_browser:
            import webbrowser

            webbrowser.open(address)

    def say(_folder: str, addresses: Sequence[str], _settings: object) -> None:
        show(f"{addresses[0]}/ui", "Ctrl-C ends it.\n")

    if is_address(folder):
        address = parse_address(folder)
        if address.socket is not None:  # a browser cannot open a socket
            return _beside(address.socket, settings, lambda addresses: say(folder, addresses, settings))
        if port or read_only:
            raise InvalidRequest("--port and --read-only are for folders; leave them out: a server has its own console")
        show(_console_of(folder))
        return output.OK
    topics_of(folder)
    require_own(real_world(), folder, trusted=trusts_folders())
    owner = os.path.join(os.path.abspath(folder), OWNER_SOCKET)
    if not answers_at(owner):
        try:
            return run(folder, read_settings(real_world(), environment()), settings, say, shares=True)
        except Busy:
            if not answers_at(owner):
                raise
    return _beside(owner, settings, lambda addresses: say(folder, addresses, settings))


def _console_of(place: str) -> str:
    """Return the address of a server's console, or of a queue's page in it. Raises NotFound if it serves none."""
    from holdfast.client.calling import Ask
    from holdfast.client.network import run as answered

    with opened_broker(place, wait=WAIT) as broker:
        client = port_of(broker).client
        try:
            answered(client.caller.call(Ask(method="GET", path="/ui/static/icon.svg")))  # needs no token
        except NotFound:
            raise NotFound(f"the server at {place} has no console: it was started with --no-console") from None
    address = parse_address(place)
    return f"{address.text}/ui" + (f"/queues/{quote(address.queue, safe='')}" if address.queue else "")


def _settings(port: int, *, read_only: bool) -> ServerSettings:
    """Return the settings of a server for one person: on loopback, whatever the settings file says."""
    return ServerSettings(host="127.0.0.1", port=port, read_only=read_only, drain_ms=1_000)


def _beside(owner: str, settings: ServerSettings, ready: Any) -> int:
    """Serve the console through the socket of the process that owns the folder."""
    from holdfast.server.console.relay import relay
    from holdfast.server.server import event_loop

    async def until_stopped() -> None:
        loop = asyncio.get_running_loop()
        stop_asked = asyncio.Event()
        stop_on_signals(stop_asked, loop)
        await relay(owner, settings, ready=ready, stop_asked=stop_asked.wait())

    with asyncio.Runner(loop_factory=event_loop()) as runner:
        runner.run(until_stopped())
    return output.OK


Most: TypeAlias = Annotated[int, option("--limit", "At most this many.", least=1, most=1_000)]


def _asked(place: str, wait: str, kind: Any, *path: str, **query: Any) -> Any:
    with opened_broker(place, wait=wait) as broker:
        return asked(broker, kind, *path, **query)


def status_command(folder: DataFolder, wait: Wait = WAIT, as_json: AsJson = False) -> int:
    """Show how a server is doing. Includes its version and folder, its connections, and its free disk space.

    For a folder in a store that has no owner on this machine, it shows the owner and the standbys.

    Examples:
        holdfast status http://127.0.0.1:7700
        holdfast status s3://bucket/jobs
    """
    from holdfast.protocol.topics import Status

    standing = None if is_address(folder) else _standing(folder)
    if standing is not None:
        return _show_standing(standing, as_json=as_json)
    status: Status = _asked(folder, wait, Status, "admin", "status")
    if as_json:
        found = {name: getattr(status, name) for name in status.__struct_fields__ if name != "started_at"}
        found["store"] = None if status.store is None else _document(status.store)
        output.print_json({**found, **output.moment("started_at", status.started_at)})
        return output.OK
    shown = output.facts_table()
    for title, text in (
        (
            "server",
            f"{output.safe(folder)}, version {output.safe(status.version)}{', going' if status.leaving else ''}",
        ),
        ("folder", f"{output.safe(status.folder)}, {output.size(status.disk_free_bytes)} free"),
        ("since", f"{output.seconds_text(status.started_at)} UTC"),
        ("topics", f"{status.topics:,}"),
        ("connections", _of_at_most(status.connections, status.max_connections)),
        ("descriptors", _of_at_most(status.descriptors, status.max_descriptors)),
        ("waiting", _of_at_most(status.waiters, status.max_waiters)),
        ("streams", f"{status.streams:,}"),
        ("members", f"{status.members:,}"),
    ):
        shown.add_row(title, text)
    if status.store is not None:
        store = status.store
        text = (
            f"{output.safe(store.name)}, epoch {store.epoch:,}, {store.objects:,} objects, the last one "
            f"{store.silent_seconds:.1f} s ago, {output.size(store.unsent_bytes)} not sent yet"
        )
        shown.add_row("store", f"{text}; lost: {output.safe(store.problem)}" if store.problem else text)
        _add_owners(shown, store)
    if status.tokens_problem:
        shown.add_row(
            "tokens",
            f"the file cannot be used; its previous content stays in effect: {output.safe(status.tokens_problem)}",
        )
    output.stdout().print(shown)
    return output.OK


def _standing(folder: str) -> StoreStanding | None:
    """Return what the store tells of a folder that lives there and has no owner here; None for any other."""
    from holdfast.broker.folder.layout import store_of
    from holdfast.broker.folder.stored import store_standing
    from holdfast.client.shared_folder import socket_of
    from holdfast.env.sockets import absolute

    world, path = real_world(), absolute(folder)
    url = store_of(world, path)
    return None if url is None or answers_at(socket_of(path)) else store_standing(url, world)


def _show_standing(found: StoreStanding, *, as_json: bool) -> int:
    if as_json:
        output.print_json(_document(found))
        return output.OK
    shown = output.facts_table()
    text = f"epoch {found.epoch:,}, {found.objects:,} objects, the last one {found.silent_seconds:.1f} s ago"
    shown.add_row("store", f"{output.safe(found.name)}, {text}")
    _add_owners(shown, found)
    output.stdout().print(shown)
    return output.OK


def _document(store: StoreStatus | StoreStanding) -> dict[str, Any]:
    return {**msgspec.structs.asdict(store), "standbys": [msgspec.structs.asdict(each) for each in store.standbys]}


def _add_owners(shown: output.Table, store: StoreStatus | StoreStanding) -> None:
    shown.add_row("owner", output.safe(store.owner) or "none")
    for each in store.standbys:
        lag = f"at most {each.lag_seconds:.1f} s ({count_of(each.lag_objects, 'object')}) behind"
        shown.add_row("standby", f"{output.safe(each.process)}, {lag}")
    if not store.standbys:
        shown.add_row("standby", "none")


def _of_at_most(count: int, most: int) -> str:
    return f"{count:,} of at most {most:,}" if most else f"{count:,}"  # older servers report no limit


def waiters_command(folder: DataFolder, limit: Most = 100, wait: Wait = WAIT, as_json: AsJson = False) -> int:
    """Show who is waiting for messages on a server. Lists topics and groups, those with the most waiters first.

    Examples:
        holdfast waiters http://127.0.0.1:7700
    """
    from holdfast.protocol.topics import WaitersTold

    found: WaitersTold = _asked(folder, wait, WaitersTold, "admin", "waiters", limit=limit)
    if as_json:
        output.print_each({name: getattr(line, name) for name in line.__struct_fields__} for line in found.lines)
    elif not found.lines:
        output.note("nobody is waiting for messages")
    else:
        shown = output.table("topic", "group", "waiting>", "streams>")
        for line in found.lines:
            shown.add_row(output.safe(line.topic), output.safe(line.group), f"{line.waiters:,}", f"{line.streams:,}")
        output.stdout().print(shown)
    return output.OK


def workers_command(
    folder: DataFolder,
    act: Annotated[
        str | None, argument("drain|stop|resume", "What the workers should do; without it, list them.")
    ] = None,
    names: Annotated[list[str] | None, argument("NAME", "The name or id of a worker.")] = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """List, drain, stop or resume workers.

    A drained worker finishes what it is working on, takes no more, and stays idle. A stopped one finishes and exits.
    Workers learn of it when they next report, within seconds.

    Examples:
        holdfast workers http://127.0.0.1:7700
        holdfast workers ./data drain worker-1
    """
    if act is not None:
        return _tell_workers(folder, act, names or [], wait, as_json=as_json)
    with opened_broker(folder, wait=wait, keep=False) as broker:
        found = broker.workers()
    if as_json:
        output.print_each(msgspec.to_builtins(found))
    elif not found:
        output.note("no worker has reported within the last hour")
    else:
        output.stdout().print(_workers_table(found))
    return output.OK


def _tell_workers(place: str, act: str, names: list[str], wait: str, *, as_json: bool) -> int:
    if act not in ("drain", "stop", "resume") or not names:
        raise InvalidRequest(f"name the workers: `holdfast workers {output.safe(place)} drain NAME`")
    with opened_broker(place, wait=wait, keep=False) as broker:
        told = {name: broker.order_worker(name, act) for name in names}  # type: ignore[arg-type]  # as was looked at
    if as_json:
        output.print_json({"order": act, "workers": told})
    for name, ids in () if as_json else told.items():
        output.say(f"{output.safe(name)} will {act} when it next reports ({count_of(len(ids), 'worker')})")
    return output.OK


def _workers_table(workers: list[WorkerInfo]) -> output.Table:
    from holdfast.cli.look.trace import time_text

    shown = output.table(
        "worker", "state", "queues", "doing>", "longest>", "handled>", "failed>", "seen>", wide="queues"
    )
    for worker in workers:
        queues = worker.queues
        longest = max((message.seconds for queue in queues for message in queue.running), default=None)
        names = [queue.topic if queue.group == DEFAULT_GROUP else f"{queue.topic}/{queue.group}" for queue in queues]
        shown.add_row(
            output.safe(worker.name),
            worker.state if worker.order is None else f"{worker.state}, told to {worker.order}",
            output.safe(", ".join(names)),
            f"{sum(queue.running_count for queue in queues)}/{worker.concurrency}",
            "" if longest is None else time_text(round(longest * 1e9)),
            f"{worker.handled:,}",
            f"{worker.failed:,}",
            f"{time_text(round(worker.seen_seconds * 1e9))} ago",
        )
    return shown


def audit_command(folder: DataFolder, limit: Most = 20, wait: Wait = WAIT, as_json: AsJson = False) -> int:
    """Show who changed what on a server. Lists the newest last. Only administrators may see it.

    Refused calls are listed separately, so that they cannot crowd out the others.

    Examples:
        holdfast audit http://127.0.0.1:7700 --limit 100
    """
    acts, refused = ([*reversed(newest)] for newest in _acts(folder, limit, wait))
    if as_json:
        for act in (*acts, *refused):
            output.print_json(msgspec.to_builtins(act))
        return output.OK
    if not acts:
        output.note("no administrative actions yet")
    else:
        _show_acts(acts)
    if refused:
        output.stdout().print("\nrefused:")
        _show_acts(refused)
    return output.OK


def _acts(place: str, limit: int, wait: str) -> tuple[list[Any], list[Any]]:
    """Return acts and refusals, newest first, from a server or from the audit files in a folder."""
    if is_address(place):
        from holdfast.protocol.topics import Acts

        announcement: Acts = _asked(place, wait, Acts, "admin", "audit", limit=limit)
        return announcement.acts, announcement.refused
    from holdfast.server.audit import FILE, Audit

    topics_of(place)
    settings = read_settings(real_world(), environment()).server
    audit = Audit(real_world(), settings.audit_file or join(place, FILE))
    return audit.last(limit), audit.refusals.last(limit)


def _show_acts(acts: list[Any]) -> None:
    from holdfast.protocol.topics import words_of

    shown = output.table("time (UTC)", "who", "what", "outcome", wide="what")
    for act in acts:
        texts = (act.principal, words_of(act), act.outcome)
        shown.add_row(output.seconds_text(act.time), *map(output.safe, texts))
    output.stdout().print(shown)
