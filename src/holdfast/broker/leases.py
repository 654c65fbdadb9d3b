"""Leased messages, leases that are renewed automatically, and receipts: texts that prove a lease."""

from __future__ import annotations

import struct
import threading
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.broker.folder.layout import (
    RUN_HEAD_BYTES,
    TOKEN_MAC_BYTES,
    TOKEN_TO_URL,
    ReceiptText,
    message_id,
    run_receipt,
)
from holdfast.checksum import crc32c
from holdfast.delivery.decide import held, lost
from holdfast.delivery.events import Buried, BuriedReady, Event, Receipt
from holdfast.delivery.group import Group, Lease
from holdfast.env import World
from holdfast.env.process import get_logger
from holdfast.errors import Conflict, LeaseLost
from holdfast.later import hashlib, hmac
from holdfast.model import Appended, Record
from holdfast.storage.files import durable_replace, join, read_file, translated, with_space

if TYPE_CHECKING:
    from holdfast.broker.delivery import Delivery


logger = get_logger(__name__)

_UNHANDLED: Final = (
    "message %d of %s was dropped without ack or nack, and returns to the queue; use `with message:` (logged only once)"
)


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """A message leased to a holder."""

    record: Record
    lease: Lease
    attempt: int
    home: Delivery  # where it was received

    @property
    def receipt(self) -> Receipt:
        return Receipt(self.record.offset, self.lease.fence)

    @property
    def holder(self) -> str:
        return self.lease.holder

    @property
    def fence(self) -> int:
        return self.lease.fence


class Pending(msgspec.Struct, frozen=True, gc=False):
    """A change that is written; `Delivery.wait` returns when it is as durable as requested."""

    events: Sequence[Event] = ()
    appended: Appended | None = None
    refused: LeaseLost | Conflict | None = None  # covers only some of the messages; the others were changed

    @property
    def buried(self) -> bool:
        """Whether a message died and must be moved to the dead letters."""
        return any(isinstance(event, Buried | BuriedReady) for event in self.events)


