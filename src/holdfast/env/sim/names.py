"""The names of the simulated disk: which of them are durable, and what a power cut may leave of the rest.

A change of names is pending until its folder is synced. A cut keeps either the first few pending changes,
as a journal does, or some of them, where a change is kept only together with the earlier ones that it
builds on: those of the same names. A sync of a file says nothing about its name.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from holdfast.env.sim.inode import Fate, Inode


class Folder:
    """Names, as the running machine sees them and as they are on the disk."""

    __slots__ = ("changed_by", "durable", "names", "placed_by")

    def __init__(self, names: dict[str, Node] | None = None) -> None:
        self.names: dict[str, Node] = {} if names is None else names
        self.durable: dict[str, Node] = self.names.copy()
        self.changed_by: dict[str, Change] = {}  # the last pending change of each name
        self.placed_by: Change | None = None  # what gave the folder its own name


Node: TypeAlias = Folder | Inode
Link: TypeAlias = tuple[Folder, str, Node | None]  # in this folder, under this name: that node, or none


class Change:
    """A change of names that a cut keeps whole or not at all: create, rename, remove or mkdir."""

    __slots__ = ("links", "needs")

    def __init__(self, links: tuple[Link, ...], needs: tuple[Change, ...]) -> None:
        self.links = links
        self.needs = needs


class NameTree:
    """Folders within folders, and the changes that no sync has made durable yet."""

    def __init__(self, root: Folder | None = None) -> None:
        self._root = Folder() if root is None else root
        self._changes: list[Change] = []

    def node(self, path: str) -> Node:
        """What has this path."""
        node: Node | None = self._root
        for name in path.split("/"):
            if name and name != ".":
                node = _folder(node, path).names.get(name)
                if node is None:
                    raise os_error(errno.ENOENT, path)
        assert node is not None
        return node

    def folder(self, path: str) -> Folder:
        """The folder that has this path."""
        return _folder(self.node(path), path)

    def inode(self, path: str) -> Inode:
        """The file that has this path."""
        node = self.node(path)
        if isinstance(node, Folder):
            raise os_error(errno.EISDIR, path)
        return node

    def place(self, path: str) -> tuple[Folder, str]:
        """The folder that holds or would hold this path, and the name in it."""
        above, _, name = path.rstrip("/").rpartition("/")
        return self.folder(above), name

    def durable_inode(self, path: str) -> Inode | None:
        """The file that has this path when all pending changes are lost."""
        node: Node | None = self._root
        for name in path.split("/"):
            if name and name != ".":
                node = node.durable.get(name) if isinstance(node, Folder) else None
        return node if isinstance(node, Inode) else None

    def link(self, folder: Folder, name: str, node: Node | None) -> None:
        """Give a name to a new node, or take it away."""
        change = self._change((folder, name, node))
        if isinstance(node, Folder):
            node.placed_by = change

    def rename(self, old: str, new: str) -> None:
        """Move a name; what has the new one is replaced."""
        (source, old_name), (target, new_name) = self.place(old), self.place(new)
        node, replaced = source.names.get(old_name), target.names.get(new_name)
        if node is None:
            raise os_error(errno.ENOENT, old)
        if node is replaced:
            return
        _check_replacing(node, replaced, new)
        way = list(self._way(new))
        if node in way:
            raise os_error(errno.EINVAL, new)  # a folder cannot move into itself
        # The node may not end up in a folder that is lost itself: it would be gone under both names.
        needs = () if source is target else (folder.placed_by for folder in way)
        change = self._change((source, old_name, None), (target, new_name, node), needs=needs)
        if isinstance(node, Folder):
            node.placed_by = change

    def sync(self, folder: Folder) -> None:
        """Make the names of a folder durable, and what they build on."""
        of_folder = {change for change in self._changes if any(link[0] is folder for link in change.links)}
        if not of_folder:
            return
        kept = _with_needs(self._changes, of_folder)
        for change in kept:
            for place, name, node in change.links:
                _assign(place.durable, name, node)
                if place.changed_by.get(name) is change:
                    del place.changed_by[name]
            change.needs = ()  # or every change would keep all before it alive
        durable = set(kept)
        self._changes = [change for change in self._changes if change not in durable]

    def after_cut(self, rng: random.Random, fate: Fate) -> NameTree:
        """What a power cut may leave, names and files."""
        left: dict[Folder, dict[str, Node]] = {}
        for change in _survivors(self._changes, rng, fate):
            for folder, name, node in change.links:
                if folder not in left:
                    left[folder] = folder.durable.copy()
                _assign(left[folder], name, node)
        return NameTree(_after_cut(self._root, left, rng, fate))

    def copy(self) -> NameTree:
        """The same with nodes of its own."""
        copies = _Copies(self._changes)
        tree = NameTree(copies.folder(self._root))
        tree._changes = copies.changes()
        return tree

    def allocated_bytes(self) -> int:
        """What all files that have a name take up."""
        return _allocated_bytes(self._root)

    def _change(self, *links: Link, needs: Iterable[Change | None] = ()) -> Change:
        earlier = [folder.changed_by.get(name) for folder, name, _ in links]
        change = Change(links, tuple(each for each in (*earlier, *needs) if each is not None))
        for folder, name, node in links:
            _assign(folder.names, name, node)
            folder.changed_by[name] = change
        self._changes.append(change)
        return change

    def _way(self, path: str) -> Iterator[Folder]:
        """The folders above a path, from the root down."""
        above, folder = path.rstrip("/").rpartition("/")[0], self._root
        yield folder
        for name in above.split("/"):
            if name and name != ".":
                folder = _folder(folder.names.get(name), path)
                yield folder


class _Copies:
    """Copies of nodes and changes that stand to each other as the originals do."""

    def __init__(self, changes: list[Change]) -> None:
        self._nodes: dict[Node, Node] = {}
        self._changes = {change: Change((), ()) for change in changes}

    def folder(self, folder: Folder) -> Folder:
        copy = self._nodes.get(folder)
        if copy is None:
            copy = self._nodes[folder] = Folder()  # known before its names are: they may lead back to it
            copy.names = {name: self._node(node) for name, node in folder.names.items()}
            copy.durable = {name: self._node(node) for name, node in folder.durable.items()}
            copy.changed_by = {name: self._changes[change] for name, change in folder.changed_by.items()}
            copy.placed_by = self._changes.get(folder.placed_by) if folder.placed_by else None
        assert isinstance(copy, Folder)
        return copy

    def changes(self) -> list[Change]:
        for change, copy in self._changes.items():
            copy.needs = tuple(self._changes[each] for each in change.needs if each in self._changes)
            copy.links = tuple(
                (self.folder(folder), name, None if node is None else self._node(node))
                for folder, name, node in change.links
            )
        return list(self._changes.values())

    def _node(self, node: Node) -> Node:
        if isinstance(node, Folder):
            return self.folder(node)
        copy = self._nodes.get(node)
        if copy is None:
            copy = self._nodes[node] = node.copy()
        return copy


def _survivors(changes: list[Change], rng: random.Random, fate: Fate) -> list[Change]:
    """The pending changes that a power cut keeps, in order."""
    if not changes or fate is Fate.LOST:
        return []
    mode = rng.getrandbits(2)
    if fate is Fate.KEPT or mode == 0:
        return changes
    if mode == 1:
        return []
    if mode == 2:
        return changes[: int(rng.random() * (len(changes) + 1))]
    return _with_needs(changes, {change for change in changes if rng.random() < 0.5})


def _with_needs(changes: list[Change], chosen: set[Change]) -> list[Change]:
    """The chosen changes and all that they build on, in order."""
    kept = []
    for change in reversed(changes):  # what a change needs comes before it
        if change in chosen:
            kept.append(change)
            chosen.update(change.needs)
    kept.reverse()
    return kept


def _after_cut(folder: Folder, left: dict[Folder, dict[str, Node]], rng: random.Random, fate: Fate) -> Folder:
    names: dict[str, Node] = {}
    for name, node in left.get(folder, folder.durable).items():
        if isinstance(node, Folder):
            names[name] = _after_cut(node, left, rng, fate)
        else:
            names[name] = node.after_cut(rng, fate)
    return Folder(names)


def _assign(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _allocated_bytes(folder: Folder) -> int:
    return sum(_allocated_bytes(node) if isinstance(node, Folder) else node.allocated for node in folder.names.values())


def _check_replacing(node: Node, replaced: Node | None, path: str) -> None:
    if isinstance(replaced, Folder):
        if not isinstance(node, Folder):
            raise os_error(errno.EISDIR, path)
        if replaced.names:
            raise os_error(errno.ENOTEMPTY, path)
    elif replaced is not None and isinstance(node, Folder):
        raise os_error(errno.ENOTDIR, path)


def _folder(node: Node | None, path: str) -> Folder:
    if node is None:
        raise os_error(errno.ENOENT, path)
    if not isinstance(node, Folder):
        raise os_error(errno.ENOTDIR, path)
    return node


def os_error(code: int, path: str | None = None) -> OSError:
    """The error that the operating system would raise."""
    return OSError(code, os.strerror(code), path) if path else OSError(code, os.strerror(code))
