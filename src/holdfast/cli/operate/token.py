"""`holdfast token`: create, list, check and revoke tokens for a server, which notices changes by itself."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from holdfast.api.drafts import parse_instant, to_datetime
from holdfast.cli.opening import AsJson
from holdfast.cli.output import OK, note, print_each, print_json, ruled_table, safe, say, stdout
from holdfast.cli.parsing import Section, argument, option
from holdfast.config.settings_file import read_settings
from holdfast.delivery.where import seconds_of
from holdfast.env import real_world
from holdfast.env.process import environment
from holdfast.errors import InvalidRequest
from holdfast.server import tokens

app = Section("Manage tokens: who may call a server, and what they may do.")

# People and scanners recognize a leaked token by this prefix.
_PREFIX: Final = "holdfast_"
_RANDOM_BYTES: Final = 32

TokensFile: TypeAlias = Annotated[
    str | None, option("--file FILE", "The tokens file; the setting `tokens_file` by default.")
]

Topics: TypeAlias = Annotated[list[str] | None, option("--topics PATTERN", "Only these topics, such as 'orders.*'.")]
Locks: TypeAlias = Annotated[
    list[str] | None, option("--locks PATTERN", "Only these locks; the same as --topics by default.")
]
Groups: TypeAlias = Annotated[
    list[str] | None, option("--groups PATTERN", "Only these groups; the same as --topics by default.")
]
Producers: TypeAlias = Annotated[
    list[str] | None, option("--producers PATTERN", "Only these producer names; the same as --topics by default.")
]
CreateGroups: TypeAlias = Annotated[
    bool, option("--create-groups", "Allow it to create groups by consuming; an admin always may.")
]


@app.command("new")
def new_command(
    name: Annotated[str, argument("NAME", "Who it is for, as shown in the logs and the audit log.")],
    role: Annotated[
        str,
        option("--role ROLE", f"{', '.join(tokens.ROLES)}; or a list of actions, such as publish,lock."),
    ],
    topics: Topics = None,
    locks: Locks = None,
    groups: Groups = None,
    producers: Producers = None,
    create_groups: CreateGroups = False,
    expires: Annotated[
        str | None,
        option("--expires TIME", "When it expires, such as 90d or 2027-01-31T00:00:00Z; never by default."),
    ] = None,
    certificate: Annotated[
        str | None,
        option("--certificate NAME", "Instead of creating a token, admit clients with a certificate of this name."),
    ] = None,
    file: TokensFile = None,
    as_json: AsJson = False,
) -> int:
    """Create a token. It is printed once: the file keeps only its hash.

    Examples:
        holdfast token new shop --role producer --topics 'orders.*' --file tokens.toml
        holdfast token new admin --role admin --expires 90d --file tokens.toml
    """
    path = _path(file)
    token = None if certificate else _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    entry = tokens.entry_of(
        {
            "name": name,
            "sha256": tokens.digest_of(token) if token else "",
            "certificate": certificate,
            "role": _role(role),
            "topics": topics or ["*"],
            "locks": locks or None,
            "groups": groups or None,
            "producers": producers or None,
            "create_groups": create_groups,
            "expires": _moment(expires),
        }
    )
    before = _tokens(path, missing_ok=True)
    if any(each.name == name for each in before.entries):
        raise InvalidRequest(f"{path} already has a token called {name}; choose another name, or remove that one first")
    _write(path, tokens.with_entry(_text(path), entry, path))
    if as_json:
        print_json({**_document(entry), "token": token, "file": path})
        return OK
    if token is not None:
        say(token)
        note(f"Save it now: it is not shown again. Rights of {safe(name)}: {_allowed(entry)}.")
    else:
        say(f"Rights of {safe(certificate or '')}: {_allowed(entry)}.")
    return OK


@app.command("ls")
def list_command(file: TokensFile = None, as_json: AsJson = False) -> int:
    """List who may call the server, and what each may do. The tokens themselves are not stored.

    Examples:
        holdfast token ls --file tokens.toml
    """
    entries = _tokens(_path(file)).entries
    if as_json:
        print_each(map(_document, entries))
    else:
        _show(entries)
    return OK


@app.command("check")
def check_command(file: TokensFile = None, as_json: AsJson = False) -> int:
    """Check the tokens file as a server would. Exit code: 2 if something is wrong with it.

    Examples:
        holdfast token check --file tokens.toml
    """
    path = _path(file)
    entries = _tokens(path).entries
    now_ns = real_world().clock.now_ns()
    expired = [entry.name for entry in entries if entry.has_expired(now_ns)]
    if as_json:
        print_json({"file": path, "tokens": [_document(entry) for entry in entries], "expired": expired})
        return OK
    if entries:
        _show(entries)
    count = f"{len(entries):,} token{'' if len(entries) == 1 else 's'}"
    ended = f", of which {len(expired):,} expired: {', '.join(expired)}" if expired else ""
    note(f"{safe(path)} can be used; it has {count}{safe(ended)}")
    return OK


def _show(entries: Sequence[tokens.TokenEntry]) -> None:
    table = ruled_table("name", "known by", "may", "expires")
    now_ns = real_world().clock.now_ns()
    for entry in entries:
        ways = (["token"] if entry.sha256 else []) + ([f"certificate {entry.certificate}"] if entry.certificate else [])
        expired = " (expired)" if entry.has_expired(now_ns) else ""
        expires = f"{entry.expires.isoformat()}{expired}" if entry.expires else "never"
        table.add_row(safe(entry.name), safe(", ".join(ways)), safe(_allowed(entry)), expires)
    stdout().print(table)


@app.command("rm")
def remove_command(
    name: Annotated[str, argument("NAME", "The name of the token.")],
    file: TokensFile = None,
    as_json: AsJson = False,
) -> int:
    """Revoke a token. A running server notices within about a second.

    Examples:
        holdfast token rm shop --file tokens.toml
    """
    path = _path(file)
    before = _tokens(path)
    if all(entry.name != name for entry in before.entries):
        known = ", ".join(entry.name for entry in before.entries) or "none"
        raise InvalidRequest(f"{path} has no token called {name}; choose one of {known}")
    _write(path, tokens.without_entry(_text(path), name, path))
    if as_json:
        print_json({"removed": name, "file": path})
    else:
        say(f"removed {safe(name)}; a running server notices within a second or so")
    return OK


def _path(file: str | None) -> str:
    path = file or read_settings(real_world(), environment()).server.tokens_file
    if not path:
        raise InvalidRequest(
            "which tokens file? Name it with --file, or as tokens_file in [server] of the settings file"
        )
    return path


def _tokens(path: str, *, missing_ok: bool = False) -> tokens.Tokens:
    if missing_ok and not Path(path).exists():
        return tokens.Tokens([])
    return tokens.read_tokens(real_world(), path)


def _role(text: str) -> str | list[str]:
    """Parse a role name or a list of actions; `admin` is both."""
    parts = [part.strip() for part in text.split(",")]
    return text if text in tokens.ROLES or not set(parts) & set(tokens.ACTIONS) else parts


def _moment(text: str | None) -> datetime | None:
    """Parse when a token expires: after a duration, or at a time, to the second."""
    if text is None:
        return None
    now_ns = real_world().clock.now_ns()
    seconds = seconds_of(text)
    found = (
        to_datetime(now_ns + int(seconds * 1e9)) if seconds is not None else parse_instant(text, now_ns // 1_000_000)
    )
    if found <= to_datetime(now_ns):
        raise InvalidRequest(
            f"--expires {text} is in the past, so the token would never be valid: give a time in the "
            "future, such as 30d"
        )
    return found.replace(microsecond=0)


def _allowed(entry: tokens.TokenEntry) -> str:
    return tokens.principal_of(entry).allowed()


def _document(entry: tokens.TokenEntry) -> dict[str, Any]:
    """Return an entry as a JSON document, without the hash of its token."""
    principal = tokens.principal_of(entry)
    return {
        "name": entry.name,
        "role": entry.role,
        "actions": sorted(entry.actions),
        "topics": entry.topics,
        "locks": principal.locks.texts,
        "groups": principal.groups.texts,
        "producers": principal.producers.texts,
        "create_groups": principal.creates_groups,
        "certificate": entry.certificate,
        "expires": entry.expires.isoformat() if entry.expires else None,
    }


def _text(path: str) -> str:
    with suppress(FileNotFoundError):
        return Path(path).read_text("utf-8-sig")
    return ""


def _write(path: str, text: str) -> None:
    """Replace the file atomically, readable by its owner only; the owner stays the same."""
    tokens.parse_tokens(text.encode(), path)
    real = os.path.realpath(path)
    temporary = f"{real}.tmp"
    with suppress(FileNotFoundError):
        os.unlink(temporary)  # a leftover file, or a link, which would lead elsewhere
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as new:
        with suppress(FileNotFoundError):
            old = os.stat(real)
            os.fchmod(handle, stat.S_IMODE(old.st_mode))
            if os.geteuid() == 0:  # the server could not read a file that belongs to root
                os.fchown(handle, old.st_uid, old.st_gid)
        new.write(text)
        new.flush()
        os.fsync(handle)
    os.replace(temporary, real)
    real_world().disk.sync_folder(os.path.dirname(real))
