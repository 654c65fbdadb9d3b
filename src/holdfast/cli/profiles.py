"""Profiles: places with a name, and what it takes to get in there, kept in a small file of the user's."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.errors import BadSettings, InvalidRequest

FILE: Final = "HOLDFAST_PROFILES"


class Profile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A place: a folder or an address, and what it takes to get in there.

    `token` says who calls, or a certificate and its key do; `tls_ca` is a file of certificates to trust.
    """

    place: str
    token: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    queue: str | None = None


class Profiles(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """All of them, and which is meant where nobody names one."""

    use: str | None = None
    profiles: dict[str, Profile] = {}

    def named(self, name: str) -> Profile:
        """One of them; InvalidRequest where there is none."""
        found = self.profiles.get(name)
        if found is None:
            there = f"there are {', '.join(sorted(self.profiles))}" if self.profiles else "there is none yet"
            raise InvalidRequest(
                f"there is no profile {name} in {path()}; {there}. Make it with `holdfast profile add {name} URL`"
            )
        return found


def path() -> Path:
    """Where the profiles are: `HOLDFAST_PROFILES`, or the usual place for the settings of programs."""
    named = os.environ.get(FILE)
    if named:
        return Path(named)
    home = os.environ.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    return Path(home) / "holdfast" / "profiles.toml"


def read() -> Profiles:
    """What the file says; nothing where there is none."""
    try:
        content = path().read_text("utf-8")
    except FileNotFoundError:
        return Profiles()
    try:
        return msgspec.convert(tomllib.loads(content), Profiles)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise BadSettings(f"{path()} cannot be used: {error}") from None


def write(profiles: Profiles) -> None:
    """Replace the file; it may hold tokens, so that nobody else may read it."""
    place = path()
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = place.with_name(f"{place.name}.{os.getpid()}.new")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(_toml(profiles))
        new.replace(place)
    finally:
        new.unlink(missing_ok=True)


def _toml(profiles: Profiles) -> str:
    lines = [] if profiles.use is None else [_line("use", profiles.use), ""]
    for name, profile in sorted(profiles.profiles.items()):
        lines.append(f"[profiles.{_text(name)}]")
        lines += [_line(key, value) for key, value in msgspec.to_builtins(profile).items()]
        lines.append("")
    return "\n".join(lines)


def _line(key: str, value: str) -> str:
    return f"{key} = {_text(value)}"


def _text(value: Any) -> str:
    # A JSON text of ASCII is a TOML one, but for the halves of characters, which no place has.
    return json.dumps(value, ensure_ascii=False) if str(value).isprintable() else json.dumps(value)
