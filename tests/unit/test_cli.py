"""The command line: what it prints, where it prints it, and the exit code it ends with."""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast import __version__
from holdfast.cli import output as ask_module
from holdfast.cli.look import log as owner_module
from holdfast.cli.look.log import Dump, owner_of
from holdfast.cli.operate import measure as doctor_module
from holdfast.cli.output import iso_time, preview, safe, size, time_ns_of
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.model import Batch
from holdfast.settings import LogSettings
from holdfast.storage import Log, LogReader
from tests.unit.commands import Done, Run, ended, everything

SMALL = LogSettings(segment_bytes=4096, frame_bytes=1024, min_free_bytes=0)
SECOND = 1_000_000_000
FIRST = f"{0:020d}.log"
NASTY = "\x1b[31mred\x1b[0m \x07bell \x9b2J \u202egnp.exe [bold]x[/bold]"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: object) -> Done:
        return ended(capsys, arguments)

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log of some segments, closed cleanly; message n has the time n seconds after 1970."""
    path = tmp_path / "orders"
    with Log.open(str(path), SMALL) as log:
        for n in range(40):
            values = [b'{"order": %d, "text": "some text that takes room"}' % (n * 3 + k) for k in range(3)]
            log.append(Batch(values=values, times_ns=[(n * 3 + k) * SECOND for k in range(3)]))
    return path


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


def test_version(run):
    assert run("--version") == Done(0, f"holdfast {__version__}\n", "")


@pytest.mark.parametrize("arguments", [[], ["log"]])
def test_without_a_command_there_is_help(run, arguments):
    done = run(*arguments)
    assert done.code == 2
    assert "Usage: holdfast" in done.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["check"],
        ["check", "--nonsense", "x"],
        ["log", "dump", "x", "--offset", "many"],
        ["log", "dump", "x", "--limit", "-1"],
    ],
    ids=shlex.join,
)
def test_a_mistake_in_the_call_is_one_line_on_stderr_and_exit_code_2(run, arguments):
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert "--help" in done.err
    done = run(*arguments, "--json")
    assert (done.code, done.out) == (2, "")
    assert json.loads(done.err)["error"]["code"] == "usage"


@pytest.mark.parametrize("command", ["log info", "log dump", "check", "repair", "doctor"])
def test_a_folder_that_is_not_there_is_one_line_on_stderr_and_exit_code_2(run, tmp_path, command):
    missing = tmp_path / "missing"
    done = run(*command.split(), missing)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: there is no folder {missing}")
    assert done.err.count("\n") == 1
    error = json.loads(run(*command.split(), missing, "--json").err)["error"]
    assert error["code"] == "not_a_log"
    assert str(missing) in error["message"]


@pytest.mark.parametrize("command", ["log info", "log dump", "check", "repair"])
def test_a_folder_or_file_that_is_no_log_is_refused(run, tmp_path, command):
    assert "holds no log" in run(*command.split(), tmp_path).err
    file = tmp_path / "file"
    file.write_text("x")
    done = run(*command.split(), file)
    assert done.code == 2
    assert "is a file" in done.err


def test_info_shows_offsets_segments_owner_and_disk(run, folder):
    done = run("log", "info", folder)
    assert (done.code, done.err) == (0, "")
    assert "120 (offsets 0 to 119)" in done.out
    assert "closed cleanly" in done.out
    assert f"process {os.getpid()}" in done.out
    assert "1970-01-01 00:01:59" in done.out
    assert max(map(len, done.out.splitlines()[1:])) <= 80


def test_info_as_json(run, folder):
    document = run("log", "info", folder, "--json").document
    assert (document["start"], document["end"], document["synced_end"], document["messages"]) == (0, 120, 120, 120)
    assert (document["oldest_time_ns"], document["newest_time_ns"]) == (0, 119 * SECOND)
    assert document["newest_time"] == "1970-01-01T00:01:59.000000000Z"
    assert document["closed"] is True
    assert document["owner"]["alive"] is None
    assert document["epoch"] == 1
    assert document["allocated_bytes"] > 0
    assert document["free_bytes"] > 0
    segments = document["segments"]
    assert len(segments) == len(list(folder.glob("*.log"))) > 1
    assert segments[0]["base_offset"] == 0
    assert [s["next_offset"] for s in segments[:-1]] == [s["base_offset"] for s in segments[1:]]
    assert segments[0]["first_time_ns"] == 0


def test_info_names_a_living_owner(run, folder):
    with Log.open(str(folder), SMALL):
        done = run("log", "info", folder)
        assert f"owner        process {os.getpid()} on " in done.out
        assert run("log", "info", folder, "--json").document["owner"]["alive"] is True


def test_info_of_many_segments_shows_the_first_and_the_last(run, tmp_path):
    folder = tmp_path / "many"
    with Log.open(str(folder), LogSettings(segment_bytes=4096, segment_messages=1, min_free_bytes=0)) as log:
        for _ in range(40):
            log.append([b"x"], durability="os")
    out = run("log", "info", folder).out
    assert "16 more" in out
    assert "40 segments in total" in out
    assert len(out.splitlines()) < 45
    assert len(run("log", "info", folder, "--json").document["segments"]) == 40


def test_info_of_an_empty_log(run, tmp_path):
    Log.open(str(tmp_path / "empty"), SMALL).close()
    assert "none; the next one gets offset 0" in run("log", "info", tmp_path / "empty").out


def test_dump_shows_messages_as_a_table(run, folder):
    done = run("log", "dump", folder)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].split() == ["offset", "time", "(UTC)", "bytes", "value"]
    assert len(lines) == 121
    assert lines[8].split()[:3] == ["7", "1970-01-01", "00:00:07"]
    assert '{"order": 7, ' in lines[8]
    assert max(map(len, lines)) <= 80


def test_dump_from_an_offset_with_a_limit(run, folder):
    lines = run("log", "dump", folder, "--offset", 50, "--limit", 3, "--json").lines
    assert [line["offset"] for line in lines] == [50, 51, 52]
    assert run("log", "dump", folder, "--limit", 0, "--json").lines == []
    assert [line["offset"] for line in run("log", "dump", folder, "--offset", 118, "--json").lines] == [118, 119]
    assert run("log", "dump", folder, "--offset", 120, "--json").lines == []


@pytest.mark.parametrize("when", ["1970-01-01T00:01:40Z", "1970-01-01 00:01:40", "1970-01-01T01:01:40+01:00"])
def test_dump_from_a_time(run, folder, when):
    lines = run("log", "dump", folder, "--from-time", when, "--limit", 1, "--json").lines
    assert [line["offset"] for line in lines] == [100]


def test_a_dump_ends_though_the_owner_goes_on_writing(folder):
    with Log.open(str(folder), SMALL) as log:
        records = Dump(LogReader(str(folder)), as_json=True)._records(100)
        first = next(records)
        log.append([b"later"])
        assert [record.offset for _, record in (first, *records)] == list(range(100, 120))


def test_dump_refuses_offsets_and_times_that_cannot_be(run, folder):
    done = run("log", "dump", folder, "--offset", 121, "--json")
    assert done.code == 2
    assert json.loads(done.err)["error"]["code"] == "offset_out_of_range"
    done = run("log", "dump", folder, "--from-time", "yesterday")
    assert done.code == 2
    assert "is not a time" in done.err
    done = run("log", "dump", folder, "--from-time", "2026-01-01", "--offset", 1)
    assert done.code == 2
    assert "give one of them" in done.err


def test_dump_as_json_gives_text_as_text_and_other_bytes_in_base64(run, tmp_path):
    folder = tmp_path / "log"
    batch = Batch(
        values=["ü\x1b\x7f".encode(), b"\xff\x00"],
        keys=[b"key", b"\xfe"],
        headers=[[("name", b"text"), ("name", b"\xfd")], []],
        times_ns=[1, 1_700_000_000_123_456_789],
        priorities=[7, 0],
        expires_at_ms=[9, 0],
        due_at_ms=[0, 5],
        flags=[1, 0],
    )
    with Log.open(str(folder), SMALL) as log:
        log.append(batch)
    done = run("log", "dump", folder, "--json")
    first, second = done.lines
    assert (first["value"], first["key"]) == ("ü\x1b\x7f", "key")
    assert first["headers"] == [{"name": "name", "value": "text"}, {"name": "name", "value_base64": "/Q=="}]
    assert base64.b64decode(second["value_base64"]) == b"\xff\x00"
    assert base64.b64decode(second["key_base64"]) == b"\xfe"
    assert "value" not in second
    assert (second["timestamp_ns"], second["time"]) == (1_700_000_000_123_456_789, "2023-11-14T22:13:20.123456789Z")
    assert (first["priority"], first["expires_at_ms"], first["flags"], second["due_at_ms"]) == (7, 9, 1, 5)
    assert (first["kind"], first["epoch"], first["bytes"]) == ("data", 1, 4)
    assert done.out.isascii()
    assert not any(character < " " or character == "\x7f" for character in done.out.replace("\n", ""))


def test_dump_never_lets_control_bytes_reach_the_terminal(run, tmp_path):
    folder = tmp_path / "log"
    nasty = NASTY.encode()
    with Log.open(str(folder), SMALL) as log:
        log.append(Batch(values=[nasty, b"\xff\x9b\x1b"], keys=[nasty, None], headers=[[(NASTY, nasty)], []]))
    out = run("log", "dump", folder).out
    assert out.replace("\n", "").isprintable()
    assert "\\x1b[31mred" in out
    assert "\\xff\\x9b\\x1b" in out
    assert safe(NASTY) == "\\x1b[31mred\\x1b[0m \\x07bell \\x9b2J \\u202egnp.exe [bold]x[/bold]"


def test_dump_names_damaged_messages_and_goes_on_behind_them(run, folder):
    flip(folder / FIRST, 200)
    done = run("log", "dump", folder)
    assert done.code == 1
    assert "damaged: 3 messages (offsets 0 to 2)" in done.err
    assert len(done.out.splitlines()) == 118
    lines = run("log", "dump", folder, "--json").lines
    assert lines[0]["damaged"]["first_offset"] == 0
    assert (lines[0]["damaged"]["next_offset"], lines[0]["damaged"]["messages"]) == (3, 3)
    assert "checksum" in lines[0]["damaged"]["reason"]
    assert [line["offset"] for line in lines[1:]] == list(range(3, 120))
    assert run("log", "dump", folder, "--offset", 3).code == 0


def test_check_of_a_whole_log(run, folder):
    done = run("check", folder)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == "ok: 120 messages intact"


def test_check_as_json(run, folder):
    flip(folder / FIRST, 200)
    (folder / "notes.txt").write_text("x")
    done = run("check", folder, "--json")
    assert (done.code, done.err) == (1, "")
    document = done.document
    assert document["ok"] is False
    assert set(document["counts"]) == {"segments", "frames", "messages", "removed", "bytes"}
    damage, note = document["findings"]
    assert damage["severity"] == "damage"
    assert (damage["file"], damage["position"], damage["messages"]) == (FIRST, 0, 3)
    assert (note["severity"], note["file"]) == ("note", "notes.txt")
    assert set(damage) == set(note) == {
        "severity", "code", "file", "position", "first_offset", "next_offset", "messages", "bytes",
        "what", "cost", "next_step",
    }  # fmt: skip


def test_check_says_what_happened_what_it_costs_and_what_to_do(run, folder):
    flip(folder / FIRST, 200)
    done = run("check", folder)
    assert done.code == 1
    assert f"damage  {FIRST}, position 0" in done.out
    assert "cost: 3 messages lost (offsets 0 to 2)" in done.out
    assert f"holdfast repair {folder} --dry-run" in done.out
    assert "\x1b" not in done.out


def test_check_beside_an_owner_says_so(run, folder):
    with Log.open(str(folder), SMALL) as log:
        log.append([b"more"])
        done = run("check", folder)
        assert done.code == 0
        assert "A process owns this log" in done.out
        assert run("check", folder, "--json").document["owned"] is True


def test_names_of_foreign_files_cannot_act_on_the_terminal(run, folder):
    (folder / "\x1b[2Jx").write_text("x")
    (folder / os.fsdecode(b"\xff\xfe")).write_text("x")
    done = run("check", folder)
    assert done.code == 0
    assert "\\x1b[2Jx" in done.out
    assert done.out.replace("\n", "").isprintable()
    assert len(run("check", folder, "--json").document["findings"]) == 2


def test_a_dry_run_shows_the_plan_and_changes_nothing(run, folder):
    flip(folder / FIRST, 200)
    before = everything(folder)
    done = run("repair", folder, "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert "in quarantine and put a gap" in done.out.replace("\n   ", "")
    assert "3 messages given up; nothing is deleted" in done.out
    document = run("repair", folder, "--dry-run", "--json").document
    assert document["plan"]["steps"][0]["action"] == "cover"
    assert (document["changed"], document["backup"]) == (False, None)
    assert everything(folder) == before


def test_a_repair_without_anybody_to_ask_is_refused(run, folder):
    flip(folder / FIRST, 200)
    before = everything(folder)
    for options in ([], ["--json"]):
        done = run("repair", folder, *options)
        assert done.code == 2
        assert "--yes" in done.err
        assert "Nothing was changed" in done.err
    assert everything(folder) == before


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 2), ("", 2)])
def test_a_repair_asks_first(run, folder, monkeypatch, answer, code):
    import io

    flip(folder / FIRST, 200)
    before = everything(folder)
    monkeypatch.setattr(ask_module, "somebody_answers", lambda: True)
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    done = run("repair", folder)
    assert done.code == code
    assert (everything(folder) == before) is (code != 0)
    assert ("Nothing was changed" in done.err) is (code != 0)


def test_a_repair_with_yes_mends_and_says_where_the_originals_are(run, folder):
    flip(folder / FIRST, 200)
    damaged = (folder / FIRST).read_bytes()
    done = run("repair", folder, "--yes")
    assert done.code == 0
    assert "the log is whole again: 117 messages, 3 messages marked as lost" in done.out
    (backup,) = folder.glob("backup-*")
    assert str(backup) in done.out
    assert (backup / FIRST).read_bytes() == damaged
    assert run("check", folder).code == 0
    assert run("repair", folder).out == f"{folder}: nothing to repair\n"
    with Log.open(str(folder), SMALL) as log:
        assert log.append([b"new"]).offset == 120


def test_a_repair_as_json_with_a_backup_elsewhere(run, folder, tmp_path):
    flip(folder / FIRST, 200)
    kept = tmp_path / "kept"
    document = run("repair", folder, "--yes", "--json", "--backup", kept).document
    assert document["changed"] is True
    assert document["backup"] == str(kept)
    assert FIRST in document["backup_files"]
    assert document["after"]["ok"] is True
    assert document["after"]["lost_messages"] == 3
    assert (kept / FIRST).exists()
    assert not list(folder.glob("backup-*"))


def test_a_repair_of_a_log_with_an_owner_is_refused(run, folder):
    flip(folder / FIRST, 200)
    with Log.open(str(folder), SMALL):
        done = run("repair", folder, "--yes", "--json")
    assert done.code == 2
    assert json.loads(done.err)["error"]["code"] == "busy"


def test_doctor_measures_and_leaves_nothing_behind(run, tmp_path):
    done = run("doctor", tmp_path, "--seconds", 0.1)
    assert (done.code, done.err) == (0, "")
    assert "write + sync" in done.out
    assert "one caller at a time: about" in done.out
    assert list(tmp_path.iterdir()) == []


def test_doctor_as_json(run, folder):
    before = everything(folder)
    document = run("doctor", folder, "--seconds", 0.1, "--json").document
    assert set(document) == {
        "folder", "holds_log", "holds_queue", "file_system", "maps", "free_bytes", "min_free_bytes", "sync",
        "puts_per_second", "advice", "warnings",
    }  # fmt: skip
    assert document["holds_log"] is True
    sync = document["sync"]
    assert sync["samples"] > 0
    assert 0 < sync["p50_us"] <= sync["p99_us"] <= sync["max_us"]
    assert document["puts_per_second"] == pytest.approx(1e6 / sync["p50_us"], rel=0.01, abs=1)
    assert everything(folder) == before


class _SlowDisk(SimulatedDisk):
    """A simulated disk on which a sync takes time on a simulated clock."""

    def __init__(self, clock: ManualClock, sync_ms: int, kind: str = "ext4", capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes=capacity_bytes)
        self._kind = kind
        self.make_folder("/data")
        self.on_call = lambda call: clock.advance(ms=sync_ms) if call == "sync" else None

    def kind(self, folder: str) -> str:
        return self._kind


def diagnosis(*, sync_ms: int = 2, kind: str = "ext4", capacity_bytes: int | None = None) -> Any:
    clock = ManualClock()
    disk = _SlowDisk(clock, sync_ms, kind, capacity_bytes)
    found = doctor_module.diagnose(World(clock, disk, SeededIds()), "/data", seconds=1)
    assert disk.names("/data") == []
    return found


def test_doctor_tells_the_rate_that_follows_from_a_sync():
    found = diagnosis(sync_ms=2)
    assert (found.sync.p50_us, found.sync.p99_us, found.sync.max_us) == (2000, 2000, 2000)
    assert found.sync.samples in (499, 500)
    assert found.puts_per_second == 500
    assert "about 500 puts per second" in found.advice[0]
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({"kind": "tmpfs"}, "memory"),
        ({"kind": "nfs4"}, "network"),
        ({"kind": "overlay"}, "container"),
        ({"sync_ms": 80}, "slow_sync"),
        ({"sync_ms": 0}, "fast_sync"),
        ({"capacity_bytes": 1 << 20}, "little_space"),
    ],
)
def test_doctor_warns(facts, code):
    found = diagnosis(**facts)
    assert [warning.code for warning in found.warnings] == [code]
    assert (found.sync is None) is (code == "little_space")


def test_doctor_removes_its_file_when_the_disk_fails():
    clock = ManualClock()
    disk = _SlowDisk(clock, 1)
    disk.faults.fail(20, 5, sticky=False, calls=frozenset({"sync"}))
    with pytest.raises(OSError, match="ordered"):
        doctor_module.diagnose(World(clock, disk, SeededIds()), "/data", seconds=1)
    assert disk.names("/data") == []


def test_a_lock_is_seen_without_being_touched(tmp_path):
    assert owner_of(str(tmp_path)) is None
    log = Log.open(str(tmp_path), SMALL)
    owner = owner_of(str(tmp_path))
    assert owner is not None
    assert (owner.alive, owner.pid) == (True, os.getpid())
    log.close()
    owner = owner_of(str(tmp_path))
    assert owner is not None
    assert (owner.alive, owner.pid) == (None, os.getpid())


def test_an_owner_that_left_no_readable_note(tmp_path):
    (tmp_path / "lock").write_bytes(b"\xff not json")
    owner = owner_of(str(tmp_path), locks=tmp_path / "no such list")
    assert str(owner) == "a process that left no readable note"
    inode = os.stat(tmp_path / "lock").st_ino
    listed = tmp_path / "locks"
    listed.write_text(
        f"1: POSIX  ADVISORY  WRITE 1 08:01:{inode} 0 EOF\n2: FLOCK  ADVISORY  READ 1 08:01:{inode} 0 EOF\n"
    )
    assert owner_module.owner_of(str(tmp_path), locks=listed).alive is None
    listed.write_text(f"1: FLOCK  ADVISORY  WRITE 1 08:01:{inode} 0 EOF\n")
    assert owner_module.owner_of(str(tmp_path), locks=listed).alive is True


def test_an_unexpected_error_is_one_line_too(run, folder, monkeypatch):
    monkeypatch.setattr("holdfast.cli.operate.check.check", lambda *_, **__: 1 / 0)
    done = run("check", folder)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ZeroDivisionError")
    assert done.err.count("\n") == 1


def test_texts():
    assert preview(b"short", 10) == "short"
    assert preview(b"x" * 100, 10) == "x" * 9 + "…"
    assert preview("日本語".encode() * 9, 4) == "日本語…"
    assert size(1023) == "1,023 B"
    assert size(64 * 1024 * 1024) == "64.0 MiB"
    assert iso_time(-1) == "1969-12-31T23:59:59.999999999Z"
    assert iso_time(2**63 - 1) == "2262-04-11T23:47:16.854775807Z"
    assert time_ns_of("2026-01-31T12:00:00.000001Z") % SECOND == 1000


def process(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    source = str(Path(owner_module.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source, "COLUMNS": "80"}
    command = [sys.executable, "-c", "from holdfast.cli.main import main; main()", *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.slow
def test_a_reader_that_goes_away_ends_a_dump_quietly(tmp_path, options):
    folder = tmp_path / "log"
    with Log.open(str(folder), LogSettings(min_free_bytes=0)) as log:
        log.append([b"x" * 100] * 20_000, durability="os")
    dump = process("log", "dump", folder, *options)
    assert dump.stdout is not None
    assert dump.stderr is not None
    dump.stdout.readline()
    dump.stdout.close()
    assert dump.stderr.read() == ""
    assert dump.wait(timeout=60) == 141
    dump.stderr.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.slow
def test_an_interrupted_measurement_removes_its_file_and_says_nothing(tmp_path, number, code):
    doctor = process("doctor", tmp_path, "--seconds", 60)
    give_up = time.monotonic() + 60
    while not list(tmp_path.iterdir()):
        assert time.monotonic() < give_up
        time.sleep(0.01)
    doctor.send_signal(number)
    out, err = doctor.communicate(timeout=60)
    assert (doctor.returncode, out, err) == (code, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_bench_leaves_nothing_behind(tmp_path):
    bench = process("bench", tmp_path)
    give_up = time.monotonic() + 60
    while not list(tmp_path.iterdir()):
        assert time.monotonic() < give_up
        time.sleep(0.01)
    bench.send_signal(signal.SIGINT)
    out, err = bench.communicate(timeout=60)
    assert (bench.returncode, out, err) == (130, "", "")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_the_command_line_is_being_loaded_ends_it_quietly():
    code = """
import sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "holdfast.cli.parsing":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from holdfast.__main__ import run
run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
