"""The commands of a queue on a folder with several topics, partitions and groups; checking and repairing it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.cli.operate import check as wholequeue_module
from tests.unit.commands import Done, Run, everything, runner

SEGMENT = f"{0:020d}.log"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A topic with two partitions and a group, and one with nothing."""
    folder = tmp_path_factory.mktemp("plain") / "data"
    with holdfast.open_broker(folder, durability="os") as broker:
        broker.create_topic("orders", partitions=2)
        broker.create_topic("other")
        for n in range(6):
            broker.publish("orders", b"%d" % n, partition=n % 2)
        broker.group("orders", "billing")
    return folder


@pytest.fixture
def data(plain: Path, tmp_path: Path) -> Path:
    return shutil.copytree(plain, tmp_path / "data")


def taken(run: Run, folder: Path, *options: object) -> dict[str, Any]:
    (message,) = run("get", folder, "--topic", "orders", "--json", *options).lines
    found: dict[str, Any] = message
    return found


def in_segments(folder: Path, count: int) -> None:
    """So many messages in the empty topic, a segment each."""
    with holdfast.open_broker(folder) as broker:
        broker.alter_topic("other", segment_messages=1)
        for n in range(count):
            broker.publish("other", b"%d" % n)


# Which topic, which group


@pytest.mark.parametrize(
    "command",
    [
        "put DIR x", "get DIR", "peek DIR", "list DIR", "tail DIR", "seek DIR start --yes", "compact DIR",
        "settings DIR", "dead ls DIR", "dead redrive DIR --yes", "dead purge DIR --yes", "log dump DIR",
        "show DIR 0", "cancel DIR 0", "ack DIR x",
    ],
)  # fmt: skip
def test_a_command_that_needs_a_topic_lists_those_there_are(run, data, command):
    before = everything(data)
    done = run(*[str(data) if word == "DIR" else word for word in command.split()])
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: {data} has 2 topics; choose one with --topic: orders, other\n"
    assert (
        everything(data).keys() - {"reserve"} == before.keys()
    )  # which the first opening of a folder with topics makes


def test_an_unknown_topic_or_group_is_answered_with_those_there_are(run, data):
    assert "known topics: orders, other" in run("peek", data, "--topic", "oders").err
    assert "choose one with --group: billing" in run("peek", data, "--topic", "orders").err
    assert "choose one with --group: billing" in run("list", data, "--topic", "orders", "--group", "bling").err
    assert "choose one with --group: billing" in run("get", data, "--topic", "orders").err
    assert "`holdfast get` creates it" in run("stats", data, "--topic", "other").err
    assert run("group", "ls", data, "--json").lines[0]["name"] == "billing"


def test_put_goes_to_the_topic_and_makes_no_group(run, data):
    assert run("put", data, "x", "--topic", "other").out == "other-0-0\n"
    assert run("put", data, "y", "--topic", "third").out == "third-0-0\n"
    assert "there is no topic fourth" in run("put", data, "z", "--topic", "fourth", "--no-create").err
    topics = run("topic", "ls", data, "--json").lines
    assert {topic["name"]: [group["name"] for group in topic["groups"]] for topic in topics} == {
        "orders": ["billing"],
        "other": [],
        "third": ["default"],  # a queue like any other
    }


def test_stats_of_many_topics_is_a_table_of_them(run, data):
    done = run("stats", data)
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()] == ["topic", "orders", "other"]
    assert [topic["name"] for topic in run("stats", data, "--json").document["topics"]] == ["orders", "other"]
    one = run("stats", data, "--topic", "orders", "--group", "billing", "--json").document
    assert (one["ready"], one["partitions"], one["group"]) == (6, 2, "billing")
    assert "2, with 6 messages kept" in run("stats", data, "--topic", "orders", "--group", "billing").out


def test_messages_are_taken_and_settled_in_every_partition(run, data):
    receipts = [taken(run, data, "--group", "billing")["receipt"] for _ in range(6)]
    assert {receipt.split("-")[1] for receipt in receipts} == {"0", "1"}
    assert run("get", data, "--topic", "orders", "--group", "billing").code == 3
    done = run("ack", data, *receipts[:2])
    assert (done.code, done.out.count("acked orders-")) == (0, 2)
    (nacked,) = run("nack", data, receipts[2], "--delay", "1h", "--json").lines
    assert (nacked["phase"], nacked["until_ms"] > 0) == ("delayed", True)
    assert run("reject", data, receipts[3]).code == 0
    assert run("extend", data, receipts[4], "--lease", "1h").code == 0
    assert run("defer", data, receipts[5]).code == 0
    (letter,) = run("dead", "ls", data, "--topic", "orders", "--group", "billing", "--json").lines
    assert run("dead", "show", data, letter["id"], "--group", "billing").code == 0
    assert (
        run("show", data, receipts[4].partition("@")[0], "--group", "billing", "--json").document["phase"] == "leased"
    )
    assert run("dead", "redrive", data, letter["id"], "--group", "billing", "--yes").code == 0
    stats = run("stats", data, "--topic", "orders", "--group", "billing", "--json").document
    assert (stats["ready"], stats["leased"], stats["delayed"], stats["dead"]) == (2, 1, 1, 0)


