"""The command line of a queue: what it takes, prints and leaves behind, and the exit code it ends with."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.cli import output as ask_module
from holdfast.cli.look import stats as stats_module
from holdfast.cli.main import main
from holdfast.cli.output import cell_len
from holdfast.cli.use.get import NAMES
from holdfast.codec.frame import Kind
from holdfast.delivery.events import Acked, encode_event
from holdfast.storage import Log
from tests.unit.commands import Done, Run, ended, everything

NASTY = "\x1b[31mred\x1b[0m \x07bell \u202egnp.exe [bold]x[/bold]"
SOURCE = str(Path(holdfast.__file__).parents[1])
HOLDFAST = [sys.executable, "-c", "from holdfast.cli.main import main; main()"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("HOLDFAST_RECEIPT", raising=False)

    def call(*arguments: object, stdin: bytes = b"") -> Done:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return ended(capsys, arguments)

    return call


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


def bodies(folder: Path) -> list[bytes]:
    with holdfast.open(folder) as queue:
        return [message.body for message in queue.messages("ready")]


def taken(run: Run, folder: Path, *options: object) -> dict[str, Any]:
    (message,) = run("get", folder, "--json", *options).lines
    found: dict[str, Any] = message
    return found


# Putting


def test_put_prints_one_id_a_line(run, jobs):
    assert run("put", jobs, "one") == Done(0, "jobs-0-0\n", "")
    done = run("put", jobs, "two", "three")
    assert (done.code, done.out) == (0, "jobs-0-1\njobs-0-2\n")
    assert done.err == "2 messages (fsync)\n"
    assert run("put", jobs, "four", "--quiet").out == ""
    assert bodies(jobs) == [b"one", b"two", b"three", b"four"]


def test_put_with_everything(run, jobs):
    options = shlex.split(
        "--key user-7 --header kind=img --header kind=x=y --priority 7 --ttl 1h --correlation-id c-1 "
        "--dedup-id img-42 --durability os --codec zstd"
    )
    (receipt,) = run("put", jobs, "resize 42", *options, "--json").lines
    assert receipt == {"id": "jobs-0-0", "offset": 0, "duplicate": False, "durability": "os"}
    assert run("put", jobs, "again", "--dedup-id", "img-42", "--json").lines[0]["duplicate"] is True
    assert run("put", jobs, "again", "--dedup-id", "img-42").err == "1 message, 1 of them already known (fsync)\n"
    (message,) = run("peek", jobs, "--json").lines
    assert (message["body"], message["key"], message["priority"]) == ("resize 42", "user-7", 7)
    assert [(header["name"], header["value"]) for header in message["headers"]] == [("kind", "img"), ("kind", "x=y")]
    assert message["correlation_id"] == "c-1"
    assert message["expires_at_ms"] - message["timestamp_ns"] // 1_000_000 == pytest.approx(3_600_000, abs=1000)


def test_put_delayed(run, jobs):
    assert run("put", jobs, "later", "--delay", "1h30m").out == "jobs-0-d0\n"
    assert run("put", jobs, "then", "--due", "2100-01-01T00:00:00Z", "--json").lines[0]["offset"] is None
    out = run("list", jobs, "delayed").out
    assert "2100-01-01 00:00:00" in out
    assert run("stats", jobs, "--json").document["delayed"] == 2
    assert run("put", jobs, "x", "--delay", "1h", "--due", "+1h").code == 2


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_put_takes_stdin_as_one_message_byte_for_byte(run, jobs, arguments):
    body = bytes(range(256)) + b"\nline\n"
    assert run("put", jobs, *arguments, stdin=body).code == 0
    assert bodies(jobs) == [body]


def test_put_takes_files_and_lines(run, jobs, tmp_path):
    (tmp_path / "a").write_bytes(b"\x00a\n")
    (tmp_path / "b").write_bytes(b"1\n2\n\n4")
    assert run("put", jobs, "--file", tmp_path / "a", "--file", tmp_path / "b").code == 0
    assert run("put", jobs, "--lines", "--file", tmp_path / "b").code == 0
    assert run("put", jobs, "--lines", stdin=b"x\r\ny\n").code == 0
    assert bodies(jobs) == [b"\x00a\n", b"1\n2\n\n4", b"1", b"2", b"", b"4", b"x\r", b"y"]


def test_put_json_lines(run, jobs):
    lines = [
        {"body": "text", "key": "k", "headers": {"a": "1"}, "priority": 3, "correlation_id": "c"},
        {"body_base64": "/wA=", "headers": [["a", "1"], ["a", "2"]], "ttl": 60},
        {"json": {"b": [1, None]}, "dedup_id": "once"},
        {"json": None, "dedup_id": "once"},
    ]
    content = "\n\n".join(map(json.dumps, lines)).encode()
    receipts = run("put", jobs, "--jsonl", "--json", "--key", "other", stdin=content).lines
    assert [receipt["duplicate"] for receipt in receipts] == [False, False, False, True]
    first, second, third = run("list", jobs, "--json").lines
    assert (first["body"], first["key"], first["priority"], first["correlation_id"]) == ("text", "k", 3, "c")
    assert (second["body_base64"], second["key"], len(second["headers"])) == ("/wA=", "other", 2)
    assert json.loads(third["body"]) == {"b": [1, None]}
    assert run("put", jobs, "--jsonl", stdin=b'{"body":"d","delay":"10m"}\n{"body":"e","at":"+1h"}').code == 0
    assert [line["body"] for line in run("list", jobs, "delayed", "--json").lines] == ["d", "e"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{not json", "malformed"),
        (b'{"body": 1}', "Expected `str | null`"),
        (b'{"body": null}', "None"),
        (b'{"bdoy": "x"}', "bdoy"),
        (b"{}", "there is no body"),
        (b'{"body": "x", "json": 1}', "body and json are given"),
        (b'{"body_base64": "*"}', "body_base64"),
        (b'{"body": "x", "priority": 10}', "priority=10"),
        (b'{"body": "x", "delay": "soon"}', "'soon'"),
        (b'{"body": "x", "at": "yesterday"}', "'yesterday'"),
        (b'{"body": "x", "delay": 1, "at": "+1h"}', "choose one"),
        (b'{"body": "x", "dedup_id": ""}', "dedup_id is empty"),
        (b'\xff{"body": "x"}', "line 3"),
    ],
)
def test_a_bad_json_line_is_named_and_nothing_of_its_batch_is_stored(run, jobs, line, words):
    run("put", jobs, "before")
    content = b'{"body": "good"}\n\n' + line + b'\n{"body": "good"}\n'
    done = run("put", jobs, "--jsonl", stdin=content)
    assert (done.code, done.out) == (2, "")
    assert "stdin, line 3: " in done.err
    assert words in done.err
    assert done.err.endswith("Nothing was stored\n")
    assert done.err.count("\n") == 1
    assert bodies(jobs) == [b"before"]


def test_a_large_input_is_stored_in_batches(run, jobs):
    content = b'{"body": "x"}\n' * 2_500 + b"oops"
    done = run("put", jobs, "--jsonl", "--durability", "os", "--json", stdin=content)
    assert done.code == 2
    assert "line 2501" in done.error["message"]
    assert "2,000 messages of earlier batches stored, and none of this one" in done.error["message"]
    assert len(done.lines) == 2_000 == len(bodies(jobs))


@pytest.mark.parametrize(
    "arguments",
    [
        ["x", "--delay", "soon"],
        ["x", "--ttl", "-1s"],
        ["x", "--due", "never"],
        ["x", "--header", "novalue"],
        ["x", "--header", "holdfast.mine=1"],
        ["x", "--priority", "10"],
        ["x", "--durability", "strong"],
        ["x", "--lines", "--jsonl"],
        ["x", "y", "--dedup-id", "d"],
        ["x", "--no-create"],
        ["--file", "/nonexistent/file"],
        [],
    ],
    ids=shlex.join,
)
def test_a_mistake_puts_nothing_and_makes_no_queue(run, jobs, arguments):
    done = run("put", jobs, *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert not jobs.exists() or bodies(jobs) == []


def test_a_message_that_is_too_large_is_named(run, jobs):
    run("settings", jobs, "--create", "max_message_bytes=10")
    done = run("put", jobs, "--lines", "--json", stdin=b"short\n" + b"long" * 5 + b"\nshort\n")
    assert done.code == 2
    assert done.error["code"] == "message_too_large"
    assert "line 2: " in done.error["message"]
    assert bodies(jobs) == []


# Getting and settling


def test_get_and_ack(run, jobs):
    run("put", jobs, "one", "two")
    done = run("get", jobs, "--lease", "60s", "--holder", "me")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == "one"
    (leased,) = run("list", jobs, "leased", "--json").lines
    assert (leased["id"], leased["holder"], leased["phase"]) == ("jobs-0-0", "me", "leased")
    assert "receipt" not in leased
    (receipt,) = re.findall(r"jobs-0-0@\S+", done.out)
    assert run("ack", jobs, receipt).out == "acked jobs-0-0\n"
    assert run("stats", jobs, "--json").document["leased"] == 0
    assert bodies(jobs) == [b"two"]


def test_get_prints_raw_bytes_exactly(jobs, capfdbinary):
    body = bytes(range(256))
    with holdfast.open(jobs) as queue:
        queue.put(body)
    with pytest.raises(SystemExit):
        main(["get", str(jobs), "--raw"])
    out, err = capfdbinary.readouterr()
    assert out == body
    assert err.startswith(b"receipt jobs-0-0@")


def test_get_writes_a_file(run, jobs, tmp_path):
    run("put", jobs, stdin=b"\xff\x00\n")
    done = run("get", jobs, "--out", tmp_path / "body")
    assert (tmp_path / "body").read_bytes() == b"\xff\x00\n"
    assert f"3 bytes in {tmp_path / 'body'}" in done.out.replace("\n", "").replace("             ", "")


def test_a_body_that_cannot_be_written_goes_back(run, jobs, tmp_path):
    run("put", jobs, "one")
    done = run("get", jobs, "--ack", "--out", tmp_path / "missing" / "body")
    assert (done.code, done.out) == (2, "")
    assert "No such file" in done.err
    assert taken(run, jobs)["attempt"] == 1


def test_get_several_and_ack_at_once(run, jobs):
    run("put", jobs, "one", "two", "three")
    lines = run("get", jobs, "--count", 2, "--ack", "--json").lines
    assert [(line["body"], line["acked"]) for line in lines] == [("one", True), ("two", True)]
    assert bodies(jobs) == [b"three"]
    assert run("list", jobs, "leased", "--json").out == ""


def test_nothing_there_is_exit_code_3_and_a_line_on_stderr(run, jobs):
    run("put", jobs, "one", "--delay", "1h")
    for options in ([], ["--json"], ["--raw"]):
        assert run("get", jobs, *options) == Done(3, "", f"no message is ready in {jobs}\n")
    assert run("get", jobs, "--timeout", "10ms").code == 3


def test_get_waits_for_a_message_that_comes_due(run, jobs):
    run("put", jobs, "soon", "--delay", "300ms")
    assert taken(run, jobs, "--timeout", "30s")["body"] == "soon"


@pytest.mark.slow
def test_get_lets_go_of_the_folder_while_it_waits(run, jobs):
    run("put", jobs, "first")
    taken(run, jobs, "--ack")
    with process("get", jobs, "--timeout", "60s", "--json") as getting:
        assert run("put", jobs, "second", "--wait", "30s").code == 0
        out, err = getting.communicate(timeout=60)
    assert (getting.returncode, err) == (0, "")
    assert json.loads(out)["body"] == "second"


def test_nack_reject_defer_and_extend(run, jobs):
    run("put", jobs, "a", "b", "c", "d")
    first, second, third, fourth = (taken(run, jobs)["receipt"] for _ in range(4))
    assert "ready again at" in run("nack", jobs, first, "--delay", "1h", "--error", "ValueError: 17").out
    assert "dead letter" in run("reject", jobs, second, "--reason", "never").out
    (deferred,) = run("defer", jobs, third, "--delay", "1h", "--json").lines
    assert (deferred["done"], deferred["id"], deferred["phase"]) == ("deferred", "jobs-0-2", "delayed")
    (extended,) = run("extend", jobs, fourth, "--lease", "10h", "--json").lines
    assert extended["phase"] == "leased"
    stats = run("stats", jobs, "--json").document
    assert (stats["ready"], stats["leased"], stats["delayed"], stats["dead"]) == (0, 1, 2, 1)
    shown = run("show", jobs, "jobs-0-0", "--json").document
    assert (shown["phase"], shown["attempts"], shown["failures"][0]["error"]) == ("delayed", 1, "ValueError: 17")
    assert run("show", jobs, "jobs-0-2", "--json").document["attempts"] == 0
    (leased,) = run("list", jobs, "leased", "--json").lines
    assert leased["lease_until_ms"] - leased["timestamp_ns"] / 1e6 > 9 * 3_600_000


def test_the_id_of_a_redriven_dead_letter_shows_the_message_that_it_was(run, jobs):
    run("put", jobs, "x")
    run("reject", jobs, taken(run, jobs)["receipt"])
    assert run("show", jobs, "jobs.dlq-0-0", "--json").document["phase"] == "dead"
    run("dead", "redrive", jobs, "--yes")
    shown = run("show", jobs, "jobs.dlq-0-0", "--json").document
    assert (shown["id"], shown["phase"], shown["history"][-1]["step"]) == ("jobs-0-0", "done", "published")


def test_the_last_attempt_that_fails_says_that_the_message_is_dead(run, jobs):
    run("settings", jobs, "--create", "max_attempts=1")
    run("put", jobs, "a")
    assert "dead letter" in run("nack", jobs, taken(run, jobs)["receipt"]).out


def test_a_receipt_that_is_no_longer_good_is_named_and_the_others_are_done(run, jobs):
    run("put", jobs, "a", "b")
    first, second = taken(run, jobs)["receipt"], taken(run, jobs)["receipt"]
    run("ack", jobs, first)
    done = run("ack", jobs, first, "nonsense", second)
    assert (done.code, done.out) == (2, "acked jobs-0-1\n")
    lost, foreign = done.err.splitlines()
    assert "no longer yours" in lost
    assert "'nonsense' is not a receipt" in foreign
    assert run("ack", jobs, first, "--json").error["code"] == "lease_lost"


def test_without_a_receipt_the_environment_is_asked(run, jobs, monkeypatch):
    run("put", jobs, "a")
    assert "$HOLDFAST_RECEIPT" in run("ack", jobs).err
    monkeypatch.setenv("HOLDFAST_RECEIPT", taken(run, jobs)["receipt"])
    assert run("ack", jobs).code == 0


@pytest.mark.parametrize(
    "options", [["--raw", "--json"], ["--raw", "--count", 2], ["--export", "--count", 2], ["--lease", "x"]]
)
def test_a_get_that_makes_no_sense_takes_nothing(run, jobs, options):
    run("put", jobs, "a")
    assert run("get", jobs, *options).code == 2
    assert bodies(jobs) == [b"a"]


# The shell


def shell(script: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    call = " ".join(map(shlex.quote, HOLDFAST))
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    text = f'holdfast() {{ {call} "$@"; }}\n{script}'
    return subprocess.run(["sh", "-c", text], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_a_shell_script_gets_works_and_acks(tmp_path):
    with holdfast.open(tmp_path / "jobs") as queue:
        queue.put(b"$(touch bad)\n'`\"", key="it's; rm -rf *", headers={"a": "'$b'"})
        queue.put(b"two")
    done = shell(
        """
        while eval "$(holdfast get jobs --export --out body)"; do
            printf '%s|%s|%s|' "$HOLDFAST_KEY" "$HOLDFAST_ATTEMPT" "$HOLDFAST_HEADERS"
            cat "$HOLDFAST_BODY_FILE" && holdfast ack jobs
        done
        echo "left: [$HOLDFAST_RECEIPT$HOLDFAST_BODY_FILE]"
        eval "$(holdfast get jobs --export)"; echo "code $?"
        """,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines() == [
        """it's; rm -rf *|1|{"a": "'$b'"}|$(touch bad)""",
        "'`\"acked jobs-0-0",
        "|1|{}|twoacked jobs-0-1",
        "left: []",
        "code 3",
    ]
    assert not (tmp_path / "bad").exists()


