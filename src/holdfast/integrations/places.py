"""Where the adapters keep their messages: a URL names a folder, a server or a store, opened once in a process.

    holdfast:///var/lib/app/jobs          a folder, shared by all processes of this machine
    holdfast+http://:TOKEN@host:7700      a server
    holdfast+s3://bucket/jobs             a folder in a store

A plain path or address, without `holdfast`, means the same.
"""

from __future__ import annotations

import re
import ssl
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from typing import Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit, urlunsplit

import holdfast
from holdfast.client.calling import Ask
from holdfast.client.network import run
from holdfast.client.opening import client_of, is_address
from holdfast.env.process import close_in_children, end_at_exit
from holdfast.errors import Conflict, HoldfastError, InvalidRequest

Tls: TypeAlias = ssl.SSLContext | str | PathLike[str] | None

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]|_(?=x[0-9A-F]{2})|^[.-]")


def topic_name(name: str) -> str:
    """The topic of a framework's queue. What no topic may have is escaped: `celery_x40host` for `celery@host`."""
    return _UNSAFE.sub(lambda found: f"_x{ord(found.group()):02X}", name)


def place_of(url: str) -> tuple[str, str | None]:
    """Split a URL into the place that `holdfast.open_broker` takes, and the token for a server."""
    place = url.removeprefix("holdfast+").removeprefix("holdfast://")
    parts = urlsplit(place)
    if parts.scheme not in {"http", "https"} or "@" not in parts.netloc:
        return place, None
    credentials, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=host)), unquote(credentials.rpartition(":")[2]) or None


def check_answers(url: str, timeout_s: float, options: dict[str, Any] | None = None) -> None:
    """Raise Unavailable if the server at this URL does not answer in time. A folder is there when it is opened."""
    place, token = place_of(url)
    if not is_address(place):
        return
    client = client_of(place, for_tasks=False, token=token, timeout=timeout_s, **(options or {}))
    try:
        run(client.caller.call(Ask(method="GET", path="/readyz", answers=dict[str, Any])))
    finally:
        client.close()


def check_threads(place: str) -> None:
    """Raise InvalidRequest if gevent has replaced the threads of this process, and the place is not a server."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading") and not is_address(place):
        raise InvalidRequest(
            f"{place} needs real threads, which gevent has replaced here. Start `holdfast serve {place}` "
            "and use its address, such as holdfast+http://127.0.0.1:7700; or use a pool of threads or processes"
        )


def shown_url(url: str, mask: str | None = "**") -> str:
    """The URL as users of kombu write it, with a mask in place of the token; None leaves the token."""
    url = url if url.startswith("holdfast:") else f"holdfast+{url}"
    return url if mask is None else masked(url, mask)


def masked(url: str, mask: str = "**") -> str:
    """The URL with a mask in place of the token."""
    return re.sub(r"(://[^/@]*:|://)[^/:@]+@", rf"\1{mask}@", url)


class Places:
    """The brokers that this process has opened, by place: one for each, whatever the number of connections.

    They stay open until the process ends. Frameworks open and close connections all the time, and a folder that is
    closed between two of them would have to be opened, and perhaps taken over, for every task that is sent.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[tuple[str, str | None], Shared] = {}
        close_in_children(self)
        end_at_exit(self)

    def at(self, url: str, options: dict[str, Any] | None = None) -> Shared:
        """The broker at this URL."""
        place, token = place_of(url)
        with self._lock:
            shared = self._opened.get((place, token))
            if shared is None or shared.broker.closed:
                check_threads(place)
                broker = holdfast.open_broker(place, token=token, **(options or {}))
                shared = self._opened[place, token] = Shared(broker)
            return shared

    def disown(self) -> None:
        """Forget everything in a forked child, which has none of the threads that it would need."""
        self._lock = threading.Lock()
        self._opened = {}

    def end(self) -> None:
        """Close everything when the process ends."""
        for shared in self._opened.values():
            with suppress(HoldfastError):
                shared.broker.close()


class Shared:
    """The broker of one place, and the queues that connections have used."""

    def __init__(self, broker: holdfast.Broker) -> None:
        self.broker = broker
        self._queues: dict[str, holdfast.Queue[bytes]] = {}

    def queue(self, name: str, settings: dict[str, Any]) -> holdfast.Queue[bytes]:
        """The queue with this name, created if there is none."""
        found = self._queues.get(name)
        if found is None:
            found = self._queues[name] = self.open_queue(name, settings)
        return found

    def open_queue(self, name: str, settings: dict[str, Any]) -> holdfast.Queue[bytes]:
        """An object of its own for this queue, which can be closed without harm to others."""
        topic = topic_name(name)
        self.broker.create_topic(topic, exist_ok=True, **settings)
        return self.broker.queue(topic)

    def forget(self, name: str) -> None:
        self._queues.pop(name, None)

    def change(self, document: str, changed: Callable[[list[Any]], list[Any]]) -> None:
        """Change a list that is stored as a document, whoever else changes it at the same time."""
        while True:
            found = self.broker.documents.get(document)
            before = found.value if found else []
            after = changed(before)
            if after == before:
                return
            with suppress(Conflict):
                self.broker.documents.update(document, after, version=found.version if found else 0)
                return


places = Places()
