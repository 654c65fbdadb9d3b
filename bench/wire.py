"""`python -m bench.wire`: what one call to the server costs, against its goal, beside other servers where installed.

Where `python -m bench` compares whole programs by wall time, this takes calls apart: the wall time that a caller sees,
the CPU time of the server, and that of the client. The server has one core, the callers another. It shows minima and
medians over the rounds; on a busy machine the minimum is the figure, since others only ever add to it. To compare two
versions, run them in turn: `PYTHONPATH=OLD/src python -m bench.wire`, then the new one, and again.

The rows of the bare echo are a floor for this machine: a server that parses, stores and knows nothing sends as many
bytes back as ours does, with the same event loop. On two cores, most of such a call is waking up the other core; the
rows of one core have caller and server on the same one.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from bench.goals import Figures, Goal, Sample, run
from bench.harness import missing_modules
from bench.operations.latency import quantile, wake_up_in_time
from bench.programs import missing_programs
from bench.queues import Queue
from bench.queues.nats_jetstream import NatsJetStream
from bench.queues.postgres_skip_locked import PostgresSkipLocked
from bench.queues.rabbitmq import RabbitMq
from bench.queues.redis_stream import RedisStream, RedisStreamSynced
from bench.queues.server import begin_server, beside_server, keep_apart
from bench.server.beanstalk import Beanstalkd, BeanstalkdSynced
from bench.server.ours import HoldfastServer

_BODY = os.urandom(100)
_COUNT = 2_000
_MANY = 100
_SLICES = 40
_RATE = 1_000
_SECONDS = 3
_QUEUE = "/v1/queues/jobs"


GOALS = {
    "bare echo: a call": Goal(None),
    "bare echo: a call, CPU of the server": Goal(None),
    "bare echo: 32 connections": Goal(None, "/s"),
    "raw: put": Goal(20),
    "raw: put, CPU of the server": Goal(None),
    "raw: get + ack": Goal(40),
    "raw: get + ack, CPU of the server": Goal(None),
    "threads: put": Goal(35),
    "threads: put, CPU of the server": Goal(None),
    "threads: put, CPU of the client": Goal(None),
    "threads: get + ack": Goal(70),
    "threads: get + ack, CPU of the server": Goal(None),
    "threads: get + ack, CPU of the client": Goal(None),
    "tasks: put": Goal(35),
    "tasks: put, CPU of the server": Goal(None),
    "tasks: put, CPU of the client": Goal(None),
    "tasks: get + ack": Goal(70),
    "tasks: get + ack, CPU of the server": Goal(None),
    "tasks: get + ack, CPU of the client": Goal(None),
    "one client thread: put": Goal(12_000, "/s"),
    "one client thread: get + ack": Goal(7_000, "/s"),
    "one core: bare echo": Goal(None),
    "one core: raw: put": Goal(20),
    "one core: raw: get + ack": Goal(40),
    "one core: threads: put": Goal(35),
    "one core: threads: get + ack": Goal(70),
    "32 connections: put": Goal(40_000, "/s"),
    "32 connections: put, CPU of the server": Goal(25),
    "32 connections: get + ack": Goal(20_000, "/s"),
    "32 connections: get + ack, CPU of the server": Goal(50),
    "64 connections, fsync: put": Goal(25_000, "/s"),
    "64 connections, fsync: put, CPU of the server": Goal(40),
    "batches of 100: put": Goal(400_000, "/s"),
    "batches of 100: put, CPU of the server": Goal(None),
    "batches of 100: put, CPU of the client": Goal(None),
    "batches of 100: get + ack": Goal(200_000, "/s"),
    "batches of 100: get + ack, CPU of the server": Goal(None),
    "batches of 100: get + ack, CPU of the client": Goal(None),
    "latency, p50": Goal(0.16, "ms"),
    "latency, p99": Goal(0.5, "ms"),
    "latency, fsync, p50": Goal(0.35, "ms"),
    "latency, fsync, p99": Goal(1, "ms"),
    "latency, shared folder, p50": Goal(0.16, "ms"),
    "latency, shared folder, p99": Goal(0.5, "ms"),
    "memory: an idle connection": Goal(None, "bytes"),
    "memory: a call that waits, with its connection": Goal(13_000, "bytes"),
    "memory: a leased message of a batch": Goal(None, "bytes"),
    "memory: a leased message taken alone": Goal(None, "bytes"),
}


class _Process:
    """A server's process: where it listens, and what it has used."""

    def __init__(self, pid: int, address: tuple[str, int]) -> None:
        self.address = address
        self._tasks = Path(f"/proc/{pid}/task")

    def cpu_ns(self) -> int:
        return sum(int((task / "schedstat").read_text().split()[0]) for task in self._tasks.iterdir())

    def timed(self, name: str, work: Callable[[], object], count: int, *, rate: bool = False) -> Figures:
        """Do the work: by wall time, the CPU time of the server, and of this process."""
        server, client, began = self.cpu_ns(), time.process_time_ns(), time.perf_counter_ns()
        work()
        wall, used, mine = (
            time.perf_counter_ns() - began,
            self.cpu_ns() - server,
            time.process_time_ns() - client,
        )
        found = {name: 1e9 * count / wall if rate else wall / 1000 / count}
        for whose, ns in (("server", used), ("client", mine)):
            if f"{name}, CPU of the {whose}" in GOALS:
                found[f"{name}, CPU of the {whose}"] = ns / 1000 / count
        return found


