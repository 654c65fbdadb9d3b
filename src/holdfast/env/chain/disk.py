"""A disk whose files live in a chain; the local files below it are a cache, and may be lost at any time.

Every change is made locally and recorded in one step, so the chain has the changes in the order in which they were
made. A sync waits until the chain has them all. Applying the chain to an empty folder gives what a power cut right
after some sync would have left, with everything before it and nothing after it: recovery knows how to go on from there.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Final

from holdfast.env.chain.chain import Chain
from holdfast.env.chain.engines import StoreRefused, StoreUnreachable
from holdfast.env.disk import BytesLike, Disk, File, OpenFolder, WritableMap

LARGE_BYTES: Final = 4 * 1024 * 1024  # a write beyond this has an object of its own
INLINE_BYTES: Final = 64 * 1024  # a file up to this size is in the checkpoint itself


class Node:
    """A file that is open for writing; `path` is where it is now, in the folder, and None once it was removed."""

    __slots__ = ("__weakref__", "captured", "path")

    def __init__(self, path: str) -> None:
        self.path: str | None = path
        self.captured: Captured | None = None  # what a checkpoint has still to read of it


class Captured:
    """One file of a capture: its length then, and its bytes, which are read later unless they are about to change.

    `digest` is given instead where the store has the content already.
    """

    __slots__ = ("_file", "_lock", "content", "digest", "path", "size")

    def __init__(self, path: str, size: int, file: File | None, lock: RLock, digest: str = "") -> None:
        self.path, self.size, self.digest = path, size, digest
        self.content: bytes | None = None
        self._file = file
        self._lock = lock

    def read(self) -> bytes:
        found = b"" if self._file is None else self._file.read(0, self.size)
        with self._lock:  # a write that came in between has had the old content kept first
            return found if self.content is None else self.content

    def keep(self) -> None:
        """Read it now: what it held when it was captured is about to be overwritten. Called with the lock held."""
        if self.content is None and self._file is not None:
            self.content = self._file.read(0, self.size)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Capture:
    """All files of a folder as they were at one moment."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.files: dict[str, Captured] = {}
        self.changed: set[str] = set()  # since then

    def close(self) -> None:
        for file in self.files.values():
            file.close()


class ChainFile:
    """An open file of the folder. Reading is local; each change is recorded."""

    def __init__(self, disk: ChainDisk, file: File, node: Node | None) -> None:
        self._disk = disk
        self._file = file
        self._node = node
        self.size = file.size
        self.read = file.read
        self.view = file.view
        self.words = file.words

    def write(self, position: int, parts: Sequence[BytesLike]) -> int:
        node, disk = self._node, self._disk
        if node is None:
            return self._file.write(position, parts)
        chain = disk.chain
        chain.require_current()
        chain.make_room()
        content = parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else b"".join(parts)
        large = disk.upload(content) if len(content) >= LARGE_BYTES else None
        with chain.lock:
            chain.check()
            if node.captured is not None and position < node.captured.size:
                node.captured.keep()
            done = self._file.write(position, [content])
            if node.path is not None:
                if large is not None and done == len(content):
                    chain.batch.write_large(node.path, position, done, *large)
                else:
                    chain.batch.write(node.path, position, content[:done])
                chain.noted()
                disk.changed(node.path)
        return done

    def truncate(self, length: int) -> None:
        node, disk = self._node, self._disk
        if node is None:
            self._file.truncate(length)
            return
        chain = disk.chain
        chain.require_current()
        with chain.lock:
            chain.check()
            if node.captured is not None and length < node.captured.size:
                node.captured.keep()
            self._file.truncate(length)
            if node.path is not None:
                chain.batch.truncate(node.path, length)
                chain.noted()
                disk.changed(node.path)

    def reserve(self, length: int) -> None:
        """Allocate local blocks only: the cache is what may fill up."""
        self._file.reserve(length)

    def release(self, position: int) -> None:
        """Give back local blocks only, like `reserve`."""
        self._file.release(position)

    def map(self, length: int) -> WritableMap:
        """Refuse: a store into a map cannot be recorded."""
        raise OSError("a folder in a store has no maps")

    def sync(self) -> None:
        self._disk.chain.commit()

    def close(self) -> None:
        self._file.close()


