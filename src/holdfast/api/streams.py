"""Bodies that come as a stream: a binary file, or pieces of bytes."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO, Final, TypeAlias

from holdfast.api.drafts import NewMessage
from holdfast.errors import InvalidRequest

Stream: TypeAlias = BinaryIO | Iterable[bytes]
AsyncStream: TypeAlias = AsyncIterable[bytes] | Stream

PIECE_BYTES: Final = 256 * 1024


def stream_options(options: dict[str, Any]) -> NewMessage:
    """What a message has besides its body; all that `put` takes but `codec`."""
    known = set(NewMessage.__struct_fields__) - {"body"}
    for name in options:
        if name not in known:
            hint = ": a stream is stored as it comes; compress it before" if name == "codec" else ""
            raise InvalidRequest(f"{name} cannot be used here{hint}; known are {', '.join(sorted(known))}")
    return NewMessage(body=b"", **options)


def check_size_hint(size_hint: object) -> None:
    """Refuse what is no number of bytes."""
    if size_hint is not None and (type(size_hint) is not int or size_hint < 0):
        raise InvalidRequest(f"size_hint={size_hint!r} cannot be used: give a number of bytes, or None")


def pieces_of(stream: object) -> Iterator[object]:
    """A stream that threads can read, piece by piece."""
    read = getattr(stream, "read", None)
    if callable(read):
        return iter(partial(read, PIECE_BYTES), b"")
    if isinstance(stream, (bytes, bytearray, memoryview, str)) or not isinstance(stream, Iterable):
        raise no_stream(stream)
    return iter(stream)


def no_stream(given: object) -> InvalidRequest:
    """The error for what gives no pieces."""
    return InvalidRequest(
        f"a stream is a binary file or gives pieces of bytes; {type(given).__name__} does not. "
        "Use put or publish for a body that is in memory"
    )
