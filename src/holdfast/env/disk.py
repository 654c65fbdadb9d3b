"""The disk: the few calls that storage makes, each of which a simulated disk can fail or forget.

What each call promises: after `write` or a store into a map, the bytes are in the page cache and survive the death of
the process. After `File.sync` they survive a power cut, and so does the file's length. A new, renamed or removed name
survives a power cut only after `sync_folder`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import mmap
import os
import pwd
import stat
from collections.abc import MutableSequence, Sequence
from functools import cache
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from holdfast.env.process import close_in_children, ctypes

BytesLike: TypeAlias = bytes | bytearray | memoryview

# Size of the holder's note in a lock file: fixed, so that a new note always covers the old one.
NOTE_BYTES = 512

# What a call may run out of before any byte is at stake: descriptors of the process or of the machine, memory.
RAN_OUT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
# If syncing the parent folder fails with one of these, we did not create the folder, and need not sync it.
_MADE_BY_OTHERS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_WRITING = os.O_RDWR | os.O_NOFOLLOW

# Where a store into a map may have to allocate blocks, and so can fail as SIGBUS instead of an error.
_COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs", "fuse.zfs"})


class WritableMap(Protocol):
    """A file's bytes as memory: what is stored here survives the death of the process."""

    def __setitem__(self, key: slice, value: BytesLike, /) -> None: ...


class File(Protocol):
    """An open file. Positions are bytes from its start."""

    def size(self) -> int:
        """Return its length."""

    def read(self, position: int, length: int) -> bytes:
        """Return up to `length` bytes; fewer only at the end of the file."""

    def view(self, position: int, length: int) -> memoryview:
        """Like `read`, without a copy if possible; valid for as long as someone holds it."""

    def write(self, position: int, parts: Sequence[BytesLike]) -> int:
        """Write the parts one after the other; returns how many bytes were written, maybe fewer."""

    def reserve(self, length: int) -> None:
        """Allocate blocks, so that the first `length` bytes can be written even if the disk fills up."""

    def release(self, position: int) -> None:
        """Give back the blocks from `position` on, where there are only zeros; the length stays. May do nothing."""

    def map(self, length: int) -> WritableMap:
        """Return the first `length` bytes, which must have been reserved, for storing into."""

    def words(self, count: int) -> MutableSequence[int]:
        """Return the first `count` 64-bit words, little endian; each store is atomic."""

    def truncate(self, length: int) -> None:
        """Cut, or extend with zeros. Never on a file that others may have mapped."""

    def sync(self) -> None:
        """Wait until bytes and length are on stable storage. A failure is final: never retry."""

    def close(self) -> None:
        """Close it; views stay valid."""


class Writable(Protocol):
    """What bytes can be written to."""

    def write(self, position: int, parts: Sequence[BytesLike]) -> int:
        """Write the parts one after the other; returns how many bytes were written, maybe fewer."""


def write_fully(file: Writable, position: int, parts: Sequence[BytesLike]) -> None:
    """Write every byte or raise. A full disk first shows as a short write, and as an error only on the next one."""
    wanted = sum(map(len, parts))
    done = file.write(position, parts)
    if done == wanted:
        return
    for part in parts:
        if done >= len(part):
            done -= len(part)
        else:
            _write_rest(file, position + done, memoryview(part)[done:])
            done = 0
        position += len(part)


def _write_rest(file: Writable, position: int, rest: memoryview) -> None:
    while rest:
        taken = file.write(position, [rest])
        if taken == 0:
            raise OSError(errno.ENOSPC, "the disk took no more bytes")
        position, rest = position + taken, rest[taken:]


class OpenFolder(Protocol):
    """A folder whose names must be synced later; opened before anything changes, so that only the sync can fail."""

    def sync(self) -> None:
        """Wait until its names are on stable storage. A failure is final: never retry."""

    def close(self) -> None: ...


