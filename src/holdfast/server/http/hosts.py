"""What a Host header may say: a name or an address, and a port; nothing else that a URL could hold there."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Final

_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9_][A-Za-z0-9._-]{0,252}))(?::([0-9]{0,5}))?")
_KEPT: Final = 64  # a server goes by few names, and every call says one
_MOST_PORT: Final = 65_535


@lru_cache(maxsize=_KEPT)
def parse_host(text: str) -> tuple[str, int | None] | None:
    """Name and port in small letters, None where there is no port; None for what is no host at all."""
    found = _HOST.fullmatch(text)
    if found is None:
        return None
    address, name, digits = found.groups()
    if address is not None and not _is_ipv6(address):
        return None
    port = int(digits) if digits else None
    if port is not None and port > _MOST_PORT:
        return None
    return (address or name).lower(), port


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False
