"""Callers and their rights. Every permission check is made here."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from holdfast.broker.folder.layout import DEAD_SUFFIX, DEFAULT_GROUP
from holdfast.errors import Forbidden
from holdfast.server.access.tokens import ACTIONS, EVERYTHING, Action, Patterns, TokenEntry
from holdfast.server.routing import Action as RouteAction

LOCAL: Final = "local"  # whoever needs no token, all of them

_ALL: Final = Patterns([EVERYTHING])
_NONE: Final = Patterns([])


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """A caller. `entry` is what the tokens file says of it; None for those who need none.

    Stream groups and named producers stand beside the topics, in one space for all callers: `groups` and `producers`
    say which names are this caller's. A group in queue mode stands inside its topic, so the patterns for topics guard
    it; `queue_groups` limits it further where the tokens file lists groups by name.
    """

    name: str
    actions: frozenset[Action] = frozenset(ACTIONS)
    topics: Patterns = _ALL
    locks: Patterns = _ALL
    groups: Patterns = _ALL
    queue_groups: Patterns | None = None
    producers: Patterns = _ALL
    creates_groups: bool = True
    read_only: bool = False
    entry: TokenEntry | None = None
    everywhere: frozenset[Action] = frozenset()  # what they may do to every topic, or every lock; made of the others

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "everywhere", frozenset(filter(self.may, ACTIONS)))

    def check(self, action: RouteAction, name: str | None = None) -> None:
        """Forbidden, unless they may do this to the named topic or lock; without a name, to all of them."""
        if action not in self.everywhere and not self.may(action, name):
            raise Forbidden(self._refusal(action, name))

    def check_any(self, action: RouteAction) -> None:
        """Forbidden, unless they may do this to at least some topics or locks."""
        if not self.may_any(action):
            raise Forbidden(self._refusal(action, None))

    def may(self, action: RouteAction, name: str | None = None) -> bool:
        if action == "open":
            return True
        return self.may_any(action) and (
            self._patterns(action).everything if name is None else self._matches(action, name)
        )

    def may_any(self, action: RouteAction) -> bool:
        if action == "open":
            return True
        return action in self.actions and (action == "read" or not self.read_only)

    def sees(self, topic: str) -> bool:
        """Whether a topic is shown to them at all, in a list of several."""
        return _match(self.topics, topic)

    def may_use_group(self, group: str) -> bool:
        """Whether a group in stream mode is theirs to use, as far as its name says it."""
        return self.groups.match(group)

    def check_group(self, group: str) -> None:
        """Forbidden, unless they may use the stream group of this name."""
        if not self.may_use_group(group):
            raise Forbidden(
                f"{self.name} may not use the stream group {group!r}; the token allows the groups "
                f"{_listed(self.groups)}. Choose a name that fits, or ask the operator to add it to the token's groups"
            )

    def may_use_queue_group(self, group: str | None) -> bool:
        """The same for a group in queue mode on a topic that they may use; the default group belongs to the topic."""
        allowed = self.queue_groups
        return allowed is None or group is None or group == DEFAULT_GROUP or allowed.match(group)

    def may_use(self, mode: str, group: str) -> bool:
        """The same for a group of either mode, or a query of another process."""
        return self.may_use_queue_group(group) if mode == "queue" else self.may_use_group(group)

    def check_queue_group(self, group: str | None) -> None:
        if not self.may_use_queue_group(group):
            raise Forbidden(
                f"{self.name} may not use the group {group!r}; the token allows the groups {_listed(self.groups)} and "
                f"the group {DEFAULT_GROUP!r} of each queue. Ask the operator to add it to the token's groups"
            )

    def check_creates_group(self, group: str, topic: str | None = None) -> None:
        """Forbidden, unless they may create groups."""
        if self.creates_groups:
            return
        where = "" if topic is None else f" on the topic {topic!r}"
        made = "" if topic is None else f", or to make the group for you (PUT /v1/topics/{topic}/groups/{group})"
        raise Forbidden(
            f"there is no group {group!r}{where}, and {self.name} may not create one. Ask the operator for a token "
            f"with create_groups (`holdfast token new --create-groups`){made}"
        )

    def may_use_producer(self, name: str) -> bool:
        """Whether they may use the named producer."""
        return self.producers.match(name)

    def check_producer(self, name: str) -> None:
        """Forbidden, unless they may be the producer of this name: whoever is fences the one before."""
        if not self.may_use_producer(name):
            raise Forbidden(
                f"{self.name} may not be the producer {name!r}; the token allows the producers "
                f"{_listed(self.producers)}. Choose a name that fits, leave the name out, or ask the operator to add "
                "it to the token's producers"
            )

    def _matches(self, action: Action, name: str) -> bool:
        return self.locks.match(name) if action == "lock" else _match(self.topics, name)

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
        parts += [f"use the groups {', '.join(self.groups.texts)}"] if self.queue_groups is not None else []
        parts += [f"be the producers {', '.join(self.producers.texts)}"] if self._names_producers else []
        parts += ["create groups"] if self.creates_groups and "admin" not in self.actions else []
        return " and ".join(parts)

    @property
    def _names_producers(self) -> bool:
        return self.entry is not None and self.entry.producers is not None


@lru_cache(maxsize=4096)
def principal_of(entry: TokenEntry, *, read_only: bool = False) -> Principal:
    """The caller that an entry of the tokens file stands for."""
    topics = Patterns(entry.topics)
    groups = topics if entry.groups is None else Patterns(entry.groups)
    return Principal(
        name=entry.name,
        actions=entry.actions,
        topics=topics,
        locks=_of(entry.locks, topics) if "lock" in entry.actions else _NONE,
        groups=groups,
        queue_groups=None if entry.groups is None else groups,
        producers=_of(entry.producers, topics),
        creates_groups=entry.create_groups or "admin" in entry.actions,
        read_only=read_only,
        entry=entry,
    )


def _of(texts: tuple[str, ...] | None, topics: Patterns) -> Patterns:
    """Patterns of their own, or else those for topics: a team's names usually share a prefix."""
    return topics if texts is None else Patterns(texts)


def _listed(patterns: Patterns) -> str:
    return ", ".join(patterns.texts) or "none"


def _match(patterns: Patterns, name: str) -> bool:
    """Dead letters belong to the topic whose messages they were."""
    return patterns.match(name) or (name.endswith(DEAD_SUFFIX) and patterns.match(name.removesuffix(DEAD_SUFFIX)))