class _Served(_Process):
    """A server of ours."""

    def __init__(self, folder: Path) -> None:
        self.side = HoldfastServer(len(_BODY))
        self.side.open(folder)
        assert self.side.server is not None
        super().__init__(self.side.server.process.pid, self.side.address)


@contextmanager
def _served(folder: Path) -> Iterator[_Served]:
    made = _Served(folder)
    try:
        yield made
    finally:
        made.side.close()


class _Raw:
    """A connection without a client: bytes out, bytes in."""

    def __init__(self, served: _Process) -> None:
        self.connection = socket.create_connection(served.address, 30)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.common = f"host: 127.0.0.1:{served.address[1]}\r\n"

    def request(self, verb: str, body: bytes, kind: str = "json") -> bytes:
        """A request as bytes."""
        head = f"POST {_QUEUE}/{verb} HTTP/1.1\r\n{self.common}content-type: application/{kind}\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    def call(self, request: bytes) -> bytes:
        """The answer, which comes in one piece, as small ones do."""
        self.connection.sendall(request)
        return self.connection.recv(65536)

    def ack(self, answer: bytes) -> bytes:
        """The request that acks what was taken."""
        return self.request("ack", b'{"receipts":["%b"]}' % _receipt(answer))

    def close(self) -> None:
        self.connection.close()


def _receipt(answer: bytes) -> bytes:
    start = answer.index(b'"receipt":"') + 11
    return answer[start : answer.index(b'"', start)]


def _checked(answer: bytes) -> bytes:
    if answer[9:11] != b"20":
        raise ValueError(f"the server refused a call: {answer!r}")
    return answer


def _raw(folder: Path) -> Figures:
    with _served(folder) as served:
        raw = _Raw(served)
        put, get = _put_request(raw), raw.request("dequeue", b'{"wait":0}')

        def puts() -> None:
            for _ in range(_COUNT):
                _checked(raw.call(put))

        def takes() -> None:
            for _ in range(_COUNT):
                _checked(raw.call(raw.ack(raw.call(get))))

        puts()
        takes()
        found = served.timed("raw: put", puts, _COUNT) | served.timed("raw: get + ack", takes, _COUNT)
        raw.close()
        return found


_ECHOED = 274  # bytes of our answer to a put


@contextmanager
def _echoing() -> Iterator[_Process]:
    """A server that does nothing: the same bytes to and fro, and the same event loop."""
    listening = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        try:
            begin_server()
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(_echo_forever(listening))
        finally:
            os._exit(0)
    try:
        yield _Process(child, listening.getsockname())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        listening.close()


def _put_request(raw: _Raw) -> bytes:
    return raw.request("enqueue?durability=os", _BODY, "octet-stream")


def _echo(_folder: Path) -> Figures:
    """What a call costs that does nothing."""
    with _echoing() as served:
        raw, crowd = _Raw(served), _Crowd(served, 32)
        put = _put_request(raw)

        def calls() -> None:
            for _ in range(_COUNT):
                _checked(raw.call(put))

        calls()
        found = served.timed("bare echo: a call", calls, _COUNT)
        many = partial(crowd.run, 5 * _COUNT, put)
        many()
        found |= served.timed("bare echo: 32 connections", many, 5 * _COUNT, rate=True)
        crowd.close()
        raw.close()
        return found


