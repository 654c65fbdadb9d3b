"""Large messages and death: a stream is stored as a whole or not at all, wherever it is cut."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import holdfast
from holdfast.settings import LogSettings
from holdfast.storage import open_log
from holdfast.storage.checks.check import check
from tests.crash.writer_process import started

MIB = 1 << 20
PATIENCE_S = 60


def content(seed: int, mebibytes: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    block = rng.randbytes(MIB)
    for n in range(mebibytes):
        yield b"%16d" % n + block[16:]


def digest(pieces: Iterator[bytes]) -> str:
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def stream_until_killed(folder: str, seed: int, mebibytes: int, tell: Connection) -> None:
    """Put large messages for ever; tell of every piece that is asked for and of every message that is stored."""
    q = holdfast.open(folder, max_message_bytes=512 * MIB)
    while True:
        tell.send("begin")

        def pieces() -> Iterator[bytes]:
            for piece in content(seed, mebibytes):
                tell.send("piece")
                yield piece
            tell.send("all")

        q.put_stream(pieces(), key="k", headers={"seed": str(seed)})
        tell.send("stored")


@pytest.mark.slow
@pytest.mark.parametrize("mebibytes", [3, 24], ids=["beside others", "apart"])
def test_a_stream_that_is_killed_is_there_as_a_whole_or_not_at_all(tmp_path, mebibytes, scale):
    rng = random.Random(mebibytes)
    stored, expected = 0, digest(content(mebibytes, mebibytes))
    for _ in range(scale(12, 300)):
        here, there = Pipe(duplex=False)
        begun = 0
        with started(stream_until_killed, str(tmp_path), mebibytes, mebibytes, there) as process:
            # Some time after a moment that is sampled: often within a write, a sync, or the taking over of the file.
            for _ in range(rng.randint(1, 2 * (mebibytes + 3))):
                assert here.poll(PATIENCE_S)
                word = here.recv()
                begun += word == "begin"
                stored += word == "stored"
                begun -= word == "stored"
            process.join(rng.random() * 0.02)
            process.kill()
            process.join()
        while here.poll(0):
            try:
                word = here.recv()
            except EOFError:
                break
            begun += word == "begin"
            stored += word == "stored"
            begun -= word == "stored"
        with holdfast.open(tmp_path) as q:
            assert not list(tmp_path.rglob("spool*"))
            ready = q.stats().ready
            assert stored <= ready <= stored + begun
            stored = ready
    with holdfast.open(tmp_path) as q:
        for _ in range(stored):
            with q.get() as message:
                assert message.headers["seed"] == str(mebibytes)
                assert digest(iter(message.chunks())) == expected
        assert q.stats().ready == 0
    assert check(str(next(tmp_path.rglob("log")))).ok


def test_wherever_the_file_of_a_large_message_is_cut_nothing_is_half_there(tmp_path):
    value = random.Random(1).randbytes(17 * MIB)
    settings = LogSettings(max_message_bytes=64 * MIB, durability="os")
    with open_log(tmp_path / "whole", settings) as log:
        log.append([b"before"])
        log.sync()
        # The keeper may sync the large message before the files are copied, and what was synced cannot be cut.
        state = (tmp_path / "whole" / "state").read_bytes()
        log.append([value])
        path = tmp_path / "whole" / "00000000000000000001.log"
        whole = path.read_bytes()
        others = {each.name: each.read_bytes() for each in (tmp_path / "whole").iterdir() if each != path}
        others["state"] = state
    rng = random.Random(2)
    cuts = [0, 1, 87, 88, 89, 96, len(whole) - 8, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(12))]
    for cut in cuts:
        folder = tmp_path / f"cut-{cut}"
        folder.mkdir()
        for name, held in others.items():
            (folder / name).write_bytes(held)
        (folder / path.name).write_bytes(whole[:cut])
        with open_log(folder, settings) as log:
            assert log.end == 1
            assert [record.value for record in log.records(0)] == [b"before"]
            assert not log.report.damage
            log.append([b"behind"])
            assert [record.value for record in log.records(0)] == [b"before", b"behind"]
        assert check(str(folder)).ok


def test_a_flipped_byte_anywhere_in_a_large_message_is_found(tmp_path):
    value = random.Random(3).randbytes(17 * MIB)
    settings = LogSettings(max_message_bytes=64 * MIB)
    rng = random.Random(4)
    with open_log(tmp_path, settings) as log:
        log.append([value])
        log.append([b"next"])
    path = tmp_path / "00000000000000000000.log"
    for at in [96, 100, *(rng.randrange(100, len(value)) for _ in range(4))]:
        flip(path, at)
        assert not check(str(tmp_path)).ok
        flip(path, at)
        assert check(str(tmp_path)).ok


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0xFF]))


MEASURED = """
import hashlib, sys, threading
from pathlib import Path

import holdfast
from holdfast.storage.checks.check import check

MIB = 1 << 20
folder, mebibytes = sys.argv[1], int(sys.argv[2])
block = bytes(range(256)) * 4096


def anonymous() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024


def pieces():
    for n in range(mebibytes):
        yield n.to_bytes(8, "little") + block[8:]


def digest(pieces):
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


with holdfast.open(folder, max_message_bytes=1024 * MIB, backoff_ms=0) as q:
    q.put_stream([bytes(2 * MIB)])
    with q.get() as message:
        digest(message.chunks())
    expected = digest(pieces())
    base = peak = anonymous()
    done = threading.Event()

    def watch():
        global peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    q.put_stream(pieces(), key="k")
    q.get().reject("no good")
    q._port.engine.tick()
    (letter,) = q.dead.list()
    with letter.open() as file:
        assert digest(iter(lambda: file.read(100_000), b"")) == expected
    assert q.dead.redrive().done == 1
    with q.get() as message:
        assert message.size == mebibytes * MIB
        assert digest(message.chunks()) == expected
    q.put_stream(pieces(), delay=0.5)
    with q.get(timeout=60) as message:
        assert digest(message.chunks()) == expected
(log,) = Path(folder).glob("topics/q/0/log")
assert check(log).ok
done.set()
watcher.join()
print((peak - base) / MIB)
"""


@pytest.mark.slow
@pytest.mark.serial
def test_a_message_of_hundreds_of_megabytes_takes_a_few_of_memory(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "q"), "300"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONMALLOC": "malloc"},
    )
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 8
