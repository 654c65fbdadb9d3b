"""Turns what a caller appends into bodies that can be stored, and collects large messages in a file.

A large message waits in a temporary file next to the log until it is complete. Its value is at the position that it
will have in a segment, after room for the frame header and the message's other fields. So the file itself can become a
segment by being renamed, and nothing is copied. Until then the log knows nothing of it: the file is removed when the
spool is closed, or at the next opening if the process died.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

from holdfast.checksum import crc32c
from holdfast.codec.encode import Body, Packing, encode_batch, encode_values, message_sizes, plain_parts
from holdfast.codec.frame import HEADER_BYTES, Kind
from holdfast.env import File, World
from holdfast.env.disk import BytesLike, write_fully
from holdfast.errors import Closed, DiskFull, InvalidRequest, MessageTooLarge, Unavailable
from holdfast.large import LARGE_BYTES, LargeValue, Value
from holdfast.model import NO_PRODUCER, Batch, CodecName, Producer
from holdfast.settings import LogSettings
from holdfast.storage.files import FULL_DISK, join, ran_out, room, shortage

_ENDS_BYTES: Final = 8  # the ends of a single value
_STORED_AT_ONCE: Final = 16 * 1024  # a larger body is written rather than stored into a map


class Encoder:
    """Checks and encodes batches according to a log's settings."""

    def __init__(self, settings: LogSettings) -> None:
        self._settings = settings
        self._small_enough = min(settings.max_message_bytes, settings.max_batch_bytes)
        self._most_plain = min(self._small_enough, settings.frame_bytes, _STORED_AT_ONCE)
        if settings.codec != "none":
            self._most_plain = -1
        self._packings: dict[str, Packing] = {}

    def encode(
        self,
        messages: Sequence[bytes] | Batch,
        now_ns: int,
        *,
        codec: CodecName | None,
        kind: Kind,
        any_size: bool = False,
    ) -> list[Body]:
        """Return the bodies of the batch, none if it is empty. `any_size`: it was already accepted by another log."""
        packing = self._packing(codec or self._settings.codec)
        try:
            if isinstance(messages, Batch):
                batch = messages
            else:
                values = _as_values(messages)
                body = self._encode_values(values, now_ns, packing, kind)
                if body is not None:
                    return [body]
                batch = Batch(values=values)
            if not batch.values:
                return []
            _check_columns(batch)
            if not any_size:
                self._check_sizes(message_sizes(batch))
            return encode_batch(batch, now_ns, packing=packing, cap_bytes=self._settings.frame_bytes, kind=kind)
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise InvalidRequest(f"the batch cannot be stored: {error}. Nothing of it was kept") from error

    def encode_arrow(self, values: Any, now_ns: int) -> list[Body]:
        """Return the bodies of an Arrow array of binary or text values."""
        from holdfast.codec.arrow import encode_arrow

        settings = self._settings
        bodies = encode_arrow(
            values,
            now_ns,
            cap_bytes=settings.frame_bytes,
            max_message_bytes=settings.max_message_bytes,
            packing=self._packing(settings.codec),
        )
        self._check_batch(sum(body.raw_bytes - 4 * body.count for body in bodies))
        return bodies

    def plain(self, values: object) -> tuple[bytes, bytes, int] | None:
        """Return the body of plain values in two parts, and their number, if one store is enough for it; else None.

        The first part is empty for a single value: `Writer.append_one` knows its ends.
        """
        if self._most_plain < 0 or type(values) is not list or not values:
            return None
        if len(values) == 1 and type(values[0]) is bytes:
            return (b"", values[0], 1) if len(values[0]) + _ENDS_BYTES <= self._most_plain else None
        try:
            head, joined = plain_parts(values)
        except TypeError:
            return None  # the general path says what is wrong
        return (head, joined, len(values)) if len(head) + len(joined) <= self._most_plain else None

    def _encode_values(self, values: Sequence[bytes], now_ns: int, packing: Packing, kind: Kind) -> Body | None:
        """Fast path for plain values that fit in one frame; None if it does not apply."""
        try:
            sizes = [*map(len, values)]
            if not values or sum(sizes) + 4 * len(sizes) + 4 > self._settings.frame_bytes:
                return None
            if sum(sizes) > self._small_enough:
                self._check_sizes(sizes)
            return encode_values(values, now_ns, packing=packing, kind=kind)
        except TypeError:
            return None  # the general path says what is wrong

    def _check_sizes(self, sizes: list[int]) -> None:
        limit = self._settings.max_message_bytes
        if max(sizes) > limit:
            which = next(i for i, size in enumerate(sizes) if size > limit)
            raise MessageTooLarge(
                f"message {which} of the batch has {sizes[which]} bytes with key and headers, the limit is {limit}; "
                "nothing of the batch was kept. Send it in parts, or raise max_message_bytes"
            )
        if len(sizes) > 1:
            self._check_batch(sum(sizes))

    def _check_batch(self, total: int) -> None:
        limit = self._settings.max_batch_bytes
        if total > limit:
            raise MessageTooLarge(f"the batch has {total} bytes, the limit is {limit}; send smaller batches")

    def _packing(self, codec: str) -> Packing:
        packing = self._packings.get(codec)
        if packing is None:
            settings = self._settings
            packing = Packing.named(
                codec,
                level=settings.codec_level if codec == settings.codec else None,
                min_bytes=settings.codec_min_bytes,
                min_saving_percent=settings.codec_min_saving_percent,
                max_bytes=settings.max_raw_bytes,
            )
            self._packings[codec] = packing
        return packing