async def _echo_forever(listening: socket.socket) -> None:
    answer = b"HTTP/1.1 201 Created\r\n".ljust(_ECHOED, b"x")

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport: Any = transport

        def data_received(self, _: bytes) -> None:
            self.transport.write(answer)

    server = await asyncio.get_running_loop().create_server(Echo, sock=listening)
    await server.serve_forever()


def _threads(folder: Path) -> Figures:
    with _served(folder) as served:
        queue = served.side.queue

        def puts() -> None:
            for _ in range(_COUNT):
                queue.put(_BODY)

        def takes() -> None:
            for _ in range(_COUNT):
                queue.get().ack()

        puts()
        takes()
        found = served.timed("threads: put", puts, _COUNT) | served.timed("threads: get + ack", takes, _COUNT)
        found["one client thread: put"] = 1e6 / found["threads: put"]
        found["one client thread: get + ack"] = 1e6 / found["threads: get + ack"]
        return found


def _tasks(folder: Path) -> Figures:
    async def run(served: _Served) -> Figures:
        async with await holdfast.aio.connect(served.side.url, durability="os") as broker:
            queue = await broker.queue("jobs")
            found: Figures = {}

            async def puts() -> None:
                for _ in range(_COUNT):
                    await queue.put(_BODY)

            async def takes() -> None:
                for _ in range(_COUNT):
                    await (await queue.get()).ack()

            for name, work in (("", puts), ("", takes), ("tasks: put", puts), ("tasks: get + ack", takes)):
                started: list[Any] = [served.cpu_ns(), time.process_time_ns(), time.perf_counter_ns()]
                await work()
                wall, mine = time.perf_counter_ns() - started[2], time.process_time_ns() - started[1]
                if name:
                    found[name] = wall / 1000 / _COUNT
                    found[f"{name}, CPU of the server"] = (served.cpu_ns() - started[0]) / 1000 / _COUNT
                    found[f"{name}, CPU of the client"] = mine / 1000 / _COUNT
            return found

    with _served(folder) as served, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run(served))


def _one_core(folder: Path) -> Figures:
    """Calls one at a time, with caller and server on the same core: neither has to wake up another core."""
    found: Figures = {}
    with beside_server():
        with _echoing() as echoing:
            raw = _Raw(echoing)
            put = _put_request(raw)
            found["bare echo"] = _best_us(lambda: raw.call(put))
            raw.close()
        with _served(folder) as served:
            raw, queue = _Raw(served), served.side.queue
            put, get = _put_request(raw), raw.request("dequeue", b'{"wait":0}')
            found["raw: put"] = _best_us(lambda: _checked(raw.call(put)))
            found["raw: get + ack"] = _best_us(lambda: _checked(raw.call(raw.ack(raw.call(get)))))
            found["threads: put"] = _best_us(lambda: queue.put(_BODY))
            found["threads: get + ack"] = _best_us(lambda: queue.get().ack())
            raw.close()
    return {f"one core: {name}": us for name, us in found.items()}


