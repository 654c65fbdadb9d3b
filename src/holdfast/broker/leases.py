"""Messages under lease: what a holder has and settled, leases that renew themselves, and receipts as proof."""

from __future__ import annotations

import logging
import struct
import threading
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from hmac import compare_digest
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.broker.folder.layout import ReceiptText, message_id
from holdfast.checksum import crc32c
from holdfast.delivery.decide import held, lost
from holdfast.delivery.events import Buried, BuriedReady, Event, Receipt
from holdfast.delivery.group import Group, Lease
from holdfast.env import World
from holdfast.errors import LeaseLost
from holdfast.model import Appended, Record
from holdfast.storage.files import durable_replace, join, read_file, translated

if TYPE_CHECKING:
    from holdfast.broker.delivery import Delivery


logger = logging.getLogger(__name__)

_UNHANDLED: Final = (
    "message %d of %s was dropped without ack or nack, and comes back; use `with message:` (this is said only once)"
)


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """A message in a holder's hands."""

    record: Record
    lease: Lease
    attempt: int
    home: Delivery  # that it was taken from

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
    """Something was decided and written; `Delivery.wait` returns when it is as safe as it should be."""

    events: Sequence[Event] = ()
    appended: Appended | None = None
    refused: LeaseLost | None = None  # for some of the messages; the others count

    @property
    def buried(self) -> bool:
        """Whether a message died, and has still to be moved."""
        return any(isinstance(event, Buried | BuriedReady) for event in self.events)


