"""Tokens, the tokens file, and the principals that tokens stand for: what each caller may do."""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from holdfast.broker.folder.layout import DEAD_SUFFIX, DEFAULT_GROUP
from holdfast.config import settings_file
from holdfast.env import World
from holdfast.env.disk import file_facts
from holdfast.errors import BadSettings, Forbidden
from holdfast.server.routing import Action as RouteAction
from holdfast.storage.files import read_file

EVERYTHING: Final = "*"


class Patterns:
    """The names a token is valid for: `*` matches any characters, `?` matches one, all else only itself.

    A pattern must match the whole name exactly as the call sends it; paths and escapes have no meaning.
    """

    __slots__ = ("_compiled", "everything", "texts")

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts: Final = tuple(texts)
        # Brackets are escaped: fnmatch would give them a meaning that a pattern here must not have.
        self._compiled = [re.compile(fnmatch.translate(text.replace("[", "[[]"))) for text in self.texts]
        self.everything: Final = EVERYTHING in self.texts

    def match(self, name: str) -> bool:
        return self.everything or any(pattern.match(name) for pattern in self._compiled)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Patterns) and self.texts == other.texts

    def __hash__(self) -> int:
        return hash(self.texts)


Action: TypeAlias = Literal["publish", "consume", "read", "admin", "lock"]
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)

ROLES: Final[dict[str, frozenset[Action]]] = {
    "admin": frozenset(ACTIONS),
    "producer": frozenset({"publish"}),
    "consumer": frozenset({"consume", "read"}),
    "reader": frozenset({"read"}),
}

NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,99}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_Pattern = Annotated[str, Meta(min_length=1, max_length=200)]
_Name = Annotated[str, Meta(min_length=1, max_length=253)]


class TokenEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One caller, identified by a token, by the name in a client certificate, or by either."""

    name: str
    sha256: str = ""
    certificate: _Name | None = None
    role: str | tuple[Action, ...]
    topics: tuple[_Pattern, ...] = (EVERYTHING,)
    locks: tuple[_Pattern, ...] | None = None
    groups: tuple[_Pattern, ...] | None = None
    producers: tuple[_Pattern, ...] | None = None
    create_groups: bool = False
    expires: datetime | None = None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise BadSettings("the name must be letters, digits, '.', '_', '@' and '-', at most 100 of them")
        if isinstance(self.role, str) and self.role not in ROLES:
            raise BadSettings(f"there is no role {self.role!r}; choose from {', '.join(ROLES)}, or list actions")
        if not self.actions:
            raise BadSettings(f"its role allows nothing; list some of {', '.join(ACTIONS)}")
        if not self.sha256 and self.certificate is None:
            raise BadSettings(
                "it has neither sha256 nor certificate, so nobody can use it: add one of them, or make it with "
                "`holdfast token new`"
            )
        if self.sha256 and not _DIGEST.fullmatch(self.sha256):
            raise BadSettings("sha256 must be 64 of the digits 0 to 9 and a to f; `holdfast token new` creates it")
        if self.locks is not None and "lock" not in self.actions:
            raise BadSettings('locks has no effect without the action lock; write role = ["lock", ...]')
        if self.groups is not None and not self.actions & {"consume", "read", "admin"}:
            raise BadSettings(
                "groups has no effect without one of the actions consume, read and admin: add one, or remove groups"
            )
        if self.producers is not None and "publish" not in self.actions:
            raise BadSettings(
                "producers has no effect without the action publish: add that action, or remove producers"
            )
        if self.create_groups and "consume" not in self.actions:
            raise BadSettings(
                "create_groups has no effect without the action consume: add that action, or remove create_groups"
            )
        if self.expires is not None and self.expires.utcoffset() is None:
            raise BadSettings("expires has no time zone; write it as 2027-01-31T00:00:00Z")

    @property
    def actions(self) -> frozenset[Action]:
        return ROLES[self.role] if isinstance(self.role, str) else frozenset(self.role)

    def has_expired(self, now_ns: int) -> bool:
        return self.expires is not None and round(self.expires.timestamp() * 1000) <= now_ns // 1_000_000


class Tokens:
    """The entries of the tokens file as it was read."""

    def __init__(self, entries: Sequence[TokenEntry]) -> None:
        self.entries: Final = tuple(entries)
        self._digests = [bytes.fromhex(entry.sha256) for entry in entries]
        self._by_certificate = {entry.certificate: entry for entry in entries if entry.certificate is not None}

    def of_token(self, token: str) -> TokenEntry | None:
        """The entry of a token. Takes constant time: every entry is compared."""
        digest = bytes.fromhex(digest_of(token))
        found: TokenEntry | None = None
        for entry, known in zip(self.entries, self._digests, strict=True):
            if hmac.compare_digest(digest, known):
                found = entry
        return found

    def of_certificate(self, names: Sequence[str]) -> TokenEntry | None:
        """The entry of a certificate: that of the first of its names that has one."""
        return next((self._by_certificate[name] for name in names if name in self._by_certificate), None)


def digest_of(token: str) -> str:
    """The digest of a token, as it is stored in the file."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def read_tokens(world: World, path: str) -> Tokens:
    """Read a tokens file. Raises BadSettings if it is missing, invalid, or open to other users."""
    facts = file_facts(path)
    try:
        content = None if facts is None else read_file(world.disk, path)
    except OSError as error:
        raise BadSettings(
            f"the tokens file {path} cannot be read: {error.strerror or error}. Check its permissions"
        ) from None
    if facts is None or content is None:
        raise BadSettings(f"there is no tokens file {path}; `holdfast token new NAME --file {path}` creates one")
    if facts.others_may_read or facts.others_may_write:
        may = "change" if facts.others_may_write else "read"
        raise BadSettings(
            f"other users may {may} the tokens file {path} (mode {facts.mode:04o}), so it is not used: "
            f"run chmod 600 {path}"
        )
    return parse_tokens(content, path)


