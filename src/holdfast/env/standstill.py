"""A data folder as it is at one moment, noted while its owner works: what a kill at that moment would have left.

Copying the files of a living folder one after the other gives no state that the folder ever had: a journal may be
copied after the log that it speaks of, and then knows messages that the copied log does not have. A crash never leaves
that. So for a moment nothing changes: every writer of a log is kept from appending, and nobody creates, renames or
removes a name. In this moment the files are listed, with their lengths and, for the log's active segments, the
positions where the frames end. That takes as long as listing the folder; the bytes are read afterwards, because what is
below these positions never changes any more. All other files are replaced by renaming, never written in place, but for
the state of a log, which is small and read at once.

What has still to be read may be renamed or removed in the meantime. The disk sees to that: it notes where a file has
gone, and keeps one open that is about to be removed or replaced.

Who holds the folder still takes the writers' locks one after the other, and others may hold one while they wait for
another, or for a name. There is no order that suits all of them, so whoever holds the folder still never insists: if it
does not get a lock soon, it lets go of all and starts again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakValueDictionary

from holdfast.env.disk import Disk, File, file_facts
from holdfast.env.tier import TieredFile

if TYPE_CHECKING:
    from holdfast.env.world import Clock

_TRY_S: Final = 0.1  # for each lock: others wait as long
_PAUSE_S: Final = 0.02
PATIENCE_S: Final = 30.0
_MOST_KEPT: Final = 256  # open files that are removed and not copied yet
_IDLE_NS: Final = 900 * 1_000_000_000  # whoever reads nothing for so long has gone


class ActiveFile(Protocol):
    """The segment that a writer appends to."""

    @property
    def path(self) -> str: ...
    @property
    def position(self) -> int: ...


class FileWriter(Protocol):
    """What appends to a log: nothing changes in its folder while its lock is held, but names."""

    lock: Any
    active: Any  # an ActiveFile, or None


class CapturedFile:
    """A file at the moment of the capture. Bytes from `end` on are zeros; None if the whole file counts."""

    __slots__ = ("content", "end", "is_settled", "kept", "path", "place", "size", "stamp")

    def __init__(self, path: str, place: str, size: int, stamp: tuple[int, ...]) -> None:
        self.path, self.size, self.stamp = path, size, stamp
        self.place: str | None = place  # where it is now; None once it is gone
        self.end: int | None = None
        self.content: bytes | None = None
        self.kept: File | None = None
        self.is_settled = bool(stamp)  # whether the same stamp means the same bytes


class FolderCapture:
    """All files of a folder as they were at one moment."""

    def __init__(self, disk: Disk, lock: threading.RLock, time_ns: int) -> None:
        self.id = ""  # by which others ask for it
        self.time_ns = time_ns
        self.folders: list[str] = []
        self.files: list[CapturedFile] = []
        self.used_ns = 0
        self._disk = disk
        self._lock = lock
        self._at: dict[str, CapturedFile] = {}
        self._kept = 0

    def survey(self, root: str, is_skipped: Callable[[str], bool], is_in_place: Callable[[str], bool]) -> None:
        """List all files below the folder; those that are written in place are read at once."""
        below = [""]
        while below:
            inside = below.pop()
            for name in self._disk.names(f"{root}/{inside}" if inside else root):
                path = f"{inside}/{name}" if inside else name
                if self._disk.is_folder(f"{root}/{path}"):
                    self.folders.append(path)
                    below.append(path)
                elif not is_skipped(path):
                    self._add(path, f"{root}/{path}", is_in_place(path))
        self.folders.sort()
        self.files.sort(key=lambda file: file.path)

    def _add(self, path: str, place: str, read_now: bool) -> None:  # noqa: FBT001
        facts = file_facts(place)
        if facts is not None and not read_now:
            stamp = (facts.inode, facts.size, facts.changed_ns, facts.renamed_ns)
            found = CapturedFile(path, place, facts.size, stamp)
        else:
            file = self._disk.open(place)
            try:
                found = CapturedFile(path, place, file.size(), file.stamp if isinstance(file, TieredFile) else ())
                if read_now:
                    found.content = file.read(0, found.size)
            finally:
                file.close()
        self.files.append(found)
        self._at[place] = found

    def end_at(self, place: str, position: int) -> None:
        """Note where the frames of a segment end, before anything is appended to it."""
        found = self._at.get(place)
        if found is not None and found.end is None:
            found.end, found.is_settled = position, False

    def read(self, index: int, position: int, length: int) -> bytes:
        """Return bytes of a file; what is missing at their end are zeros. Raises OSError if the file is gone."""
        found = self.files[index]
        length = max(min(length, found.size - position), 0)
        if found.content is not None:
            return found.content[position : position + length].rstrip(b"\0")
        with self._lock:  # nobody moves it before it is open
            if found.kept is None and found.place is None:
                raise FileNotFoundError(f"{found.path} was removed before it could be copied")
            file = found.kept or self._disk.open(str(found.place))
        try:
            content = file.read(position, length)
        finally:
            if file is not found.kept:
                file.close()
        # Looked up after reading: where a log was opened in the meantime, the end was noted before it could grow.
        end = found.end
        if end is not None and position + len(content) > end:
            content = content[: max(end - position, 0)]
        return content.rstrip(b"\0")

    def leaving(self, place: str) -> None:
        """A file is about to be removed or replaced. Called with the lock held."""
        found = self._at.pop(place, None)
        if found is None:
            return
        found.place = None
        if found.content is None and self._kept < _MOST_KEPT:
            with suppress(OSError):  # the owner's work goes on, whatever becomes of the copy
                found.kept = self._disk.open(place)
                self._kept += 1

    def moved(self, old: str, new: str) -> None:
        """A file or folder has another name now. Called with the lock held."""
        for place in [place for place in self._at if place == old or place.startswith(f"{old}/")]:
            found = self._at.pop(place)
            found.place = new + place[len(old) :]
            self._at[found.place] = found

    def close(self) -> None:
        for found in self.files:
            found.place = None
            if found.kept is not None:
                found.kept.close()
                found.kept = None
        self._at.clear()


class Standstill:
    """Keeps everything in a folder from changing for a moment. All logs of a folder share one."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._moving = 0
        self._held = False
        self._here = threading.local()
        self._holding = threading.Lock()  # one at a time holds it still
        self._writers: WeakValueDictionary[str, FileWriter] = WeakValueDictionary()  # the newest for each folder
        self.lock = threading.RLock()  # guards the captures
        self.captures: list[FolderCapture] = []

    def register(self, folder: str, writer: FileWriter) -> None:
        """Have a log's writer take part, before it appends anything."""
        with self._changed:
            self._writers[folder] = writer
        with self.lock:
            for capture in self.captures:
                if writer.active is not None:
                    capture.end_at(writer.active.path, writer.active.position)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Change something that is not under a writer's lock; waits while the folder is held still."""
        depth: int = getattr(self._here, "depth", 0)
        if not depth:
            with self._changed:
                while self._held:
                    self._changed.wait()
                self._moving += 1
        self._here.depth = depth + 1
        try:
            yield
        finally:
            self._here.depth = depth
            if not depth:
                with self._changed:
                    self._moving -= 1
                    self._changed.notify_all()

    @contextmanager
    def held(self, clock: Clock, patience_s: float = PATIENCE_S) -> Iterator[list[FileWriter]]:
        """Let nothing change meanwhile; gives all writers. Raises TimeoutError if the folder does not come to rest."""
        until_ns = clock.monotonic_ns() + round(patience_s * 1_000_000_000)
        with self._holding, ExitStack() as letting_go:
            while (writers := self._try_hold(letting_go)) is None:
                letting_go.pop_all().close()
                if clock.monotonic_ns() >= until_ns:
                    raise TimeoutError(f"the folder did not come to rest within {patience_s:g} s")
                clock.wait(threading.Event(), _PAUSE_S)
            yield writers

    def _try_hold(self, letting_go: ExitStack) -> list[FileWriter] | None:
        writers = self._known()
        for writer in writers:
            lock = writer.lock
            if not lock.acquire(timeout=_TRY_S):
                return None
            letting_go.callback(lock.release)
        letting_go.callback(self._release)
        with self._changed:
            self._held = True
            if not self._changed.wait_for(lambda: not self._moving, _TRY_S):
                return None
        return writers if {id(each) for each in self._known()} <= {id(each) for each in writers} else None

    def _known(self) -> list[FileWriter]:
        with self._changed:
            return list(self._writers.values())

    def _release(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def capture(
        self,
        disk: Disk,
        root: str,
        clock: Clock,
        *,
        is_skipped: Callable[[str], bool],
        is_in_place: Callable[[str], bool],
    ) -> FolderCapture:
        """Note the folder as it is now. Raises TimeoutError, or OSError."""
        with self.held(clock) as writers:
            taken = FolderCapture(disk, self.lock, clock.now_ns())
            taken.survey(root, is_skipped, is_in_place)
            with self.lock:
                for writer in writers:
                    if writer.active is not None:
                        taken.end_at(writer.active.path, writer.active.position)
                taken.used_ns = clock.monotonic_ns()
                for idle in [each for each in self.captures if taken.used_ns - each.used_ns > _IDLE_NS]:
                    self.drop(idle)
                self.captures.append(taken)
        return taken

    def drop(self, capture: FolderCapture) -> None:
        """Forget a capture, and close what was kept open for it."""
        with self.lock:
            if capture in self.captures:
                self.captures.remove(capture)
            capture.close()


class StillDisk:
    """A disk whose names do not change while the folder is held still, and that knows what has still to be copied."""

    def __init__(self, disk: Disk, still: Standstill) -> None:
        self._disk = disk
        self._still = still

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        if not create:
            return self._disk.open(path, write=write)
        with self._still.moving():
            return self._disk.open(path, write=write, create=True)

    def make_folder(self, path: str) -> None:
        with self._still.moving():
            self._disk.make_folder(path)

    def rename(self, old: str, new: str) -> None:
        with self._changing(new):
            self._disk.rename(old, new)
            for capture in self._still.captures:
                capture.moved(old, new)

    def remove(self, path: str) -> None:
        with self._changing(path):
            self._disk.remove(path)

    def remove_folder(self, path: str) -> None:
        with self._still.moving():
            self._disk.remove_folder(path)

    @contextmanager
    def _changing(self, lost: str) -> Iterator[None]:
        with self._still.moving(), self._still.lock:
            for capture in self._still.captures:
                capture.leaving(lost)
            yield
