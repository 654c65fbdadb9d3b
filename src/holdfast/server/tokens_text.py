"""How the tokens file is written: what is there stays as somebody wrote it, comments and all."""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
from datetime import UTC
from typing import Final

import msgspec

from holdfast.server.tokens import Entry, parse_tokens

_HEADER: Final = re.compile(r"^(?=[ \t]*\[\[)", re.MULTILINE)
_NOBODY: Final = "tokens = []\n"


def with_entry(text: str, entry: Entry, path: str) -> str:
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


def _json(entries: list[Entry]) -> str:
    return msgspec.json.format(msgspec.json.encode({"tokens": entries}), indent=2).decode() + "\n"


def _toml(entry: Entry) -> str:
    # Texts and lists of JSON are those of TOML, for all that an entry can hold; only a moment is not.
    values = {name: msgspec.json.encode(value).decode() for name, value in msgspec.to_builtins(entry).items()}
    if entry.expires is not None:
        values["expires"] = entry.expires.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return "\n".join(["[[tokens]]", *(f"{name} = {value}" for name, value in values.items()), ""])
