"""`holdfast top`, and what a shell completes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.look import stats as top_module
from holdfast.cli.look.stats import Load, TopicLoad, View, document, load_table
from holdfast.cli.look.stats import LoadSource as FolderSource
from holdfast.errors import Unavailable
from tests.unit.commands import Run, runner


@pytest.fixture
def run(capsys, monkeypatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def shop(tmp_path) -> Path:
    """A folder with a queue in all phases, a group in stream mode, and a topic without a group."""
    folder = tmp_path / "shop"
    with holdfast.open_broker(folder) as broker:
        broker.create_topic("clicks")
        broker.create_topic("orders", partitions=2)
        broker.publish("clicks", b"click")
        for number in range(10):
            broker.publish("orders", b"%d" % number)
        broker.publish("orders", b"later", delay=3600)
        group = broker.group("orders", "billing")
        done, bad, again, *_ = group.receive_many(3, timeout=0)
        done.ack()
        bad.reject("no")
        again.nack()
        with broker.consumer("orders", group="statistics") as consumer:
            consumer.poll(timeout=10)
            consumer.commit()
    return folder


def times(pauses: list[float], count: int, between=lambda: None):
    """A clock on which a command sleeps so many times, until somebody has seen enough."""

    class Clock:
        monotonic = staticmethod(lambda: 100.0 + sum(pauses))

        @staticmethod
        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            between()
            if len(pauses) == count:
                raise KeyboardInterrupt

    return Clock


def test_top_shows_every_phase_of_every_queue(run, shop):
    clicks, orders = run("top", shop, "--once", "--json").document["topics"]
    assert (clicks["name"], clicks["messages"], clicks["groups"]) == ("clicks", 1, [])
    assert (orders["delayed"], orders["dead"], orders["in_per_second"]) == (1, 1, 0.0)
    billing, statistics = orders["groups"]
    assert (billing["name"], billing["mode"], billing["ready"]) == ("billing", "queue", 7)
    assert (billing["leased"], billing["retries"], billing["out_per_second"]) == (0, 1, 0.0)
    assert billing["oldest_seconds"] > 0
    assert (statistics["mode"], statistics["ready"], statistics["oldest_seconds"]) == ("stream", 0, 0.0)


def test_top_for_people_has_a_line_for_each_group(run, shop):
    lines = [line.split() for line in run("top", shop, "--once").out.splitlines()]
    assert lines[0] == ["topic", "group", "ready", "leased", "delayed", "dead", "oldest", "in/s", "out/s", "disk"]
    assert [line[:6] for line in lines[1:]] == [
        ["clicks", "-", "1", "0", "0", "0"],
        ["orders", "billing", "7", "0", "2", "1"],
        ["orders", "statistics", "0", "0", "1", "1"],
    ]


def test_top_looks_beside_an_owner_and_tells_rates(run, shop, monkeypatch):
    pauses: list[float] = []
    with holdfast.open_broker(shop) as broker:
        group = broker.group("orders", "billing")

        def work() -> None:
            for _ in range(4):
                broker.publish("orders", b"new")
            group.ack_many(group.receive_many(2, timeout=10))

        held = group.receive_many(3, timeout=10)
        monkeypatch.setattr(top_module, "time", times(pauses, 3, work))
        done = run("top", shop, "--interval", "500ms", "--topic", "orders", "--json")
        assert (done.code, pauses) == (130, [0.5] * 3)
        topics = [line["topics"][0] for line in done.lines]
        assert [topic["in_per_second"] for topic in topics] == [8.0, 8.0]  # the first frame has rates, too
        assert [topic["groups"][0]["out_per_second"] for topic in topics] == [4.0, 4.0]
        assert [topic["groups"][0]["leased"] for topic in topics] == [len(held)] * 2


def test_top_without_a_screen_prints_one_table_behind_the_other(run, shop, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(top_module, "time", times(pauses, 3))
    done = run("top", shop)
    assert (done.code, pauses) == (130, [0.5, 2.0, 2.0])
    assert done.out.count("2 topics, 2 groups") == 2
    assert done.out.count("billing") == 2


def test_top_goes_on_when_a_look_fails(run, shop, monkeypatch):
    pauses: list[float] = []
    real_look = FolderSource.look

    def look(source: FolderSource) -> Load:
        if len(pauses) == 2:
            raise Unavailable("it changes faster than it can be read")
        return real_look(source)

    monkeypatch.setattr(top_module, "time", times(pauses, 4))
    monkeypatch.setattr(FolderSource, "look", look)
    first, failed, last = run("top", shop, "--json").lines
    assert failed["error"]["code"] == "unavailable"
    assert len(first["topics"]) == len(last["topics"]) == 2
    assert last["topics"][0]["in_per_second"] == 0


class Terminal:
    """A terminal of 80 columns that remembers what was painted."""

    def __init__(self) -> None:
        self.painted: list[str] = []

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("no file")

    def write(self, text: str) -> None:
        self.painted.append(text)

    def flush(self) -> None:
        pass


def test_top_on_a_terminal_shows_its_keys_on_one_line_and_that_it_is_paused(shop, monkeypatch):
    pressed = iter(["/", *"orders", "\n", "r", " ", " ", "/", "x", "\x1b", "q"])
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(top_module.Keys, "pressed", lambda *_: next(pressed))
    monkeypatch.setattr(top_module.Keys, "__enter__", lambda keys: keys)
    monkeypatch.setattr(sys, "stdout", terminal)
    source, view = FolderSource(str(shop), None), View("delayed")
    top_module._watch(source, view, source.look(), 3600.0, as_json=False)
    lines = [line.removesuffix("\x1b[K") for text in terminal.painted for line in text.split("\n")]
    assert max(len(line) for line in lines if "quit" in line) <= 80
    assert lines.count("sorted by delayed, filter orders") == 1
    assert lines.count("sorted by delayed, reversed, filter orders") == 3
    assert sum("paused: space goes on, q quits" in line for line in lines) == 1
    assert view.matching == "orders"  # not the filter that was given up


def test_what_goes_backwards_is_no_rate():
    def load(at_s: float, published: int) -> Load:
        topic = TopicLoad(name="t", messages=1, delayed=0, dead=0, bytes=1, published=published, groups=[])
        return Load(at_s=at_s, topics=[topic])

    assert document("d", load(2, 5), load(1, 10), View())["topics"][0]["in_per_second"] == 0
    assert document("d", load(1, 10), load(1, 5), View())["topics"][0]["in_per_second"] is None
    assert len(load_table(load(2, 5), load(1, 2), View())) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.25, "1.2s"), (59.9, "59s"), (61, "1m01s"), (3_700, "1h01m"), (90_000, "1d01h"), (8_640_000, "100d00h")],
)
def test_ages_are_short(seconds, text):
    assert top_module._age(seconds) == text


def test_top_says_what_is_wrong_with_a_call(run, shop, tmp_path):
    assert "too short" in run("top", shop, "--interval", "1ms").err
    assert "clicks, orders" in run("top", shop, "--topic", "nothing").err
    assert run("top", tmp_path / "nowhere").code == 2


# Completion


def completed(run: Run, monkeypatch: pytest.MonkeyPatch, *words: object, shell: str = "zsh") -> list[str]:
    """What a shell offers for the last word."""
    monkeypatch.setenv("_HOLDFAST_COMPLETE", shell)
    monkeypatch.setenv("_HOLDFAST_LINE", " ".join(["holdfast", *map(str, words)]))
    return run().out.split()


def test_commands_and_options_are_completed(run, monkeypatch):
    assert completed(run, monkeypatch, "to") == ["top", "topic", "token"]
    assert {"create", "ls", "show"} <= set(completed(run, monkeypatch, "topic", ""))
    assert completed(run, monkeypatch, "tail", "jobs", "--fo") == ["--follow"]
    assert completed(run, monkeypatch, "completion", "z") == ["zsh"]
    assert completed(run, monkeypatch, "ls", "jobs", "d") == ["delayed", "dead", "done"]
    assert completed(run, monkeypatch, "put", "jobs", "--durability", "f") == ["fsync"]
    assert completed(run, monkeypatch, "--tr") == ["--trust-folder"]
    assert completed(run, monkeypatch, "help", "p")[-2:] == ["pipeline", "places"]
    assert completed(run, monkeypatch, "help", "dead", "re") == ["redrive"]
    assert completed(run, monkeypatch, "help", "put", "") == []


def test_names_of_topics_and_groups_are_completed(run, monkeypatch, shop):
    assert completed(run, monkeypatch, "tail", shop, "--topic", "") == ["clicks", "orders"]
    assert completed(run, monkeypatch, "tail", shop, "--topic", "o") == ["orders"]
    assert completed(run, monkeypatch, "topic", "show", shop, "c") == ["clicks"]
    assert completed(run, monkeypatch, "topic", "show", "--at", shop, "c") == ["clicks"]
    assert completed(run, monkeypatch, "ls", shop, "--group", "") == ["billing", "statistics"]


def test_queues_at_the_default_place_are_completed(run, monkeypatch, shop):
    monkeypatch.setenv("HOLDFAST_URL", str(shop))
    assert completed(run, monkeypatch, "ls", "o") == ["orders"]
    assert completed(run, monkeypatch, "ls", "./o") == []  # a folder: the shell knows those


def test_where_there_are_no_names_the_shell_is_left_to_itself(run, monkeypatch, tmp_path):
    assert completed(run, monkeypatch, "tail", tmp_path / "nowhere", "--topic", "") == []
    assert completed(run, monkeypatch, "tail", "") == []
    assert completed(run, monkeypatch, "nonsense", "") == []
    assert completed(run, monkeypatch, "put", "jobs", "'an unfinished") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_each_shell_calls_us(run, shell):
    done = run("completion", shell)
    assert done.code == 0
    assert "_HOLDFAST_COMPLETE" in done.out
    assert "_HOLDFAST_LINE" in done.out
    assert run("completion", "cmd").code == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(("line", "found"), [("tail {shop} --topic or", "orders"), ("tai", "tail")])
def test_a_real_bash_completes(run, shop, line, found):
    script = run("completion", "bash").out
    typed = f"holdfast {line.format(shop=shop)}"
    calling = f"{sys.executable} -c 'from holdfast.cli.main import main; main()'"
    code = (
        f'holdfast() {{ {calling} "$@"; }}\n{script}\n'
        f"COMP_LINE='{typed}'; COMP_POINT={len(typed)}\n"
        '_holdfast_complete holdfast; echo "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [found]
