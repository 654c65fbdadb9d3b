"""Commands that work somewhere: DIR may be an address, and may be said in other ways or be left out."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from holdfast.cli.places import EXPORTED_PLACE, USUAL, place_of, said_or_usual, usual_place
from holdfast.cli.plain import TakesPlain
from holdfast.client.address import is_address, refuse_almost
from holdfast.errors import InvalidRequest

_Function = TypeVar("_Function", bound=Callable[..., Any])

PLACE: Final = "DIR|URL"
FOLDER: Final = "folder"
TOPIC: Final = "topic"
AT: Final = "at_place"
DUE: Final = "due"
PROFILE: Final = "profile_name"

AtPlace: TypeAlias = Annotated[
    str | None, typer.Option("--at", metavar=PLACE, help="Where, instead of the first argument.")
]
ProfileName: TypeAlias = Annotated[
    str | None, typer.Option("--profile", metavar="NAME", help="The same by the name of a profile.")
]


def with_place(function: Callable[..., Any]) -> inspect.Signature:
    """What a command takes; one that works somewhere can be told where by two options as well."""
    signature = inspect.signature(function, eval_str=True)
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
        """Where a place is usual, a plain name is a queue there: were it a folder here, it would be made in silence."""
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
        """For a command that is told by --at alone, or works nowhere."""
        place = self._said(ctx, {})
        if place is None:
            return args
        if "at" not in names:
            raise InvalidRequest(f"`{ctx.command_path}` works at no place: leave out --at and --profile")
        return ["--at", place, *args]

    def _said(self, ctx: Any, given: dict[str, Any]) -> str | None:
        """The place that an option names, before the command or behind it."""
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
        """Whether no argument can be the place: there is none, or all of them are needed for something else."""
        first = given.get(FOLDER)
        if not isinstance(first, str):
            return True
        if first == USUAL or is_address(first) or os.sep in first:
            return False
        others = [each for each in self.params if each.param_type_name == "argument" and each.name != FOLDER]
        return any(each.required and not isinstance(given.get(each.name or ""), str | list | tuple) for each in others)

    def _left_out(self, given: dict[str, Any]) -> str | None:
        """The usual place, or for what settles a message the one that it was taken from."""
        if "receipts" in given and os.environ.get(EXPORTED_PLACE):
            return os.environ[EXPORTED_PLACE]
        return usual_place()


def _is_plain(name: str) -> bool:
    """Whether it can be a queue's name: a folder with such a name is written ./name."""
    return name not in (USUAL, ".", "..") and not is_address(name) and os.sep not in name and ":" not in name


def _refuse_time(place: object) -> None:
    """`put --at` was a time once; taken for a folder, it would be made, and the messages would be ready at once."""
    if not isinstance(place, str) or is_address(place) or os.path.isdir(place):
        return
    from holdfast.embedded.times import parse_instant

    try:
        parse_instant(place, 0)
    except InvalidRequest:
        return
    raise InvalidRequest(f"--at says where, and {place} is a time: write --due {place}. Nothing was stored")


class PlacedGroup(TakesPlain, TyperGroup):
    """What is said before the command."""


class App(typer.Typer):
    """Commands that belong together; each may work somewhere."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=PlacedGroup, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[_Function], _Function]:
        options.setdefault("cls", PlacedCommand)
        return super().command(name, **options)
