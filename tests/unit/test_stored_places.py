"""Places in stores: what is one, where its local copy is, and what people are told."""

from __future__ import annotations

import os
import stat
import traceback

import pytest

import holdfast
from holdfast import HoldfastError, InvalidRequest
from holdfast.broker.folder.stored import cache_folder
from holdfast.env import SystemIds
from holdfast.env.chain.engines import open_store, parse_place
from holdfast.errors import UnknownFormat
from holdfast.settings import BrokerSettings

SETTINGS = BrokerSettings(store_cache_dir="/cache")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(folder))
    return folder


@pytest.mark.parametrize(
    "url",
    [
        "memory://..", "memory://.", "s3://bucket/..", "s3://bucket/a/..", "s3://bucket/%2e%2e", "s3://bucket/a/../b",
        "s3://..", "gs://bucket/.", "file:///a/..", "file://host/a", "file:///", "s3://bucket/a//b",
        "s3://b/" + "x" * 300,
        "s3://bucket/a?endpoint=b", "s3://bucket/a#b", "s3://key:sesame@bucket/a",
    ],
)  # fmt: skip
def test_a_place_whose_copy_would_be_elsewhere_or_that_is_not_understood_is_refused(url, cache):
    (cache / "kept").mkdir(parents=True)
    with pytest.raises(InvalidRequest, match="not a place in a store"):
        holdfast.open(url)
    assert (cache / "kept").exists()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:sesame@/db/x", "postgresql://u:sesame@host", "postgresql://u:sesame@[/db/x",
        "postgresql://u:ses%zzame@127.0.0.1:1/db/x", "postgresql://u:sesame@127.0.0.1:1/db/x", "s3://u:sesame@bucket/x",
        "postgresql://127.0.0.1:1/db/x?password=sesame", "postgresql://u:sesame@127.0.0.1:port/db/x",
    ],
)  # fmt: skip
def test_no_error_shows_a_password(url, cache):
    with pytest.raises(HoldfastError) as caught:
        holdfast.open(url)
    said = "".join(traceback.format_exception(caught.value.with_traceback(None)))
    assert "same" not in said
    assert len(str(caught.value).splitlines()) == 1


def test_a_place_is_shown_without_its_password():
    place = parse_place("postgresql://u:sesame@host/db/x?sslpassword=sesame")
    assert "sesame" not in repr(place) + place.shown + cache_folder(place, SETTINGS)


def test_a_server_that_does_not_answer_may_be_tried_again_and_is_no_mistake_of_the_caller(cache):
    pytest.importorskip("psycopg")
    with pytest.raises(HoldfastError) as caught:
        open_store(parse_place("postgresql://127.0.0.1:1/db/x"))
    assert not isinstance(caught.value, InvalidRequest)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket/jobs", "AWS_ENDPOINT_URL"),
        ("s3://bucket/jobs", "AWS_ENDPOINT_URL_S3"),
        ("az://container/jobs", "AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_the_same_name_at_another_service_is_another_copy(url, name, monkeypatch):
    found = set()
    for value in ("http://one", "http://two"):
        monkeypatch.setenv(name, value)
        found.add(cache_folder(parse_place(url), SETTINGS))
    assert len(found) == 2


def test_the_port_of_another_server_may_be_an_option():
    here, there = (parse_place(f"postgresql://host/db/x?port={port}&password=p") for port in (1, 2))
    assert cache_folder(here, SETTINGS) != cache_folder(there, SETTINGS)
    again = parse_place("postgresql://host/db/x?port=1&password=changed")
    assert cache_folder(here, SETTINGS) == cache_folder(again, SETTINGS)


def test_a_cache_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(HoldfastError, match="local copy of memory://unmade"):
        holdfast.open("memory://unmade")


def test_only_its_user_can_read_what_the_copy_belongs_to(cache):
    with holdfast.open("memory://private") as queue:
        mark = os.path.join(os.path.dirname(queue.folder), "store.url")
        assert stat.S_IMODE(os.stat(mark).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(os.path.dirname(mark)).st_mode) == 0o700


def test_another_folder_beside_the_copy_is_not_taken_for_it(cache):
    with holdfast.open("memory://beside") as queue:
        copy = queue.folder
    other = os.path.join(os.path.dirname(copy), "other")
    os.mkdir(other)
    with open(os.path.join(other, "precious"), "wb"):
        pass
    with holdfast.open(other) as queue:
        assert queue.folder == copy
    assert os.listdir(other) == ["precious"]


def test_a_folder_of_a_later_release_is_left_as_it_is(cache, tmp_path):
    url = f"file://{tmp_path}/store/jobs"
    with holdfast.open(url) as queue:
        queue.put(b"one", durability="fsync")
    number = tmp_path / f"store/jobs/chain/{2:020}"
    content = bytearray(number.read_bytes())
    content[4] = 9
    number.write_bytes(content)
    before = sorted((each, each.read_bytes()) for each in (tmp_path / "store").rglob("*") if each.is_file())
    with pytest.raises(UnknownFormat, match=r"format 9.*Nothing was changed; open it with the release that"):
        holdfast.open(url)
    assert before == sorted((each, each.read_bytes()) for each in (tmp_path / "store").rglob("*") if each.is_file())


def test_backups_and_a_data_folder_in_one_place_are_refused(cache, tmp_path):
    """Each of them removes contents that it does not list itself."""
    url, backups = f"file://{tmp_path}/store/jobs", f"file://{tmp_path}/store/backups"
    with holdfast.open(url) as queue:
        queue.put(b"one", durability="fsync")
    for place in (url, f"{tmp_path}/store/jobs"):
        with pytest.raises(InvalidRequest, match=r"holds a data folder.*choose another place"):
            holdfast.backup(url, place)
    assert not (tmp_path / "store/jobs/backup").exists()
    holdfast.backup(url, backups)
    with pytest.raises(InvalidRequest, match=r"holds backups.*Choose another place"):
        holdfast.open(backups)
    assert not (tmp_path / "store/backups/chain").exists()
    assert holdfast.verify(backups).ok


def test_an_owner_that_lost_its_folder_is_not_told_to_look_at_its_disk(cache):
    queue = holdfast.open("memory://taken")
    store, _ = open_store(parse_place("memory://taken"))
    for number in range(20):
        store.create(f"chain/{queue._port.engine.store.next_number + number:020}", b"someone else's")
    with pytest.raises(holdfast.DiskFailed, match="another process has taken over") as caught:
        queue.put(b"two", durability="fsync")
    assert "dmesg" not in str(caught.value)
    assert "open the folder again to continue" in str(caught.value)
    with pytest.raises(holdfast.DiskFailed):
        queue.close()


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("serve --store postgresql://me:hush@host/db/q", "serve --store postgresql://me:***@host/db/q"),
        ("serve postgresql://me:hu/sh:@host/q --port 1", "serve postgresql://me:***@host/q --port 1"),
        ("put postgresql://host/db/q?sslpassword=hush&x=1 a", "put postgresql://host/db/q?sslpassword=***&x=1 a"),
        ("put postgresql://host/db/q?password=hush", "put postgresql://host/db/q?password=***"),
        ("put http://host:7700/orders me:you@example", "put http://host:7700/orders me:you@example"),
        ("worker app:handle --at ./jobs", "worker app:handle --at ./jobs"),
    ],
)
def test_a_process_says_what_it_runs_without_passwords(command, shown, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/bin/holdfast", *command.split()])
    assert SystemIds().process_note()["command"] == f"holdfast {shown}"
