"""`holdfast settings`, `holdfast config` and `holdfast profile`: a queue's settings, all in force, named places."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from holdfast.broker.folder.contents import NOT_KEPT, Catalog, kept_settings
from holdfast.broker.folder.layout import SETTINGS, TOPIC, TOPICS, check_name, topic_folder
from holdfast.cli import opening, places
from holdfast.cli.output import OK, note, print_each, print_json, ruled_table, safe, say, stdout, table
from holdfast.cli.parsing import Section, argument, option
from holdfast.cli.places import PLACE
from holdfast.client.opening import is_address, parse_address
from holdfast.config.settings_file import Effective, Origin, Setting, read_settings
from holdfast.delivery.where import seconds_of
from holdfast.env import World, real_world
from holdfast.env.chain.keys import FILE_VARIABLE
from holdfast.env.process import environment
from holdfast.errors import BadSettings, InvalidRequest, UnknownTopic
from holdfast.later import pattern
from holdfast.settings import TopicSettings, load

_SIZE: Final = pattern(r"([0-9]+)\s*([KMG])(?:i?B)?", re.IGNORECASE)
_UNITS: Final = (("_ms", "or a time such as 30s or 7d"), ("_bytes", "or a size such as 64MiB"))
_FACTORS: Final = {"K": 1024, "M": 1024**2, "G": 1024**3}


def settings_command(
    folder: opening.QueueFolder,
    changes: Annotated[
        list[str] | None, argument("NAME=VALUE", "A setting, such as max_attempts=3 or max_attempts=default.")
    ] = None,
    create: Annotated[bool, option("--create", "Create the queue if there is none.")] = False,
    every: Annotated[bool, option("--all", "Show all settings, including those at their default.")] = False,
    topic: opening.Topic = None,
    wait: opening.Wait = opening.WAIT,
    as_json: opening.AsJson = False,
) -> int:
    """Show or change the settings of a queue. Without changes, prints those that differ from the defaults.

    Settings are kept with the queue. Write times as 30s or 1h30m, sizes as 64MiB, and `none` for no limit.

    Examples:
        holdfast settings jobs
        holdfast settings jobs max_attempts=3 lease_ms=5m
        holdfast settings jobs max_attempts=default
    """
    wanted = changes_of(changes or [])
    name = opening.chosen_topic(folder, topic, create=create)
    with opening.opened_broker(folder, wait=wait, create=create) as broker:
        if not opening.see_to_queue(broker, name, wanted, create=create) and wanted:
            broker.alter_topic(name, **wanted)
        settings = opening.settings_of(broker, name)
    values, defaults = msgspec.structs.asdict(settings), msgspec.structs.asdict(TopicSettings())
    differing = {name: value for name, value in values.items() if value != defaults[name]}
    if as_json:
        print_json({"settings": values, "differing": differing})
        return OK
    show_settings(values if every else {**differing, **{name: values[name] for name in wanted}})
    return OK


def show_settings(shown: dict[str, Any]) -> None:
    """Print settings next to their defaults."""
    defaults = msgspec.structs.asdict(TopicSettings())
    if not shown:
        stdout().print("all settings have their default values; --all shows them")
        return
    table = ruled_table("setting", "value", "default")
    for name, value in shown.items():
        table.add_row(name, _value_text(value), "" if value == defaults[name] else _value_text(defaults[name]))
    stdout().print(table)


def changes_of(texts: Sequence[str]) -> dict[str, Any]:
    """Parse `name=value` pairs; unknown names and impossible values are refused before anything is created."""
    wanted = dict(_change(text) for text in texts)
    for name in wanted.keys() & (NOT_KEPT - {"partitions"}):
        raise BadSettings(
            f"{name} is not a setting of the topic: each program chooses it for itself, such as with "
            "open(..., durability=...); `holdfast put` has --durability"
        )
    try:
        load(TopicSettings, {**msgspec.structs.asdict(TopicSettings()), **wanted})
    except BadSettings as error:
        ways = [way for name in wanted for end, way in _UNITS if f"{name}=" in str(error) and name.endswith(end)]
        raise BadSettings("; ".join([str(error), *ways])) from None
    return wanted


def _change(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise BadSettings(f"{text!r} cannot be used: write it like max_attempts=3")
    defaults = msgspec.structs.asdict(TopicSettings())
    if value == "default" and name in defaults:
        return name, defaults[name]
    return name, _value(name, value, defaults.get(name))


def _value(name: str, text: str, default: Any) -> Any:
    """Convert text to the setting's type; its limits are checked when it is used."""
    if text.lower() in ("none", "null"):
        # For a codec, `none` is a name; for a limit, it means no limit.
        return text.lower() if isinstance(default, str) else None
    if isinstance(default, str):
        return text
    if isinstance(default, tuple):
        return tuple(_number(name, part.strip()) for part in text.strip("[]()").split(","))
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    seconds = seconds_of(text) if name.endswith("_ms") else None
    if seconds is not None:
        return round(seconds * 1000)
    found = _SIZE.fullmatch(text) if name.endswith("_bytes") else None
    if found is not None:
        return int(found[1]) * _FACTORS[found[2].upper()]
    return _number(name, text)


