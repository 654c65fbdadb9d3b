"""The apps of the guide for web apps, behind real servers with several processes; the owner is killed meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

import pytest

import holdfast
from tests.tidy import markdown
from tests.tidy.repo import ROOT
from tests.tidy.served import shell_environment

PAGE = (ROOT / "docs" / "how-to" / "web-apps.md").read_text("utf-8")
PATIENCE_S = 120  # only what hangs takes so long

COMMANDS = [
    line
    for block in markdown.blocks(PAGE)
    if block.language == "text"
    for line in block.code.splitlines()
    if line.startswith(("uvicorn", "gunicorn"))
]

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the programs of the page, each under the name that its first line says."""
    for block in markdown.blocks(PAGE):
        if named := re.match(r"# (\w+\.py)\n", block.code):
            (tmp_path / named[1]).write_text(block.code)
    return tmp_path


def test_the_page_shows_each_server():
    programs = [command.split()[0:2] for command in COMMANDS]
    assert programs == [
        ["uvicorn", "fastapi_app:app"],
        ["gunicorn", "flask_app:app"],
        ["gunicorn", "flask_app:app"],
        ["gunicorn", "django_app:application"],
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_order_that_was_answered_is_handled_once_though_the_owner_is_killed(command: str, folder: Path):
    orders = range(60)
    survives = "--preload" not in command  # otherwise gunicorn itself owns the folder, and ends with it
    with serving(command, folder) as address, ThreadPoolExecutor(8) as pool:
        post(address, 0)
        first = [pool.submit(post, address, number, insist=survives) for number in orders[:30]]
        os.kill(owner_of(folder / "orders"), signal.SIGKILL)
        answered = [number for number, each in enumerate(first) if each.result()]
        if survives:
            answered += [number for number in orders[30:] if post(address, number)]
    if not survives:
        with serving(command, folder) as address:
            answered += [number for number in orders if number not in answered and post(address, number)]
    assert sorted(answered) == list(orders)
    assert handled(folder, len(orders)) == Counter(orders)


def post(address: str, number: int, *, insist: bool = True) -> bool:
    """Send an order, again and again until it is answered; its key makes it the same order each time."""
    request = urllib.request.Request(
        f"{address}/orders",
        data=json.dumps({"order": number}).encode(),
        headers={"Content-Type": "application/json", "Idempotency-Key": f"order-{number}"},
        method="POST",
    )
    for _ in patiently("the server answers"):
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return bool(answer.status == 202)
        except (OSError, HTTPException) as error:  # the process that had it was killed
            if isinstance(error, urllib.error.HTTPError):
                raise AssertionError(error.read().decode()) from error
            if not insist:
                return False
    return False


def owner_of(queue: Path) -> int:
    """The process that owns the folder: whoever may not open it for himself alone is told."""
    for _ in patiently("a process owns the folder"):
        try:
            holdfast.open(queue, create=False, share=False).close()
        except holdfast.Busy as busy:
            if found := re.search(r"process (\d+)", str(busy)):
                return int(found[1])
    raise AssertionError


@contextmanager
def serving(command: str, folder: Path) -> Iterator[str]:
    """A server as the page starts it, on a free port; gives its address. Its processes are a group of their own."""
    program, *arguments = command.split()
    port = ["--port", "0"] if program == "uvicorn" else ["--bind", "127.0.0.1:0"]
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", program, *arguments, *port],
            cwd=folder,
            env=shell_environment(),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        for _ in patiently("the server listens"):
            assert process.poll() is None, log.read_text()
            if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
                break
        yield found[0]
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)
        with suppress(ProcessLookupError):  # if it was killed, its workers may still be about to notice
            os.killpg(process.pid, signal.SIGKILL)


def handled(folder: Path, count: int) -> Counter[int]:
    """What the worker of the page handles: it ends after as many messages, and leaves none behind."""
    (command,) = {line for line in markdown.code(PAGE).splitlines() if line.startswith("holdfast worker shop:handle")}
    done = folder / "handled.txt"
    worker = subprocess.Popen([sys.executable, "-m", *command.split()], cwd=folder, env=shell_environment())
    try:
        for _ in patiently("the worker handles every order"):
            if done.exists() and len(done.read_text().splitlines()) >= count:
                break
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=PATIENCE_S) == 0
    finally:
        worker.kill()
        worker.wait()
    with holdfast.open(folder / "orders", body_type=dict) as queue:
        assert (queue.qsize(), queue.stats().dead) == (0, 0)
    return Counter(map(int, done.read_text().split()))


def patiently(what: str) -> Iterator[None]:
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        yield
        time.sleep(0.05)
    pytest.fail(f"waited for {PATIENCE_S} s until {what}", pytrace=False)