def test_a_receipt_finds_the_group_that_has_the_message(run, data, monkeypatch):
    billing = taken(run, data, "--group", "billing")["receipt"]
    assert run("ack", data, billing).code == 0
    (group,) = run("group", "ls", data, "--json").lines
    assert (group["name"], group["lag"]) == ("billing", 5)
    exported = run("get", data, "--topic", "orders", "--group", "billing", "--export").out
    assert "export HOLDFAST_TOPIC=orders\nexport HOLDFAST_GROUP=billing\n" in exported
    (receipt,) = (line for line in exported.splitlines() if "HOLDFAST_RECEIPT" in line)
    monkeypatch.setenv("HOLDFAST_RECEIPT", receipt.partition("=")[2])
    monkeypatch.setenv("HOLDFAST_GROUP", "billing")
    assert run("ack", data).code == 0
    assert run("ack", data).code == 2


def test_a_receipt_finds_its_own_group_and_settles_nothing_of_another(run, data):
    run("put", data, "x", "--topic", "other")
    first, second = (run("get", data, "--topic", "other", "--group", name, "--json").lines[0] for name in "ab")
    assert "it belongs to another group" in run("ack", data, first["receipt"], "--group", "b").err
    for receipt in (second["receipt"], first["receipt"]):
        assert run("ack", data, receipt).code == 0
        assert run("ack", data, receipt).code == 2
    assert [group["lag"] for group in run("group", "ls", data, "--topic", "other", "--json").lines] == [
        0,
        0,
    ]


def test_ids_tell_the_topic(run, data):
    assert run("show", data, "orders-1-0", "--group", "billing", "--json").document["body"] == "1"
    assert run("cancel", data, "orders-1-0", "--group", "billing") == Done(0, "cancelled orders-1-0\n", "")
    assert "no partition 7" in run("cancel", data, "orders-7-0", "--group", "billing").err
    assert run("show", data, "nothing-0-0").code == 2


def test_seek_goes_somewhere_in_every_partition(run, data):
    at = ("seek", data, "--topic", "orders", "--group", "billing")
    document = run(*at, "end", "--dry-run", "--json").document
    assert (document["passed_over"], document["offset"], len(document["partitions"])) == (6, None, 2)
    assert "give --partition N" in run(*at, "--offset", 1, "--yes").err
    assert run(*at, "--offset", 1, "--partition", 1, "--yes", "--json").document["passed_over"] == 1
    assert run(*at, "end", "--yes").code == 0
    stats = run("stats", data, "--topic", "orders", "--group", "billing", "--json").document
    assert stats["ready"] == 0


def test_what_every_group_is_through_with_can_be_let_go(run, data):
    in_segments(data, 3)
    assert run("compact", data, "--topic", "other", "--json").document["segments"] == 0
    run("consume", data, "other", "--group", "stream", "-n", 2)
    assert run("compact", data, "--topic", "other", "--json").document["segments"] == 2
    run("get", data, "--topic", "other", "--ack")
    run("consume", data, "other", "--group", "stream")
    assert run("compact", data, "--topic", "other", "--json").document["segments"] == 1


def test_a_partition_is_dumped_by_its_number(run, data):
    lines = run("log", "dump", data, "--topic", "orders", "--partition", 1, "--json").lines
    assert [line["value"] for line in lines] == ["1", "3", "5"]
    assert "no partition 2" in run("log", "dump", data, "--topic", "orders", "--partition", 2).err
    infos = run("log", "info", data, "--json").document["logs"]
    assert "topics/orders/1/groups/billing" in [info["name"] for info in infos]


# Checking and repairing


