"""The chain as one owner writes it: what is answered when, what is unknown, and what is final."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.env import ManualClock, SystemClock
from holdfast.env.chain import disk as disk_module
from holdfast.env.chain.chain import Chain, ChainTimes, OwnershipLost, Position, key_of, walk
from holdfast.env.chain.checkpoints import Copy
from holdfast.env.chain.disk import LARGE_BYTES, ChainDisk
from holdfast.env.chain.engines import FolderStore, MemoryStore, StoreRefused, StoreUnreachable, probe
from holdfast.env.chain.format import (
    HEADER_BYTES,
    BadObject,
    ChangeBatch,
    ObjectHeader,
    ObjectKind,
    decode,
    encode,
    replay,
)
from holdfast.env.disk import RealDisk, write_fully
from tests.crash.faulty_store import FaultyStore

WRITER = bytes(range(16))
GOLDEN = Path(__file__).parents[1] / "golden"


def own(store, clock=None, at=None, **times) -> Chain:
    chain = Chain.take_over(
        store, "", clock or ManualClock(), at=at or Position(), writer=WRITER, times=ChainTimes(**times)
    )
    assert chain is not None
    return chain


def tail(store) -> Position:
    at = Position()
    for header, _ in walk(store, "", at):
        at = at.after(header)
    return at


class Written:
    """A copy of the folder, in memory."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.folders: set[str] = set()

    def make(self, path):
        self.folders.add(path)

    def create(self, path):
        self.files[path] = bytearray()

    def write(self, path, position, content):
        file = self.files[path]
        file.extend(bytes(max(0, position + len(content) - len(file))))
        file[position : position + len(content)] = content

    def write_large(self, path, position, length, digest, key):
        self.write(path, position, key.encode())

    def truncate(self, path, length):
        file = self.files[path]
        del file[length:]
        file.extend(bytes(length - len(file)))

    def rename(self, old, new):
        self.files[new] = self.files.pop(old)

    def remove(self, path):
        del self.files[path]

    def remove_folder(self, path):
        self.folders.remove(path)


def test_an_object_reads_back_as_it_was_written():
    header = ObjectHeader(kind=ObjectKind.DATA, number=7, epoch=3, writer=WRITER, window=8, time_ns=123, resume_at=0)
    assert decode(encode(header, b"payload"), 7) == (header, b"payload")


def test_objects_are_written_as_they_always_were():
    """The bytes are a format: what is in somebody's store must stay readable, and older readers must understand us."""
    batch = ChangeBatch()
    batch.make("topics")
    batch.create("topics/a.new")
    batch.write("topics/a.new", 0, b"hello")
    batch.write("topics/a.new", 8, (7).to_bytes(8, "little"))
    batch.write_large("topics/a.new", 16, 3, bytes(range(32)), "large/1-ab")
    batch.truncate("topics/a.new", 19)
    batch.rename("topics/a.new", "topics/a")
    batch.create("gone")
    batch.remove("gone")
    batch.make("empty")
    batch.remove_folder("empty")
    data = ObjectHeader(kind=ObjectKind.DATA, number=42, epoch=3, writer=WRITER, window=8, time_ns=10**18)
    fence = ObjectHeader(
        kind=ObjectKind.FENCE, number=50, epoch=4, writer=WRITER, window=8, time_ns=10**18, resume_at=58
    )
    written = {"data": encode(data, batch.payload()), "fence": encode(fence, b'{"pid":1}')}
    for name, content in written.items():
        assert content.hex() == (GOLDEN / f"chain-{name}.hex").read_text().strip()


def test_every_flipped_bit_of_an_object_is_noticed():
    content = encode(ObjectHeader(kind=ObjectKind.DATA, number=7, epoch=3, writer=WRITER, window=8, time_ns=123), b"ab")
    for bit in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadObject):
            decode(bytes(flipped), 7)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1])
def test_a_cut_object_is_noticed(length):
    content = encode(ObjectHeader(kind=ObjectKind.DATA, number=7, epoch=3, writer=WRITER, window=8, time_ns=123), b"ab")
    with pytest.raises(BadObject):
        decode(content[:length], 7)


def test_an_object_under_another_number_is_refused():
    content = encode(ObjectHeader(kind=ObjectKind.DATA, number=7, epoch=3, writer=WRITER, window=8, time_ns=123))
    with pytest.raises(BadObject, match="says that it is number 7"):
        decode(content, 8)


