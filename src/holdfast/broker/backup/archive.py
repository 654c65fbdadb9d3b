"""A place that holds backups: what is stored there, how a backup is listed, and when it goes.

    backup/<20 digits>   one backup: its files by name; the small ones are in it
    content/<SHA-256>    a piece of a larger file, without the zeros at its end; stored once, whoever lists it
    begun/<16 digits>    a backup at work: nothing that it may count on is removed meanwhile

Objects are only ever created. A backup is there when its list is, and that is created last: one that was interrupted is
not listed, and what it stored is found by the next one.

With a key, lists and pieces are encrypted, and a piece is named by a checksum that only the holder of the key can
compute: an unchanged piece is still found by its name, but nobody else can tell whether a known file is among them.
Each object is authenticated together with its own name, so that no object passes for another.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import msgspec

from holdfast.broker.folder.stored import has_ended, process_facts
from holdfast.checksum import crc32c
from holdfast.env import World
from holdfast.env.chain.chain import has_chain
from holdfast.env.chain.engines import (
    FolderStore,
    Store,
    StorePlace,
    StoreRefused,
    StoreUnreachable,
    open_store,
    parse_place,
)
from holdfast.env.chain.format import BadObject, check_path
from holdfast.env.disk import BytesLike
from holdfast.errors import CorruptData, InvalidRequest, NotFound, NotInstalled, Unavailable

PIECE_BYTES: Final = 16 * 1024 * 1024
INLINE_BYTES: Final = 64 * 1024
_MAGIC: Final = b"HFBK"
_VERSION: Final = 1
_ENCRYPTED: Final = 2  # the list is a sealed object behind the identifier of its key, and so are its pieces
_HEAD_BYTES: Final = 9  # magic, version, checksum
_PIECE_MAGIC: Final = b"HFBE\x01"
_KEY_BYTES: Final = 32
_ID_BYTES: Final = 8
_NONCE_BYTES: Final = 12
_BACKUPS: Final = "backup/"
_CONTENTS: Final = "content/"
_BEGUN: Final = "begun/"
_TRIES: Final = 4
_PAUSE_S: Final = 0.5
_NS: Final = 1_000_000_000
LONGEST_NS: Final = 24 * 3600 * _NS  # a backup that takes longer is not listed: others may have cleaned up meanwhile

_Answer = TypeVar("_Answer")


class ArchivedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a backup: its bytes, or the digests of its pieces. An empty digest is a piece of zeros."""

    path: str
    size: int
    content: bytes = b""
    pieces: list[bytes] = []
    stamp: tuple[int, ...] = ()  # of the file itself: the same again means the same bytes


