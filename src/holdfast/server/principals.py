"""Who is calling, and what they may do: the one place where that is decided."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from holdfast.broker.layout import DEAD_SUFFIX
from holdfast.errors import Forbidden
from holdfast.server.patterns import EVERYTHING, Patterns
from holdfast.server.routing import Action as RouteAction
from holdfast.server.tokens import ACTIONS, Action, Entry

LOCAL: Final = "local"  # whoever needs no token, all of them

_ALL: Final = Patterns([EVERYTHING])
_NONE: Final = Patterns([])


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """A caller. `entry` is what the tokens file says of it; None for those who need none."""

    name: str
    actions: frozenset[Action] = frozenset(ACTIONS)
    topics: Patterns = _ALL
    locks: Patterns = _ALL
    read_only: bool = False
    entry: Entry | None = None

    def check(self, action: RouteAction, name: str | None = None) -> None:
        """Forbidden, unless they may do this to the topic (or the lock) of this name; without one, to all of them."""
        if not self.may(action, name):
            raise Forbidden(self._refusal(action, name))

    def check_any(self, action: RouteAction) -> None:
        """The same for a call that answers with what they may see: whether there may be any of it."""
        if not self.may_any(action):
            raise Forbidden(self._refusal(action, None))

    def may(self, action: RouteAction, name: str | None = None) -> bool:
        if action == "open":
            return True
        patterns = self._patterns(action)
        return self.may_any(action) and (patterns.everything if name is None else _match(patterns, name))

    def may_any(self, action: RouteAction) -> bool:
        if action == "open":
            return True
        return action in self.actions and (action == "read" or not self.read_only)

    def sees(self, topic: str) -> bool:
        """Whether a topic is shown to them at all, in a list of several."""
        return _match(self.topics, topic)

    def _patterns(self, action: Action) -> Patterns:
        return self.locks if action == "lock" else self.topics

    def _refusal(self, action: RouteAction, name: str | None) -> str:
        if self.read_only and action != "read":
            return f"this server is read-only: nobody may {action} through it"
        what = "lock" if action == "lock" else "topic"
        on = f"on every {what}" if name is None else f"on the {what} {name!r}"
        return f"{self.name} may not {action} {on}; the token allows {self.allowed()}"

    def allowed(self) -> str:
        """What they may do, for people."""
        on_topics = [action for action in ACTIONS if action in self.actions and action != "lock"]
        parts = [f"{', '.join(on_topics)} on topics {', '.join(self.topics.texts)}"] if on_topics else []
        parts += [f"lock on locks {', '.join(self.locks.texts)}"] if "lock" in self.actions else []
        return " and ".join(parts)


@lru_cache(maxsize=4096)
def principal_of(entry: Entry, *, read_only: bool = False) -> Principal:
    """The caller that an entry of the tokens file stands for."""
    locks = entry.locks if entry.locks is not None else (EVERYTHING,)
    return Principal(
        name=entry.name,
        actions=entry.actions,
        topics=Patterns(entry.topics),
        locks=Patterns(locks) if "lock" in entry.actions else _NONE,
        read_only=read_only,
        entry=entry,
    )


def _match(patterns: Patterns, name: str) -> bool:
    """Dead letters belong to the topic whose messages they were."""
    return patterns.match(name) or (name.endswith(DEAD_SUFFIX) and patterns.match(name.removesuffix(DEAD_SUFFIX)))