class Dropped:
    """Receipts of messages that were garbage-collected without being settled."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.receipts: list[Receipt] = []  # finalizers add at any point of any thread: only append and pop
        self._warned = False
        self.add = self.receipts.append

    def take(self, group: Group) -> Iterator[Receipt]:
        """Remove and yield the receipts; those whose leases have ended are left out."""
        while self.receipts:
            receipt = self.receipts.pop()
            if held(group, receipt):
                if not self._warned:
                    self._warned = True
                    logger.warning(_UNHANDLED, receipt.offset, self._folder)
                yield receipt


def lease_lost(group: Group, receipts: Sequence[Receipt]) -> LeaseLost:
    """The error for receipts that are no longer valid."""
    error = lost(group, receipts[0])
    error.offsets = tuple(receipt.offset for receipt in receipts)
    if len(receipts) > 1:
        error.args = (f"{error.args[0]}. This applies to {len(receipts)} messages of this call; the others are done",)
    return error


class Renewals:
    """Leases that are renewed for as long as their holders keep the messages. Callers hold the group's lock."""

    def __init__(self) -> None:
        self._lease_ms: dict[Receipt, int] = {}

    def add(self, receipt: Receipt, lease_ms: int) -> None:
        self._lease_ms[receipt] = lease_ms

    def remove(self, receipt: Receipt) -> None:
        """Stop renewing. Needs no lock: finalizers call it at any point of any thread."""
        self._lease_ms.pop(receipt, None)

    def due(self, group: Group, mono_ms: int) -> list[tuple[Receipt, int]]:
        """The leases to extend now, because a third of their time has passed; forgets those settled or lost."""
        found: list[tuple[Receipt, int]] = []
        for receipt, lease_ms in self._lease_ms.copy().items():
            if not held(group, receipt):
                self.remove(receipt)
            elif group.leases[receipt.offset].until_ms - mono_ms <= lease_ms * 2 // 3 + 1:
                found.append((receipt, lease_ms))
        return found

    def next_ms(self) -> int | None:
        """Ms until `due` should be called again; None if no lease is renewed."""
        return min((lease_ms // 3 + 1 for lease_ms in list(self._lease_ms.values())), default=None)


# The key that signs receipts and lease ids: the file `receipts.key` in the data folder.
#
#     at   size  field
#     0    8     magic    "HFPROOF1"
#     8    32    key      random bytes
#     40   4     check    CRC32C of all bytes before it


KEY_FILE: Final = "receipts.key"
KEY_BYTES: Final = 32
_MAGIC: Final = b"HFPROOF1"
_LAYOUT: Final = struct.Struct(f"<8s{KEY_BYTES}sI")

assert _LAYOUT.size == 44  # keeps the table above and the code in step


class FolderKey:
    """The key of one data folder, read or created on first use. Thread-safe."""

    def __init__(self, world: World, root: str) -> None:
        self._world = world
        self._root = root
        self._lock = threading.Lock()
        self._key: bytes | None = None

    def get(self) -> bytes:
        """Return the key, creating it if needed. Only the owner of the folder may call this."""
        if self._key is None:
            with self._lock, translated(join(self._root, KEY_FILE)):
                if self._key is None:
                    self._key = self._read() or self._make()
        return self._key

    def existing(self) -> bytes | None:
        """Return the content of the key's file; None if there is none yet."""
        return read_file(self._world.disk, join(self._root, KEY_FILE))

    def _read(self) -> bytes | None:
        path = join(self._root, KEY_FILE)
        content = read_file(self._world.disk, path)
        if content is None:
            return None
        key = _key_of(content)
        if key is not None:
            return key
        logger.error(
            "the key that signs receipts is damaged; a new one was created, and outstanding receipts are refused",
            extra={"path": path},
        )
        return None

    def _make(self) -> bytes:
        key = self._world.ids.random_bytes(KEY_BYTES)
        content = _LAYOUT.pack(_MAGIC, key, crc32c(_MAGIC + key))
        world = self._world
        # A consumer in another process needs it for its first ack, also on a full disk.
        with_space(world, len(content), lambda: durable_replace(world.disk, self._root, KEY_FILE, content))
        return key


def topic_key(world: World, folder: str) -> FolderKey | None:
    """Return the key that a topic has brought from the folder where it was before; None if it was always here."""
    return FolderKey(world, folder) if world.disk.exists(join(folder, KEY_FILE)) else None


def key_is_whole(world: World, root: str) -> bool:
    """Whether the folder's key file is intact or was never created."""
    content = read_file(world.disk, join(root, KEY_FILE))
    return content is None or _key_of(content) is not None


def _key_of(content: bytes) -> bytes | None:
    if len(content) != _LAYOUT.size:
        return None
    magic, key, checksum = _LAYOUT.unpack(content)
    found: bytes = key
    return found if magic == _MAGIC and checksum == crc32c(content[: _LAYOUT.size - 4]) else None


# Receipts and lease ids: texts that prove a lease and cannot be forged.
#
# Both consist of the name of what is leased, an `@` and a token, which is base64url of:
#
#     at   size  field
#     0    1     version       1 for a lease id, 2 for a receipt
#     1    8     fence         big endian, like the next one
#     9    4     granted       time of the grant in ms since 1970: the lowest 32 bits
#     13   11    mac
#
# In a lease id the mac is BLAKE2b over scope, bytes 0..12 and name, with the folder's key. In a receipt it is made in
# two steps, because messages are leased together: BLAKE2b over scope, bytes 0..12 and the name up to the offset, with
# the folder's key, is the key of the run, of 16 bytes; BLAKE2b over the offset, with the key of the run, is the mac.
# A caller who holds all messages of a run may have its key, and make their receipts when they are needed: bytes 0..12
# and the key are the run's token. From a receipt nobody can tell the key, nor another receipt.
#
# The scope of a receipt is the topic's id, its creation time and the group's name, so it is not valid for another group
# or for a later topic of the same name. A group that is deleted and created again restarts its fences, so the
# same fence can be given twice; the time of the grant tells the two apart.
#
# Receipts of version 1 were made as lease ids are. Even older versions wrote the fence as a hexadecimal number after
# the `@`. Such leases may still be in the journals, and their holders still at work, so both are accepted; a
# hexadecimal number only for fences without a mark bit. All fences given since then have that bit, so nobody can forge
# an old receipt for a current lease.


VERSION: Final = 1
RUN_VERSION: Final = 2
TOKEN_CHARACTERS: Final = 32
_RUN_KEY_BYTES: Final = 16
_HEAD: Final = struct.Struct(">BQI")
RUN_TOKEN_BYTES: Final = 29
_TIME: Final = 0xFFFF_FFFF
_MOST_GIVEN: Final = 128  # texts that are kept for one group on one partition, twice
_NEVER_GIVEN: Final = (-1, -1, "")

assert _HEAD.size == RUN_HEAD_BYTES  # keeps the table above and the code in step
assert _HEAD.size + _RUN_KEY_BYTES == RUN_TOKEN_BYTES
assert (_HEAD.size + TOKEN_MAC_BYTES) * 4 == TOKEN_CHARACTERS * 3  # no padding: one text for each value

_FROM_URL: Final = bytes.maketrans(b"-_", b"+/")


class Proven(NamedTuple):
    """What a token proves; `granted` is -1 for the old form."""

    fence: int
    granted: int

    def is_of(self, at_ms: int) -> bool:
        """Whether this is about the lease granted at that time."""
        return self.granted in (-1, at_ms & _TIME)


class Prover:
    """Writes and verifies the tokens of one scope; `mark` is the bit set in all fences of leases with tokens."""

    def __init__(self, key: bytes, *scope: str | int, mark: int) -> None:
        self._mark = mark
        said = "".join(f"{part}\0" for part in scope).encode()
        self._scope = hashlib.blake2b(said, key=key, digest_size=TOKEN_MAC_BYTES)
        self._runs = hashlib.blake2b(said, key=key, digest_size=_RUN_KEY_BYTES, person=b"run")

    def text(self, name: str, fence: int, at_ms: int) -> str:
        """The lease id of a lease."""
        head = _HEAD.pack(VERSION, fence, at_ms & _TIME)
        return f"{name}@{b2a_base64(head + self._mac(head, name), newline=False).translate(TOKEN_TO_URL).decode()}"

    def run(self, start: str, fence: int, at_ms: int) -> bytes:
        """The token of messages that were leased at once, and whose names start with this."""
        head = _HEAD.pack(RUN_VERSION, fence, at_ms & _TIME)
        key = self._runs.copy()
        key.update(head + start.encode())
        return head + key.digest()

    def read_run(self, start: str, token: bytes) -> Proven | None:
        """Verify the token of a run; None if it is not valid."""
        if len(token) != RUN_TOKEN_BYTES:
            return None
        version, fence, granted = _HEAD.unpack_from(token)
        if version != RUN_VERSION or not hmac.compare_digest(token, self.run(start, fence, granted)):
            return None
        return Proven(fence, granted)

    def read(self, name: str, token: str) -> Proven | None:
        """Verify the token after this name; None if it is not valid."""
        if len(token) != TOKEN_CHARACTERS:
            return self._read_old(token)
        content = a2b_base64(token.encode().translate(_FROM_URL))
        head = content[: _HEAD.size]
        version, fence, granted = _HEAD.unpack(head)
        if version == RUN_VERSION:
            start, dash, offset = name.rpartition("-")
            start += dash
            if not offset.isdecimal():
                return None
            given_out = run_receipt(self.run(start, fence, granted), start, int(offset))
            is_it = hmac.compare_digest(f"{name}@{token}".encode(), given_out.encode())
            return Proven(fence, granted) if is_it else None
        if not hmac.compare_digest(content[_HEAD.size :], self._mac(head, name)):
            return None
        return Proven(fence, granted) if version == VERSION else None

    def _read_old(self, token: str) -> Proven | None:
        fence = int(token, 16)
        return None if fence & self._mark else Proven(fence, -1)

    def _mac(self, head: bytes, name: str) -> bytes:
        mac = self._scope.copy()
        mac.update(head + name.encode())
        return mac.digest()


class Receipts:
    """Writes and verifies the receipts of one group on one partition."""

    def __init__(self, topic: str, number: int, group: Group, prover: Callable[[], Prover]) -> None:
        self._topic = topic
        self._number = number
        self._group = group
        self._new_prover = prover
        # The last texts that were given out, by offset: most come back before many others do.
        # When these are many, they become the earlier ones: so the latest are never all forgotten at once.
        self._given: dict[int, tuple[int, int, str]] = {}
        self._given_earlier: dict[int, tuple[int, int, str]] = {}

    @cached_property
    def _prover(self) -> Prover:
        return self._new_prover()  # only when needed, because this creates the folder's key

    @cached_property
    def start(self) -> str:
        """What the names of all messages of the partition start with."""
        return message_id(self._topic, self._number, 0, None)[:-1]

    def run(self, lease: Lease) -> bytes:
        """The token of the messages that were leased at once: whoever has it has their receipts."""
        return self._prover.run(self.start, lease.fence, lease.at_ms)

    def proven_run(self, token: bytes) -> Proven | None:
        """What the token of a run proves; None if it is not of this group."""
        return self._prover.read_run(self.start, token)

    def text(self, offset: int, lease: Lease) -> str:
        """The receipt of a message under this lease. Only its holder may see it."""
        fence, at_ms = lease.fence, lease.at_ms
        text = run_receipt(self._prover.run(self.start, fence, at_ms), self.start, offset)
        if len(self._given) >= _MOST_GIVEN:
            self._given_earlier, self._given = self._given, {}
        self._given[offset] = fence, at_ms, text
        return text

    def current(self, text: str, offset: int) -> Receipt | None:
        """The receipt, if the text is exactly the one given out for the message's lease; else see `proof`.

        That saves parsing the text: it is written once more, and compared.
        """
        lease = self._group.leases.get(offset)
        if lease is None:
            return None
        fence, at_ms, given_out = self._given.get(offset) or self._given_earlier.get(offset, _NEVER_GIVEN)
        if (fence, at_ms) != (lease.fence, lease.at_ms):
            given_out = run_receipt(self.run(lease), self.start, offset)
        if not hmac.compare_digest(given_out.encode(), text.encode()):
            return None
        return Receipt(offset, lease.fence)

    def proof(self, given: ReceiptText) -> Receipt | None:
        """Verify a receipt, whether or not its lease is still valid; None if it is not of this group."""
        name = message_id(self._topic, self._number, given.offset, None)
        proven = self._prover.read(name, given.token)
        if proven is not None:
            receipt, lease = Receipt(given.offset, proven.fence), self._group.leases.get(given.offset)
            if lease is None or lease.fence != receipt.fence or proven.is_of(lease.at_ms):
                return receipt
        return None

    def unproven(self, given: ReceiptText) -> LeaseLost:
        """The error for a receipt that is not of this group."""
        name = message_id(self._topic, self._number, given.offset, None)
        # The same answer whatever is wrong with it, so that guessing reveals nothing.
        return LeaseLost(
            f"this receipt is not valid for message {name}: it belongs to another group, or to an earlier topic or "
            f"group of this name, or {self._topic} never issued it. Nothing was changed; if it does hold a message, "
            "that message returns when its lease ends",
            offsets=(given.offset,),
            why="the receipt does not belong to this group",
        )