def test_changes_come_back_in_their_order():
    batch, copy = ChangeBatch(), Written()
    batch.make("topics")
    batch.create("topics/a.new")
    batch.write("topics/a.new", 0, b"hello")
    batch.write("topics/a.new", 3, b"p!")
    batch.truncate("topics/a.new", 4)
    batch.rename("topics/a.new", "topics/a")
    batch.write("topics/a", 4, b" you")
    batch.create("gone")
    batch.remove("gone")
    batch.make("empty")
    batch.remove_folder("empty")
    replay(memoryview(batch.payload()), copy)
    assert copy.files == {"topics/a": b"help you"}
    assert copy.folders == {"topics"}


def test_a_word_that_changed_often_is_one_record():
    batch, copy = ChangeBatch(), Written()
    batch.create("state")
    for value in range(1_000):
        batch.write("state", 8, value.to_bytes(8, "little"))
    assert len(batch.payload()) < 100
    replay(memoryview(batch.payload()), copy)
    assert copy.files["state"] == bytes(8) + (999).to_bytes(8, "little")


def test_a_word_is_not_moved_to_before_a_write_that_covers_it():
    batch, copy = ChangeBatch(), Written()
    batch.create("state")
    batch.write("state", 0, b"a" * 8)
    batch.write("state", 0, b"b" * 16)
    batch.write("state", 0, b"c" * 8)
    replay(memoryview(batch.payload()), copy)
    assert copy.files["state"] == b"c" * 8 + b"b" * 8


def test_words_that_overlap_in_part_keep_their_order():
    batch, copy = ChangeBatch(), Written()
    batch.create("state")
    batch.write("state", 0, b"a" * 8)
    batch.write("state", 4, b"b" * 8)
    batch.write("state", 0, b"c" * 8)
    replay(memoryview(batch.payload()), copy)
    assert copy.files["state"] == b"c" * 8 + b"b" * 4


@pytest.mark.parametrize("payload", [b"\x03\x00", b"\x03\x05\x00\x00\x00", b"\x63", b"\x04\x00"])
def test_what_is_no_record_is_a_bad_object(payload):
    with pytest.raises(BadObject):
        replay(memoryview(payload), Written())


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "a/../../b", "a//b", "", "a/./b", "a\0b"])
def test_a_record_cannot_lead_out_of_the_folder(path):
    batch = ChangeBatch()
    batch.create(path)
    with pytest.raises(BadObject, match="not a place in the folder"):
        replay(memoryview(batch.payload()), Written())


def test_a_commit_returns_when_the_object_is_there():
    store = MemoryStore()
    chain = own(store)
    chain.batch.make("a")
    before = chain.commit()
    assert store.read(key_of("", before - 1)) is not None
    assert chain.commit() == before  # nothing is new: no object


def test_an_object_without_an_answer_is_tried_again_and_known_by_its_bytes():
    objects = MemoryStore()
    for seed in range(60):
        chain = own(FaultyStore(objects, seed, faults=0.8), at=tail(objects))
        chain.batch.make(f"record-{seed}")
        chain.commit()
    copy = Written()
    for header, payload in walk(objects, "", Position()):
        if header.kind == ObjectKind.DATA:
            replay(payload, copy)
    assert copy.folders == {f"record-{seed}" for seed in range(60)}


def test_a_foreign_object_is_final():
    store = MemoryStore()
    first = own(store)
    own(store, at=tail(store))
    first.batch.make("late")
    for _ in range(2):
        with pytest.raises(OwnershipLost, match="another process has taken over"):
            first.commit()


def test_of_two_who_fence_at_once_one_becomes_the_owner():
    store = MemoryStore()
    own(store)
    at = tail(store)
    own(store, at=at)
    assert Chain.take_over(store, "", ManualClock(), at=at, writer=bytes(16)) is None


def test_a_store_that_does_not_answer_ends_the_owner():
    store = FaultyStore(MemoryStore(), 0, faults=0)
    chain = own(store, slowest_s=3)
    store.is_cut = True
    chain.batch.make("a")
    with pytest.raises(OwnershipLost, match="did not respond for 3 s"):
        chain.commit()
    store.is_cut = False
    with pytest.raises(OwnershipLost):
        chain.commit()


class _Hanging(MemoryStore):
    """A store that answers nothing while it hangs; its client gives up after `patience_s`."""

    patience_s = 0.7
    hangs = False

    def create(self, key, content):
        if self.hangs:
            SystemClock().wait(threading.Event(), self.patience_s)
            raise StoreUnreachable("no answer")
        return super().create(key, content)


