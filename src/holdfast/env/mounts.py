"""Which mount a folder lies on. A file system that is unmounted and mounted anew forgets what was never synced,
as a restart of the machine does: without a restart, that is what a failed disk leaves behind.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

_AT_FDCWD: Final = -100
_UNIQUE_ID: Final = 0x4000  # STATX_MNT_ID_UNIQUE: never given to another mount until the machine restarts
_STATX_BYTES: Final = 256
_MASK_AT: Final = 0
_MOUNT_ID_AT: Final = 144


def mount_id(folder: str) -> int:
    """A number that no other mount has had since the machine was started; 0 where the kernel cannot tell (< 6.8)."""
    statx = _statx()
    if statx is None:
        return 0
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(_AT_FDCWD, folder.encode("utf-8", "surrogateescape"), 0, _UNIQUE_ID, answer) != 0:
        return 0
    mask = int.from_bytes(answer.raw[_MASK_AT : _MASK_AT + 4], "little")
    known = answer.raw[_MOUNT_ID_AT : _MOUNT_ID_AT + 8] if mask & _UNIQUE_ID else b""
    return int.from_bytes(known, "little") & (2**63 - 1)


@cache
def _statx() -> Any:
    try:
        return ctypes.CDLL(None).statx
    except (OSError, AttributeError):  # another system, or an old C library
        return None