class BackupList(msgspec.Struct, frozen=True, kw_only=True):
    """A folder at one moment."""

    number: int
    time_ns: int
    source: str
    folders: list[str]
    files: list[ArchivedFile]
    new_bytes: int = 0
    is_encrypted: bool = False  # as it was read, whatever it says itself

    @property
    def time(self) -> datetime:
        return datetime.fromtimestamp(self.time_ns // 1000 / 1_000_000, UTC)

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def digests(self) -> frozenset[bytes]:
        return frozenset(digest for file in self.files for digest in file.pieces if digest)


class WrongKey(InvalidRequest):
    """A backup is encrypted, and the key that was given is another one, or none was given."""


class BackupKey:
    """The key of encrypted backups: AES-256-GCM for contents, HMAC-SHA-256 for names; see docs/internals/backups.md."""

    def __init__(self, secret: bytes, world: World) -> None:
        if len(secret) != _KEY_BYTES:
            raise InvalidRequest(f"the key of backups has {len(secret)} bytes: give one of {_KEY_BYTES} random bytes")
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise NotInstalled(
                "encrypted backups need the package cryptography: pip install 'holdfast[encryption]'"
            ) from None
        self._ids = world.ids
        self._invalid = InvalidTag
        self._cipher = AESGCM(_derived(secret, "contents"))
        self._naming = _derived(secret, "names")
        self.id = _derived(secret, "id")[:_ID_BYTES]

    @staticmethod
    def parse(text: bytes, where: str, world: World) -> BackupKey:
        """Return the key in a file: 32 bytes, written as hexadecimal digits or base64."""
        stripped = text.strip()
        for decoded in (bytes.fromhex, _from_base64):
            with suppress(ValueError, UnicodeDecodeError):
                if len(secret := decoded(stripped.decode("ascii"))) == _KEY_BYTES:
                    return BackupKey(secret, world)
        raise InvalidRequest(
            f"{where} does not hold a key: write 32 random bytes into it as 64 hexadecimal digits or as base64, "
            "for example with `openssl rand -hex 32`"
        )

    def name_of(self, content: bytes) -> bytes:
        """Return the name of a piece: the same bytes have the same name, as long as the key is the same."""
        return hmac.digest(self._naming, content, "sha256")

    def encrypt(self, name: str, content: BytesLike) -> bytes:
        """Return the bytes of the object with this name."""
        nonce = self._ids.random_bytes(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, content, name.encode())

    def decrypt(self, name: str, sealed: BytesLike) -> bytes | None:
        """Return what was encrypted for an object with this name; None if that is not what these bytes are."""
        try:
            return self._cipher.decrypt(bytes(sealed[:_NONCE_BYTES]), sealed[_NONCE_BYTES:], name.encode())
        except (self._invalid, ValueError):  # ValueError: too short for a nonce
            return None


def _derived(secret: bytes, purpose: str) -> bytes:
    """Return a key for one purpose, so that none is used for two."""
    return hmac.digest(secret, f"holdfast backup 2 {purpose}".encode(), "sha256")


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error


class Archive:
    """The backups in a store, or in a folder of this machine. With a key, those that are added are encrypted."""

    def __init__(self, place: str, world: World, key: BackupKey | None = None) -> None:
        self._world = world
        self._secret = key
        self.place: StorePlace | None = parse_place(place) if "://" in place else None
        self.shown = self.place.shown if self.place else place
        self._store: Store
        self._store, self._root = open_store(self.place) if self.place else (FolderStore(place), "")

    def close(self) -> None:
        self._store.close()

    @property
    def is_encrypting(self) -> bool:
        return self._secret is not None

    def require_apart(self) -> None:
        """Refuse a place that a data folder lives in: each would remove contents that the other needs."""
        if self._patiently(lambda: has_chain(self._store, self._root)):
            raise InvalidRequest(
                f"{self.shown} holds a data folder: backups there would be removed with its old contents. Nothing was "
                f"stored; choose another place, such as {self.shown}-backups"
            )

    def numbers(self) -> list[int]:
        """Return the numbers of all backups, oldest first."""
        prefix = f"{self._root}{_BACKUPS}"
        names = self._patiently(lambda: [key.removeprefix(prefix) for key in self._store.keys(prefix)])
        return sorted(int(name) for name in names if name.isdecimal() and name.isascii())

    def read(self, number: int) -> BackupList:
        """Return a backup. Raises CorruptData if it is damaged, NotFound if there is none, WrongKey if it is encrypted
        and cannot be read with the key of this archive.
        """
        key = self._key(number)
        content = self._patiently(lambda: self._store.read(key))
        if content is None:
            raise NotFound(f"{self.shown} has no backup {number}; `holdfast backup ls` lists them")
        what = f"backup {number} in {self.shown}"
        if content[:4] != _MAGIC or len(content) < _HEAD_BYTES:
            raise CorruptData(f"{what} is damaged: it does not begin with a backup's header. Use another one")
        if content[4] not in (_VERSION, _ENCRYPTED):
            raise CorruptData(f"{what} was written by a newer release (format {content[4]}); use that release")
        payload = memoryview(content)[_HEAD_BYTES:]
        if crc32c(payload) != int.from_bytes(content[5:_HEAD_BYTES], "little"):
            raise CorruptData(f"{what} is damaged: its checksum does not match. Use another one")
        is_encrypted = content[4] == _ENCRYPTED
        if is_encrypted:
            payload = memoryview(self._decrypted_list(what, number, payload))
        try:
            found = msgspec.msgpack.decode(payload, type=BackupList)
            for path in [*found.folders, *(file.path for file in found.files)]:
                check_path(path)
        except (msgspec.DecodeError, BadObject) as error:
            raise CorruptData(f"{what} is damaged: {error}. Use another one") from error
        return msgspec.structs.replace(found, is_encrypted=is_encrypted)

    def _decrypted_list(self, what: str, number: int, payload: memoryview) -> bytes:
        wanted = bytes(payload[:_ID_BYTES])
        if self._secret is None:
            raise WrongKey(
                f"{what} is encrypted: give the file with its key ({wanted.hex()}) as --key-file, key_file= or "
                "backup_key_file"
            )
        if wanted != self._secret.id:
            raise WrongKey(
                f"{what} is encrypted with the key {wanted.hex()}, and the one given is {self._secret.id.hex()}"
            )
        content = self._secret.decrypt(f"{_BACKUPS}{number:020}", payload[_ID_BYTES:])
        if content is None:
            raise CorruptData(f"{what} was changed after it was encrypted under this number. Use another one")
        return content

    def chosen(self, number: int | None, until_ns: int | None) -> BackupList:
        """Return the backup with this number, or the newest that is not newer than a time, or the newest.

        With a key, one that is not encrypted is refused: anybody who can write to the place could have put it there.
        """
        found = self._chosen(number, until_ns)
        if self._secret is not None and not found.is_encrypted:
            raise InvalidRequest(
                f"backup {found.number} in {self.shown} is not encrypted, so the key does not prove that it is yours. "
                "To use it anyway, leave out the key"
            )
        return found

    def _chosen(self, number: int | None, until_ns: int | None) -> BackupList:
        if number is not None:
            return self.read(number)
        numbers = self.numbers()
        if not numbers:
            raise NotFound(f"{self.shown} holds no backup; take one with `holdfast backup`")
        found: list[BackupList] = []
        for each in reversed(numbers):
            listed = self.read(each)
            if until_ns is None or listed.time_ns // 1000 <= until_ns // 1000:  # as people see it
                found.append(listed)
        if not found:
            raise NotFound(f"{self.shown} has no backup from that time or before; `holdfast backup ls` lists them")
        sources = sorted({each.source for each in found})
        if len(sources) > 1:
            raise InvalidRequest(
                f"{self.shown} holds backups of {' and '.join(sources[:3])}: choose one by its number (--at NUMBER), "
                "which `holdfast backup ls` shows"
            )
        return max(found, key=lambda each: (each.time_ns, each.number))

    def add(self, made: BackupList) -> BackupList:
        """List a backup whose contents are stored; returns it with its number."""
        number, secret = max([0, *self.numbers()]) + 1, self._secret
        while True:
            made = msgspec.structs.replace(made, number=number, is_encrypted=secret is not None)
            payload = msgspec.msgpack.encode(made)
            if secret is not None:
                payload = secret.id + secret.encrypt(f"{_BACKUPS}{number:020}", payload)
            version = bytes([_ENCRYPTED if secret is not None else _VERSION])
            content = _MAGIC + version + crc32c(payload).to_bytes(4, "little") + payload
            if self._created(self._key(number), content):
                return made
            number += 1  # another backup was faster

    def contents(self) -> set[bytes]:
        """Return the digests of all pieces that are stored."""
        prefix = f"{self._root}{_CONTENTS}"
        names = self._patiently(lambda: [key.removeprefix(prefix) for key in self._store.keys(prefix)])
        return {bytes.fromhex(name) for name in names if len(name) == 2 * hashlib.sha256().digest_size}

    def put(self, content: bytes, known: set[bytes]) -> tuple[bytes, int]:
        """Store a piece, and read it again; returns its digest, and how many bytes were new."""
        if not content:
            return b"", 0
        secret = self._secret
        digest = hashlib.sha256(content).digest() if secret is None else secret.name_of(content)
        if digest in known:
            return digest, 0
        stored = content if secret is None else _PIECE_MAGIC + secret.encrypt(f"{_CONTENTS}{digest.hex()}", content)
        self._created(self._content_key(digest), stored)
        self.get(digest, len(content), is_encrypted=secret is not None)
        known.add(digest)
        return digest, len(content)

    def get(self, digest: bytes, most: int, *, is_encrypted: bool) -> bytes:
        """Return a piece of a list that is encrypted, or is not. Raises CorruptData if it is missing or damaged."""
        if not digest:
            return b""
        content = self._patiently(lambda: self._store.read(self._content_key(digest)))
        if content is None:
            raise CorruptData(
                f"{self.shown} lacks {self._content_key(digest)}, which this backup needs. Use another backup"
            )
        found: bytes | None = content
        if is_encrypted:
            found = self._decrypted_piece(digest, content)
        elif hashlib.sha256(content).digest() != digest:
            found = None
        if found is None or len(found) > most:
            raise CorruptData(
                f"{self._content_key(digest)} in {self.shown} is damaged. Remove this object: if the folder still has "
                "these bytes, the next backup stores them again"
            )
        return found

    def _decrypted_piece(self, digest: bytes, content: bytes) -> bytes | None:
        assert self._secret is not None  # its list was read with it
        head = len(_PIECE_MAGIC)
        if content[:head] != _PIECE_MAGIC:
            return None
        return self._secret.decrypt(f"{_CONTENTS}{digest.hex()}", memoryview(content)[head:])

    def require_key(self) -> None:
        """Refuse to add a backup without a key to those that have one: it was probably forgotten."""
        if self._secret is not None:
            return
        for number in reversed(self.numbers()):
            try:
                self.read(number)
                return
            except WrongKey as error:
                raise WrongKey(f"{error}; backups that are not encrypted belong in another place") from None
            except (CorruptData, NotFound):
                continue

    @contextmanager
    def at_work(self) -> Iterator[Callable[[], None]]:
        """Keep others from removing contents meanwhile; gives a check that it has not taken too long for that."""
        clock, key = self._world.clock, f"{self._root}{_BEGUN}{self._world.ids.random_bytes(8).hex()}"
        note = {**process_facts(self._world), "time_ns": clock.now_ns()}
        self._created(key, msgspec.json.encode(note))
        began_ns = clock.monotonic_ns()

        def check() -> None:
            if clock.monotonic_ns() - began_ns > LONGEST_NS:
                raise Unavailable("the backup took longer than a day and is not listed; the next one is much shorter")

        try:
            yield check
        finally:
            with suppress(StoreUnreachable, StoreRefused):  # then it counts for a day
                self._store.remove(key)

    def keep_only(self, keep: Callable[[Sequence[BackupList]], set[int]]) -> tuple[int, int]:
        """Remove backups that `keep` does not name, then contents that none lists; returns how many of both went."""
        contents = self.contents()
        found = [self.read(number) for number in self.numbers()]
        kept = keep(found)
        gone = [each for each in found if each.number not in kept]
        for each in gone:
            self._removed(self._key(each.number))
        used = frozenset[bytes]().union(*(each.digests for each in found if each.number in kept))
        unused = sorted(contents - used)
        began_ns = self._world.clock.monotonic_ns()
        for i, digest in enumerate(unused):
            late = self._world.clock.monotonic_ns() - began_ns > 10 * _NS
            if (i == 0 or late) and self._others_at_work():
                return len(gone), i  # the next one does it
            began_ns = self._world.clock.monotonic_ns() if late else began_ns
            self._removed(self._content_key(digest))
        return len(gone), len(unused)

    def _others_at_work(self) -> bool:
        """Whether another backup may count on what is there. Those that are known to have ended are cleared away."""
        at_work = 0
        for key in self._patiently(lambda: list(self._store.keys(f"{self._root}{_BEGUN}"))):
            content = self._patiently(lambda key=key: self._store.read(key))  # type: ignore[misc]
            if content is None:
                continue
            note = _note(content)
            old = self._world.clock.now_ns() - int(note.get("time_ns", 0)) > 2 * LONGEST_NS
            if old or has_ended(self._world, note):
                self._removed(key)
            else:
                at_work += 1
        return at_work > 1  # ours is one of them

    def _key(self, number: int) -> str:
        return f"{self._root}{_BACKUPS}{number:020}"

    def _content_key(self, digest: bytes) -> str:
        return f"{self._root}{_CONTENTS}{digest.hex()}"

    def _created(self, key: str, content: bytes) -> bool:
        """Create an object; True also if it is ours from an attempt that got no answer."""
        tries: list[None] = []

        def attempt() -> bool:
            tries.append(None)
            return self._store.create(key, content)

        made = self._patiently(attempt)
        return made or (len(tries) > 1 and self._patiently(lambda: self._store.read(key)) == content)

    def _removed(self, key: str) -> None:
        self._patiently(lambda: self._store.remove(key))

    def _patiently(self, call: Callable[[], _Answer]) -> _Answer:
        """Call it again if the store does not answer; raises Unavailable, or InvalidRequest if it refuses."""
        for tries in range(1, _TRIES + 1):
            try:
                return call()
            except StoreRefused as error:
                raise InvalidRequest(f"{self.shown} cannot be used: {error}. Check its URL and credentials") from error
            except StoreUnreachable as error:
                if tries == _TRIES:
                    raise Unavailable(f"{self.shown} cannot be reached: {error}. Try again later") from error
            self._world.clock.wait(threading.Event(), _PAUSE_S * tries)
        raise AssertionError


def _note(content: bytes) -> dict[str, Any]:
    with suppress(msgspec.DecodeError, msgspec.ValidationError):
        return msgspec.json.decode(content, type=dict[str, Any])
    return {}


def kept_numbers(found: Sequence[BackupList], source: str, keep: int | None, since_ns: int | None) -> set[int]:
    """Return the backups to keep: all of other folders, the newest `keep`, those since a time, and always the newest.

    Without `keep` and a time, all are kept.
    """
    ours = sorted((each for each in found if each.source == source), key=lambda each: (each.time_ns, each.number))
    kept = {each.number for each in found if each.source != source}
    if keep is None and since_ns is None:
        return {each.number for each in found}
    kept |= {each.number for each in ours[-max(keep or 1, 1) :]}
    if since_ns is not None:
        kept |= {each.number for each in ours if each.time_ns >= since_ns}
    return kept