def parse_tokens(content: bytes, path: str) -> Tokens:
    """Parse the content of a tokens file: TOML with one [[tokens]] for each, or JSON of the same shape."""
    document = _document(content, path)
    unknown = sorted(set(document) - {"tokens"})
    if unknown:
        raise BadSettings(f"{path}: a tokens file has nothing called {unknown[0]!r}, only [[tokens]]: remove it")
    listed = document.get("tokens")
    if not isinstance(listed, list):
        # An empty file is more likely one that is about to be written than one meant to lock everybody out.
        raise BadSettings(f"{path} has no [[tokens]]; to let nobody in, write tokens = []")
    return _checked([_entry(each, number, path) for number, each in enumerate(listed, start=1)], path)


def _document(content: bytes, path: str) -> dict[str, Any]:
    try:
        text = content.decode("utf-8-sig")
        document: object = msgspec.json.decode(text) if path.endswith(".json") else settings_file.parsed(text)[0]
    except (ValueError, msgspec.DecodeError) as error:
        raise BadSettings(f"the tokens file {path} cannot be read: {error}. Correct it") from None
    if not isinstance(document, dict):
        raise BadSettings(f'{path} must be an object: {{"tokens": [...]}}')
    return document


def _entry(given: object, number: int, path: str) -> TokenEntry:
    named = given.get("name") if isinstance(given, dict) else None
    where = f"{path}: token {named!r}" if isinstance(named, str) else f"{path}: token {number}"
    try:
        return entry_of(given)
    except BadSettings as error:
        raise BadSettings(f"{where} cannot be used: {error}") from None


def entry_of(given: object) -> TokenEntry:
    """An entry from plain values. Raises BadSettings if they are not valid."""
    try:
        return msgspec.convert(given, TokenEntry)
    except msgspec.ValidationError as error:
        raise BadSettings(str(error)) from None


def _checked(entries: list[TokenEntry], path: str) -> Tokens:
    """Raise BadSettings if two entries are for the same caller: which one counts would depend on their order."""
    for what, values in (
        ("the name", [entry.name for entry in entries]),
        ("the sha256", [entry.sha256 for entry in entries if entry.sha256]),
        ("the certificate", [entry.certificate for entry in entries if entry.certificate]),
    ):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise BadSettings(f"{path}: two tokens have {what} {twice}; remove one")
    return Tokens(entries)


# Writing the tokens file keeps other entries as they are, comments included.

_HEADER: Final = re.compile(r"^(?=[ \t]*\[\[)", re.MULTILINE)
_NOBODY: Final = "tokens = []\n"


def with_entry(text: str, entry: TokenEntry, path: str) -> str:
    """The text of the file with one more entry: JSON if the path ends in .json, otherwise TOML."""
    listed = parse_tokens(text.encode(), path).entries if text.strip() else ()
    if path.endswith(".json"):
        return _json([*listed, entry])
    if not listed:  # after `tokens = []`, TOML allows no [[tokens]]
        return _toml(entry)
    return f"{text.rstrip()}\n\n{_toml(entry)}"


def without_entry(text: str, name: str, path: str) -> str:
    """The text of the file without the entry of this name."""
    left = [entry for entry in parse_tokens(text.encode(), path).entries if entry.name != name]
    if path.endswith(".json"):
        return _json(left)
    if not left:
        return _NOBODY
    written = "".join(part for part in _HEADER.split(text) if _name_in(part) != name)
    with suppress(ValueError):
        if parse_tokens(written.encode(), path).entries == tuple(left):
            return written
    return "\n".join(map(_toml, left))  # the file has another layout: write it anew, without its comments


