"""Stores for the tests: SeaweedFS and moto, which speak S3, PostgreSQL, Azurite. Each on free ports, ended by id."""

from __future__ import annotations

import base64
import hmac
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote

PATIENCE_S = 120
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_REGION": "us-east-1"}


def free_port(count: int = 1) -> list[int]:
    """Return ports that nobody uses now; SeaweedFS wants its gRPC ports to be 10,000 higher."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            with suppress(OSError, OverflowError):
                other.bind(("127.0.0.1", port - 10_000))
                if port - 10_000 > 1024:
                    found.append(port - 10_000)
    return found


def wait_for(what, process: subprocess.Popen) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise AssertionError(f"{process.args} has ended by itself: {process.returncode}")
        with suppress(OSError, subprocess.CalledProcessError):
            what()
            return
        time.sleep(0.1)
    raise AssertionError(f"{process.args} was not ready within {PATIENCE_S} s")


@contextmanager
def running(command: list[str], log: Path, **options) -> Iterator[subprocess.Popen]:
    server = StoreServer(command, log, lambda: None, options)
    server.begin()
    try:
        yield server.process
    finally:
        server.end()


@dataclass
class StoreServer:
    """A store's server, which can be crashed and started again with the same data and ports."""

    command: Sequence[str]
    log: Path
    ready: Callable[[], object]
    options: dict = field(default_factory=dict)
    crash_signal: int = signal.SIGKILL

    def begin(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, **self.options
            )

    def start(self) -> None:
        """Start it, and return when it answers."""
        self.begin()
        wait_for(self.ready, self.process)

    def crash(self) -> None:
        self.process.send_signal(self.crash_signal)
        self.process.wait()

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def get(url: str, method: str = "GET") -> None:
    with suppress(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5).close()


@contextmanager
def seaweedfs(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    with ExitStack() as ending:
        for attempt in range(3):  # its gRPC ports are among those that outgoing connections take at any time
            try:
                address = ending.enter_context(_weed(folder / f"weed-{attempt}"))
                break
            except (AssertionError, subprocess.TimeoutExpired):
                if attempt == 2:
                    raise
        yield "s3://holdfast/jobs", {"AWS_ENDPOINT_URL": address, **KEYS, "AWS_SKIP_SIGNATURE": "true"}


@contextmanager
def _weed(data: Path, *options: str) -> Iterator[str]:
    server, address = weed_server(data, options=options)
    try:
        server.start()
        yield address
    finally:
        server.end()


def weed_server(
    data: Path, host: str = "127.0.0.1", before: Sequence[str] = (), options: Sequence[str] = ()
) -> tuple[StoreServer, str]:
    """SeaweedFS, not started yet, and its address. `before` stands before the command, `options` behind it."""
    master, volume, filer, s3 = free_port(4)
    weed = str(Path(sys.executable).parent / "weed")
    data.mkdir()
    command = [
        *before, weed, "server", f"-dir={data}", f"-ip={host}", f"-ip.bind={host}", "-filer", "-s3",
        f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}",
        "-master.volumeSizeLimitMB=64", "-volume.max=20", "-s3.port.iceberg=0", "-s3.port.lance=0", *options,
    ]  # fmt: skip
    address = f"http://{host}:{s3}"
    shell = [weed, "shell", f"-master={host}:{master}", f"-filer={host}:{filer}"]
    orders = b"fs.configure -locationPrefix=/buckets/ -fsync -apply\ns3.bucket.create -name holdfast\n"

    def ready() -> None:
        get(address)
        done = subprocess.run(shell, input=orders, capture_output=True, timeout=60, check=True)
        if b"error" in done.stderr.lower():
            raise OSError(done.stderr)

    return StoreServer(command, data.with_suffix(".log"), ready), address


