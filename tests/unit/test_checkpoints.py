"""Checkpoints: a folder as of a number in its chain, whatever is written meanwhile."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import msgspec
import pytest

from holdfast.checksum import crc32c
from holdfast.env import ManualClock, SeededIds, SystemClock
from holdfast.env.chain import checkpoints as module
from holdfast.env.chain.chain import Chain, OwnershipLost, Position, walk
from holdfast.env.chain.checkpoints import (
    KEPT_NS,
    Checkpoint,
    Copy,
    Listed,
    StoredFile,
    checkpoint_key,
    checkpoints,
    clean_up,
    content_key,
    encode_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from holdfast.env.chain.disk import INLINE_BYTES, LARGE_BYTES, ChainDisk, Files
from holdfast.env.chain.engines import MemoryStore, StoreUnreachable
from holdfast.env.chain.format import BadObject, ObjectKind, replay
from holdfast.env.chain.ownership import ChainFollower
from holdfast.env.disk import RealDisk
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.env.world import World

GOLDEN = Path(__file__).parents[1] / "golden"
LARGE = INLINE_BYTES * 2


def own(store, local, root="data", clock=None) -> ChainDisk:
    chain = Chain.take_over(store, "", clock or ManualClock(), at=Position(), writer=bytes(16))
    assert chain is not None
    local.make_folder(root)
    return ChainDisk(local, root, chain, unrecorded=frozenset({"lock"}))


def put(disk, path, content, position=0):
    file = disk.open(f"data/{path}", write=True, create=True)
    file.write(position, [content])
    file.close()


def files_of(local, folder="data", inside=""):
    found = {}
    for name in local.names(f"{folder}/{inside}".rstrip("/")):
        path = f"{inside}/{name}".lstrip("/")
        if local.is_folder(f"{folder}/{path}"):
            found |= files_of(local, folder, path)
        else:
            file = local.open(f"{folder}/{path}")
            found[path] = file.read(0, file.size())
            file.close()
    return found


def read_in_halves(capture, path, between=lambda: None):
    half, size = capture.sizes[path] // 2, capture.sizes[path]
    first = capture.read(path, 0, half)
    between()
    content = first + capture.read(path, half, size - half)
    capture.done(path)
    return content


def replayed(store, upto=None, start=None):
    """What the chain leads to, from a checkpoint or from its beginning."""
    local = SimulatedDisk(maps=False)
    copy = Copy(store, "", local, "data")
    at = Position()
    if start is None:
        copy.clear()
    else:
        copy.restore(start)
        at = start.at
    for header, payload in walk(store, "", at):
        if upto is not None and header.number >= upto:
            break
        if header.kind == ObjectKind.DATA:
            replay(payload, copy)
    return files_of(local)


def test_a_checkpoint_is_the_folder_as_of_its_number():
    store, local = MemoryStore(), SimulatedDisk(maps=False)
    disk = own(store, local)
    disk.make_folder("data/a")
    put(disk, "a/small", b"small")
    put(disk, "a/large", b"x" * LARGE)
    put(disk, "lock", b"not recorded")
    found = write_checkpoint(disk, 0)
    put(disk, "a/small", b"later")
    disk.chain.commit()
    assert replayed(store, found.at.number, found) == {"a/small": b"small", "a/large": b"x" * LARGE}
    assert replayed(store, None, found) == replayed(store) == {"a/small": b"later", "a/large": b"x" * LARGE}


def test_a_checkpoint_is_written_as_it_always_was():
    at, file = Position(number=7, epoch=2, window=8, writer=bytes(range(16))), StoredFile("a/small", 2, b"hi")
    whole, pieces = StoredFile("a/log", 99_999, digest="0f" * 32), " ".join(["1e" * 32, "2d" * 32])
    made = Checkpoint(at=at, time_ns=1_700_000_000_000_000_000, owner=b"{}", folders=["a"], files=[file, whole])
    very_large = StoredFile("a/spool", module.PIECE_BYTES + 1, digest=pieces)
    for name, each in [
        ("checkpoint", made),
        ("checkpoint-pieces", msgspec.structs.replace(made, files=[file, very_large])),
    ]:
        content = encode_checkpoint(each)
        assert content.hex() == (GOLDEN / f"{name}.hex").read_text().strip()


@pytest.mark.parametrize("size", [100, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("is_changed", [False, True], ids=["read", "kept"])
def test_what_the_copy_has_lost_is_not_taken_for_the_content(size, is_changed):
    """The copy may be lost at any time, by and by, too: then the chain must stay as it is."""
    store, local = MemoryStore(), SimulatedDisk(maps=False)
    disk = own(store, local)
    put(disk, "file", b"x" * size)
    disk.chain.commit()
    local.open("data/file", write=True).truncate(size // 2)
    with disk.capturing() as (capture, _), pytest.raises(OSError, match="file has become shorter in the local copy"):
        if is_changed:
            put(disk, "file", b"y", 1)
        capture.read("file", 0, size)
    if not is_changed:
        with pytest.raises(OSError, match="shorter"):
            write_checkpoint(disk, 0)
    assert checkpoints(store, "") == []
    assert len(replayed(store)["file"]) == size


def test_a_large_file_that_did_not_change_is_stored_once():
    store, local = MemoryStore(), SimulatedDisk(maps=False)
    disk = own(store, local)
    put(disk, "sealed", b"x" * LARGE)
    first = write_checkpoint(disk, 0)
    put(disk, "other", b"y" * LARGE)
    created = []
    store.create, plain = lambda key, content: created.append(key) or plain(key, content), store.create  # type: ignore[method-assign]
    second = write_checkpoint(disk, 0)
    assert first.files[0].digest == next(file.digest for file in second.files if file.path == "sealed")
    assert content_key("", first.files[0].digest) not in created
    assert len([key for key in created if key.startswith("content/")]) == 1


CHANGES = {
    "overwritten": lambda disk, held: held.write(10, [b"changed"]),
    "truncated": lambda disk, held: held.truncate(5),
    "removed": lambda disk, held: disk.remove("data/file"),
    "removed and overwritten": lambda disk, held: (disk.remove("data/file"), held.write(0, [b"changed"])),
    "replaced": lambda disk, held: (put(disk, "new", b"new"), disk.rename("data/new", "data/file")),
    "moved": lambda disk, held: disk.rename("data/file", "data/other"),
    "moved and overwritten": lambda disk, held: (disk.rename("data/file", "data/other"), held.write(0, [b"changed"])),
    "moved and replaced": lambda disk, held: (
        disk.rename("data/file", "data/other"), put(disk, "file", b"new"), disk.rename("data/file", "data/other"),
    ),
    "moved with its folder": lambda disk, held: (disk.rename("data/sub", "data/gone"), disk.remove("data/gone/inner")),
}  # fmt: skip


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("size", [10, LARGE], ids=["small", "large"])
def test_what_changes_while_a_checkpoint_is_written_is_in_it_as_it_was(how, is_open, size):
    store, local = MemoryStore(), SimulatedDisk(maps=False)
    disk = own(store, local)
    disk.make_folder("data/sub")
    put(disk, "sub/inner", b"inner")
    held = disk.open("data/file", write=True, create=True)
    held.write(0, [b"x" * size])
    if not is_open:
        held.close()
        held = disk.open("data/file", write=True) if "overwritten" in how or how == "truncated" else None
    with disk.capturing() as (capture, number):
        CHANGES[how](disk, held)
        read = {path: read_in_halves(capture, path) for path in capture.sizes}
        assert read == {"sub/inner": b"inner", "file": b"x" * size}
        disk.keep_digest("file", "of the old content")
        assert how == "moved with its folder" or "file" not in disk.files.digests
    assert replayed(store, number) == {"sub/inner": b"inner", "file": b"x" * size}


@pytest.mark.parametrize("how", ["overwritten", "truncated", "removed", "replaced", "moved", "moved and replaced"])
def test_what_changes_between_two_pieces_is_read_as_it_was(how):
    disk = own(MemoryStore(), SimulatedDisk(maps=False))
    held = disk.open("data/file", write=True, create=True)
    held.write(0, [b"x" * LARGE])
    if how not in ("overwritten", "truncated"):
        held.close()
    with disk.capturing() as (capture, _):
        assert read_in_halves(capture, "file", lambda: CHANGES[how](disk, held)) == b"x" * LARGE
        assert not capture._kept


def test_what_changes_after_it_was_read_for_a_checkpoint_is_not_kept():
    disk = own(MemoryStore(), SimulatedDisk(maps=False))
    put(disk, "file", b"x" * LARGE)
    with disk.capturing() as (capture, _):
        assert read_in_halves(capture, "file") == b"x" * LARGE
        put(disk, "file", b"changed", 10)
        assert not capture._kept


def test_nobody_waits_for_the_disk_while_a_checkpoint_notes_what_is_there():
    """Writing has to stop for that moment, and a folder may have ten thousand files."""
    local = SimulatedDisk(maps=False)
    disk = own(MemoryStore(), local)
    for number in range(20):
        disk.make_folder(f"data/{number}")
        put(disk, f"{number}/file", b"x")
    disk.chain.commit()
    before = dict(local.calls)
    with disk.capturing() as (capture, _):
        assert dict(local.calls) == before
        assert len(capture.sizes) == len(capture.folders) == 20


def test_what_is_known_of_the_files_is_what_is_on_the_disk():
    """Also for an owner that begins with what others have left, and with locks, which are for one machine."""
    local, rng = SimulatedDisk(maps=False), random.Random(1)
    disk = own(MemoryStore(), local)
    for step in range(300):
        path, other = f"data/{rng.choice('abc')}", f"data/{rng.choice('abc')}"
        disk.make_folder(path)
        put(disk, f"{path[5:]}/{rng.choice('xyz')}", bytes(rng.randrange(9)), rng.randrange(9))
        what = rng.choice(["rename", "remove", "rename folder", "truncate", "lock"])
        names = [name for name in disk.names(path) if name != "lock"]
        if what == "rename" and names and disk.is_folder(other):
            disk.rename(f"{path}/{names[0]}", f"{other}/x")
        elif what == "remove" and names:
            disk.remove(f"{path}/{names[0]}")
        elif what == "truncate" and names:
            disk.open(f"{path}/{names[0]}", write=True).truncate(rng.randrange(9))
        elif what == "rename folder":
            disk.rename(path, f"data/moved-{step}")
        elif what == "lock" and not disk.exists(f"{path}/lock"):
            disk.lock(f"{path}/lock", b"")
    found = Files(local, "data", frozenset())
    assert found.folders.keys() == disk.files.folders.keys()
    assert {path: size for path, size in found.sizes.items() if not path.endswith("/lock")} == disk.files.sizes


def test_checkpoints_agree_with_the_chain_while_threads_write(tmp_path):
    store, local = MemoryStore(), RealDisk()
    root = str(tmp_path / "data")
    chain = Chain.take_over(store, "", SystemClock(), at=Position(), writer=bytes(16))
    assert chain is not None
    local.make_folder(root)
    disk = ChainDisk(local, root, chain)
    ended = threading.Event()

    def work(number):
        rng = random.Random(number)
        file = disk.open(f"{root}/file-{number}", write=True, create=True)
        while not ended.is_set():
            what = rng.random()
            if what < 0.8:
                file.write(rng.randrange(LARGE), [rng.randbytes(rng.randint(1, 2_000))])
            elif what < 0.9:
                file.truncate(rng.randrange(LARGE))
            elif what < 0.95:
                file.sync()
            else:
                file.close()
                disk.rename(f"{root}/file-{number}", f"{root}/old-{number}")
                file = disk.open(f"{root}/file-{number}", write=True, create=True)
        file.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        found = [write_checkpoint(disk, 0) for _ in range(15)]
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    chain.commit()
    whole = replayed(store)
    assert whole == files_of(local, root)
    for each in found:
        assert replayed(store, each.at.number, each) == replayed(store, each.at.number)
        assert replayed(store, None, each) == whole


@pytest.fixture
def small_pieces(monkeypatch):
    """Files of more than two units are stored in pieces of two, and logs of more than three."""
    unit = LARGE
    monkeypatch.setattr(module, "PIECE_BYTES", 2 * unit)
    monkeypatch.setattr(module, "WHOLE_LOG_BYTES", 3 * unit)
    return unit


def test_a_very_large_file_is_stored_in_pieces_and_only_new_ones_are_sent_again(small_pieces):
    store, local, rng = MemoryStore(), SimulatedDisk(maps=False), random.Random(1)
    disk, content = own(store, local), rng.randbytes(5 * small_pieces)
    put(disk, "spool", content)
    put(disk, "whole.log", rng.randbytes(3 * small_pieces))
    found = write_checkpoint(disk, 0)
    assert [len(file.digest.split()) for file in found.files] == [3, 1]
    sizes = sorted(len(store.read(key) or b"") for key in store.keys("content/"))
    assert sizes == [small_pieces, 2 * small_pieces, 2 * small_pieces, 3 * small_pieces]
    assert replayed(store, None, found) == files_of(local)
    before = set(store.keys("content/"))
    put(disk, "spool", b"appended", len(content))
    later = write_checkpoint(disk, 0)
    assert len(set(store.keys("content/")) - before) == 1
    assert replayed(store, None, later) == files_of(local)
    Copy(store, "", local, "data").restore(later)  # nothing has to be fetched
    assert replayed(store, None, later) == files_of(local)
    assert clean_up(store, "", 2 * KEPT_NS, disk.chain.confirm) > 0
    assert replayed(store, None, later) == files_of(local)


def test_a_lost_or_missing_piece_is_noticed(small_pieces):
    store, local = MemoryStore(), SimulatedDisk(maps=False)
    disk = own(store, local)
    put(disk, "file", random.Random(1).randbytes(5 * small_pieces))
    found = write_checkpoint(disk, 0)
    [file] = found.files
    fewer = msgspec.structs.replace(found, files=[msgspec.structs.replace(file, digest=file.digest.partition(" ")[2])])
    payload = msgspec.msgpack.encode(fewer)
    store.create(checkpoint_key("", 9), b"HFCP\x02" + crc32c(payload).to_bytes(4, "little") + payload)
    with pytest.raises(BadObject, match="pieces"):
        read_checkpoint(store, "", 9)
    store.remove(content_key("", file.digest.split()[1]))
    with pytest.raises(BadObject, match="content of file is missing"):
        replayed(store, None, found)


def test_a_release_that_knows_no_pieces_says_that_a_later_one_wrote_the_checkpoint(small_pieces):
    store = MemoryStore()
    disk = own(store, SimulatedDisk(maps=False))
    put(disk, "file.log", b"x" * 3 * small_pieces)
    first = write_checkpoint(disk, 0)
    put(disk, "file.log", b"x" * 4 * small_pieces)
    second = write_checkpoint(disk, 0)
    versions = [(store.read(checkpoint_key("", each.at.number)) or b"")[4] for each in (first, second)]
    assert versions == [1, 2]


@pytest.mark.parametrize("work", ["writing", "reading"])
def test_what_a_checkpoint_holds_in_memory_is_bounded(work, monkeypatch):
    """Whatever the number of threads, and also if one file alone is larger than the bound."""
    store, local, held, most = MemoryStore(), SimulatedDisk(maps=False), [0], [0]
    disk = own(store, local)
    for number, size in enumerate([3, 1, 1, 1, 9, 1, 3, 1]):
        put(disk, f"{number}", bytes([number]) * (size * LARGE))
    disk.chain.commit()
    monkeypatch.setattr(module, "_HELD_BYTES", 4 * LARGE)
    lock, plain = threading.Lock(), {"create": store.create, "read": store.read}

    def counted(size, call):
        with lock:
            held[0] += size
            most[0] = max(most[0], held[0])
        try:
            SystemClock().wait(threading.Event(), 0.02)
            return call()
        finally:
            with lock:
                held[0] -= size

    found = None if work == "writing" else write_checkpoint(disk, 0)
    monkeypatch.setattr(store, "create", lambda key, b: counted(len(b), lambda: plain["create"](key, b)))
    monkeypatch.setattr(store, "read", lambda key: counted(len(plain["read"](key) or b""), lambda: plain["read"](key)))
    if found is None:
        write_checkpoint(disk, 0)
    else:
        Copy(store, "", SimulatedDisk(maps=False), "copy").restore(found)
    assert 9 * LARGE <= most[0] < 10 * LARGE


def test_a_damaged_checkpoint_is_passed_over():
    store, local, clock = MemoryStore(), SimulatedDisk(maps=False), ManualClock()
    disk = own(store, local, clock=clock)
    put(disk, "file", b"one")
    write_checkpoint(disk, 0)
    put(disk, "file", b"two")
    found = write_checkpoint(disk, 0)
    key = f"checkpoint/{found.at.number:020}"
    content = store.read(key)
    assert content is not None
    store.remove(key)
    store.create(key, content[:-1] + b"?")
    with pytest.raises(BadObject, match="damaged"):
        read_checkpoint(store, "", found.at.number)
    fresh = SimulatedDisk(maps=False)
    follower = ChainFollower(store, "", World(clock=clock, disk=fresh, ids=SeededIds(1)), "data")
    follower.begin()
    follower.catch_up()
    assert files_of(fresh) == {"file": b"two"}


def test_a_copy_from_an_earlier_run_is_used_again():
    store, local = MemoryStore(), SimulatedDisk(maps=False)
    disk = own(store, local)
    put(disk, "sealed", b"x" * LARGE)
    put(disk, "small", b"1")
    found = write_checkpoint(disk, 0)
    store.remove(content_key("", next(file.digest for file in found.files if file.digest)))  # nobody needs to fetch it
    put(disk, "stray", b"never committed")
    Copy(store, "", local, "data").restore(found)
    assert files_of(local) == {"sealed": b"x" * LARGE, "small": b"1"}


def test_only_what_no_opening_needs_is_cleaned_up():
    store, local = MemoryStore(), SimulatedDisk(maps=False)
    disk = own(store, local)
    put(disk, "file", b"a" * LARGE)
    old = write_checkpoint(disk, 0)
    put(disk, "file", b"b" * LARGE)
    kept = write_checkpoint(disk, KEPT_NS)
    put(disk, "file", b"c" * LARGE)
    young = write_checkpoint(disk, 2 * KEPT_NS)
    put(disk, "file", b"d", LARGE)
    disk.chain.commit()
    whole = replayed(store)
    assert clean_up(store, "", KEPT_NS // 2, disk.chain.confirm) == 0  # none is old enough
    assert clean_up(store, "", 2 * KEPT_NS, disk.chain.confirm) > 0
    assert checkpoints(store, "") == [young.at.number, kept.at.number]
    assert store.read(content_key("", old.files[0].digest)) is None
    for each in (kept, young):
        assert replayed(store, None, each) == whole


def test_an_object_whose_large_write_could_not_be_fetched_is_applied_anew():
    store, local, clock = MemoryStore(), SimulatedDisk(maps=False), ManualClock()
    disk = own(store, local, clock=clock)
    put(disk, "draft", b"draft")
    disk.chain.commit()
    disk.rename("data/draft", "data/file")  # what comes before the large write cannot be done twice
    put(disk, "large", b"x" * LARGE_BYTES)
    disk.chain.commit()

    class Unreachable(MemoryStore):
        is_cut = True
        keys = staticmethod(store.keys)

        def read(self, key):
            if self.is_cut and key.startswith("large/"):
                raise StoreUnreachable("no answer")
            return store.read(key)

    fresh, seen = SimulatedDisk(maps=False), Unreachable()
    follower = ChainFollower(seen, "", World(clock=clock, disk=fresh, ids=SeededIds(1)), "data")
    follower.begin()
    follower.catch_up()
    seen.is_cut = False
    follower.catch_up()
    assert files_of(fresh) == {"file": b"draft", "large": b"x" * LARGE_BYTES}


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b", ""])
def test_a_checkpoint_cannot_lead_out_of_the_folder(path):
    """Whoever may write to the store may make one."""
    store = MemoryStore()
    for number, made in enumerate(
        [
            Checkpoint(at=Position(), time_ns=0, owner=b"", folders=[], files=[StoredFile(path, 1, b"x")]),
            Checkpoint(at=Position(), time_ns=0, owner=b"", folders=[path], files=[]),
        ]
    ):
        payload = msgspec.msgpack.encode(made)
        store.create(checkpoint_key("", number), b"HFCP\x01" + crc32c(payload).to_bytes(4, "little") + payload)
        with pytest.raises(BadObject, match="not a place in the folder"):
            read_checkpoint(store, "", number)


def test_what_is_no_checkpoint_is_refused_and_other_names_are_passed_over():
    store = MemoryStore()
    payload = msgspec.msgpack.encode({"at": "nowhere"})
    store.create(checkpoint_key("", 3), b"HFCP\x01" + crc32c(payload).to_bytes(4, "little") + payload)
    store.create("checkpoint/README", b"made by a person")
    assert checkpoints(store, "") == [3]
    with pytest.raises(BadObject, match="not in the format of this release"):
        read_checkpoint(store, "", 3)


def test_one_that_cleans_up_too_late_leaves_what_the_next_owner_has_stored():
    store = MemoryStore()
    disk = own(store, SimulatedDisk(maps=False))
    put(disk, "file", b"a" * LARGE)
    for hour in range(2):
        put(disk, "small", b"%d" % hour)
        write_checkpoint(disk, hour * KEPT_NS)
    keys, made = store.keys, []

    def keys_with_a_new_owner(prefix, after=""):
        found = keys(prefix, after)
        if prefix == "chain/" and not made:
            made.append(True)
            local, clock = SimulatedDisk(maps=False), ManualClock()
            follower = ChainFollower(store, "", World(clock=clock, disk=local, ids=SeededIds(1)), "data")
            follower.begin()
            follower.catch_up()
            chain = Chain.take_over(store, "", clock, at=follower.at, writer=bytes(15) + b"1")
            assert chain is not None
            taken = ChainDisk(local, "data", chain)
            put(taken, "next", b"b" * LARGE)
            made.append(write_checkpoint(taken, 2 * KEPT_NS))
        return found

    store.keys = keys_with_a_new_owner  # type: ignore[method-assign]
    with pytest.raises(OwnershipLost):
        clean_up(store, "", 2 * KEPT_NS, disk.chain.confirm)
    assert replayed(store, None, made[1])["next"] == b"b" * LARGE


def test_each_checkpoint_is_read_once_for_cleaning_up():
    store = MemoryStore()
    disk = own(store, SimulatedDisk(maps=False))
    read, seen = store.read, []
    store.read = lambda key: seen.append(key) or read(key)  # type: ignore[method-assign]
    known: dict[int, Listed] = {}
    for hour in range(5):
        put(disk, "file", b"%d" % hour)
        write_checkpoint(disk, hour * KEPT_NS)
        clean_up(store, "", hour * KEPT_NS, disk.chain.confirm, known)
    of_checkpoints = [key for key in seen if key.startswith("checkpoint/")]
    assert len(of_checkpoints) == len(set(of_checkpoints)) == 5
    assert sorted(known, reverse=True) == checkpoints(store, "")


def test_a_folder_goes_with_its_lock_which_no_other_machine_has():
    store, local, clock = MemoryStore(), SimulatedDisk(maps=False), ManualClock()
    disk = own(store, local, clock=clock)
    disk.make_folder("data/topic")
    disk.lock("data/topic/lock", b"").release()
    put(disk, "topic/file", b"x")
    disk.chain.commit()
    disk.remove("data/topic/lock")
    disk.remove("data/topic/file")
    disk.remove_folder("data/topic")
    put(disk, "after", b"y")
    disk.chain.commit()
    assert replayed(store) == {"after": b"y"}