def most_plain_bytes(settings: LogSettings) -> int:
    """Return the size up to which a single value can take the fast path."""
    return min(settings.max_message_bytes, LARGE_BYTES) if settings.codec == "none" else -1


_KINDS: Final = (Kind.DATA, Kind.CONTROL, Kind.JOURNAL)


def check_origin(kind: Kind, producer: Producer) -> None:
    """Raise InvalidRequest for a kind or producer that a frame cannot express."""
    if kind not in _KINDS:
        raise InvalidRequest(f"kind={kind!r} cannot be appended; use Kind.DATA, Kind.CONTROL or Kind.JOURNAL")
    if producer is not NO_PRODUCER:
        fits = 0 <= producer.id < 2**64 and 0 <= producer.epoch < 2**32 and 0 <= producer.first_sequence < 2**32
        if not fits:
            raise InvalidRequest(f"{producer} is out of range: the id has 64 bits, epoch and sequence have 32")


def _as_values(messages: object) -> Sequence[bytes]:
    if isinstance(messages, (bytes, bytearray, str)):
        raise InvalidRequest(
            f"append takes a list of messages, not a single {type(messages).__name__}: write append([message])"
        )
    if not isinstance(messages, Iterable):
        raise InvalidRequest(f"append takes a list of messages, not {type(messages).__name__}")
    return messages if isinstance(messages, (list, tuple)) else list(messages)


def _check_columns(batch: Batch) -> None:
    count = len(batch.values)
    for name in batch.__struct_fields__:
        column = getattr(batch, name)
        if column is not None and len(column) != count:
            raise ValueError(f"{name} has {len(column)} items for {count} values")
    _require("a message's value must be bytes", batch.values, {bytes, bytearray, LargeValue})
    if batch.keys is not None:
        _require("a key must be bytes or None", batch.keys, {bytes, type(None)})
    if batch.headers is not None:
        pairs = [pair for row in batch.headers for pair in row]
        _require("a header's name must be text", [name for name, _ in pairs], {str})
        _require("a header's value must be bytes", [value for _, value in pairs], {bytes})


def _require(what: str, column: Sequence[object], allowed: set[type]) -> None:
    wrong = set(map(type, column)) - allowed
    if wrong:
        raise TypeError(f"{what}, not {wrong.pop().__name__}")


_LOOK_EVERY_BYTES: Final = 16 << 20
_GIVEN_UP: Final = "a large message was given up while it was stored"


