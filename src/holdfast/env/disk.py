"""The disk: the few calls that storage makes, each of which a simulated disk can fail or forget.

The words are chosen so that the promises are plain. After `write` or a store into a map the bytes are
in the page cache: they survive the death of the process. After `File.sync` they survive a power cut,
and so does the file's length. A new, renamed or removed name survives one only after `sync_folder`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import grp
import mmap
import os
import pwd
import stat
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from holdfast.env.process import close_in_children

BytesLike: TypeAlias = bytes | bytearray | memoryview

# The holder's note in a lock file: fixed, so that a new note always covers the old one.
NOTE_BYTES = 512

# What a call may run out of before any byte is at stake: descriptors of the process or of the machine, memory.
RAN_OUT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
# Where the folder above says so, it was none of us who made this one.
_MADE_BY_OTHERS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_WRITING = os.O_RDWR | os.O_NOFOLLOW

# Where a store into a map may need new blocks (and so fail as SIGBUS, not as an error).
_COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs", "fuse.zfs"})


class WritableMap(Protocol):
    """A file's bytes as memory: what is stored here survives the death of the process."""

    def __setitem__(self, key: slice, value: BytesLike, /) -> None: ...


class File(Protocol):
    """An open file. Positions are bytes from its start."""

    def size(self) -> int:
        """Its length."""

    def read(self, position: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only where the file ends."""

    def view(self, position: int, length: int) -> memoryview:
        """The same without a copy where the disk can; valid for as long as someone holds it."""

    def write(self, position: int, parts: Sequence[BytesLike]) -> int:
        """Write the parts one behind the other; answers how many bytes were taken, maybe fewer."""

    def reserve(self, length: int) -> None:
        """Allocate blocks, so that the first `length` bytes can be written without more room."""

    def map(self, length: int) -> WritableMap:
        """The first `length` bytes, which must have been reserved, for storing into."""

    def words(self, count: int) -> MutableSequence[int]:
        """The first `count` 64-bit words, little endian; each store is one, never torn."""

    def truncate(self, length: int) -> None:
        """Cut or extend with zeros. Never on a file that others may have mapped."""

    def sync(self) -> None:
        """Return when bytes and length are on stable storage. A failure is final: never retry."""

    def close(self) -> None:
        """Let go of it; views stay valid."""


class OpenFolder(Protocol):
    """A folder whose names will have to be synced: opened before anything changes, so that only the sync can fail."""

    def sync(self) -> None:
        """Return when the names in it are on stable storage. A failure is final: never retry."""

    def close(self) -> None: ...


class FolderLocked(Exception):
    """Somebody else holds the lock; `note` is what the holder wrote about itself."""

    def __init__(self, note: bytes) -> None:
        super().__init__("locked")
        self.note = note


class FolderLock(Protocol):
    """A held lock. It ends with `release` or with the process."""

    def release(self) -> None: ...


class Disk(Protocol):
    """Folders and names. Paths are strings with `/`."""

    def can_map(self, folder: str) -> bool:
        """Whether stores into a reserved map cannot fail here."""

    def kind(self, folder: str) -> str:
        """The file system's name, for people."""

    def mount_id(self, folder: str) -> int:
        """Which mount it lies on; 0 where that is not known. One that is mounted anew has another number."""

    def names(self, folder: str) -> list[str]:
        """What the folder holds, sorted; FileNotFoundError where there is no such folder."""

    def exists(self, path: str) -> bool:
        """Whether there is such a name; OSError where that cannot be found out just now."""

    def make_folder(self, path: str) -> None:
        """Make it and those above it, durably; no error where it is there already."""

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        """Never writes to what a symbolic link points to: another user may have made that."""

    def rename(self, old: str, new: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def is_folder(self, path: str) -> bool: ...

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""

    def open_folder(self, folder: str) -> OpenFolder:
        """For syncing its names later, without a descriptor that may be missing by then."""

    def sync_folder(self, folder: str) -> None:
        """Return when the names in it are on stable storage."""

    def free_bytes(self, folder: str) -> int:
        """Room left for this user on the disk that holds the folder."""

    def lock(self, path: str, note: bytes) -> FolderLock:
        """Take the lock or raise FolderLocked, at once."""

    def exposure(self, folder: str, *, above: bool = False) -> str | None:
        """Why other users could put something of theirs in the place of what is ours; None where they cannot.

        With `above` also why every user could put another folder in its place.
        """


class RealFile:
    """A file of the operating system."""

    def __init__(self, fd: int, *, write: bool) -> None:
        self._fd = fd
        self._protection = mmap.PROT_READ | mmap.PROT_WRITE if write else mmap.PROT_READ
        self._map: mmap.mmap | None = None

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, position: int, length: int) -> bytes:
        parts = []
        while length > 0:
            part = os.pread(self._fd, length, position)
            if not part:
                break
            parts.append(part)
            position += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def view(self, position: int, length: int) -> memoryview:
        mapped = self._map
        if mapped is None or len(mapped) < position + length:
            size = self.size()
            if size == 0:
                return memoryview(b"")
            mapped = self._mapped(size)
        return memoryview(mapped)[position : position + length].toreadonly()

    def write(self, position: int, parts: Sequence[BytesLike]) -> int:
        return os.pwritev(self._fd, parts, position)

    def reserve(self, length: int) -> None:
        os.posix_fallocate(self._fd, 0, length)

    def map(self, length: int) -> WritableMap:
        return self._mapped(length)

    def words(self, count: int) -> MutableSequence[int]:
        # A native 8-byte item of an aligned map is stored by one instruction.
        return memoryview(mmap.mmap(self._fd, count * 8, prot=self._protection)).cast("Q")  # type: ignore[return-value]

    def truncate(self, length: int) -> None:
        os.ftruncate(self._fd, length)

    def sync(self) -> None:
        os.fdatasync(self._fd)
        _refuse_read_only(self._fd)

    def close(self) -> None:
        self._map = None  # unmapped when the last view of it is gone
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        # A reader may still be at work when a segment is let go: the last one out closes the file.
        self.close()

    def _mapped(self, length: int) -> mmap.mmap:
        mapped = mmap.mmap(self._fd, length, prot=self._protection)
        self._map = mapped
        return mapped


class RealFolderLock:
    """An flock on a small file that says who holds it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        close_in_children(self)

    def disown(self) -> None:
        """In a child after a fork: it must not keep the lock when the owner is gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def release(self) -> None:
        if self._fd >= 0:
            # Closing alone would leave the lock with a forked child, which shares the open file.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        # A log that was dropped without closing lets go of its folder, too.
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RealOpenFolder:
    """A folder that is open, as the operating system wants it for syncing its names."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def sync(self) -> None:
        os.fsync(self._fd)
        _refuse_read_only(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


class RealDisk:
    """The disk of this machine."""

    def can_map(self, folder: str) -> bool:
        return hasattr(os, "posix_fallocate") and self.kind(folder) not in _COPY_ON_WRITE

    def kind(self, folder: str) -> str:
        return _file_system(folder)

    def mount_id(self, folder: str) -> int:
        return mount_id(folder)

    def names(self, folder: str) -> list[str]:
        return sorted(os.listdir(folder))

    def exists(self, path: str) -> bool:
        try:
            os.stat(path)
        except OSError as error:
            if error.errno in RAN_OUT or error.errno == errno.EACCES:  # "no" would be taken for the truth
                raise
            return False
        return True

    def make_folder(self, path: str) -> None:
        # Each new name must reach the disk through the folder above it.
        missing = []
        current = os.path.abspath(path)
        while not os.path.isdir(current):
            missing.append(current)
            current = os.path.dirname(current)
        # Whoever made the last one that is there may have died before its name was synced.
        try:
            self.sync_folder(os.path.dirname(current))
        except OSError as error:
            if error.errno not in _MADE_BY_OTHERS:
                raise
        for folder in reversed(missing):
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                if not os.path.isdir(folder):
                    raise
                # Somebody else has just made it, and may not have synced its name yet.
            self.sync_folder(os.path.dirname(folder))

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        flags = os.O_CLOEXEC | (_WRITING if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
        return RealFile(os.open(path, flags, 0o600), write=write)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def remove_folder(self, path: str) -> None:
        os.rmdir(path)

    def open_folder(self, folder: str) -> OpenFolder:
        return RealOpenFolder(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def sync_folder(self, folder: str) -> None:
        opened = self.open_folder(folder)
        try:
            opened.sync()
        finally:
            opened.close()

    def free_bytes(self, folder: str) -> int:
        facts = os.statvfs(folder)
        return facts.f_bavail * facts.f_frsize

    def lock(self, path: str, note: bytes) -> FolderLock:
        fd = os.open(path, _WRITING | os.O_CREAT | os.O_CLOEXEC, 0o600)
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            os.close(fd)
            raise FileExistsError(errno.EEXIST, "it is no plain file", path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, NOTE_BYTES, 0).rstrip()
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise FolderLocked(holder) from None
            raise
        # The note is for people: a full disk must not keep the owner from opening its own log. And a file with a
        # second name is perhaps somebody's, who would find the note in it.
        if facts.st_nlink == 1:
            with contextlib.suppress(OSError):
                os.pwrite(fd, note.ljust(NOTE_BYTES), 0)
        return RealFolderLock(fd)

    def exposure(self, folder: str, *, above: bool = False) -> str | None:
        return exposure(folder, above=above)


def _refuse_read_only(fd: int) -> None:
    """Raise where the file system has become read-only while the file was open.

    After an error of the disk, or an emergency remount, many kernels answer a sync with success and write nothing,
    while stores into a map go on. Asked after the sync: what was lost before it is noticed, too.
    """
    if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def _file_system(folder: str) -> str:
    """The type of the mount that holds the folder, from the kernel's own list."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        if error.errno in RAN_OUT:  # "unknown" would be taken for a disk whose maps are safe to store into
            raise
        return "unknown"
    target = os.path.realpath(folder)
    best, kind = "", "unknown"
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = left.split(" ")[4].replace("\\040", " ")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, right.split(" ")[0]
    return kind


# The disk as tables need it: whole folders change places at once, and a file may stand under two names.


_HERE: Final = -100  # AT_FDCWD
_EXCHANGE: Final = 2  # RENAME_EXCHANGE
_UNSUPPORTED: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})


