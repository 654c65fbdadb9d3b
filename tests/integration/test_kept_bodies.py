"""What bodies are is kept with the queue by whoever opens it with a type first, and workers hand them out as that."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import aio
from tests.integration.http_gear import serving

PATIENCE_S = 60


def opened(folder: Path, body_type: Any) -> None:
    holdfast.open(folder, body_type=body_type).close()


def opened_by_a_task(folder: Path, body_type: Any) -> None:
    async def story() -> None:
        async with aio.open(folder, body_type=body_type):
            pass

    asyncio.run(story())


def opened_beside_the_owner(folder: Path, body_type: Any) -> None:
    with holdfast.open(folder), holdfast.open(folder, body_type=body_type):
        pass


def made_by_a_broker(folder: Path, body_type: Any) -> None:
    with holdfast.open_broker(folder, body_type=body_type) as broker:
        broker.create_topic("jobs")


def opened_by_a_broker(folder: Path, body_type: Any) -> None:
    with holdfast.open_broker(folder) as broker:
        broker.queue("jobs", body_type=body_type)


def opened_at_a_server(folder: Path, body_type: Any) -> None:
    with serving(folder) as server, holdfast.connect(server.url) as broker:
        broker.queue("jobs", body_type=body_type)


OPENERS = [opened, opened_by_a_task, opened_beside_the_owner, made_by_a_broker, opened_by_a_broker, opened_at_a_server]


def kept(folder: Path) -> object:
    with holdfast.open_broker(folder) as broker:
        return broker.describe_topic("jobs").settings.get("bodies")


@pytest.mark.parametrize(("body_type", "kind"), [(None, None), (bytes, "bytes"), (str, "text"), (dict, "json")])
@pytest.mark.parametrize("opener", OPENERS)
def test_the_first_type_is_kept(tmp_path: Path, opener: Callable[[Path, Any], None], body_type: Any, kind: str | None):
    folder = tmp_path / "jobs"
    opener(folder, body_type)
    assert kept(folder) == kind
    opened(folder, str)
    assert kept(folder) == (kind or "text")  # what was said first holds


def handled(**options: Any) -> object:
    """What a handler gets as the body."""
    got: list[object] = []
    done = threading.Event()

    def handle(message: Any) -> None:
        got.append(message.body)
        done.set()

    with holdfast.Worker(handle, poll=0.05, **options):
        assert done.wait(PATIENCE_S)
    return got[0]


@pytest.mark.parametrize("body_type", [None, bytes])
@pytest.mark.parametrize("by", ["folder", "name", "url"])
def test_a_worker_hands_out_what_was_put_unless_it_is_told(tmp_path: Path, by: str, body_type: Any):
    folder = tmp_path / "jobs"
    with holdfast.open(folder, body_type=dict) as queue:
        queue.put({"task": 1})
    options = {} if body_type is None else {"body_type": body_type}
    wanted = {"task": 1} if body_type is None else b'{"task":1}'
    if by == "folder":
        assert handled(queue=folder, **options) == wanted
    elif by == "name":
        assert handled(queue="jobs", at=folder, **options) == wanted
    else:
        with serving(folder) as server:
            assert handled(queue=f"{server.url}/jobs", **options) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("option", "type_name"), [([], "dict"), (["--body-type", "text"], "str")])
def test_the_command_can_be_told_what_bodies_are(tmp_path: Path, option: list[str], type_name: str):
    (tmp_path / "shop.py").write_text(
        "import os, pathlib, signal\n"
        "def handle(message):\n"
        "    pathlib.Path('type').write_text(type(message.body).__name__)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    with holdfast.open(tmp_path / "jobs", body_type=dict) as queue:
        queue.put({"task": 1})
    words = [sys.executable, "-m", "holdfast", "worker", "shop:handle", "--at", "jobs", *option]
    subprocess.run(words, cwd=tmp_path, env=dict(os.environ), check=True, timeout=PATIENCE_S, capture_output=True)
    assert (tmp_path / "type").read_text() == type_name
