"""What a process loads before it does its work: a server that was killed is back as soon as it has loaded that."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast import checksum

COMMAND = [sys.executable, "-X", "importtime", "-m", "holdfast"]
# Needed by some calls, or by some commands: whoever comes first there waits for them.
LATER = {"jinja2", "opentelemetry", "prometheus_client", "pyarrow", "pydantic", "python_multipart", "rich.console"}


def loaded(report: str) -> set[str]:
    """The modules that Python tells of when it is asked how long they took."""
    lines = [line.rpartition("|")[2].strip() for line in report.splitlines() if line.startswith("import time:")]
    assert "holdfast" in lines
    return set(lines)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--no-console"]], ids=["with the console", "without"])
def test_a_server_listens_before_it_loads_what_only_some_calls_need(tmp_path: Path, more: list[str]):
    log = tmp_path / "log"
    command = [*COMMAND, "serve", str(tmp_path / "data"), "--port", "0", *more]
    with log.open("w") as stderr, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as server:
        assert server.stdout is not None
        said = server.stdout.readline()
        server.kill()
    found = loaded(log.read_text())
    assert b" at http://" in said
    assert not found & (LATER | {"holdfast.server.openapi", "holdfast.server.forms"})


# Slow to load, and of no use to a quick command: an event loop, TLS, mail, archives, processes, models.
NEVER = {
    "ast", "asyncio", "concurrent.futures", "dataclasses", "difflib", "email", "http.client", "inspect", "jinja2",
    "multiprocessing", "opentelemetry", "pathlib", "prometheus_client", "pyarrow", "pydantic", "random",
    "rich.console", "shlex", "ssl", "subprocess", "tempfile", "tomllib", "holdfast.server.server", "holdfast.spark",
    "holdfast.storage.checks.finding", "holdfast.storage.checks.repair", "holdfast.worker",
    "holdfast.local.aio.broker", "holdfast.remote.aio.broker", "holdfast.cli.look.trace", "holdfast.broker.locks",
    "holdfast.local.locks", "holdfast.locking",
}  # fmt: skip
# What serves, runs or looks for long logs; a quick command does not.
NO_LOGGING = {"hashlib", "logging", "platform", "signal", "string", "textwrap", "traceback"}
# What few folders have, and few commands use: delayed messages, and groups in stream mode.
RARE = {
    "holdfast.api.sync.consumer",
    "holdfast.api.sync.ports",
    "holdfast.broker.delayed",
    "holdfast.broker.streams.offsets",
    "holdfast.membership.members",
}
# A command on a folder needs no client, and one that calls a server no engine.
NO_CLIENT = {
    "holdfast.client.shared_folder",
    "holdfast.env.sockets",
    "holdfast.remote.client",
    "httptools",
    "socket",
    "urllib.parse",
}
NO_ENGINE = {
    "holdfast.broker.engine",
    "holdfast.broker.topic",
    "holdfast.local.broker",
    "holdfast.client.shared_folder",
    "stringprep",
}
# Nor what the engine is made of; `stats` still loads the status of a folder, for its types.
NO_STORAGE = {"holdfast.broker.journal", "holdfast.storage.log", "pyroaring"}
QUICK = [
    ["put", "y", "--header", "a=b", "--wait", "5s"],
    ["get"],
    ["ls"],
    ["peek"],
    ["stats"],
]


def run(*arguments: str) -> set[str]:
    """Run a command; returns the modules that it loaded."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return loaded(done.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A queue with a message for every command that takes one."""
    path = str(tmp_path_factory.mktemp("quick") / "jobs")
    with holdfast.open(path) as queue:
        queue.put_many([b"x"] * 10)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of such a queue on a server."""
    command = [sys.executable, "-m", "holdfast", "serve", str(tmp_path_factory.mktemp("served")), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        url = process.stdout.readline().decode().partition(" at ")[2].split()[0]
        with holdfast.open(f"{url}/jobs") as queue:
            queue.put_many([b"x"] * 10)
        yield f"{url}/jobs"
        process.kill()


def test_a_put_into_a_folder_loads_only_what_it_needs(folder: str):
    of_others = {"holdfast.api.listing", "holdfast.local.listing", "holdfast.producing.core"}
    assert not run("put", folder, "x") & (NEVER | NO_LOGGING | NO_CLIENT | RARE | of_others)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_a_quick_command_on_a_folder_loads_only_what_it_needs(folder: str, arguments: list[str]):
    name, *rest = arguments
    # `ls` and `stats` look for delayed messages and groups in stream mode, too.
    assert not run(name, folder, *rest) & (NEVER | NO_LOGGING | NO_CLIENT | (RARE if name in ("put", "get") else set()))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["put", "x"], *QUICK], ids=" ".join)
def test_a_quick_command_that_calls_a_server_loads_only_what_it_needs(server: str, arguments: list[str]):
    name, *rest = arguments
    assert not run(name, server, *rest) & (NEVER | NO_LOGGING | NO_ENGINE | (NO_STORAGE if name != "stats" else set()))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["folder", "server"])
def test_settling_by_receipt_loads_only_what_it_needs(request: pytest.FixtureRequest, place: str):
    place = request.getfixturevalue(place)
    taken = subprocess.run([*COMMAND, "get", place, "--json"], capture_output=True, text=True, check=True)
    receipt = json.loads(taken.stdout)["receipt"]
    assert not run("ack", place, receipt) & NEVER


@pytest.mark.slow
@pytest.mark.parametrize("name", ["status", "workers", "waiters", "audit"])
def test_a_look_at_a_server_loads_no_server(server: str, name: str):
    url = server.removesuffix("/jobs")
    assert not run(name, url) & (NEVER - {"random", "pathlib"} | NO_ENGINE | {"holdfast.server"})


@pytest.mark.slow
def test_tokens_and_pipelines_load_no_event_loop():
    assert not run("token", "--help") & {"asyncio", "ssl", "holdfast.server.server"}
    assert not run("pipeline", "--help") & {"asyncio", "ssl", "holdfast.broker.check", "holdfast.cli.look.stats"}


def test_the_list_of_commands_loads_no_queue():
    found = run("--help")
    assert not found & (NEVER | NO_CLIENT | NO_ENGINE | {"holdfast.env", "holdfast.broker", "holdfast.settings"})
    assert "msgspec" not in found


def test_the_package_brings_no_reader_of_mail_and_archives_with_it():
    command = [sys.executable, "-X", "importtime", "-c", "import holdfast.storage"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not loaded(done.stderr) & {"crc32c", "email", "importlib.metadata", "zipfile"}


def test_nobody_looks_for_garbage_while_an_engine_is_loaded(folder: str):
    code = (
        "import gc, sys; sys.argv = ['holdfast', 'put', sys.argv[1], 'x'];"
        "import atexit; from holdfast.cli import main;"
        "started = [each['collections'] for each in gc.get_stats()];"
        "atexit.register(lambda: print([each['collections'] for each in gc.get_stats()] == started));"
        "main.main()"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("True\n")


@pytest.mark.parametrize("content", [b"", b"123456789", b"\x00" * 32, bytes(range(256)) * 100])
def test_the_checksum_is_that_of_the_package(content: bytes):
    import crc32c

    assert checksum.crc32c(content) == crc32c.crc32c(content)
    assert checksum.crc32c(memoryview(content)[1:], 7) == crc32c.crc32c(content[1:], 7)


def test_a_quick_command_can_still_log_and_describe_types():
    code = (
        "from holdfast.cli import main; main.run_one_command(); main._load_msgspec(); import sys;"
        "from holdfast.env.process import get_logger; log = get_logger('x'); assert 'logging' not in sys.modules;"
        "log.warning('seen', extra={'a': 1});"
        "import msgspec, platform; print(msgspec.json.schema(int), msgspec.inspect.type_info(int), platform.machine())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "seen\n"
    assert "{'type': 'integer'} IntType(" in done.stdout
