"""What every contestant can do, in the words of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

NOTHING = "nothing"
KILL = "kill -9"
POWER_CUT = "power cut"
NO_ACK = "no ack"


class Peer:
    """A queue or log in a folder; `survives` is the worst that cannot take away a put that returned."""

    name: ClassVar[str]
    survives: ClassVar[str]
    note: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    threads: ClassVar[bool] = True
    """Whether several threads may put at once."""
    scans: ClassVar[bool] = True
    """Whether `read_all` works in a time that grows with the messages only."""

    def __init__(self, body_bytes: int) -> None:
        # Only the floors use it: they store no lengths.
        self.body_bytes = body_bytes

    def open(self, folder: Path) -> None:
        """Open, or open again, what lies in the folder."""
        raise NotImplementedError

    def put(self, body: bytes) -> None:
        """One message; returns when it survives what the class says."""
        raise NotImplementedError

    def put_each(self, bodies: Sequence[bytes]) -> None:
        """One by one. A peer whose call takes about a microsecond has its own loop, without our wrapper."""
        put = self.put
        for body in bodies:
            put(body)

    def put_many(self, bodies: list[bytes]) -> None:
        """Together where the peer has a way to do that, else one by one."""
        self.put_each(bodies)

    def read_all(self) -> int:
        """Read every body back; answers how many there were."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the folder."""
