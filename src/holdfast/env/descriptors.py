"""File descriptors of this process: how many it may have, and how many it has."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from typing import Final

# Where the system names no limit, one that nobody reaches.
_UNLIMITED: Final = 1 << 30


def descriptor_limit() -> int:
    """How many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> int:
    """As many as the system lets this process ask for; answers how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_limit()


def open_descriptors() -> int:
    """How many this process has open now."""
    return len(os.listdir("/proc/self/fd")) - 1  # without the one of this look
