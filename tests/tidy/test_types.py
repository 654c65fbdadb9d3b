"""A user's program is checked against what is installed: the wheel says that it has types, and they fit."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from tests.tidy.repo import ROOT

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
WRONG = """
with holdfast.open("jobs") as queue:
    queue.put(b"x", kye="k")
    queue.receve()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the packages of the wheel, and what they need; its interpreter."""
    place = tmp_path_factory.mktemp("installed")
    venv.create(place, symlinks=True)
    (packages,) = place.glob("lib/python*/site-packages")
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]["wheel"]
    for package in wheel["packages"]:  # all that is in their folders goes into the wheel
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                target = packages / path.relative_to((ROOT / package).parent)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place / "bin" / "python"


def checked(installed: Path, folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(installed), "--config-file="]
    return subprocess.run(
        [*command, f"--cache-dir={folder}", "program.py"], cwd=folder, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_a_small_program_is_well_typed_and_a_mistake_in_it_is_found(installed: Path, tmp_path: Path):
    done = checked(installed, tmp_path, PROGRAM)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["Success: no issues found in 1 source file"])
    mistaken = checked(installed, tmp_path, PROGRAM + WRONG)
    assert mistaken.returncode == 1
    assert 'has no attribute "receve"' in mistaken.stdout
    assert "kye" in mistaken.stdout