class LaidOut:
    """A temporary file with a frame except for its header; `take` moves it into a log, `close` removes it."""

    def __init__(self, world: World, folder: str) -> None:
        self._world = world
        self._path = join(folder, f"spool-{world.ids.random_u32():08x}{world.ids.random_u32():08x}.tmp")
        self._lock = threading.Lock()  # a cancelled task closes this while a thread may still be writing for it
        self._file: File | None = None  # created at the first write
        self._closed = False

    def write(self, position: int, parts: Sequence[BytesLike]) -> None:
        """Write bytes at this position; raises OSError if the disk is full, and Closed after `close`."""
        with self._lock:
            if self._closed:
                raise Closed(_GIVEN_UP)
            if self._file is None:
                self._file = self._world.disk.open(self._path, write=True, create=True)
            write_fully(self._file, position, parts)

    def sync(self) -> None:
        """Make the contents durable, but not the name."""
        with self._lock:
            if self._file is not None and not self._closed:
                self._file.sync()

    def view(self, position: int, length: int) -> memoryview:
        """Return some of its bytes, which stay readable whatever happens to the file."""
        with self._lock:
            if self._closed or self._file is None:
                raise Closed(_GIVEN_UP)
            return self._file.view(position, length)

    def take(self, path: str) -> File:
        """Move it to this path; the caller owns the open file then. Reopening might fail for want of a descriptor."""
        with self._lock:
            if self._closed or self._file is None:
                raise Closed(_GIVEN_UP)
            self._world.disk.rename(self._path, path)
            self._closed = True
            file, self._file = self._file, None
            return file

    def close(self) -> None:
        """Remove the file unless it was taken; views of it stay readable."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.close()
                with contextlib.suppress(OSError):  # then the next opening removes it
                    self._world.disk.remove(self._path)


class Spool(LaidOut):
    """Collects one value piece by piece; for one caller at a time, in any thread.

    `head_bytes` is the room between the frame's header and the value. A value below `file_bytes` needs no file.
    """

    def __init__(
        self,
        world: World,
        folder: str,
        settings: LogSettings,
        *,
        head_bytes: int = 0,
        size_hint: int | None = None,
        file_bytes: int = LARGE_BYTES,
    ) -> None:
        super().__init__(world, folder)
        self._folder = folder
        self._settings = settings
        self.head_bytes = head_bytes
        self._start = HEADER_BYTES + head_bytes
        self._file_bytes = file_bytes
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._written = 0
        self._sum = 0
        self._look_at = 0
        if size_hint is not None:
            self._check_size(size_hint)
            self._check_free(size_hint)

    def add(self, piece: object) -> bool:
        """Add the next piece; returns True when it is time for `write_gathered`."""
        if not isinstance(piece, (bytes, bytearray, memoryview)):
            raise InvalidRequest(f"a stream must yield bytes, not {type(piece).__name__}. Nothing was stored")
        content = bytes(piece)
        self._check_size(self._written + self._gathered_bytes + len(content))
        self._gathered.append(content)
        self._gathered_bytes += len(content)
        return self._gathered_bytes >= self._file_bytes

    def write_gathered(self) -> None:
        """Write the pieces collected so far to the file."""
        content, self._gathered, self._gathered_bytes = b"".join(self._gathered), [], 0
        if not content:
            return
        if self._written >= self._look_at:
            self._check_free(len(content))
            self._look_at = self._written + _LOOK_EVERY_BYTES
        with self._naming_errors():
            self.write(self._start + self._written, [content])
        self._sum = crc32c(content, self._sum)
        self._written += len(content)

    @property
    def in_memory(self) -> bool:
        """Whether everything so far is small enough to stay in memory."""
        return not self._written and self._gathered_bytes < self._file_bytes

    def value(self) -> Value:
        """Return the value: in memory if it is small, otherwise in the file, with the checksum of what was added."""
        if self.in_memory:
            return b"".join(self._gathered)
        self.write_gathered()
        with self._naming_errors():
            view = self.view(self._start, self._written)
        return LargeValue(view, 0, self._written, self._sum, home=self)

    def sync(self) -> None:
        with self._naming_errors():
            super().sync()

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_size(self, size: int) -> None:
        limit = self._settings.max_message_bytes
        if size > limit:
            raise MessageTooLarge(
                f"the stream has {size:,} bytes or more, the limit is {limit:,}; nothing was stored. Send it in parts, "
                "or raise max_message_bytes"
            )

    def _check_free(self, more: int) -> None:
        keep = self._settings.min_free_bytes
        with self._naming_errors():
            free = self._world.disk.free_bytes(self._folder)
            if free - more < keep and self._world.make_space(keep + more):
                free = self._world.disk.free_bytes(self._folder)
        if free - more < keep:
            raise self._full(room(free, more, keep))

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in FULL_DISK:
                raise self._full(error.strerror or "no room") from error
            if ran_out(error):
                what = f"a large message could not be written in {self._folder}"
                raise shortage(what, error, "Nothing of it was kept") from error
            raise Unavailable(
                f"a large message could not be written in {self._folder}: {error.strerror or error}. Nothing of it "
                "was kept; check the disk, then try again"
            ) from error

    def _full(self, why: str) -> DiskFull:
        return DiskFull(
            f"no room for a large message in {self._folder}: {why}. Nothing of it was kept; reading still works. "
            "Free some space and try again"
        )


def lay_out(world: World, folder: str, body: Body) -> LaidOut:
    """Return a file with this body's frame except for its header: the one it was collected in, or a copy."""
    home = body.home
    if isinstance(home, Spool) and len(body.parts[0]) == home.head_bytes:
        head, value, tail = body.parts
        home.write(HEADER_BYTES, [head])
        home.write(HEADER_BYTES + len(head) + len(value), [tail])
        return home
    copy = LaidOut(world, folder)
    try:
        copy.write(HEADER_BYTES, body.parts)
    except BaseException:
        copy.close()
        raise
    return copy


# What is written at once must fit into one segment, and other writers have to wait for it.
PORTION_BYTES: Final = 16 << 20

_Item = TypeVar("_Item")


def portions(
    items: Iterable[_Item], size_of: Callable[[_Item], int], most_bytes: int = PORTION_BYTES
) -> Iterator[Sequence[_Item]]:
    """Split the items into parts of at most `most_bytes`, or of a single larger item; holds one part at a time."""
    part: list[_Item] = []
    total = 0
    for item in items:
        size = size_of(item)
        if part and total + size > most_bytes:
            yield part
            part, total = [], 0
        part.append(item)
        total += size
    if part:
        yield part
