"""From what a caller hands over to bodies that can be stored; a large message waits in a file until it is complete."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, TypeVar

from holdfast.checksum import crc32c
from holdfast.codec.encode import Body, Packing, encode_batch, encode_values, message_sizes
from holdfast.codec.frame import HEADER_BYTES, Kind
from holdfast.env import File, World
from holdfast.env.disk import BytesLike
from holdfast.errors import Closed, DiskFull, InvalidRequest, MessageTooLarge, Unavailable
from holdfast.large import LARGE_BYTES, LargeValue, Value
from holdfast.model import NO_PRODUCER, Batch, CodecName, Producer
from holdfast.settings import LogSettings
from holdfast.storage.files import FULL_DISK, join, write_fully
from holdfast.storage.opening import ran_out, room, shortage


class Encoder:
    """Checks and encodes batches by a log's settings."""

    def __init__(self, settings: LogSettings) -> None:
        self._settings = settings
        self._small_enough = min(settings.max_message_bytes, settings.max_batch_bytes)
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
        """The bodies of the batch; none for an empty one. `any_size`: it was accepted before, in another log."""
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
        """The bodies of an Arrow array of binary or text values."""
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

    def _encode_values(self, values: Sequence[bytes], now_ns: int, packing: Packing, kind: Kind) -> Body | None:
        """The short way for plain values that fit in one frame; None where it does not lead there."""
        try:
            ends = list(accumulate(map(len, values), initial=0))
            if not values or ends[-1] + 4 * len(ends) > self._settings.frame_bytes:
                return None
            if ends[-1] > self._small_enough:
                self._check_sizes([end - start for start, end in pairwise(ends)])
            return encode_values(values, ends, now_ns, packing=packing, kind=kind)
        except TypeError:
            return None  # the long way says what is wrong

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
    """Up to how many bytes a single value goes the short way."""
    return min(settings.max_message_bytes, LARGE_BYTES) if settings.codec == "none" else -1


def check_origin(kind: Kind, producer: Producer) -> None:
    """Refuse what no frame can say of its messages."""
    if kind not in (Kind.DATA, Kind.CONTROL, Kind.JOURNAL):
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


# Where a large message waits until all of it is there: a temporary file beside the log, void until it is appended.
#
# The value stands in the file where it will stand in a segment, behind room for a header and for what else the message
# has. So the file itself can become a segment, by its name, and nothing is copied.
#
# Whatever happens on the way, the log knows nothing of it. The file goes when the spool is closed; one that a dead
# process left behind goes at the next opening, like every temporary file.


_LOOK_EVERY_BYTES: Final = 16 << 20
_GIVEN_UP: Final = "a large message was given up while it was stored"


class LaidOut:
    """A temporary file with a frame that lacks its header; `take` gives it a name in a log, `close` removes it."""

    def __init__(self, world: World, folder: str) -> None:
        self._world = world
        self._path = join(folder, f"spool-{world.ids.random_u32():08x}{world.ids.random_u32():08x}.tmp")
        self._lock = threading.Lock()  # a task that is cancelled closes while a thread still writes for it
        self._file: File | None = None  # only when there is something to write
        self._closed = False

    def write(self, position: int, parts: Sequence[BytesLike]) -> None:
        """Put bytes in their place; OSError where the disk does not take them."""
        with self._lock:
            if self._closed:
                raise Closed(_GIVEN_UP)
            if self._file is None:
                self._file = self._world.disk.open(self._path, write=True, create=True)
            write_fully(self._file, position, parts)

    def sync(self) -> None:
        """Return when it is on disk, but for its name."""
        with self._lock:
            if self._file is not None and not self._closed:
                self._file.sync()

    def view(self, position: int, length: int) -> memoryview:
        """Bytes of it, which stay readable whatever becomes of the file."""
        with self._lock:
            if self._closed or self._file is None:
                raise Closed(_GIVEN_UP)
            return self._file.view(position, length)

    def take(self, path: str) -> File:
        """Give it this name; it is the caller's then, still open: to open it again might need what is not there."""
        with self._lock:
            if self._closed or self._file is None:
                raise Closed(_GIVEN_UP)
            self._world.disk.rename(self._path, path)
            self._closed = True
            file, self._file = self._file, None
            return file

    def close(self) -> None:
        """Remove the file, unless it was taken; what is still read of it stays readable."""
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
    """Takes one value in, piece by piece; for one caller at a time, who may change threads.

    `head_bytes` is how much will stand between the frame's header and the value. What has fewer than `file_bytes`
    needs no file.
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
        """Take the next piece; True when enough are gathered for `write_gathered`."""
        if not isinstance(piece, (bytes, bytearray, memoryview)):
            raise InvalidRequest(f"a stream must give bytes, not {type(piece).__name__}. Nothing was stored")
        content = bytes(piece)
        self._check_size(self._written + self._gathered_bytes + len(content))
        self._gathered.append(content)
        self._gathered_bytes += len(content)
        return self._gathered_bytes >= self._file_bytes

    def write_gathered(self) -> None:
        """Write what is gathered."""
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
        """Whether what came so far is small."""
        return not self._written and self._gathered_bytes < self._file_bytes

    def value(self) -> Value:
        """All that came: in memory where it is small, else in the file, with the checksum of what was given."""
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
                "was kept; look at the disk, then try again"
            ) from error

    def _full(self, why: str) -> DiskFull:
        return DiskFull(
            f"no room for a large message in {self._folder}: {why}. Nothing of it was kept; reading goes on. "
            "Free some space and try again"
        )


def lay_out(world: World, folder: str, body: Body) -> LaidOut:
    """A file with the frame of this body, but for its header: the one that its value came in, or a copy."""
    home = body.home
    if isinstance(home, Spool) and len(body.parts[0]) == home.head_bytes:
        head, value, behind = body.parts
        home.write(HEADER_BYTES, [head])
        home.write(HEADER_BYTES + len(head) + len(value), [behind])
        return home
    copy = LaidOut(world, folder)
    try:
        copy.write(HEADER_BYTES, body.parts)
    except BaseException:
        copy.close()
        raise
    return copy


# Messages that are moved from one log to another, a bearable number of bytes at a time.
#
# What is written at once must fit into one segment, and those who write beside it wait that long.


PORTION_BYTES: Final = 16 << 20

_Item = TypeVar("_Item")


def portions(
    items: Iterable[_Item], size_of: Callable[[_Item], int], most_bytes: int = PORTION_BYTES
) -> Iterator[Sequence[_Item]]:
    """The items in their order, in parts of at most so many bytes, or of one that is larger; no more is held."""
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
