"""Encrypted backups: what is readable without the key, what is noticed, and how they live beside plain ones."""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import shutil
import sys

import pytest

import holdfast
import holdfast.aio
from holdfast import CorruptData, InvalidRequest
from holdfast.broker.backup.archive import Archive, BackupKey
from holdfast.env import real_world
from holdfast.errors import NotInstalled
from tests.unit.test_backups import bodies, contents, jobs, place, run

__all__ = ["jobs", "place", "run"]

SECRET = b"known to those who look"


@pytest.fixture
def key(tmp_path):
    file = tmp_path / "key"
    file.write_text(secrets.token_hex(32) + "\n")
    return file


@pytest.fixture
def other_key(tmp_path):
    file = tmp_path / "other-key"
    file.write_bytes(base64.b64encode(secrets.token_bytes(32)))
    return file


def swap(one, another):
    kept = one.read_bytes()
    one.write_bytes(another.read_bytes())
    another.write_bytes(kept)


def test_what_is_stored_says_nothing_and_what_is_restored_is_what_was_there(jobs, place, key, tmp_path):
    with holdfast.open(jobs) as queue:
        queue.put(SECRET * 10_000)
    made = holdfast.backup(jobs, place, key_file=key)
    assert made.encrypted
    files = [path for path in place.rglob("*") if path.is_file()]
    assert files
    assert SECRET in b"".join(path.read_bytes() for path in jobs.rglob("*.log"))
    for needle in (SECRET, b"topics/jobs", b".log"):
        assert not [path for path in files if needle in path.read_bytes()]
    holdfast.restore(place, tmp_path / "restored", key_file=key)
    assert bodies(tmp_path / "restored") == bodies(jobs)
    found = holdfast.verify(place, key_file=key)
    assert found.ok
    assert found.messages == 31


def test_the_names_of_pieces_do_not_tell_what_they_hold(jobs, place, tmp_path, key, other_key):
    holdfast.backup(jobs, place / "plain")
    holdfast.backup(jobs, place / "one", key_file=key)
    holdfast.backup(jobs, place / "other", key_file=other_key)
    plain, one, other = (set(contents(place / name)) for name in ("plain", "one", "other"))
    assert len(plain) == len(one) == len(other)
    assert not plain & one
    assert not one & other


def test_what_is_there_is_not_stored_again(jobs, place, key):
    first = holdfast.backup(jobs, place, key_file=key)
    before = contents(place)
    again = holdfast.backup(jobs, place, key_file=key)
    assert again.new_bytes == 0
    assert contents(place) == before
    for path in jobs.rglob("*.log"):  # another stamp, so it is read: its bytes are found by their name
        shutil.copy(path, f"{path}.copy")
        os.replace(f"{path}.copy", path)
    assert holdfast.backup(jobs, place, key_file=key).new_bytes == 0
    with holdfast.open(jobs) as queue:
        queue.put(os.urandom(100_000))
    more = holdfast.backup(jobs, place, key_file=key, keep=1)
    assert 100_000 < more.new_bytes < first.new_bytes / 2
    assert more.removed == 3
    assert holdfast.verify(place, key_file=key).ok


def test_without_the_key_or_with_another_one_it_is_refused_and_says_so(jobs, place, key, other_key, tmp_path, run):
    holdfast.backup(jobs, place, key_file=key)
    for call in (lambda **given: holdfast.verify(place, **given),
                 lambda **given: holdfast.restore(place, tmp_path / "restored", **given)):  # fmt: skip
        with pytest.raises(InvalidRequest, match="is encrypted: give the file with its key"):
            call()
        with pytest.raises(InvalidRequest, match=r"is encrypted with the key [0-9a-f]{16}, and the one given is"):
            call(key_file=other_key)
    assert not (tmp_path / "restored").exists()
    assert [(each.encrypted, bool(each.problem)) for each in holdfast.backups(place)] == [(True, True)]
    assert [(each.encrypted, each.problem) for each in holdfast.backups(place, key_file=key)] == [(True, "")]
    code, out, err = run("backup", "ls", place)
    assert code == 1
    assert "encrypted" in out
    assert "give the file with its key" in err
    assert run("backup", "ls", place, "--key-file", key)[0] == 0
    assert run("backup", "verify", place)[0] == 2
    assert run("backup", "verify", place, "--key-file", key)[0] == 0
    assert run("restore", place, tmp_path / "restored", "--key-file", other_key)[0] == 2
    assert run("restore", place, tmp_path / "restored", "--key-file", key)[0] == 0


