"""A disk whose files live in a chain; the local files below it are a cache, and may be lost at any time.

Every change is made locally and recorded in one step, so the chain has the changes in the order in which they were
made. A sync waits until the chain has them all. Applying the chain to an empty folder gives what a power cut right
after some sync would have left, with everything before it and nothing after it: recovery knows how to go on from there.
"""

from __future__ import annotations

import errno
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from threading import RLock
from typing import Final

from holdfast.env.chain.chain import Chain
from holdfast.env.chain.engines import StoreRefused, StoreUnreachable
from holdfast.env.disk import BytesLike, Disk, File, OpenFolder, WritableMap

LARGE_BYTES: Final = 4 * 1024 * 1024  # a write beyond this has an object of its own
MOST_WRITTEN_BYTES: Final = 64 * 1024 * 1024  # of one write; whoever writes more goes on where it ended
INLINE_BYTES: Final = 64 * 1024  # a file up to this size is in the checkpoint itself


class Node:
    """A file that is open for writing; `path` is where it is now, in the folder, and None once it was removed."""

    __slots__ = ("__weakref__", "path")

    def __init__(self, path: str) -> None:
        self.path: str | None = path


class Capture:
    """All files of a folder as they were at one moment; their bytes are read later, or kept when they are to change.

    Taking it copies what is known of the files and touches none of them, because nobody can write meanwhile. Files go
    by the names that they had at that moment.
    """

    def __init__(self, local: Disk, root: str, lock: RLock, files: Files) -> None:
        self.folders = [*files.folders]
        self.sizes = files.sizes.copy()
        self.digests = files.digests.copy()  # of those whose content is in the store already
        self.changed: set[str] = set()  # names that stand for another content since
        self._local, self._root, self._lock = local, root, lock
        self._kept: dict[str, bytes | File] = {}  # what is not to be found in the folder any more
        self._captured: dict[str, str | None] = {}  # which one a name stands for since names were changed
        self._places: dict[str, str] = {}  # the other way round
        self._done: set[str] = set()

    def read(self, path: str, position: int, length: int) -> bytes:
        """Return a part of a file. Only one thread at a time reads a file, until it is `done` with it."""
        with self._lock:
            kept = self._kept.get(path)
            if isinstance(kept, bytes):
                return self._whole(path, kept[position : position + length], length)
            file = self._open(path) if kept is None else kept
        try:
            content = file.read(position, length)
        finally:
            if kept is None:
                file.close()
        with self._lock:
            kept = self._kept.get(path)
        if isinstance(kept, bytes):  # a write has come in between, and had the old content kept first
            content = kept[position : position + length]
        return self._whole(path, content, length)

    def done(self, path: str) -> None:
        """Note that all of a file was read: nothing of it has to be kept any more."""
        with self._lock:
            self._done.add(path)
            kept = self._kept.pop(path, None)
        if kept is not None and not isinstance(kept, bytes):
            kept.close()

    # The rest is called with the lock held.

    def overwriting(self, path: str, position: int) -> None:
        """Keep the content of a file that is about to change from a position on."""
        found = self._behind(path)
        if found is not None and position < self.sizes[found]:
            self._keep(found)

    def losing(self, path: str, *, is_open: bool) -> None:
        """Keep a file that is about to lose its name; one that is open for writing might still change."""
        found = self._behind(path)
        if found is not None and is_open:
            self._keep(found)
        elif found is not None and found not in self._kept:
            self._kept[found] = self._open(found)

    def removed(self, path: str) -> None:
        """Note that a path is not that of the captured file any more."""
        self._captured[path] = None
        self.changed.add(path)

    def renamed(self, old: str, new: str) -> None:
        """Note that a path now leads to another file, and that another has none."""
        found = self._behind(old)
        self.removed(old)
        self.removed(new)
        if found is not None:
            self._captured[new], self._places[found] = found, new

    def close(self) -> None:
        for kept in self._kept.values():
            if not isinstance(kept, bytes):
                kept.close()

    def _behind(self, path: str) -> str | None:
        """Return the captured file that is at a path now; None if there is none, or nobody needs it any more."""
        found = self._captured.get(path, path)
        return found if found in self.sizes and found not in self.digests and found not in self._done else None

    def _keep(self, path: str) -> None:
        kept = self._kept.get(path)
        if not isinstance(kept, bytes):
            with closing(self._open(path) if kept is None else kept) as file:
                self._kept[path] = file.read(0, self.sizes[path])

    def _whole(self, path: str, content: bytes, length: int) -> bytes:
        """Return the content; raises OSError if the copy has lost a part of it, which the chain still has."""
        if len(content) != length:
            raise OSError(errno.EIO, f"{path} has become shorter in the local copy of the folder")
        return content

    def _open(self, path: str) -> File:
        return self._local.open(f"{self._root}/{self._places.get(path, path)}")


