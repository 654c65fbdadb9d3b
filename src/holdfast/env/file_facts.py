"""What is known of a file or folder besides its bytes: its state, who may change it, which mount it lies on."""

from __future__ import annotations

import ctypes
import grp
import os
import pwd
import stat
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

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
