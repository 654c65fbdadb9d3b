"""Connections to servers over TCP, TLS and Unix sockets: the one door to them."""

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
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from holdfast.env.disk import ROOT, user_name
from holdfast.errors import Unauthenticated

if TYPE_CHECKING:
    import ssl

_CREDENTIALS: Final = Struct("iII")  # process, user, group
_COUNT: Final = Struct("i")
_PATH_BYTES: Final = 107  # what a Unix socket's name may have, without the zero byte behind it


def connect_tcp(host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None = None) -> socket.socket:
    """A connection to a server; small messages go out at once."""
    made = socket.create_connection((host, port), timeout_s)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is None:
        return made
    try:
        return tls.wrap_socket(made, server_hostname=host)
    except BaseException:
        made.close()
        raise


def connect_unix(path: str, timeout_s: float) -> socket.socket:
    """A connection to a server on this machine; Unauthenticated where it is a stranger's."""
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
    """Listen at a Unix socket that only this user may connect to; one that a dead process left is replaced.

    Nothing but a socket is.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_name(path) as name:
            _make_room(name, path)
            os.fchmod(made.fileno(), 0o600)  # before it has a name: at no time others may connect
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
        raise FileExistsError(errno.EEXIST, "there is something that is no socket, and it is not replaced", path)
    os.unlink(name)


def check_listener(descriptor: int, path: str) -> None:
    """Raise Unauthenticated if whoever listens at the path is a stranger: then nothing must be said to him.

    It may be this user, root, or the owner of the folder that the socket is in: where that is somebody else, a folder
    of his was named, and all that is in it is his.
    """
    uid = peer_uid(descriptor)
    if uid is None or uid in (os.geteuid(), ROOT) or uid == os.stat(os.path.dirname(path) or ".").st_uid:
        return
    raise Unauthenticated(
        f"the process that listens at {path} is a stranger's: it runs as {user_name(uid)}, this one as "
        f"{user_name(os.geteuid())}. Nothing was sent. See who may write to the folder, and remove the socket"
    )


def is_own_peer(connection: Any) -> bool:
    """Whether whoever has connected to a Unix socket of ours is this user, or root."""
    uid = None if connection is None else peer_uid(connection.fileno())
    return uid is None or uid in (os.geteuid(), ROOT)


def peer_uid(descriptor: int) -> int | None:
    """Whose process is at the other end of a Unix socket; None where this system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    seen = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=descriptor)
    try:
        _, uid, _ = _CREDENTIALS.unpack(seen.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    finally:
        seen.detach()
    return int(uid)


def someone_calls(listening: socket.socket) -> bool:
    """Wait for the first one who connects; False where it was hung up instead."""
    poll = select.poll()
    try:
        poll.register(listening, select.POLLIN)
        return all(not event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll())
    except (OSError, ValueError):
        return False


def hang_up(listening: socket.socket) -> None:
    """Let nobody in any more, and wake whoever waits for somebody."""
    with suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)


def remove_socket(path: str) -> None:
    """Take the name of a socket away, if it is there."""
    with suppress(OSError):
        Path(path).unlink(missing_ok=True)


def answers_at(path: str, timeout_s: float = 1.0) -> bool:
    """Whether somebody listens there; Unauthenticated where it is a stranger."""
    try:
        connect_unix(path, timeout_s).close()
    except OSError:
        return False
    return True


def close_in_child(sockets: Iterable[Any]) -> None:
    """After a fork: let go of what the parent goes on with, or nobody would notice its end.

    The numbers stay in use, by nothing: their objects here will close them once more.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in sockets:
        with suppress(OSError):
            os.dup2(nothing, each.fileno())
    os.close(nothing)


def absolute(path: str) -> str:
    """The path from the root on: it holds when the process goes to another folder."""
    return os.path.abspath(path)


@contextmanager
def short_name(path: str) -> Iterator[str]:
    """A name for the path that is short enough for a socket: by way of its folder, opened, where it is too long."""
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
    """How many bytes the system has taken for a connection, and the other end has not got; 0 where nobody can tell."""
    try:
        (count,) = _COUNT.unpack(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(_COUNT.size)))
    except (AttributeError, OSError, ValueError):
        return 0
    return int(count)


def has_ended(connection: socket.socket) -> bool:
    """Whether a connection that rests is of no use any more: the other end has closed it, or said something."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLIN | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True
