"""The commands of topics and groups: what they make, show, change and take away, and what they refuse."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import holdfast
from holdfast.cli import output as ask_module
from tests.unit.commands import Done, Run, everything, runner


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two topics; one has messages in each of two partitions, a group in queue mode and one in stream mode."""
    folder = tmp_path_factory.mktemp("topics") / "data"
    with holdfast.open_broker(folder, durability="os") as broker:
        broker.create_topic("orders", partitions=2)
        broker.create_topic("profiles", cleanup="compact")
        for n in range(10):
            broker.publish("orders", b"%d" % n, partition=n % 2)
        workers = broker.group("orders", "billing")
        workers.ack_many(workers.receive_many(4, timeout=0))
        with broker.consumer("orders", group="analytics", auto_commit=False) as consumer:
            consumer.commit(consumer.poll(timeout=0, max_records=3))
    return folder


@pytest.fixture
def data(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path / "data")


# Topics


def test_a_topic_is_made_with_its_settings_and_the_folder_too(run, tmp_path):
    folder = tmp_path / "new"
    done = run("topic", "create", folder, "orders", "max_attempts=3", "lease_ms=5m", "--partitions", 3)
    assert done == Done(0, "created orders, 3 partitions\n", "")
    document = run("topic", "show", folder, "orders", "--json").document
    assert document["settings"] == {"lease_ms": 300_000, "max_attempts": 3}
    assert [part["number"] for part in document["partitions"]] == [0, 1, 2]
    again = run("topic", "create", folder, "orders", "--json")
    assert (again.code, again.error["code"]) == (2, "topic_exists")
    kept = run("topic", "create", folder, "orders", "--exist-ok", "--json").document
    assert kept == {"topic": "orders", "made": False, "partitions": 3}