def _best_us(call: Callable[[], object]) -> float:
    """The wall time of a call in the best of many short slices, which fall between the turns of other programs."""
    slices = []
    for _ in range(_SLICES):
        began = time.perf_counter_ns()
        for _ in range(_COUNT // _SLICES):
            call()
        slices.append((time.perf_counter_ns() - began) / 1000 / (_COUNT // _SLICES))
    return min(slices)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Crowd:
    """Many connections from one thread, each with one call at a time."""

    def __init__(self, served: _Process, size: int) -> None:
        self.all = [_Raw(served) for _ in range(size)]
        self.poll = selectors.EpollSelector()
        for each in self.all:
            self.poll.register(each.connection, selectors.EVENT_READ, each)

    def run(self, count: int, first: bytes, then: Callable[[_Raw, bytes], bytes] | None = None) -> None:
        """So many calls; each is followed by another that is made of its answer."""
        begun = ended = 0
        second: set[_Raw] = set()
        for each in self.all:
            each.connection.sendall(first)
            begun += 1
        while ended < count:
            for key, _ in self.poll.select():
                each = key.data
                answer = _checked(each.connection.recv(65536))
                if then is not None and each not in second:
                    second.add(each)
                    each.connection.sendall(then(each, answer))
                    continue
                second.discard(each)
                ended += 1
                if begun < count:
                    begun += 1
                    each.connection.sendall(first)

    def close(self) -> None:
        self.poll.close()
        for each in self.all:
            each.close()


def _crowd(folder: Path) -> Figures:
    with _served(folder) as served:
        crowd = _Crowd(served, 32)
        put = _put_request(crowd.all[0])
        get = crowd.all[0].request("dequeue", b'{"wait":0}')
        count = 5 * _COUNT

        def puts() -> None:
            crowd.run(count, put)

        def takes() -> None:
            crowd.run(count, get, _Raw.ack)

        puts()
        takes()
        found = served.timed("32 connections: put", puts, count, rate=True)
        found |= served.timed("32 connections: get + ack", takes, count, rate=True)
        crowd.close()
        return found


def _synced(folder: Path) -> Figures:
    with _served(folder) as served:
        crowd = _Crowd(served, 64)
        put = crowd.all[0].request("enqueue?durability=fsync", _BODY, "octet-stream")

        def puts() -> None:
            crowd.run(5 * _COUNT, put)

        puts()
        found = served.timed("64 connections, fsync: put", puts, 5 * _COUNT, rate=True)
        crowd.close()
        return found


def _batches(folder: Path) -> Figures:
    with _served(folder) as served:
        queue, bodies, count = served.side.queue, [_BODY] * _MANY, 10 * _COUNT

        def puts() -> None:
            for _ in range(count // _MANY):
                queue.put_many(bodies)

        def takes() -> None:
            for _ in range(count // _MANY):
                queue.ack_many(queue.get_many(_MANY))

        puts()
        takes()
        found = served.timed("batches of 100: put", puts, count, rate=True)
        return found | served.timed("batches of 100: get + ack", takes, count, rate=True)


def _memory(folder: Path) -> Figures:
    """The memory that the server writes to for each connection, waiting call and leased message."""
    held, many = 400, 100
    with _served(folder) as served, ExitStack() as stack:
        assert served.side.server is not None
        whole, queue = served.side.server.process.pid, served.side.queue

        def opened(count: int) -> list[_Raw]:
            found = [_Raw(served) for _ in range(count)]
            for each in found:
                stack.callback(each.close)
                _checked(each.call(each.request("dequeue", b'{"wait":0}')))
            return found

        opened(50)
        start = _private_bytes(whole)
        waiting = opened(held)
        idle = _private_bytes(whole)
        for each in waiting:
            each.connection.sendall(each.request("dequeue", b'{"wait":120}'))
        deadline = time.monotonic() + 30
        while _waiters(served) < held and time.monotonic() < deadline:
            time.sleep(0.05)
        waited = _private_bytes(whole)
        stack.close()
        for _ in range(held // 10):
            queue.put_many([_BODY] * 1_000)
        taken = queue.get_many(1_000, detached=True)
        before = _private_bytes(whole)
        for _ in range(many):
            taken += queue.get_many(_MANY, detached=True)
        in_batches = _private_bytes(whole)
        for _ in range(_COUNT):
            taken.append(queue.get(detached=True))
        alone = _private_bytes(whole)
    return {
        "memory: an idle connection": (idle - start) / held,
        "memory: a call that waits, with its connection": (waited - start) / held,
        "memory: a leased message of a batch": (in_batches - before) / (many * _MANY),
        "memory: a leased message taken alone": (alone - in_batches) / _COUNT,
    }


def _waiters(served: _Served) -> int:
    with urllib.request.urlopen(f"{served.side.url}/v1/admin/status") as answer:
        return int(json.load(answer)["waiters"])


def _private_bytes(pid: int) -> int:
    """The memory of a process that no other has and that it has written to: not what it only reads from files."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("Private_Dirty:")).split()[1])


def _latency(name: str, take: Callable[[], tuple[int, bytes]], put: Callable[[bytes], object]) -> Figures:
    """A child process puts at a steady rate; here each message is taken as it comes, and acked."""
    count = _RATE * _SECONDS
    child = os.fork()
    if child == 0:
        try:
            wake_up_in_time()
            due = time.monotonic()
            for _ in range(count):
                due += 1 / _RATE
                time.sleep(max(due - time.monotonic(), 0))
                put(b"%020d" % time.monotonic_ns() + _BODY[20:])
        finally:
            os._exit(0)
    ages = []
    for _ in range(count):
        came_ns, body = take()
        ages.append((came_ns - int(body[:20])) / 1e6)
    os.waitpid(child, 0)
    ages = sorted(ages[count // 10 :])
    return {f"{name}, p50": quantile(ages, 0.5), f"{name}, p99": quantile(ages, 0.99)}


def _taking(queue: Any) -> Callable[[], tuple[int, bytes]]:
    def take() -> tuple[int, bytes]:
        message = queue.get(timeout=10)
        came_ns = time.monotonic_ns()
        message.ack()
        return came_ns, message.body

    return take


def _server_latency(name: str, durability: str, folder: Path) -> Figures:
    with _served(folder) as served:
        other: Any = None

        def put(body: bytes) -> None:
            nonlocal other
            if other is None:
                other = holdfast.connect(served.side.url, durability=durability).queue("jobs")  # type: ignore[arg-type]
            other.put(body)

        return _latency(name, _taking(served.side.queue), put)


def _shared_latency(folder: Path) -> Figures:
    """The parent owns the folder; the child that puts opens it, too, and comes in by the owner's socket."""
    with holdfast.open(folder / "data", durability="os") as queue:
        other: Any = None

        def put(body: bytes) -> None:
            nonlocal other
            if other is None:
                other = holdfast.open(folder / "data", durability="os")
            other.put(body)

        return _latency("latency, shared folder", _taking(queue), put)


def _peer(kind: type[Queue], folder: Path) -> Figures:
    """Another server, by its own client for threads: the rates of one client thread, and how soon a message comes."""
    peer = kind(len(_BODY))
    peer.open(folder)
    name, batches = kind.name, kind in BATCHED
    try:
        peer.put_each([_BODY] * 100)
        peer.take_each(100)
        found = _rates(name, lambda: peer.put_each([_BODY] * _COUNT), lambda: peer.take_each(_COUNT))
        if batches:
            bodies, calls = [_BODY] * _MANY, _COUNT // _MANY
            found |= _rates(
                f"{name}, batches of {_MANY}",
                lambda: [peer.put_many(bodies) for _ in range(calls)],
                lambda: [peer.take_many(_MANY) for _ in range(calls)],
            )
        other: Any = None

        def put(body: bytes) -> None:
            nonlocal other
            other = peer.other_side() if other is None else other
            other.put(body)

        def take() -> tuple[int, bytes]:
            taken = peer.get(10)
            if taken is None:
                raise LookupError(f"{name} lost a message")
            came_ns = time.monotonic_ns()
            peer.ack(taken.receipt)
            return came_ns, taken.body

        return found | _latency(f"{name}: latency", take, put)
    finally:
        peer.close()


def _rates(name: str, put: Callable[[], object], take: Callable[[], object]) -> Figures:
    began = time.perf_counter()
    put()
    between = time.perf_counter()
    take()
    ended = time.perf_counter()
    return {f"{name}: put": _COUNT / (between - began), f"{name}: get + ack": _COUNT / (ended - between)}


PEERS: tuple[type[Queue], ...] = (
    RedisStream,
    RedisStreamSynced,
    Beanstalkd,
    BeanstalkdSynced,
    NatsJetStream,
    RabbitMq,
    PostgresSkipLocked,
)
BATCHED = frozenset({RedisStream, RedisStreamSynced, NatsJetStream, PostgresSkipLocked})
GOALS |= {f"{kind.name}: latency, {which}": Goal(None, "ms") for kind in PEERS for which in ("p50", "p99")}
MISSING = {kind.name: [*missing_programs(kind.programs), *missing_modules(kind.needs)] for kind in PEERS}

SAMPLES: dict[str, Sample] = {
    "echo": _echo,
    "raw": _raw,
    "threads": _threads,
    "tasks": _tasks,
    "one core": _one_core,
    "crowd": _crowd,
    "synced": _synced,
    "batches": _batches,
    "latency": partial(_server_latency, "latency", "os"),
    "latency, fsync": partial(_server_latency, "latency, fsync", "fsync"),
    "latency, shared folder": _shared_latency,
    "memory": _memory,
    **{kind.name: partial(_peer, kind) for kind in PEERS if not MISSING[kind.name]},
}


def main() -> None:
    """Measure what calls to the server cost, and show it beside the goals."""
    keep_apart()
    run("bench.wire", "Measure what calls to the server cost, and show it beside the goals.", SAMPLES, GOALS, MISSING)


if __name__ == "__main__":
    main()