class Files:
    """What is in the folder: known at any time without a look at the disk. Guarded by the chain's lock."""

    def __init__(self, local: Disk, root: str, unrecorded: frozenset[str]) -> None:
        self.folders: dict[str, None] = {}  # in their order: the upper ones come first
        self.sizes: dict[str, int] = {}
        self.digests: dict[str, str] = {}  # of those whose content is in the store
        if local.is_folder(root):
            self._find(local, root, "", unrecorded)

    def _find(self, local: Disk, root: str, inside: str, unrecorded: frozenset[str]) -> None:
        for name in local.names(f"{root}/{inside}" if inside else root):
            path = f"{inside}/{name}" if inside else name
            if path in unrecorded:
                continue
            if local.is_folder(f"{root}/{path}"):
                self.folders[path] = None
                self._find(local, root, path, unrecorded)
                continue
            with closing(local.open(f"{root}/{path}")) as file:
                self.sizes[path] = file.size()

    def rename(self, old: str, new: str) -> list[tuple[str, str]]:
        """Give a file, or a folder with all that is in it, another name; returns the files' old names and new ones."""
        if old in self.sizes:
            moved = [(old, new)]
        else:
            below = f"{old}/"
            moved = [(path, new + path[len(old) :]) for path in self.sizes if path.startswith(below)]
            for path in [path for path in self.folders if path == old or path.startswith(below)]:
                del self.folders[path]
                self.folders[new + path[len(old) :]] = None
        for before, after in moved:
            self.sizes[after] = self.sizes.pop(before)
            digest = self.digests.pop(before, None)
            self.digests.pop(after, None)
            if digest is not None:
                self.digests[after] = digest
        return moved