def test_a_forgotten_key_does_not_store_plain_backups_beside_encrypted_ones(jobs, place, key):
    holdfast.backup(jobs, place, key_file=key)
    with pytest.raises(InvalidRequest, match="not encrypted belong in another place"):
        holdfast.backup(jobs, place)
    assert [each.number for each in holdfast.backups(place)] == [1]


def test_another_key_in_the_same_place_removes_nothing(jobs, place, key, other_key):
    holdfast.backup(jobs, place, key_file=key)
    before = contents(place)
    made = holdfast.backup(jobs, place, key_file=other_key, keep=1)
    assert made.number == 2
    assert made.new_bytes > 3_000_000, "another key, so all is stored again"
    assert "no older backup was removed" in made.problem
    assert set(before) < set(contents(place))
    assert holdfast.verify(place, at=1, key_file=key).ok
    assert holdfast.verify(place, at=2, key_file=other_key).ok


def test_plain_backups_from_before_the_key_are_kept_and_need_no_key(jobs, place, key, tmp_path):
    holdfast.backup(jobs, place)
    made = holdfast.backup(jobs, place, key_file=key)
    assert made.new_bytes > 3_000_000, "nothing of a plain backup is taken over into an encrypted one"
    assert [each.encrypted for each in holdfast.backups(place, key_file=key)] == [False, True]
    assert holdfast.verify(place, key_file=key).number == 2
    with pytest.raises(InvalidRequest, match="is not encrypted, so the key does not prove that it is yours"):
        holdfast.restore(place, tmp_path / "restored", at=1, key_file=key)
    holdfast.restore(place, tmp_path / "restored", at=1)
    assert bodies(tmp_path / "restored") == bodies(jobs)
    assert holdfast.backup(jobs, place, key_file=key, keep=1).removed == 2
    assert [each.number for each in holdfast.backups(place, key_file=key)] == [3]
    assert holdfast.verify(place, key_file=key).ok


def test_a_plain_backup_that_somebody_put_there_is_not_restored(jobs, place, key, tmp_path):
    holdfast.backup(jobs, place, key_file=key)
    with holdfast.open(tmp_path / "forged" / "jobs") as queue:
        queue.put(b"forged")
    holdfast.backup(tmp_path / "forged" / "jobs", tmp_path / "theirs")
    shutil.copy(tmp_path / "theirs" / "backup" / f"{1:020}", place / "backup" / f"{1:020}")
    with pytest.raises(InvalidRequest, match="not encrypted"):
        holdfast.restore(place, tmp_path / "restored", key_file=key)
    assert not (tmp_path / "restored").exists()