def test_a_store_that_hangs_is_given_up_when_its_answer_could_not_count_any_more():
    """Also by those who ask it later, and by whoever waits in a call that goes on for longer."""
    store, clock, ended = _Hanging(), SystemClock(), []
    chain = own(store, clock, slowest_s=1.0, lease_s=0.5)
    store.hangs = True
    began_ns = clock.monotonic_ns()

    def commit(name):
        chain.batch.make(name)
        with pytest.raises(OwnershipLost, match="did not respond for 1 s"):
            chain.commit()
        ended.append((clock.monotonic_ns() - began_ns) / 1e9)

    first = threading.Thread(target=commit, args=("first",))
    first.start()
    clock.wait(threading.Event(), 0.6)  # the owner is in doubt by now
    store.patience_s = 5
    commit("second")
    first.join()
    assert len(ended) == 2
    assert all(0.9 < seconds < 4 for seconds in ended), ended


def test_a_store_that_answers_again_in_time_keeps_its_owner():
    store, clock = _Hanging(), SystemClock()
    chain = own(store, clock, slowest_s=5.0, lease_s=5.0)
    store.hangs = True
    waking = threading.Timer(0.5, lambda: setattr(store, "hangs", False))
    waking.start()
    chain.batch.make("first")
    chain.commit()
    waking.join()
    assert chain.failure is None


def test_an_object_that_took_too_long_is_not_counted():
    clock = ManualClock()

    class Slow(MemoryStore):
        def create(self, key, content):
            clock.advance(seconds=11)
            return super().create(key, content)

    chain = own(MemoryStore(), clock)
    chain.store = Slow()
    chain.batch.make("a")
    with pytest.raises(OwnershipLost, match="not counted as stored"):
        chain.commit()


def test_a_refused_object_ends_the_owner():
    class Refusing(MemoryStore):
        def create(self, key, content):
            raise StoreRefused("no permission")

    chain = own(MemoryStore())
    chain.store = Refusing()
    chain.batch.make("a")
    with pytest.raises(OwnershipLost, match="no permission"):
        chain.commit()


def test_an_interrupted_commit_is_finished_by_the_next():
    class Interrupted(MemoryStore):
        calls = 0

        def create(self, key, content):
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt
            return super().create(key, content)

    store = Interrupted()
    chain = own(store)
    chain.batch.make("a")
    with pytest.raises(KeyboardInterrupt):
        chain.commit()
    chain.batch.make("b")
    chain.commit()
    copy = Written()
    for header, payload in walk(store, "", Position()):
        if header.kind == ObjectKind.DATA:
            replay(payload, copy)
    assert copy.folders == {"a", "b"}


def test_an_idle_owner_shows_that_it_lives_and_a_silent_one_is_not_current():
    store, clock = MemoryStore(), ManualClock()
    chain = own(store, clock, lease_s=10)
    before = tail(store)
    clock.advance(seconds=1)
    chain.tick()
    assert tail(store) == before
    clock.advance(seconds=2)
    chain.tick()
    assert tail(store).number == before.number + 1
    clock.advance(seconds=9)
    assert not chain.is_current()
    chain.require_current()
    assert chain.is_current()


def test_what_nobody_waits_for_is_sent_soon():
    store, clock = MemoryStore(), ManualClock()
    chain = own(store, clock, send_s=0.2)
    chain.batch.make("a")
    chain.noted()
    chain.tick()
    assert chain.batch.count == 1
    clock.advance(seconds=0.3)
    chain.tick()
    assert chain.batch.count == 0


def test_many_threads_share_objects():
    store = MemoryStore()

    class Slow(MemoryStore):
        def create(self, key, content):
            threading.Event().wait(0.005)
            return store.create(key, content)

    chain = own(store, SystemClock())
    chain.store = Slow()
    first = chain.next_number

    def work(i):
        with chain.lock:
            chain.batch.make(f"thread-{i}")
        chain.commit()
        assert any(f"thread-{i}".encode() in (store.read(key) or b"") for key in store.keys(""))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chain.next_number - first < 64
    assert chain.committed == chain.next_number


def test_a_good_store_passes_the_probe_and_leaves_nothing_behind():
    store = MemoryStore()
    probe(store, "jobs/", "one")
    assert list(store.keys("")) == []


