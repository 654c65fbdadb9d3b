# Generated from aio/opening.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""What is in a folder, opened here, for threads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from os import PathLike
from typing import Any

from holdfast.api.bodies import Bodies
from holdfast.api.sync.broker import Broker
from holdfast.api.sync.group import Queue
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.group import QueueGroup
from holdfast.local.opening import open_broker_port
from holdfast.local.sync.broker import LocalBrokerPort
from holdfast.local.sync.group import LocalGroupPort


def queue_here(engine: BrokerEngine, group: QueueGroup, body_type: Any, *, alone: bool = False) -> Queue[Any]:
    """A queue for threads on an engine in this process, which is closed with it where it is `alone` there."""
    return Queue(LocalGroupPort(engine, group, Bodies(body_type), alone=alone))


def open_broker(folder: str | PathLike[str] | None = None, **options: Any) -> Broker:
    """Own the topics in a data folder; `holdfast.open_broker` says what the options mean."""
    return _open_broker_aside(folder, options)


def _open_broker_aside(folder: str | PathLike[str] | None, options: Mapping[str, Any]) -> Broker:
    open_port = partial(open_broker_port, LocalBrokerPort, folder, **options)
    port = open_port()
    return Broker(port)
