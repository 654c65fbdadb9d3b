"""`python -m bench.grpc`: messages a second over gRPC, and libraries that could have served it.

The server runs on one core, and its client on the others. Streams carry 100 messages of 100 bytes in a request. "By the
CPU it took" is how many the server could do on a core of its own, where others were at work. The libraries answer the
smallest call, with nothing behind it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.goals import Figures, Goal, Sample, run
from bench.harness import missing_modules

_EACH = 100
_MESSAGES = 60_000
_CALLS = 3_000
_AT_ONCE = 32
_BODY = b"x" * 100
_SERVER, *_OTHERS = sorted(os.sched_getaffinity(0))
_NEEDS = ("grpc", "grpc_health", "grpc_reflection")


@contextmanager
def _served(folder: Path) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "holdfast", "serve", str(folder / "data"), "--port", "0", "--grpc-port", "0"]
    server = subprocess.Popen([*command, "--no-console"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().rpartition("grpc://")[2].strip()
        _pin(server.pid, {_SERVER})
        _pin(0, set(_OTHERS) or {_SERVER})
        yield address, server.pid
    finally:
        _pin(0, {_SERVER, *_OTHERS})
        server.terminate()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()


def _pin(pid: int, cores: set[int]) -> None:
    """Let all threads of a process run on these cores only."""
    for thread in Path(f"/proc/{pid or os.getpid()}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def _streams(folder: Path) -> Figures:
    with _served(folder) as (address, pid):
        return asyncio.run(_streamed(address, pid))


def _cpu_s(pid: int) -> float:
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


async def _streamed(address: str, pid: int) -> Figures:
    import grpc

    from holdfast.v1 import holdfast_pb2 as pb
    from holdfast.v1 import holdfast_pb2_grpc as rpc

    async def batches() -> AsyncIterator[Any]:
        for number in range(_MESSAGES // _EACH):
            yield pb.PublishStreamRequest(number=number, queue="jobs", bodies=[_BODY] * _EACH, durability="os")

    async with grpc.aio.insecure_channel(address) as channel:
        queues = rpc.QueueServiceStub(channel)
        await queues.Publish(pb.PublishRequest(queue="jobs", bodies=[_BODY], create=True))
        began, before, stored = time.perf_counter(), _cpu_s(pid), 0
        async for answer in queues.PublishStream(batches()):
            stored += len(answer.stored)
        published_s, publishing_s = time.perf_counter() - began, _cpu_s(pid) - before
        assert stored == _MESSAGES
        stream = queues.Subscribe()
        began, before, taken = time.perf_counter(), _cpu_s(pid), 0
        await stream.write(pb.SubscribeRequest(start=pb.SubscribeStart(queue="jobs", prefetch=20 * _EACH)))
        while taken < _MESSAGES:
            messages = (await stream.read()).messages
            if messages:
                taken += len(messages)
                receipts = [message.receipt for message in messages]
                await stream.write(pb.SubscribeRequest(ack=pb.AckRequest(receipts=receipts, durability="os")))
        taken_s, taking_s = time.perf_counter() - began, _cpu_s(pid) - before
        stream.cancel()
        began = time.perf_counter()
        request = pb.PublishRequest(queue="jobs", bodies=[_BODY], durability="os")
        for _ in range(_CALLS // _AT_ONCE):
            await asyncio.gather(*(queues.Publish(request) for _ in range(_AT_ONCE)))
        calls_s = time.perf_counter() - began
    return {
        "PublishStream": _MESSAGES / published_s,
        "PublishStream, by the CPU it took": _MESSAGES / publishing_s,
        "Subscribe, with acks": _MESSAGES / taken_s,
        "Subscribe, with acks, by the CPU it took": _MESSAGES / taking_s,
        "Publish, one message a call": _CALLS // _AT_ONCE * _AT_ONCE / calls_s,
    }


def _library(kind: str, folder: Path) -> Figures:
    """Calls a second of a server that only echoes, from the same client."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_echo, args=(kind, there), daemon=True)
    server.start()
    try:
        address = here.recv()
        _pin(server.pid or 0, {_SERVER})
        _pin(0, set(_OTHERS) or {_SERVER})
        return {f"{kind}: the smallest call": asyncio.run(_called(address))}
    finally:
        _pin(0, {_SERVER, *_OTHERS})
        server.kill()
        server.join()


async def _called(address: str) -> float:
    import grpc

    async with grpc.aio.insecure_channel(address) as channel:
        echo = channel.unary_unary("/bench.Echo/Call", bytes, bytes)
        await echo(_BODY)
        began = time.perf_counter()
        for _ in range(_CALLS // _AT_ONCE):
            await asyncio.gather(*(echo(_BODY) for _ in range(_AT_ONCE)))
        return _CALLS // _AT_ONCE * _AT_ONCE / (time.perf_counter() - began)


def _echo(kind: str, there: Any) -> None:
    {"grpc.aio": _echo_aio, "grpcio, threads": _echo_threads, "grpclib": _echo_grpclib}[kind](there)


def _echo_aio(there: Any) -> None:
    import grpc
    import uvloop

    async def answer(content: bytes, _: Any) -> bytes:
        return content

    async def serve() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_generic(grpc, answer),))
        there.send(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        await server.wait_for_termination()

    uvloop.run(serve())


def _echo_threads(there: Any) -> None:
    import grpc

    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((_generic(grpc, lambda content, _: content),))
    there.send(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    server.wait_for_termination()


def _generic(grpc: Any, answer: Any) -> Any:
    return grpc.method_handlers_generic_handler("bench.Echo", {"Call": grpc.unary_unary_rpc_method_handler(answer)})


def _echo_grpclib(there: Any) -> None:
    import uvloop
    from google.protobuf.wrappers_pb2 import BytesValue
    from grpclib.const import Cardinality, Handler
    from grpclib.encoding.base import CodecBase
    from grpclib.server import Server

    class Plain(CodecBase):
        __content_subtype__ = "proto"

        def encode(self, message: Any, message_type: Any) -> bytes:
            return bytes(message)

        def decode(self, data: bytes, message_type: Any) -> bytes:
            return data

    class Echo:
        async def answer(self, stream: Any) -> None:
            await stream.send_message(await stream.recv_message())

        def __mapping__(self) -> dict[str, Any]:
            return {"/bench.Echo/Call": Handler(self.answer, Cardinality.UNARY_UNARY, BytesValue, BytesValue)}

    async def serve() -> None:
        server = Server([Echo()], codec=Plain())
        await server.start("127.0.0.1", 0)
        (listening,) = server._server.sockets  # type: ignore[union-attr]
        there.send(f"127.0.0.1:{listening.getsockname()[1]}")
        await server.wait_closed()

    uvloop.run(serve())


MISSING = {"streams": missing_modules(_NEEDS)} | {
    kind: missing_modules((*_NEEDS, *(["grpclib"] if kind == "grpclib" else [])))
    for kind in ("grpc.aio", "grpcio, threads", "grpclib")
}
SAMPLES: dict[str, Sample] = {
    name: _streams if name == "streams" else partial(_library, name) for name, gone in MISSING.items() if not gone
}
GOALS = {
    name + how: Goal(30_000, "/s")
    for name in ("PublishStream", "Subscribe, with acks")
    for how in ("", ", by the CPU it took")
}


def main() -> None:
    """Measure messages a second over gRPC."""
    run("bench.grpc", "Measure messages a second over gRPC, the server on one core.", SAMPLES, GOALS, MISSING)


if __name__ == "__main__":
    main()