@pytest.mark.parametrize(
    "arguments",
    [
        ["../out"],
        ["a/b"],
        [".hidden"],
        ["orders.dlq"],
        ["__traces"],
        ["x" * 201],
        [""],
        ["orders", "max_atempts=3"],
        ["orders", "max_attempts=0"],
        ["orders", "max_attempts"],
        ["orders", "durability=os"],
        ["orders", "--partitions", 0],
        ["orders", "--partitions", 2, "partitions=3"],
    ],
    ids=str,
)
def test_a_mistake_makes_no_topic(run, tmp_path, arguments):
    done = run("topic", "create", tmp_path / "data", *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert everything(tmp_path) == {}


def test_topics_are_listed_with_what_their_groups_are_behind(run, data):
    done = run("topic", "ls", data)
    assert done.code == 0
    titles, orders, profiles = done.out.splitlines()
    assert titles.split()[:5] == ["topic", "partitions", "messages", "dead", "disk"]
    assert orders.split()[:4] == ["orders", "2", "10", "0"]
    assert "billing 6" in orders
    assert "analytics 7" in orders
    assert profiles.split()[:3] == ["profiles", "1", "0"]
    topics = run("topic", "ls", data, "--json").lines
    assert {topic["name"]: topic["messages"] for topic in topics} == {"orders": 10, "profiles": 0}


def test_looking_at_topics_and_groups_needs_no_lock_and_changes_nothing(run, data):
    with holdfast.open_broker(data) as broker:
        broker.publish("orders", b"new", partition=0)
        before = everything(data)
        topic = run("topic", "show", data, "orders", "--json").document
        assert topic["partitions"][0]["end"] == 6
        groups = run("group", "ls", data, "--json").lines
        assert {group["name"]: group["lag"] for group in groups} == {"billing": 7, "analytics": 8}
        assert run("group", "show", data, "billing").code == 0
        assert run("stats", data).code == 0
        assert everything(data) == before


def test_the_dead_letters_of_a_topic_are_counted(run, data):
    with holdfast.open_broker(data) as broker:
        workers = broker.group("orders", "billing")
        for message in workers.receive_many(2, timeout=0):
            message.reject("no")
        assert run("topic", "ls", data, "--json").lines[0]["dead"] == 2
    assert "dead letters  2" in run("topic", "show", data, "orders").out


def test_a_folder_without_topics_says_so(run, tmp_path):
    with holdfast.open_broker(tmp_path / "data"):
        pass
    (tmp_path / "data" / "topics").mkdir(exist_ok=True)
    assert run("topic", "ls", tmp_path / "data") == Done(0, "", f"no topics in {tmp_path / 'data'}\n")
    assert run("stats", tmp_path / "data").code == 2
    assert run("topic", "ls", tmp_path / "nothing", "--json").error["code"] == "not_a_queue"


def test_settings_are_changed_and_kept(run, data):
    done = run("topic", "alter", data, "orders", "max_attempts=3", "retention_ms=30d")
    assert done.code == 0
    assert done.out.splitlines()[2].split() == ["max_attempts", "3", "5"]
    assert run("settings", data, "--topic", "orders", "--json").document["differing"] == {
        "max_attempts": 3,
        "retention_ms": 30 * 86_400_000,
        "partitions": 2,
    }
    assert run("topic", "alter", data, "orders", "max_attempts=default").code == 0
    assert "max_attempts" not in run("topic", "show", data, "orders", "--json").document["settings"]
    assert "holdfast topic partitions" in run("topic", "alter", data, "orders", "partitions=9").err
    assert run("topic", "alter", data, "orders").code == 2


def test_partitions_are_added_after_asking(run, data, monkeypatch):
    assert run("topic", "partitions", data, "orders", "--add", 1).code == 2
    monkeypatch.setattr(ask_module, "somebody_answers", lambda: True)
    assert run("topic", "partitions", data, "orders", "--add", 1, stdin=b"n\n").code == 2
    assert len(run("topic", "partitions", data, "orders", "--json").document["partitions"]) == 2
    done = run("topic", "partitions", data, "orders", "--add", 2, stdin=b"y\n")
    assert done.code == 0
    assert "orders will have 4 partitions; this cannot be undone" in done.out
    assert len(run("topic", "partitions", data, "orders", "--json").document["partitions"]) == 4


def test_deleting_a_topic_says_what_goes_and_asks(run, data, monkeypatch):
    dry = run("topic", "delete", data, "orders", "--dry-run")
    assert dry.code == 0
    assert "with 10 messages, 0 dead letters and 2 groups (billing, analytics); 13 messages not handled" in dry.out
    refused = run("topic", "delete", data, "orders", "--json")
    assert (refused.code, refused.out) == (2, "")
    monkeypatch.setattr(ask_module, "somebody_answers", lambda: True)
    assert run("topic", "delete", data, "orders", stdin=b"\n").code == 2
    assert run("topic", "delete", data, "orders", stdin=b"yes\n").code == 0
    assert [topic["name"] for topic in run("topic", "ls", data, "--json").lines] == ["profiles"]


@pytest.mark.parametrize("verb", ["show", "alter", "partitions", "compact", "delete"])
def test_an_unknown_topic_is_answered_with_those_there_are(run, data, verb):
    more = ["max_attempts=3"] if verb == "alter" else []
    done = run("topic", verb, data, "oders", *more, "--json")
    assert (done.code, done.error["code"]) == (2, "unknown_topic")
    assert "known topics: orders, profiles" in done.error["message"]
    assert f"holdfast topic create {data} oders" in done.error["message"]


def test_compacting_keeps_the_last_message_of_each_key(run, data):
    lines = b"".join(b'{"key": "%s", "body": "%d"}\n' % (key, n) for n in range(5) for key in (b"a", b"b"))
    lines += b'{"key": "b", "body": null}\n'
    assert run("produce", data, "profiles", "--jsonl", stdin=lines).code == 0
    assert run("topic", "compact", data, "profiles", "--json").document["removed_messages"] == 9
    left = run("consume", data, "profiles", "--json").lines
    assert [(line["key"], line["offset"], line["body"]) for line in left] == [("a", 8, "4"), ("b", 10, None)]
    assert run("topic", "compact", data, "profiles").out.startswith("0 messages removed")
    assert "cleanup=compact" in run("topic", "compact", data, "orders").err
    assert run("check", data).code == 0


# Groups


def test_groups_of_both_modes_are_shown_partition_by_partition(run, data):
    (billing,) = run("group", "show", data, "billing", "--json").document["topics"]
    assert (billing["mode"], billing["lag"]) == ("queue", 6)
    assert [(part["offset"], part["end"], part["lag"]) for part in billing["partitions"]] == [(2, 5, 3), (2, 5, 3)]
    assert billing["lag_seconds"] > 0
    (analytics,) = run("group", "show", data, "analytics", "--json").document["topics"]
    assert (analytics["mode"], analytics["lag"]) == ("stream", 7)
    shown = run("group", "show", data, "analytics").out.splitlines()
    assert shown[0].startswith("analytics on orders, stream mode: 7 messages behind, the oldest from ")
    assert shown[1].split() == ["partition", "committed", "end", "behind", "oldest"]


def test_what_is_in_hand_is_shown(run, data):
    run("get", data, "--topic", "orders", "--group", "billing")
    (billing,) = run("group", "show", data, "billing", "--json").document["topics"]
    assert (billing["leased"], billing["lag"]) == (1, 6)


@pytest.mark.parametrize(
    ("to", "analytics", "billing"),
    [("earliest", 10, 10), ("latest", 0, 0), ("4", 2, 2), ("-1h", 10, 10)],
)
def test_a_group_goes_on_elsewhere(run, data, to, analytics, billing):
    for name, lag in (("analytics", analytics), ("billing", billing)):
        before = everything(data)
        dry = run("group", "reset", data, name, "--to", to, "--dry-run", "--json").document
        assert (dry["changed"], everything(data).keys() >= before.keys()) == (False, True)
        done = run("group", "reset", data, name, "--to", to, "--yes", "--json").document
        assert done == {**dry, "changed": True}
        (group,) = run("group", "show", data, name, "--json").document["topics"]
        assert group["lag"] == lag


def test_a_reset_shows_the_moves_and_asks(run, data, monkeypatch):
    done = run("group", "reset", data, "billing", "--to", "earliest")
    assert done.code == 2
    assert "--yes" in done.err
    assert done.out.splitlines()[1].split() == ["orders", "0", "2", "0", "2", "0"]
    assert done.out.splitlines()[-1].endswith("4 handled messages will be delivered again, 0 messages will be skipped")
    monkeypatch.setattr(ask_module, "somebody_answers", lambda: True)
    assert run("group", "reset", data, "billing", "--to", "latest", "--partition", 1, stdin=b"n\n").code == 2
    done = run("group", "reset", data, "billing", "--to", "latest", "--partition", 1, stdin=b"y\n")
    assert done.out.startswith("moving to offset 5: 0 handled messages will be delivered again, 3 messages will be")
    (billing,) = run("group", "show", data, "billing", "--json").document["topics"]
    assert [part["lag"] for part in billing["partitions"]] == [3, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nobody", "--to", "earliest"], "known groups: analytics, billing"),
        (["analytics", "--to", "yesterday"], "--to 'yesterday' cannot be used"),
        (["analytics", "--to", "earliest", "--partition", 7], "no partition 7"),
        (["analytics", "--to", "earliest", "--topic", "profiles"], "on profiles in"),
        (["../x", "--to", "earliest"], "cannot be used"),
        (["analytics"], "--to"),
    ],
)
def test_a_reset_that_cannot_be_is_one_line(run, data, arguments, words):
    done = run("group", "reset", data, *arguments, "--yes")
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert done.err.count("\n") == 1


