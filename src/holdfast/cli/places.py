"""The place where a command works, a folder or a server, and how to get access to it."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.broker.folder.layout import is_store
from holdfast.cli.parsing import Command, Parameter, Typed, UsageError, option, parameter_of
from holdfast.client.opening import Address, is_address, parse_address, refuse_almost
from holdfast.env.process import environment, set_variable
from holdfast.errors import BadSettings, InvalidRequest, Unauthenticated, Unavailable
from holdfast.later import json, tomllib

if TYPE_CHECKING:
    from holdfast.api.sync.broker import Broker


# Profiles: named places and their credentials, kept in a small file of the user's.


FILE: Final = "HOLDFAST_PROFILES"


class Profile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A place, which is a folder or an address, and the credentials for it.

    The caller authenticates with `token`, or with a certificate and its key; `tls_ca` names trusted certificates.
    """

    place: str
    token: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    queue: str | None = None


class Profiles(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """All profiles, and the one to use by default."""

    use: str | None = None
    profiles: dict[str, Profile] = {}

    def named(self, name: str) -> Profile:
        """Return a profile by name; raises InvalidRequest if there is none."""
        found = self.profiles.get(name)
        if found is None:
            there = f"known profiles: {', '.join(sorted(self.profiles))}" if self.profiles else "there is none yet"
            raise InvalidRequest(
                f"there is no profile {name} in {path()}; {there}. Create it with `holdfast profile add {name} URL`"
            )
        return found


def path() -> str:
    """Return the path of the profiles: `HOLDFAST_PROFILES`, or the user's configuration folder."""
    named = os.environ.get(FILE)
    if named:
        return named
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(home, "holdfast", "profiles.toml")


def read() -> Profiles:
    """Read the file; no profiles if there is none."""
    try:
        with open(path(), encoding="utf-8") as file:
            content = file.read()
    except FileNotFoundError:
        return Profiles()
    except UnicodeDecodeError as error:
        raise BadSettings(f"the profiles in {path()} cannot be read: {error}. Correct the file, or remove it") from None
    try:
        return msgspec.convert(tomllib.loads(content), Profiles)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BadSettings(f"the profiles in {path()} cannot be read: {error}. Correct the file, or remove it") from None


def write(profiles: Profiles) -> None:
    """Replace the file. It may hold tokens, so only its owner may read it."""
    place = path()
    os.makedirs(os.path.dirname(place) or ".", mode=0o700, exist_ok=True)
    new = f"{place}.{os.getpid()}.new"
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(_toml(profiles))
        os.replace(new, place)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(new)


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
    # ASCII JSON strings are valid TOML, except for surrogates, which no place contains.
    return json.dumps(value, ensure_ascii=False) if str(value).isprintable() else json.dumps(value)


# The argument that means the default place.
USUAL: Final = "@"
URL: Final = "HOLDFAST_URL"
TOKEN: Final = "HOLDFAST_TOKEN"
EXPORTED_PLACE: Final = "HOLDFAST_QUEUE"

_CONNECT_S: Final = 5.0
_PAUSE_S: Final = 0.05


# The profile of each place that came from one, since commands are only given the place.
_entries: Final[dict[str, Profile]] = {}


def place_of(name: str) -> str:
    """Return the place of a profile."""
    profile = read().named(name)
    _entries[profile.place] = profile
    return profile.place


def usual_place() -> str | None:
    """Return the default place of a command: HOLDFAST_URL, or the profile in use."""
    named = os.environ.get(URL)
    if named:
        return named
    use = read().use
    return None if use is None else place_of(use)


def said_or_usual(place: str) -> str:
    """Return the given place; `@` stands for the default one."""
    if not place:
        raise InvalidRequest(
            "the place is empty: name a folder or the address of a server; if it is in a variable, check that it is set"
        )
    if place != USUAL:
        return place
    found = usual_place()
    if found is None:
        raise InvalidRequest(
            f"{USUAL} stands for the default place, and there is none: set {URL}, or choose a profile with "
            "`holdfast profile use NAME`"
        )
    return found


def queue_of(place: str) -> str | None:
    """Return the queue that an address or a profile names besides the place."""
    named = parse_address(place).queue if is_address(place) else None
    return named or _entry(place).queue


def _entry(place: str) -> Profile:
    return _entries.get(place) or Profile(place=place)


def enter(place: str) -> None:
    """Set the credentials of a place's profile for the whole process, for code that connects by itself."""
    from holdfast.client import network as trust

    entry = _entry(place)
    said = {TOKEN: entry.token, trust.CA: entry.tls_ca, trust.CERTIFICATE: entry.tls_cert, trust.KEY: entry.tls_key}
    if entry.tls_cert is not None:
        said[trust.KEY] = entry.tls_key or ""  # never the key of another certificate
    for name, value in said.items():
        if value is not None:
            set_variable(name, value)


def connected(place: str, wait_s: float) -> Broker:
    """Return the broker at an address that is known to answer."""
    from holdfast.client import network as trust
    from holdfast.client.opening import connect

    entry, tls = _entry(place), None
    if place.startswith("https:"):
        tls = trust.context_from(entry.tls_ca, entry.tls_cert, entry.tls_key, environment())
    broker = connect(place, token=entry.token, tls=tls)
    try:
        _reach(parse_address(place), tls, wait_s)
    except BaseException:
        broker.close()
        raise
    return broker


class _AnsweredByAnother(OSError):
    """A proxy, or a server of another kind, says that it cannot answer. Its text is the status."""


def _reach(one: Address, tls: Any, wait_s: float) -> None:
    """Check that the server answers: a regular call would be retried for longer than people want to wait.

    Of several nodes, one is enough.
    """
    from holdfast.client.calling import not_ours
    from holdfast.client.network import distrust, strictness

    give_up = time.monotonic() + wait_s
    for address in cycle((one, *one.others)):
        try:
            _knock(address, tls)
            return
        except (OSError, EOFError) as error:
            why = distrust(error)
            if why:  # retrying would not help
                raise _not_trusted(address, why, strictness(error)) from None
            if address is not (one, *one.others)[-1]:
                continue
            if time.monotonic() >= give_up:
                if isinstance(error, _AnsweredByAnother):
                    raise Unavailable(not_ours(address, str(error))) from None
                raise _unreachable(address, error) from None
        time.sleep(_PAUSE_S)


def _knock(address: Address, tls: Any) -> None:
    """Wait for the first bytes of an answer: a server may accept a connection and close it without one.

    A proxy may also answer for a server that is away. A Holdfast server that answers this call never sends a 5xx.
    """
    from holdfast.env.sockets import connect_tcp, connect_unix

    if address.socket is not None:
        connect_unix(address.socket, _CONNECT_S).close()
        return
    with connect_tcp(address.host, address.port, _CONNECT_S, tls) as connection:
        connection.sendall(f"GET /healthz HTTP/1.1\r\nhost: {address.authority}\r\nconnection: close\r\n\r\n".encode())
        with suppress(TimeoutError):  # the server is up, if slow
            start = connection.recv(64)  # the status line
            if not start:
                raise EOFError("it closed the connection without responding")
            version, _, rest = start.partition(b" ")
            if version.startswith(b"HTTP/") and rest[:3] in (b"502", b"503", b"504"):
                raise _AnsweredByAnother(rest[:3].decode())


def _not_trusted(address: Address, why: str, remedy: str) -> Unauthenticated:
    from holdfast.client import network as trust

    if remedy:
        advice = remedy
    elif "mismatch" in why:
        advice = "Use a name that is in its certificate"
    else:
        advice = (
            "Name the file of certificates to trust with `holdfast profile add NAME URL --tls-ca FILE`, or in "
            f"{trust.CA}, unless this is not your server"
        )
    return Unauthenticated(
        f"the server at {address.text} has not proved its identity: {why}. Nothing was sent. {advice}"
    )


def _unreachable(address: Address, error: Exception) -> Unavailable:
    from holdfast.client import network as trust

    why = str(getattr(error, "strerror", None) or error)
    hung_up = trust.has_hung_up(error)
    if hung_up and address.secure:
        advice = (
            "Servers do this if they require a client certificate and get none that they trust: name one with "
            f"`holdfast profile add NAME URL --tls-cert FILE --tls-key FILE`, or in {trust.CERTIFICATE}"
        )
    elif hung_up:
        advice = "If it uses TLS on this port, its address begins with https://"
    elif "SSL" in why:
        advice = "If it does not use TLS on this port, its address begins with http://"
    else:
        advice = "Check that it is running (`holdfast serve DIR` prints where it listens) and that the address is right"
    return Unavailable(f"no server can be reached at {address.text}: {why}. {advice}")


# Commands that take a place: PLACE may be an address, an option or the default.


PLACE: Final = "PLACE"
FOLDER: Final = "folder"
TOPIC: Final = "topic"
AT: Final = "at_place"
DUE: Final = "due"
PROFILE: Final = "profile_name"


class PlacedCommand(Command):
    """A command that may work at a place, which then comes before its other arguments, unless an option names it."""

    def read_parameters(self) -> list[Parameter]:
        """Return the parameters, with --at and --profile added if it takes a place."""
        found = super().read_parameters()
        if not any(each.name == FOLDER and PLACE in each.metavar for each in found):
            return found
        at = option(f"--at {PLACE}", "The place, instead of the first argument.")
        profile = option("--profile NAME", "Use the place of this profile.")
        return [*found, parameter_of(AT, str, at, None), parameter_of(PROFILE, str, profile, None)]

    def values(self, typed: Typed) -> dict[str, Any]:
        """Return the function's arguments, with the place where the function expects it."""
        names = {each.name for each in self.parameters}
        if FOLDER not in names:
            if self._said(typed) is not None:
                raise InvalidRequest(f"`{self.path}` does not work at a place: leave out --at and --profile")
            return super().values(typed)
        if PROFILE not in names:
            return self._in_a_folder(typed)
        self._thing_first(typed)
        place, first = self._said(typed), typed.value(FOLDER)
        if place is not None and first == USUAL:
            raise InvalidRequest(f"an option already names the place: leave out {USUAL}, which is the default place")
        if place is None and self._needs_place() and self._lacks_place(typed):
            place = self._left_out(typed)
        if place is not None:
            typed.words.insert(0, place)
        try:
            values = super().values(typed)
        except UsageError as error:
            if place is None and self._needs_place() and self._lacks_place(typed) and "unexpected" not in str(error):
                hint = f"{PLACE} comes first; or name it with --at, or set {URL}"
                raise UsageError(f"{error}: {hint}", self.path) from None
            raise
        if isinstance(values[FOLDER], str):
            if place is None:
                self._name_is_queue(values)
            values[FOLDER] = _local(said_or_usual(values[FOLDER]))
            refuse_almost(values[FOLDER])
        return values

    def _thing_first(self, typed: Typed) -> None:
        """Accept `trace show ID PLACE` and the like: some commands used to take the place last."""
        if len(typed.words) == 2 and len(self.arguments) == 2 and not any(each.many for each in self.arguments):
            first, second = typed.words
            if _is_obvious(second) and not _is_obvious(first) and not os.path.isdir(first):
                typed.words.reverse()

    def _name_is_queue(self, values: dict[str, Any]) -> None:
        """With a default place, a plain name is a queue there: taken as a folder, it would be created here silently."""
        name = values[FOLDER]
        usual = None if not _is_plain(name) else usual_place()
        if usual is None:
            return
        folder = f"for a folder here, write ./{name}"
        if not any(each.name == TOPIC and each.is_option for each in self.parameters):
            raise InvalidRequest(
                f"{name} would be a queue at {usual}, the default place, but `{self.path}` is for a whole place: "
                f"leave it out, or write {USUAL}; {folder}"
            )
        if values.get(TOPIC) not in (None, name):
            raise InvalidRequest(
                f"{name} is a queue at {usual}, the default place, but --topic says {values[TOPIC]}: give one of "
                f"them; {folder}"
            )
        values[FOLDER], values[TOPIC] = usual, name
        if os.path.isdir(name) and not values.get("as_json"):
            sys.stderr.write(f"note: {name} is the queue at {usual}, the default place; {folder}\n")

    def _in_a_folder(self, typed: Typed) -> dict[str, Any]:
        if typed.root.get("at") or typed.root.get(PROFILE) or is_address(typed.value(FOLDER)):
            raise InvalidRequest(f"`{self.path}` works on files: run it on the machine that has the data folder")
        return super().values(typed)

    def _said(self, typed: Typed) -> str | None:
        """Return the place given by an option, before or after the command."""
        if DUE in {each.name for each in self.parameters}:
            _refuse_time(typed.options.get(AT))
        said = [each for each in (typed.options.get(AT), typed.root.get("at")) if isinstance(each, str)]
        named = [each for each in (typed.options.get(PROFILE), typed.root.get(PROFILE)) if isinstance(each, str)]
        if len(said) + len(named) > 1:
            raise InvalidRequest("--at and --profile both name a place; give one of them, once")
        if said:
            return said_or_usual(said[0])
        return place_of(named[0]) if named else None

    def _needs_place(self) -> bool:
        return any(each.name == FOLDER and each.required for each in self.parameters)

    def _lacks_place(self, typed: Typed) -> bool:
        """Whether no argument can be the place: there is none, or all are needed for something else."""
        first = typed.value(FOLDER)
        if not isinstance(first, str):
            return True
        if _is_obvious(first):
            return False
        return any(each.required and typed.value(each.name) is None for each in self.arguments if each.name != FOLDER)

    def _left_out(self, typed: Typed) -> str | None:
        """Return the default place, or, for a command that settles a message, the place that it was taken from."""
        if any(each.name == "receipts" for each in self.arguments) and os.environ.get(EXPORTED_PLACE):
            return os.environ[EXPORTED_PLACE]
        return usual_place()


def _local(place: str) -> str:
    """Return a place to read: for one in a store, its local copy, brought up to date. Opening that opens the store."""
    if not is_store(place):
        return place
    from holdfast.broker.folder.stored import refreshed_copy
    from holdfast.config.settings_file import read_settings
    from holdfast.env import real_world

    world = real_world()
    return refreshed_copy(place, read_settings(world, environment()).broker, world)


def _is_obvious(word: str) -> bool:
    """Whether this can be nothing but a place."""
    return word == USUAL or is_address(word) or os.sep in word


def _is_plain(name: str) -> bool:
    """Whether this can be a queue's name. A folder with such a name is written ./name."""
    return name not in (USUAL, ".", "..") and not is_address(name) and os.sep not in name and ":" not in name


def _refuse_time(place: object) -> None:
    """Refuse a time: `put --at` used to be one, and taken for a folder, it would be created and filled at once."""
    if not isinstance(place, str) or is_address(place) or os.path.isdir(place):
        return
    from holdfast.api.drafts import parse_instant

    try:
        parse_instant(place, 0)
    except InvalidRequest:
        return
    raise InvalidRequest(f"--at names a place, and {place} is a time: write --due {place}. Nothing was stored")
