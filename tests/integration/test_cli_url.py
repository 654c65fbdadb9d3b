"""The command line at a folder, at a folder that a living process owns, and at a server: the same words each time."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.integration.http_gear import serving
from tests.unit.commands import Run, runner

PLACES = ["folder", "owned", "server"]
HOLDFAST = f"{shlex.quote(sys.executable)} -c 'from holdfast.cli.main import main; main()'"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "data"
    if request.param == "folder":
        yield str(folder)
    elif request.param == "server":
        with serving(folder) as server:
            yield server.url
    else:
        with holdfast.open_broker(folder):
            yield str(folder)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path / "data") as server:
        yield server.url


def taken(run: Run, place: str, *options: object) -> dict[str, Any]:
    (message,) = run("get", place, "--json", *options).lines
    found: dict[str, Any] = message
    return found


def test_a_message_goes_in_comes_out_and_is_acked(run, place):
    assert run("put", place, "--topic", "jobs", "one", "two", "--key", "k").out == "jobs-0-0\njobs-0-1\n"
    message = taken(run, place)
    assert (message["body"], message["key"], message["attempt"]) == ("one", "k", 1)
    assert message["lease_until_ms"] > message["timestamp_ns"] / 1e6
    assert run("ack", place, message["receipt"]).out == "acked jobs-0-0\n"
    late = run("ack", place, message["receipt"], "--json")
    assert (late.code, late.error["code"]) == (2, "lease_lost")
    assert [each["body"] for each in run("peek", place, "--json").lines] == ["two"]


def test_what_became_of_a_message_is_told_in_the_same_words(run, place):
    run("put", place, "--topic", "jobs", "x")
    receipt = taken(run, place)["receipt"]
    (extended,) = run("extend", place, receipt, "--lease", "1h", "--json").lines
    assert extended["phase"] == "leased"
    assert extended["until_ms"] is not None
    (delayed,) = run("nack", place, receipt, "--delay", "1h", "--error", "no route", "--json").lines
    assert (delayed["done"], delayed["phase"]) == ("nacked", "delayed")
    shown = run("show", place, "jobs-0-0", "--json").document
    assert (shown["phase"], shown["attempts"], shown["failures"][0]["error"]) == ("delayed", 1, "no route")
    assert run("cancel", place, "jobs-0-0").code == 0
    run("put", place, "y")
    deferred = run("defer", place, taken(run, place)["receipt"])
    assert deferred.out == "deferred jobs-0-1: it is ready again\n"


def test_the_document_of_a_message_goes_with_it(run, place):
    run("put", place, "--topic", "jobs", "x")
    first = taken(run, place, "--stateful")
    assert first["state"] is None
    assert run("nack", place, first["receipt"], "--delay", "0", "--state", '{"step": 2}').code == 0
    assert taken(run, place, "--stateful")["state"] == {"step": 2}
    assert run("nack", place, first["receipt"], "--state", "{").code == 2


def test_somebody_else_sees_who_has_a_message_and_until_when(run, place):
    run("put", place, "--topic", "jobs", "x")
    message = taken(run, place, "--owner", "me", "--lease", "1h")
    (leased,) = run("list", place, "leased", "--json").lines
    assert (leased["holder"], "receipt" in leased) == ("me", False)
    assert abs(leased["lease_until_ms"] - message["lease_until_ms"]) < 5_000
    assert "receipt" not in run("show", place, "jobs-0-0", "--json").document


def test_dead_letters_are_looked_at_and_put_back(run, place):
    run("put", place, "--topic", "jobs", "a", "b")
    for _ in range(2):
        run("reject", place, taken(run, place)["receipt"], "--reason", "bad")
    assert [each["error"] for each in run("dead", "ls", place, "--json").lines] == ["bad", "bad"]
    (row,) = run("dead", "ls", place, "--by-error", "--json").lines
    assert row["count"] == 2
    assert run("dead", "show", place, "jobs-0-1", "--json").document["original_id"] == "jobs-0-1"
    assert run("show", place, "jobs-0-1", "--json").document["phase"] == "dead"
    assert run("dead", "redrive", place, "--limit", 1, "--yes", "--json").document["done"] == 1
    assert run("dead", "purge", place, "--yes", "--json").document["done"] == 1
    assert run("stats", place, "--json").document["ready"] == 1


def test_a_queue_is_operated(run, place):
    assert run("settings", place, "--create", "--topic", "jobs", "max_attempts=3").code == 0
    assert run("settings", place, "--json").document["settings"]["max_attempts"] == 3
    run("put", place, *"abc")
    run("ack", place, taken(run, place)["receipt"])
    moved = run("seek", place, "start", "--yes", "--json").document
    assert (moved["offset"], moved["again"]) == (0, 1)
    assert run("seek", place, "--offset", 7, "--yes", "--json").error["code"] == "offset_out_of_range"
    assert len(run("peek", place, "--json").lines) == 3
    assert run("compact", place, "--json").document.keys() == {"segments", "bytes", "journal_bytes"}
    (gone,) = run("apply-retention", place, "--json").document["topics"]
    assert gone.keys() == {"topic", "messages", "dead_letters", "segments", "bytes"}
    stats = run("stats", place, "--json").document
    assert (stats["name"], stats["ready"], stats["folder"]) == ("jobs", 3, place)
    assert stats["oldest_ready_ms"] is not None


def test_topics_and_groups(run, place):
    assert run("topic", "create", place, "orders", "--partitions", 2).code == 0
    assert run("topic", "alter", place, "orders", "max_attempts=9").code == 0
    assert run("topic", "partitions", place, "orders", "--add", 1, "--yes", "--json").code == 0
    shown = run("topic", "show", place, "orders", "--json").document
    assert (len(shown["partitions"]), shown["settings"]["max_attempts"]) == (3, 9)
    lines = b"".join(b"k%d\t%d\n" % (number % 5, number) for number in range(20))
    assert run("produce", place, "orders", "--key-separator", "\\t", "--json", stdin=lines).document["stored"] == 20
    assert sorted(run("consume", place, "orders", "--raw").out.split(), key=int) == [str(n) for n in range(20)]
    first = run("consume", place, "orders", "--group", "billing", "-n", 5, "--raw").out.split()
    rest = run("consume", place, "orders", "--group", "billing", "--raw").out.split()
    assert sorted(first + rest, key=int) == [str(n) for n in range(20)]
    assert run("consume", place, "orders", "--group", "billing").code == 3
    assert run("consume", place, "orders", "--group", "billing", "--from", "earliest").code == 2
    (group,) = run("group", "ls", place, "--json").lines
    assert (group["name"], group["mode"], group["lag"]) == ("billing", "stream", 0)
    assert run("group", "reset", place, "billing", "--to", "earliest", "--yes", "--json").document["changed"] is True
    assert run("group", "show", place, "billing", "--json").document["topics"][0]["lag"] == 20
    assert run("group", "delete", place, "billing", "--yes").code == 0
    taken = run("consume", place, "orders", "--group", "work", "--mode", "queue", "-n", 4, "--raw").out.split()
    assert len(taken) == 4
    (load,) = run("top", place, "--once", "--json").document["topics"]
    assert (load["messages"], load["groups"][0]["ready"]) == (20, 16)
    assert run("topic", "delete", place, "orders", "--yes").code == 0
    assert run("topic", "ls", place, "--json").lines == []


def test_messages_are_read_without_being_taken(run, place):
    run("topic", "create", place, "orders", "--partitions", 2)
    for number in range(6):
        run("put", place, "--topic", "orders", str(number), "--key", str(number))
    assert run("tail", place, "--topic", "orders", "--raw").out.split() == [*"012345"]
    chosen = run("tail", place, "--topic", "orders", "--where", 'key == "3"', "--json").lines
    assert [each["body"] for each in chosen] == ["3"]
    since = run("tail", place, "--topic", "orders", "--from", chosen[0]["time"][:26] + "Z", "--raw").out.split()
    assert since == [*"345"]
    one = run("consume", place, "orders", "--partition", 1, "--json").lines
    assert {each["partition"] for each in one} == {1}
    assert run("consume", place, "orders", "--partition", 7).code == 2
    assert run("consume", place, "orders", "--from", "latest", "--timeout", "10ms").out == ""


def test_what_was_traced_is_told(run, place):
    run("settings", place, "--create", "--topic", "jobs", "trace_sample=1")
    run("put", place, "x")
    run("ack", place, taken(run, place)["receipt"])
    steps = [step["step"] for step in run("trace", "show", place, "jobs-0-0", "--json").document["steps"]]
    assert steps == ["published", "leased", "acked"]
    (life,) = run("trace", "ls", place, "--json").lines
    assert (life["id"], life["last"]) == ("jobs-0-0", "acked")
    assert [step["step"] for step in run("trace", "search", place, "--event", "leased", "--json").lines] == ["leased"]
    assert run("trace", "stats", place, "--json").document["messages"] == 1


def test_locks_and_documents(run, place):
    run("put", place, "--topic", "jobs", "x")
    lock = run("lock", "acquire", place, "night", "--owner", "me", "--json").document
    assert run("lock", "acquire", place, "night").code == 3
    assert run("lock", "show", place, "night", "--json").document["owner"] == "me"
    (held,) = run("lock", "ls", place, "--json").lines
    assert (held["fence"], "lease_id" in held) == (lock["fence"], False)
    assert run("lock", "keepalive", place, lock["lease_id"], "--lease", "1m").code == 0
    assert run("lock", "release", place, lock["lease_id"]).code == 0
    run("lock", "acquire", place, "night", "--owner", "stuck")
    assert run("lock", "release", place, "x@1", "--force", "night").code == 2
    assert run("lock", "release", place, "--force", "night").out == "released night\n"
    assert run("lock", "release", place, "--force", "night").code == 3
    assert run("state", "put", place, "cursor", '{"at": 7}', "--json").document["version"] == 1
    assert run("state", "put", place, "cursor", "8", "--version", 0, "--json").error["code"] == "conflict"
    assert run("state", "get", place, "cursor", "--json").document["value"] == {"at": 7}
    assert [each["name"] for each in run("state", "ls", place, "--json").lines] == ["cursor"]
    assert run("state", "rm", place, "cursor").code == 0
    assert run("state", "get", place, "cursor").code == 3


def test_a_waiting_get_is_woken_by_a_put(run, place, monkeypatch):
    run("put", place, "--topic", "jobs", "first", "--quiet")
    run("get", place, "--ack")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = f"{HOLDFAST} get {shlex.quote(place)} --topic jobs --block --raw --ack"
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, env=environment) as waiting:
        monkeypatch.setenv("HOLDFAST_URL", place)
        assert run("put", "@", "--topic", "jobs", "second", "--wait", "20s").code == 0
        out, _ = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (0, b"second")


def test_a_server_tells_of_itself(run, url):
    assert run("put", f"{url}/jobs", "x").code == 0
    assert run("status", url, "--json").document["topics"] == 1
    assert run("waiters", url, "--json").lines == []
    settings = run("config", "show", url, "--json").document
    assert settings["topics"]["jobs"]["partitions"]["value"] == 1
    assert any(name.endswith("max_waiters") or "port" in name for name in settings["settings"])


@pytest.mark.parametrize("command", ["check", "repair --yes", "doctor", "log info"])
def test_what_works_on_files_says_so(run, url, command):
    done = run(*command.split(), url)
    assert (done.code, done.out) == (2, "")
    assert "works on files" in done.err


def test_a_server_that_is_not_there_is_named_with_what_to_check(run):
    done = run("peek", "http://127.0.0.1:1", "--wait", 0)
    assert (done.code, done.out) == (2, "")
    assert "http://127.0.0.1:1: Connection refused" in done.err
    assert "holdfast serve" in done.err
    assert done.err.count("\n") == 1
    assert run("peek", "unix:/nonexistent", "--wait", 0, "--json").error["code"] == "unavailable"


def test_a_shell_script_takes_a_message_and_acks_it(run, url, tmp_path):
    run("put", f"{url}/jobs", "resize 42", "--key", "user-7")
    (tmp_path / "big").write_bytes(b"\0" * 100_000)
    run("put", f"{url}/jobs", "--file", tmp_path / "big")
    script = f"""
        set -eu
        holdfast() {{ {HOLDFAST} "$@"; }}
        eval "$(holdfast get --export --lease 1m --owner "job $$")"
        test "$HOLDFAST_BODY" = "resize 42"
        test -z "${{HOLDFAST_PAYLOAD_PATH:-}}"
        holdfast extend --lease 2m
        holdfast ack
        eval "$(holdfast get --export --payload-out {tmp_path}/out)"
        cmp {tmp_path}/big "$HOLDFAST_PAYLOAD_PATH"
        holdfast nack --delay 0 --error "try again"
        eval "$(holdfast get --export)"
        cmp {tmp_path}/big "$HOLDFAST_PAYLOAD_PATH"
        rm "$HOLDFAST_PAYLOAD_PATH"
        test "$HOLDFAST_ATTEMPT" = 2
        unset HOLDFAST_URL
        holdfast ack
    """
    environment = {**os.environ, "HOLDFAST_URL": url, "TMPDIR": str(tmp_path)}
    done = subprocess.run(["/bin/sh", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == ["acked jobs-0-0", "nacked jobs-0-1: it is ready again", "acked jobs-0-1"]
    stats = run("stats", url, "--json").document
    assert (stats["ready"], stats["leased"], stats["delayed"]) == (0, 0, 0)


def test_a_follower_of_a_server_is_told_of_what_comes(run, url):
    run("put", f"{url}/jobs", "one")
    command = f"{HOLDFAST} tail {url} --topic jobs --raw --follow --limit 3"
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == b"one\n"
        late = threading.Thread(target=holdfast.open(f"{url}/jobs").put_many, args=([b"two", b"three"],))
        late.start()
        out, _ = following.communicate(timeout=60)
        late.join()
    assert out == b"two\nthree\n"


def test_a_token_from_the_environment_or_a_profile_lets_a_command_in(run, tmp_path, monkeypatch):
    def token(name: str, *options: str) -> str:
        made: str = run("token", "new", name, *options, "--file", tmp_path / "tokens", "--json").document["token"]
        return made

    admin = token("root", "--role", "admin")
    worker = token("worker", "--role", "consumer", "--topics", "jobs")
    monkeypatch.setenv("HOLDFAST_PROFILES", str(tmp_path / "profiles"))
    with serving(tmp_path / "data", tokens_file=str(tmp_path / "tokens"), whole=True) as server:
        assert run("peek", server.url, "--json").error["code"] == "unauthenticated"
        monkeypatch.setenv("HOLDFAST_TOKEN", admin)
        assert run("put", f"{server.url}/jobs", "x").code == 0
        assert run("put", f"{server.url}/secret", "y").code == 0
        run("profile", "add", "mine", f"{server.url}/jobs", "--token-file", "-", stdin=worker.encode())
        assert run("--profile", "mine", "put", "z", "--json").error["code"] == "forbidden"
        (message,) = run("--profile", "mine", "get", "--json").lines
        assert run("--profile", "mine", "ack", message["receipt"]).code == 0
        assert [each["name"] for each in run("--profile", "mine", "topic", "ls", "--json").lines] == ["jobs"]
        assert run("--profile", "mine", "topic", "show", "secret", "--json").error["code"] == "forbidden"
        assert run("--profile", "mine", "audit", "--json").error["code"] == "forbidden"
        assert "root  created or changed the queue secret  " in run("audit", server.url).out
        monkeypatch.delenv("HOLDFAST_TOKEN")
        assert run("audit", tmp_path / "data").code == 0


def test_a_command_answers_alike_wherever_the_topic_is(run, place):
    assert run("topic", "create", place, "orders", "--partitions", 2).code == 0
    assert run("settings", place, "--topic", "orders", "--json").document["differing"] == {"partitions": 2}
    for number in range(2):
        assert run("produce", place, "orders", "-m", f"a{number}", "-m", f"b{number}", "--partition", number).code == 0
    taking = ("consume", place, "orders", "--group", "late", "--mode", "queue", "--raw")
    assert sorted(run(*taking, "--from", 1).out.split()) == ["b0", "b1"]  # an offset means each partition's
    lost = run("show", place, "orders-0-77", "--group", "late")
    assert (lost.code, f"there is no message orders-0-77 in {place}: " in lost.err) == (2, True)


def test_done_messages_are_listed_everywhere(run, place):
    run("put", place, "--topic", "jobs", "one", "two", "three")
    run("get", place, "--count", "2", "--ack")
    assert [each["body"] for each in run("ls", place, "done", "--json").lines] == ["two", "one"]


def test_queues_behind_an_address_are_completed(run, url, monkeypatch):
    run("put", url, "--topic", "jobs", "x")
    monkeypatch.setenv("_HOLDFAST_COMPLETE", "zsh")
    monkeypatch.setenv("_HOLDFAST_LINE", f"holdfast ls {url}/jo")
    assert run().out == f"{url}/jobs\n"
    monkeypatch.setenv("_HOLDFAST_COMPLETE", "bash")  # which takes what follows a colon for a word of its own
    assert run().out == f"{url.rpartition(':')[2]}/jobs\n"
    monkeypatch.setenv("_HOLDFAST_LINE", f"holdfast topic show {url} j")
    assert run().out == "jobs\n"


def test_bench_at_a_server_removes_its_topics(run, url):
    run("put", url, "--topic", "jobs", "x")
    assert len(run("bench", url, "--seconds", "0.05", "--batch", "2", "--json").lines) == 12
    assert [each["name"] for each in run("topic", "ls", url, "--json").lines] == ["jobs"]


def test_a_topic_that_a_server_lacks_is_reported_with_the_servers_address(run, url, tmp_path):
    run("put", url, "--topic", "jobs", "one")
    for command in (["ls"], ["dead", "ls"], ["stats"], ["pause"], ["get"]):
        done = run(*command, f"{url}/nosuch")
        assert done.code == 2
        assert done.err.startswith(f"error: there is no topic nosuch at {url}; known topics: jobs. Create it with ")
        assert str(tmp_path) not in done.err
