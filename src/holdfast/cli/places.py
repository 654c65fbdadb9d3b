"""The place where a command works, a folder or a server, and how to get access to it."""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar, get_type_hints

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup

from holdfast.client import network as trust
from holdfast.client.address import Address, is_address, parse_address, refuse_almost
from holdfast.client.network import distrust, has_hung_up, strictness
from holdfast.env.process import environment, set_variable
from holdfast.env.sockets import connect_tcp, connect_unix
from holdfast.errors import BadSettings, InvalidRequest, Unauthenticated, Unavailable

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
            there = f"there are {', '.join(sorted(self.profiles))}" if self.profiles else "there is none yet"
            raise InvalidRequest(
                f"there is no profile {name} in {path()}; {there}. Make it with `holdfast profile add {name} URL`"
            )
        return found


def path() -> Path:
    """Return the path of the profiles: `HOLDFAST_PROFILES`, or the user's configuration folder."""
    named = os.environ.get(FILE)
    if named:
        return Path(named)
    home = os.environ.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    return Path(home) / "holdfast" / "profiles.toml"


def read() -> Profiles:
    """Read the file; no profiles if there is none."""
    try:
        content = path().read_text("utf-8")
    except FileNotFoundError:
        return Profiles()
    try:
        return msgspec.convert(tomllib.loads(content), Profiles)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise BadSettings(f"{path()} cannot be used: {error}") from None


def write(profiles: Profiles) -> None:
    """Replace the file. It may hold tokens, so only its owner may read it."""
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
    # ASCII JSON strings are valid TOML, except for surrogates, which no place contains.
    return json.dumps(value, ensure_ascii=False) if str(value).isprintable() else json.dumps(value)


# Arguments that are obviously valid are accepted without typer's validation.
#
# The library that typer validates arguments with takes longer to load than most commands take to run. It is only used
# for arguments that are invalid or of a rarer kind, since it has the error messages.


_MOST_DIGITS: Final = 18
_UNSURE: Final = object()

_Process: TypeAlias = Callable[[Any, Any], Any]


