"""Calls in the audit log: what of a call is written down, and when."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec

from holdfast.errors import Forbidden, HoldfastError
from holdfast.server.audit import DONE, Audit
from holdfast.server.calls import Call


class CallAuditor:
    """Writes down each call of a route that is an act, off the loop, since it waits for the disk."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit

    async def begin(self, call: Call) -> None:
        """Before anything is done; an error here means that nothing may be."""
        call.act = await asyncio.to_thread(self.audit.begin, **_facts(call))

    async def end(self, call: Call, error: HoldfastError | None, *, failed: bool = False) -> None:
        """What became of it. A refusal is noted, too, if it is known whose: strangers could fill a disk."""
        outcome = "internal" if failed else DONE if error is None else error.code
        if call.act is not None:
            await asyncio.to_thread(self.audit.end, call.act, outcome, count=call.count, target=call.target)
        elif isinstance(error, Forbidden) and call.principal is not None:
            with suppress(HoldfastError):  # refused it is, whether or not that can be written down
                await asyncio.to_thread(self.audit.record, outcome=outcome, **_facts(call))


def _facts(call: Call) -> dict[str, Any]:
    route = call.route
    return {
        "principal": call.principal.name,
        "peer": call.request.peer,
        "action": route.action,
        "route": f"{route.method} {route.pattern}",
        "target": call.target or _target(call),
        "parameters": {**call.path, **_given(call.query), **_given(call.body)},
        "correlation_id": call.correlation_id,
    }


def _target(call: Call) -> str:
    """What an act is about, as far as that can be seen before it is done."""
    if call.route.named is not None:
        return call.path.get(call.route.named, "")
    return getattr(call.body, "name", "") or call.path.get("group", "")


def _given(value: Any) -> dict[str, Any]:
    """What was said, without what was left out."""
    if not isinstance(value, msgspec.Struct):
        return {}
    return {name: each for name, each in msgspec.structs.asdict(value).items() if each not in (None, "", [], {})}
