"""Another user of the same machine, in a folder that he may write to: he gets none of our messages, and spoils nothing.

The stranger is a process of its own that root has started, and that is another user from then on.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import holdfast
from holdfast import InvalidRequest, Unauthenticated, aio
from holdfast.broker.folder.layout import OWNER_SOCKET
from holdfast.client.shared_folder import socket_of
from holdfast.env.sockets import connect_unix, listen_unix
from holdfast.settings import BrokerSettings
from holdfast.storage.files import TRUST
from tests.integration.process_gear import COMMAND, plain_environment

STRANGER = 65534
USER = 54322  # of whom the machine knows nothing else, as in a container
BODY = b"our secret"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")

BECOME = f"""
import os
def become(uid={STRANGER}):
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
"""

# Takes the lock and the socket of a folder before its owner comes; tells what it was sent.
TAKER = (
    BECOME
    + """
import fcntl, socket, sys, threading
become()
folder, heard = sys.argv[1], []
lock = os.open(folder + "/lock", os.O_RDWR | os.O_CREAT, 0o666)
os.chmod(folder + "/lock", 0o666)
fcntl.flock(lock, fcntl.LOCK_EX)
listening = socket.socket(socket.AF_UNIX)
listening.bind(folder + "/owner.sock")
os.chmod(folder + "/owner.sock", 0o777)
listening.listen()
def hear(connection):
    while content := connection.recv(65536):
        heard.append(content)
def accept():
    while True:
        threading.Thread(target=hear, args=(listening.accept()[0],), daemon=True).start()
threading.Thread(target=accept, daemon=True).start()
print("there", flush=True)
for line in sys.stdin:
    print(repr(b"".join(heard)), flush=True)
"""
)

# Opens a folder, as a user of that number.
OPENER = (
    BECOME
    + """
import sys, tempfile
import holdfast
with tempfile.TemporaryDirectory() as warm:  # what is loaded late might not be readable for a stranger
    with holdfast.open(warm + "/q") as queue:
        queue.put(b"x")
        queue.get(timeout=1).ack()
    try:
        holdfast.open(warm)
    except holdfast.HoldfastError:
        pass
become(int(sys.argv[2]))
try:
    with holdfast.open(sys.argv[1]) as queue:
        queue.put(b"mine")
        print("put", flush=True)
except holdfast.HoldfastError as error:
    print(type(error).__name__, error, flush=True)
"""
)

# Comes to a socket, and tells the answer.
CALLER = (
    BECOME
    + """