class LakeDisk(RealDisk):
    """The disk of this machine, with the few calls more that tables of plain files need."""

    def make_folder(self, path: str) -> None:
        """Open to those whom the process lets in, as what Spark writes is: tables are for others to read."""
        missing = []
        current = os.path.abspath(path)
        while not os.path.isdir(current):
            missing.append(current)
            current = os.path.dirname(current)
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # somebody else has just made it
                os.mkdir(folder)
            self.sync_folder(os.path.dirname(folder))

    def exchange(self, one: str, other: str) -> bool:
        """Let two names change places in one step, as every reader sees it; False where this disk cannot do that."""
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "renameat2"):
            return False
        if library.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return False
        raise OSError(code, os.strerror(code), one)

    def link(self, old: str, new: str) -> None:
        """A second name for the same file."""
        os.link(old, new)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def sync_file(self, path: str) -> None:
        """Return when a file that somebody else wrote is on stable storage."""
        file = self.open(path)
        try:
            file.sync()
        finally:
            file.close()

    def files_below(self, folder: str) -> list[str]:
        """Every file below the folder, by its path from there, sorted; nothing where there is no such folder."""
        found = []
        for place, _, names in os.walk(folder):
            below = os.path.relpath(place, folder)
            found += [name if below == "." else f"{below}/{name}" for name in names]
        return sorted(found)


