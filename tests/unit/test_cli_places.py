"""Where a command works: said by the argument, by an option, by a profile, or by the environment."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import places
from tests.unit.commands import Run, runner


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    call = runner(capsys, monkeypatch)
    monkeypatch.setenv("HOLDFAST_PROFILES", str(tmp_path / "config" / "profiles.toml"))
    monkeypatch.chdir(tmp_path)
    return call


@pytest.fixture
def jobs(run, tmp_path):
    assert run("put", tmp_path / "jobs", "one").code == 0
    return tmp_path / "jobs"


def bodies(run: Run, *arguments: object) -> list[str]:
    return [each["body"] for each in run(*arguments, "--json").lines]


def test_the_first_argument_says_where_whatever_else_is_set(run, jobs, monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_URL", str(tmp_path / "other"))
    assert run("put", jobs, "two").code == 0
    assert bodies(run, "peek", jobs) == ["one", "two"]
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "words", [["--at", "jobs", "peek"], ["peek", "--at", "jobs"], ["peek", "--at=jobs"], ["--at=jobs", "peek"]]
)
def test_an_option_says_it_before_the_command_or_behind_it(run, jobs, words):
    assert bodies(run, *words) == ["one"]


def test_with_the_option_all_arguments_are_the_commands_own(run, jobs):
    assert run("--at", "jobs", "put", "two", "three").code == 0
    assert bodies(run, "peek", "jobs") == ["one", "two", "three"]
    (message,) = run("get", "--at", "jobs", "--json").lines
    assert run("ack", message["receipt"], "--at", "jobs").code == 0
    assert run("trace", "show", "jobs-0-0", "--at", "jobs").code == 2  # not traced, but found
    assert run("--at", "jobs", "show", "jobs-0-1").code == 0


def test_at_is_a_place_and_due_a_time(run, jobs):
    assert run("put", "jobs", "later", "--due", "+1h").out == "jobs-0-d0\n"
    assert run("--at", "jobs", "put", "later", "--due", "+2h").out == "jobs-0-d1\n"
    assert run("put", "later", "--at", "jobs", "--due", "2127-01-31T09:00").out == "jobs-0-d2\n"
    assert "no server can be reached" in run("put", "x", "--at", "http://127.0.0.1:1", "--wait", 0).err


@pytest.mark.parametrize("time", ["+1h", "2127-01-31T09:00", "2127-01-31T09:00:00Z", "now", "1763287200"])
def test_a_time_behind_at_is_refused_with_the_option_for_it(run, jobs, tmp_path, time):
    done = run("put", "jobs", "later", "--at", time)
    assert (done.code, f"--due {time}" in done.err) == (2, True)
    assert bodies(run, "peek", "jobs") == ["one"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["jobs"]


def test_the_sign_for_the_usual_place_is_no_message_where_an_option_says_where(run, jobs):
    done = run("--at", "jobs", "put", "@", "two")
    assert done.code == 2
    assert "leave out @" in done.err
    assert bodies(run, "peek", "jobs") == ["one"]


def test_what_is_almost_an_address_makes_no_folder(run, tmp_path):
    done = run("put", "localhost:7700/jobs", "one")
    assert done.code == 2
    assert "http://host:port" in done.err
    assert not (tmp_path / "localhost:7700").exists()


@pytest.mark.parametrize("by", ["HOLDFAST_URL", "profile"])
def test_a_plain_name_is_a_queue_at_the_usual_place_and_no_folder(run, tmp_path, monkeypatch, by):
    run("put", "data", "--topic", "jobs", "one")
    if by == "profile":
        run("profile", "add", "here", "data", "--use")
    else:
        monkeypatch.setenv("HOLDFAST_URL", "data")
    assert run("put", "mails", "hello").out == "mails-0-0\n"
    assert bodies(run, "peek", "mails") == ["hello"]
    assert run("stats", "jobs", "--json").document["ready"] == 1
    assert run("show", "mails", "mails-0-0").code == 0
    assert "there is no topic others in" in run("peek", "others").err
    assert "Nothing" not in run("peek", "./data", "--topic", "jobs").err
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        {"data"} | ({"config"} if by == "profile" else set())
    )


def test_a_folder_of_that_name_is_meant_only_when_it_is_written_as_one(run, jobs, monkeypatch, tmp_path):
    run("put", tmp_path / "data", "--topic", "jobs", "at the usual place")
    monkeypatch.setenv("HOLDFAST_URL", str(tmp_path / "data"))
    done = run("peek", "jobs")
    assert "at the usual place" in done.out
    assert "write ./jobs" in done.err
    assert "note" not in run("peek", "jobs", "--json").err
    assert bodies(run, "peek", "./jobs") == bodies(run, "peek", "--at", "jobs") == ["one"]


def test_where_a_queue_can_not_be_meant_a_plain_name_is_refused(run, jobs, monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_URL", "jobs")
    for words in (
        ["topic", "create", "data", "orders"],
        ["topic", "ls", "data"],
        ["lock", "acquire", "data", "nightly"],
    ):
        done = run(*words)
        assert (done.code, "write ./data" in done.err) == (2, True)
    assert run("topic", "create", "./data", "orders").code == 0
    done = run("put", "mails", "x", "--topic", "orders")
    assert (done.code, "give one of them" in done.err) == (2, True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["data", "jobs"]


def test_the_environment_says_it_where_nothing_is_said(run, jobs, monkeypatch):
    assert run("peek").code == 2
    monkeypatch.setenv("HOLDFAST_URL", "jobs")
    assert bodies(run, "peek") == ["one"]
    assert run("put", "@", "two").code == 0
    assert bodies(run, "list", "@", "ready") == ["one", "two"]
    assert bodies(run, "get", "--ack") == ["one"]


def test_an_argument_that_is_needed_for_something_else_is_not_the_place(run, jobs, monkeypatch, tmp_path):
    assert "missing argument" in run("topic", "create", "mails").err
    monkeypatch.setenv("HOLDFAST_URL", "jobs")
    assert run("topic", "create", "mails").code == 0
    assert not (tmp_path / "mails").exists()
    assert run("lock", "acquire", "nightly").code == 0
    assert [each["name"] for each in run("topic", "ls", "--json").lines] == ["jobs", "mails"]
    for place in ("./jobs", "http://127.0.0.1:1", "@"):  # which can be nothing but a place
        assert "missing argument TOPIC" in run("topic", "create", place).err


def test_where_nothing_is_usual_the_sign_for_it_is_an_error(run):
    done = run("peek", "@")
    assert done.code == 2
    assert "HOLDFAST_URL" in done.err


def test_what_settles_a_message_goes_where_it_was_taken_from(run, jobs, monkeypatch, tmp_path):
    (message,) = run("get", jobs, "--json").lines
    monkeypatch.setenv("HOLDFAST_URL", str(tmp_path / "other"))
    monkeypatch.setenv("HOLDFAST_QUEUE", str(jobs))
    monkeypatch.setenv("HOLDFAST_RECEIPT", message["receipt"])
    assert run("ack").out == "acked jobs-0-0\n"


def test_a_profile_is_a_place_with_a_name(run, jobs):
    assert run("profile", "add", "here", "jobs", "--queue", "jobs").code == 0
    assert bodies(run, "--profile", "here", "peek") == ["one"]
    assert bodies(run, "peek", "--profile", "here") == ["one"]
    assert run("peek").code == 2
    assert run("profile", "use", "here").code == 0
    assert bodies(run, "peek") == ["one"]
    (found,) = run("profile", "ls", "--json").lines
    assert (found["place"], found["queue"], found["in_use"]) == (str(jobs), "jobs", True)
    assert run("profile", "rm", "here").code == 0
    assert run("profile", "ls", "--json").lines == []
    done = run("peek", "--profile", "here")
    assert (done.code, "there is no profile here" in done.err) == (2, True)


def test_the_environment_counts_more_than_the_profile_in_use(run, jobs, monkeypatch, tmp_path):
    run("put", tmp_path / "other", "elsewhere")
    run("profile", "add", "here", "jobs", "--use")
    monkeypatch.setenv("HOLDFAST_URL", "other")
    assert bodies(run, "peek") == ["elsewhere"]
    assert bodies(run, "peek", "--profile", "here") == ["one"]


def test_one_way_to_say_it_is_enough(run, jobs):
    run("profile", "add", "here", "jobs")
    assert run("peek", "--at", "jobs", "--profile", "here").code == 2
    assert run("--at", "jobs", "peek", "--at", "jobs").code == 2


def test_tokens_come_from_files_and_are_shown_to_nobody(run, tmp_path):
    (tmp_path / "token").write_text("hf_secret\n")
    made = run("profile", "add", "prod", "https://queue.example:7700", "--token-file", "token", "--tls-ca", "ca.pem")
    assert made.code == 0
    assert run("profile", "add", "test", "http://localhost:7700", "--token-file", "-", stdin=b"hf_other\n").code == 0
    for arguments in (["ls"], ["ls", "--json"]):
        assert "hf_" not in run("profile", *arguments).out
    known = places.read().profiles
    assert (known["prod"].token, known["test"].token) == ("hf_secret", "hf_other")
    assert known["prod"].tls_ca == str(tmp_path / "ca.pem")
    assert stat.S_IMODE(Path(places.path()).stat().st_mode) == 0o600
    (tmp_path / "token").write_text("two words")
    assert run("profile", "add", "prod", "https://queue.example", "--token-file", "token").code == 2


def test_a_broken_file_of_profiles_is_one_line(run, tmp_path):
    Path(places.path()).parent.mkdir()
    Path(places.path()).write_text('[profiles.x]\nplace = "a"\npassword = "b"\n')
    done = run("peek", "--profile", "x")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "password" in done.err


@pytest.mark.parametrize("command", ["check", "serve", "doctor"])
def test_what_works_on_files_is_not_sent_elsewhere(run, command):
    done = run("--at", "http://127.0.0.1:1", command, "jobs")
    assert done.code == 2
    assert "works on files" in done.err


def test_a_command_without_a_place_refuses_one(run):
    assert "does not work at a place" in run("--at", "jobs", "profile", "ls").err


@pytest.mark.slow
def test_a_quick_command_brings_no_server_with_it(jobs):
    code = "import sys; from holdfast.cli.main import main\ntry: main(sys.argv[1:])\nfinally: print(*sys.modules)"
    for arguments in (["--help"], ["peek", str(jobs)], ["put", str(jobs), "x"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        loaded = set(done.stdout.split("\n")[-2].split())
        assert loaded.isdisjoint({"jinja2", "prometheus_client", "uvloop", "opentelemetry", "holdfast.server.server"})
        if arguments != ["--help"]:
            assert "holdfast.cli.pipeline" not in loaded


def test_an_argument_too_many_is_not_answered_with_how_to_name_a_place(run):
    done = run("group", "ls", "data", "jobs")
    assert done.code == 2
    assert "unexpected argument 'jobs'; --help shows the arguments (see" in done.err
