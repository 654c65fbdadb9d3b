"""Whose a folder is: what lets other users of the machine change it, and what only looks like that."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

import pytest

from holdfast.cli.operate.measure import diagnose
from holdfast.env import disk as module
from holdfast.env import real_world
from holdfast.env.disk import FolderLocked, RealDisk, exposure, shared_group
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import BadSettings, InvalidRequest
from holdfast.settings import BrokerSettings
from holdfast.storage import open_log
from tests.unit.disks import fails

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


def folder_of(tmp_path: Path, mode: int) -> str:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    return str(folder)


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o711])
def test_a_folder_that_others_can_at_most_read_is_our_own(tmp_path: Path, mode: int):
    assert exposure(folder_of(tmp_path, mode)) is None


@pytest.mark.parametrize("mode", [0o777, 0o702, 0o1777])
def test_a_folder_that_everybody_may_write_to_is_not_even_if_it_is_sticky(tmp_path: Path, mode: int):
    assert exposure(folder_of(tmp_path, mode)) == "every user may write to it"


def test_a_folder_that_we_make_is_our_own_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        RealDisk().make_folder(str(tmp_path / "a" / "b"))
    finally:
        os.umask(before)
    assert exposure(str(tmp_path / "a" / "b")) is None
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_a_folder_can_be_replaced_below_one_that_everybody_may_write_to_unless_that_is_sticky(tmp_path: Path):
    """The doctor tells of that; it is no reason to refuse it: so are the folders that some CI systems check out to."""
    above = tmp_path / "above"
    folder = above / "mine"
    folder.mkdir(parents=True)
    above.chmod(0o777)
    assert exposure(str(folder), above=True) == f"every user may rename what is in {above}"
    assert exposure(str(folder)) is None
    (warning,) = [each for each in diagnose(real_world(), str(folder), seconds=0.1).warnings if "users" in each.code]
    assert warning.message.startswith("every user may rename")
    above.chmod(0o1777)
    assert exposure(str(folder), above=True) is None
    folder.chmod(0o777)
    (warning,) = [each for each in diagnose(real_world(), str(folder), seconds=0.1).warnings if "users" in each.code]
    assert "--trust-folder" in warning.message


@needs_root
def test_a_folder_of_another_user_is_named_with_both_users(tmp_path: Path):
    folder = folder_of(tmp_path, 0o755)
    os.chown(folder, 54321, 54321)
    assert exposure(folder) == "it belongs to uid 54321, and this process runs as root"
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert exposure(str(link)) is None
    os.chown(link, 54321, 54321, follow_symlinks=False)
    assert exposure(str(link)) == "it is a symbolic link that uid 54321 made"


class Accounts:
    """A machine's users and groups, as its files have them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.users = [pwd.struct_passwd(("root", "x", 0, 0, "", "/root", "/bin/sh"))]
        self.groups: dict[int, grp.struct_group] = {}
        monkeypatch.setattr(module.pwd, "getpwall", lambda: self.users)
        monkeypatch.setattr(module.pwd, "getpwuid", self.user)
        monkeypatch.setattr(module.grp, "getgrgid", lambda gid: self.groups[gid])
        monkeypatch.setattr(module.os, "getgroups", lambda: [4000])

    def user(self, uid: int) -> pwd.struct_passwd:
        return {each.pw_uid: each for each in self.users}[uid]

    def add(self, name: str, uid: int, gid: int) -> None:
        self.users.append(pwd.struct_passwd((name, "x", uid, gid, "", "/", "/bin/sh")))

    def group(self, name: str, gid: int, *members: str) -> None:
        self.groups[gid] = grp.struct_group((name, "x", gid, list(members)))


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> Accounts:
    made = Accounts(monkeypatch)
    made.add("ann", 1000, 1000)
    made.add("bob", 1001, 1001)
    made.group("ann", 1000)
    return made