_MOST_DIGITS: Final = 24  # with the unit


def size_of(name: str, text: str) -> int:
    """Parse a size on the command line to bytes: `65536`, `64KiB`."""
    found = _SIZE.fullmatch(text) if len(text) <= _MOST_DIGITS else None
    if found is not None:
        return int(found[1]) * _FACTORS[found[2].upper()]
    if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
        return int(text)
    raise InvalidRequest(f"{name} {text!r} cannot be used: write bytes, or a size such as 64KiB")


def _number(name: str, text: str) -> Any:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text  # refused by its type, with the limits in the message


def _value_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else safe(str(value))


settings_file_app = Section("The settings file, and the settings in force.")

_TIMES: Final = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))
_SIZES: Final = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))


@settings_file_app.command("show")
def settings_file_show_command(
    folder: Annotated[
        str | None,
        argument(PLACE, "A data folder, to include the settings of its topics, or a server's URL."),
    ] = None,
    settings_file: Annotated[
        str | None, option("--config FILE", f"The settings file; {FILE_VARIABLE} by default.")
    ] = None,
    as_json: opening.AsJson = False,
) -> int:
    """Show every setting in force, and where it comes from. Any mistake in them is an error.

    Examples:
        holdfast config show
        holdfast config show ./data --config holdfast.toml
    """
    if folder is not None and is_address(folder):
        if settings_file is not None:
            raise InvalidRequest("a server has its own settings file; leave out --config")
        file = data_dir = None
        settings, topics = _server_settings(folder)
    else:
        world = real_world()
        effective = read_settings(world, environment(), settings_file)
        if folder is not None and not world.disk.exists(folder):
            raise InvalidRequest(
                f"there is no folder {folder}; name a data folder, or none to see only the settings file's"
            )
        file, data_dir, settings = effective.path, effective.data_dir, list(effective.settings())
        topics = _topics(world, effective, folder or data_dir)
    if as_json:
        documents = {topic: _settings_document(each) for topic, each in topics.items()}
        print_json({"file": file, "data_dir": data_dir, "settings": _settings_document(settings), "topics": documents})
        return OK
    if not is_address(folder):
        hint = f"none (name one with --config, or with {FILE_VARIABLE})"
        stdout().print(f"settings file: {safe(file) if file else hint}")
    shown = ruled_table("setting", "value", "from")
    for prefix, some in [("", settings), *((f"{TOPICS}.{safe(topic)}.", each) for topic, each in topics.items())]:
        for setting in some:
            shown.add_row(f"{prefix}{setting.name}", _setting_text(setting), safe(str(setting.origin)))
    stdout().print(shown)
    return OK