@pytest.mark.parametrize("part", ["content", "backup"])
def test_every_flip_is_found(jobs, place, key, part, run):
    holdfast.backup(jobs, place, key_file=key)
    [object_, *_] = sorted((place / part).iterdir())
    content = object_.read_bytes()
    for at in (*range(40), len(content) // 2, len(content) - 16, len(content) - 1):
        object_.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        archive = Archive(str(place), real_world(), BackupKey.parse(key.read_bytes(), "key", real_world()))
        with pytest.raises(CorruptData, match=r"damaged|newer release"):
            if part == "backup":
                archive.read(1)
            else:
                archive.get(bytes.fromhex(object_.name), 1 << 30, is_encrypted=True)
    code, out, err = run("backup", "verify", place, "--key-file", key)
    assert code != 0
    assert "damaged" in out + err
    for cut in (0, 3, 5, 16, 20, len(content) - 1):
        object_.write_bytes(content[:cut])
        assert run("backup", "verify", place, "--key-file", key)[0] != 0, cut
    object_.write_bytes(content)
    assert run("backup", "verify", place, "--key-file", key)[0] == 0


def test_pieces_that_changed_places_are_found(jobs, place, key, tmp_path):
    holdfast.backup(jobs, place, key_file=key)
    one, another, *_ = sorted((place / "content").iterdir())
    swap(one, another)
    found = holdfast.verify(place, key_file=key)
    assert not found.ok
    assert "damaged" in found.damage[0]
    with pytest.raises(CorruptData, match="damaged"):
        holdfast.restore(place, tmp_path / "restored", key_file=key)
    swap(one, another)
    assert holdfast.verify(place, key_file=key).ok


def test_an_old_backup_does_not_pass_for_a_newer_one(jobs, place, key):
    holdfast.backup(jobs, place, key_file=key)
    with holdfast.open(jobs) as queue:
        queue.put(b"more")
    holdfast.backup(jobs, place, key_file=key)
    shutil.copy(place / "backup" / f"{1:020}", place / "backup" / f"{2:020}")
    with pytest.raises(CorruptData, match="changed after it was encrypted under this number"):
        holdfast.verify(place, key_file=key)
    assert holdfast.verify(place, at=1, key_file=key).ok


def test_the_key_comes_from_the_settings_file_or_the_environment(jobs, place, key, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_BROKER_BACKUP_KEY_FILE", str(key))
    assert holdfast.backup(jobs, place).encrypted
    assert holdfast.verify(place).ok
    monkeypatch.delenv("HOLDFAST_BROKER_BACKUP_KEY_FILE")
    (tmp_path / "holdfast.toml").write_text('[broker]\nbackup_key_file = "key"\n')  # relative to the file
    monkeypatch.setenv("HOLDFAST_CONFIG", str(tmp_path / "holdfast.toml"))
    monkeypatch.chdir(place)
    assert holdfast.backups(place)[0].problem == ""
    holdfast.restore(place, tmp_path / "restored")


def test_a_key_file_that_cannot_be_used_says_why(jobs, place, tmp_path, key):
    for content in (b"", b"password", secrets.token_bytes(32), b"ab" * 31, base64.b64encode(bytes(31)), b"\xff" * 64):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(InvalidRequest, match="does not hold a key: write 32 random bytes"):
            holdfast.backup(jobs, place, key_file=tmp_path / "bad")
    with pytest.raises(InvalidRequest, match="there is no key file"):
        holdfast.backup(jobs, place, key_file=tmp_path / "missing")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        holdfast.backup(jobs, place, key_file=tmp_path)
    assert holdfast.backups(place) == []


def test_a_key_for_a_folder_in_a_store_is_refused(tmp_path, key, monkeypatch):
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/store/jobs"
    with holdfast.open(url) as queue:
        queue.put(b"one")
    with pytest.raises(InvalidRequest, match="leave out the key"):
        holdfast.restore(url, tmp_path / "restored", key_file=key)
    holdfast.backup(url, tmp_path / "backups", key_file=key)
    holdfast.restore(tmp_path / "backups", tmp_path / "restored", key_file=key)
    assert bodies(tmp_path / "restored") == [b"one"]


def test_without_the_package_it_is_said_which_one_to_install(jobs, place, key, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(NotInstalled, match=r"pip install 'holdfast\[encryption\]'"):
        holdfast.backup(jobs, place, key_file=key)
    assert holdfast.backup(jobs, place).number == 1


def test_for_tasks(jobs, place, key, tmp_path):
    async def story():
        made = await holdfast.aio.backup(jobs, place, key_file=key)
        assert made.encrypted
        assert [each.problem for each in await holdfast.aio.backups(place, key_file=key)] == [""]
        assert (await holdfast.aio.verify(place, key_file=key)).ok
        await holdfast.aio.restore(place, tmp_path / "restored", key_file=key)

    asyncio.run(story())
    assert len(bodies(tmp_path / "restored")) == 29
