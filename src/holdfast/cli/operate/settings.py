"""`holdfast settings`: what a queue's settings are, and how to change them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from holdfast.broker.folder.contents import NOT_KEPT
from holdfast.cli.opening import chosen_topic, opened_broker, see_to_queue, settings_of
from holdfast.cli.options import WAIT, AsJson, QueueFolder, Topic, Wait
from holdfast.cli.output import OK, command, print_json, stdout
from holdfast.cli.text import safe
from holdfast.delivery.where import seconds_of
from holdfast.errors import BadSettings, InvalidRequest
from holdfast.settings import TopicSettings, load

_SIZE: Final = re.compile(r"([0-9]+)\s*([KMG])(?:i?B)?", re.IGNORECASE)
_FACTORS: Final = {"K": 1024, "M": 1024**2, "G": 1024**3}


@command
def settings_command(
    folder: QueueFolder,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="NAME=VALUE", help="Such as max_attempts=3, or max_attempts=default.")
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Make the queue where there is none.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Show those that have their default value, too.")] = False,
    topic: Topic = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Show the settings of a queue that differ from the defaults, or change some; they are kept with the queue.

    Times may be written as 30s or 1h30m, sizes as 64MiB, and `none` stands for no such limit.
    """
    wanted = changes_of(changes or [])
    name = chosen_topic(folder, topic, create=create)
    with opened_broker(folder, wait=wait, create=create) as broker:
        if not see_to_queue(broker, name, wanted, create=create) and wanted:
            broker.alter_topic(name, **wanted)
        settings = settings_of(broker, name)
    values, defaults = msgspec.structs.asdict(settings), msgspec.structs.asdict(TopicSettings())
    differing = {name: value for name, value in values.items() if value != defaults[name]}
    if as_json:
        print_json({"settings": values, "differing": differing})
        return OK
    show_settings(values if every else {**differing, **{name: values[name] for name in wanted}})
    return OK


def show_settings(shown: dict[str, Any]) -> None:
    """Settings for people, beside their defaults."""
    defaults = msgspec.structs.asdict(TopicSettings())
    if not shown:
        stdout().print("all settings have their default values; --all shows them")
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    for title in ("setting", "value", "default"):
        table.add_column(title, overflow="fold")
    for name, value in shown.items():
        table.add_row(name, _text(value), "" if value == defaults[name] else _text(defaults[name]))
    stdout().print(table)


def changes_of(texts: Sequence[str]) -> dict[str, Any]:
    """Settings by name, from `name=value`; what is not known or cannot be is refused before anything is made."""
    wanted = dict(_change(text) for text in texts)
    for name in wanted.keys() & (NOT_KEPT - {"partitions"}):
        raise BadSettings(
            f"{name} is not kept with a topic: each program says for itself what it waits for, such as "
            "open(..., durability=...); `holdfast put` has --durability"
        )
    load(TopicSettings, {**msgspec.structs.asdict(TopicSettings()), **wanted})
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
    """From text to what the setting takes; its limits are looked at when it is used."""
    if text.lower() in ("none", "null"):
        # A codec may be called none; a limit that is none is no limit.
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


def size_of(name: str, text: str) -> int:
    """Bytes of a size on the command line: `65536`, `64KiB`."""
    found = _SIZE.fullmatch(text)
    if found is not None:
        return int(found[1]) * _FACTORS[found[2].upper()]
    if text.isascii() and text.isdigit():
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


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else safe(str(value))