class _ServerOrigin(Origin, frozen=True):
    """The origin of a value, as reported by a server."""

    def __str__(self) -> str:
        return self.where or self.kind


def _server_settings(place: str) -> tuple[list[Setting], dict[str, list[Setting]]]:
    """Return the settings of a server, overall and for each topic."""
    from holdfast.protocol.topics import SettingsTold

    with opening.opened_broker(place) as broker:
        whole = opening.asked(broker, SettingsTold, "settings")
        topics = {
            name: opening.asked(broker, SettingsTold, "topics", name, "settings", all=False) for name in broker.topics()
        }
    return _as_settings(whole), {name: _as_settings(each) for name, each in topics.items()}


def _as_settings(answer: Any) -> list[Setting]:
    return [
        Setting(
            each.name,
            tuple(each.value) if isinstance(each.value, list) else each.value,
            _ServerOrigin(each.kind, "" if each.kind == "default" else each.origin),
        )
        for each in answer.settings
    ]


def _topics(world: World, effective: Effective, folder: str | None) -> dict[str, list[Setting]]:
    """Return the settings of single topics, from the file and from the folder."""
    found = {topic: list(effective.topic_settings(topic)) for topic in effective.broker.topics}
    if folder is None:
        return found
    catalog = Catalog(world, folder)
    for topic in catalog.names():
        place = f"{TOPICS}/{topic}"
        try:
            partitions = catalog.facts(topic).partitions
            kept = kept_settings(world, f"{topic_folder(folder, topic)}/{SETTINGS}")
        except UnknownTopic:
            continue  # deleted just now
        settings = effective.topic_settings(topic, kept, f"{place}/{SETTINGS}")
        # The number of partitions is a fact of the folder, whatever the settings file says.
        counted = Setting("partitions", partitions, Origin("folder", f"{place}/{TOPIC}"))
        found[topic] = [counted, *(setting for setting in settings if setting.name != "partitions")]
    return dict(sorted(found.items()))


def _settings_document(settings: Iterable[Setting]) -> dict[str, Any]:
    return {
        setting.name: {
            "value": setting.value,
            "from": setting.origin.kind,
            "where": setting.origin.where or None,
            "line": setting.origin.line,
        }
        for setting in settings
    }


def _setting_text(setting: Setting) -> str:
    """Format the value; a time or a size also as it may be written in the file."""
    value = setting.value
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int):
        return safe(str(value)) or '""'
    if setting.name.endswith("_ms") and value >= 1000:
        return f"{value:,} ({_duration(value)})"
    if setting.name.endswith("_bytes"):
        unit = next((f" ({value // factor}{name})" for name, factor in _SIZES if value and value % factor == 0), "")
        return f"{value:,}{unit}"
    return f"{value:,}"


def _duration(ms: int) -> str:
    text = ""
    for name, unit in _TIMES:
        count, ms = divmod(ms, unit)
        text += f"{count}{name}" if count else ""
    return text


# `holdfast profile`: named places, for people who work with several.


app = Section("Named places and their credentials.")

Name: TypeAlias = Annotated[str, argument("NAME", "The name of the profile.")]


@app.command("ls")
def ls_command(as_json: opening.AsJson = False) -> int:
    """List the profiles. Tokens are not shown.

    Examples:
        holdfast profile ls
    """
    known = places.read()
    if as_json:
        print_each(_document(name, each, known.use) for name, each in sorted(known.profiles.items()))
    elif not known.profiles:
        note(f"no profiles in {safe(places.path())}")
    else:
        shown = table("profile", "place", "queue", "token", "in use")
        for name, each in sorted(known.profiles.items()):
            token, used = "yes" if each.token else "", "yes" if name == known.use else ""
            shown.add_row(safe(name), safe(each.place), safe(each.queue or ""), token, used)
        stdout().print(shown)
    return OK


