"""Arguments that several commands share, `holdfast completion`, and the names that a shell completes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Final, Literal, TypeAlias

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from holdfast.broker.folder.contents import Catalog, GroupNotes
from holdfast.broker.folder.layout import GROUPS, names_in, topic_folder, topics
from holdfast.cli.output import OK, CommandSection
from holdfast.cli.places import AT, PLACE, PROFILE, argument, option, place_of, said_or_usual, usual_place
from holdfast.client.address import is_address
from holdfast.env import real_world
from holdfast.errors import HoldfastError
from holdfast.storage.files import join

completion_app = CommandSection("Completion of commands and names in a shell.")

Shell: TypeAlias = Literal["bash", "zsh", "fish"]
_VARIABLE: Final = "_HOLDFAST_COMPLETE"


@completion_app.command("show")
def completion_show_command(shell: Annotated[Shell, argument("SHELL", "bash, zsh or fish.")]) -> int:
    """Print the script that teaches a shell to complete: save it where the shell looks for such scripts."""
    sys.stdout.write(get_completion_script(prog_name="holdfast", complete_var=_VARIABLE, shell=shell) + "\n")
    return OK


def topic_names(context: typer.Context, incomplete: str) -> list[str]:
    """The topics whose names begin so."""
    return _matching(_topics(context), incomplete)


def group_names(context: typer.Context, incomplete: str) -> list[str]:
    """The groups whose names begin so: of the topic that was typed before, or of all."""
    return _matching(_groups(context), incomplete)


def _matching(names: Iterator[str], incomplete: str) -> list[str]:
    found: set[str] = set()
    with suppress(OSError, HoldfastError):  # a shell wants names, not reasons
        found.update(name for name in names if name.startswith(incomplete))
    return sorted(found)


def _topics(context: typer.Context) -> Iterator[str]:
    folder = _folder(context)
    if is_address(folder):
        yield from (name for name, _ in _topics_of_server(str(folder)))
    elif folder is not None:
        yield from topics(real_world(), folder)


def _topics_of_server(place: str) -> Iterator[tuple[str, list[str]]]:
    """The topics of a server, each with its groups."""
    from holdfast.cli.reading import standing_of

    for topic in standing_of(place).topics():
        yield topic.name, [group.name for group in topic.groups]


def _groups(context: typer.Context) -> Iterator[str]:
    folder, chosen, world = _folder(context), context.params.get("topic"), real_world()
    if folder is None:
        return
    if is_address(folder):
        for name, groups in _topics_of_server(folder):
            yield from groups if chosen in (None, name) else ()
        return
    catalog = Catalog(world, folder)
    for topic in [chosen] if isinstance(chosen, str) else topics(world, folder):
        yield from GroupNotes(world, topic_folder(folder, topic)).names(catalog.facts(topic).partitions)
    yield from (name for name in names_in(world, join(folder, GROUPS)) if not name.startswith("."))


def _folder(context: typer.Context) -> str | None:
    """What an option says; else the folder comes first everywhere, or is the usual one.

    Behind an option that still lacks its value nothing is parsed.
    """
    named = context.params.get(PROFILE) or context.find_root().params.get(PROFILE)
    if isinstance(named, str):
        return place_of(named)
    said = context.params.get(AT) or context.find_root().params.get("at")
    folder = said or context.params.get("folder") or next(iter(context.args), None) or usual_place()
    return said_or_usual(folder) if isinstance(folder, str) else None


# Long enough for another command to finish, short enough to report an owner that stays.
WAIT: Final = "1s"

Folder: TypeAlias = Annotated[str, argument("DIR", "The folder of a queue, or of a log.")]
DataFolder: TypeAlias = Annotated[str, argument(PLACE, "The data folder, or a server.")]
QueueFolder: TypeAlias = Annotated[str, argument(PLACE, "The queue's folder, or a server.")]
Topic: TypeAlias = Annotated[
    str | None,
    option("--topic NAME", "Which topic, where the folder has several.", autocompletion=topic_names),
]
Group: TypeAlias = Annotated[
    str | None,
    option("--group NAME", "Which group of the topic; `default` by default.", autocompletion=group_names),
]
PartitionNumber: TypeAlias = Annotated[int | None, option("--partition N", "Only this partition of the topic.", min=0)]
AsJson: TypeAlias = Annotated[bool, option("--json", "Print JSON on stdout and nothing else there.")]
Wait: TypeAlias = Annotated[
    str,
    option("--wait TIME", "Wait so long for another process to let go of the folder."),
]
Where: TypeAlias = Annotated[
    str | None,
    option("--where EXPR", "Only messages for which this holds: 'attempts > 2', 'key == \"a\"'."),
]
Limit: TypeAlias = Annotated[int | None, option("--limit", "Stop after so many messages.", min=0)]
TlsKey: TypeAlias = Annotated[str | None, option("--tls-key FILE", "Its key, where that is not in the same file.")]
Yes: TypeAlias = Annotated[bool, option("--yes", "Do not ask.")]
DryRun: TypeAlias = Annotated[bool, option("--dry-run", "Only say what would be done.")]
