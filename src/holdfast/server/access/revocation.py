"""Calls that are under way when their token is taken back, changed or expires: they end then, not when they are done.

Whoever calls is asked for a token when the call begins; a call may go on for minutes. So all calls of callers with
an entry in the tokens file are listed here while they run, and somebody looks at them a few times a second. A call
whose caller may not go on is cancelled as if its client had gone away, which every handler must bear anyway: what it
took is given back. Then, where the answer has not begun, the caller is told why (see `ServerApp.handle`).

What comes between two looks is not for the caller either, so whoever waits confirms the caller once more before it
hands out what it waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.errors import HoldfastError
from holdfast.server.access.principals import Principal

if TYPE_CHECKING:
    from holdfast.server.calls import Call

_LOOK_EVERY_S: Final = 0.25


class Revocation:
    """The calls under way of callers that have a token, each of which ends when the token does."""

    def __init__(self, confirm: Callable[[Principal], None]) -> None:
        self._confirm = confirm
        self._calls: set[Call] = set()
        self._looks = False

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> None:
        """A call begins, or its answer does."""
        self._calls.add(call)
        if not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look_again)

    def remove(self, call: Call) -> None:
        """The call is over."""
        self._calls.discard(call)

    def _look_again(self) -> None:
        self._looks = bool(self._calls)
        if self._looks:
            asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look_again)
            self.look()

    def look(self) -> None:
        """End the calls whose callers may not go on. Each caller is asked for once, however many calls it has."""
        refusals: dict[int, HoldfastError | None] = {}
        for call in list(self._calls):
            principal = call.principal
            if id(principal) not in refusals:
                refusals[id(principal)] = self._refusal(principal)
            refusal = refusals[id(principal)]
            if refusal is not None:
                self._calls.discard(call)
                call.end(refusal)

    def _refusal(self, principal: Principal) -> HoldfastError | None:
        try:
            self._confirm(principal)
        except HoldfastError as error:
            return error
        return None