# What is known of a file or folder besides its bytes: its state, who may change it, which mount it lies on.


# Who else may change what a folder holds: other users of this machine, by its mode, its group or its place.
#
# Whoever may make names in a folder can take the owner's socket, or put a link where we write. Root can do that
# everywhere, so that root's folders are as good as our own.


ROOT: Final = 0
_ACCESS_LIST: Final = "system.posix_acl_access"


def exposure(folder: str, *, above: bool = False) -> str | None:
    """Why other users could put something of theirs in the place of what is ours; None where they cannot.

    With `above` also why every user could put another folder in its place.
    """
    uid = os.geteuid()
    path = os.path.abspath(folder)
    link = os.lstat(path)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (uid, ROOT):
        return f"it is a symbolic link that {user_name(link.st_uid)} made"
    real = os.path.realpath(path)
    facts = os.stat(real)
    if facts.st_uid not in (uid, ROOT):
        return f"it belongs to {user_name(facts.st_uid)}, and this process runs as {user_name(uid)}"
    if facts.st_mode & stat.S_IWOTH:
        return "every user may write to it"  # and make names there, whether or not it is sticky
    if facts.st_mode & stat.S_IWGRP:
        others = (
            "an access control list lets others write to it" if _has_list(real) else shared_group(facts.st_gid, uid)
        )
        if others is not None:
            return others
    return replaceable(real) if above else None


