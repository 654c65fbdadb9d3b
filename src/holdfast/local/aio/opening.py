"""What is in a folder, opened here, for tasks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from os import PathLike
from typing import Any

from holdfast.api.aio.broker import AsyncBroker
from holdfast.api.aio.group import AsyncQueue
from holdfast.api.aio.opening import AsyncOpening, opened_aside
from holdfast.api.bodies import Bodies
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.group import QueueGroup
from holdfast.local.aio.broker import AsyncLocalBrokerPort
from holdfast.local.aio.group import AsyncLocalGroupPort
from holdfast.local.opening import close_engine, open_broker_port


def queue_here_async(
    engine: BrokerEngine, group: QueueGroup, body_type: Any, *, alone: bool = False
) -> AsyncQueue[Any]:
    """A queue for tasks on an engine in this process, which is closed with it where it is `alone` there."""
    return AsyncQueue(AsyncLocalGroupPort(engine, group, Bodies(body_type), alone=alone))


def open_broker_async(folder: str | PathLike[str] | None = None, **options: Any) -> AsyncOpening[AsyncBroker]:
    """Own the topics in a data folder; `holdfast.open_broker` says what the options mean."""
    return AsyncOpening(_open_broker_aside, folder, options)


async def _open_broker_aside(folder: str | PathLike[str] | None, options: Mapping[str, Any]) -> AsyncBroker:
    open_port = partial(open_broker_port, AsyncLocalBrokerPort, folder, **options)
    port = await opened_aside(open_port, close_engine)  # sync: port = open_port()
    return AsyncBroker(port)


async def open_broker_port_async(  # async only
    folder: str | PathLike[str] | None, **options: Any
) -> AsyncLocalBrokerPort:
    """The port of a data folder, for a server or a protocol of its own."""
    return await opened_aside(partial(open_broker_port, AsyncLocalBrokerPort, folder, **options), close_engine)
