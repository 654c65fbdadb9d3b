"""What the producers for threads and for tasks share: messages are gathered, and a thread sends them in batches."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Final, TypeAlias

import msgspec

from holdfast.api.bodies import Bodies
from holdfast.api.drafts import Stored
from holdfast.broker.folder.layout import check_name, check_topic_name
from holdfast.broker.partition import Draft
from holdfast.broker.routing import RoundRobin
from holdfast.client.calling import Caller
from holdfast.client.client import Client
from holdfast.client.publishing import Known, Publishing, check_places, is_loose, route_of
from holdfast.client.sequences import Identity
from holdfast.client.ways import run
from holdfast.env import Clock, close_in_children, end_at_exit
from holdfast.errors import Closed, HoldfastError, InvalidRequest, QueueFull
from holdfast.membership.assignment import TopicPartition
from holdfast.protocol import messages as wire
from holdfast.settings import ProducerSettings

logger = logging.getLogger(__name__)

Answer: TypeAlias = Future[Stored | None]

_COST: Final = 64  # what a message takes besides its bytes
_NAMED_STICK: Final = 100


class Parcel(msgspec.Struct):
    """One message on its way."""

    message: wire.NewMessage
    size: int
    loose: bool
    answer: Answer
    seen: bool = False


class RemoteProducing:
    """One producer: its messages are gathered by partition, and leave each partition's line in order."""

    def __init__(
        self,
        client: Client,
        settings: ProducerSettings,
        *,
        name: str | None = None,
        resume: bool = False,
        body_type: Any = None,
    ) -> None:
        if not isinstance(resume, bool):
            raise InvalidRequest(f"resume={resume!r} cannot be used: give True or False")
        if (name is not None or resume) and not settings.idempotent:
            raise InvalidRequest("a producer with a name is idempotent: leave out idempotent=False, or the name")
        if resume and name is None:
            raise InvalidRequest("resume=True needs a name: it goes on where the last producer of that name had got to")
        self.settings = settings
        self.name = None if name is None else check_name(name, "producer")
        self._client = client
        self._clock: Clock = client.world.clock
        self._bodies = Bodies(body_type)
        self._publishing = client.publishing  # whoever asks looks there; the thread has connections of its own
        self._lines: dict[TopicPartition, deque[Parcel]] = {}
        self._turns: dict[str, RoundRobin] = {}
        self._bytes = 0
        self._closed = False
        self._failed: list[Parcel] = []
        self._changed = threading.Condition()
        self._sender = Sender(client.beside, settings, self.name, resume=resume)
        self._thread: threading.Thread | None = None
        self._hurry = 0
        close_in_children(self)
        end_at_exit(self)

    @property
    def closed(self) -> bool:
        return self._closed or self._client.caller.closed

    def __repr__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return (
            f"<{type(self).__name__}{name} at {self._client.caller.address.text}{' (closed)' if self.closed else ''}>"
        )

    def disown(self) -> None:
        """In a child after a fork: the parent sends what is left."""
        self._closed = True
        self._lines = {}
        self._changed = threading.Condition()

    def end(self) -> None:
        """The program ends, and nobody closed us: send what is left, for as long as a send would have waited."""
        if not self._closed and not self._client.caller.closed:
            try:
                self._finish(self.settings.block_ms / 1000)
            except HoldfastError as error:
                logger.error("messages were not stored at the end of the program: %s", error)

    def _check_open(self) -> None:
        self._client.caller.check_open()
        if self._closed:
            raise Closed("this producer is closed; make a new one")
        if self._sender.failure is not None:
            raise Closed(f"the producer has ended with an error: {self._sender.failure}. Make a new one of its name")

    async def _prepared(
        self, topic: str, messages: Iterable[Any], partition: int | None
    ) -> tuple[Known, list[tuple[wire.NewMessage, Draft]]]:
        """Messages that are checked, for a topic that is there."""
        self._check_open()
        given, drafts = self._publishing.messages(messages, self._bodies, "send_many")
        known = await self._publishing.look(check_topic_name(topic))
        check_places(topic, known, partition)
        return known, list(zip(given, drafts, strict=True))

    def _place(
        self, topic: str, known: Known, message: wire.NewMessage, draft: Draft, partition: int | None
    ) -> tuple[TopicPartition, Parcel]:
        turns = self._turns.get(topic)
        if turns is None:
            stick = _NAMED_STICK if self.name else self.settings.batch_messages
            turns = self._turns.setdefault(topic, RoundRobin(stick))
        number = route_of(known.count or 1, draft, turns) if partition is None else partition
        size = len(draft.value) + _COST + (0 if draft.key is None else len(draft.key))
        return (topic, number), Parcel(message, size, is_loose(message), Future())

    def _add(self, place: TopicPartition, parcel: Parcel) -> Answer:
        """Put it into its line, as soon as there is room."""
        with self._changed:
            if self._bytes and self._bytes + parcel.size > self.settings.buffer_bytes:
                self._hurry += 1
                self._changed.notify_all()
                room = self._changed.wait_for(
                    lambda: self._closed or self._bytes + parcel.size <= self.settings.buffer_bytes or not self._bytes,
                    self.settings.block_ms / 1000,
                )
                self._hurry -= 1
                if not room:
                    raise self._full()
            self._check_open()
            self._lines.setdefault(place, deque()).append(parcel)
            self._bytes += parcel.size
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="holdfast-producer", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if self.settings.acks == "none":
            nothing: Answer = Future()
            nothing.set_result(None)
            parcel.seen = True
            return nothing
        return parcel.answer

    def _full(self) -> QueueFull:
        return QueueFull(
            f"the producer's buffer of {self.settings.buffer_bytes} bytes is full, and too little was stored within "
            f"{self.settings.block_ms} ms. The message was not sent; send more slowly, or raise buffer_bytes or "
            "block_ms"
        )

    def _run(self) -> None:
        """The thread: what is gathered goes out, until it is closed and nothing is left."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._lines))
                if not self._lines:
                    return
                if self.settings.linger_ms and not self._closed and not self._hurry:
                    self._changed.wait_for(lambda: self._closed or self._hurry > 0, self.settings.linger_ms / 1000)
                lines = {place: self._some(line) for place, line in self._lines.items()}
            for place, parcels in lines.items():
                self._send(place, parcels)

    def _some(self, line: deque[Parcel]) -> list[Parcel]:
        """The first ones of a line that may go together."""
        found: list[Parcel] = []
        size = 0
        for parcel in itertools.islice(line, min(self.settings.batch_messages, wire.MOST_MESSAGES)):
            if found and (parcel.loose != found[0].loose or size + parcel.size > self.settings.batch_bytes):
                break
            found.append(parcel)
            size += parcel.size
        return found

    def _send(self, place: TopicPartition, parcels: list[Parcel]) -> None:
        stored: list[Stored | None] = []
        error: BaseException | None = None
        try:
            stored = self._sender.send(place, [parcel.message for parcel in parcels], loose=parcels[0].loose)
        except Exception as failure:  # whatever it was: those who wait must hear of it
            error = failure
            if self.settings.acks == "none":
                logger.warning("messages not stored", extra={"topic": place[0], "error": str(failure)})
        with self._changed:
            line = self._lines.get(place)
            for _ in parcels if line else ():
                self._bytes -= line.popleft().size  # type: ignore[union-attr]
            if not line:
                self._lines.pop(place, None)
            if error is not None:
                self._failed += [parcel for parcel in parcels if not parcel.seen]
            self._changed.notify_all()
        for i, parcel in enumerate(parcels):
            if error is not None:
                parcel.answer.set_exception(error)
            else:
                parcel.answer.set_result(stored[i])

    def _drain(self, timeout_s: float | None) -> bool:
        """Wait until all lines are empty; answers whether they are in time."""
        with self._changed:
            self._hurry += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self._lines, timeout_s)
            finally:
                self._hurry -= 1

    def _finish(self, timeout_s: float | None) -> None:
        """Send what is left, then end; what is not stored in time is answered with Closed."""
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        drained = self._drain(timeout_s)
        with self._changed:
            left = [] if drained else [parcel for line in self._lines.values() for parcel in line]
            self._lines = {}
            self._changed.notify_all()
        for parcel in left:
            if not parcel.answer.done():
                why = Closed("the producer was closed before the message could be stored; nobody sends it any more")
                parcel.answer.set_exception(why)
                self._failed.append(parcel)
        self._raise_unseen()

    def _raise_unseen(self) -> None:
        """Raise the first error that nobody was told of."""
        with self._changed:
            failed, self._failed = [parcel for parcel in self._failed if not parcel.seen], []
        for parcel in failed:
            error = parcel.answer.exception()
            if error is not None:
                raise error


class Sender:
    """Sends batches of one producer, each once however often it takes."""

    def __init__(self, caller: Caller, settings: ProducerSettings, name: str | None, *, resume: bool) -> None:
        self._settings = settings
        self._clock = caller.world.clock
        self._identity = Identity(caller, name, resume=resume)
        self._publishing = Publishing(caller)
        self._durability: Any = "fsync" if settings.acks == "all" else "os"
        self._named = name is not None
        self.failure: Exception | None = None  # a named producer ends with its first error: later ones must not pass

    def begin(self) -> None:
        """Get an id; one with a name fences those before it, from now on."""
        if self._settings.idempotent:
            run(self._identity.begin())

    def send(self, place: TopicPartition, messages: list[wire.NewMessage], *, loose: bool) -> list[Stored | None]:
        """Store the messages; errors that may pass are waited for, as often as the settings say."""
        if self.failure is not None:
            raise Closed(f"the producer has ended with an error: {self.failure}. This message was not stored")
        attempts = 0
        while True:
            try:
                if loose or not self._settings.idempotent:
                    topic, number = place
                    return list(run(self._publishing.publish_loose(topic, messages, number, self._durability, None)))
                return run(self._identity.append(place, messages, self._durability))
            except HoldfastError as error:
                attempts += 1
                if not error.retryable or (self._settings.retries is not None and attempts > self._settings.retries):
                    if self._named:
                        self.failure = error
                    raise
                pause_ms = min(
                    self._settings.retry_backoff_ms << min(attempts - 1, 30), self._settings.retry_backoff_max_ms
                )
                self._clock.wait(threading.Event(), pause_ms / 1000)


def producer_settings(changes: Mapping[str, Any]) -> ProducerSettings:
    """The settings of one producer."""
    from holdfast.settings import load

    return load(ProducerSettings, changes)
