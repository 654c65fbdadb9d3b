"""The outside world as an argument: time, ids, the disk and file watches, and checkpoints for long loops.

The kernel tells a watch of changes, so that nobody polls. It reports system calls (a write, a new name), never stores
into a map, and only those made on this machine. So files on a network file system cannot be watched.
"""

from __future__ import annotations

import errno
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from struct import Struct
from typing import Final, Protocol, TypeVar, cast

import msgspec

from holdfast.env.disk import Descriptor, Disk, RealDisk
from holdfast.env.process import OpenFiles, asyncio, ctypes
from holdfast.env.standstill import Standstill, StillDisk
from holdfast.env.tier import TieredDisk
from holdfast.later import pattern


class MakeSpace(Protocol):
    """Called when fewer than `wanted_bytes` are free on the disk; returns whether some were freed.

    Of these, `urgent_bytes` are not for a new message but for what must continue on a full disk.
    """

    def __call__(self, wanted_bytes: int, *, urgent_bytes: int = 0) -> bool: ...


def no_space(wanted_bytes: int, *, urgent_bytes: int = 0) -> bool:
    """For logs from which nothing can be removed: always False."""
    return False


def nothing_aside() -> int:
    """For logs without a reserve: always 0."""
    return 0


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


def no_watch() -> FolderWatch:
    """Raise WatchRefused: for simulations that do not bring a watch of their own."""
    raise WatchRefused("changes cannot be watched here")


class World(msgspec.Struct, frozen=True):
    """Everything that storage may know of what is outside the process."""

    clock: Clock
    disk: Disk
    ids: Ids
    watch: Callable[[], FolderWatch] = no_watch  # raises WatchRefused if there is none: callers poll instead
    open_files: OpenFiles = msgspec.field(default_factory=OpenFiles)  # of all logs that share this world
    still: Standstill = msgspec.field(default_factory=Standstill)  # of all logs that share this world
    # A process that owned the folder until then, in ms since 1970, was not heard of any more, and may still be at work.
    doubted_ms: int = 0
    make_space: MakeSpace = no_space
    # Called after something was freed on a full disk: keeps it for what must continue there, before others take it.
    # Returns how many bytes are kept for that.
    put_aside: Callable[[], int] = nothing_aside
    tier: TieredDisk | None = None  # the part of the disk that knows which files are in a store


def real_world() -> World:
    """Return this machine's clock, disk and ids."""
    disk = TieredDisk(RealDisk(), read_ahead=True)
    return World(clock=SystemClock(), disk=disk, ids=SystemIds(), watch=InotifyWatch, tier=disk)


def still_world(world: World, **changes: object) -> World:
    """Return the same world for one data folder, of which captures can be taken, with these changes."""
    still = Standstill()
    return msgspec.structs.replace(world, disk=cast("Disk", StillDisk(world.disk, still)), still=still, **changes)


# Waiting threads look at least this often, in case a wake-up was missed despite all care.
_SAFETY_S: Final = 5.0


class Clock(Protocol):
    """Where time comes from: wall time for people and retention, monotonic time for durations."""

    def now_ns(self) -> int:
        """Wall time in nanoseconds since 1970; may jump back or forward."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since a fixed moment of this boot; never goes back."""

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Block until the event is set or the time is over, possibly returning early; returns whether it is set."""

    async def wait_async(self, event: asyncio.Event, timeout_s: float | None) -> bool:
        """Async version of `wait`."""


class SystemClock:
    """The machine's own clocks."""

    now_ns = staticmethod(time.time_ns)
    monotonic_ns = staticmethod(time.monotonic_ns)

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        return event.wait(_short(timeout_s))

    async def wait_async(self, event: asyncio.Event, timeout_s: float | None) -> bool:
        try:
            # Not `wait_for`, which may swallow a cancellation that arrives just as the event is set.
            async with asyncio.timeout(_short(timeout_s)):
                await event.wait()
        except TimeoutError:
            return False
        return True