class Dropped:
    """Receipts of messages that nobody has in hand any more, and nobody settled."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._receipts: list[Receipt] = []  # filled by finalizers, at any point of any thread: append and pop only
        self._warned = False
        self.add = self._receipts.append

    def __bool__(self) -> bool:
        return bool(self._receipts)

    def take(self, group: Group) -> Iterator[Receipt]:
        """Each of them that is still held, once."""
        while self._receipts:
            receipt = self._receipts.pop()
            if held(group, receipt):
                if not self._warned:
                    self._warned = True
                    logger.warning(_UNHANDLED, receipt.offset, self._folder)
                yield receipt


def lease_lost(group: Group, receipts: Sequence[Receipt]) -> LeaseLost:
    """The error for receipts that are no longer good."""
    error = lost(group, receipts[0])
    error.offsets = tuple(receipt.offset for receipt in receipts)
    if len(receipts) > 1:
        error.args = (f"{error.args[0]}. So it is with {len(receipts)} messages of this call; the others are done",)
    return error


# Leases that renew themselves for as long as their holders have the messages in hand.


class Renewals:
    """Which leases are kept alive, and for how long each time. Whoever uses it holds the group's lock."""

    def __init__(self) -> None:
        self._lease_ms: dict[Receipt, int] = {}

    def add(self, receipt: Receipt, lease_ms: int) -> None:
        self._lease_ms[receipt] = lease_ms

    def remove(self, receipt: Receipt) -> None:
        """Its lease ends by itself from now on. Needs no lock; finalizers call it, at any point of any thread."""
        self._lease_ms.pop(receipt, None)

    def due(self, group: Group, mono_ms: int) -> list[tuple[Receipt, int]]:
        """Those to be extended now, because a third is used up; those that are settled or lost are forgotten."""
        found: list[tuple[Receipt, int]] = []
        for receipt, lease_ms in self._lease_ms.copy().items():
            if not held(group, receipt):
                self.remove(receipt)
            elif group.leases[receipt.offset].until_ms - mono_ms <= lease_ms * 2 // 3 + 1:
                found.append((receipt, lease_ms))
        return found

    def next_ms(self) -> int | None:
        """In how many ms to look again."""
        return min((lease_ms // 3 + 1 for lease_ms in list(self._lease_ms.values())), default=None)


# Receipts and lease ids: texts that prove a lease, signed with the key of the data folder.


KEY_FILE: Final = "receipts.key"
KEY_BYTES: Final = 32
_MAGIC: Final = b"HFPROOF1"
_LAYOUT: Final = struct.Struct(f"<8s{KEY_BYTES}sI")

assert _LAYOUT.size == 44  # keeps the table above and the code in step


class FolderKey:
    """The key of one data folder, read or made when it is first needed. Safe to use from any thread."""

    def __init__(self, world: World, root: str) -> None:
        self._world = world
        self._root = root
        self._lock = threading.Lock()
        self._key: bytes | None = None

    def get(self) -> bytes:
        """The key. Only the owner of the folder asks for it."""
        if self._key is None:
            with self._lock, translated(join(self._root, KEY_FILE)):
                if self._key is None:
                    self._key = self._read() or self._make()
        return self._key

    def _read(self) -> bytes | None:
        path = join(self._root, KEY_FILE)
        content = read_file(self._world.disk, path)
        if content is None:
            return None
        key = _key_of(content)
        if key is not None:
            return key
        logger.error(
            "the key of receipts is damaged; another one is made, and receipts that are out are refused",
            extra={"path": path},
        )
        return None

    def _make(self) -> bytes:
        key = self._world.ids.random_bytes(KEY_BYTES)
        content = _LAYOUT.pack(_MAGIC, key, crc32c(_MAGIC + key))
        durable_replace(self._world.disk, self._root, KEY_FILE, content)
        return key


def key_is_whole(world: World, root: str) -> bool:
    """Whether the key of a folder is what was written; one that was never made is, too."""
    content = read_file(world.disk, join(root, KEY_FILE))
    return content is None or _key_of(content) is not None


def _key_of(content: bytes) -> bytes | None:
    if len(content) != _LAYOUT.size:
        return None
    magic, key, checksum = _LAYOUT.unpack(content)
    found: bytes = key
    return found if magic == _MAGIC and checksum == crc32c(content[: _LAYOUT.size - 4]) else None


# Receipts and lease ids: texts that prove a lease, and that nobody can make up.
#
# Both are the name of what is leased, an `@` and a token, which is base64url of:
#
#     at   size  field
#     0    1     version       1
#     1    8     fence         big endian, like the next one
#     9    4     granted       when the lease was granted, in ms since 1970: the lowest 32 bits
#     13   11    mac           BLAKE2b over scope, bytes 0..12 and name, with the folder's key
#
# The scope of a receipt is the topic's id and time of creation and the group's name: it is good for no other group,
# and for no other topic of the same name. A group that was deleted and made again counts from the start, so the fence
# alone could be given twice: the time of the grant tells the two lives apart.
#
# Before there were tokens, the fence stood behind the `@`, as a hexadecimal number. Leases of that time are in the
# journals, and their holders may still be at work: such a text is taken for a lease whose fence has no mark, and every
# fence that was given since then has it. So nobody can make one up for a lease of today.


VERSION: Final = 1
TOKEN_CHARACTERS: Final = 32
_MAC_BYTES: Final = 11
_HEAD: Final = struct.Struct(">BQI")
_TIME: Final = 0xFFFF_FFFF

assert _HEAD.size == 13  # keeps the table above and the code in step
assert (_HEAD.size + _MAC_BYTES) * 4 == TOKEN_CHARACTERS * 3  # no padding: one text for each value

_TO_URL: Final = bytes.maketrans(b"+/", b"-_")
_FROM_URL: Final = bytes.maketrans(b"-_", b"+/")


class Proven(NamedTuple):
    """What a token proves; `granted` is -1 where it is of the old form."""

    fence: int
    granted: int

    def is_of(self, at_ms: int) -> bool:
        """Whether the lease that was granted then is the one that is meant."""
        return self.granted in (-1, at_ms & _TIME)


class Prover:
    """Writes and reads the tokens of one scope; `mark` is the bit that fences of leases with a token have."""

    def __init__(self, key: bytes, *scope: str | int, mark: int) -> None:
        self._mark = mark
        self._scope = blake2b(key=key, digest_size=_MAC_BYTES)
        self._scope.update("".join(f"{part}\0" for part in scope).encode())

    def text(self, name: str, fence: int, at_ms: int) -> str:
        """The proof of a lease."""
        head = _HEAD.pack(VERSION, fence, at_ms & _TIME)
        token = b2a_base64(head + self._mac(head, name), newline=False).translate(_TO_URL)
        return f"{name}@{token.decode()}"

    def read(self, name: str, token: str) -> Proven | None:
        """What a token behind this name proves; None where it is not ours."""
        if len(token) != TOKEN_CHARACTERS:
            return self._read_old(token)
        content = a2b_base64(token.encode().translate(_FROM_URL))
        head = content[: _HEAD.size]
        if not compare_digest(content[_HEAD.size :], self._mac(head, name)):
            return None
        version, fence, granted = _HEAD.unpack(head)
        return Proven(fence, granted) if version == VERSION else None

    def _read_old(self, token: str) -> Proven | None:
        fence = int(token, 16)
        return None if fence & self._mark else Proven(fence, -1)

    def _mac(self, head: bytes, name: str) -> bytes:
        mac = self._scope.copy()
        mac.update(head + name.encode())
        return mac.digest()


class Receipts:
    """The receipts of one group on one partition: written for whoever takes a message, read when it comes back."""

    def __init__(self, topic: str, number: int, group: Group, prover: Callable[[], Prover]) -> None:
        self._topic = topic
        self._number = number
        self._group = group
        self._new_prover = prover

    @cached_property
    def _prover(self) -> Prover:
        return self._new_prover()  # not before it is needed: the folder's key is made by then

    def text(self, offset: int, lease: Lease) -> str:
        """The receipt for a message under this lease, for whoever holds it and nobody else."""
        return self._prover.text(message_id(self._topic, self._number, offset, None), lease.fence, lease.at_ms)

    def proof(self, given: ReceiptText) -> Receipt | None:
        """The delivery that a receipt proves, held or not; None where it proves none of this group."""
        name = message_id(self._topic, self._number, given.offset, None)
        proven = self._prover.read(name, given.token)
        if proven is not None:
            receipt, lease = Receipt(given.offset, proven.fence), self._group.leases.get(given.offset)
            if lease is None or lease.fence != receipt.fence or proven.is_of(lease.at_ms):
                return receipt
        return None

    def unproven(self, given: ReceiptText) -> LeaseLost:
        """The error for a receipt that proves nothing here."""
        name = message_id(self._topic, self._number, given.offset, None)
        # One answer for all that may be wrong with it: whoever tries texts learns nothing.
        return LeaseLost(
            f"this receipt does not prove that message {name} is yours: it is of another group, of an earlier topic or "
            f"group of this name, or {self._topic} never gave it. Nothing was changed; what you hold by it, if "
            "anything, comes back when its lease ends",
            offsets=(given.offset,),
            why="the receipt is not one of this group",
        )
