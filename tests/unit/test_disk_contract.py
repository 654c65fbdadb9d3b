"""The real disk and the simulated one agree on all that storage relies on while nothing goes wrong."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from holdfast.env.disk import FolderLocked, RealDisk
from holdfast.env.sim.disk import SimulatedDisk
from tests.unit.disks import Place, fails, simulated


@pytest.fixture(params=["real", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "real":
        return Place(RealDisk(), str(tmp_path))
    return simulated()


def test_parts_are_written_one_behind_the_other_and_read_back(place: Place) -> None:
    file = place.file()
    assert file.write(2, [b"ab", bytearray(b"cd"), memoryview(b"ef")]) == 6
    assert file.size() == 8
    assert file.read(0, 100) == b"\0\0abcdef"
    assert file.read(4, 2) == b"cd"
    assert file.read(8, 5) == b""
    assert file.write(0, []) == 0


def test_more_than_1024_parts_are_refused(place: Place) -> None:
    file = place.file()
    assert file.write(0, [b"x"] * 1024) == 1024
    fails(errno.EINVAL, lambda: file.write(0, [b"y"] * 1025))
    assert file.read(0, 2000) == b"x" * 1024


def test_a_view_ends_where_the_file_ends_and_outlives_it(place: Place) -> None:
    file = place.file("a", b"hello")
    view = file.view(1, 100)
    assert bytes(view) == b"ello"
    assert view.readonly
    assert bytes(place.file("empty").view(0, 10)) == b""
    file.write(5, [b" you"])
    assert bytes(file.view(5, 4)) == b" you"
    file.close()
    place.disk.remove(place.path("a"))
    assert bytes(view) == b"ello"


def test_what_is_stored_into_a_map_is_read_from_the_file(place: Place) -> None:
    file = place.file()
    file.reserve(100)
    mapped = file.map(100)
    mapped[10:15] = b"hello"
    assert file.read(8, 9) == b"\0\0hello\0\0"
    with pytest.raises(IndexError):
        mapped[0:3] = b"four"
    with pytest.raises(ValueError, match="length"):
        file.map(101)
    file.close()
    mapped[0:2] = b"ok"
    assert place.disk.open(place.path("a")).read(0, 2) == b"ok"


def test_words_are_64_bits_little_endian(place: Place) -> None:
    file = place.file()
    file.reserve(24)
    words = file.words(3)
    assert (len(words), list(words)) == (3, [0, 0, 0])
    words[1] = 2**64 - 2
    words[-1] = 7
    assert list(words) == [0, 2**64 - 2, 7]
    assert file.read(8, 16) == b"\xfe" + b"\xff" * 7 + b"\x07" + b"\0" * 7
    file.write(0, [b"\x05"])
    assert words[0] == 5
    with pytest.raises(IndexError):
        words[3] = 1
    with pytest.raises(ValueError, match=r"word|format"):
        words[0] = 2**64


def test_a_file_opened_for_reading_cannot_be_changed(place: Place) -> None:
    place.file("a", b"12345678").close()
    file = place.disk.open(place.path("a"))
    fails(errno.EBADF, lambda: file.write(0, [b"x"]))
    fails(errno.EBADF, lambda: file.reserve(100))
    fails(errno.EINVAL, lambda: file.truncate(1))
    mapped, words = file.map(8), file.words(1)
    with pytest.raises(TypeError):
        mapped[0:1] = b"x"
    with pytest.raises(TypeError):
        words[0] = 1
    assert file.read(0, 8) == b"12345678"


def test_reserve_grows_with_zeros_and_never_shrinks(place: Place) -> None:
    file = place.file("a", b"abc")
    file.reserve(6)
    assert file.read(0, 10) == b"abc\0\0\0"
    file.reserve(2)
    assert file.size() == 6
    fails(errno.EINVAL, lambda: file.reserve(0))


def test_release_keeps_length_and_bytes(place: Place) -> None:
    file = place.file("a", b"abc")
    file.reserve(20_000)
    file.release(4096)
    assert file.size() == 20_000
    assert file.read(0, 20_000) == b"abc".ljust(20_000, b"\0")
    file.reserve(20_000)
    mapped = file.map(20_000)
    mapped[10_000:10_003] = b"def"
    assert file.read(10_000, 3) == b"def"


def test_truncate_cuts_and_grows_with_zeros(place: Place) -> None:
    file = place.file("a", b"abcdef")
    file.truncate(2)
    assert file.read(0, 10) == b"ab"
    file.truncate(4)
    assert file.read(0, 10) == b"ab\0\0"


def test_a_rename_replaces_and_open_files_go_on(place: Place) -> None:
    old, new = place.file("a", b"old"), place.file("b", b"new")
    place.disk.rename(place.path("b"), place.path("a"))
    assert place.disk.names(place.folder) == ["a"]
    assert place.disk.open(place.path("a")).read(0, 9) == b"new"
    assert old.read(0, 9) == b"old"
    new.write(3, [b"er"])
    assert place.disk.open(place.path("a")).read(0, 9) == b"newer"
    place.disk.rename(place.path("a"), place.path("a"))
    assert place.disk.names(place.folder) == ["a"]


def test_a_folder_moves_with_what_it_holds(place: Place) -> None:
    place.disk.make_folder(place.path("x/y"))
    place.file("x/y/a", b"here")
    place.disk.rename(place.path("x"), place.path("z"))
    assert place.disk.open(place.path("z/y/a")).read(0, 9) == b"here"
    fails(errno.EINVAL, lambda: place.disk.rename(place.path("z"), place.path("z/y/z")))
    place.disk.rename(place.path("z"), place.path("z"))
    assert place.disk.names(place.path("z")) == ["y"]


def test_a_rename_that_makes_no_sense_is_refused(place: Place) -> None:
    place.file("a", b"a")
    place.disk.make_folder(place.path("x"))
    place.disk.make_folder(place.path("y/z"))
    fails(errno.ENOENT, lambda: place.disk.rename(place.path("none"), place.path("b")))
    fails(errno.ENOENT, lambda: place.disk.rename(place.path("a"), place.path("none/b")))
    fails(errno.EISDIR, lambda: place.disk.rename(place.path("a"), place.path("x")))
    fails(errno.ENOTDIR, lambda: place.disk.rename(place.path("x"), place.path("a")))
    fails(errno.ENOTEMPTY, lambda: place.disk.rename(place.path("x"), place.path("y")))
    assert place.disk.names(place.folder) == ["a", "x", "y"]


def test_a_removed_file_is_still_there_for_those_who_hold_it(place: Place) -> None:
    file = place.file("a", b"held")
    place.disk.remove(place.path("a"))
    assert not place.disk.exists(place.path("a"))
    assert file.read(0, 9) == b"held"
    fails(errno.ENOENT, lambda: place.disk.remove(place.path("a")))
    place.disk.make_folder(place.path("x"))
    fails(errno.EISDIR, lambda: place.disk.remove(place.path("x")))


def test_names_are_sorted_and_a_missing_folder_is_an_error(place: Place) -> None:
    for name in ("b", "a", "c"):
        place.file(name).close()
    assert place.disk.names(place.folder) == ["a", "b", "c"]
    assert place.disk.exists(place.path("b"))
    fails(errno.ENOENT, lambda: place.disk.names(place.path("none")))
    fails(errno.ENOTDIR, lambda: place.disk.names(place.path("a")))
    fails(errno.ENOENT, lambda: place.disk.sync_folder(place.path("none")))


def test_opening_what_is_not_there_is_an_error_unless_it_is_to_be_made(place: Place) -> None:
    fails(errno.ENOENT, lambda: place.disk.open(place.path("a"), write=True))
    fails(errno.ENOENT, lambda: place.disk.open(place.path("none/a"), write=True, create=True))
    place.file("a", b"kept").close()
    assert place.file("a").read(0, 9) == b"kept"
    fails(errno.ENOTDIR, lambda: place.disk.open(place.path("a/b")))


def test_folders_are_made_with_those_above_and_twice_is_no_error(place: Place) -> None:
    place.disk.make_folder(place.path("x/y/z"))
    place.disk.make_folder(place.path("x/y/z"))
    assert place.disk.names(place.path("x/y")) == ["z"]
    place.file("a").close()
    fails(errno.EEXIST, lambda: place.disk.make_folder(place.path("a")))
    fails(errno.EEXIST, lambda: place.disk.make_folder(place.path("a/b")))


def test_a_lock_that_is_held_names_its_holder(place: Place) -> None:
    lock = place.disk.lock(place.path("lock"), b"me, 1")
    with pytest.raises(FolderLocked) as caught:
        place.disk.lock(place.path("lock"), b"you, 2")
    assert caught.value.note == b"me, 1"
    lock.release()
    lock.release()
    second = place.disk.lock(place.path("lock"), b"you")
    with pytest.raises(FolderLocked) as caught:
        place.disk.lock(place.path("lock"), b"me again")
    assert caught.value.note == b"you"
    second.release()
    assert place.disk.names(place.folder) == ["lock"]


def test_a_disk_says_what_it_is(place: Place) -> None:
    assert place.disk.free_bytes(place.folder) > 0
    assert place.disk.can_map(place.folder) in (True, False)
    assert place.disk.kind(place.folder)
    assert not SimulatedDisk(maps=False).can_map("/")
