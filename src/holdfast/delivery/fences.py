"""Fencing numbers: each is higher than all before it, and tells in whose time it was given.

Their bits from 40 up are the session of whoever gave them. The bit below says that the lease has a receipt which
nobody can make up: versions before that never set it, for they would have had to lease 2**39 times in one session.
"""

from __future__ import annotations

from typing import Final

SESSION_BITS: Final = 40
PROVEN: Final = 1 << (SESSION_BITS - 1)


def next_fence(last: int) -> int:
    """The one after `last`."""
    return (last + 1) | PROVEN
