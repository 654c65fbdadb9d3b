"""What one client may ask of a connection, before anybody knows who it is."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and times that a connection is held to."""

    header_bytes: int = 64 * 1024
    body_bytes: int = 64 * 1024 * 1024
    header_s: float = 10.0  # from the first byte of a request, or the connection's beginning, to its last header
    body_grace_s: float = 10.0  # a body may take so long,
    body_bytes_per_s: int = 16 * 1024  # and a second more for each so many bytes of it
    idle_s: float = 75.0  # between two requests
    write_s: float = 30.0  # without reading what it is sent
    connections: int = 10_000
    connections_per_address: int | None = None  # None: three quarters of all, so that others find room
    reserve: int = 32  # more connections than that, for health checks and admins

    @property
    def per_address(self) -> int:
        """How many connections one address may have."""
        if self.connections_per_address is not None:
            return self.connections_per_address
        return self.connections - self.connections // 4
