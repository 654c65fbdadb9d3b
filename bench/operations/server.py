"""Servers: one message a call, a hundred a call, at a steady rate, and with nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from bench.harness import OURS, Case, Host, Operation, Timed
from bench.operations.latency import latency
from bench.operations.puts import put_each, put_many
from bench.operations.takes import take_each, take_many
from bench.queues import Queue
from bench.queues.nats_jetstream import NatsJetStream
from bench.queues.redis_stream import RedisStream, RedisStreamSynced
from bench.queues.server import keep_apart
from bench.scale import BATCH, Scale
from bench.server.beanstalk import Beanstalkd, BeanstalkdSynced
from bench.server.idle import idle_polls
from bench.server.ours import HoldfastServer, HoldfastServerSynced, HoldfastServerTasks, HoldfastServerTasksSynced
from bench.server.rabbit import RabbitMqRunning

_RATE = 1_000
_PUTTERS = 4
_ROUNDS = 3

_PUT = Operation(
    "server: put",
    "One message a call, over the loopback; the server has one core, its client another.",
    "messages",
    _ROUNDS,
)
_PUT_MANY = Operation(
    f"server: put many ({BATCH})",
    f"{BATCH} messages a call; those without such a call are left out.",
    "messages",
    _ROUNDS,
)
_TAKE = Operation(
    "server: get + ack", "One message at a time, 1,000 waiting; the puts are not timed.", "messages", _ROUNDS, "ack"
)
_TAKE_MANY = Operation(
    f"server: get + ack many ({BATCH})",
    f"{BATCH} messages a call; those without such a call are left out.",
    "messages",
    _ROUNDS,
    "ack",
)
_LATENCY = Operation(
    f"server: latency at {_RATE:,}/s",
    f"From when a put was due to its get: {_PUTTERS} connections put, one message a call; another takes what is there, "
    f"up to {BATCH} together where there is a call for that, and acks it before the next get.",
    "latency",
    2,
)
IDLE = Operation("server: idle long polls", "Clients that wait for a message, which does not come.", "idle", 1)

_MANY: tuple[type[Queue], ...] = (HoldfastServer, HoldfastServerSynced, RedisStream, RedisStreamSynced, NatsJetStream)
_ONE_BY_ONE: tuple[type[Queue], ...] = (*_MANY, RabbitMqRunning, Beanstalkd, BeanstalkdSynced)
_AT_ONCE: tuple[type[Queue], ...] = (HoldfastServerTasks, HoldfastServerTasksSynced)

_Prepare = Callable[[type[Queue], Scale, Path], AbstractContextManager[Timed]]


def cases(scale: Scale) -> list[Case]:
    """Every server in every operation; those that put from tasks only where a call is timed."""
    found: list[Case] = []
    for operation, prepare, servers in (
        (_PUT, put_each, _ONE_BY_ONE + _AT_ONCE),
        (_PUT_MANY, put_many, _MANY),
        (_TAKE, take_each, (*_ONE_BY_ONE, HoldfastServerTasks)),
        (_TAKE_MANY, take_many, _MANY),
        (_LATENCY, partial(latency, _RATE, putters=_PUTTERS, most=BATCH), _ONE_BY_ONE),
    ):
        found += [_case(operation, server, prepare, scale) for server in servers]
    idle = Case(IDLE, OURS, partial(idle_polls, scale), needs=HoldfastServer.needs)
    return [*found, idle]


def _case(operation: Operation, server: type[Queue], prepare: _Prepare, scale: Scale) -> Case:
    survives = server.survives if operation.promise == "put" else server.ack_survives
    host: Host | None = getattr(server, "host", None)
    return Case(
        operation,
        server.name,
        partial(_apart, prepare, server, scale),
        survives,
        server.note,
        server.needs,
        server.programs,
        host=host,
    )


@contextmanager
def _apart(prepare: _Prepare, server: type[Queue], scale: Scale, folder: Path) -> Iterator[Timed]:
    keep_apart()
    with prepare(server, scale, folder) as timed:
        yield timed
