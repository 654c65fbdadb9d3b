"""`holdfast config show`: which settings are in force, and where each comes from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from holdfast.broker.folder.contents import Catalog, kept_settings
from holdfast.broker.folder.layout import SETTINGS, TOPIC, TOPICS, topic_folder
from holdfast.cli.opening import asked, opened_broker
from holdfast.cli.options import AsJson
from holdfast.cli.output import OK, Section, command, print_json, stdout
from holdfast.cli.places import PLACE
from holdfast.cli.text import safe
from holdfast.client.address import is_address
from holdfast.config.settings_file import FILE_VARIABLE, Effective, Origin, Setting, read_settings
from holdfast.env import World, real_world
from holdfast.env.process import environment
from holdfast.errors import InvalidRequest, UnknownTopic

app = Section("The settings file, and what is in force.")

_TIMES: Final = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))
_SIZES: Final = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))


@app.command("show")
@command
def show_command(
    folder: Annotated[
        str | None,
        typer.Argument(metavar=f"[{PLACE}]", help="A data folder, whose topics keep settings too; or a server."),
    ] = None,
    settings_file: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help=f"The settings file; {FILE_VARIABLE} by default.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show every setting that is in force and where it comes from; a mistake in any of them is an error."""
    if folder is not None and is_address(folder):
        if settings_file is not None:
            raise InvalidRequest("a server has its own settings file; leave out --config")
        return _show_told(folder, as_json=as_json)
    world = real_world()
    effective = read_settings(world, environment(), settings_file)
    if folder is not None and not world.disk.exists(folder):
        raise InvalidRequest(
            f"there is no folder {folder}; name a data folder, or none to see only the settings file's"
        )
    topics = _topics(world, effective, folder or effective.data_dir)
    if as_json:
        print_json(
            {
                "file": effective.path,
                "data_dir": effective.data_dir,
                "settings": _document(effective.settings()),
                "topics": {topic: _document(settings) for topic, settings in topics.items()},
            }
        )
        return OK
    named = f"settings file: {safe(effective.path)}" if effective.path else "settings file: none"
    stdout().print(named if effective.path else f"{named} (name one with --config, or with {FILE_VARIABLE})")
    stdout().print(_table(effective, topics))
    return OK


def _show_told(place: str, *, as_json: bool) -> int:
    """What a server follows."""
    from holdfast.protocol.topics import SettingsTold

    with opened_broker(place) as broker:
        told = asked(broker, SettingsTold, "settings")
        topics = {name: asked(broker, SettingsTold, "topics", name, "settings", all=False) for name in broker.topics()}
    if as_json:
        print_json(
            {
                "file": None,
                "data_dir": None,
                "settings": _told_document(told.settings),
                "topics": {name: _told_document(each.settings) for name, each in topics.items()},
            }
        )
        return OK
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    for title in ("setting", "value", "from"):
        table.add_column(title, overflow="fold")
    for name, each in [("", told), *((f"{TOPICS}.{name}.", each) for name, each in topics.items())]:
        for setting in each.settings:
            value = tuple(setting.value) if isinstance(setting.value, list) else setting.value
            shown = _text(Setting(setting.name, value, Origin("default")))
            table.add_row(f"{safe(name)}{setting.name}", shown, safe(setting.origin))
    stdout().print(table)
    return OK


def _told_document(settings: Iterable[Any]) -> dict[str, Any]:
    return {
        each.name: {
            "value": each.value,
            "from": each.kind,
            "where": None if each.kind == "default" else each.origin,
            "line": None,
        }
        for each in settings
    }


def _topics(world: World, effective: Effective, folder: str | None) -> dict[str, list[Setting]]:
    """What is set for single topics, be they in the file or in the folder."""
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
            continue  # deleted meanwhile
        settings = effective.topic_settings(topic, kept, f"{place}/{SETTINGS}")
        # How many there are is a fact, whatever anybody wishes.
        counted = Setting("partitions", partitions, Origin("folder", f"{place}/{TOPIC}"))
        found[topic] = [counted, *(setting for setting in settings if setting.name != "partitions")]
    return dict(sorted(found.items()))


def _document(settings: Iterable[Setting]) -> dict[str, Any]:
    return {
        setting.name: {
            "value": setting.value,
            "from": setting.origin.kind,
            "where": setting.origin.where or None,
            "line": setting.origin.line,
        }
        for setting in settings
    }


def _table(effective: Effective, topics: dict[str, list[Setting]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    for title in ("setting", "value", "from"):
        table.add_column(title, overflow="fold")
    for setting in effective.settings():
        table.add_row(setting.name, _text(setting), safe(str(setting.origin)))
    for topic, settings in topics.items():
        for setting in settings:
            table.add_row(f"{TOPICS}.{safe(topic)}.{setting.name}", _text(setting), safe(str(setting.origin)))
    return table


def _text(setting: Setting) -> str:
    """The value for people; a time or a size also as the file may say it."""
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
        return f"{value:,} ({_time(value)})"
    if setting.name.endswith("_bytes"):
        unit = next((f" ({value // factor}{name})" for name, factor in _SIZES if value and value % factor == 0), "")
        return f"{value:,}{unit}"
    return f"{value:,}"


def _time(ms: int) -> str:
    text = ""
    for name, unit in _TIMES:
        count, ms = divmod(ms, unit)
        text += f"{count}{name}" if count else ""
    return text
