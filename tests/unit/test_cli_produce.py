"""`holdfast produce` and `holdfast consume`: what goes into a topic comes out of it, once for each group."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.unit.commands import Done, Run, runner

SOURCE = str(Path(holdfast.__file__).parents[1])
HOLDFAST = [sys.executable, "-c", "from holdfast.cli.main import main; main()"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Topics with three partitions and with one, both empty."""
    folder = tmp_path_factory.mktemp("produce") / "data"
    with holdfast.open_broker(folder) as broker:
        broker.create_topic("orders", partitions=3)
        broker.create_topic("single")
    return folder


@pytest.fixture
def data(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path / "data")


def stored(folder: Path, topic: str) -> list[tuple[Any, bytes]]:
    with holdfast.open_broker(folder) as broker:
        count = len(broker.describe_topic(topic).partitions)
        return sorted((m.key, m.raw) for n in range(count) for m in broker.read(topic, partition=n, limit=1_000))


# Producing


def test_lines_become_messages_and_a_summary_tells_of_them(run, data, tmp_path):
    done = run("produce", data, "single", stdin=b"one\ntwo\n\nfour")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("4 messages (10 B) to single in ")
    assert done.out.endswith("(acks all)\n")
    (tmp_path / "lines").write_bytes(b"\xff\x00\nsix\n")
    run("produce", data, "single", "--file", tmp_path / "lines", "-m", "seven", "--acks", "leader")
    run("produce", data, "single", "--whole", stdin=b"all\nof it\n")
    assert [body for _, body in stored(data, "single")] == sorted(
        [b"one", b"two", b"", b"four", b"seven", b"\xff\x00", b"six", b"all\nof it\n"]
    )


def test_keys_choose_the_partition(run, data):
    document = run("produce", data, "orders", "--key-separator", "\\t", "--json", stdin=b"a\t1\nb\t2\na\t3\tx").document
    assert (document["messages"], document["stored"], document["acks"]) == (3, 3, "all")
    assert sum(part["messages"] for part in document["partitions"]) == 3
    assert stored(data, "orders") == [("a", b"1"), ("a", b"3\tx"), ("b", b"2")]
    lines = run("consume", data, "orders", "--json").lines
    assert len({line["partition"] for line in lines if line["key"] == "a"}) == 1
    run("produce", data, "orders", "-m", "x", "--key", "k", "--header", "h=1", "--priority", 5, "--partition", 2)
    assert run("consume", data, "orders", "--partition", 2, "--json").lines[-1]["body"] == "x"


def test_options_and_json_lines_reach_the_messages(run, data):
    run("produce", data, "single", "-m", "x", "--key", "k", "--header", "h=1", "--priority", 5)
    line = json.dumps({"json": {"a": 1}, "headers": {"i": "2"}})
    run("produce", data, "single", "--jsonl", "--header", "h=1", stdin=line.encode())
    first, second = run("consume", data, "single", "--json").lines
    assert (first["body"], first["key"], first["priority"]) == ("x", "k", 5)
    assert first["headers"] == [{"name": "h", "value": "1"}]
    assert json.loads(second["body"]) == {"a": 1}
    assert [header["name"] for header in second["headers"]] == ["h", "i"]


def test_a_producer_that_resumes_stores_the_rest(run, data):
    lines = b"".join(b"%d\n" % n for n in range(700))
    first = run("produce", data, "orders", "--name", "import", "--json", stdin=lines[: len(lines) // 2]).document
    again = run("produce", data, "orders", "--name", "import", "--resume", "--json", stdin=lines)
    assert again.document["duplicates"] in (first["stored"], first["stored"] - 1)  # a half line is another message
    whole = run("produce", data, "orders", "--name", "import", "--resume", stdin=lines)
    assert "700 of them were already there" in whole.out
    assert "--name" in run("produce", data, "orders", "--resume", "-m", "x").err


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (
            ["--key-separator", ":"],
            b"a:1\nb2\n",
            "stdin, line 2: there is no ':' after the key: write KEY:BODY. 1 message stored",
        ),
        (["--jsonl"], b'{"body": "x"}\n{"bdoy": "x"}\n', "line 2: "),
        (["--partition", "7"], b"x\n", "stdin, line 1: topic single has no partition 7"),
        (["--jsonl"], b'{"body": null, "key": "k"}\n', "line 1: "),
        (["--batch-bytes", "many"], b"x\n", "--batch-bytes 'many' cannot be used"),
        (["--linger", "soon"], b"x\n", "--linger"),
        (["--acks", "some"], b"x\n", "--acks"),
        (["--jsonl", "--whole"], b"x\n", "--jsonl and --whole"),
        (["--key", "k", "--key-separator", ":"], b"x\n", "--key-separator"),
        (["--header", "novalue"], b"x\n", "--header"),
        (["--name", "../x"], b"x\n", "cannot be used"),
    ],
)
def test_a_mistake_in_the_input_is_one_line(run, data, arguments, stdin, words):
    done = run("produce", data, "single", *arguments, stdin=stdin)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


def test_a_message_that_is_too_large_is_named_and_those_before_it_are_stored(run, data):
    run("topic", "alter", data, "single", "max_message_bytes=10")
    done = run("produce", data, "single", "--json", stdin=b"short\n" + b"long" * 5 + b"\nshort\n")
    assert (done.code, done.error["code"]) == (2, "message_too_large")
    assert "stdin, line 2: " in done.error["message"]
    assert done.error["message"].endswith("1 message stored before that")
    assert stored(data, "single") == [(None, b"short")]


def test_an_unknown_topic_is_answered_with_what_makes_it(run, data):
    for verb in ("produce", "consume"):
        done = run(verb, data, "oders", stdin=b"x\n")
        assert done.code == 2
        assert f"`holdfast topic create {data} oders`" in done.err


