"""Numbers that must not repeat, and the facts that name this process and this boot."""

from __future__ import annotations

import os
import random
import secrets
import socket
import sys
import uuid
from pathlib import Path
from typing import Protocol


class Ids(Protocol):
    """Where randomness and identity come from."""

    def random_u32(self) -> int:
        """A number from 1 to 2**32 - 1."""

    def random_bytes(self, count: int) -> bytes:
        """So many bytes that nobody can guess."""

    def boot_id(self) -> int:
        """A 64-bit number that changes whenever the machine starts anew; 0 where it cannot be known."""

    def process_note(self) -> dict[str, str | int]:
        """Who we are, for the one who finds our lock: pid, host, command."""


class SystemIds:
    """Randomness and identity of the real machine."""

    def __init__(self) -> None:
        self._boot_id = _read_boot_id()

    def random_u32(self) -> int:
        return secrets.randbelow(2**32 - 1) + 1

    def random_bytes(self, count: int) -> bytes:
        return secrets.token_bytes(count)

    def boot_id(self) -> int:
        return self._boot_id

    def process_note(self) -> dict[str, str | int]:
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv[0] else "python"
        return {"pid": os.getpid(), "host": socket.gethostname(), "command": command[:200]}


class SeededIds:
    """The same numbers for the same seed; `reboot` stands for a machine that starts anew."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._boot_id = self._random.getrandbits(63) | 1

    def random_u32(self) -> int:
        return self._random.randrange(1, 2**32)

    def random_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def boot_id(self) -> int:
        return self._boot_id

    def reboot(self) -> None:
        self._boot_id = self._random.getrandbits(63) | 1

    def process_note(self) -> dict[str, str | int]:
        return {"pid": 1, "host": "simulation", "command": "simulation"}


def _read_boot_id() -> int:
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return uuid.UUID(text.strip()).int >> 64
    except (OSError, ValueError):
        return 0
