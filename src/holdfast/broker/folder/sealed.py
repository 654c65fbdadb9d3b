"""Small JSON files that carry a checksum: a flipped bit in a number would otherwise be taken for another number.

The checksum is the first member, ``"check"``: CRC32C, in hexadecimal, of all bytes behind it. A file without one was
written by an older release, or by a person, and is taken as it is; the next write gives it one.
"""

from __future__ import annotations

import re
from typing import Final

from holdfast.checksum import crc32c
from holdfast.errors import ChecksumMismatch

_CHECK: Final = re.compile(rb'\{\s*"check":\s*"([0-9a-f]{8})",?')


def sealed(document: bytes) -> bytes:
    """A JSON object with its checksum."""
    rest = document.strip()[1:]
    comma = b"" if rest.strip() == b"}" else b","
    return b'{"check":"%08x"%s%s' % (crc32c(rest), comma, rest)


def is_sealed(content: bytes) -> bool:
    return _CHECK.match(content) is not None


def unsealed(content: bytes, path: str) -> bytes:
    """The object without its checksum; ChecksumMismatch where the two do not fit."""
    found = _CHECK.match(content)
    if found is None:
        return content
    rest = content[found.end() :]
    if int(found[1], 16) != crc32c(rest):
        raise ChecksumMismatch(
            f"{path} does not match its checksum: it was damaged. Restore it from a copy; or run `holdfast repair` on "
            'the data folder to go on without it. If you changed it by hand, remove "check" from it'
        )
    return b"{" + rest
