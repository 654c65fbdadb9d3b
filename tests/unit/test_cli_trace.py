"""`holdfast trace`: what it draws, prints and refuses, beside whoever owns the folder."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.broker.tracing import TraceStep
from holdfast.broker.tracing.log import TraceLog
from holdfast.cli.look.trace import _lives, life_line, time_text
from holdfast.env import real_world
from tests.unit.commands import Done, Run, ended, everything

MS = 1_000_000
BEGIN_NS = 1_763_287_200_000 * MS
NASTY = "\x1b[31mred\x1b[0m \u202egnp.exe [bold]x[/bold]"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "130")

    def call(*arguments: object) -> Done:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
        return ended(capsys, arguments)

    return call


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


def at(ms: int, step: str, message: str = "jobs-0-0", **more: Any) -> TraceStep:
    return TraceStep(BEGIN_NS + ms * MS, step, message, "jobs", **{"trace_id": "ab" * 16, "span_id": "m", **more})


def written(folder: Path, *steps: TraceStep) -> Path:
    """A folder with these traces."""
    with holdfast.open(folder) as queue:
        queue.put(b"x")
    log = TraceLog.open(real_world(), f"{folder}/topics/__traces/0/log", None)
    log.record(steps)
    log.close()
    return folder


def drawn(*steps: TraceStep, now_ms: int = 0, width: int = 108) -> list[str]:
    return [line.plain for line in life_line(steps, width=width, now_ns=BEGIN_NS + now_ms * MS)]


LIFE = (
    at(0, "published"),
    at(100, "leased", group="billing", holder="ann", attempt=1, span_id="1", until_ms=(BEGIN_NS // MS) + 30_100),
    at(300, "nacked", group="billing", attempt=1, span_id="1", due_ms=(BEGIN_NS // MS) + 800, error="no route\nat x"),
    at(800, "released", group="billing", attempt=1),
    at(900, "leased", group="billing", holder="bob", attempt=2, span_id="2"),
    at(1_000, "acked", group="billing", attempt=2, span_id="2"),
)


def test_a_life_is_drawn_with_a_bar_for_each_lease_and_each_wait():
    assert drawn(*LIFE) == [
        "     0 ms  ●                                           published",
        "   100 ms      ├───────┤                               leased     billing, attempt 1, by ann, until +30.1 s",
        "   300 ms              ✗┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄           nacked     billing, attempt 1, retried at +800 ms",
        "                                                                  no route",
        "   800 ms                                  ○           released   billing, attempt 1",
        "   900 ms                                      ├────┤  leased     billing, attempt 2, by bob",
        "    1.0 s                                           ✓  acked      billing, attempt 2",
    ]


def test_a_lease_that_runs_still_reaches_up_to_now():
    first, last = drawn(at(0, "published"), at(500, "leased", span_id="1"), now_ms=1_000)
    assert first.index("●") == 11
    assert last.count("─") > 10
    assert last.count("▶") == 1


def test_a_lease_whose_end_nobody_wrote_down_is_no_lease_that_runs():
    lines = drawn(
        at(0, "leased", span_id="1"), at(100, "leased", span_id="2"), at(200, "acked", span_id="2"), now_ms=10**9
    )
    assert "200 ms" in lines[-1]
    assert lines[-1].index("✓") > 40


def test_two_groups_hold_a_message_side_by_side():
    first, second, _, _ = drawn(
        at(0, "leased", group="a", span_id="1"),
        at(0, "leased", group="b", span_id="2"),
        at(500, "acked", group="b", span_id="2"),
        at(1_000, "acked", group="a", span_id="1"),
    )
    assert first.count("─") > second.count("─") + 5


def test_a_life_of_one_moment_and_none_at_all():
    assert drawn() == []
    assert [
        line.split()[-1]
        for line in drawn(at(0, "published"), at(0, "leased", span_id="1"), at(0, "acked", span_id="1"))
    ] == [
        "published",
        "leased",
        "acked",
    ]


def test_a_picture_fits_a_narrow_screen_and_shows_nothing_that_acts_on_it():
    lines = drawn(at(0, "published"), at(10**7, "nacked", error=NASTY, holder=NASTY, group=NASTY), width=40)
    assert all(line.isprintable() for line in lines)
    assert "\\x1b[31mred" in lines[-1]


def test_times_for_people():
    ns = [
        0,
        1,
        1_500,
        12 * MS,
        999 * MS,
        1_500 * MS,
        119_000 * MS,
        600_000 * MS,
        3 * 3_600_000 * MS,
        50 * 3_600_000 * MS,
    ]
    assert [time_text(n) for n in ns] == [
        "0 ms",
        "1e-06 ms",
        "0.0015 ms",
        "12 ms",
        "999 ms",
        "1.5 s",
        "119.0 s",
        "10.0 min",
        "3.0 h",
        "2.1 d",
    ]


def test_show_draws_the_life_whichever_argument_comes_first(run, jobs):
    written(jobs, *LIFE)
    done = run("trace", "show", "jobs-0-0", jobs)
    assert done.code == 0
    head, _, *lines = done.out.splitlines()
    assert head == f"jobs-0-0: 2025-11-16 10:00:00 UTC, acked after 1.0 s, taken 2 times; trace {'ab' * 16}"
    assert lines[0].split() == ["0", "ms", "●", "published"]
    assert "no route" in done.out
    assert run("trace", "show", jobs, "jobs-0-0") == done


def test_show_as_json(run, jobs):
    written(jobs, *LIFE)
    found = run("trace", "show", "jobs-0-0", jobs, "--json").document
    assert [step["step"] for step in found["steps"]] == [step.step for step in LIFE]
    assert found["steps"][0] == {
        "time": "2025-11-16T10:00:00.000000000Z",
        "at_ns": BEGIN_NS,
        "step": "published",
        "id": "jobs-0-0",
        "topic": "jobs",
        "trace_id": "ab" * 16,
        "span_id": "m",
    }
    assert found["steps"][2]["error"] == "no route\nat x"


def test_a_redriven_life_names_its_messages(run, jobs):
    written(
        jobs,
        at(0, "published"),
        at(10, "redriven", related="jobs-0-1", group="g"),
        at(10, "published", "jobs-0-1", related="jobs-0-0", why="redriven"),
    )
    out = run("trace", "show", "jobs-0-1", jobs).out
    assert "\njobs-0-0\n" in out
    assert "\njobs-0-1\n" in out
    assert "g, as jobs-0-1" in out
    assert "redriven, it was jobs-0-0" in out


def test_what_cannot_be_shown_says_why(run, jobs, tmp_path):
    assert run("trace", "show", "jobs-0-0", jobs, "--json").error["code"] == "not_a_queue"
    with holdfast.open(jobs) as queue:
        queue.put(b"x")
    missing = run("trace", "show", "jobs-0-0", jobs)
    assert missing.code == 2
    assert "nothing was traced" in missing.err
    assert "trace_sample" in missing.err
    written(jobs, *LIFE)
    assert "there is no trace of jobs-0-7" in run("trace", "show", "jobs-0-7", jobs).err
    assert "ids look like" in run("trace", "show", "nonsense", jobs).err
    assert "did you mean leased" in run("trace", "search", jobs, "--event", "lease").err
    assert run("trace").code == 2


def test_search_by_event_group_error_and_time(run, jobs):
    written(jobs, *LIFE)
    done = run("trace", "search", jobs, "--error", "ROUTE")
    assert done.out == "2025-11-16 10:00:00.300  jobs-0-0                  nacked     billing, attempt 1: no route\n"
    since = run("trace", "search", jobs, "--since", "2025-11-16T10:00:00.850Z", "--group", "billing", "--json").lines
    assert [step["step"] for step in since] == ["leased", "acked"]
    until = run("trace", "search", jobs, "--until", "2025-11-16T10:00:00.300Z", "--limit", 2, "--json").lines
    assert [step["step"] for step in until] == ["published", "leased"]
    assert [s["step"] for s in run("trace", "search", jobs, "--limit", 1, "--last", "--json").lines] == ["acked"]
    nothing = run("trace", "search", jobs, "--topic", "others")
    assert nothing == Done(0, "", "no such step was traced\n")


def test_ls_tells_how_each_message_stands(run, jobs):
    written(jobs, *LIFE, at(2_000, "published", "jobs-0-1"), at(2_500, "buried", "jobs-0-1", why="REJECTED"))
    lines = run("trace", "ls", jobs).out.splitlines()
    assert [line.split()[0] for line in lines] == ["id", "jobs-0-0", "jobs-0-1"]
    assert "acked" in lines[1]
    assert "no route" in lines[1]
    assert "REJECTED" in lines[2]
    (last,) = run("trace", "ls", jobs, "--limit", 1, "--json").lines
    assert (last["id"], last["last"], last["deliveries"], last["seconds"]) == ("jobs-0-1", "buried", 0, 0.5)
    assert run("trace", "ls", jobs, "--topic", "others").err == "no message was traced\n"


def test_an_earlier_message_of_the_same_name_is_another_life():
    steps = [at(0, "published"), at(10, "leased"), at(20, "acked"), at(90, "published"), at(100, "leased")]
    (life,) = _lives(iter(steps))
    assert (life.deliveries, life.ns, life.last.step) == (1, 10 * MS, "leased")


def test_stats_in_numbers(run, jobs):
    written(jobs, *LIFE)
    found = run("trace", "stats", jobs, "--json").document
    assert (found["messages"], found["steps"]["leased"], found["attempts"]) == (1, 2, {"2": 1})
    assert found["handling"]["count"] == 2
    out = run("trace", "stats", jobs, "--group", "billing").out
    assert "first delivery  half within 100 ms" in out
    assert "1 after 2" in out
    assert "no route" in out
    assert run("trace", "stats", jobs, "--topic", "others").out.startswith("messages        0")


def test_traces_are_shown_while_another_owns_the_folder_and_nothing_is_changed(run, jobs):
    holdfast.open(jobs, trace_sample=1.0, durability="os").close()  # the owner of a new folder makes its reserve later
    with holdfast.open(jobs) as queue:
        queue.put(b"x")
        queue.get().ack()
        before = everything(jobs)
        done = run("trace", "show", "jobs-0-0", jobs, "--json")
        assert [step["step"] for step in done.document["steps"]] == ["published", "leased", "acked"]
        assert run("trace", "ls", jobs).code == run("trace", "stats", jobs).code == 0
        assert everything(jobs) == before
