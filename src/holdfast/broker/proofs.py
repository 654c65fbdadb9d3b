"""Receipts and lease ids: texts that prove a lease, and that nobody can make up.

Both are the name of what is leased, an `@` and a token, which is base64url of:

    at   size  field
    0    1     version       1
    1    8     fence         big endian, like the next one
    9    4     granted       when the lease was granted, in ms since 1970: the lowest 32 bits
    13   11    mac           BLAKE2b over scope, bytes 0..12 and name, with the folder's key

The scope of a receipt is the topic's id and time of creation and the group's name: it is good for no other group,
and for no other topic of the same name. A group that was deleted and made again counts from the start, so the fence
alone could be given twice: the time of the grant tells the two lives apart.

Before there were tokens, the fence stood behind the `@`, as a hexadecimal number. Leases of that time are in the
journals, and their holders may still be at work: such a text is taken for a lease whose fence has no mark, and every
fence that was given since then has it. So nobody can make one up for a lease of today.
"""

from __future__ import annotations

import struct
from binascii import a2b_base64, b2a_base64
from hashlib import blake2b
from hmac import compare_digest
from typing import Final, NamedTuple

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
