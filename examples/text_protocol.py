"""A protocol of your own: a server that speaks lines of text, on the port that the HTTP server stands on as well.

    PUT <queue> <text>                 STORED <id>                    it is on disk
    GET <queue> [seconds]              MESSAGE <receipt> <text>       it is yours until its lease ends; or EMPTY
    ACK <queue> <receipt>              OK                             it is done
    NACK <queue> <receipt> [reason]    OK                             it comes again later
    STATS <queue>                      READY <n> LEASED <n> DELAYED <n> DEAD <n>
    QUIT                               BYE
                                       ERROR <code> <what is wrong>   to any of them; the connection goes on

A face decodes a line, calls its port, and encodes what comes back. The port knows about leases, retries and disks. It
trusts its caller with arguments, so a face checks those: `holdfast.api.arguments` and `times` help with that.
"""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from holdfast.api.aio.ports import AsyncBrokerPort, AsyncGroupPort
from holdfast.api.arguments import ACK, MessageOutcome, ReceiveRequest, error_text
from holdfast.api.contents import Contents
from holdfast.api.drafts import duration_ms
from holdfast.api.topics import QueueRequest
from holdfast.errors import HoldfastError, InvalidRequest, NotAQueue
from holdfast.local.aio.broker import AsyncLocalBrokerPort
from holdfast.local.opening import open_broker_port

MOST_BYTES = 64 * 1024  # of a line
MOST_WAIT_MS = 60_000  # that GET may ask for
STUCK_S = 30  # until a client that does not read its answers is let go


class TextFace:
    """Answers lines. What it is given may be any broker's port: of a folder here, or of a server elsewhere."""

    def __init__(self, broker: AsyncBrokerPort) -> None:
        self.broker = broker
        self.queues: dict[str, AsyncGroupPort] = {}

    async def answer(self, line: str, client: "Client") -> str:
        """What the line comes to; HoldfastError where it cannot be done."""
        verb, _, rest = line.partition(" ")
        match [verb.upper(), *rest.split(" ", 1)]:
            case ["PUT", name, text]:
                (stored,) = await (await self.queue(name, create=True)).put([text.encode()], None, None)
                return f"STORED {stored.id}"
            case ["GET", name, *seconds]:
                return await self.get(name, seconds[0] if seconds else "0", client)
            case ["ACK", name, receipt]:
                await (await self.queue(name)).settle([receipt], ACK, None)
                return "OK"
            case ["NACK", name, given]:
                receipt, _, reason = given.partition(" ")
                queue = await self.queue(name)
                error = error_text(reason, queue.settings.max_error_chars)
                await queue.settle([receipt], MessageOutcome("nack", why=error), None)
                return "OK"
            case ["STATS", name]:
                stats = await (await self.queue(name)).stats()
                return f"READY {stats.ready} LEASED {stats.leased} DELAYED {stats.delayed} DEAD {stats.dead}"
        raise InvalidRequest("this is none of PUT, GET, ACK, NACK, STATS and QUIT, or it lacks what they need")

    async def get(self, name: str, seconds: str, client: "Client") -> str:
        try:
            wait_ms = duration_ms(float(seconds), "seconds", maximum_ms=MOST_WAIT_MS)
        except ValueError:
            raise InvalidRequest("GET waits for a number of seconds, such as 1.5") from None
        queue = await self.queue(name)
        # Detached: nothing here holds it but its lease, so that any connection may settle it, by its receipt.
        taken = await queue.take(ReceiveRequest(1, wait_ms / 1000, holder=client.name, detached=True))
        if not taken:
            return "EMPTY"
        if client.reader.at_eof() or client.writer.is_closing():  # it hung up: nobody should wait for its lease
            await queue.defer(taken[0], 0)
            return "EMPTY"
        message: Contents[bytes] = Contents(taken[0].home, queue.bodies, taken[0].record)
        # Others may put to the queue what no line can hold. It fails like any message that cannot be handled.
        if message.size > MOST_BYTES or (text := one_line(message.raw)) is None:
            await queue.nack(taken, None, "it is not a line of text")
            raise InvalidRequest(f"message {message.id} is not a line of text; it was given back as failed")
        receipt = await asyncio.to_thread(queue.receipt, taken[0])  # the first one makes the folder's key, on disk
        return f"MESSAGE {receipt} {text}"

    async def queue(self, name: str, *, create: bool = False) -> AsyncGroupPort:
        """The port of a queue, which stays open; anew where the queue was deleted meanwhile."""
        found = self.queues.get(name)
        if found is None or found.closed:
            try:
                found = self.queues[name] = await self.broker.queue(QueueRequest(name=name, create=create))
            except NotAQueue:
                raise NotAQueue(f"there is no queue {name}; the first PUT makes it") from None
        return found


