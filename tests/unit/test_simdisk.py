"""A power cut keeps what was synced and may lose anything else; kill -9 loses nothing."""

from __future__ import annotations

import errno
import random

from tests.unit.disks import PAGE, Place, cuts, fails, outcomes, sim, simulated, synced


def test_synced_bytes_and_their_length_survive_every_cut() -> None:
    place = simulated()
    synced(place, "a", b"a" * 10_000)
    assert outcomes(place) == {b"a" * 10_000}


def test_a_cut_leaves_the_running_disk_undisturbed_and_gives_a_settled_one() -> None:
    place = simulated()
    file = synced(place, "a", b"old")
    file.write(0, [b"new"])
    place.disk.rename(place.path("a"), place.path("b"))
    place.disk.lock(place.path("lock"), b"me")
    sim(place).faults.fail(1, errno.EIO, sticky=True, calls=frozenset({"remove"}))
    for disk in cuts(place, 50):
        name = disk.names(place.folder)[0]
        assert disk.durable(place.path(name)) == disk.contents(place.path(name))
        disk.lock(place.path("lock"), b"free").release()
        disk.open(place.path(name), write=True).write(0, [b"other"])
        disk.remove(place.path(name))
    assert sim(place).contents(place.path("b")) == b"new"
    assert sim(place).durable(place.path("a")) == b"old"
    assert sim(place).durable(place.path("b")) is None
    assert len({disk.contents(place.path("a")) for disk in cuts(place) if disk.exists(place.path("a"))}) == 2


def test_the_same_seed_gives_the_same_cut() -> None:
    place = simulated()
    file = synced(place, "a", bytes(5 * PAGE))
    for position in range(0, 5 * PAGE, 700):
        file.write(position, [b"x" * 900])
    first, second = cuts(place, 30), cuts(place, 30)
    path = place.path("a")
    assert [disk.contents(path) for disk in first] == [disk.contents(path) for disk in second]


def test_unsynced_pages_are_lost_or_kept_each_on_its_own() -> None:
    place = simulated()
    file = synced(place, "a", b"o" * 2 * PAGE)
    file.write(0, [b"n" * 2 * PAGE])
    seen = {(content[0:1], content[PAGE : PAGE + 1]) for content in outcomes(place) if content}
    assert seen == {(b"o", b"o"), (b"o", b"n"), (b"n", b"o"), (b"n", b"n")}


def test_writes_on_one_page_survive_in_order() -> None:
    place = simulated()
    file = synced(place, "a", b"----")
    for position, letter in enumerate([b"a", b"b", b"c"]):
        file.write(position, [letter])
    assert outcomes(place) == {b"----", b"a---", b"ab--", b"abc-"}


def test_a_torn_write_breaks_at_sectors_only() -> None:
    place = simulated()
    file = synced(place, "a", b"o" * PAGE)
    file.write(100, [b"n" * 1500])
    pieces = [(0, 100), (100, 512), (512, 1024), (1024, 1536), (1536, 1600), (1600, PAGE)]
    seen = set()
    for content in outcomes(place, count=2000):
        assert content is not None
        sectors = [set(content[start:stop]) for start, stop in pieces]
        assert all(len(each) == 1 for each in sectors)
        seen.add(b"".join(bytes(each) for each in sectors))
    assert {b"oooooo", b"onnnno", b"ononoo"} <= seen
    assert len(seen) == 16


