"""Change notifications from the kernel instead of polling: inotify, where it exists.

The kernel reports system calls (a write, a new name), never stores into a map, and only those made on this machine. So
files on a network file system cannot be watched.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
from struct import Struct
from typing import Final, Protocol

from holdfast.env.disk import Descriptor
from holdfast.env.later import ctypes

_MODIFY: Final = 0x002
_ATTRIBUTES: Final = 0x004  # also reported when another file takes its name
_MOVED_TO: Final = 0x080
_CREATED: Final = 0x100
_SELF_GONE: Final = 0x400 | 0x800
_FOLDERS_ONLY: Final = 0x01000000
_OVERFLOW: Final = 0x4000
_IGNORED: Final = 0x8000

_EVENT: Final = Struct("iIII")
_BUFFER_BYTES: Final = 64 << 10
_MOST_MS: Final = 2**31 - 1

# File systems on which other machines may change files without this kernel's knowledge.
_REMOTE: Final = frozenset(
    {"9p", "afs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs", "vboxsf", "virtiofs"}
)
_REMOTE_PREFIX: Final = "fuse."


class WatchRefused(Exception):
    """The kernel cannot or will not report changes here; the text says why."""


class FolderWatch(Protocol):
    """Waits for changes to files and folders. For one thread at a time."""

    def add_file(self, path: str) -> None:
        """Watch for writes to the file, and for its name passing to another file. May be called twice."""

    def add_folder(self, path: str) -> None:
        """Watch for new names in the folder. May be called twice. Raises FileNotFoundError if there is no folder."""

    def wait(self, timeout_s: float) -> bool:
        """Block until something has changed since the last call; returns False if the time is over first."""

    def close(self) -> None:
        """Stop watching. May be called twice."""


def is_remote(kind: str) -> bool:
    """Whether files on this kind of file system may be changed by other machines."""
    return kind in _REMOTE or kind.startswith(_REMOTE_PREFIX)


def no_watch() -> FolderWatch:
    """Raise WatchRefused: for simulations that do not bring a watch of their own."""
    raise WatchRefused("nothing here tells of changes")


class InotifyWatch(Descriptor):
    """A watch with Linux's inotify, through the C library."""

    def __init__(self) -> None:
        super().__init__(-1)
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "inotify_init1"):
            raise WatchRefused("this system has no inotify")
        self._add_watch = library.inotify_add_watch
        self._add_watch.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
        self._paths: dict[int, str] = {}
        self._watched: set[str] = set()
        fd = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            raise _refusal("inotify_init1", ctypes.get_errno(), "max_user_instances")
        self._fd = fd
        self._ready = select.poll()
        self._ready.register(fd, select.POLLIN)

    def add_file(self, path: str) -> None:
        self._add(path, _MODIFY | _ATTRIBUTES | _SELF_GONE)

    def add_folder(self, path: str) -> None:
        self._add(path, _CREATED | _MOVED_TO | _SELF_GONE | _FOLDERS_ONLY)

    def wait(self, timeout_s: float) -> bool:
        if not self._ready.poll(min(math.ceil(max(timeout_s, 0) * 1000), _MOST_MS)):
            return False
        self._drain()
        return True

    def _add(self, path: str, mask: int) -> None:
        if path in self._watched:
            return
        number = self._add_watch(self._fd, os.fsencode(path), mask)
        if number < 0:
            code = ctypes.get_errno()
            if code in (errno.ENOENT, errno.ENOTDIR):
                raise FileNotFoundError(code, os.strerror(code), path)
            raise _refusal(f"inotify_add_watch of {path}", code, "max_user_watches")
        # The same file by another path, or a file that reuses the number: the latest path counts.
        self._watched.discard(self._paths.get(number, ""))
        self._paths[number] = path
        self._watched.add(path)

    def _drain(self) -> None:
        """Read the pending events. Only two things matter: that there were some, and which watches ended."""
        with contextlib.suppress(BlockingIOError):
            content = os.read(self._fd, _BUFFER_BYTES)
            position = 0
            while position < len(content):
                number, mask, _, name_bytes = _EVENT.unpack_from(content, position)
                position += _EVENT.size + name_bytes
                if mask & _OVERFLOW:
                    continue
                if mask & (_ATTRIBUTES | _SELF_GONE | _IGNORED):
                    # Another file may have its name now: the next `add` watches that one.
                    self._watched.discard(self._paths.get(number, ""))
                if mask & _IGNORED:
                    self._paths.pop(number, None)


def _refusal(call: str, code: int, limit: str) -> WatchRefused:
    reached = code in (errno.ENOSPC, errno.EMFILE)
    advice = f"; the limit fs.inotify.{limit} is reached" if reached else ""
    return WatchRefused(f"{call}: {os.strerror(code)}{advice}")
