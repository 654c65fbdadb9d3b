"""The bytes of a chain's objects: a header, then records of what changed in the folder. See docs/internals/chain.md.

An object is applied whole or not at all. So within one object only the result counts: a word that was stored five times
is one record with its last value.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from struct import error as struct_error
from typing import Final, Protocol

import msgspec

from holdfast.checksum import crc32c
from holdfast.env.disk import BytesLike

MAGIC: Final = b"HFCH"
VERSION: Final = 1
# magic, version, kind, window, number, epoch, resume_at, time_ns, writer, payload's length, checksum
_HEADER: Final = Struct("<4sBBHQQQQ16sII")
HEADER_BYTES: Final = _HEADER.size
_CHECK_AT: Final = HEADER_BYTES - 4


class BadObject(Exception):
    """An object is damaged, or not one of a chain."""


class NewerObject(BadObject):
    """An object was written by a later release, which knows what this one does not."""


class ObjectKind(IntEnum):
    """What an object is for."""

    DATA = 1
    FENCE = 2  # a new owner begins; its first object is `resume_at`
    NOOP = 3  # the owner lives
    CLOSED = 4  # the owner is gone and says so


class ObjectHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Who wrote an object, as which number, and where the chain goes on."""

    kind: ObjectKind
    number: int
    epoch: int
    writer: bytes  # 16 bytes, drawn by each owner
    window: int  # how many objects this owner may have in flight
    time_ns: int  # the writer's wall clock, for people and for cleaning up
    resume_at: int = 0  # for FENCE: the number after it

    @property
    def next(self) -> int:
        """The number of the object that follows this one."""
        return self.resume_at if self.kind == ObjectKind.FENCE else self.number + 1


def encode(header: ObjectHeader, payload: bytes = b"") -> bytes:
    """Return the object's bytes."""
    start = _HEADER.pack(
        MAGIC, VERSION, header.kind, header.window, header.number, header.epoch, header.resume_at, header.time_ns,
        header.writer, len(payload), 0,
    )  # fmt: skip
    check = crc32c(payload, crc32c(start[:_CHECK_AT]))
    return b"".join((start[:_CHECK_AT], check.to_bytes(4, "little"), payload))


def decode(content: bytes, number: int) -> tuple[ObjectHeader, memoryview]:
    """Return an object's header and payload; raises BadObject if it is not the object with this number."""
    if len(content) < HEADER_BYTES or content[:4] != MAGIC:
        raise BadObject(f"object {number} is not part of a chain")
    _, version, kind, window, said, epoch, resume_at, time_ns, writer, length, check = _HEADER.unpack_from(content)
    if version != VERSION:
        raise NewerObject(f"object {number} has format {version}, and this release reads {VERSION}")
    payload = memoryview(content)[HEADER_BYTES:]
    if len(payload) != length or check != crc32c(payload, crc32c(content[:_CHECK_AT])):
        raise BadObject(f"object {number} is damaged: its checksum does not match")
    if said != number or kind not in iter(ObjectKind):
        raise BadObject(f"object {number} says that it is number {said}, of kind {kind}")
    found = ObjectHeader(
        kind=ObjectKind(kind),
        number=said,
        epoch=epoch,
        writer=writer,
        window=window,
        time_ns=time_ns,
        resume_at=resume_at,
    )
    return found, payload


# Records. Files and folders are named once in each object and then go by a number.
_NAME: Final = Struct("<BIH")  # op, index, length of the name
_PLAIN: Final = Struct("<BI")  # MAKE, CREATE, REMOVE, REMOVE_FOLDER: op, index
_WRITE: Final = Struct("<BIQI")  # op, index, position, length; the bytes follow
_LARGE: Final = Struct("<BIQI32sH")  # op, index, position, length, sha-256, length of the key; the key follows
_TRUNCATE: Final = Struct("<BIQ")  # op, index, length
_RENAME: Final = Struct("<BII")  # op, old, new


class Op(IntEnum):
    """What a record says."""

    NAME = 1
    MAKE = 2
    CREATE = 3
    WRITE = 4
    LARGE = 5
    TRUNCATE = 6
    RENAME = 7
    REMOVE = 8
    REMOVE_FOLDER = 9


_WORD_BYTES: Final = 8