def test_the_group_of_one_user_is_that_users_own(accounts: Accounts):
    assert shared_group(1000, 1000) is None
    accounts.group("ann", 1000, "ann", "root")
    assert shared_group(1000, 1000) is None
    accounts.group("root", 0, "bob")
    assert shared_group(0, 1000) is None  # whoever is in root's group is root's friend


def test_a_group_with_others_in_it_is_named_with_one_of_them(accounts: Accounts):
    accounts.group("ann", 1000, "bob")
    assert shared_group(1000, 1000) == "its group ann may write to it, and bob is in that group"
    accounts.group("staff", 50, "ann")
    accounts.add("eve", 1002, 50)
    assert shared_group(50, 1000) == "its group staff may write to it, and eve is in that group"
    accounts.group("staff", 50, "ann", "bob")
    assert shared_group(50, 1000) == "its group staff may write to it, and bob and 1 more are in that group"


def test_a_group_whose_members_nobody_knows_is_ours_only_if_the_machine_does_not_know_it_at_all(accounts: Accounts):
    assert shared_group(4000, 1000) is None  # a container was started with it
    assert shared_group(4001, 1000) == "its group 4001 may write to it"
    accounts.group("everyone", 4000)  # of a directory that lists no members
    assert shared_group(4000, 1000) == "its group everyone may write to it"


@needs_root
def test_a_folder_that_the_users_own_group_may_write_to_is_the_users_own(tmp_path: Path):
    """As `mkdir` makes it with umask 002."""
    folder = folder_of(tmp_path, 0o775)
    assert exposure(folder) is None
    os.chown(folder, 0, 54321)
    assert exposure(folder) == "its group 54321 may write to it"


def test_an_access_control_list_is_not_hidden_by_a_group_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = folder_of(tmp_path, 0o775)
    monkeypatch.setattr(module.os, "getxattr", lambda *_: b"\2\0\0\0", raising=False)
    assert exposure(folder) == "an access control list lets others write to it"


def test_the_simulated_disk_has_no_users():
    assert SimulatedDisk().exposure("/") is None


def test_nothing_is_written_through_a_symbolic_link(tmp_path: Path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    link = tmp_path / "link"
    link.symlink_to(precious)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "made")
    disk = RealDisk()
    for name in (link, dangling):
        fails(40, lambda name=name: disk.open(str(name), write=True, create=True))
        fails(40, lambda name=name: disk.open(str(name), write=True))
        fails(40, lambda name=name: disk.lock(str(name), b"note"))
    assert precious.read_bytes() == b"precious"
    assert not (tmp_path / "made").exists()
    reading = disk.open(str(link))  # to look is no harm
    assert reading.read(0, 100) == b"precious"
    reading.close()


def test_a_lock_writes_no_note_into_a_file_that_has_a_second_name(tmp_path: Path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    os.link(precious, tmp_path / "lock")
    lock = RealDisk().lock(str(tmp_path / "lock"), b"note")
    with pytest.raises(FolderLocked):
        RealDisk().lock(str(tmp_path / "lock"), b"note")
    lock.release()
    assert precious.read_bytes() == b"precious"


def test_a_lock_is_a_plain_file(tmp_path: Path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(FileExistsError, match="not a plain file"):
        RealDisk().lock(str(tmp_path / "lock"), b"note")


def test_a_log_in_a_folder_of_everybodys_is_refused_unless_it_is_trusted(tmp_path: Path):
    folder = folder_of(tmp_path, 0o777)
    with pytest.raises(InvalidRequest, match="every user may write to it"):
        open_log(folder)
    assert os.listdir(folder) == []
    with open_log(folder, trust_folder=True) as log:
        log.append([b"one"])
    with pytest.raises(InvalidRequest, match="trust_folder=True"):
        open_log(folder)
    os.chmod(folder, 0o755)
    with open_log(folder) as log:
        log.append([b"two"])
        assert log.end == 2


def test_the_setting_is_a_switch():
    with pytest.raises(BadSettings, match="trust_folder"):
        BrokerSettings(trust_folder="yes")  # type: ignore[arg-type]