# Consuming without a group


def test_reading_without_a_group_needs_no_lock_and_changes_nothing(run, data):
    with holdfast.open_broker(data) as broker:
        for n in range(6):
            broker.publish("orders", b"%d" % n, partition=n % 3)
        assert run("consume", data, "orders", "--raw").out == "0\n1\n2\n3\n4\n5\n"
        assert run("consume", data, "orders", "--raw", "-n", 2).out == "0\n1\n"
        assert run("consume", data, "orders", "--raw", "--partition", 1).out == "1\n4\n"
        assert run("consume", data, "orders", "--raw", "--from", 1).out == "3\n4\n5\n"
        assert run("consume", data, "orders", "--raw", "--from", "latest") == Done(0, "", "")
        assert run("consume", data, "orders", "--raw", "--from", "-1h", "-n", 1).out == "0\n"
        assert run("tail", data, "--topic", "orders", "--raw").out == "0\n1\n2\n3\n4\n5\n"
        assert run("tail", data, "--topic", "orders", "--raw", "--limit", 2).out == "4\n5\n"
    assert run("group", "ls", data, "--json").lines == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--from", "yesterday"],
        ["--partition", "9"],
        ["--mode", "queue"],
        ["--raw", "--json"],
        ["--key-separator", ":"],
        ["--follow", "--timeout", "1s"],
        ["--group", "../x"],
        ["--group", "g", "--partition", "1"],
        ["--group", "g", "--from", "yesterday"],
        ["-n", "0"],
    ],
    ids=str,
)
def test_a_mistake_in_the_call_makes_no_group(run, data, arguments):
    done = run("consume", data, "orders", *arguments)
    assert (done.code, done.out) == (2, "")
    assert "error" in done.err
    assert done.err.count("\n") == 1
    assert run("group", "ls", data, "--json").lines == []


def test_keys_are_printed_as_they_are_read(run, data):
    content = b"a\t1\nb\t2\n"
    run("produce", data, "single", "--key-separator", "\\t", stdin=content)
    assert run("consume", data, "single", "--raw", "--key-separator", "\\t").out == content.decode()


def test_what_comes_while_it_waits_is_printed(run, data):
    with holdfast.open_broker(data) as broker:
        later = threading.Timer(0.2, lambda: broker.publish("orders", b"late", key="k"))
        later.start()
        done = run("consume", data, "orders", "--raw", "--timeout", "30s", "-n", 1)
        later.join()
    assert done == Done(0, "late\n", "")


# Consuming with a group


@pytest.mark.parametrize("mode", ["queue", "stream"])
def test_a_group_goes_on_where_it_was(run, data, mode):
    run("produce", data, "single", stdin=b"1\n2\n3\n4\n5\n")
    take = ("consume", data, "single", "--group", "g", "--raw")
    assert run(*take, "--mode", mode, "-n", 2).out == "1\n2\n"
    assert run(*take, "-n", 1).out == "3\n"
    assert run(*take).out == "4\n5\n"
    assert run(*take) == Done(3, "", "no message for g in single\n")
    run("produce", data, "single", "-m", "6")
    assert run(*take, "--json").code == 2
    assert run(*take).out == "6\n"
    (group,) = run("group", "ls", data, "--json").lines
    assert (group["mode"], group["lag"]) == (mode, 0)


@pytest.mark.parametrize("mode", ["queue", "stream"])
@pytest.mark.parametrize(("begin", "bodies"), [("latest", ""), ("2", "3\n"), ("-1h", "1\n2\n3\n"), ("+1h", "")])
def test_a_new_group_begins_where_it_is_told(run, data, mode, begin, bodies):
    run("produce", data, "single", stdin=b"1\n2\n3\n")
    take = ("consume", data, "single", "--group", "g", "--mode", mode, "--raw")
    assert run(*take, "--from", begin).out == bodies
    run("produce", data, "single", "-m", "4")
    again = run(*take, "--from", begin)
    assert again.code == 2
    assert f"holdfast group reset {data} g --to {begin}" in again.err
    assert run(*take).out == "4\n"


def test_a_group_keeps_its_mode(run, data):
    run("produce", data, "single", stdin=b"1\n2\n")
    run("consume", data, "single", "--group", "q", "--mode", "queue", "-n", 1)
    run("consume", data, "single", "--group", "s", "-n", 1)
    assert "in queue mode" in run("consume", data, "single", "--group", "q", "--mode", "stream").err
    assert "in stream mode" in run("consume", data, "single", "--group", "s", "--mode", "queue").err
    assert "in stream mode" in run("get", data, "--topic", "single", "--group", "s").err


def process(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*HOLDFAST, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("mode", ["queue", "stream"])
@pytest.mark.slow
def test_what_nobody_could_read_is_not_handled(run, data, mode):
    run("produce", data, "single", "--batch-messages", 1, stdin=b"x" * 1_000_000 + b"\n")
    with process("consume", data, "single", "--group", "g", "--mode", mode, "--raw") as taking:
        assert taking.stdout is not None
        taking.stdout.read(1)
        taking.stdout.close()
        assert taking.wait(timeout=60) == 141
    (group,) = run("group", "ls", data, "--json").lines
    assert (group["lag"], group["leased"]) == (1, 0)


@pytest.mark.slow
def test_a_group_that_follows_lets_others_in_and_ends_quietly(run, data):
    run("produce", data, "single", "-m", "first")
    with process("consume", data, "single", "--group", "g", "--follow", "--raw") as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "first\n"
        assert run("produce", data, "single", "-m", "second", "--wait", "30s").code == 0
        assert following.stdout.readline() == "second\n"
        following.send_signal(signal.SIGINT)
        assert following.communicate(timeout=60) == ("", "")
    assert following.returncode == 130