def test_a_store_that_ignores_the_condition_is_refused():
    store = FaultyStore(MemoryStore(), 0, faults=0)
    store.ignores_condition = True
    with pytest.raises(StoreRefused, match="ignores the condition"):
        probe(store, "", "one")


def test_a_store_that_checks_first_and_writes_later_is_refused():
    class Racy(MemoryStore):
        def create(self, key, content):
            if self.read(key) is not None:
                return False
            threading.Event().wait(0.02)
            self.remove(key)
            return super().create(key, content)

    with pytest.raises(StoreRefused, match="succeeded"):
        probe(Racy(), "", "one")


def test_a_store_that_does_not_answer_is_not_called_bad():
    with pytest.raises(StoreUnreachable):
        store = FaultyStore(MemoryStore(), 0, faults=0)
        store.is_cut = True
        probe(store, "", "one")


def test_a_large_write_without_an_answer_is_tried_again(tmp_path):
    objects = MemoryStore()
    for seed in range(20):
        store = FaultyStore(objects, seed, faults=0.8)
        disk = ChainDisk(RealDisk(), str(tmp_path), own(store, at=tail(objects)))
        content = bytes([seed]) * 100
        _, key = disk.upload(content)
        assert objects.read(key) == content


def test_a_very_large_write_is_several_objects_none_of_which_is_larger_than_a_store_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "MOST_WRITTEN_BYTES", 2 * LARGE_BYTES)
    store, content = MemoryStore(), os.urandom(5 * LARGE_BYTES)
    disk = ChainDisk(RealDisk(), str(tmp_path), own(store))
    with closing(disk.open(f"{tmp_path}/file", write=True, create=True)) as file:
        write_fully(file, 0, [content[:7], memoryview(content)[7:-9], content[-9:]])
        file.sync()
        assert file.read(0, len(content)) == content
    sizes = sorted(len(store.read(key) or b"") for key in store.keys("large/"))
    assert sizes == [2 * LARGE_BYTES, 2 * LARGE_BYTES]  # and the rest is in the chain
    copy = Copy(store, "", RealDisk(), str(tmp_path / "copy"))
    copy.clear()
    for header, payload in walk(store, "", Position()):
        if header.kind == ObjectKind.DATA:
            replay(payload, copy)
    assert (tmp_path / "copy" / "file").read_bytes() == content


def test_a_large_write_that_the_store_does_not_take_says_so_and_leaves_the_owner(tmp_path):
    store = FaultyStore(MemoryStore(), 0, faults=0)
    disk = ChainDisk(RealDisk(), str(tmp_path), own(store, slowest_s=3))
    store.is_cut = True
    with pytest.raises(OSError, match="did not take 3 bytes"):
        disk.upload(b"abc")
    store.is_cut = False
    disk.upload(b"abc")
    disk.chain.commit()


def test_a_folder_that_was_made_and_not_synced_at_first_is_recorded_at_the_second_try(tmp_path, monkeypatch):
    """Otherwise no other owner could apply what is made in it."""
    store, local = MemoryStore(), RealDisk()
    disk = ChainDisk(local, str(tmp_path), own(store))
    real = RealDisk.make_folder

    def failing(self, path):
        real(self, path)
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(RealDisk, "make_folder", failing)
        with pytest.raises(OSError, match="Too many"):
            disk.make_folder(f"{tmp_path}/topics/a")
    disk.make_folder(f"{tmp_path}/topics/a")
    disk.open(f"{tmp_path}/topics/a/file", write=True, create=True).close()
    disk.chain.commit()
    found = Written()
    for header, payload in walk(store, "", Position()):
        if header.kind == ObjectKind.DATA:
            replay(payload, found)
    assert found.folders == {"topics", "topics/a"}
    assert list(found.files) == ["topics/a/file"]


def test_an_object_of_a_folder_is_there_when_its_name_is_synced_also_if_an_earlier_attempt_made_it(tmp_path):
    store = FolderStore(str(tmp_path))
    sync, synced = store._disk.sync_folder, []

    def failing_once(folder):
        if folder.endswith("chain"):
            synced.append(folder)
            if len(synced) == 1:
                raise OSError(errno.EMFILE, "too many open files")
        sync(folder)

    store._disk.sync_folder = failing_once  # type: ignore[method-assign]
    with pytest.raises(StoreUnreachable):
        store.create("chain/1", b"x")
    assert not store.create("chain/1", b"x")
    assert len(synced) == 2