def test_a_word_is_never_torn_even_beside_other_writes() -> None:
    place = simulated()
    file = synced(place, "a", bytes(PAGE))
    words = file.words(PAGE // 8)
    for value in (0x1111111111111111, 0x2222222222222222):
        for index in (0, 63, 64, 511):
            words[index] = value
    seen = set()
    for disk in cuts(place):
        seen |= set(disk.open(place.path("a")).words(PAGE // 8))
    assert seen == {0, 0x1111111111111111, 0x2222222222222222}


def test_stores_into_a_map_are_as_unsynced_as_writes() -> None:
    place = simulated()
    file = place.file()
    file.reserve(2 * PAGE)
    file.sync()
    place.disk.sync_folder(place.folder)
    file.map(2 * PAGE)[PAGE - 1 : PAGE + 1] = b"xy"
    seen = {content[PAGE - 1 : PAGE + 1] for content in outcomes(place) if content}
    assert seen == {b"\0\0", b"x\0", b"\0y", b"xy"}
    file.sync()
    assert {content[PAGE - 1 : PAGE + 1] for content in outcomes(place) if content} == {b"xy"}


def test_the_length_may_grow_before_the_bytes_and_then_there_are_zeros() -> None:
    place = simulated()
    file = synced(place, "a", b"")
    file.write(0, [b"one"])
    file.write(3, [b"two"])
    assert outcomes(place) == {b"", b"\0\0\0", b"one", b"\0" * 6, b"one\0\0\0", b"onetwo"}


def test_a_truncated_tail_may_come_back_until_it_is_synced() -> None:
    place = simulated()
    file = synced(place, "a", b"abcdef")
    file.truncate(2)
    assert outcomes(place) == {b"ab", b"abcdef"}
    file.write(2, [b"XY"])
    assert {b"abXY", b"ab", b"abcdef", b"abcd"} <= outcomes(place)
    file.sync()
    assert outcomes(place) == {b"abXY"}


def test_bytes_written_behind_a_truncated_tail_never_meet_it() -> None:
    place = simulated()
    file = synced(place, "a", b"abcdef")
    file.truncate(2)
    after = Place(sim(place).kill(), place.folder)
    for each in (place, after):
        each.disk.open(each.path("a"), write=True).write(4, [b"Z"])
        seen = outcomes(each)
        assert {b"ab", b"abcdef", b"ab\0\0Z"} <= seen
        assert not {b"abcdZ", b"abcdZf"} & seen


def test_sometimes_all_of_the_unsynced_is_lost_and_sometimes_none() -> None:
    place = simulated()
    files = [synced(place, name, b"o" * 4 * PAGE) for name in "abcd"]
    for file in files:
        file.write(0, [b"n" * 4 * PAGE])
    seen = [b"".join(disk.contents(place.path(name)) for name in "abcd") for disk in cuts(place)]
    assert b"o" * 16 * PAGE in seen
    assert b"n" * 16 * PAGE in seen


def test_a_synced_file_without_a_synced_folder_may_have_no_name() -> None:
    place = simulated()
    place.file("a", b"data").sync()
    assert outcomes(place) == {None, b"data"}
    place.disk.sync_folder(place.folder)
    assert outcomes(place) == {b"data"}


def test_an_unsynced_rename_is_whole_or_has_not_happened() -> None:
    place = simulated()
    synced(place, "meta", b"old")
    synced(place, "meta.tmp", b"new")
    place.disk.rename(place.path("meta.tmp"), place.path("meta"))
    seen = {tuple(disk.contents(place.path(n)) for n in disk.names(place.folder)) for disk in cuts(place)}
    assert seen == {(b"old", b"new"), (b"new",)}
    place.disk.sync_folder(place.folder)
    assert outcomes(place, "meta") == {b"new"}
    assert outcomes(place, "meta.tmp") == {None}


def test_a_rename_of_an_unsynced_file_may_leave_it_empty_although_the_folder_was_synced() -> None:
    place = simulated()
    synced(place, "meta", b"old")
    place.file("meta.tmp", b"n" * PAGE + b"m" * PAGE)
    place.disk.rename(place.path("meta.tmp"), place.path("meta"))
    place.disk.sync_folder(place.folder)
    seen = outcomes(place, "meta")
    assert {b"", b"n" * PAGE + b"m" * PAGE, bytes(2 * PAGE), b"n" * PAGE + bytes(PAGE)} <= seen
    assert b"old" not in seen


def test_a_removed_file_may_be_back_until_the_folder_is_synced() -> None:
    place = simulated()
    synced(place, "a", b"data")
    place.disk.remove(place.path("a"))
    assert outcomes(place) == {None, b"data"}
    place.disk.sync_folder(place.folder)
    assert outcomes(place) == {None}


def test_names_survive_as_a_prefix_or_out_of_order() -> None:
    place = simulated()
    for name in "abc":
        place.file(name).close()
    seen = {"".join(disk.names(place.folder)) for disk in cuts(place)}
    assert seen == {"", "a", "b", "c", "ab", "ac", "bc", "abc"}


def test_changes_of_the_same_name_survive_in_order() -> None:
    place = simulated()
    synced(place, "a", b"1")
    place.disk.rename(place.path("a"), place.path("a.old"))
    place.file("a.tmp", b"2").sync()
    place.disk.rename(place.path("a.tmp"), place.path("a"))
    for disk in cuts(place):
        held = [disk.contents(place.path(name)) for name in disk.names(place.folder)]
        assert held.count(b"1") == 1  # a name for it, whatever became of the second rename


def test_a_sync_of_one_folder_says_nothing_about_another() -> None:
    place = simulated()
    place.disk.make_folder(place.path("x"))
    place.file("a").close()
    place.file("x/b").close()
    place.disk.sync_folder(place.path("x"))
    seen = {(disk.exists(place.path("a")), disk.exists(place.path("x/b"))) for disk in cuts(place)}
    assert seen == {(True, True), (False, True)}


def test_a_new_folder_may_be_lost_with_all_in_it_until_the_one_above_is_synced() -> None:
    place = simulated()
    sim(place).faults.fail(2, errno.EIO, sticky=False, calls=frozenset({"sync_folder"}))
    fails(errno.EIO, lambda: place.disk.make_folder(place.path("x")))
    place.file("x/a", b"data").sync()
    place.disk.sync_folder(place.path("x"))
    assert outcomes(place, "x/a") == {None, b"data"}
    place.disk.make_folder(place.path("x"))  # it is there already, and now it is durable
    assert outcomes(place, "x/a") == {b"data"}


def test_a_file_that_moves_into_an_unsynced_folder_is_never_lost_with_it() -> None:
    place = simulated()
    synced(place, "a", b"data")
    sim(place).faults.fail(2, errno.EIO, sticky=False, calls=frozenset({"sync_folder"}))
    fails(errno.EIO, lambda: place.disk.make_folder(place.path("x")))
    place.disk.rename(place.path("a"), place.path("x/a"))
    seen = {(disk.exists(place.path("a")), disk.exists(place.path("x/a"))) for disk in cuts(place)}
    assert seen == {(True, False), (False, True)}


def test_a_kill_keeps_the_cache_and_frees_the_locks_but_makes_nothing_durable() -> None:
    place = simulated()
    file = synced(place, "a", b"old")
    file.write(0, [b"new"])
    place.file("b", b"b")
    place.disk.rename(place.path("b"), place.path("c"))
    place.disk.lock(place.path("lock"), b"me")
    after = Place(sim(place).kill(), place.folder)
    file.write(0, [b"xxx"])
    assert after.disk.names(after.folder) == ["a", "c", "lock"]
    assert sim(after).contents(after.path("a")) == b"new"
    assert outcomes(after) == {b"old", b"new"}
    assert {None, b"", b"b"} <= outcomes(after, "c")
    after.disk.lock(after.path("lock"), b"you").release()
    after.disk.open(after.path("a"), write=True).sync()
    after.disk.open(after.path("c"), write=True).sync()
    after.disk.sync_folder(after.folder)
    assert (outcomes(after), outcomes(after, "c")) == ({b"new"}, {b"b"})


def test_a_kill_copes_with_many_pending_changes_of_one_name() -> None:
    place = simulated()
    for _ in range(2000):
        place.file("a.tmp").close()
        place.disk.rename(place.path("a.tmp"), place.path("a"))
    after = sim(place).kill()
    after.sync_folder(place.folder)
    assert after.cut(random.Random(0)).names(place.folder) == ["a"]