def test_every_variable_is_set_or_unset(run, jobs, tmp_path):
    run("put", jobs, "a")
    names = [line.split()[1].partition("=")[0] for line in run("get", jobs, "--export").out.splitlines()]
    assert tuple(names) == NAMES
    empty = run("get", jobs, "--export")
    assert (empty.code, empty.out) == (3, f"unset {' '.join(NAMES)}\n(exit 3)\n")
    wrong = run("get", tmp_path / "none", "--export")
    assert (wrong.code, wrong.out) == (2, f"unset {' '.join(NAMES)}\n(exit 2)\n")


# Looking


def test_peek_and_list_show_tables_that_fit(run, jobs):
    run("put", jobs, "x" * 300, "--key", "user-7", "--header", "kind=img")
    run("put", jobs, "urgent", "--priority", 9)
    peeked = run("peek", jobs).out.splitlines()
    assert peeked[0].split() == ["id", "time", "(UTC)", "key", "headers", "pri", "bytes", "body"]
    assert peeked[1].startswith("jobs-0-1 ")
    assert run("list", jobs).out.splitlines()[1].startswith("jobs-0-0 ")
    assert max(map(len, peeked)) <= 100
    assert run("peek", jobs, "--count", 1, "--json").out.count("\n") == 1


def long_ids(folder: Path) -> Path:
    """A queue with a long name, and dead letters in which every column has something to say."""
    queue_folder = folder / "invoices-of-all-customers"
    with holdfast.open(queue_folder) as queue:
        for n in range(12):
            queue.put(b"body " * 40, key=f"customer-{n}", headers={"kind": "invoice"})
        for message in queue.get_many(11):
            message.reject("ConnectionError: the mail server at mail.example.com refused it")
    return queue_folder


