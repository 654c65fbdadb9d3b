"""The words of the command line: help pages, their examples, aliases, and what is loaded for them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from holdfast.cli.main import COMMANDS, ENTRIES, TOPICS, find, tree
from holdfast.cli.output import Column, Console, Table, Text, cut, rows
from holdfast.cli.parsing import Command, Section, UsageError, cells, parts_of
from tests.unit.commands import Run, runner

TREE = tree()


@pytest.fixture
def run(capsys, monkeypatch) -> Run:
    return runner(capsys, monkeypatch)


def test_the_help_lists_every_command_in_its_group_and_fits_80_columns(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = run("--help")
    assert done.code == 0
    for group, entries in COMMANDS.items():
        assert f"\n{group}:\n" in done.out
        for name, entry in entries.items():
            assert any(line.split() == [name, *entry.about.split()] for line in done.out.splitlines()), name
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize("name", TREE)
def test_a_command_has_a_help_page_with_examples_that_can_be_typed(run, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    page = run(*name.split(), "--help")
    assert page.code == 0
    assert page.out == run("help", *name.split()).out
    assert "[[" not in page.out
    assert "range>" not in page.out
    lines = page.out.split("\nExamples:\n")[0].splitlines()
    assert max(map(len, lines)) <= 80
    command = TREE[name]
    examples = [line.strip() for line in page.out.split("\nExamples:\n")[1].splitlines() if line.startswith("  ")]
    assert examples
    for example in examples if isinstance(command, Command) else []:
        words = shlex.split(example.partition(" | ")[0].partition(" < ")[0], comments=True)
        if words[0] == "holdfast" and ">" not in words:
            found, path, rest = find(words[1:])
            assert path == command.path
            assert isinstance(found, Command)
            found.parse(rest, {})


def test_the_summaries_are_those_of_the_commands():
    for name, entry in ENTRIES.items():
        found = TREE[name]
        assert entry.about == (found.about if isinstance(found, Section) else parts_of(found.function.__doc__)[0])


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_is_explained(run, topic):
    done = run("help", topic)
    assert (done.code, done.err) == (0, "")
    assert len(done.out) > 200


def test_an_unknown_word_gets_the_nearest_one(run):
    assert "did you mean put?" in run("putt", "jobs").err
    assert "did you mean --priority?" in run("put", "jobs", "--prioritty", "9").err
    assert "did you mean redrive?" in run("dead", "redrvie", "jobs").err
    assert "did you mean places?" in run("help", "place").err
    assert "did you mean redrive?" in run("help", "dead", "redrvie").err
    assert "did you mean ls?" in run("LS", "jobs").err


def test_an_empty_place_is_not_taken_for_a_folder(run):
    for words in (("stats", ""), ("put", "", "x"), ("--at", "", "stats")):
        done = run(*words)
        assert (done.code, done.out) == (2, "")
        assert "the place is empty" in done.err


def test_a_terminal_without_a_size_is_taken_for_one_of_80_columns(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((0, 0)))
    assert (cells(), rows()) == (80, 24)


def test_list_is_another_name_of_ls(run, tmp_path):
    jobs = tmp_path / "jobs"
    run("put", jobs, "x")
    assert run("list", jobs, "--json").lines == run("ls", jobs, "--json").lines
    assert run("topic", "list", jobs).out.split()[:3] == run("topic", "ls", jobs).out.split()[:3]


def test_done_messages_are_listed_newest_first(run, tmp_path):
    jobs = tmp_path / "jobs"
    run("put", jobs, "one", "two", "three", "four")
    run("get", jobs, "--count", "2", "--ack")
    (bad,) = run("get", jobs, "--json").lines
    run("reject", jobs, bad["receipt"])
    assert [each["body"] for each in run("ls", jobs, "done", "--json").lines] == ["two", "one"]
    assert [each["body"] for each in run("ls", jobs, "done", "--limit", "1", "--json").lines] == ["two"]
    assert [each["body"] for each in run("ls", jobs, "dead", "--json").lines] == ["three"]


def test_json_is_one_object_a_line(run, tmp_path):
    jobs = tmp_path / "jobs"
    run("put", jobs, "x")
    for words in (["stats", jobs], ["topic", "ls", jobs], ["check", jobs], ["settings", jobs], ["group", "ls", jobs]):
        done = run(*words, "--json")
        assert done.out.count("\n") == len(done.lines) == 1


def test_bench_measures_every_call_and_leaves_nothing_behind(run, tmp_path):
    jobs = tmp_path / "jobs"
    run("put", jobs, "x")
    before = sorted(path.name for path in jobs.iterdir())
    rows = run("bench", jobs, "--seconds", "0.05", "--batch", "5", "--json").lines
    assert [(row["operation"], row["durability"], row["batch"]) for row in rows] == [
        (operation, durability, batch)
        for durability in ("os", "fsync")
        for batch in (1, 5)
        for operation in ("put", "get", "ack")
    ]
    assert all(row["messages"] > 0 and row["p50_us"] <= row["p99_us"] <= row["max_us"] for row in rows)
    assert sorted(path.name for path in jobs.iterdir()) == before
    assert [each["body"] for each in run("ls", jobs, "--json").lines] == ["x"]
    assert "messages/s" in run("bench", "--seconds", "0.05").out
    assert run("bench", tmp_path / "nowhere").code == 2


def test_options_are_parsed_as_people_type_them(run, tmp_path):
    jobs = tmp_path / "jobs"
    assert run("put", "--key=a", jobs, "--", "--not-an-option").code == 0
    (message,) = run("ls", jobs, "--json").lines
    assert (message["key"], message["body"]) == ("a", "--not-an-option")
    assert run("consume", "-n1", jobs, "jobs", "--raw").out == "--not-an-option\n"
    assert "takes no value" in run("ls", jobs, "--json=yes").err
    assert "needs a value: --key KEY" in run("put", jobs, "--key").err
    assert "must be from 0 to 9" in run("put", jobs, "x", "--priority", "10").err
    assert "must be a whole number" in run("put", jobs, "x", "--priority", "high").err
    assert "unexpected argument" in run("stats", jobs, "more").err
    with pytest.raises(UsageError):
        find(["nonsense"])


@pytest.mark.parametrize(
    "words",
    [
        ("help", "nothing"),
        ("help", "dead", "nothing"),
        ("ls", "jobs", "--limit", "9" * 30),
        ("ls", "jobs", "--limit", "9" * 5_000),
        ("dead", "redrive", "jobs", "--rate", "inf"),
        ("dead", "redrive", "jobs", "--rate", "nan"),
        ("group", "reset", "jobs", "default", "--to", "9" * 5_000),
        ("produce", "jobs", "jobs", "--batch-bytes", "9" * 5_000),
    ],
)
def test_a_mistake_is_no_bug(run, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert run("put", "jobs", "a").code == 0
    done = run(*words)
    assert (done.code, done.out) == (2, "")
    assert "bug" not in done.err
    assert run(*words, "--json").error["code"] in ("usage", "invalid_request")


def test_words_after_two_dashes_do_not_choose_how_errors_are_told(run):
    assert run("nonsense", "--", "--json").err.startswith("error: ")


@pytest.mark.parametrize("words", ["--help", "ls --help", "--version", "help json", "dead"])
def test_a_reader_that_is_gone_and_a_full_disk_end_in_a_code(words):
    """As with `holdfast --help | head -1`: whoever reads may stop when it has enough."""
    program = [sys.executable, "-m", "holdfast", *words.split()]
    reading, writing = os.pipe()
    os.close(reading)
    gone = subprocess.run(program, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (gone.returncode, gone.stderr) == (141, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


def test_streams_that_the_caller_has_closed_are_no_mistake():
    program = f"exec {sys.executable} -m holdfast --version <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", program], check=False).returncode == 0


def test_a_table_gives_way_in_its_wide_column_only():
    table = Table(Column("id"), Column("error", wide=True), Column("n", right=True))
    table.add_row("a-long-name-that-stays", "many words that do not fit on one line of this terminal", "12")
    lines = [line.plain for line in table.lines(50)]
    assert all(len(line) <= 50 for line in lines)
    assert len(lines) > 2
    assert "a-long-name-that-stays" in lines[1]
    assert cut("日本語", 4) == "日…"


def test_styles_are_for_terminals(monkeypatch, capsys):
    Console(sys.stdout).print(Text.assemble(("ok", "bold green"), ": 3 messages"))
    assert capsys.readouterr().out == "ok: 3 messages\n"
    assert Text("ok", "bold green").painted() == "\x1b[1;32mok\x1b[0m"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (["--help"], {"holdfast.broker.engine", "holdfast.cli.places", "asyncio"}),
        (["help", "places"], {"holdfast.broker.engine"}),
        (["backup", "--help"], {"holdfast.client.backups", "asyncio"}),
        (["put", "jobs", "x"], {"holdfast.cli.serve", "holdfast.cli.look.stats", "holdfast.server.server"}),
    ],
    ids=["help", "topic", "backup", "put"],
)
def test_a_command_loads_no_other_and_no_framework(tmp_path, words, absent):
    code = "import sys; from holdfast.cli.main import main\ntry: main(sys.argv[1:])\nfinally: print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {*absent, "typer", "click", "rich", "rich.console", "pydantic", "holdfast.cli.pipeline"}
