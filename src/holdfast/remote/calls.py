"""Calls to a server, for tasks and for threads: the one core of the transport, awaited or run to its end."""

from __future__ import annotations

from typing import Any

from holdfast.client.calling import Caller, packed
from holdfast.client.http import Ask
from holdfast.client.ways import run


class AsyncCalls:
    """The calls of tasks."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    async def call(self, ask: Ask) -> Any:
        """The answer's value; what the server refuses is raised."""
        return await self.caller.call(ask)

    async def ask(self, method: str, path: str, answers: Any, body: Any = None, *, wait_s: float = 0.0) -> Any:
        """The same for a body that is one of the wire's values."""
        return await self.caller.call(ask_of(method, path, answers, body, wait_s))


class Calls:
    """The calls of threads."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    def call(self, ask: Ask) -> Any:
        """The answer's value; what the server refuses is raised."""
        return run(self.caller.call(ask))

    def ask(self, method: str, path: str, answers: Any, body: Any = None, *, wait_s: float = 0.0) -> Any:
        """The same for a body that is one of the wire's values."""
        return run(self.caller.call(ask_of(method, path, answers, body, wait_s)))


def ask_of(method: str, path: str, answers: Any, body: Any = None, wait_s: float = 0.0) -> Ask:
    """The request for a call whose body is one of the wire's values."""
    content = b"" if body is None else packed(body)
    return Ask(method=method, path=path, body=content, answers=answers, wait_s=wait_s)
