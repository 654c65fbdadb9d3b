"""Backups and restoring: what is copied, what is kept, what is refused. See also tests/integration/test_backups.py."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import holdfast
import holdfast.aio
from holdfast import Busy, CorruptData, DiskFull, InvalidRequest, NotAQueue, NotFound, Unavailable
from holdfast.broker.backup import archive as archives
from holdfast.broker.backup.archive import Archive, BackupList, kept_numbers
from holdfast.broker.backup.restoring import ArchivedSource, restore_folder
from holdfast.cli.main import main
from holdfast.env import RealDisk, real_world
from holdfast.env.chain.engines import FolderStore, StoreUnreachable


@pytest.fixture
def jobs(tmp_path):
    folder = tmp_path / "jobs"
    with holdfast.open(folder, segment_bytes=1 << 20) as queue:
        for i in range(30):
            queue.put(f"{i:03}".encode() + os.urandom(100_000), durability="os")
        queue.get().ack()
    return folder


@pytest.fixture
def place(tmp_path):
    return tmp_path / "backups"


@pytest.fixture
def run(capsys):
    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        output = capsys.readouterr()
        return ended.value.code, output.out, output.err

    return run


def bodies(folder: Path) -> list[bytes]:
    with holdfast.open_broker(folder, create=False) as broker:
        queue = broker.queue("jobs", create=False)
        return [message.body[:3] for message in queue.receive_many(1000, timeout=0)]


def contents(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (place / "content").iterdir()}


def test_what_is_restored_is_what_was_there(jobs, place, tmp_path):
    made = holdfast.backup(jobs, place)
    assert (made.number, made.problem, made.removed) == (1, "", 0)
    assert made.new_bytes > 3_000_000
    found = holdfast.restore(place, tmp_path / "restored")
    assert (found.number, found.files, found.bytes, found.source) == (1, made.files, made.bytes, made.source)
    assert bodies(tmp_path / "restored") == bodies(jobs) == [f"{i:03}".encode() for i in range(1, 30)]


def test_what_is_there_is_not_stored_again(jobs, place):
    first = holdfast.backup(jobs, place)
    before = contents(place)
    again = holdfast.backup(jobs, place)
    assert again.new_bytes == 0
    assert contents(place) == before
    with holdfast.open(jobs) as queue:
        queue.put(os.urandom(100_000))
    more = holdfast.backup(jobs, place)
    assert 100_000 < more.new_bytes < first.new_bytes / 2, "only the segment that has grown"
    assert [each.number for each in holdfast.backups(place)] == [1, 2, 3]


def test_sealed_segments_are_not_even_read_again(jobs, place, monkeypatch):
    holdfast.backup(jobs, place)
    read = []
    real = RealDisk.open

    def noted(disk, path, **how):
        read.append(path)
        return real(disk, path, **how)

    monkeypatch.setattr(RealDisk, "open", noted)
    holdfast.backup(jobs, place)
    assert not [path for path in read if path.startswith(str(jobs)) and path.endswith(".log")]


def test_a_file_that_was_rewritten_is_stored_again(jobs, place, tmp_path):
    holdfast.backup(jobs, place)
    segment = sorted(jobs.glob("topics/jobs/0/log/*.log"))[0]
    content = bytearray(segment.read_bytes())
    content[-1] ^= 1
    segment.write_bytes(content)
    assert holdfast.backup(jobs, place).new_bytes > 900_000
    holdfast.restore(place, tmp_path / "restored")
    assert (tmp_path / "restored" / segment.relative_to(jobs)).read_bytes() == content


def test_while_the_owner_works_it_is_asked(jobs, place, tmp_path):
    with holdfast.open(jobs) as queue:
        queue.put(b"new")
        held = queue.get()
        made = holdfast.backup(jobs, place)
        queue.put(b"later")
        held.ack()
    assert holdfast.backup(jobs, place).number == 2
    holdfast.restore(place, tmp_path / "first", at=1)
    holdfast.restore(place, tmp_path / "second", at=made.time + timedelta(hours=1))
    assert len(bodies(tmp_path / "first")) == 30, "the lease ended with the owner"
    assert bodies(tmp_path / "second")[-1] == b"lat"
    assert not list(jobs.glob("*.tmp"))


def test_an_owner_that_does_not_share_is_named(jobs, place):
    with holdfast.open(jobs, share=False), pytest.raises(Busy) as busy:
        holdfast.backup(jobs, place)
    assert "does not share" in " ".join(busy.value.__notes__)


def test_what_retention_removes_meanwhile_is_copied(jobs, place, tmp_path, monkeypatch):
    with holdfast.open(jobs) as queue:
        first = sorted(jobs.glob("topics/jobs/0/log/*.log"))[0]
        real, gone = Archive.put, threading.Event()

        def removed_first(archive, content, known):
            if not gone.is_set():
                gone.set()
                for message in queue.receive_many(20, timeout=0):
                    message.ack()
                queue.sync()
                queue.compact()
                assert not first.exists(), "or this test shows nothing"
            return real(archive, content, known)

        monkeypatch.setattr(Archive, "put", removed_first)
        monkeypatch.setattr("holdfast.broker.backup.taking._AT_ONCE", 1)
        holdfast.backup(jobs, place)
    holdfast.restore(place, tmp_path / "restored")
    assert len(bodies(tmp_path / "restored")) == 29
    assert holdfast.verify(place).ok


def test_what_is_appended_meanwhile_is_left_out(jobs, place, tmp_path, monkeypatch):
    with holdfast.open_broker(jobs) as broker:
        broker.create_topic("other")
        broker.publish("other", b"before")
        queue = broker.queue("jobs")
        real, done = Archive.contents, threading.Event()

        def appended_first(archive):
            if not done.is_set():
                done.set()
                queue.put(b"after")
                broker.publish("other", b"after")
            return real(archive)

        monkeypatch.setattr(Archive, "contents", appended_first)
        holdfast.backup(jobs, place)
    holdfast.restore(place, tmp_path / "restored")
    assert b"aft" not in bodies(tmp_path / "restored")
    with holdfast.open_broker(tmp_path / "restored") as broker:
        assert [message.body for message in broker.read("other")] == [b"before"]


def test_retention_keeps_the_newest_and_what_they_need(jobs, place, tmp_path):
    for i in range(4):
        with holdfast.open(jobs) as queue:
            queue.put(f"n{i}".encode() + os.urandom(100_000))
        made = holdfast.backup(jobs, place, keep=2)
    assert made.removed == 1
    assert [each.number for each in holdfast.backups(place)] == [3, 4]
    used = set()
    for each in (3, 4):
        assert holdfast.verify(place, at=each).ok
        used |= {digest.hex() for digest in Archive(str(place), real_world()).read(each).digests}
    assert set(contents(place)) == used


def test_what_to_keep():
    def made(number, hours, source="a"):
        return BackupList(number=number, time_ns=hours * 3600 * 10**9, source=source, folders=[], files=[])

    found = [made(1, 1), made(2, 2), made(3, 3), made(4, 0, "b")]
    assert kept_numbers(found, "a", None, None) == {1, 2, 3, 4}
    assert kept_numbers(found, "a", 2, None) == {2, 3, 4}
    assert kept_numbers(found, "a", None, 2 * 3600 * 10**9) == {2, 3, 4}
    assert kept_numbers(found, "a", None, 99 * 3600 * 10**9) == {3, 4}, "always the newest"
    assert kept_numbers(found, "a", 1, 3600 * 10**9) == {1, 2, 3, 4}, "what either keeps"


def test_contents_stay_while_another_backup_is_at_work(jobs, place):
    holdfast.backup(jobs, place)
    store = FolderStore(str(place))
    alive = {"pid": 1, "host": "elsewhere", "boot": "another", "time_ns": real_world().clock.now_ns()}
    store.create("begun/0123456789abcdef", json.dumps(alive).encode())
    store.create("content/" + "ab" * 32, b"of the other")
    holdfast.backup(jobs, place, keep=1)
    assert "ab" * 32 in contents(place)
    store.remove("begun/0123456789abcdef")
    holdfast.backup(jobs, place, keep=1)
    assert "ab" * 32 not in contents(place)


def test_a_backup_that_was_killed_does_not_keep_contents(jobs, place):
    from holdfast.broker.folder.stored import process_facts

    world = real_world()
    store = FolderStore(str(place))
    store.create("content/" + "ab" * 32, b"of one that was killed")
    dead = {**process_facts(world), "pid": 2**22 - 1, "time_ns": world.clock.now_ns()}
    store.create("begun/0123456789abcdef", json.dumps(dead).encode())
    holdfast.backup(jobs, place, keep=1)
    assert "ab" * 32 not in contents(place)
    assert not list((place / "begun").iterdir())


@pytest.mark.parametrize("part", ["content", "backup"])
def test_every_flip_is_found(jobs, place, part, run):
    holdfast.backup(jobs, place)
    [object_, *_] = sorted((place / part).iterdir())
    content = object_.read_bytes()
    for at in (0, len(content) // 2, len(content) - 1):
        object_.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        code, out, err = run("backup", "verify", place)
        assert code != 0, at
        assert "damaged" in out + err
    object_.write_bytes(content)
    assert run("backup", "verify", place)[0] == 0


def test_a_damaged_backup_is_listed_as_such_and_keeps_its_contents(jobs, place, run):
    holdfast.backup(jobs, place)
    holdfast.backup(jobs, place)
    (place / "backup" / f"{1:020}").write_bytes(b"HFBK\x01" + bytes(100))
    listed = holdfast.backups(place)
    assert [bool(each.problem) for each in listed] == [True, False]
    code, out, _ = run("backup", "ls", place)
    assert code == 1
    assert "damaged" in out
    before = contents(place)
    assert "no older backup was removed" in holdfast.backup(jobs, place, keep=1).problem
    assert contents(place) == before


def test_a_lost_piece_is_named_and_stored_again(jobs, place, tmp_path):
    holdfast.backup(jobs, place)
    [lost, *_] = sorted((place / "content").iterdir())
    lost.unlink()
    found = holdfast.verify(place)
    assert not found.ok
    assert lost.name in found.damage[0]
    with pytest.raises(CorruptData, match=lost.name):
        holdfast.restore(place, tmp_path / "restored")
    assert not (tmp_path / "restored" / "topics").exists()
    holdfast.backup(jobs, place)
    assert holdfast.verify(place).ok
    assert holdfast.verify(place, at=1).ok


def test_a_damaged_folder_is_found_by_the_drill(jobs, place):
    segment = sorted(jobs.glob("topics/jobs/0/log/*.log"))[0]
    content = bytearray(segment.read_bytes())
    content[1000] ^= 1
    segment.write_bytes(content)
    holdfast.backup(jobs, place)
    found = holdfast.verify(place)
    assert not found.ok
    assert "topics/jobs/0/log" in found.damage[0]
    assert "/tmp/" not in found.damage[0]


def test_a_file_that_cannot_be_read_is_named_and_nothing_is_listed(jobs, place, monkeypatch):
    from holdfast.env.disk import RealFile

    real = RealFile.read

    def failing(file, position, length):
        if length > 500_000:
            raise OSError(5, "Input/output error")
        return real(file, position, length)

    monkeypatch.setattr(RealFile, "read", failing)
    with pytest.raises(CorruptData, match=r"topics/jobs/0/log/\d+\.log cannot be read: Input/output error"):
        holdfast.backup(jobs, place)
    assert holdfast.backups(place) == []


def test_the_destination_must_be_empty(jobs, place, tmp_path):
    holdfast.backup(jobs, place)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_bytes(b"")
    for target in (jobs, tmp_path / "full"):
        before = sorted(target.rglob("*"))
        with pytest.raises(InvalidRequest, match="not empty"):
            holdfast.restore(place, target)
        with pytest.raises(InvalidRequest, match="not empty"):
            holdfast.restore(place, target, dry_run=True)
        assert sorted(target.rglob("*")) == before


def test_a_full_disk_is_told_before_and_leaves_nothing_behind(jobs, place, tmp_path, monkeypatch):
    from holdfast.env.disk import RealFile

    holdfast.backup(jobs, place)
    with monkeypatch.context() as patched:
        patched.setattr(RealDisk, "free_bytes", lambda disk, folder: 1000)
        with pytest.raises(DiskFull, match="room for 1,000 bytes"):
            holdfast.restore(place, tmp_path / "restored")
    real, count = RealFile.write, [0]

    def filling(file, position, parts):
        count[0] += 1
        if count[0] > 5:
            raise OSError(28, "No space left on device")
        return real(file, position, parts)

    with monkeypatch.context() as patched:
        patched.setattr(RealFile, "write", filling)
        with pytest.raises(DiskFull):
            holdfast.restore(place, tmp_path / "restored")
    assert [path.name for path in (tmp_path / "restored").iterdir()] == ["lock"]
    holdfast.restore(place, tmp_path / "restored")
    assert len(bodies(tmp_path / "restored")) == 29


def test_an_attempt_that_was_killed_is_not_a_queue_and_starts_over(jobs, place, tmp_path):
    holdfast.backup(jobs, place)
    world = real_world()
    archive = Archive(str(place), world)
    source = ArchivedSource(archive, archive.read(1))

    class Killed(BaseException):
        pass

    class Dying(RealDisk):
        left = 0

        def __getattribute__(self, name):
            if name in ("open", "rename", "make_folder", "remove_folder", "sync_folder", "remove"):
                Dying.left -= 1
                if Dying.left < 0:
                    raise Killed
            return super().__getattribute__(name)

    import msgspec

    target, steps = tmp_path / "restored", 0
    while True:
        Dying.left = steps
        try:
            restore_folder(source, msgspec.structs.replace(world, disk=Dying()), str(target))
            break
        except Killed:
            steps += 1
        if (target / "topics").exists():  # only the empty folder beside it may be left
            assert sorted(path.name for path in target.iterdir() if path.name != "lock")
            break
        with pytest.raises((NotAQueue, InvalidRequest)):
            holdfast.open(target, create=False)
    assert steps > 20
    assert len(bodies(target)) == 29


def test_a_backup_that_was_killed_at_any_step_is_not_listed_and_the_next_one_goes_on(jobs, place, monkeypatch):
    class Killed(BaseException):
        pass

    left = [0]

    def dying(real):
        def call(store, *given):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(store, *given)

        return call

    for name in ("create", "read", "remove"):
        monkeypatch.setattr(FolderStore, name, dying(getattr(FolderStore, name)))
    monkeypatch.setattr("holdfast.broker.backup.taking._AT_ONCE", 1)
    listed_early, total = 0, 0
    for steps in range(1000):
        shutil.rmtree(place, ignore_errors=True)
        left[0] = steps
        try:
            holdfast.backup(jobs, place)
            break
        except Killed:
            left[0] = 10**9
        listed_early += len(holdfast.backups(place))
        stored = sum(map(len, contents(place).values())) if (place / "content").exists() else 0
        made = holdfast.backup(jobs, place, keep=1)
        total = total or made.new_bytes
        assert made.new_bytes == total - stored, "what is there already is not stored again"
        assert holdfast.backups(place)[-1].number == made.number
        assert {bytes.fromhex(name) for name in contents(place)} == (
            Archive(str(place), real_world()).read(made.number).digests
        )
    assert 5 < steps < 999
    assert listed_early, "one was killed after it was listed"
    left[0] = 10**9
    assert holdfast.verify(place).ok


def test_a_store_that_does_not_answer(jobs, place, monkeypatch):
    monkeypatch.setattr(archives, "_PAUSE_S", 0.001)
    real, calls = FolderStore.create, [0]

    def lost_answer(store, key, content):
        calls[0] += 1
        made = real(store, key, content)
        if calls[0] % 2:
            raise StoreUnreachable("no answer")
        return made

    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "create", lost_answer)
        assert holdfast.backup(jobs, place).number == 1
    assert [each.number for each in holdfast.backups(place)] == [1]

    def never(store, key, content):
        raise StoreUnreachable("connection refused")

    monkeypatch.setattr(FolderStore, "create", never)
    with pytest.raises(Unavailable, match="connection refused"):
        holdfast.backup(jobs, place)


def test_what_was_stored_wrongly_is_noticed_at_once(jobs, place, monkeypatch):
    real = FolderStore.create

    def spoiling(store, key, content):
        return real(store, key, content[:-1] if "content/" in key else content)

    monkeypatch.setattr(FolderStore, "create", spoiling)
    with pytest.raises(CorruptData, match="damaged"):
        holdfast.backup(jobs, place)
    assert holdfast.backups(place) == []


def test_bad_input(jobs, place, tmp_path, run):
    with pytest.raises(NotAQueue):
        holdfast.backup(tmp_path / "nothing", place)
    with pytest.raises(InvalidRequest, match="inside"):
        holdfast.backup(jobs, jobs / "backups")
    with pytest.raises(InvalidRequest, match="is a server"):
        holdfast.backup("http://127.0.0.1:7700", place)
    with pytest.raises(InvalidRequest, match="keep=0"):
        holdfast.backup(jobs, place, keep=0)
    with pytest.raises(NotFound, match="no backup"):
        holdfast.restore(place, tmp_path / "restored")
    with pytest.raises(NotFound, match="no backup"):
        holdfast.verify(place)
    holdfast.backup(jobs, place)
    with pytest.raises(NotFound, match="no backup 7"):
        holdfast.restore(place, tmp_path / "restored", at=7)
    with pytest.raises(NotFound, match="from that time"):
        holdfast.restore(place, tmp_path / "restored", at=datetime(2000, 1, 1, tzinfo=UTC))
    with pytest.raises(InvalidRequest, match="at='x'"):
        holdfast.restore(place, tmp_path / "restored", at="x")
    assert run("restore", place, tmp_path / "restored", "--at", "noon")[0] == 2
    assert run("backup", "ls", tmp_path / "none")[0] == 3
    assert run("backup", jobs)[0] == 2


def test_backups_of_two_folders_in_one_place_are_told_apart(jobs, place, tmp_path):
    holdfast.backup(jobs, place)
    with holdfast.open(tmp_path / "mail") as queue:
        queue.put(b"1")
    holdfast.backup(tmp_path / "mail", place, keep=1)
    assert len(holdfast.backups(place)) == 2
    with pytest.raises(InvalidRequest, match="--at NUMBER"):
        holdfast.restore(place, tmp_path / "restored")
    holdfast.restore(place, tmp_path / "restored", at=1)
    assert len(bodies(tmp_path / "restored")) == 29


def test_the_commands(jobs, place, tmp_path, run):
    code, out, _ = run("backup", jobs, place, "--keep", "3", "--json")
    assert code == 0
    made = json.loads(out)
    assert (made["number"], made["removed"], made["problem"]) == (1, 0, "")
    code, out, _ = run("backup", "--keep-for", "30d", jobs, place)
    assert code == 0
    assert out.startswith("backup 2: ")
    code, out, _ = run("backup", "ls", place, "--json")
    assert [json.loads(line)["number"] for line in out.splitlines()] == [1, 2]
    assert "jobs" in run("backup", "ls", place)[1]
    code, out, _ = run("backup", "verify", place, "--json")
    assert code == 0
    assert json.loads(out) | {"files": 0, "bytes": 0, "time": "", "time_ms": 0} == {
        "number": 2, "source": made["source"], "files": 0, "bytes": 0, "messages": 30, "damage": [], "ok": True,
        "time": "", "time_ms": 0,
    }  # fmt: skip
    code, out, _ = run("restore", place, tmp_path / "restored", "--dry-run")
    assert code == 0
    assert out.startswith("would restore")
    assert not (tmp_path / "restored").exists()
    code, out, _ = run("restore", place, tmp_path / "restored", "--at", made["time"], "--json")
    assert code == 0
    assert json.loads(out)["number"] == 1
    assert run("backup", "--help")[1].startswith("Usage: holdfast backup COMMAND")
    assert "Usage: holdfast backup take" in run("backup", "take", "--help")[1]


def test_for_tasks(jobs, place, tmp_path):
    async def story():
        made = await holdfast.aio.backup(jobs, place)
        assert [made.number] == [each.number for each in await holdfast.aio.backups(place)]
        assert (await holdfast.aio.verify(place)).ok
        await holdfast.aio.restore(place, tmp_path / "restored")

    asyncio.run(story())
    assert len(bodies(tmp_path / "restored")) == 29


def test_a_folder_in_a_store_and_back_to_any_number(place, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/store/jobs"
    with holdfast.open(url) as queue:
        queue.put(b"one")
        first = holdfast.restore(url, tmp_path / "dry", dry_run=True)
        queue.put(b"two")
        made = holdfast.backup(url, place)  # while its owner works
        queue.put(b"three")
    assert made.source == url
    assert holdfast.verify(place).messages == 2
    holdfast.restore(url, tmp_path / "first", at=first.number)
    holdfast.restore(url, tmp_path / "last")
    assert (bodies(tmp_path / "first"), bodies(tmp_path / "last")) == ([b"one"], [b"one", b"two", b"thr"])
    then = holdfast.restore(url, tmp_path / "then", at=made.time)
    assert first.time <= then.time <= made.time, "of what was restored, not of the call"
    assert bodies(tmp_path / "then") == [b"one", b"two"]
    with pytest.raises(NotFound, match="there is no 100000"):
        holdfast.restore(url, tmp_path / "never", at=100_000)
    other = f"file://{tmp_path}/store/other/jobs"
    holdfast.restore(place, other)
    with holdfast.open(other) as queue:
        assert [message.body for message in queue.receive_many(9, timeout=0)] == [b"one", b"two"]
    with pytest.raises(InvalidRequest, match="not empty"):
        holdfast.restore(place, other)


def test_a_number_that_was_cleaned_up_is_told(tmp_path, monkeypatch):
    from holdfast.env.chain.engines import open_store, parse_place

    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "cache"))
    url = "memory://cleaned/jobs"
    with holdfast.open(url) as queue:
        queue.put(b"one")
        queue.put(b"two")
    from holdfast.broker.folder.stored import own_stored
    from holdfast.settings import BrokerSettings

    settings = BrokerSettings(store_cache_dir=str(tmp_path / "cache"))
    _, _, owner, give_up = own_stored(url, settings, real_world())
    owner.checkpoint()
    give_up()
    store, root = open_store(parse_place(url))
    for number in range(3):
        store.remove(f"{root}chain/{number:020}")
    with pytest.raises(NotFound, match="no longer goes back that far"):
        holdfast.restore(url, tmp_path / "restored", at=2)
    holdfast.restore(url, tmp_path / "restored")
    assert len(bodies(tmp_path / "restored")) == 2


def test_acks_that_are_only_noted_beside_the_journal_are_in_a_backup(place, tmp_path):
    with holdfast.open(tmp_path / "jobs", durability="os") as queue:
        for i in range(40):
            queue.put(b"%03d" % i)
        for i in range(20):
            queue.get().ack()  # words in a file beside the journal, until something stores them as events
            if i % 5 == 4:
                holdfast.backup(tmp_path / "jobs", place)
    for number in range(1, 5):
        holdfast.restore(place, tmp_path / f"restored-{number}", at=number)
        assert bodies(tmp_path / f"restored-{number}") == [b"%03d" % i for i in range(5 * number, 40)]
