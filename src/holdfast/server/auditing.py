"""Calls in the audit log: what of a call is written down, and when."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from holdfast.errors import Forbidden, HoldfastError, Unauthenticated
from holdfast.server.audit import DONE, Audit
from holdfast.server.calls import Call
from holdfast.server.refusals import UNKNOWN, WINDOW_S

# What a caller proves a lease with: whoever reads the log must not be able to.
_PROOFS: Final = frozenset({"lease_id", "receipt", "receipts"})


class CallAuditor:
    """Writes down each call of a route that is an act, off the loop, since it waits for the disk."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        self._telling: asyncio.Task[None] | None = None

    async def begin(self, call: Call) -> None:
        """Before anything is done; an error here means that nothing may be."""
        facts = _facts(call)
        facts["parameters"] |= _given(call.body)
        call.act = await asyncio.to_thread(self.audit.begin, **facts)

    async def end(self, call: Call, error: HoldfastError | None, *, failed: bool = False) -> None:
        """What became of it. A refusal is noted, too, in another file and not without end."""
        outcome = "internal" if failed else DONE if error is None else error.code
        if call.act is not None:
            await asyncio.to_thread(self.audit.end, call.act, outcome, count=call.count, target=call.target)
        elif isinstance(error, Forbidden | Unauthenticated):
            facts = _facts(call)
            if self.audit.refusals.admit(facts["principal"]):
                await asyncio.to_thread(self.audit.refusals.write, outcome=outcome, **facts)
            elif self._telling is None or self._telling.done():
                self._telling = asyncio.get_running_loop().create_task(self._tell_rest())

    async def _tell_rest(self) -> None:
        """Say how many more there were, when the time is over in which so few are written down."""
        left = True
        while left:
            await asyncio.sleep(WINDOW_S)
            left = await asyncio.to_thread(self.audit.refusals.tell_rest)


def _facts(call: Call) -> dict[str, Any]:
    """What is known of a call before its body is read; of a refused one that is all that is written down."""
    route = call.route
    return {
        "principal": getattr(call.principal, "name", UNKNOWN),
        "peer": call.request.peer,
        "action": route.action,
        "route": f"{route.method} {route.pattern}",
        "target": call.target or _target(call),
        "parameters": {**call.path, **_given(call.query)},
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
    return {
        name: each
        for name, each in msgspec.structs.asdict(value).items()
        if each not in (None, "", [], {}) and name not in _PROOFS
    }
