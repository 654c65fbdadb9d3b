"""Connections over TCP, TLS and Unix sockets."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import stat
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from holdfast.env.disk import ROOT, user_name
from holdfast.errors import Unauthenticated

if TYPE_CHECKING:
    import ssl

_CREDENTIALS: Final = Struct("iII")  # process, user, group
_COUNT: Final = Struct("i")
_INTERVAL: Final = Struct("ll")  # seconds, microseconds
_PATH_BYTES: Final = 107  # the longest name of a Unix socket, without its terminating zero


def connect_tcp(host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None = None) -> socket.socket:
    """Connect to a server; small messages are sent without delay."""
    # As bytes where that is possible: for text, Python loads its tables of international names first.
    name: Any = host.encode() if host.isascii() else host
    made = socket.create_connection((name, port), timeout_s)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is None:
        return made
    try:
        return tls.wrap_socket(made, server_hostname=host)
    except BaseException:
        made.close()
        raise


def connect_unix(path: str, timeout_s: float) -> socket.socket:
    """Connect to a server on this machine; raises Unauthenticated if it belongs to another user."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(timeout_s)
        with short_name(path) as name:
            made.connect(name)
        check_listener(made.fileno(), path)
    except BaseException:
        made.close()
        raise
    return made


def listen_unix(path: str) -> socket.socket:
    """Listen on a Unix socket that only this user may connect to.

    A socket left by a dead process is replaced; anything else with that name raises FileExistsError.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_name(path) as name:
            _make_room(name, path)
            os.fchmod(made.fileno(), 0o600)  # before it has a name, so that others can never connect
            made.bind(name)
        made.listen(128)
    except BaseException:
        made.close()
        raise
    return made


def _make_room(name: str, path: str) -> None:
    try:
        mode = os.lstat(name).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "something that is not a socket has this name, and is not replaced", path)
    os.unlink(name)


def check_listener(descriptor: int, path: str) -> None:
    """Raise Unauthenticated if the process listening at the path belongs to another user: it must get no data.

    Allowed are this user, root, and the owner of the socket's folder: the caller named that folder, and everything in
    it is its owner's anyway.
    """
    uid = peer_uid(descriptor)
    if uid is None or uid in (os.geteuid(), ROOT) or uid == os.stat(os.path.dirname(path) or ".").st_uid:
        return
    raise Unauthenticated(
        f"the process that listens at {path} belongs to another user: it runs as {user_name(uid)}, this one as "
        f"{user_name(os.geteuid())}. Nothing was sent. Check who can write to the folder, and remove the socket"
    )


def is_own_peer(connection: Any) -> bool:
    """Whether the peer on one of our Unix sockets runs as this user or as root."""
    uid = None if connection is None else peer_uid(connection.fileno())
    return uid is None or uid in (os.geteuid(), ROOT)


def peer_uid(descriptor: int) -> int | None:
    """Return the user of the process at the other end of a Unix socket; None if the system does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    seen = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=descriptor)
    try:
        _, uid, _ = _CREDENTIALS.unpack(seen.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    finally:
        seen.detach()
    return int(uid)


def someone_calls(listening: socket.socket) -> bool:
    """Wait for the first connection; returns False if the socket was shut down instead."""
    poll = select.poll()
    try:
        poll.register(listening, select.POLLIN)
        return all(not event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll())
    except (OSError, ValueError):
        return False


def hang_up(listening: socket.socket) -> None:
    """Accept no more connections, and wake the thread that waits for one."""
    with suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)


def remove_socket(path: str) -> None:
    """Remove a socket's name if it exists."""
    with suppress(OSError):
        os.unlink(path)


def answers_at(path: str, timeout_s: float = 1.0) -> bool:
    """Whether a server listens there; raises Unauthenticated if it belongs to another user."""
    try:
        connect_unix(path, timeout_s).close()
    except OSError:
        return False
    return True


def close_in_child(sockets: Iterable[Any]) -> None:
    """After a fork: release the parent's connections, or their peers would not notice when the parent closes them.

    The descriptor numbers stay in use, pointing to /dev/null, because the objects here will close them again.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in sockets:
        with suppress(OSError):
            os.dup2(nothing, each.fileno())
    os.close(nothing)


def absolute(path: str) -> str:
    """Return the absolute path, which stays valid when the process changes its folder."""
    return os.path.abspath(path)


@contextmanager
def short_name(path: str) -> Iterator[str]:
    """Yield a name for the path that is short enough for a socket; too long ones go through the opened folder."""
    if len(os.fsencode(path)) <= _PATH_BYTES:
        yield path
        return
    folder, name = os.path.split(path)
    opened = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}/{name}"
    finally:
        os.close(opened)


def unacknowledged(connection: Any) -> int:
    """Return how many bytes were sent but not yet acknowledged by the peer; 0 if that is not known."""
    try:
        (count,) = _COUNT.unpack(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(_COUNT.size)))
    except (AttributeError, OSError, ValueError):
        return 0
    return int(count)


def limit_receives(connection: socket.socket, seconds: float) -> None:
    """Let calls block, and let the system end one that receives nothing for this long, with BlockingIOError.

    A timeout of Python's own asks the system twice for each call: whether there is something, then for it.
    """
    whole, part = divmod(max(round(seconds * 1e6), 1), 1_000_000)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _INTERVAL.pack(whole, part))
    connection.settimeout(None)


def sent_now(connection: socket.socket, content: bytes) -> int:
    """Hand over as much as the system takes without waiting. Returns how many bytes that is."""
    try:
        return connection.send(content, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0


def interrupt(connection: socket.socket) -> None:
    """End the receive that another thread is waiting in. Closing the socket would not: the kernel keeps it open."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def has_ended(connection: socket.socket) -> bool:
    """Whether an idle connection is of no more use: the peer has closed it, or sent something unasked."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLIN | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True


def bell() -> tuple[socket.socket, socket.socket]:
    """Two sockets that are connected: a loop hears at the first what another thread writes to the second."""
    heard, rung = socket.socketpair()
    heard.setblocking(False)
    rung.setblocking(False)
    return heard, rung
