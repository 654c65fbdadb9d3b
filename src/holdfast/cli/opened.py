"""Owning a queue for as long as one command takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import holdfast
from holdfast.broker.layout import TOPICS, partition_folder, topics
from holdfast.cli.options import WAIT
from holdfast.embedded.times import parse_duration
from holdfast.env import real_world
from holdfast.errors import Busy, NotAQueue
from holdfast.storage.files import join
from holdfast.storage.opening import is_log

_LOOK_EVERY_S: Final = 0.02


@contextmanager
def opened(
    folder: str, *, wait: str | float = WAIT, create: bool = False, **changes: Any
) -> Iterator[holdfast.Queue[bytes]]:
    """The queue, with everything done that is due by now. Another short command may have it first; we wait a little."""
    wait_s = parse_duration(wait, "--wait") if isinstance(wait, str) else wait
    if not create:
        topic_of(folder)
    with _owned(folder, wait_s, create=create, changes=changes) as queue:
        queue._engine.tick()
        yield queue


def _owned(folder: str, wait_s: float, *, create: bool, changes: dict[str, Any]) -> holdfast.Queue[bytes]:
    give_up = time.monotonic() + wait_s
    while True:
        try:
            return holdfast.open(folder, create=create, **changes)
        except Busy:
            if time.monotonic() >= give_up:
                raise
            time.sleep(_LOOK_EVERY_S)


def is_queue(folder: str) -> bool:
    """Whether the folder holds a queue."""
    try:
        return bool(topics(real_world(), folder))
    except OSError:
        return False


def topic_of(folder: str) -> str:
    """The name of the queue's topic; NotAQueue where there is none."""
    world = real_world()
    disk = world.disk
    found = topics(world, folder)
    if found:
        return found[0]
    if not disk.exists(folder):
        raise NotAQueue(f"there is no folder {folder}; `holdfast put` makes a queue")
    if is_log(world, folder):
        raise NotAQueue(f"{folder} holds a log and no queue; look into it with `holdfast log`")
    raise NotAQueue(f"{folder} holds no queue; name the folder that `holdfast put` made, the one with {TOPICS}/ in it")


def log_of(folder: str) -> str:
    """Where the messages of a queue lie, for those who only read."""
    return join(partition_folder(folder, topic_of(folder)), "log")