class Client:
    """One connection: a task reads a line, answers it, and waits until that is sent. It waits for nobody else."""

    def __init__(self, face: TextFace, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.face, self.reader, self.writer = face, reader, writer
        self.name = "text {}:{}".format(*writer.get_extra_info("peername"))

    async def talk(self) -> None:
        try:
            said = ""
            while said != "BYE" and (line := await self.next_line()) != b"":
                said = await self.answered(line)
                self.writer.write(said.encode() + b"\n")
                async with asyncio.timeout(STUCK_S):
                    await self.writer.drain()
            self.writer.close()
        except (OSError, TimeoutError):
            pass  # it is gone, or does not read: what it holds comes back when the lease ends
        finally:
            if not self.writer.is_closing():
                self.writer.transport.abort()

    async def next_line(self) -> bytes | None:
        """The next line with its end; None for one that is too long, b"" where there is none any more."""
        fits = True
        while True:
            try:
                line = await self.reader.readuntil()
                return line if fits else None
            except asyncio.LimitOverrunError as error:  # read on to its end: the rest of it is not another line
                await self.reader.readexactly(error.consumed)
                fits = False
            except asyncio.IncompleteReadError:
                return b""  # a line that was cut off is not what somebody meant to say

    async def answered(self, line: bytes | None) -> str:
        """The answer to a line, or the error: always one line, and never a traceback."""
        try:
            if line is None or (text := one_line(line.removesuffix(b"\n").removesuffix(b"\r"))) is None:
                raise InvalidRequest(f"a line is UTF-8, of at most {MOST_BYTES} bytes; nothing was done")
            return "BYE" if text.upper() == "QUIT" else await self.face.answer(text, self)
        except HoldfastError as error:
            return f"ERROR {error.code} {' '.join(str(error).split())}"
        except Exception:  # a fault of ours: the log has all of it, the client enough
            logging.getLogger("text_protocol").exception("a line could not be answered")
            return "ERROR internal the server has made a mistake; its log says more"


@asynccontextmanager
async def served(broker: AsyncBrokerPort, port: int = 0) -> AsyncIterator[int]:
    """Serve a broker's queues on the loopback address, on this port or a free one; gives the port."""
    face, talks = TextFace(broker), set[asyncio.Task[None]]()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.add(talk := asyncio.create_task(Client(face, reader, writer).talk()))
        talk.add_done_callback(talks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", port, limit=MOST_BYTES)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.gather(*(talk for talk in talks if talk.cancel()), return_exceptions=True)


def one_line(body: bytes) -> str | None:
    try:
        return None if b"\n" in body else body.decode()
    except UnicodeDecodeError:
        return None


async def dialogue(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def say(line: str) -> list[str]:
        writer.write(line.encode() + b"\n")
        answer = (await reader.readline()).decode().rstrip()
        print(f"> {line}\n{answer}")
        return answer.split()

    await say("PUT orders two coffees")
    _, receipt, *_ = await say("GET orders 5")
    for line in (f"ACK orders {receipt}", f"ACK orders {receipt}", "GET orders"):
        await say(line)
    _, ready, _, leased, *_ = await say("STATS orders")
    await say("QUIT")
    writer.close()
    print(f"one message was put, taken and acked; {ready} are ready, {leased} are leased")


async def main(folder: str) -> None:
    broker = await asyncio.to_thread(open_broker_port, AsyncLocalBrokerPort, folder)
    try:
        async with served(broker) as port:
            await dialogue(port)
    finally:
        await broker.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(main(f"{temporary}/data"))