class ManualClock:
    """A clock for simulations and tests: it moves only when advanced, or when something waits for a time."""

    def __init__(self, now_ns: int = 1_700_000_000_000_000_000) -> None:
        self._now_ns = now_ns
        self._monotonic_ns = 0

    def now_ns(self) -> int:
        return self._now_ns

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def advance(self, *, seconds: float = 0, ms: int = 0, ns: int = 0) -> None:
        """Advance both clocks."""
        step_ns = round(seconds * 1_000_000_000) + ms * 1_000_000 + ns
        if step_ns < 0:
            raise ValueError("time does not run backwards; use step_wall for a clock that is set back")
        self._now_ns += step_ns
        self._monotonic_ns += step_ns

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Advance the clock by the timeout at once. Without a timeout, give other threads a moment to set the event."""
        if timeout_s is None:
            return event.wait(0.05)
        if not event.is_set():
            self.advance(seconds=timeout_s)
        return event.is_set()

    async def wait_async(self, event: asyncio.Event, timeout_s: float | None) -> bool:
        await asyncio.sleep(0 if timeout_s is not None else 0.001)
        if timeout_s is not None and not event.is_set():
            self.advance(seconds=timeout_s)
        return event.is_set()

    def step_wall(self, *, seconds: float = 0, ms: int = 0, ns: int = 0) -> None:
        """Set the wall clock forward or back, as an administrator or NTP would."""
        self._now_ns += round(seconds * 1_000_000_000) + ms * 1_000_000 + ns


def _short(timeout_s: float | None) -> float:
    return _SAFETY_S if timeout_s is None else min(timeout_s, _SAFETY_S)


class Ids(Protocol):
    """Where randomness and identity come from."""

    def random_u32(self) -> int:
        """Return a random number from 1 to 2**32 - 1."""

    def random_bytes(self, count: int) -> bytes:
        """Return `count` bytes that nobody can guess."""

    def boot_id(self) -> int:
        """Return a 64-bit number that changes whenever the machine boots; 0 if it is not known."""

    def process_note(self) -> dict[str, str | int]:
        """Describe this process to whoever finds its lock: pid, host, command."""


class SystemIds:
    """Randomness and identity of the real machine."""

    def __init__(self) -> None:
        self._boot_id = _read_boot_id()

    def random_u32(self) -> int:
        return int.from_bytes(os.urandom(16)) % (2**32 - 1) + 1

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def boot_id(self) -> int:
        return self._boot_id

    def process_note(self) -> dict[str, str | int]:
        command = " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]]) if sys.argv[0] else "python"
        return {"pid": os.getpid(), "host": os.uname().nodename, "command": without_passwords(command)[:200]}


# A password in a URL, before the host or as an option: both end at a space, so they cannot hide what comes after.
_PASSWORD: Final = pattern(r"(://[^\s/@:]*:)[^\s@]*(?=@)|([?&](?:ssl)?password=)[^\s&]*")


def without_passwords(text: str) -> str:
    """Return a text, such as a command line, without the passwords of URLs in it."""
    return _PASSWORD.sub(r"\1\2***", text)


class SeededIds:
    """The same numbers for the same seed; `reboot` simulates a restart of the machine."""

    def __init__(self, seed: int = 0) -> None:
        import random  # only for simulations, and slow to load

        self._random = random.Random(seed)
        self._boot_id = self._random.getrandbits(63) | 1

    def random_u32(self) -> int:
        return self._random.randrange(1, 2**32)

    def random_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def boot_id(self) -> int:
        return self._boot_id

    def reboot(self) -> None:
        self._boot_id = self._random.getrandbits(63) | 1

    def process_note(self) -> dict[str, str | int]:
        return {"pid": 1, "host": "simulation", "command": "simulation"}


def _read_boot_id() -> int:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return int(file.read().strip().replace("-", ""), 16) >> 64
    except (OSError, ValueError):
        return 0


# Long loops call `checkpoint` at every step, and the caller of such a loop decides what happens there. Reading a log
# message by message may take minutes, and so may making a topic partition by partition, on a thread next to others that
# have calls to answer. The caller can install a hook in its thread, to pause or to end the loop. Elsewhere checkpoints
# cost next to nothing.


_Result = TypeVar("_Result")

_local = threading.local()


def checkpoint() -> None:
    """Mark a step of a long loop; runs the thread's hook, if there is one."""
    hook: Callable[[], None] | None = getattr(_local, "hook", None)
    if hook is not None:
        hook()


@contextmanager
def checkpoints(hook: Callable[[], None]) -> Iterator[None]:
    """Call the hook at every checkpoint of this thread; an exception from it ends the loop."""
    _local.hook = hook
    try:
        yield
    finally:
        del _local.hook


class Abandoned(BaseException):
    """Nobody waits for this any more. No error that anybody should catch, but to clean up."""


class Wanted:
    """Whether somebody waits for what is done on a thread; as soon as nobody does, it ends at its next checkpoint."""

    def __init__(self) -> None:
        self.abandoned = False

    def step(self) -> None:
        """Some more work is about to be done."""
        if self.abandoned:
            raise Abandoned

    def run(self, work: Callable[[], _Result]) -> _Result:
        with checkpoints(self.step):
            self.step()
            return work()


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


def is_remote(kind: str) -> bool:
    """Whether files on this kind of file system may be changed by other machines."""
    return kind in _REMOTE or kind.startswith(_REMOTE_PREFIX)


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
        with suppress(BlockingIOError):
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
