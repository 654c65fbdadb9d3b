"""Where a server is, as people write it: http://host:port, https://host:port, unix:/path; with a queue behind it."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.broker.folder.layout import is_store
from holdfast.errors import InvalidRequest
from holdfast.later import pattern, urllib_parse

_PORTS: Final = {"http": 80, "https": 443}
# What was surely meant for a server: another scheme, or host:port without one.
_ALMOST: Final = pattern(r"[A-Za-z][A-Za-z0-9+.-]*://|[A-Za-z0-9.-]+:\d{1,5}(/|$)")


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a server; `queue` is the queue that the text named after it."""

    text: str
    host: str = ""
    port: int = 0
    secure: bool = False
    socket: str | None = None
    queue: str | None = None

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        if self.socket is not None:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.secure else "http"] else f"{host}:{self.port}"


def is_address(place: object) -> bool:
    """Return whether the text is the address of a server, not a folder."""
    return isinstance(place, str) and place.startswith(("http://", "https://", "unix:"))


def queue_named(place: object) -> str | None:
    """Return the queue that an address names; None for a folder."""
    return parse_address(place).queue if is_address(place) else None


def refuse_almost(place: object) -> None:
    """Refuse what is almost an address, so that it does not become a folder of that name."""
    if isinstance(place, str) and not is_address(place) and not is_store(place) and _ALMOST.match(place):
        raise InvalidRequest(
            f"{place!r} is no address: give http://host:port, https://host:port or unix:/path, or the place of a store "
            f"such as s3://bucket/name; if it is a folder, write ./{place}"
        )


def parse_address(text: object) -> Address:
    """Parse an address."""
    if not isinstance(text, str) or not is_address(text):
        raise InvalidRequest(f"{text!r} is no address: give http://host:port, https://host:port or unix:/path")
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path.startswith("/"):
            raise InvalidRequest(f"{text!r} is no address: a socket has an absolute path, such as unix:/run/holdfast")
        return Address(text=text, socket=path)
    try:
        parts = urllib_parse.urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise InvalidRequest(f"{text!r} is no address: {error}") from None
    if not parts.hostname or parts.query or parts.fragment or parts.username is not None:
        raise InvalidRequest(f"{text!r} is no address: give http://host:port, and a token by itself")
    queue = urllib_parse.unquote(parts.path.strip("/")).removeprefix("v1/queues/")
    if "/" in queue:
        raise InvalidRequest(f"{text!r} is no address of a queue: give http://host:port/queue")
    return Address(
        text=text.rstrip("/") if not queue else text[: text.index("/", text.index("//") + 2)],
        host=parts.hostname,
        port=port or _PORTS[parts.scheme],
        secure=parts.scheme == "https",
        queue=queue or None,
    )