def test_a_group_on_several_topics_must_be_told_which(run, data):
    with holdfast.open_broker(data) as broker:
        broker.group("profiles", "billing")
    assert "choose one with --topic: orders, profiles" in run("group", "reset", data, "billing", "--to", "0").err
    assert run("group", "reset", data, "billing", "--to", "0", "--topic", "profiles", "--yes").code == 0
    assert "choose one with --topic" in run("group", "delete", data, "billing", "--yes").err


def test_groups_are_deleted_after_asking(run, data):
    assert run("group", "delete", data, "billing").code == 2
    assert "6 messages behind" in run("group", "delete", data, "billing", "--dry-run").out
    assert run("group", "delete", data, "billing", "--yes").out.splitlines()[-1] == "deleted billing"
    assert run("group", "delete", data, "analytics", "--yes", "--json").document["deleted"] is True
    assert run("group", "ls", data) == Done(0, "", f"no groups in {data}\n")
    assert run("check", data).code == 0


@pytest.mark.parametrize(
    "command",
    [
        "topic create DIR x",
        "topic alter DIR orders max_attempts=3",
        "topic partitions DIR orders --add 1 --yes",
        "topic compact DIR profiles",
        "topic delete DIR orders --yes",
        "group reset DIR billing --to latest --yes",
        "group delete DIR billing --yes",
        "produce DIR orders -m x",
        "consume DIR orders --group billing",
    ],
)
def test_an_owner_is_named(run, data, command):
    with holdfast.open_broker(data, share=False):
        arguments = [str(data) if word == "DIR" else word for word in command.split()]
        done = run(*arguments, "--wait", 0, "--json")
        assert (done.code, done.out, done.error["code"]) == (2, "", "busy")


@pytest.mark.parametrize("group", ["topic", "group"])
def test_without_a_verb_there_is_help(run, group):
    done = run(group)
    assert done.code == 2
    assert "Usage" in done.out


def test_without_a_terminal_a_command_names_only_options_that_it_has(run, data):
    run("topic", "create", data, "orders")
    assert "--dry-run, then run it again with --yes" in run("topic", "delete", data, "orders").err
    asked = run("topic", "partitions", data, "orders", "--add", "1").err
    assert "run it again with --yes" in asked
    assert "--dry-run" not in asked