def _first_bytes(parts: Sequence[BytesLike]) -> bytes:
    """Return what one write takes, as bytes: all of it, unless that is more than an object should have."""
    if sum(map(len, parts)) <= MOST_WRITTEN_BYTES:
        return parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else b"".join(parts)
    taken, left = list[memoryview](), MOST_WRITTEN_BYTES
    for part in parts:
        taken.append(memoryview(part)[:left])
        left -= len(taken[-1])
    return b"".join(taken)


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
        content = _first_bytes(parts)
        large = disk.upload(content) if len(content) >= LARGE_BYTES else None
        with chain.lock:
            chain.check()
            disk.overwriting(node.path, position)
            done = self._file.write(position, [content])
            if node.path is not None:
                if large is not None and done == len(content):
                    chain.batch.write_large(node.path, position, done, *large)
                else:
                    chain.batch.write(node.path, position, content[:done])
                chain.noted()
                disk.grew(node.path, position + done if done else 0)
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
            disk.overwriting(node.path, length)
            self._file.truncate(length)
            if node.path is not None:
                chain.batch.truncate(node.path, length)
                chain.noted()
                disk.changed(node.path)
                disk.files.sizes[node.path] = length

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
        self.files = Files(local, root, unrecorded)
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
            if inside in self.files.folders:
                return
            # An earlier attempt may have made it, failed to sync it, and not come to record it.
            self._local.make_folder(path)
            parts = inside.split("/")
            for i in range(len(parts)):
                made = "/".join(parts[: i + 1])
                if made not in self.files.folders:
                    self.chain.batch.make(made)
                    self.files.folders[made] = None
            self.chain.noted()

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        inside = self._inside(path)
        if inside is None or not (write or create):
            return self._local.open(path, write=write, create=create)
        with self.chain.lock:
            is_new = create and inside not in self.files.sizes
            if is_new:
                self.chain.check()
            file = self._local.open(path, write=write, create=create)
            if is_new:
                self.chain.batch.create(inside)
                self.chain.noted()
                self.files.sizes[inside] = 0
            node = self._nodes.get(inside)
            if node is None:
                node = self._nodes[inside] = Node(inside)
            return ChainFile(self, file, node)

    def rename(self, old: str, new: str) -> None:
        before, after = self._inside(old), self._inside(new)
        if before is None or after is None:
            self._local.rename(old, new)
            return
        with self.chain.lock:
            self.chain.check()
            if after in self.files.sizes:
                self._losing(after)
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
            if inside not in self.files.sizes:  # a lock: it was made here, for this machine, and never recorded
                self._local.remove(path)
                return
            self._losing(inside)
            self._local.remove(path)
            self.chain.batch.remove(inside)
            self.chain.noted()
            del self.files.sizes[inside]
            self.files.digests.pop(inside, None)
            self._forget(inside)
            if self._capture is not None:
                self._capture.removed(inside)

    def remove_folder(self, path: str) -> None:
        inside = self._inside(path)
        with self.chain.lock:
            self.chain.check()
            self._local.remove_folder(path)
            if inside is not None:
                self.chain.batch.remove_folder(inside)
                self.chain.noted()
                self.files.folders.pop(inside, None)

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

    def overwriting(self, path: str | None, position: int) -> None:
        """Let a checkpoint keep what is about to change. Called with the lock held."""
        if self._capture is not None and path is not None:
            self._capture.overwriting(path, position)

    def grew(self, path: str, end: int) -> None:
        """Note that a file was written to, up to this position. Called with the lock held."""
        sizes = self.files.sizes
        if sizes[path] < end:
            sizes[path] = end
        self.changed(path)

    def changed(self, path: str) -> None:
        """Forget what is known of a file's content. Called with the lock held."""
        self.files.digests.pop(path, None)
        if self._capture is not None:
            self._capture.changed.add(path)

    @contextmanager
    def capturing(self) -> Iterator[tuple[Capture, int]]:
        """Note the folder as it is now; gives it, and the number of the object that it is before."""
        chain = self.chain

        def look() -> None:
            self._capture = Capture(self._local, self._root, chain.lock, self.files)

        try:
            number = chain.cut(look)
            assert self._capture is not None
            yield self._capture, number
        finally:
            with chain.lock:
                taken, self._capture = self._capture, None
            if taken is not None:
                taken.close()

    def keep_digest(self, path: str, digest: str) -> None:
        """Note that the store has the content of a file, unless it was changed since it was captured."""
        with self.chain.lock:
            if self._capture is not None and path not in self._capture.changed:
                self.files.digests[path] = digest

    def _inside(self, path: str, *, itself: bool = False) -> str | None:
        """Return the path within the folder; None if it is outside, or not recorded."""
        if path == self._root:
            return "" if itself else None
        if not path.startswith(f"{self._root}/"):
            return None
        inside = path[len(self._root) + 1 :].rstrip("/")
        return None if inside in self._unrecorded else inside

    def _moved(self, old: str, new: str) -> None:
        """Let files go by their new names, those that are open, too."""
        self._forget(new)
        for path in [path for path in self._nodes if path == old or path.startswith(f"{old}/")]:
            node = self._nodes.pop(path)
            node.path = new + path[len(old) :]
            self._nodes[node.path] = node
        for before, after in self.files.rename(old, new):
            if self._capture is not None:
                self._capture.renamed(before, after)

    def _losing(self, path: str) -> None:
        """Let a checkpoint keep a file that is about to lose its name."""
        if self._capture is not None:
            self._capture.losing(path, is_open=path in self._nodes)

    def _forget(self, path: str) -> None:
        node = self._nodes.pop(path, None)
        if node is not None:
            node.path = None