def _name_in(part: str) -> str | None:
    try:
        found = tomllib.loads(part).get("tokens")
    except ValueError:
        return None
    return found[0].get("name") if isinstance(found, list) and found else None


def _json(entries: list[TokenEntry]) -> str:
    return msgspec.json.format(msgspec.json.encode({"tokens": entries}), indent=2).decode() + "\n"


def _toml(entry: TokenEntry) -> str:
    # For every value that an entry can hold, JSON is also valid TOML, except for a time.
    values = {name: msgspec.json.encode(value).decode() for name, value in msgspec.to_builtins(entry).items()}
    if entry.expires is not None:
        values["expires"] = entry.expires.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return "\n".join(["[[tokens]]", *(f"{name} = {value}" for name, value in values.items()), ""])


# Callers and their rights. All permission checks are here.

LOCAL: Final = "local"  # the name of all callers that need no token

_ALL: Final = Patterns([EVERYTHING])
_NONE: Final = Patterns([])


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """A caller. `entry` is its entry in the tokens file; None for callers that need no token.

    Stream groups and named producers belong to no topic, and all callers share their names: `groups` and `producers`
    are the patterns for the names that this caller may use. A queue group belongs to its topic, so the patterns for
    topics protect it. If the tokens file lists groups, `queue_groups` restricts it further.
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
    everywhere: frozenset[Action] = frozenset()  # actions allowed on every topic or lock; set by __post_init__

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "everywhere", frozenset(filter(self.may, ACTIONS)))

    def check(self, action: RouteAction, name: str | None = None) -> None:
        """Raise Forbidden unless the action is allowed on the named topic or lock; without a name, on all."""
        if action not in self.everywhere and not self.may(action, name):
            raise Forbidden(self._refusal(action, name))

    def check_any(self, action: RouteAction) -> None:
        """Raise Forbidden unless the action is allowed on at least some topics or locks."""
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
        """Whether the caller sees a topic in lists."""
        return _match(self.topics, topic)

    def may_use_group(self, group: str) -> bool:
        """Whether the caller may use a stream group of this name."""
        return self.groups.match(group)

    def check_group(self, group: str) -> None:
        """Raise Forbidden unless the caller may use the stream group."""
        if not self.may_use_group(group):
            raise Forbidden(
                f"{self.name} may not use the stream group {group!r}; the token allows the groups "
                f"{_listed(self.groups)}. Choose a name that fits, or ask the operator to add it to the token's groups"
            )

    def may_use_queue_group(self, group: str | None) -> bool:
        """Whether the caller may use a queue group on a topic that it may use. The default group is always allowed."""
        allowed = self.queue_groups
        return allowed is None or group is None or group == DEFAULT_GROUP or allowed.match(group)

    def may_use(self, mode: str, group: str) -> bool:
        """Whether the caller may use a group of either mode, or a query of another process."""
        return self.may_use_queue_group(group) if mode == "queue" else self.may_use_group(group)

    def check_queue_group(self, group: str | None) -> None:
        if not self.may_use_queue_group(group):
            raise Forbidden(
                f"{self.name} may not use the group {group!r}; the token allows the groups {_listed(self.groups)} and "
                f"the group {DEFAULT_GROUP!r} of each queue. Ask the operator to add it to the token's groups"
            )

    def check_creates_group(self, group: str, topic: str | None = None) -> None:
        """Raise Forbidden unless the caller may create groups."""
        if self.creates_groups:
            return
        where = "" if topic is None else f" on the topic {topic!r}"
        made = "" if topic is None else f", or to make the group for you (PUT /v1/topics/{topic}/groups/{group})"
        raise Forbidden(
            f"there is no group {group!r}{where}, and {self.name} may not create one. Ask the operator for a token "
            f"with create_groups (`holdfast token new --create-groups`){made}"
        )

    def check_producer(self, name: str) -> None:
        """Raise Forbidden unless the caller may use the named producer: a new one fences the one before."""
        if not self.producers.match(name):
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
            return f"this server is read-only and refuses calls that need the right {action!r}"
        what = "lock" if action == "lock" else "topic"
        on = f"on every {what}" if name is None else f"on the {what} {name!r}"
        return f"{self.name} does not have the right {action!r} {on}; the token allows {self.allowed()}"

    def allowed(self) -> str:
        """A description of the caller's rights for error messages."""
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
    """The principal for an entry of the tokens file."""
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
    """The patterns of the entry if it has any, otherwise those for topics: a team's names usually share a prefix."""
    return topics if texts is None else Patterns(texts)


def _listed(patterns: Patterns) -> str:
    return ", ".join(patterns.texts) or "none"


def _match(patterns: Patterns, name: str) -> bool:
    """Whether the patterns match a topic, or the topic that a dead letter topic belongs to."""
    return patterns.match(name) or (name.endswith(DEAD_SUFFIX) and patterns.match(name.removesuffix(DEAD_SUFFIX)))
