"""Commands behind one word, such as `holdfast topic`."""

from __future__ import annotations

import typer

from holdfast.cli.output import NOT_DONE, stdout
from holdfast.cli.placed import App


class Section(App):
    """Commands that belong together; their word alone shows which there are."""

    def __init__(self, about: str) -> None:
        super().__init__(help=about, rich_markup_mode=None)
        self.callback(invoke_without_command=True)(_show_commands)


def _show_commands(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        stdout().print(context.get_help(), soft_wrap=True)
        raise typer.Exit(NOT_DONE)
