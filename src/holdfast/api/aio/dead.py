"""The dead letters of a group, for tasks: look at them, group them, put them back, drop them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic

from holdfast.api.aio.group_port import AsyncGroupPort
from holdfast.api.arguments import check_rate, chosen_ids, switch
from holdfast.api.contents import Body
from holdfast.api.letters import DeadGroup, Redriven
from holdfast.api.listed import DeadLetter, Where, check_limit
from holdfast.broker.folder.layout import check_topic_name
from holdfast.errors import InvalidRequest


class AsyncDeadLetters(Generic[Body]):
    """What `queue.dead` is."""

    def __init__(self, port: AsyncGroupPort) -> None:
        self._port = port

    async def list(self, *, where: Where = None, limit: int | None = None) -> Sequence[DeadLetter[Body]]:
        """The dead letters that the condition chooses, oldest first."""
        found: Any = self._port.messages("dead", where, limit)
        return [letter async for letter in found]  # sync: return list(found)

    async def show(self, letter_id: str) -> DeadLetter[Body]:
        """One of them; NotFound where there is none."""
        if not isinstance(letter_id, str):
            raise InvalidRequest(f"a dead letter's id is text, not {type(letter_id).__name__}")
        return await self._port.letter(letter_id)

    async def groups(self, *, where: Where = None) -> Sequence[DeadGroup]:
        """The dead letters by reason and kind of error, the most frequent first."""
        return await self._port.letter_groups(where)

    async def redrive(
        self,
        ids: str | Iterable[str] | None = None,
        *,
        where: Where = None,
        limit: int | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        to: str | None = None,
    ) -> Redriven:
        """Put dead letters back into the queue, in their original order, each once; `rate` is messages a second.

        With `to` they become new messages of that topic instead, for all who read it.
        """
        check_rate(rate)
        check_limit(limit)
        if to is not None:
            check_topic_name(to)
        chosen = chosen_ids(ids, where)
        return await self._port.redrive(chosen, where, limit, rate, to, dry_run=switch(dry_run, "dry_run"))

    async def purge(
        self,
        ids: str | Iterable[str] | None = None,
        *,
        where: Where = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        """Drop dead letters for good."""
        check_limit(limit)
        return await self._port.purge_letters(chosen_ids(ids, where), where, limit, dry_run=switch(dry_run, "dry_run"))