class ChangeBatch:
    """Records that wait for their object, in the order in which the changes were made."""

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0
        self._parts: list[bytes] = []
        self._names: dict[str, int] = {}
        self._words: dict[str, dict[int, int]] = {}  # of each file: where each word's bytes are among the parts

    def make(self, path: str) -> None:
        self._plain(Op.MAKE, path)

    def create(self, path: str) -> None:
        self._plain(Op.CREATE, path)

    def remove(self, path: str) -> None:
        self._plain(Op.REMOVE, path)

    def remove_folder(self, path: str) -> None:
        self._plain(Op.REMOVE_FOLDER, path)

    def write(self, path: str, position: int, content: bytes) -> None:
        """Add a write. Words of a state file change with every message: only the last value of each is kept."""
        is_word = len(content) == _WORD_BYTES and position % _WORD_BYTES == 0  # so that no two overlap in part
        if is_word:
            at = self._words.get(path, {}).get(position)
            if at is not None:
                self._parts[at] = content
                return
        self._add(_WRITE.pack(Op.WRITE, self._index(path), position, len(content)))
        if is_word:
            self._words.setdefault(path, {})[position] = len(self._parts)
        else:
            self._forget(path)  # a later word must not be moved to before this write
        self._parts.append(content)
        self.bytes += len(content)

    def write_large(self, path: str, position: int, length: int, digest: bytes, key: str) -> None:
        """Add a write whose bytes are in an object of their own."""
        self._forget(path)
        name = key.encode()
        self._add(_LARGE.pack(Op.LARGE, self._index(path), position, length, digest, len(name)) + name)

    def truncate(self, path: str, length: int) -> None:
        self._forget(path)
        self._add(_TRUNCATE.pack(Op.TRUNCATE, self._index(path), length))

    def rename(self, old: str, new: str) -> None:
        self._words.clear()  # rare; and it may be a folder with many files
        self._add(_RENAME.pack(Op.RENAME, self._index(old), self._index(new)))

    def payload(self) -> bytes:
        return b"".join(self._parts)

    def _plain(self, op: Op, path: str) -> None:
        self._forget(path)
        self._add(_PLAIN.pack(op, self._index(path)))

    def _add(self, part: bytes) -> None:
        self._parts.append(part)
        self.bytes += len(part)
        self.count += 1

    def _forget(self, path: str) -> None:
        self._words.pop(path, None)

    def _index(self, path: str) -> int:
        index = self._names.get(path)
        if index is None:
            index = self._names[path] = len(self._names)
            name = path.encode("utf-8", "surrogateescape")
            self._parts.append(_NAME.pack(Op.NAME, index, len(name)) + name)
            self.bytes += len(self._parts[-1])
        return index


class Changes(Protocol):
    """Whoever applies records: a copy of the folder."""

    def make(self, path: str) -> None: ...

    def create(self, path: str) -> None: ...

    def write(self, path: str, position: int, content: BytesLike) -> None: ...

    def write_large(self, path: str, position: int, length: int, digest: bytes, key: str) -> None: ...

    def truncate(self, path: str, length: int) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def remove_folder(self, path: str) -> None: ...


def replay(payload: memoryview, changes: Changes) -> None:
    """Apply the records of one object in order; raises BadObject if they are not records."""
    try:
        _replay(payload, changes)
    except (IndexError, struct_error, UnicodeDecodeError) as error:
        raise BadObject(f"a record is not in the format of this release: {error}") from error


def _replay(payload: memoryview, changes: Changes) -> None:
    names: list[str] = []
    at, end = 0, len(payload)
    plain = {
        Op.MAKE: changes.make,
        Op.CREATE: changes.create,
        Op.REMOVE: changes.remove,
        Op.REMOVE_FOLDER: changes.remove_folder,
    }
    while at < end:
        op = payload[at]
        if op in plain:
            _, index = _PLAIN.unpack_from(payload, at)
            plain[Op(op)](names[index])
            at += _PLAIN.size
        elif op == Op.NAME:
            _, _, length = _NAME.unpack_from(payload, at)
            at += _NAME.size
            names.append(check_path(bytes(payload[at : at + length]).decode("utf-8", "surrogateescape")))
            at += length
        elif op == Op.WRITE:
            _, index, position, length = _WRITE.unpack_from(payload, at)
            at += _WRITE.size
            changes.write(names[index], position, payload[at : at + length])
            at += length
        elif op == Op.LARGE:
            _, index, position, length, digest, key_length = _LARGE.unpack_from(payload, at)
            at += _LARGE.size
            changes.write_large(names[index], position, length, digest, bytes(payload[at : at + key_length]).decode())
            at += key_length
        elif op == Op.TRUNCATE:
            _, index, length = _TRUNCATE.unpack_from(payload, at)
            changes.truncate(names[index], length)
            at += _TRUNCATE.size
        elif op == Op.RENAME:
            _, old, new = _RENAME.unpack_from(payload, at)
            changes.rename(names[old], names[new])
            at += _RENAME.size
        else:
            raise NewerObject(f"a record is of kind {op}, which this release does not know")


def check_path(path: str) -> str:
    """Refuse a name that would lead out of the folder: objects may have been made by anyone who may write there."""
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise BadObject(f"it names {path!r}, which is not a place in the folder")
    return path