@pytest.fixture(scope="module")
def with_all(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that a data folder can hold."""
    folder = shutil.copytree(plain, tmp_path_factory.mktemp("all") / "data")
    with holdfast.open_broker(folder, durability="os") as broker:
        broker.alter_topic("orders", trace_sample=1)
        with broker.producer(name="import", acks="leader") as producer:
            producer.send("orders", b"a")
        with broker.consumer("orders", group="analytics", auto_commit=False) as consumer:
            consumer.commit(consumer.poll(timeout=0, max_records=3))
        broker.group("orders", "billing").receive().reject("no")
        broker.publish("orders", b"later", delay=3600, dedup_id="d")
        broker.group("orders", "audit", max_attempts=3)
    return folder


@pytest.fixture
def full(with_all: Path, tmp_path: Path) -> Path:
    return shutil.copytree(with_all, tmp_path / "data")


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


def test_check_looks_at_every_log_of_every_topic(run, full):
    before = everything(full)
    done = run("check", full)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0].startswith(f"{full}: 2 topics, ")
    document = run("check", full, "--json").document
    kinds = {log["name"]: log["kind"] for log in document["logs"]}
    assert kinds["topics/orders/1/log"] == "messages"
    assert kinds["topics/orders/1/groups/billing"] == "journal"
    assert kinds["topics/__traces/0/log"] == "traces"
    assert kinds["groups/analytics"] == "commits"
    (commits,) = (log["state"] for log in document["logs"] if log["kind"] == "commits")
    assert sum(entry[3] for entry in commits["committed"]) == 3
    assert [finding for log in document["logs"] for finding in log["findings"]] == []
    assert everything(full) == before
    with holdfast.open_broker(full):
        assert run("check", full).code == 0


@pytest.mark.parametrize(
    "name", ["topics/orders/1/log", "topics/orders/1/groups/billing", "groups/analytics", "topics/__traces/0/log"]
)
@pytest.mark.slow
def test_damage_anywhere_is_found_and_mended(run, full, name):
    flip(full / name / SEGMENT, 90)
    assert run("check", full).code == 1
    assert [log["name"] for log in run("check", full, "--json").document["logs"] if not log["ok"]] == [name]
    assert run("repair", full, "--yes").code == 0
    assert run("repair", full).out == f"{full}: nothing to repair\n"
    assert run("produce", full, "orders", "-m", "more").code == 0
    assert run("consume", full, "orders", "--group", "analytics").code == 0


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("topics/orders/1/log", "topics/orders/1/log is missing"),
        (
            "topics/orders/1/groups/billing",
            "topics/orders/1/groups/billing is missing: which messages were handled is not known",
        ),
        ("topics/orders/0/groups/audit", "topics/orders/0/groups/audit is missing"),
        ("topics/orders/1", "topics/orders/1/log is missing"),
    ],
)
def test_a_folder_that_is_missing_is_damage(run, full, gone, words):
    shutil.rmtree(full / gone)
    done = run("check", full)
    assert done.code == 1
    assert f"damage  {words}" in done.out
    assert done.out.endswith(f"to see what can be done: holdfast repair {full} --dry-run\n")


def test_a_repair_says_that_it_is_done_also_where_a_part_is_missing(run, full):
    shutil.rmtree(full / "topics/orders/1")
    done = run("repair", full, "--yes")
    assert (done.code, done.out.splitlines()[-1]) == (0, f"repaired; no damage is left in {full}")
    assert run("check", full).code == 0


def test_a_topic_without_groups_misses_nothing(run, data):
    run("put", data, "x", "--topic", "other")
    run("group", "delete", data, "billing", "--yes")
    assert run("check", data).code == 0


@pytest.mark.parametrize(
    "name", ["topics/orders/topic.json", "topics/orders/settings.json", "topics/orders/groups/audit.json", "producers"]
)
def test_a_small_file_that_cannot_be_read_is_damage(run, full, name):
    (full / name).write_bytes(b"{nonsense")
    document = run("check", full, "--json").document
    assert document["ok"] is False
    assert name in document["wrong"][0]
    done = run("check", full)
    assert done.code == 1
    assert name in done.out


def test_damaged_sequences_are_only_a_note(run, full):
    (full / "topics/orders/0/producers").write_bytes(b"nonsense, and long enough")
    document = run("check", full, "--json").document
    assert (document["ok"], len(document["notes"])) == (True, 1)
    assert "opening reads the log instead" in run("check", full).out
    assert run("produce", full, "orders", "-m", "x").code == 0


def test_messages_that_a_stream_has_not_read_and_the_log_has_not_are_damage(run, data):
    in_segments(data, 4)
    run("consume", data, "other", "--group", "stream", "-n", 1)
    for segment in sorted((data / "topics/other/0/log").glob("*.log"))[:3]:
        segment.unlink()
        segment.with_suffix(".idx").unlink(missing_ok=True)
    done = run("check", data)
    assert done.code == 1
    assert "2 messages of partition 0 of other (1 to 2) are missing" in done.out
    assert "the group stream had committed only up to 1" in done.out


def test_of_very_many_logs_only_those_that_are_damaged_are_listed(run, data, monkeypatch):
    monkeypatch.setattr(wholequeue_module, "_MOST_ROWS", 3)
    flip(data / "topics/orders/1/log" / SEGMENT, 90)
    listed = [line for line in run("check", data).out.splitlines() if line.startswith("topics/")]
    assert {line.split()[0] for line in listed} == {"topics/orders/1/log"}
    assert "4 logs ok; --json lists them all" in run("check", data).out


def test_doctor_takes_a_folder_of_topics(run, data):
    assert run("doctor", data, "--seconds", 0.1, "--json").document["holds_queue"] is True


def test_settings_of_the_broker_count_here_too(run, data, tmp_path, monkeypatch):
    settings = tmp_path / "holdfast.toml"
    settings.write_text("[topics.orders]\nmax_attempts = 1\n")
    monkeypatch.setenv("HOLDFAST_CONFIG", str(settings))
    receipt = taken(run, data, "--group", "billing")["receipt"]
    (nacked,) = run("nack", data, receipt, "--json").lines
    assert nacked["phase"] == "dead"
    assert json.loads(run("settings", data, "--topic", "orders", "--json").out)["differing"]["max_attempts"] == 1