@contextmanager
def weed_with_keys(folder: Path, secrets: dict[str, str]) -> Iterator[str]:
    """The address of SeaweedFS that answers only to these keys, and checks what they sign."""
    allowed = ["Read", "Write", "List", "Tagging", "Admin"]
    identities = [
        {"name": key, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": allowed}
        for key, secret in secrets.items()
    ]
    config = folder / "identities.json"
    config.write_text(json.dumps({"identities": identities}))
    with _weed(folder / "weed", f"-s3.config={config}") as address:
        yield address


_MOTO = """
import sys
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=False)
"""


@contextmanager
def moto(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """S3 as moto has it, in a process of its own, with a bucket.

    It answers one call at a time: with several, on a busy machine, it sometimes lets two create the same object.
    """
    [port] = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", _MOTO, str(port)]
    with running(command, folder / "moto.log") as process:
        wait_for(lambda: get(address), process)
        get(f"{address}/holdfast", "PUT")
        yield "s3://holdfast/jobs", {"AWS_ENDPOINT_URL": address, **KEYS}


# What the emulator has built in: no secret of anybody's.
_AZURE_ACCOUNT = "devstoreaccount1"
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def azurite_program() -> str | None:
    """Where Azurite is, if somebody has installed it (`npm install -g azurite`)."""
    return shutil.which("azurite-blob")


@contextmanager
def azurite(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Azure Blob Storage's emulator, with a container."""
    program, [port] = azurite_program(), free_port()
    assert program is not None
    data, address = folder / "azurite", f"http://127.0.0.1:{port}/{_AZURE_ACCOUNT}"
    data.mkdir()
    command = [
        program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(data), "--silent",
        "--skipApiVersionCheck", "--disableTelemetry",
    ]  # fmt: skip
    with running(command, folder / "azurite.log") as process:
        wait_for(lambda: get(address), process)
        _make_container(port, "holdfast")
        yield (
            "az://holdfast/jobs",
            {
                "AZURE_STORAGE_ACCOUNT_NAME": _AZURE_ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": _AZURE_KEY,
                "AZURE_ENDPOINT": address,
            },
        )


def _make_container(port: int, name: str) -> None:
    """Make a container as Azure wants it asked for: with a signature of the request."""
    stamps = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    # The emulator has the account in the path as well, so it comes twice.
    resource = f"/{_AZURE_ACCOUNT}/{_AZURE_ACCOUNT}/{name}\nrestype:container"
    parts = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in stamps.items()), resource]
    signed = hmac.digest(base64.b64decode(_AZURE_KEY), "\n".join(parts).encode(), "sha256")
    authorization = f"SharedKey {_AZURE_ACCOUNT}:{base64.b64encode(signed).decode()}"
    url = f"http://127.0.0.1:{port}/{_AZURE_ACCOUNT}/{name}?restype=container"
    headers = {**stamps, "Authorization": authorization, "Content-Length": "0"}
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=30).close()


def postgres_program(name: str) -> str | None:
    newest = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: path.parent.name.rjust(4))
    return shutil.which(name, path=os.pathsep.join([*map(str, reversed(newest)), os.environ.get("PATH", "")]))


@contextmanager
def postgres(folder: Path, auth: str = "trust", password: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    user = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
    home = Path(tempfile.mkdtemp(prefix="holdfast-pg-"))  # that other user must be able to come to it
    [port] = free_port()
    try:
        if user:
            shutil.chown(home, "nobody", "nogroup")
        command = make_postgres(home, port, user=user, auth=auth, password=password)
        url = f"postgresql://holdfast@127.0.0.1:{port}/postgres"
        with running(command, folder / "postgres.log", cwd=home, **user) as process:
            wait_for(lambda: _connect(f"{url}?password={quote(password)}"), process)
            yield f"{url}/jobs", {}
    finally:
        shutil.rmtree(home, ignore_errors=True)


def make_postgres(
    home: Path, port: int, host: str = "127.0.0.1", *, user: dict, auth: str = "trust", password: str = ""
) -> list[str]:
    """Make a cluster of databases in a folder; returns the command that serves it."""
    initdb, server = postgres_program("initdb"), postgres_program("postgres")
    assert initdb is not None
    assert server is not None
    secret = home / "password"
    secret.write_text(password or "none")
    secret.chmod(0o644)
    make = [initdb, "-D", f"{home}/data", "-U", "holdfast", f"--auth={auth}", f"--pwfile={secret}", "-N"]
    subprocess.run(make, check=True, capture_output=True, cwd=home, **user)
    if host != "127.0.0.1":
        with Path(home, "data", "pg_hba.conf").open("a") as allowed:
            allowed.write("host all all samenet trust\nhost all all 10.0.0.0/8 trust\n")
    return [server, "-D", f"{home}/data", "-p", str(port), "-h", host, "-k", str(home)]


def postgres_server(folder: Path, home: Path, host: str, before: Sequence[str]) -> tuple[StoreServer, str]:
    """PostgreSQL, not started yet, and its address. `before` stands before the command, and changes to `nobody`."""
    [port] = free_port()
    user = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
    if user:
        shutil.chown(home, "nobody", "nogroup")
    command = [*before, *make_postgres(home, port, host, user=user)]
    url = f"postgresql://holdfast@{host}:{port}/postgres"
    options = {"cwd": home, **({} if before else user)}
    # An immediate shutdown is a crash that waits for its children, which hold on to the memory that they share.
    return StoreServer(command, folder / "postgres.log", lambda: _connect(url), options, signal.SIGQUIT), url


def _connect(url: str) -> None:
    import psycopg

    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError as error:
        raise OSError(str(error)) from error
