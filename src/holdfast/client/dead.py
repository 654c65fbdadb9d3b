"""The dead letters of a queue behind a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Generic

from holdfast.broker.folder.layout import check_topic_name
from holdfast.client.group_face import GroupFace
from holdfast.client.messages import RemoteDeadLetter
from holdfast.client.ways import run
from holdfast.embedded.dead import DeadGroup, Redriven, grouped
from holdfast.embedded.listing import Where, check_limit
from holdfast.embedded.message import Body
from holdfast.errors import InvalidRequest
from holdfast.protocol.dead import DeadGroups, Letter, Purge, Redrive, RedriveTold

_UNLIMITED_S: Final = 24 * 3600.0

list_ = list  # inside the classes the name means their method


class DeadFace(Generic[Body]):
    """What the dead letters for threads and for tasks share."""

    def __init__(self, face: GroupFace[Body]) -> None:
        self._face = face

    async def _list(self, where: Where, limit: int | None) -> list_[RemoteDeadLetter[Body]]:
        found: list_[Any] = await self._face._listed("dead", where, limit)
        return found

    async def _show(self, letter_id: str) -> RemoteDeadLetter[Body]:
        if not isinstance(letter_id, str):
            raise InvalidRequest(f"a dead letter's id is text, not {type(letter_id).__name__}")
        told: Letter = await self._face._ask("GET", f"dead/{letter_id}", Letter, group=self._face.group)
        return RemoteDeadLetter(self._face, told)

    async def _groups(self, where: Where) -> list_[DeadGroup]:
        if callable(where):
            return grouped(await self._list(where, None))  # type: ignore[arg-type]  # it tells the same
        answer: DeadGroups = await self._face._ask(
            "GET", "dead/groups", DeadGroups, where=where, group=self._face.group
        )
        return answer.groups

    async def _redrive(
        self, ids: Any, where: Where, limit: int | None, rate: float | None, to: str | None, *, dry_run: bool
    ) -> Redriven:
        if rate is not None and (type(rate) not in (int, float) or not 0 < rate < float("inf")):
            raise InvalidRequest(f"rate={rate!r} cannot be used: give messages a second, above 0")
        if to is not None:
            check_topic_name(to)
        chosen = await self._chosen(ids, where, limit)
        body = Redrive(**chosen, rate=rate, to=to, dry_run=dry_run, group=self._face.group)
        return await self._act("dead/redrive", body, wait_s=0.0 if rate is None else _UNLIMITED_S)

    async def _purge(self, ids: Any, where: Where, limit: int | None, *, dry_run: bool) -> Redriven:
        chosen = await self._chosen(ids, where, limit)
        return await self._act("dead/purge", Purge(**chosen, dry_run=dry_run, group=self._face.group), wait_s=0.0)

    async def _act(self, verb: str, body: Any, *, wait_s: float) -> Redriven:
        told: RedriveTold = await self._face._ask("POST", verb, RedriveTold, body, again=False, wait_s=wait_s)
        return Redriven(matched=told.matched, done=told.done, ids=told.ids)

    async def _chosen(self, ids: object, where: Where, limit: int | None) -> dict[str, Any]:
        """What to act on. A function is asked here, and its choice told by ids."""
        check_limit(limit)
        if ids is not None:
            if where is not None:
                raise InvalidRequest("give ids or where, not both")
            if not isinstance(ids, Iterable) or isinstance(ids, bytes):
                raise InvalidRequest(f"ids must be ids of dead letters, not {type(ids).__name__}")
            return {"ids": [ids] if isinstance(ids, str) else list_(dict.fromkeys(ids)), "limit": limit}
        if isinstance(where, Callable):  # type: ignore[arg-type]
            return {"ids": [letter.id for letter in await self._list(where, limit)]}
        return {"where": where, "limit": limit}


class RemoteDeadLetters(DeadFace[Body], Generic[Body]):
    """What `queue.dead` is."""

    def list(self, *, where: Where = None, limit: int | None = None) -> list[RemoteDeadLetter[Body]]:
        """The dead letters that the condition chooses, oldest first."""
        return run(self._list(where, limit))

    def show(self, letter_id: str) -> RemoteDeadLetter[Body]:
        """One of them."""
        return run(self._show(letter_id))

    def groups(self, *, where: Where = None) -> list_[DeadGroup]:
        """The dead letters by reason and kind of error, the most frequent first."""
        return run(self._groups(where))

    def redrive(
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
        return run(self._redrive(ids, where, limit, rate, to, dry_run=dry_run))

    def purge(
        self,
        ids: str | Iterable[str] | None = None,
        *,
        where: Where = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        """Drop dead letters for good."""
        return run(self._purge(ids, where, limit, dry_run=dry_run))


class AsyncRemoteDeadLetters(DeadFace[Body], Generic[Body]):
    """The same for tasks."""

    async def list(self, *, where: Where = None, limit: int | None = None) -> list[RemoteDeadLetter[Body]]:
        """The dead letters that the condition chooses, oldest first."""
        return await self._list(where, limit)

    async def show(self, letter_id: str) -> RemoteDeadLetter[Body]:
        """One of them."""
        return await self._show(letter_id)

    async def groups(self, *, where: Where = None) -> list_[DeadGroup]:
        """The dead letters by reason and kind of error, the most frequent first."""
        return await self._groups(where)

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
        return await self._redrive(ids, where, limit, rate, to, dry_run=dry_run)

    async def purge(
        self,
        ids: str | Iterable[str] | None = None,
        *,
        where: Where = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        """Drop dead letters for good."""
        return await self._purge(ids, where, limit, dry_run=dry_run)
