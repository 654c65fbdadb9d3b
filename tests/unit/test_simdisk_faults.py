"""The simulated disk fails to order, fills up, is damaged, and tells of each change."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from holdfast.env.sim.disk import SimulatedDisk
from tests.unit.disks import PAGE, Place, fails, outcomes, sim, simulated, synced


def test_a_fault_strikes_the_nth_call_once() -> None:
    place = simulated()
    file = place.file()
    sim(place).faults.fail(2, errno.EIO, sticky=False)
    file.write(0, [b"one"])
    assert not sim(place).faults.fired
    fails(errno.EIO, lambda: file.write(3, [b"two"]))
    file.write(3, [b"tri"])
    assert sim(place).faults.fired == ["write"]
    assert file.read(0, 9) == b"onetri"


def test_a_sticky_fault_strikes_all_named_calls_from_then_on() -> None:
    place = simulated()
    file = place.file("a", b"abc")
    faults = sim(place).faults
    faults.fail(2, errno.EROFS, sticky=True, calls=frozenset({"write", "truncate"}))
    file.write(0, [b"x"])
    file.sync()
    fails(errno.EROFS, lambda: file.truncate(1))
    fails(errno.EROFS, lambda: file.write(0, [b"y"]))
    assert file.read(0, 9) == b"xbc"
    assert faults.fired == ["truncate", "write"]
    faults.clear()
    file.write(0, [b"z"])


def test_every_call_can_fail_and_then_has_done_nothing() -> None:
    place = simulated()
    file = synced(place, "a", b"12345678")
    disk, path = place.disk, place.path
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: disk.open(path("new"), write=True, create=True),
        "read": lambda: file.read(0, 1),
        "view": lambda: file.view(0, 1),
        "write": lambda: file.write(0, [b"x"]),
        "reserve": lambda: file.reserve(100),
        "release": lambda: file.release(8),
        "map": lambda: file.map(8),
        "words": lambda: file.words(1),
        "truncate": lambda: file.truncate(1),
        "sync": file.sync,
        "rename": lambda: disk.rename(path("a"), path("b")),
        "remove": lambda: disk.remove(path("a")),
        "sync_folder": lambda: disk.sync_folder(place.folder),
        "make_folder": lambda: disk.make_folder(path("x")),
        "names": lambda: disk.names(place.folder),
        "free_bytes": lambda: disk.free_bytes(place.folder),
        "lock": lambda: disk.lock(path("lock"), b"me"),
        "close": file.close,
    }
    for name, call in calls.items():
        before = sim(place).calls[name]
        sim(place).faults.fail(1, errno.EIO, sticky=False, calls=frozenset({name}))
        fails(errno.EIO, call)
        assert sim(place).calls[name] == before + 1
    assert sim(place).faults.fired == list(calls)
    assert disk.names(place.folder) == ["a"]
    assert sim(place).contents(path("a")) == b"12345678"
    fails(errno.EBADF, file.size)


def test_a_short_write_takes_half_and_says_so() -> None:
    place = simulated()
    file = place.file()
    sim(place).faults.short_write(1, sticky=False)
    assert file.write(0, [b"abcd", b"ef"]) == 3
    assert file.write(3, [b"def"]) == 3
    assert file.read(0, 9) == b"abcdef"
    assert sim(place).faults.fired == ["write"]


def test_after_a_sticky_short_write_the_disk_is_full() -> None:
    place = simulated()
    file = place.file()
    sim(place).faults.short_write(2, sticky=True)
    assert file.write(0, [b"ab"]) == 2
    assert file.write(2, [b"c"]) == 0
    fails(errno.ENOSPC, lambda: file.write(2, [b"c"]))
    fails(errno.ENOSPC, lambda: file.write(2, [b"c"]))
    assert file.read(0, 9) == b"ab"


def test_a_full_disk_shows_as_a_short_write_first_and_an_error_next() -> None:
    place = simulated(capacity_bytes=1000)
    file = place.file("a", b"x" * 700)
    assert place.disk.free_bytes(place.folder) == 300
    fails(errno.ENOSPC, lambda: file.reserve(1001))
    assert file.size() == 700
    assert file.write(600, [b"y" * 500]) == 400
    fails(errno.ENOSPC, lambda: file.write(1000, [b"z"]))
    assert file.write(0, [b"over what is there"]) == 18
    file.truncate(500)
    file.reserve(900)
    assert place.disk.free_bytes(place.folder) == 100
    place.disk.lock(place.path("lock"), b"no room for the note").release()
    place.disk.remove(place.path("a"))
    assert place.disk.free_bytes(place.folder) == 1000


def test_a_store_outside_of_what_is_reserved_is_caught() -> None:
    place = simulated()
    file = place.file()
    file.reserve(100)
    mapped, words = file.map(100), file.words(12)
    with pytest.raises(AssertionError):
        mapped[96:104] = b"SIGBUS!!"
    file.truncate(50)
    with pytest.raises(AssertionError):
        mapped[48:56] = b"SIGBUS!!"
    with pytest.raises(AssertionError):
        words[6] = 1
    file.truncate(100)
    with pytest.raises(AssertionError):
        file.map(100)  # long enough again, but without blocks


def test_after_a_failed_sync_the_next_one_says_ok_and_the_bytes_are_still_lost() -> None:
    place = simulated()
    file = synced(place, "a", b"old")
    sim(place).faults.fail(1, errno.EIO, sticky=False, calls=frozenset({"sync"}))
    file.write(0, [b"newer"])
    fails(errno.EIO, file.sync)
    assert file.read(0, 9) == b"newer"
    file.sync()
    assert file.read(0, 9) == b"newer"
    assert {b"old", b"newer"} <= outcomes(place)
    file.write(2, [b"W"])  # beside the lost bytes: those stay lost
    assert {b"old", b"olW", b"new", b"newer", b"neWer"} <= outcomes(place, count=1000)
    file.sync()
    assert {b"olW", b"neWer"} <= outcomes(place)
    assert outcomes(Place(sim(place).kill(), place.folder)) == outcomes(place)


def test_a_tail_that_was_cut_after_a_failed_sync_stays_away_once_that_is_synced() -> None:
    place = simulated()
    file = synced(place, "a", b"abcdef")
    sim(place).faults.fail(1, errno.EIO, sticky=False, calls=frozenset({"sync"}))
    file.write(0, [b"ABCDEF"])
    fails(errno.EIO, file.sync)
    file.truncate(2)
    file.truncate(4)
    file.sync()
    assert outcomes(place) == {b"ab\0\0", b"AB\0\0"}
    file.truncate(3)
    file.sync()
    file.truncate(6)
    assert {content[2:] for content in outcomes(place) if content} == {b"\0", b"\0" * 4}


def test_what_is_written_again_after_a_failed_sync_is_safe_after_the_next() -> None:
    place = simulated()
    file = synced(place, "a", b"old")
    sim(place).faults.fail(1, errno.EIO, sticky=False, calls=frozenset({"sync"}))
    content = b"n" * PAGE + b"m" * 10
    file.write(0, [content])
    fails(errno.EIO, file.sync)
    file.write(0, [content])
    assert {b"old", content} <= outcomes(place)
    file.sync()
    assert outcomes(place) == {content}


def test_a_flipped_byte_is_damaged_in_every_version() -> None:
    place = simulated()
    file = synced(place, "a", b"\x00\x00\x00")
    file.write(0, [b"\x01\x01\x01"])
    sim(place).flip(place.path("a"), 1)
    assert file.read(0, 3) == b"\x01\xfe\x01"
    assert outcomes(place) == {b"\x00\xff\x00", b"\x01\xfe\x01"}
    sim(place).flip(place.path("a"), 2, mask=0x10)
    assert file.read(0, 3) == b"\x01\xfe\x11"
    with pytest.raises(IndexError):
        sim(place).flip(place.path("a"), 3)


def test_a_file_cut_short_is_short_in_every_version() -> None:
    place = simulated()
    file = synced(place, "a", b"o" * 3 * PAGE)
    file.write(PAGE, [b"n" * 2 * PAGE])
    sim(place).cut_file(place.path("a"), PAGE + 2)
    assert file.read(0, 3 * PAGE) == b"o" * PAGE + b"nn"
    assert outcomes(place) == {b"o" * PAGE + b"nn", b"o" * (PAGE + 2)}
    file.write(PAGE + 2, [b"tail"])
    assert {content[PAGE + 2 :] for content in outcomes(place) if content} == {b"", b"\0" * 4, b"tail"}
    file.sync()
    assert outcomes(place) == {b"o" * PAGE + b"nntail"}


def test_the_hook_is_told_of_each_change_after_it_took_effect() -> None:
    place = simulated()
    calls: list[tuple[str, bytes]] = []
    disk, path = sim(place), place.path("a")
    disk.on_call = lambda call: calls.append((call, disk.contents(path) if disk.exists(path) else b""))
    file = place.file("a", b"12345678")
    file.map(8)[0:1] = b"x"
    file.words(1)[0] = 0
    file.reserve(9)
    file.truncate(1)
    file.sync()
    file.read(0, 1)
    disk.sync_folder(place.folder)
    disk.make_folder(place.folder)
    disk.rename(path, place.path("b"))
    disk.remove(place.path("b"))
    disk.make_folder(place.path("x"))
    disk.lock(place.path("lock"), b"me")
    place.file("lock").close()
    assert calls == [
        ("open", b""),
        ("write", b"12345678"),
        ("map_store", b"x2345678"),
        ("word_store", bytes(8)),
        ("reserve", bytes(9)),
        ("truncate", b"\0"),
        ("sync", b"\0"),
        ("sync_folder", b"\0"),
        ("sync_folder", b"\0"),
        ("rename", b""),
        ("remove", b""),
        ("sync_folder", b""),
        ("make_folder", b""),
        ("sync_folder", b""),
        ("lock", b""),
    ]
    assert (disk.calls["map_store"], disk.calls["read"], disk.calls["make_folder"]) == (1, 1, 3)


def test_blocks_are_taken_whole_and_given_back() -> None:
    disk = SimulatedDisk(capacity_bytes=12 * 1024, block_bytes=4096)
    disk.make_folder("/d")
    one, two = (disk.open(f"/d/{name}", write=True, create=True) for name in ("one", "two"))
    one.write(0, [b"x"])
    assert disk.free_bytes("/d") == 8 * 1024
    one.write(1, [bytes(4095)])
    assert disk.free_bytes("/d") == 8 * 1024
    one.reserve(12 * 1024)
    fails(errno.ENOSPC, lambda: two.write(0, [b"y"]))
    one.release(4096)
    assert two.write(0, [bytes(9 * 1024)]) == 8 * 1024
    with pytest.raises(AssertionError, match="hold something"):
        one.release(0)
