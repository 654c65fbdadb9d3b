"""A user's program is checked against what is installed: the built wheel says that it has types, and they fit."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.tidy.repo import ROOT, files

PROGRAM = """\
import asyncio
import holdfast

def work(queue: holdfast.Queue[bytes]) -> int:
    queue.put(b"resize 1", key="k")
    with queue.get(timeout=5) as message:
        print(message.body.decode(), message.attempt)
    messages = queue.get_many(10, timeout=0)
    queue.ack_many(messages)
    return queue.qsize()

async def tasks(queue: holdfast.aio.AsyncQueue[bytes]) -> int:
    await queue.put(b"resize 2")
    async with await queue.get(timeout=5) as message:
        print(message.id)
    return await queue.qsize()

async def main() -> None:
    async with holdfast.aio.open("jobs") as queue:
        await tasks(queue)
    async with holdfast.aio.open_broker("shop") as broker:
        await tasks(await broker.queue("jobs"))

with holdfast.open("jobs", max_attempts=3) as queue:
    work(queue)
with holdfast.open_broker("shop") as broker, broker.consumer("orders", group="billing") as consumer:
    work(broker.queue("jobs"))
    print([message.body for message in consumer.poll(timeout=1)])
with holdfast.connect("http://127.0.0.1:7700") as server:
    work(server.queue("jobs"))
asyncio.run(main())
"""
THREADS = """\
from collections.abc import Sequence
import holdfast

def work(broker: holdfast.Broker, queue: holdfast.Queue[str]) -> int:
    stored: holdfast.Stored = queue.put("resize 1", key="k", delay=0.5)
    with queue.get(timeout=5) as message, broker.locks.hold("nightly") as lock:
        document: holdfast.Document = broker.documents.update("plan", message.body.upper(), lock=lock)
    letters: Sequence[holdfast.DeadLetter[str]] = queue.dead.list(where="attempts > 1")
    with broker.producer() as producer, broker.consumer("orders", group="billing", body_type=str) as consumer:
        where: holdfast.Stored | None = producer.send("orders", "a").result()
        bodies: list[str] = [each.body for each in consumer.poll(1)]
    return len(stored.id) + document.version + len(letters) + len(bodies) + (where.partition if where else 0)
"""
TASKS = """\
from collections.abc import Sequence
import holdfast

async def work(broker: holdfast.aio.AsyncBroker, queue: holdfast.aio.AsyncQueue[str]) -> int:
    stored: holdfast.Stored = await queue.put("resize 1", key="k", delay=0.5)
    async with await queue.get(timeout=5) as message, broker.locks.hold("nightly") as lock:
        document: holdfast.Document = await broker.documents.update("plan", message.body.upper(), lock=lock)
    letters: Sequence[holdfast.DeadLetter[str]] = await queue.dead.list(where="attempts > 1")
    async with broker.producer() as producer, broker.consumer("orders", group="g", body_type=str) as consumer:
        where: holdfast.Stored | None = await (await producer.send("orders", "a"))
        bodies: list[str] = [each.body for each in await consumer.poll(1)]
    return len(stored.id) + document.version + len(letters) + len(bodies) + (where.partition if where else 0)
"""
WRONG = """
with holdfast.open("jobs") as queue:
    queue.put(b"x", kye="k")
    queue.receve()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it, and what it needs; the folder of its packages."""
    place = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-input", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*build, f"--wheel-dir={place}", str(ROOT)], capture_output=True, text=True, timeout=200)
    if "No matching distribution found for hatchling" in done.stderr:
        pytest.skip("needs hatchling, which builds the wheel, from where pip gets its packages")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = place.glob("holdfast-*.whl")
    venv.create(place, symlinks=True)
    (packages,) = place.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return packages


def checked(installed: Path, folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    python = installed.parents[2] / "bin" / "python"
    command = [sys.executable, "-m", "mypy", "--strict", f"--python-executable={python}", "--config-file="]
    command.append(f"--cache-dir={installed.parents[2] / 'cache'}")  # one for all: the packages stay as they are
    elsewhere = {"PYTHONPATH", "MYPYPATH"}  # where the sources might be found before the wheel
    environ = {name: value for name, value in os.environ.items() if name not in elsewhere}
    return subprocess.run(
        [*command, "program.py"], cwd=folder, env=environ, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_the_wheel_has_all_files_of_its_packages_and_says_that_it_has_types(installed: Path):
    assert (installed / "holdfast" / "py.typed").exists()
    ours = [path for path in files() if path.is_relative_to(ROOT / "src")]
    missing = [str(path) for path in ours if not (installed / path.relative_to(ROOT / "src")).exists()]
    assert missing == []


@pytest.mark.slow
@pytest.mark.parametrize("program", [THREADS, TASKS], ids=["threads", "tasks"])
def test_twelve_lines_of_a_program_are_well_typed_with_the_wheel(installed: Path, tmp_path: Path, program: str):
    assert len(program.splitlines()) == 12
    done = checked(installed, tmp_path, program)
    assert (done.returncode, done.stdout) == (0, "Success: no issues found in 1 source file\n"), done.stdout
    mistaken = checked(installed, tmp_path, program.replace("message.body.upper()", "message.body.uper()"))
    assert 'has no attribute "uper"' in mistaken.stdout  # so the bodies are known to be text


@pytest.mark.slow
def test_a_small_program_is_well_typed_and_a_mistake_in_it_is_found(installed: Path, tmp_path: Path):
    done = checked(installed, tmp_path, PROGRAM)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["Success: no issues found in 1 source file"])
    mistaken = checked(installed, tmp_path, PROGRAM + WRONG)
    assert mistaken.returncode == 1
    assert 'has no attribute "receve"' in mistaken.stdout
    assert "kye" in mistaken.stdout