class ChainFolder:
    """An open folder, for syncing its names."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain

    def sync(self) -> None:
        self._chain.commit()

    def close(self) -> None:
        """Do nothing: nothing is kept open here."""


class ChainDisk:
    """A `Disk` whose folder `root` is recorded in a chain, without what is outside it and the names in `unrecorded`."""

    def __init__(self, local: Disk, root: str, chain: Chain, *, unrecorded: frozenset[str] = frozenset()) -> None:
        self.chain = chain
        self._local = local
        self._root = root
        self._unrecorded = unrecorded
        self._nodes: weakref.WeakValueDictionary[str, Node] = weakref.WeakValueDictionary()
        self.unchanged: dict[str, str] = {}  # files whose content is in the store, by their digest
        self._capture: Capture | None = None  # what a checkpoint is being made of

        self.names = local.names
        self.exists = local.exists
        self.is_folder = local.is_folder
        self.free_bytes = local.free_bytes
        self.lock = local.lock
        self.exposure = local.exposure

    def can_map(self, folder: str) -> bool:
        return False

    def kind(self, folder: str) -> str:
        return f"chain in {self.chain.store.name}"

    def mount_id(self, folder: str) -> int:
        # Each owner is to a log what another mount is: what was not synced before it is gone.
        return self.chain.epoch

    def make_folder(self, path: str) -> None:
        inside = self._inside(path)
        if inside is None:
            self._local.make_folder(path)
            return
        with self.chain.lock:
            self.chain.check()
            if not self._local.is_folder(path):
                self._local.make_folder(path)
                parts = inside.split("/")
                for i in range(len(parts)):
                    self.chain.batch.make("/".join(parts[: i + 1]))
                self.chain.noted()

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        inside = self._inside(path)
        if inside is None or not (write or create):
            return self._local.open(path, write=write, create=create)
        with self.chain.lock:
            is_new = create and not self._local.exists(path)
            if is_new:
                self.chain.check()
            file = self._local.open(path, write=write, create=create)
            if is_new:
                self.chain.batch.create(inside)
                self.chain.noted()
            node = self._nodes.get(inside)
            if node is None:
                node = self._nodes[inside] = Node(inside)
                if self._capture is not None and not is_new:
                    node.captured = self._capture.files.get(inside)
            return ChainFile(self, file, node)

    def rename(self, old: str, new: str) -> None:
        before, after = self._inside(old), self._inside(new)
        if before is None or after is None:
            self._local.rename(old, new)
            return
        with self.chain.lock:
            self.chain.check()
            self._local.rename(old, new)
            self.chain.batch.rename(before, after)
            self.chain.noted()
            self._moved(before, after)

    def remove(self, path: str) -> None:
        inside = self._inside(path)
        if inside is None:
            self._local.remove(path)
            return
        with self.chain.lock:
            self.chain.check()
            self._local.remove(path)
            self.chain.batch.remove(inside)
            self.chain.noted()
            self.changed(inside)
            node = self._nodes.pop(inside, None)
            if node is not None:
                node.path = None

    def remove_folder(self, path: str) -> None:
        inside = self._inside(path)
        with self.chain.lock:
            self.chain.check()
            self._local.remove_folder(path)
            if inside is not None:
                self.chain.batch.remove_folder(inside)
                self.chain.noted()

    def open_folder(self, folder: str) -> OpenFolder:
        return (
            ChainFolder(self.chain)
            if self._inside(folder, itself=True) is not None
            else self._local.open_folder(folder)
        )

    def sync_folder(self, folder: str) -> None:
        if self._inside(folder, itself=True) is None:
            self._local.sync_folder(folder)
        else:
            self.chain.commit()

    # For files and checkpoints

    def upload(self, content: bytes) -> tuple[bytes, str]:
        """Store bytes in an object of their own, before the record that names it; returns their digest and its key."""
        digest = hashlib.sha256(content)
        key = f"large/{self.chain.next_number:020}-{digest.hexdigest()}"
        try:
            self.chain.patiently(lambda: self.chain.store.create(f"{self.chain.root}{key}", content))
        except (StoreUnreachable, StoreRefused) as error:
            raise OSError(f"the store did not take {len(content)} bytes: {error}") from error
        return digest.digest(), key

    def changed(self, path: str) -> None:
        """Forget what is known of a file's content. Called with the lock held."""
        self.unchanged.pop(path, None)
        if self._capture is not None:
            self._capture.changed.add(path)

    @contextmanager
    def capturing(self) -> Iterator[tuple[Capture, int]]:
        """Note the folder as it is now; gives it, and the number of the object that it is before."""
        taken = Capture()

        def look() -> None:
            self._survey("", taken)
            self._capture = taken

        try:
            number = self.chain.cut(look)
            yield taken, number
        finally:
            with self.chain.lock:
                self._capture = None
                for node in self._nodes.values():
                    node.captured = None
            taken.close()

    def keep_digest(self, path: str, digest: str) -> None:
        """Note that the store has the content of a file, unless it was changed since it was captured."""
        with self.chain.lock:
            if self._capture is not None and path not in self._capture.changed:
                self.unchanged[path] = digest

    def _survey(self, inside: str, taken: Capture) -> None:
        folder = f"{self._root}/{inside}" if inside else self._root
        for name in self._local.names(folder):
            path = f"{inside}/{name}" if inside else name
            if path in self._unrecorded:
                continue
            full = f"{self._root}/{path}"
            if self._local.is_folder(full):
                taken.folders.append(path)
                self._survey(path, taken)
                continue
            file, node = self._local.open(full), self._nodes.get(path)
            taken.files[path] = found = self._captured(path, file)
            if node is not None:
                node.captured = found

    def _captured(self, path: str, file: File) -> Captured:
        """Keep open only what is read later: small files are read now, and others may be in the store already."""
        size, digest = file.size(), self.unchanged.get(path, "")
        if size > INLINE_BYTES and not digest:
            return Captured(path, size, file, self.chain.lock)
        found = Captured(path, size, None, self.chain.lock, digest)
        if not digest:
            found.content = file.read(0, size)
        file.close()
        return found

    def _inside(self, path: str, *, itself: bool = False) -> str | None:
        """Return the path within the folder; None if it is outside, or not recorded."""
        if path == self._root:
            return "" if itself else None
        if not path.startswith(f"{self._root}/"):
            return None
        inside = path[len(self._root) + 1 :].rstrip("/")
        return None if inside in self._unrecorded else inside

    def _moved(self, old: str, new: str) -> None:
        """Let open files go by their new names, and forget what was known of both."""
        replaced = self._nodes.pop(new, None)
        if replaced is not None:
            replaced.path = None
        for path in [path for path in self._nodes if path == old or path.startswith(f"{old}/")]:
            node = self._nodes.pop(path)
            node.path = new + path[len(old) :]
            self._nodes[node.path] = node
        for path in [path for path in self.unchanged if path == new or path.startswith((f"{new}/", f"{old}/"))]:
            self.changed(path)
        known = self.unchanged.get(old)
        self.changed(old)
        self.changed(new)
        if known is not None:
            self.unchanged[new] = known