def replaceable(path: str) -> str | None:
    """Why every user could put something else in the place of the path; None where they cannot."""
    folder = Path(os.path.realpath(os.path.dirname(os.path.abspath(path))))
    for above in (folder, *folder.parents):
        mode = os.stat(above).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"every user may rename what is in {above}"
    return None


def shared_group(gid: int, uid: int) -> str | None:
    """Which others are in the group, as far as this machine knows; None where it is the user's own, or root's.

    Most users have a group of their own, and make folders that it may write to. A group that the machine does not
    know was given to this process by whoever started it: a container's.
    """
    if gid == ROOT:
        return None
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return None if gid in (os.getegid(), *os.getgroups()) else f"its group {gid} may write to it"
    name = user_name(uid)
    primary = [user for user in pwd.getpwall() if user.pw_gid == gid]
    others = sorted({*group.gr_mem, *(user.pw_name for user in primary)} - {name, user_name(ROOT)})
    if others:
        more = f" and {len(others) - 1} more are" if len(others) > 1 else " is"
        return f"its group {group.gr_name} may write to it, and {others[0]}{more} in that group"
    if name in (group.gr_name, *group.gr_mem) or any(user.pw_uid == uid for user in primary):
        return None
    return f"its group {group.gr_name} may write to it"


def user_name(uid: int) -> str:
    """What the user is called here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _has_list(path: str) -> bool:
    """Whether the folder's mode tells only a part: its group's bits are then the most that anybody in a list gets."""
    try:
        return bool(os.getxattr(path, _ACCESS_LIST))
    except OSError:
        return False


@dataclass(frozen=True)
class FileFacts:
    """A file that was changed, or another one under its name, differs in one of these."""

    inode: int
    size: int
    changed_ns: int
    renamed_ns: int
    mode: int

    @property
    def others_may_read(self) -> bool:
        """Whether every user of the machine may; the file's group may have been given it on purpose."""
        return bool(self.mode & stat.S_IROTH)

    @property
    def others_may_write(self) -> bool:
        """Whether anybody but its owner may."""
        return bool(self.mode & (stat.S_IWGRP | stat.S_IWOTH))


def file_facts(path: str) -> FileFacts | None:
    """Those of the file that the name leads to now; None where there is none that could be looked at."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return FileFacts(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, stat.S_IMODE(found.st_mode))


# Which mount a folder lies on. A file system that is unmounted and mounted anew forgets what was never synced,
# as a restart of the machine does: without a restart, that is what a failed disk leaves behind.


_AT_FDCWD: Final = -100
_UNIQUE_ID: Final = 0x4000  # STATX_MNT_ID_UNIQUE: never given to another mount until the machine restarts
_STATX_BYTES: Final = 256
_MASK_AT: Final = 0
_MOUNT_ID_AT: Final = 144


def mount_id(folder: str) -> int:
    """A number that no other mount has had since the machine was started; 0 where the kernel cannot tell (< 6.8)."""
    statx = _statx()
    if statx is None:
        return 0
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(_AT_FDCWD, folder.encode("utf-8", "surrogateescape"), 0, _UNIQUE_ID, answer) != 0:
        return 0
    mask = int.from_bytes(answer.raw[_MASK_AT : _MASK_AT + 4], "little")
    known = answer.raw[_MOUNT_ID_AT : _MOUNT_ID_AT + 8] if mask & _UNIQUE_ID else b""
    return int.from_bytes(known, "little") & (2**63 - 1)


@cache
def _statx() -> Any:
    try:
        return ctypes.CDLL(None).statx
    except (OSError, AttributeError):  # another system, or an old C library
        return None