class TakesPlain:
    """Mixin for a command of typer's: its parameters accept obviously valid values by themselves."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in found:
            described = getattr(parameter, "type_descriptor", None)  # older versions of typer do not use that library
            if described is not None and "process_value" not in vars(parameter):
                parameter.process_value = _quick(parameter, described, parameter.process_value)
        return found


def _quick(parameter: Any, described: Any, thorough: _Process) -> _Process:
    def process_value(ctx: Any, value: Any) -> Any:
        taken = _taken(parameter, described, value)
        if taken is _UNSURE:
            return thorough(ctx, value)
        return taken if parameter.callback is None else parameter.callback(ctx, parameter, taken)

    return process_value


def _taken(parameter: Any, described: Any, value: Any) -> Any:
    """Convert the value to its type if it is obviously valid."""
    kind, limits = described.annotation, described.parameter_info
    if limits.parser is not None:
        return _UNSURE
    if value is None and not parameter.required:
        return () if parameter.multiple or parameter.nargs == -1 else None
    if kind is str and isinstance(value, str):
        return value
    if kind == list[str] and isinstance(value, list | tuple) and value and all(isinstance(each, str) for each in value):
        return list(value)
    if kind is int and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS:
        value = int(value)
    return value if kind is int and type(value) is int and _within(value, limits) else _UNSURE


def _within(value: int, limits: Any) -> bool:
    return (limits.min is None or value >= limits.min) and (limits.max is None or value <= limits.max)


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
    if place != USUAL:
        return place
    found = usual_place()
    if found is None:
        raise InvalidRequest(
            f"{USUAL} stands for the usual place, and there is none: set {URL}, or choose a profile with "
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
    entry = _entry(place)
    said = {TOKEN: entry.token, trust.CA: entry.tls_ca, trust.CERTIFICATE: entry.tls_cert, trust.KEY: entry.tls_key}
    if entry.tls_cert is not None:
        said[trust.KEY] = entry.tls_key or ""  # never the key of another certificate
    for name, value in said.items():
        if value is not None:
            set_variable(name, value)


def connected(place: str, wait_s: float) -> Broker:
    """Return the broker at an address that is known to answer."""
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


def _reach(address: Address, tls: Any, wait_s: float) -> None:
    """Check that the server answers: a regular call would be retried for longer than people want to wait."""
    give_up = time.monotonic() + wait_s
    while True:
        try:
            return _knock(address, tls)
        except (OSError, EOFError) as error:
            why = distrust(error)
            if why:  # retrying would not help
                raise _not_trusted(address, why, strictness(error)) from None
            if time.monotonic() >= give_up:
                raise _unreachable(address, error) from None
        time.sleep(_PAUSE_S)


def _knock(address: Address, tls: Any) -> None:
    """Wait for the first byte of an answer: a server may accept a connection and close it without one."""
    if address.socket is not None:
        connect_unix(address.socket, _CONNECT_S).close()
        return
    with connect_tcp(address.host, address.port, _CONNECT_S, tls) as connection:
        connection.sendall(f"GET /healthz HTTP/1.1\r\nhost: {address.authority}\r\nconnection: close\r\n\r\n".encode())
        with suppress(TimeoutError):  # the server is up, if slow
            if not connection.recv(1):
                raise EOFError("it hung up before it had said a word")


def _not_trusted(address: Address, why: str, remedy: str) -> Unauthenticated:
    if remedy:
        advice = remedy
    elif "mismatch" in why:
        advice = "Use a name that its certificate has"
    else:
        advice = (
            "Name the file of certificates to trust with `holdfast profile add NAME URL --tls-ca FILE`, or in "
            f"{trust.CA}, unless this is not your server"
        )
    return Unauthenticated(f"the server at {address.text} has not proved who it is: {why}. Nothing was sent. {advice}")


def _unreachable(address: Address, error: Exception) -> Unavailable:
    why = str(getattr(error, "strerror", None) or error)
    hung_up = has_hung_up(error)
    if hung_up and address.secure:
        advice = (
            "So do servers that ask for a client's certificate, and get none that they trust: name one with "
            f"`holdfast profile add NAME URL --tls-cert FILE --tls-key FILE`, or in {trust.CERTIFICATE}"
        )
    elif hung_up:
        advice = "See whether it speaks TLS at this port: then its address begins with https://"
    elif "SSL" in why:
        advice = "See whether it speaks TLS at this port: an address without it begins with http://"
    else:
        advice = "See whether it runs (`holdfast serve DIR` says where it listens), and whether the address is right"
    return Unavailable(f"no server can be reached at {address.text}: {why}. {advice}")


# Commands that take a place: DIR may be an address, an option or the default.


_Function = TypeVar("_Function", bound=Callable[..., Any])

PLACE: Final = "DIR|URL"
FOLDER: Final = "folder"
TOPIC: Final = "topic"
AT: Final = "at_place"
DUE: Final = "due"
PROFILE: Final = "profile_name"


def option(*words: str, **more: Any) -> Any:
    """Declare an option: its names, the last one followed by the name of its value, then its help."""
    *names, about = words
    last, _, metavar = names.pop().partition(" ")
    return typer.Option(*names, last, metavar=metavar or None, help=about, **more)


def argument(metavar: str, about: str, **more: Any) -> Any:
    """Declare an argument: its name and its help."""
    return typer.Argument(metavar=metavar, help=about, **more)


AtPlace: TypeAlias = Annotated[
    str | None, typer.Option("--at", metavar=PLACE, help="Where, instead of the first argument.")
]
ProfileName: TypeAlias = Annotated[str | None, option("--profile NAME", "The same by the name of a profile.")]


def unbundled(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """Return a command's signature with each NamedTuple replaced by its fields, and these types by parameter.

    The first field, the place, stays where the parameter was; the other fields become options at the end.
    """
    signature = inspect.signature(function, eval_str=True)
    bundles = {
        name: each.annotation for name, each in signature.parameters.items() if hasattr(each.annotation, "_fields")
    }
    first: list[inspect.Parameter] = []
    last: list[inspect.Parameter] = []
    for name, each in signature.parameters.items():
        if name not in bundles:
            first.append(each)
            continue
        hints, defaults = get_type_hints(each.annotation, include_extras=True), each.annotation._field_defaults
        place, *others = (
            inspect.Parameter(
                field, each.kind, default=defaults.get(field, inspect.Parameter.empty), annotation=hints[field]
            )
            for field in each.annotation._fields
        )
        first.append(place)
        last += others
    return signature.replace(parameters=[*first, *last]), bundles


def with_place(signature: inspect.Signature) -> inspect.Signature:
    """Return the parameters of a command, with --at and --profile added if it takes a place."""
    folder = signature.parameters.get(FOLDER)
    if folder is None or not any(PLACE in (getattr(each, "metavar", "") or "") for each in _notes(folder)):
        return signature
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in ((AT, AtPlace), (PROFILE, ProfileName))
    ]
    return signature.replace(parameters=[*signature.parameters.values(), *added])


def _notes(parameter: inspect.Parameter) -> tuple[Any, ...]:
    return getattr(parameter.annotation, "__metadata__", ())


class PlacedCommand(TakesPlain, TyperCommand):
    """Puts the place where the command expects it: before all other arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = {each.name for each in self.params}
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        if FOLDER not in names:
            return super().parse_args(ctx, self._by_option(ctx, args, names))
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        if PROFILE not in names:
            return self._in_a_folder(ctx, args, given)
        place = self._said(ctx, given)
        if place is not None and given.get(FOLDER) == USUAL:
            raise InvalidRequest(f"an option says where already: leave out {USUAL}, which stands for the usual place")
        if place is None and self._needs_place() and self._lacks_place(given):
            place = self._left_out(given)
        rest = super().parse_args(ctx, args if place is None else [place, *args])
        if isinstance(ctx.params.get(FOLDER), str):
            if place is None:
                self._name_is_queue(ctx)
            ctx.params[FOLDER] = said_or_usual(ctx.params[FOLDER])
            refuse_almost(ctx.params[FOLDER])
        return rest

    def _name_is_queue(self, ctx: Any) -> None:
        """With a default place, a plain name is a queue there: taken as a folder, it would be created here silently."""
        name = ctx.params[FOLDER]
        usual = None if not _is_plain(name) else usual_place()
        if usual is None:
            return
        folder = f"for a folder here write ./{name}"
        if not any(each.name == TOPIC and each.param_type_name == "option" for each in self.params):
            raise InvalidRequest(
                f"{name} would be a queue at {usual}, the usual place, and `{ctx.command_path}` is for a whole place: "
                f"leave it out, or write {USUAL}; {folder}"
            )
        if ctx.params.get(TOPIC) not in (None, name):
            raise InvalidRequest(
                f"{name} is a queue at {usual}, the usual place, and --topic says {ctx.params[TOPIC]}: give one of "
                f"them; {folder}"
            )
        ctx.params[FOLDER], ctx.params[TOPIC] = usual, name
        if os.path.isdir(name) and not ctx.params.get("as_json"):
            sys.stderr.write(f"note: {name} is the queue at {usual}, the usual place; {folder}\n")

    def _in_a_folder(self, ctx: Any, args: list[str], given: dict[str, Any]) -> list[str]:
        if self._root(ctx, "at") or self._root(ctx, PROFILE) or is_address(given.get(FOLDER)):
            raise InvalidRequest(
                f"`{ctx.command_path}` works on files: name the data folder, on the machine that has it"
            )
        return super().parse_args(ctx, args)

    def _by_option(self, ctx: Any, args: list[str], names: set[str]) -> list[str]:
        """Handle a command that takes a place only by --at, or none."""
        place = self._said(ctx, {})
        if place is None:
            return args
        if "at" not in names:
            raise InvalidRequest(f"`{ctx.command_path}` works at no place: leave out --at and --profile")
        return ["--at", place, *args]

    def _said(self, ctx: Any, given: dict[str, Any]) -> str | None:
        """Return the place given by an option, before or after the command."""
        if DUE in {each.name for each in self.params}:
            _refuse_time(given.get(AT))
        places = [given.get(AT), self._root(ctx, "at")]
        names = [given.get(PROFILE), self._root(ctx, PROFILE)]
        said = [each for each in places if isinstance(each, str)]
        named = [each for each in names if isinstance(each, str)]
        if len(said) + len(named) > 1:
            raise InvalidRequest("--at and --profile both say where; give one of them, once")
        if said:
            return said_or_usual(said[0])
        return place_of(named[0]) if named else None

    def _root(self, ctx: Any, name: str) -> str | None:
        found = ctx.find_root().params.get(name)
        return found if isinstance(found, str) else None

    def _needs_place(self) -> bool:
        return any(each.name == FOLDER and each.required for each in self.params)

    def _lacks_place(self, given: dict[str, Any]) -> bool:
        """Whether no argument can be the place: there is none, or all are needed for something else."""
        first = given.get(FOLDER)
        if not isinstance(first, str):
            return True
        if first == USUAL or is_address(first) or os.sep in first:
            return False
        others = [each for each in self.params if each.param_type_name == "argument" and each.name != FOLDER]
        return any(each.required and not isinstance(given.get(each.name or ""), str | list | tuple) for each in others)

    def _left_out(self, given: dict[str, Any]) -> str | None:
        """Return the default place, or, for a command that settles a message, the place that it was taken from."""
        if "receipts" in given and os.environ.get(EXPORTED_PLACE):
            return os.environ[EXPORTED_PLACE]
        return usual_place()


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
    raise InvalidRequest(f"--at says where, and {place} is a time: write --due {place}. Nothing was stored")


class PlacedGroup(TakesPlain, TyperGroup):
    """Accepts options before the command."""


class CommandApp(typer.Typer):
    """A group of commands, each of which may take a place."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=PlacedGroup, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[_Function], _Function]:
        options.setdefault("cls", PlacedCommand)
        return super().command(name, **options)