@app.command("add")
def add_command(
    name: Name,
    place: Annotated[str, argument(PLACE, "A data folder, or a server's URL.")],
    token_file: Annotated[
        str | None,
        option("--token-file FILE", "The file with your token; `-` reads it from stdin."),
    ] = None,
    tls_ca: Annotated[str | None, option("--tls-ca FILE", "The certificates to trust, for https://.")] = None,
    tls_cert: Annotated[
        str | None,
        option("--tls-cert FILE", "Your client certificate, if the server asks for one."),
    ] = None,
    tls_key: opening.TlsKey = None,
    queue: Annotated[str | None, option("--queue NAME", "The queue to use by default.")] = None,
    use: Annotated[bool, option("--use", "Use this profile when no place is given.")] = False,
    as_json: opening.AsJson = False,
) -> int:
    """Add or replace a profile. Only you can read the file in which it is stored.

    Examples:
        holdfast profile add work https://queues.example.com --token-file token.txt --use
        holdfast profile add local ./data --queue jobs
    """
    check_name(name, "profile")
    _check_tls(place, tls_ca, tls_cert, tls_key)
    if is_address(place):
        parse_address(place)
    else:
        place = str(Path(place).absolute())  # the profile is valid in any working directory
    new = places.Profile(
        place=place,
        token=None if token_file is None else _token(token_file),
        tls_ca=_absolute(tls_ca),
        tls_cert=_absolute(tls_cert),
        tls_key=_absolute(tls_key),
        queue=queue,
    )
    known = places.read()
    known = msgspec.structs.replace(known, use=name if use else known.use, profiles={**known.profiles, name: new})
    places.write(known)
    if as_json:
        print_json(_document(name, new, known.use))
    else:
        say(f"{safe(name)} is {safe(place)}")
    return OK


@app.command("rm")
def rm_command(name: Name, as_json: opening.AsJson = False) -> int:
    """Delete a profile.

    Examples:
        holdfast profile rm work
    """
    known = places.read()
    known.named(name)
    left = {each: profile for each, profile in known.profiles.items() if each != name}
    places.write(places.Profiles(use=None if known.use == name else known.use, profiles=left))
    _say({"name": name, "removed": True}, f"deleted {safe(name)}", as_json=as_json)
    return OK


@app.command("use")
def use_command(
    name: Annotated[str | None, argument("NAME", "The name of the profile.")] = None,
    as_json: opening.AsJson = False,
) -> int:
    """Choose the profile to use when no place is given. Without a name, none is used.

    Examples:
        holdfast profile use work
    """
    known = places.read()
    place = None if name is None else known.named(name).place
    places.write(msgspec.structs.replace(known, use=name))
    text = "no profile is in use" if name is None else f"{safe(name)} is in use: {safe(place or '')}"
    _say({"use": name, "place": place}, text, as_json=as_json)
    return OK


def _say(document: dict[str, Any], text: str, *, as_json: bool) -> None:
    if as_json:
        print_json(document)
    else:
        say(text)


def _check_tls(place: str, ca: str | None, certificate: str | None, key: str | None) -> None:
    if not place.startswith("https://") and (ca, certificate, key) != (None, None, None):
        raise InvalidRequest(
            f"{place} is not a secure address, so --tls-ca, --tls-cert and --tls-key have no effect: use https://"
        )
    if key is not None and certificate is None:
        raise InvalidRequest("--tls-key belongs to a certificate: give that as well, with --tls-cert")


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def _token(path: str) -> str:
    token = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidRequest(f"{path} holds no token: it is the one line that `holdfast token new` printed")
    return token


def _document(name: str, profile: places.Profile, use: str | None) -> dict[str, Any]:
    return {
        "name": name,
        "place": profile.place,
        "queue": profile.queue,
        "tls_ca": profile.tls_ca,
        "tls_cert": profile.tls_cert,
        "tls_key": profile.tls_key,
        "has_token": profile.token is not None,
        "in_use": name == use,
    }