class FolderLocked(Exception):
    """Another process holds the lock; `note` is what it wrote about itself."""

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
        """Return the name of the file system, for people."""

    def mount_id(self, folder: str) -> int:
        """Identify the mount it is on; 0 if that is not known. Mounting again gives another number."""

    def names(self, folder: str) -> list[str]:
        """Return the names in the folder, sorted; raises FileNotFoundError if there is no such folder."""

    def exists(self, path: str) -> bool:
        """Whether the name exists; raises OSError if that cannot be determined right now."""

    def make_folder(self, path: str) -> None:
        """Create it and its parents, durably; no error if it exists."""

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        """Open a file. Never writes through a symbolic link: another user may have created it."""

    def rename(self, old: str, new: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def is_folder(self, path: str) -> bool: ...

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""

    def open_folder(self, folder: str) -> OpenFolder:
        """Open it for syncing its names later, when there may be no descriptor left."""

    def sync_folder(self, folder: str) -> None:
        """Wait until the names in it are on stable storage."""

    def free_bytes(self, folder: str) -> int:
        """Return the room left for this user on the disk that holds the folder."""

    def lock(self, path: str, note: bytes) -> FolderLock:
        """Take the lock, or raise FolderLocked at once."""

    def exposure(self, folder: str, *, above: bool = False) -> str | None:
        """Say why other users could replace files in the folder; None if they cannot.

        With `above`, also why any user could replace the folder itself.
        """


class Descriptor:
    """Owns a file descriptor, and closes it once: at the latest when nobody uses the object any more."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


class RealFile(Descriptor):
    """A file of the operating system. A reader may still use it when a segment is let go: the last one closes it."""

    def __init__(self, fd: int, *, write: bool) -> None:
        super().__init__(fd)
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

    def release(self, position: int) -> None:
        length = self.size() - position
        if length > 0 and (fallocate := _fallocate()) is not None:
            # Not by truncating: a reader of another process that has mapped the end would be killed by a signal.
            fallocate(self._fd, _KEEP_SIZE | _PUNCH_HOLE, position, length)  # some file systems cannot

    def map(self, length: int) -> WritableMap:
        return self._mapped(length)

    def words(self, count: int) -> MutableSequence[int]:
        # A native 8-byte item in an aligned map is stored with a single instruction.
        return memoryview(mmap.mmap(self._fd, count * 8, prot=self._protection)).cast("Q")  # type: ignore[return-value]

    def truncate(self, length: int) -> None:
        os.ftruncate(self._fd, length)

    def sync(self) -> None:
        os.fdatasync(self._fd)
        _refuse_read_only(self._fd)

    def close(self) -> None:
        self._map = None  # unmapped when its last view is gone
        super().close()

    def _mapped(self, length: int) -> mmap.mmap:
        mapped = mmap.mmap(self._fd, length, prot=self._protection)
        self._map = mapped
        return mapped


class RealFolderLock(Descriptor):
    """An flock on a small file that says who holds it. Dropping it without `release` gives up the lock, too."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        close_in_children(self)

    def disown(self) -> None:
        """After a fork, in the child: do not keep the lock after the owner is gone."""
        self.close()

    def release(self) -> None:
        if self._fd >= 0:
            # Closing alone would leave the lock with a forked child, which shares the open file.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.close()


class RealOpenFolder(Descriptor):
    """An open folder, as the operating system needs it for syncing names."""

    def sync(self) -> None:
        os.fsync(self._fd)
        _refuse_read_only(self._fd)


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
            if error.errno in RAN_OUT or error.errno == errno.EACCES:  # returning False would be a wrong answer
                raise
            return False
        return True

    def make_folder(self, path: str) -> None:
        # Each new name reaches the disk through its parent folder.
        existing, missing = _to_make(path)
        # The creator of the last existing one may have died before its name was synced.
        try:
            self.sync_folder(os.path.dirname(existing))
        except OSError as error:
            if error.errno not in _MADE_BY_OTHERS:
                raise
        for folder in missing:
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                if not os.path.isdir(folder):
                    raise
                # Somebody else has just created it, and may not have synced its name yet.
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
        with contextlib.closing(self.open_folder(folder)) as opened:
            opened.sync()

    def free_bytes(self, folder: str) -> int:
        facts = os.statvfs(folder)
        return facts.f_bavail * facts.f_frsize

    def lock(self, path: str, note: bytes) -> FolderLock:
        fd = os.open(path, _WRITING | os.O_CREAT | os.O_CLOEXEC, 0o600)
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            os.close(fd)
            raise FileExistsError(errno.EEXIST, "it is not a plain file", path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, NOTE_BYTES, 0).rstrip()
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise FolderLocked(holder) from None
            raise
        # The note is for people: a full disk must not keep the owner from opening its own log. And a file with a second
        # name may be somebody else's, who would find the note in it.
        if facts.st_nlink == 1:
            with contextlib.suppress(OSError):
                os.pwrite(fd, note.ljust(NOTE_BYTES), 0)
        return RealFolderLock(fd)

    def exposure(self, folder: str, *, above: bool = False) -> str | None:
        return exposure(folder, above=above)


def _to_make(path: str) -> tuple[str, list[str]]:
    """Return the deepest folder on the path that exists, and those below it that do not, highest first."""
    missing = []
    current = os.path.abspath(path)
    while not os.path.isdir(current):
        missing.append(current)
        current = os.path.dirname(current)
    return current, missing[::-1]


def _refuse_read_only(fd: int) -> None:
    """Raise if the file system has become read-only while the file was open.

    After a disk error or an emergency remount, many kernels report a sync as successful and write nothing, while stores
    into a map still work. Checked after the sync, so that what was lost before it is noticed, too.
    """
    if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def _file_system(folder: str) -> str:
    """Return the type of the mount that holds the folder, from the kernel's own list."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            lines = mounts.read().splitlines()
    except OSError as error:
        if error.errno in RAN_OUT:  # "unknown" would mean that maps are safe to store into
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


_KEEP_SIZE: Final = 1  # FALLOC_FL_KEEP_SIZE
_PUNCH_HOLE: Final = 2  # FALLOC_FL_PUNCH_HOLE


@cache
def _fallocate() -> Any:
    try:
        call = ctypes.CDLL(None).fallocate64  # with 64-bit positions on every machine
    except (OSError, AttributeError):  # another system
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call


_HERE: Final = -100  # AT_FDCWD
_EXCHANGE: Final = 2  # RENAME_EXCHANGE
_UNSUPPORTED: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})


class LakeDisk(RealDisk):
    """The disk of this machine with the extra calls for tables: exchanging folders at once, and hard links."""

    def make_folder(self, path: str) -> None:
        """Create folders with the process's default permissions, as Spark does: tables are for others to read."""
        for folder in _to_make(path)[1]:
            with contextlib.suppress(FileExistsError):  # somebody else has just created it
                os.mkdir(folder)
            self.sync_folder(os.path.dirname(folder))

    def exchange(self, one: str, other: str) -> bool:
        """Exchange two names atomically, also for readers; returns False if this disk cannot do that."""
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
        """Create a second name for the same file."""
        os.link(old, new)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def sync_file(self, path: str) -> None:
        """Wait until a file that somebody else wrote is on stable storage."""
        with contextlib.closing(self.open(path)) as file:
            file.sync()

    def files_below(self, folder: str) -> list[str]:
        """Return every file below the folder by its relative path, sorted; empty if there is no such folder."""
        found = []
        for place, _, names in os.walk(folder):
            below = os.path.relpath(place, folder)
            found += [name if below == "." else f"{below}/{name}" for name in names]
        return sorted(found)


# Who else may change the contents of a folder? Anyone who may create names in it can take over the owner's socket, or
# place a link where we write. Root can do that everywhere, so root's folders are as good as our own.
ROOT: Final = 0
_ACCESS_LIST: Final = "system.posix_acl_access"


def exposure(folder: str, *, above: bool = False) -> str | None:
    """Say why other users could replace files in the folder; None if they cannot.

    With `above`, also why any user could replace the folder itself.
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
        return "every user may write to it"  # and create names in it, even if it is sticky
    if facts.st_mode & stat.S_IWGRP:
        others = (
            "an access control list lets others write to it" if _has_list(real) else shared_group(facts.st_gid, uid)
        )
        if others is not None:
            return others
    return replaceable(real) if above else None


def replaceable(path: str) -> str | None:
    """Say why any user could replace what is at the path; None if they cannot."""
    above = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    while True:
        mode = os.stat(above).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"every user may rename what is in {above}"
        if above == os.path.dirname(above):
            return None
        above = os.path.dirname(above)


def shared_group(gid: int, uid: int) -> str | None:
    """Say which other users are in the group, as far as this machine knows; None if it is the user's own, or root's.

    Most users have a group of their own, and create folders that it may write to. A group unknown to this machine was
    given to the process by whoever started it, as in a container.
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
    """Return the user's name on this machine."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _has_list(path: str) -> bool:
    """Whether an access control list applies: then the group's bits are only the maximum of what the list grants."""
    try:
        return bool(os.getxattr(path, _ACCESS_LIST))
    except OSError:
        return False


class FileFacts(msgspec.Struct, frozen=True):
    """Facts that show whether a file was changed or replaced: then at least one of them differs."""

    inode: int
    size: int
    changed_ns: int
    renamed_ns: int
    mode: int

    @property
    def others_may_read(self) -> bool:
        """Whether every user of the machine may read it. Its group may have been given access on purpose."""
        return bool(self.mode & stat.S_IROTH)

    @property
    def others_may_write(self) -> bool:
        """Whether anyone except its owner may write to it."""
        return bool(self.mode & (stat.S_IWGRP | stat.S_IWOTH))


def file_facts(path: str) -> FileFacts | None:
    """Return the facts of the file at the path; None if there is none, or it cannot be examined."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return FileFacts(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, stat.S_IMODE(found.st_mode))


# Which mount a folder is on. A file system that is unmounted and mounted again forgets what was never synced, like a
# reboot of the machine; without a reboot, this is what happens after a disk failure.
_UNIQUE_ID: Final = 0x4000  # STATX_MNT_ID_UNIQUE: not reused until the machine reboots
_STATX_BYTES: Final = 256
_MASK_AT: Final = 0
_MOUNT_ID_AT: Final = 144


def mount_id(folder: str) -> int:
    """Return a number that no other mount has had since the machine booted; 0 if the kernel cannot tell (< 6.8)."""
    statx = _statx()
    if statx is None:
        return 0
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(_HERE, folder.encode("utf-8", "surrogateescape"), 0, _UNIQUE_ID, answer) != 0:
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