import socket, sys
become()
calling = socket.socket(socket.AF_UNIX)
calling.connect(sys.argv[1])
calling.sendall(b"GET /v1/topics HTTP/1.1\\r\\nhost: localhost\\r\\n\\r\\n")
print(calling.recv(65536), flush=True)
"""
)


class Stranger:
    """A process of another user's."""

    def __init__(self, program: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def heard(self) -> str:
        """All that came to its socket."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._line()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def stranger(program: str, *arguments: object) -> Iterator[Stranger]:
    one = Stranger(program, *arguments)
    try:
        yield one
    finally:
        one.end()


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can reach."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made)


@pytest.fixture
def everybodys(place: Path) -> Path:
    """One that they may write to."""
    folder = place / "jobs"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**plain_environment(), **variables}
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, env=environment, check=False, timeout=120
    )


async def put_as_task(folder: Path, **options: object) -> None:
    async with aio.open(folder, **options) as queue:  # type: ignore[arg-type]
        await queue.put(BODY)


def put_as_thread(folder: Path, **options: object) -> None:
    with holdfast.open(folder, **options) as queue:  # type: ignore[arg-type]
        queue.put(BODY)


def put_by_broker(folder: Path, **options: object) -> None:
    with holdfast.open_broker(folder, **options) as broker:  # type: ignore[arg-type]
        broker.create_topic("jobs", exist_ok=True)
        broker.publish("jobs", BODY)


def put_by_task_of_a_broker(folder: Path, **options: object) -> None:
    async def put() -> None:
        async with aio.open_broker(folder, **options) as broker:  # type: ignore[arg-type]
            await broker.create_topic("jobs", exist_ok=True)
            await broker.publish("jobs", BODY)

    asyncio.run(put())


WAYS = {
    "open": put_as_thread,
    "aio.open": lambda folder, **options: asyncio.run(put_as_task(folder, **options)),
    "open_broker": put_by_broker,
    "aio.open_broker": put_by_task_of_a_broker,
}


@needs_root
@pytest.mark.parametrize("way", WAYS)
def test_a_stranger_who_took_the_lock_and_the_socket_gets_no_message(everybodys: Path, way: str):
    with stranger(TAKER, everybodys) as thief:
        assert thief.said == "there"
        with pytest.raises(InvalidRequest, match="every user may write to it"):
            WAYS[way](everybodys)
        with pytest.raises(Unauthenticated, match="belongs to another user: it runs as nobody"):
            WAYS[way](everybodys, trust_folder=True)
        assert thief.heard() == "b''"


@needs_root
@pytest.mark.slow
def test_a_command_sends_a_stranger_nothing_either(everybodys: Path):
    (everybodys / "topics" / "jobs").mkdir(parents=True)
    with stranger(TAKER, everybodys) as thief:
        for arguments in (
            ["put", everybodys, "x"],
            ["stats", everybodys],
            ["ui", everybodys],
            ["serve", everybodys],
        ):
            refused = run(*arguments)
            assert (refused.returncode, refused.stdout) == (2, ""), arguments
            assert "every user may write to it" in refused.stderr, arguments
        for arguments in (["put", everybodys, "x"], ["stats", everybodys], ["ui", everybodys]):
            refused = run("--trust-folder", *arguments)
            assert (refused.returncode, refused.stdout) == (2, ""), arguments
            assert "belongs to another user" in refused.stderr, arguments
        refused = run("--at", f"unix:{everybodys}/{OWNER_SOCKET}", "stats", "--topic", "jobs")
        assert "belongs to another user" in refused.stderr
        assert thief.heard() == "b''"


@needs_root
def test_a_connection_to_a_server_by_its_socket_is_refused_where_a_stranger_has_it(place: Path):
    place.chmod(0o1777)
    with stranger(TAKER, place) as thief:
        address = f"unix:{place}/{OWNER_SOCKET}"
        with holdfast.connect(address) as broker, pytest.raises(Unauthenticated, match="another user"):
            broker.publish("jobs", BODY)
        with pytest.raises(Unauthenticated, match="another user"):
            asyncio.run(_ask(address))
        assert thief.heard() == "b''"


async def _ask(address: str) -> None:
    async with aio.connect(address) as broker:
        await broker.topics()


@needs_root
def test_a_stranger_who_takes_the_socket_after_the_owner_gets_no_message(everybodys: Path):
    """The one who came by the socket finds another there, and says nothing to it."""
    owner = holdfast.open(everybodys, trust_folder=True)
    other = holdfast.open(everybodys, trust_folder=True)
    other.put(b"to the owner")
    owner.close()
    with suppress(FileNotFoundError):
        (everybodys / "lock").unlink()
    with stranger(TAKER, everybodys) as thief:
        with pytest.raises(Unauthenticated, match="another user"):
            other.put(BODY)
        assert thief.heard() == "b''"
        other.close()


def test_a_lock_that_is_a_link_overwrites_nothing(tmp_path: Path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "lock").symlink_to(precious)
    with pytest.raises(InvalidRequest, match="lock is a symbolic link"):
        holdfast.open(folder)
    assert precious.read_bytes() == b"precious"
    (folder / "lock").unlink()
    put_as_thread(folder)


def fixed_names(folder: Path) -> list[Path]:
    """Files that are written under names that anybody can guess: one of each name."""
    files = {path.name: path for path in sorted(folder.rglob("*")) if path.is_file()}
    return sorted([*files.values(), *(path.with_name(f"{path.name}.tmp") for path in files.values())])


@pytest.mark.slow
def test_no_file_of_a_folder_is_written_through_a_link(tmp_path: Path):
    """Each of them in turn leads to another file, which stays as it is, whether or not the folder can be opened."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    pattern = tmp_path / "pattern"
    use_all(pattern)
    names = [path.relative_to(pattern) for path in fixed_names(pattern)]
    assert len(names) > 15
    for name in names:
        folder = tmp_path / "jobs"
        shutil.copytree(pattern, folder)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(precious)
        with suppress(holdfast.HoldfastError):
            use_all(folder)
        assert precious.read_bytes() == b"precious", name
        shutil.rmtree(folder)


def use_all(folder: Path) -> None:
    with holdfast.open(folder, topic="jobs", share=False, max_attempts=1, trace_sample=1.0) as queue:
        queue.put_many([b"1", b"2", b"3"])
        queue.put(b"later", delay=3600, dedup_id="a")
        queue.get(timeout=5).ack()
        queue.get(timeout=5).reject("no")
    with holdfast.open_broker(folder, share=False) as broker:
        broker.locks.release(broker.locks.acquire("one", lease=60))
        broker.documents.update("state", {"a": 1})
        with broker.producer(name="p") as producer:
            producer.send("jobs", b"x")
        with broker.consumer("jobs", group="s") as consumer:
            list(consumer.poll(timeout=0))
            consumer.commit()


@pytest.mark.slow
def test_the_audit_log_is_not_written_through_a_link(tmp_path: Path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    folder = tmp_path / "jobs"
    put_as_thread(folder)
    (folder / "audit.jsonl").symlink_to(precious)
    refused = run("serve", folder, "--port", "0")
    assert refused.returncode == 2
    assert "symbolic link" in refused.stderr or "audit" in refused.stderr
    assert precious.read_bytes() == b"precious"


@pytest.mark.slow
def test_a_tokens_file_is_not_written_through_a_link(tmp_path: Path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (tmp_path / "tokens.toml.tmp").symlink_to(precious)
    made = run("token", "new", "ops", "--role", "admin", "--file", tmp_path / "tokens.toml")
    assert made.returncode == 0, made.stderr
    assert precious.read_bytes() == b"precious"
    assert "ops" in (tmp_path / "tokens.toml").read_text()


@pytest.mark.slow
def test_a_socket_takes_the_place_of_a_socket_only(tmp_path: Path):
    path = tmp_path / "precious"
    path.write_bytes(b"precious")
    put_as_thread(tmp_path / "jobs")
    refused = run("serve", tmp_path / "jobs", "--port", "0", "--socket", path)
    assert refused.returncode == 2
    assert "not a socket" in refused.stderr
    assert path.read_bytes() == b"precious"
    listen_unix(str(tmp_path / "left")).close()
    again = listen_unix(str(tmp_path / "left"))
    connect_unix(str(tmp_path / "left"), 1.0).close()
    again.close()


@pytest.mark.slow
def test_a_server_has_no_socket_where_everybody_could_replace_it(tmp_path: Path):
    put_as_thread(tmp_path / "jobs")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    refused = run("serve", tmp_path / "jobs", "--port", "0", "--socket", shared / "s")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "every user may rename what is in" in refused.stderr


@needs_root
def test_an_owner_lets_no_stranger_in_whatever_the_mode_of_its_socket(place: Path):
    folder = place / "jobs"
    with holdfast.open(folder) as queue:
        queue.put(BODY)
        folder.chmod(0o755)
        os.chmod(socket_of(str(folder)), 0o777)
        with stranger(CALLER, socket_of(str(folder))) as caller:
            assert caller.said.startswith("b'HTTP/1.1 403")
            assert '"code":"forbidden"' in caller.said
        with holdfast.open(folder) as other:  # root, who is the same user
            assert other.get(timeout=5).body == BODY


@needs_root
@pytest.mark.slow
def test_a_server_with_a_socket_lets_no_stranger_in_whatever_its_mode(place: Path):
    put_as_thread(place / "jobs")
    command = [*COMMAND, "serve", str(place / "jobs"), "--port", "0", "--socket", str(place / "s")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=plain_environment())
    try:
        assert server.stdout is not None
        assert "unix:" in server.stdout.readline()
        (place / "s").chmod(0o777)
        with stranger(CALLER, place / "s") as caller:
            assert caller.said.startswith("b'HTTP/1.1 403")
        with holdfast.connect(f"unix:{place}/s") as broker:
            assert broker.topics() == ["jobs"]
    finally:
        server.terminate()
        server.communicate()


@needs_root
def test_a_folder_of_another_user_is_refused_to_root_unless_it_is_trusted(place: Path):
    """What root makes there its owner could not use any more; and links of the owner's would lead root anywhere."""
    folder = place / "jobs"
    folder.mkdir()
    folder.chmod(0o755)
    os.chown(folder, STRANGER, STRANGER)
    for way in WAYS.values():
        with pytest.raises(InvalidRequest, match="belongs to nobody, and this process runs as root"):
            way(folder)
    assert os.listdir(folder) == []
    put_as_thread(folder, trust_folder=True)
    with pytest.raises(InvalidRequest, match="belongs to nobody"):
        put_as_thread(folder, trust_folder=False)


@needs_root
@pytest.mark.slow
def test_a_user_uses_a_folder_of_his_own_and_none_of_a_strangers(place: Path):
    his = place / "his"
    his.mkdir()
    for uid, mode in ((USER, 0o755), (USER, 0o775), (STRANGER, 0o755)):  # as umask 002 makes it: the group is his own
        os.chown(his, uid, uid)
        his.chmod(mode)
        for path in his.rglob("*"):
            os.chown(path, uid, uid)
        with stranger(OPENER, his, uid) as user:
            assert user.said == "put"
    theirs = place / "theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    os.chown(theirs, 54321, 54321)
    with stranger(OPENER, theirs, USER) as user:
        assert user.said.startswith("InvalidRequest")
        assert f"it belongs to uid 54321, and this process runs as uid {USER}" in user.said
    assert os.listdir(theirs) == []


def test_who_is_trusted_can_be_said_in_every_way(everybodys: Path, monkeypatch: pytest.MonkeyPatch):
    for way in WAYS.values():
        with pytest.raises(InvalidRequest, match="trust_folder=True"):
            way(everybodys)
        way(everybodys, trust_folder=True)
    put_by_broker(everybodys, settings=BrokerSettings(trust_folder=True))
    with pytest.raises(InvalidRequest, match="every user"):
        put_by_broker(everybodys, settings=BrokerSettings(trust_folder=True), trust_folder=False)
    file = everybodys.parent / "settings.toml"
    file.write_text("[broker]\ntrust_folder = true\n")
    put_by_broker(everybodys, settings_file=file)
    monkeypatch.setenv(TRUST, "true")
    for way in WAYS.values():
        way(everybodys)
    with pytest.raises(InvalidRequest, match="every user"):
        put_as_thread(everybodys, trust_folder=False)
    monkeypatch.setenv(TRUST, "perhaps")
    with pytest.raises(holdfast.BadSettings, match=TRUST):
        put_as_thread(everybodys)


@pytest.mark.slow
def test_a_command_is_told_by_an_option_or_by_a_variable(everybodys: Path):
    refused = run("put", everybodys, "x", "--json")
    assert refused.returncode == 2
    assert json.loads(refused.stderr)["error"]["code"] == "invalid_request"
    assert run("--trust-folder", "put", everybodys, "x").returncode == 0
    assert run("put", everybodys, "x", **{TRUST: "true"}).returncode == 0
    assert run("--trust-folder", "peek", everybodys).returncode == 0
    assert run("check", everybodys).returncode == 0  # only looks


def test_one_who_came_by_the_socket_of_a_trusted_folder_takes_over_there(everybodys: Path):
    owner = holdfast.open(everybodys, trust_folder=True)
    other = holdfast.open(everybodys, trust_folder=True)
    owner.close()
    other.put(BODY)
    assert other.get(timeout=5).body == BODY
    other.close()


def test_a_server_and_other_addresses_have_no_folder_to_trust():
    with pytest.raises(InvalidRequest, match="trust_folder"):
        holdfast.open("http://127.0.0.1:1/jobs", trust_folder=True)
    with pytest.raises(InvalidRequest, match="trust_folder"):
        aio.open_broker("http://127.0.0.1:1", trust_folder=True)
    with pytest.raises(InvalidRequest, match="trust_folder='yes'"):
        holdfast.open("jobs", trust_folder="yes")  # type: ignore[arg-type]


def test_a_socket_with_a_long_path_is_checked_like_any_other(tmp_path: Path):
    folder = tmp_path / ("long" * 40)
    with holdfast.open(folder) as owner, holdfast.open(folder) as other:
        other.put(BODY)
        assert owner.get(timeout=5).body == BODY
    assert len(os.fsencode(socket_of(str(folder)))) > 107
    assert {path.name for path in folder.iterdir()} >= {"lock", "topics"}
