"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import typer

from holdfast.cli.completion import group_names, topic_names
from holdfast.cli.places import PLACE

# Long enough for another command to be through with the folder, short enough to be told of an owner that stays.
WAIT: Final = "1s"

Folder: TypeAlias = Annotated[str, typer.Argument(metavar="DIR", help="The folder of a queue, or of a log.")]
DataFolder: TypeAlias = Annotated[str, typer.Argument(metavar=PLACE, help="The data folder, or a server.")]
QueueFolder: TypeAlias = Annotated[str, typer.Argument(metavar=PLACE, help="The queue's folder, or a server.")]
Topic: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--topic", metavar="NAME", help="Which topic, where the folder has several.", autocompletion=topic_names
    ),
]
Group: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--group", metavar="NAME", help="Which group of the topic; `default` by default.", autocompletion=group_names
    ),
]
PartitionNumber: TypeAlias = Annotated[
    int | None, typer.Option("--partition", metavar="N", min=0, help="Only this partition of the topic.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else there.")]
Wait: TypeAlias = Annotated[
    str,
    typer.Option("--wait", metavar="TIME", help="Wait so long for another process to let go of the folder."),
]
Where: TypeAlias = Annotated[
    str | None,
    typer.Option("--where", metavar="EXPR", help="Only messages for which this holds: 'attempts > 2', 'key == \"a\"'."),
]
Limit: TypeAlias = Annotated[int | None, typer.Option("--limit", min=0, help="Stop after so many messages.")]
TlsKey: TypeAlias = Annotated[
    str | None, typer.Option("--tls-key", metavar="FILE", help="Its key, where that is not in the same file.")
]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