@pytest.mark.parametrize("columns", ["80", "40"])
def test_ids_are_never_cut_however_narrow_the_terminal(run, tmp_path, monkeypatch, columns):
    folder = long_ids(tmp_path)
    monkeypatch.setenv("COLUMNS", columns)
    for call in (["dead", "ls"], ["list"], ["peek"], ["tail"]):
        for line in run(*call, folder).out.splitlines()[1:]:
            if line.startswith("  "):
                continue  # an error
            assert line.startswith("invoices-of-all-customers")
            assert "…" not in line.split()[0]
    assert "invoices-of-all-customers.dlq-0-10 " in run("dead", "ls", folder).out


def test_the_error_and_the_body_make_room_for_the_rest(run, letters, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("dead", "ls", letters).out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all("REJECTED  no such user" in line for line in lines[1:4])


def test_one_byte_is_not_called_bytes(run, jobs):
    run("put", jobs, "x")
    assert "body       1 byte\n" in run("show", jobs, "jobs-0-0").out
    assert "body       1 byte\n" in run("get", jobs, "--ack").out


def test_a_long_error_has_a_line_of_its_own_on_a_narrow_terminal(run, jobs, monkeypatch):
    error = "PaymentDeclined: the card of customer c-1 was declined by the bank at https://payments.example/v2/charges"
    with holdfast.open(jobs) as queue:
        for number in range(2):
            queue.put(b"order %d" % number, key=f"customer-{number}")
            queue.get().reject(error)
        queue.put(b"no error")
        queue.get().reject()
    monkeypatch.setenv("COLUMNS", "80")
    titles, second, *lines = run("dead", "ls", jobs).out.splitlines()
    assert titles.split() == ["id", "time", "(UTC)", "key", "tries", "reason", "body"]
    assert second == "  error"
    assert [line.split()[0] for line in lines[::2]] == ["jobs.dlq-0-0", "jobs.dlq-0-1", "jobs.dlq-0-2"]
    assert lines[1] == lines[3] == f"  {error[:77]}…"
    assert "customer-0" in lines[0]
    assert len(lines) == 5
    assert max(map(cell_len, lines)) <= 80
    monkeypatch.setenv("COLUMNS", "200")
    titles, *lines = run("dead", "ls", jobs).out.splitlines()
    assert "error" in titles
    assert len(lines) == 3
    assert error in lines[0]


def test_what_goes_into_a_pipe_is_not_cut_at_the_width_of_a_terminal(run, tmp_path, monkeypatch):
    folder = long_ids(tmp_path)
    monkeypatch.delenv("COLUMNS")
    for line in run("dead", "ls", folder).out.splitlines()[1:]:
        assert "ConnectionError: the mail server at mail.example.com refused it" in line
        assert "body " * 10 in line


def test_errors_are_counted_readably_at_80_columns(run, tmp_path, monkeypatch):
    folder = long_ids(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    title, facts, error = run("dead", "ls", folder, "--by-error").out.splitlines()
    assert title.split() == ["count", "reason", "last", "(UTC)", "example,", "error"]
    assert facts.split()[:2] == ["11", "REJECTED"]
    assert facts.split()[-1] == "invoices-of-all-customers.dlq-0-10"
    assert error.strip() == "ConnectionError: the mail server at mail.example.com refused it"


@pytest.mark.parametrize("before", ["", 'key == "日本" and ', 'key == "\x1b" and '])
def test_a_mistake_in_where_is_pointed_at(run, jobs, before):
    run("put", jobs, "a")
    done = run("list", jobs, "--where", f"{before}attempts = 2")
    assert done.code == 2
    _, line, caret, *_ = done.err.splitlines()
    assert caret.strip() == "^"
    assert cell_len(line[: line.index("= 2")]) == caret.index("^")
    assert done.err.replace("\n", "").isprintable()


def test_other_errors_stay_on_one_line(run, tmp_path):
    assert run("list", tmp_path / "a\nerror: b").err.count("\n") == 1


def test_list_chooses(run, jobs):
    run("put", jobs, "--jsonl", stdin=b'{"json":{"n":1},"key":"a"}\n{"json":{"n":2},"key":"b"}\n{"json":{"n":3}}')
    assert [line["body"] for line in run("list", jobs, "--where", "json.n >= 2", "--json").lines] == [
        '{"n":2}',
        '{"n":3}',
    ]
    assert len(run("list", jobs, "--limit", 1, "--json").lines) == 1
    assert run("list", jobs, "dead") == Done(0, "", "no message is dead\n")
    done = run("list", jobs, "--where", "json.n >", "--json")
    assert (done.code, done.error["code"]) == (2, "invalid_request")
    assert run("list", jobs, "gone").code == 2


def test_show_knows_a_message_wherever_it_is(run, jobs):
    run("put", jobs, "ready", "done", "dead", "--key", "k")
    run("put", jobs, "later", "--delay", "1h")
    run("put", jobs, "released", "--delay", "1ms")
    with holdfast.open(jobs) as queue:
        queue.get().defer(delay=0)
        first, second, third = queue.get_many(3)
        second.ack()
        third.reject("no such user")
        first.defer()
    phases = {name: run("show", jobs, name, "--json").document["phase"] for name in ("0", "1", "2", "d0", "d1")}
    assert phases == {"0": "ready", "1": "done", "2": "dead", "d0": "delayed", "d1": "ready"}
    out = run("show", jobs, "jobs-0-2").out
    assert "jobs.dlq-0-0" in out
    assert "no such user" in out
    assert run("show", jobs, "jobs.dlq-0-0").out == out
    for unknown in ("99", "d99", "jobs.dlq-0-9", "other-0-1", "x"):
        done = run("show", jobs, unknown)
        assert (done.code, done.out) == (2, "")
        assert unknown in done.err


def test_nothing_in_a_message_acts_on_the_terminal(run, jobs):
    nasty = NASTY.encode()
    with holdfast.open(jobs) as queue:
        queue.put(nasty, key=nasty, headers={NASTY: nasty}, correlation_id=NASTY)
        queue.put(nasty)
        first, second = queue.get_many(2)
        second.reject(NASTY)
        first.defer()
    outs = [run(*call, jobs).out for call in (["peek"], ["list"], ["tail"], ["dead", "ls"])]
    outs += [run("list", jobs, "dead").out, run("show", jobs, "0").out, run("show", jobs, "1").out]
    outs += [run("dead", "ls", jobs, "--by-error").out, run("get", jobs).out]
    for out in outs:
        assert "mred" in out
        assert out.replace("\n", "").isprintable()


def test_tail_reads_beside_the_owner_and_consumes_nothing(run, jobs):
    with holdfast.open(jobs) as queue:
        queue.put_many([b"%d" % n for n in range(20)])
        assert [line["body"] for line in run("tail", jobs, "--json").lines] == [str(n) for n in range(10, 20)]
        assert len(run("tail", jobs, "--from", "start", "--json").lines) == 20
        assert run("tail", jobs, "--from", "end").out == ""
        assert [line["offset"] for line in run("tail", jobs, "--from", 18, "--json").lines] == [18, 19]
        assert len(run("tail", jobs, "--from", "-1h", "--limit", 3, "--json").lines) == 3
        assert run("tail", jobs, "--from", "18", "--raw").out == "18\n19\n"
        assert "jobs-0-19" in run("tail", jobs).out
        assert run("tail", jobs, "--from", "21").code == 2
        assert run("tail", jobs, "--from", "once").code == 2
        assert queue.stats().ready == 20


def test_tail_shows_only_what_is_asked_for(run, jobs):
    with holdfast.open(jobs) as queue:
        queue.put_many([b'{"n": %d}' % n for n in range(500)])
        found = run("tail", jobs, "--where", "json.n < 20", "--json").lines
        assert [line["offset"] for line in found] == list(range(10, 20))
        assert [line["offset"] for line in run("tail", jobs, "--where", "json.n < 3", "--json").lines] == [0, 1, 2]
        found = run("tail", jobs, "--from", "start", "--where", "json.n >= 100", "--limit", 2, "--json").lines
        assert [line["offset"] for line in found] == [100, 101]
        assert run("tail", jobs, "--where", "json.n >= 1000").out == ""
        assert run("tail", jobs, "--where", "json.n >").code == 2


@pytest.mark.slow
def test_tail_follows_what_is_asked_for_into_partitions_that_were_not_used_before(run, tmp_path):
    data = tmp_path / "shop"
    with holdfast.open_broker(data) as broker:
        broker.create_topic("orders", partitions=3)
        with process("tail", data, "--topic", "orders", "-f", "--raw", "--where", 'body !~ "no"', "--limit", 5) as tail:
            assert tail.stdout is not None
            for number in (2, 0, 1, 2):
                broker.publish("orders", b"no", partition=number)
                broker.publish("orders", b"%d" % number, partition=number)
                assert tail.stdout.readline() == f"{number}\n"
            broker.add_partitions("orders", 1)
            broker.publish("orders", b"3", partition=3)
            assert tail.communicate(timeout=60) == ("3\n", "")
        assert tail.returncode == 0


@pytest.mark.slow
def test_tail_follows(jobs):
    with holdfast.open(jobs) as queue:
        queue.put(b"one")
        with process("tail", jobs, "--follow", "--limit", 2, "--raw") as tail:
            assert tail.stdout is not None
            assert tail.stdout.readline() == "one\n"
            queue.put(b"two")
            assert tail.communicate(timeout=60) == ("two\n", "")
        assert tail.returncode == 0


def test_stats(run, jobs):
    run("put", jobs, "a")
    done = run("stats", jobs)
    assert done.out.split()[:2] == ["queue", "jobs"]
    assert ["ready", "1"] in [line.split() for line in done.out.splitlines()]
    document = run("stats", jobs, "--json").document
    assert document["ready"] == 1
    assert not {"metrics", "waiters", "durability"} & document.keys()  # those would be the command's own


def test_stats_are_watched_until_somebody_has_seen_enough(run, jobs, monkeypatch):
    run("put", jobs, "a")
    pauses: list[float] = []

    class Clock:
        @staticmethod
        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(stats_module, "time", Clock)
    done = run("stats", jobs, "--watch", "--every", "500ms", "--json")
    assert (done.code, pauses) == (130, [0.5] * 3)
    assert [line["ready"] for line in done.lines] == [1, 1, 1]
    assert run("stats", jobs, "--watch", "--every", "1ms").code == 2


# Operating


def test_cancel(run, jobs):
    run("put", jobs, "a", "b")
    run("put", jobs, "c", "--delay", "1h")
    done = run("cancel", jobs, "jobs-0-1", "jobs-0-d0", "jobs-0-1", "nonsense")
    assert (done.code, done.out) == (2, "cancelled jobs-0-1\ncancelled jobs-0-d0\n")
    assert done.err.count("error: ") == 2
    assert bodies(jobs) == [b"a"]


@pytest.fixture
def handled(run: Run, jobs: Path) -> Path:
    """A queue of ten messages: six are done, one is leased, three are ready."""
    run("put", jobs, *range(10))
    run("get", jobs, "--count", 6, "--ack")
    run("get", jobs)
    return jobs


@pytest.mark.parametrize(
    ("place", "again", "passed", "ready"),
    [
        (["start"], 6, 0, 9),
        (["end"], 0, 3, 0),
        (["--offset", 4], 2, 0, 5),
        (["--offset", 8], 0, 1, 2),
        (["--time", "-1h"], 6, 0, 9),
        (["--time", "2100-01-01"], 0, 3, 0),
    ],
)
def test_seek_says_what_it_does_and_does_it(run, handled, place, again, passed, ready):
    before = run("stats", handled, "--json").document["ready"]
    dry = run("seek", handled, *place, "--dry-run", "--json").document
    assert (dry["again"], dry["passed_over"], dry["changed"]) == (again, passed, False)
    assert run("stats", handled, "--json").document["ready"] == before
    refused = run("seek", handled, *place)
    assert refused.code == 2
    assert "--yes" in refused.err
    assert run("seek", handled, *place, "--yes", "--json").document["changed"] is True
    assert run("stats", handled, "--json").document["ready"] == ready


@pytest.mark.parametrize("place", [[], ["middle"], ["start", "--offset", 1], ["--offset", 11], ["--time", "x"]])
def test_seek_to_nowhere_is_refused(run, handled, place):
    assert run("seek", handled, *place, "--yes").code == 2


@pytest.mark.parametrize(("answer", "code", "ready"), [(b"y\n", 0, 9), (b"n\n", 2, 3), (b"", 2, 3)])
def test_seek_asks(run, handled, monkeypatch, answer, code, ready):
    monkeypatch.setattr(ask_module, "somebody_answers", lambda: True)
    done = run("seek", handled, "start", stdin=answer)
    assert done.code == code
    assert "6 handled messages will be delivered again" in done.out
    assert run("stats", handled, "--json").document["ready"] == ready


def test_a_queue_is_purged_after_a_question(run, handled, monkeypatch):
    run("put", handled, "later", "--delay", "1h")
    dry = run("purge", handled, "--dry-run")
    assert (dry.code, dry.out) == (0, "3 messages ready, 1 message delayed, 1 in flight in jobs\n")
    refused = run("purge", handled)
    assert refused.code == 2
    assert "--yes" in refused.err
    monkeypatch.setattr(ask_module, "somebody_answers", lambda: True)
    assert run("purge", handled, stdin=b"n\n").code == 2
    assert bodies(handled) == [b"7", b"8", b"9"]
    assert run("purge", handled, stdin=b"y\n").out.endswith("4 messages dropped for good\n")
    document = run("purge", handled, "--yes", "--json").document
    assert document == {"ready": 0, "delayed": 0, "leased": 1, "purged": 0}
    assert run("purge", handled, "--group", "nobody", "--yes").code == 2


def test_compact(run, handled):
    assert run("compact", handled, "--json").document.keys() == {"segments", "bytes", "journal_bytes"}
    assert "freed" in run("compact", handled).out


def test_retention_is_applied_now_and_says_what_is_gone(run, jobs):
    run("put", jobs, *range(9))
    run("settings", jobs, "retention_ms=1ms")
    assert run("apply-retention", jobs).out == "jobs: 0 messages and 0 dead letters dropped, 0 B freed\n"
    run("get", jobs, "--count", 9, "--ack")
    (gone,) = run("apply-retention", jobs, "--json").document["topics"]
    assert (gone["topic"], gone["messages"], gone["dead_letters"], gone["segments"]) == ("jobs", 9, 0, 1)
    assert gone["bytes"] > 0
    assert run("apply-retention", jobs, "--topic", "nothing").code == 2


def test_settings_are_shown_and_changed_and_kept(run, jobs):
    assert run("settings", jobs).code == 2
    done = run("settings", jobs, "--create", "max_attempts=3", "lease_ms=1h30m", "segment_bytes=1MiB", "codec=zstd")
    assert done.code == 0
    assert ["lease_ms", "5,400,000", "30,000"] in [line.split() for line in done.out.splitlines()]
    document = run("settings", jobs, "--json").document
    assert document["differing"] == {
        "max_attempts": 3, "lease_ms": 5_400_000, "segment_bytes": 1 << 20, "codec": "zstd",
    }  # fmt: skip
    run("settings", jobs, "max_attempts=none", "lease_ms=default", "codec=none", "expired_to_dead=true")
    run("settings", jobs, "backoff_factor=1.5", "priority_weights=1,1,1,1,1,1,1,1,1,2")
    document = run("settings", jobs, "--json").document
    assert document["settings"]["max_attempts"] is None
    assert set(document["differing"]) == {
        "max_attempts", "segment_bytes", "expired_to_dead", "backoff_factor", "priority_weights",
    }  # fmt: skip
    assert "snapshot_events" in run("settings", jobs, "--all").out


@pytest.mark.parametrize("change", ["max_attempts", "max_attemps=3", "max_attempts=many", "lease_ms=0", "world=1"])
def test_a_setting_that_cannot_be_changes_nothing(run, jobs, change):
    run("put", jobs, "a")
    done = run("settings", jobs, change, "--json")
    assert (done.code, done.error["code"]) == (2, "bad_settings")
    assert run("settings", jobs, "--json").document["differing"] == {}


# Dead letters


@pytest.fixture
def letters(jobs: Path) -> Path:
    """Four dead letters of two kinds."""
    with holdfast.open(jobs) as queue:
        for n in range(3):
            queue.put(b"user %d" % n)
            queue.get().reject(f"no such user {n}")
        queue.put(b"odd", key="k", correlation_id="c-1")
        queue.get().reject("Timeout")
    return jobs


def test_dead_letters_are_listed_counted_and_shown(run, letters):
    lines = run("dead", "ls", letters, "--json").lines
    assert [line["body"] for line in lines] == ["user 0", "user 1", "user 2", "odd"]
    assert [line["correlation_id"] for line in lines] == ["jobs-0-0", "jobs-0-1", "jobs-0-2", "c-1"]
    assert [
        line["body"] for line in run("dead", "ls", letters, "--where", 'error ~ "user"', "--limit", 1, "--json").lines
    ] == ["user 0"]
    groups = run("dead", "ls", letters, "--by-error", "--json").lines
    assert [(group["count"], group["error"]) for group in groups] == [(3, "no such user …"), (1, "Timeout")]
    assert "no such user …" in run("dead", "ls", letters, "--by-error").out
    document = run("dead", "show", letters, "jobs.dlq-0-3", "--json").document
    assert (document["original_id"], document["failures"][0]["error"]) == ("jobs-0-3", "Timeout")
    assert run("dead", "show", letters, "jobs-0-3", "--json").document == document
    assert run("dead", "show", letters, "jobs.dlq-0-9").code == 2
    assert max(map(len, run("dead", "ls", letters).out.splitlines())) <= 100


def test_a_dead_letter_is_found_by_the_id_of_its_message(run, letters):
    run("put", letters, "later", "--delay", "1ms")
    with holdfast.open(letters) as queue:
        queue.get(timeout=30).reject("late")
        queue.put(b"alive")
        queue.seek("start")
        queue.get().reject("once more")
    for message_id, error in (("jobs-0-d0", "late"), ("jobs-0-4", "late"), ("jobs-0-0", "once more")):
        document = run("dead", "show", letters, message_id, "--json").document
        assert (document["phase"], document["failures"][-1]["error"]) == ("dead", error)
    for unknown in ("jobs-0-5", "jobs-0-99", "jobs-0-d9", "jobs-x"):
        done = run("dead", "show", letters, unknown)
        assert (done.code, done.out) == (2, "")
        assert unknown in done.err


def test_redrive_counts_asks_and_puts_back(run, letters, monkeypatch):
    dry = run("dead", "redrive", letters, "--where", 'error ~ "user"', "--dry-run")
    assert (dry.code, dry.out) == (0, "3 dead letters would be redriven\n")
    refused = run("dead", "redrive", letters)
    assert refused.code == 2
    assert "--yes" in refused.err
    monkeypatch.setattr(ask_module, "somebody_answers", lambda: True)
    assert run("dead", "redrive", letters, stdin=b"n\n").code == 2
    assert run("stats", letters, "--json").document["dead"] == 4
    done = run("dead", "redrive", letters, "jobs.dlq-0-1", stdin=b"y\n")
    assert done.out == "1 dead letter will be redriven\n1 dead letter redriven\n"
    document = run("dead", "redrive", letters, "--rate", 1000, "--limit", 2, "--yes", "--json").document
    assert (document["matched"], document["done"]) == (2, 2)
    assert bodies(letters) == [b"user 1", b"user 0", b"user 2"]
    assert run("dead", "redrive", letters, "--rate", 0, "--yes").code == 2
    assert run("dead", "redrive", letters, "jobs.dlq-0-1", "--yes").code == 2


def test_redrive_puts_into_another_queue(run, letters):
    assert run("dead", "redrive", letters, "--to", "repairs", "--yes").code == 2
    assert run("topic", "create", letters, "repairs").code == 0
    done = run("dead", "redrive", letters, "--to", "repairs", "--where", 'error ~ "user"', "--yes", "--topic", "jobs")
    assert done.out == "3 dead letters will be redriven to repairs\n3 dead letters redriven to repairs\n"
    assert run("stats", letters, "--topic", "jobs", "--json").document["dead"] == 1
    with holdfast.open_broker(letters) as broker:
        assert [message.body for message in broker.read("repairs")] == [b"user 0", b"user 1", b"user 2"]


def test_dead_letters_look_the_same_beside_a_living_owner(run, letters):
    looks = [
        ["ls", letters, "--json"],
        ["ls", letters],
        ["ls", letters, "--where", 'error ~ "user"', "--limit", 1, "--json"],
        ["ls", letters, "--by-error", "--json"],
        ["ls", letters, "--limit", "-1"],
        ["ls", letters, "--where", "no such thing"],
        *(["show", letters, id_, "--json"] for id_ in ("jobs.dlq-0-3", "jobs-0-3", "3", "jobs-0-99", "jobs.dlq-7-0")),
    ]
    alone = [run("dead", *look) for look in looks]
    with holdfast.open(letters, share=False) as owner:
        for look, expected in zip(looks, alone, strict=True):
            seen = run("dead", *look, "--wait", 0)
            assert (seen.code, seen.out) == (expected.code, expected.out)
            if "-7-" not in str(look):
                assert seen.err == expected.err
        assert run("dead", "ls", letters, "--group", "nobody", "--wait", 0).code == 2
        owner.dead.redrive("jobs.dlq-0-3")
        assert len(run("dead", "ls", letters, "--json", "--wait", 0).lines) == 3
        assert "redriven or purged" in run("dead", "show", letters, "jobs-0-3", "--wait", 0).err


def test_purge_counts_asks_and_drops(run, letters):
    assert run("dead", "purge", letters).code == 2
    assert run("dead", "purge", letters, "--dry-run", "--json").document["matched"] == 4
    done = run("dead", "purge", letters, "--where", 'error ~ "user"', "--yes")
    assert done.out == "3 dead letters will be dropped for good\n3 dead letters dropped for good\n"
    assert [line["body"] for line in run("dead", "ls", letters, "--json").lines] == ["odd"]
    assert run("dead", "purge", letters, "--yes", "--json").document["done"] == 1
    assert run("dead", "ls", letters) == Done(0, "", "no dead letters\n")


# Owners, wrong folders, closed pipes

COMMANDS = [
    "get", "peek", "stats", "list", "show DIR 0", "ack DIR x", "cancel DIR x", "seek DIR start", "compact", "settings",
    "apply-retention",
    "dead ls", "dead show DIR 0", "dead redrive", "dead purge", "put DIR x --no-create",
]  # fmt: skip
LOOKING = ("dead ls", "dead show")


def arguments_for(command: str, folder: Path) -> list[str]:
    words = command.split() if "DIR" in command else [*command.split(), "DIR"]
    return [str(folder) if word == "DIR" else word for word in words]


@pytest.mark.parametrize("command", [command for command in COMMANDS if not command.startswith(LOOKING)])
def test_an_owner_is_named_and_what_to_do_is_said(run, jobs, command):
    with holdfast.open(jobs, share=False):
        done = run(*arguments_for(command, jobs), "--wait", 0)
        assert (done.code, done.out) == (2, "")
        assert f"process {os.getpid()} " in done.err
        assert "Close it there" in done.err
        assert run(*arguments_for(command, jobs), "--wait", "20ms", "--json").error["code"] == "busy"


@pytest.mark.parametrize("command", [*COMMANDS, "tail"])
def test_a_folder_without_a_queue_is_one_line_on_stderr(run, tmp_path, command):
    missing = tmp_path / "missing"
    done = run(*arguments_for(command, missing))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: there is no folder {missing}")
    assert done.err.count("\n") == 1
    assert run(*arguments_for(command, tmp_path), "--json").error["code"] == "not_a_queue"
    (tmp_path / "file").write_text("x")
    assert run(*arguments_for(command, tmp_path / "file")).code == 2
    assert everything(tmp_path) == {"file": b"x"}


def test_a_queue_is_not_made_among_other_files(run, tmp_path):
    (tmp_path / "file").write_text("x")
    assert run("put", tmp_path, "x", "--json").error["code"] == "not_a_queue"


def process(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*HOLDFAST, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("command", ["list --json", "tail --from start", "list"])
@pytest.mark.slow
def test_a_reader_that_goes_away_ends_a_command_quietly(jobs, command):
    with holdfast.open(jobs) as queue:
        queue.put_many([b"x" * 100] * 20_000, durability="os")
    name, *options = command.split()
    with process(name, jobs, *options) as listing:
        assert listing.stdout is not None
        assert listing.stderr is not None
        listing.stdout.readline()
        listing.stdout.close()
        assert listing.stderr.read() == ""
        assert listing.wait(timeout=60) == 141


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("options", [["--json"], ["--raw"]])
@pytest.mark.slow
def test_a_message_that_nobody_could_read_goes_back(run, jobs, monkeypatch, options, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with holdfast.open(jobs) as queue:
        queue.put(b"x" * 1_000_000)
    with process("get", jobs, "--ack", *options) as getting:
        assert getting.stdout is not None
        getting.stdout.read(1)
        getting.stdout.close()
        assert getting.wait(timeout=60) == 141
    stats = run("stats", jobs, "--json").document
    assert (stats["ready"], stats["leased"]) == (1, 0)


@pytest.mark.slow
def test_an_interrupted_wait_says_nothing(jobs):
    with holdfast.open(jobs) as queue:
        queue.put(b"first")
    with process("tail", jobs, "--follow", "--raw") as tail:
        assert tail.stdout is not None
        assert tail.stdout.readline() == "first\n"
        tail.send_signal(signal.SIGINT)
        assert tail.communicate(timeout=60) == ("", "")
    assert tail.returncode == 130


# Checking and repairing a whole queue


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


@pytest.fixture
def full(run: Run, jobs: Path) -> Path:
    """A queue with all its parts."""
    run("put", jobs, "a", "b", "c")
    run("put", jobs, "later", "--delay", "1h", "--dedup-id", "d")
    run("reject", jobs, taken(run, jobs)["receipt"])
    return jobs


def test_check_of_a_queue_looks_at_every_log(run, full):
    before = everything(full)
    done = run("check", full)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == "ok: 4 messages intact"
    document = run("check", full, "--json").document
    assert {log["name"]: log["kind"] for log in document["logs"]} == {
        "topics/jobs/0/log": "messages",
        "topics/jobs/0/delayed/intake": "delayed",
        "topics/jobs/0/groups/default": "journal",
        "topics/jobs.dlq/0/log": "messages",
        "topics/jobs.dlq/0/groups/default": "journal",
    }
    assert [finding for log in document["logs"] for finding in log["findings"]] == []
    (state,) = (log["state"] for log in document["logs"] if log["name"] == "topics/jobs/0/groups/default")
    assert (state["floor"], state["leased"], state["wrong"]) == (1, 0, [])
    assert everything(full) == before


def test_check_works_beside_the_owner(run, full):
    with holdfast.open(full) as queue:
        message = queue.get()
        done = run("check", full)
        assert done.code == 0
        assert "A process owns this queue" in done.out
        document = run("check", full, "--json").document
        assert (document["ok"], document["owned"]) == (True, True)
        assert {log["name"]: log["state"] and log["state"]["leased"] for log in document["logs"]}[
            "topics/jobs/0/groups/default"
        ] == 1
        message.ack()


@pytest.mark.parametrize(
    "name",
    ["topics/jobs/0/log", "topics/jobs/0/delayed/intake", "topics/jobs.dlq/0/log", "topics/jobs/0/groups/default"],
)
@pytest.mark.slow
def test_damage_anywhere_is_found_and_mended(run, full, tmp_path, name):
    flip(full / name / f"{0:020d}.log", 90)
    done = run("check", full)
    assert done.code == 1
    assert f"holdfast repair {full} --dry-run" in done.out
    document = run("check", full, "--json").document
    assert [log["name"] for log in document["logs"] if not log["ok"]] == [name]
    before = everything(full)
    assert run("repair", full, "--dry-run").code == 0
    assert run("repair", full).code == 2
    assert everything(full) == before
    done = run("repair", full, "--yes", "--backup", tmp_path / "kept")
    assert done.code == 0
    assert (tmp_path / "kept" / name / f"{0:020d}.log").exists()
    assert [log["name"] for log in run("check", full, "--json").document["logs"] if any(
        finding["severity"] == "damage" for finding in log["findings"]
    )] == []  # fmt: skip
    assert run("repair", full).out == f"{full}: nothing to repair\n"
    assert run("put", full, "more").code == 0


def test_a_journal_that_does_not_add_up_is_found(run, full):
    with Log.open(str(full / "topics/jobs/0/groups/default"), kind=Kind.JOURNAL) as journal:
        journal.append([encode_event(Acked((1000, 1001)))])
    done = run("check", full, "--json")
    (state,) = (log["state"] for log in done.document["logs"] if log["name"] == "topics/jobs/0/groups/default")
    assert done.code == 1
    assert state["wrong"]


def test_a_damaged_snapshot_is_found(run, full):
    run("stats", full)  # one more opening: then there is a snapshot before
    flip(full / "topics/jobs/0/groups/default/snapshot", 20)
    done = run("check", full)
    assert done.code == 1
    assert "snapshot is damaged" in done.out


def segmented(folder: Path, *, settled: int, **changes: Any) -> list[Path]:
    """A queue of twenty messages, of which the first are settled, and its segments, two messages each."""
    with holdfast.open(folder, segment_messages=2, **changes) as queue:
        for n in range(20):
            queue.put(b"%d" % n)
        for message in queue.get_many(settled):
            message.ack()
    return sorted((folder / "topics/jobs/0/log").glob("*.log"))


def without_start(segments: list[Path], count: int) -> None:
    for segment in segments[:count]:
        segment.unlink()
        segment.with_suffix(".idx").unlink()


def test_messages_that_are_missing_at_the_start_are_damage(run, jobs):
    without_start(segmented(jobs, settled=3), 5)
    before = everything(jobs)
    done = run("check", jobs)
    assert done.code == 1
    words = "7 messages (3 to 9) are missing: the log begins at 10, the group had settled only up to 3"
    assert words in done.out
    assert "repair" not in done.out
    (log,) = (log for log in run("check", jobs, "--json").document["logs"] if not log["ok"])
    assert (log["name"], log["wrong"][0].startswith(words)) == ("topics/jobs/0/log", True)
    assert everything(jobs) == before


def test_of_what_is_missing_only_the_unsettled_counts(run, jobs):
    segments = segmented(jobs, settled=1)
    with holdfast.open(jobs) as queue:
        first, second, *others = queue.get_many(9)
        for message in others:
            message.ack()
        second.defer()
        first.ack()
    without_start(segments, 5)
    assert "1 message (of 2 to 9) is missing" in run("check", jobs).out


def test_a_start_that_was_settled_may_be_gone(run, jobs):
    without_start(segmented(jobs, settled=10), 5)
    assert run("check", jobs).code == 0


def test_a_start_that_retention_may_take_by_force_may_be_gone(run, jobs):
    without_start(segmented(jobs, settled=3, retention_ignores_pins=True), 5)
    assert run("check", jobs).code == 0


def test_dead_letters_that_retention_took_are_no_damage(run, jobs):
    with holdfast.open(jobs, segment_messages=1) as queue:
        for n in range(4):
            queue.put(b"%d" % n)
            queue.get().reject("no")
    without_start(sorted((jobs / "topics/jobs.dlq/0/log").glob("*.log")), 2)
    assert run("check", jobs).code == 0


def test_a_group_that_began_late_misses_nothing(run, jobs):
    without_start(segmented(jobs, settled=10), 5)
    shutil.rmtree(jobs / "topics/jobs/0/groups/default")
    (jobs / "topics/jobs/contents").unlink()  # as in a folder of an older release
    with holdfast.open(jobs) as queue:
        assert run("check", jobs).code == 0
        queue.get().ack()
        assert run("check", jobs).code == 0
    assert run("check", jobs).code == 0


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("topics/jobs/0/log", "topics/jobs/0/log is missing; the group had reached 1: its messages are lost"),
        (
            "topics/jobs/0/groups/default",
            "topics/jobs/0/groups/default is missing: which messages were handled is not known",
        ),
        ("topics/jobs/0/groups", "topics/jobs/0/groups/default is missing"),
        ("topics/jobs/0", "topics/jobs/0/log is missing: its messages are lost"),
        ("topics/jobs.dlq/0/log", "topics/jobs.dlq/0/log is missing"),
        ("topics/jobs.dlq/0/groups/default", "topics/jobs.dlq/0/groups/default is missing"),
    ],
)
def test_a_folder_that_is_missing_is_damage(run, full, gone, words):
    shutil.rmtree(full / gone)
    done = run("check", full)
    assert done.code == 1
    assert f"damage  {words}" in done.out
    assert "whole" not in done.out
    document = run("check", full, "--json").document
    assert not document["ok"]
    assert any(what.startswith(words) for what in document["missing"])


def test_a_log_folder_that_was_emptied_is_damage(run, full):
    shutil.rmtree(full / "topics/jobs/0/log")
    (full / "topics/jobs/0/log").mkdir()
    done = run("check", full)
    assert done.code == 1
    assert "topics/jobs/0/log holds no log; the group had reached 1" in done.out


def test_a_log_whose_segments_are_all_gone_is_damage(run, full):
    for segment in (full / "topics/jobs/0/log").glob("*.log"):
        segment.unlink()
    assert run("check", full).code == 1


def test_a_repair_of_a_queue_with_an_owner_is_refused(run, full):
    flip(full / "topics/jobs/0/log" / f"{0:020d}.log", 90)
    with holdfast.open(full):
        assert run("repair", full, "--yes", "--json").error["code"] == "busy"


def test_log_commands_take_a_queue(run, full):
    assert [line["value"] for line in run("log", "dump", full, "--json").lines] == ["a", "b", "c"]
    infos = run("log", "info", full, "--json").document["logs"]
    assert [info["messages"] for info in infos if info["name"].endswith("/0/log")] == [3, 1]
    assert str(full / "topics/jobs/0/log") in run("log", "info", full).out
    assert run("doctor", full, "--seconds", 0.1, "--json").document["holds_queue"] is True


def test_a_log_of_a_queue_that_somebody_owns_is_not_repaired_though_its_files_are_closed(run, jobs):
    with holdfast.open(jobs) as queue:
        queue.put(b"one")
        log = queue._port.deliveries[0].partition.log
        log.roll()
        Path(log.folder, "00000000000000000000.idx").write_bytes(b"spoiled")
        assert log._files.rest(wait=True)
        done = run("repair", log.folder, "--yes")
        assert done.code == 2
        assert f"{jobs} is owned by process" in done.err
        queue.put(b"two")
    assert run("repair", log.folder, "--yes").code == 0
    assert bodies(jobs) == [b"one", b"two"]


def test_a_word_that_is_not_one_of_a_few_is_refused_with_those_that_are(run, jobs):
    run("put", jobs, "x")
    words = run("settings", jobs, "bodies=xml").err
    assert words == "error: bodies='xml' cannot be used: give one of bytes, json, text, or none\n"
    words = run("list", jobs, "gone").err
    assert words.startswith("error: PHASE cannot be 'gone': choose from ready, leased, delayed, dead, done")


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ("max_attempts=abc", "a whole number, 1 or more, or none"),
        ("max_attempts=1.5", "a whole number, 1 or more, or none"),
        ("lease_ms=5x", "a whole number of milliseconds from 1 to 2592000000; or a time such as 30s or 7d"),
        ("retention_bytes=big", "a whole number of bytes, 0 or more, or none; or a size such as 64MiB"),
        ("key_order=yes", "true or false"),
    ],
)
def test_a_value_that_a_setting_cannot_have_is_refused_in_words_of_settings(run, jobs, change, wanted):
    run("put", jobs, "x")
    done = run("settings", jobs, change)
    assert done.code == 2
    assert done.err.startswith(f"error: {change.partition('=')[0]}=")
    assert done.err.endswith(f" cannot be used: give {wanted}\n")


def test_reading_many_dead_letters_shows_progress(run, tmp_path, monkeypatch):
    seen: list[str] = []

    @contextmanager
    def progress(what: str, *_: object, shown: bool):
        seen.append(f"{what} {shown}")
        yield lambda done, total=0: None

    run("put", tmp_path / "jobs", "x")
    monkeypatch.setattr("holdfast.cli.output.progress", progress)
    run("dead", "redrive", tmp_path / "jobs", "--yes")
    run("dead", "purge", tmp_path / "jobs", "--yes", "--json")
    assert seen == ["reading the dead letters True", "reading the dead letters False"]
