"""Readers that wait for another process: woken by the kernel, with nothing lost and no turning in circles."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.env import real_world
from holdfast.storage import LogReader, open_log
from holdfast.storage.reader import Arrivals, FollowSettings

# Only a sign can wake a reader in time: a test in which one is missed ends by its timeout.
NO_POLLING = FollowSettings(poll_interval_ms=3_600_000, safety_poll_ms=3_600_000)
PATIENCE_S = 120

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")

ON_DEMAND = """
import sys
from holdfast.settings import LogSettings
from holdfast.storage import open_log
with open_log(sys.argv[1], LogSettings(durability=sys.argv[2])) as log:
    print("open", flush=True)
    for line in sys.stdin:
        log.append_one(line.strip().encode())
"""

IN_BURSTS = """
import random, sys, time
from holdfast.settings import LogSettings
from holdfast.storage import open_log
chance = random.Random(int(sys.argv[2]))
with open_log(sys.argv[1], LogSettings(durability="os")) as log:
    print("open", flush=True)
    sent = 0
    while sent < int(sys.argv[3]):
        for _ in range(chance.choice([1, 1, 1, 2, 5, 50])):
            log.append_one(b"%d" % sent)
            sent += 1
        time.sleep(chance.choice([0, 0, 0.00005, 0.0003, 0.001]))
    sys.stdin.read()  # closing would be a sign, too
"""


@contextmanager
def running(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Another process, once it has said that it is ready."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_reader_that_sleeps_is_woken_by_another_process_and_looks_a_few_times_only(tmp_path, durability):
    folder, rounds = tmp_path / "log", 50
    with running(ON_DEMAND, folder, durability) as owner, Arrivals(real_world(), NO_POLLING) as arrivals:
        reader = LogReader(folder)
        for number in range(rounds):
            notified = False

            def news(number: int = number) -> bool:
                nonlocal notified
                found = reader.end > number
                if not notified:
                    notified = True
                    tell(owner, str(number))  # after the look, before the sleep
                return found

            assert arrivals.wait([reader], news, timeout_s=PATIENCE_S)
        assert arrivals.watching
        assert arrivals.looks <= 3 * rounds
        assert [record.value for record in reader.records(0)] == [b"%d" % number for number in range(rounds)]


@pytest.mark.parametrize("seed", [1, 2])
def test_no_sign_is_missed_however_messages_and_looks_fall_together(tmp_path, seed):
    count = 5_000
    with running(IN_BURSTS, tmp_path / "log", seed, count):
        following = LogReader(tmp_path / "log").follow(0, timeout=PATIENCE_S, settings=NO_POLLING)
        for number in range(count):
            assert next(following).value == b"%d" % number
        following.close()


def test_several_readers_are_woken_by_one_sign(tmp_path):
    with running(ON_DEMAND, tmp_path / "log", "os") as owner:
        readers = [LogReader(tmp_path / "log") for _ in range(3)]
        following = [reader.follow(timeout=PATIENCE_S, settings=NO_POLLING) for reader in readers]
        for number in range(20):
            tell(owner, str(number))
            assert [next(each).value for each in following] == [b"%d" % number] * 3


def test_a_reader_goes_on_with_the_next_owner_when_the_first_was_killed(tmp_path):
    with running(ON_DEMAND, tmp_path / "log", "os") as owner:
        following = LogReader(tmp_path / "log").follow(timeout=PATIENCE_S, settings=NO_POLLING)
        tell(owner, "one")
        assert next(following).value == b"one"
        owner.kill()
        owner.wait()
    with running(ON_DEMAND, tmp_path / "log", "os") as owner:
        tell(owner, "two")
        assert next(following).value == b"two"


def test_a_reader_that_waits_changes_one_word_and_no_more(tmp_path):
    with open_log(tmp_path / "log") as log:
        log.append_one(b"x")
        before = {path.name: path.read_bytes() for path in (tmp_path / "log").iterdir()}
        assert len(list(LogReader(tmp_path / "log").follow(0, timeout=0))) == 1
        after = {path.name: path.read_bytes() for path in (tmp_path / "log").iterdir()}
        state, asked = before.pop("state"), after.pop("state")
        assert after == before
        assert asked == state[:32] + (1).to_bytes(8, "little") + state[40:]
