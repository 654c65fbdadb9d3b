"""For servers that count nothing: those of processes that only share a folder."""

from __future__ import annotations

from collections.abc import AsyncIterator


class NoMeter:
    """Is told of everything, and keeps nothing."""

    def request_done(
        self, route: str, method: str, status: int, seconds: float, bytes_in: int, bytes_out: int
    ) -> None: ...

    def connection_opened(self) -> None: ...

    def connection_closed(self) -> None: ...

    def connection_refused(self, reason: str) -> None: ...

    def counted(self, route: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        return chunks
