"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

Folder: TypeAlias = Annotated[str, typer.Argument(metavar="DIR", help="The log's folder.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else there.")]
