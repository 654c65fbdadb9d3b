"""Rows that Spark has staged in the folder: its owner appends them to the log."""

from __future__ import annotations

import asyncio
from typing import Final
from weakref import WeakKeyDictionary

import msgspec

from holdfast.broker.engine import BrokerEngine
from holdfast.client.calling import Ask, Caller, packed, path_of
from holdfast.client.network import ThreadNetwork, run
from holdfast.client.opening import Address
from holdfast.client.shared_folder import socket_of
from holdfast.env import World
from holdfast.env.sockets import absolute, answers_at
from holdfast.server.routing import Routes
from holdfast.server.service import Call
from holdfast.spark.commits import CommitRequest, commit

_LONGEST_S: Final = 24 * 3600.0

routes = Routes("staged")
_turns: Final[WeakKeyDictionary[BrokerEngine, asyncio.Lock]] = WeakKeyDictionary()


class RowsCommitted(msgspec.Struct):
    """Whether the rows came into the log by this call, or were there already."""

    fresh: bool


@routes.add("POST", "/v1/staged", action="admin", body=CommitRequest, answers=RowsCommitted, hidden=True)
async def commit_staged(call: Call) -> RowsCommitted:
    """Bring staged rows into the log, one write after the other, as if each owned the folder."""
    engine = call.service.engine
    async with _turns.setdefault(engine, asyncio.Lock()):
        return RowsCommitted(fresh=await asyncio.to_thread(commit, engine, call.body))


def is_shared(folder: str) -> bool:
    """Return whether a process owns the folder and shares it."""
    return answers_at(socket_of(absolute(folder)))


def commit_there(world: World, folder: str, write: CommitRequest) -> bool:
    """Have the owner do it. A write that is remembered may be repeated; any other is sent once."""
    address = Address(text=folder, socket=socket_of(absolute(folder)))
    caller = Caller(world, ThreadNetwork(world.clock), address)
    ask = Ask(
        method="POST",
        path=path_of("staged"),
        body=packed(write),
        answers=RowsCommitted,
        again=write.kept,
        wait_s=_LONGEST_S,
    )
    try:
        done: RowsCommitted = run(caller.call(ask))
    finally:
        caller.close()
    return done.fresh
