"""The tokens file: who may call the server, and what each may do.

A token is 256 random bits, of which the file has the SHA-256. For passwords that would be too little: people choose
them, so they can be guessed, and a slow hash makes each guess dear. Nobody guesses 256 random bits, however fast
the hash is, and a fast one can be made for every request.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from holdfast.config import settings_file
from holdfast.env import World
from holdfast.env.disk import file_facts
from holdfast.errors import BadSettings
from holdfast.storage.files import read_file

# Which names a token is good for: `*` stands for any characters, `?` for one, everything else for itself.


EVERYTHING: Final = "*"


class Patterns:
    """Names are compared whole, letter by letter, as the call names them: nothing in them is a path or an escape."""

    __slots__ = ("_compiled", "everything", "texts")

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts: Final = tuple(texts)
        # Only the two signs: what fnmatch makes of brackets would be one more thing to get wrong.
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
    """One caller: known by a token, or by the name in a client's certificate, or by either."""

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
            raise BadSettings("it has neither sha256 nor certificate, so nobody could ever be it")
        if self.sha256 and not _DIGEST.fullmatch(self.sha256):
            raise BadSettings("sha256 must be 64 of the digits 0 to 9 and a to f; `holdfast token new` makes it")
        if self.locks is not None and "lock" not in self.actions:
            raise BadSettings('locks has no effect without the action lock; write role = ["lock", ...]')
        if self.groups is not None and not self.actions & {"consume", "read", "admin"}:
            raise BadSettings("groups has no effect: groups are for those who consume, read or admin")
        if self.producers is not None and "publish" not in self.actions:
            raise BadSettings("producers has no effect without the action publish")
        if self.create_groups and "consume" not in self.actions:
            raise BadSettings("create_groups has no effect without the action consume: groups are made by consuming")
        if self.expires is not None and self.expires.utcoffset() is None:
            raise BadSettings("expires has no time zone; write it as 2027-01-31T00:00:00Z")

    @property
    def actions(self) -> frozenset[Action]:
        return ROLES[self.role] if isinstance(self.role, str) else frozenset(self.role)

    def has_expired(self, now_ns: int) -> bool:
        return self.expires is not None and round(self.expires.timestamp() * 1000) <= now_ns // 1_000_000


class Tokens:
    """The entries of one state of the file."""

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
        """Whose certificate it is, by the first of its names that has an entry."""
        return next((self._by_certificate[name] for name in names if name in self._by_certificate), None)


def digest_of(token: str) -> str:
    """The digest of a token, as the file keeps it."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def read_tokens(world: World, path: str) -> Tokens:
    """The tokens in a file; BadSettings that says what is wrong with it, and what to do."""
    facts = file_facts(path)
    try:
        content = None if facts is None else read_file(world.disk, path)
    except OSError as error:
        raise BadSettings(f"the tokens file {path} cannot be read: {error.strerror or error}") from None
    if facts is None or content is None:
        raise BadSettings(f"there is no tokens file {path}; `holdfast token new NAME --file {path}` makes one")
    if facts.others_may_read or facts.others_may_write:
        may = "change" if facts.others_may_write else "read"
        raise BadSettings(
            f"others may {may} the tokens file {path} (mode {facts.mode:04o}), so it is not used: run chmod 600 {path}"
        )
    return parse_tokens(content, path)


def parse_tokens(content: bytes, path: str) -> Tokens:
    """The tokens that a text lists: TOML with one [[tokens]] for each, or JSON of the same shape."""
    document = _document(content, path)
    unknown = sorted(set(document) - {"tokens"})
    if unknown:
        raise BadSettings(f"{path}: there is nothing called {unknown[0]!r} in a tokens file; it has [[tokens]] only")
    listed = document.get("tokens")
    if not isinstance(listed, list):
        # An empty file is one that somebody is about to write, rarely one that locks everybody out.
        raise BadSettings(f"{path} has no [[tokens]]; to let nobody in, write tokens = []")
    return _checked([_entry(each, number, path) for number, each in enumerate(listed, start=1)], path)


def _document(content: bytes, path: str) -> dict[str, Any]:
    try:
        text = content.decode("utf-8-sig")
        document: object = msgspec.json.decode(text) if path.endswith(".json") else settings_file.parsed(text)[0]
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise BadSettings(f"the tokens file {path} cannot be read: {error}") from None
    except ValueError as error:
        raise BadSettings(f"the tokens file {path} cannot be read: {error}") from None
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
    """An entry from plain values; BadSettings where they are not as an entry must be."""
    try:
        return msgspec.convert(given, TokenEntry)
    except msgspec.ValidationError as error:
        raise BadSettings(str(error)) from None


def _checked(entries: list[TokenEntry], path: str) -> Tokens:
    """No two entries may be the same caller, or which of them counts would be a matter of chance."""
    for what, values in (
        ("the name", [entry.name for entry in entries]),
        ("the sha256", [entry.sha256 for entry in entries if entry.sha256]),
        ("the certificate", [entry.certificate for entry in entries if entry.certificate]),
    ):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise BadSettings(f"{path}: two tokens have {what} {twice}; take one out")
    return Tokens(entries)


# How the tokens file is written: what is there stays as somebody wrote it, comments and all.


_HEADER: Final = re.compile(r"^(?=[ \t]*\[\[)", re.MULTILINE)
_NOBODY: Final = "tokens = []\n"


def with_entry(text: str, entry: TokenEntry, path: str) -> str:
    """The file with one entry more; a path that ends in .json is JSON, any other TOML."""
    listed = parse_tokens(text.encode(), path).entries if text.strip() else ()
    if path.endswith(".json"):
        return _json([*listed, entry])
    if not listed:  # `tokens = []` cannot be gone on with
        return _toml(entry)
    return f"{text.rstrip()}\n\n{_toml(entry)}"


def without_entry(text: str, name: str, path: str) -> str:
    """The file without the entry of this name."""
    left = [entry for entry in parse_tokens(text.encode(), path).entries if entry.name != name]
    if path.endswith(".json"):
        return _json(left)
    if not left:
        return _NOBODY
    written = "".join(part for part in _HEADER.split(text) if _name_in(part) != name)
    with suppress(ValueError):
        if parse_tokens(written.encode(), path).entries == tuple(left):
            return written
    return "\n".join(map(_toml, left))  # written in some other way: the comments are lost


def _name_in(part: str) -> str | None:
    try:
        found = tomllib.loads(part).get("tokens")
    except ValueError:
        return None
    return found[0].get("name") if isinstance(found, list) and found else None


def _json(entries: list[TokenEntry]) -> str:
    return msgspec.json.format(msgspec.json.encode({"tokens": entries}), indent=2).decode() + "\n"


def _toml(entry: TokenEntry) -> str:
    # Texts and lists of JSON are those of TOML, for all that an entry can hold; only a moment is not.
    values = {name: msgspec.json.encode(value).decode() for name, value in msgspec.to_builtins(entry).items()}
    if entry.expires is not None:
        values["expires"] = entry.expires.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return "\n".join(["[[tokens]]", *(f"{name} = {value}" for name, value in values.items()), ""])
