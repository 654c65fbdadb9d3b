"""The words of a command line: how a command declares its arguments and options, how they are parsed and explained.

A command is a function. Its parameters carry what people type, as `Annotated[str, option("--key KEY", "The key.")]`,
and its docstring is its help: the summary, more about it, and at the end a block of examples. This module imports
nothing slow, since every command waits for it.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of

# A function that returns the words that a shell may offer, given the values so far and the beginning of the word.
Completer: TypeAlias = Callable[["Typed", str], "list[str]"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

EXAMPLES: Final = "Examples:"
# Options that many commands share: they come last in the help.
_COMMON: Final = ("--topic", "--group", "--wait", "--json", "--at", "--profile", "--help")
_MOST_NUMBER: Final = 10**18 - 1  # what counts or limits anything is smaller; infinity is not
_MOST_CELLS: Final = 100
_LEAST_CELLS: Final = 40
_INDENT: Final = "  "
_MOST_LABEL: Final = 28


class UsageError(Exception):
    """A mistake in what was typed."""

    def __init__(self, message: str, path: str = "holdfast") -> None:
        super().__init__(message)
        self.path = path


class Declared(NamedTuple):
    """What a parameter's annotation says about it; an argument has no names."""

    names: tuple[str, ...]
    metavar: str
    about: str
    least: float | None = None
    most: float | None = None
    complete: Completer | None = None


def option(
    *words: str, least: float | None = None, most: float | None = None, complete: Completer | None = None
) -> Any:
    """Declare an option: its names, the last one followed by the name of its value, then its help."""
    *names, about = words
    last, _, metavar = names.pop().partition(" ")
    return Declared((*names, last), metavar, about, least, most, complete)


def argument(metavar: str, about: str, *, complete: Completer | None = None) -> Any:
    """Declare an argument: its name and its help."""
    return Declared((), metavar, about, complete=complete)


class Parameter(NamedTuple):
    """An argument or an option of a command. `kind` is bool for a switch; `choices` are all values of a few."""

    name: str
    declared: Declared
    kind: type
    choices: tuple[str, ...]
    many: bool
    required: bool
    default: Any

    @property
    def is_option(self) -> bool:
        return bool(self.declared.names)

    @property
    def label(self) -> str:
        """How errors name it."""
        return self.declared.names[-1] if self.is_option else self.declared.metavar

    @property
    def metavar(self) -> str:
        """The name of its value."""
        if self.declared.metavar or self.kind is bool:
            return self.declared.metavar
        if self.choices:
            return "|".join(self.choices)
        return "N" if self.kind in (int, float) else self.label.rpartition("-")[2].upper()

    def read(self, text: str) -> Any:
        """Convert what was typed; raises UsageError."""
        if self.choices and text not in self.choices:
            raise UsageError(f"{self.label} cannot be {text!r}: choose from {', '.join(self.choices)}")
        if self.kind is str:
            return text
        word = "a whole number" if self.kind is int else "a number"
        try:
            value = self.kind(text)
        except ValueError:
            raise UsageError(f"{self.label} cannot be {text!r}: it must be {word}") from None
        least, most = self.declared.least, self.declared.most
        if (least is not None and not value >= least) or (most is not None and not value <= most):
            raise UsageError(f"{self.label} cannot be {text}: it must be {_range(least, most)}")
        if not abs(value) <= _MOST_NUMBER:
            raise UsageError(f"{self.label} cannot be {text!r}: it must be {word} of at most 18 digits")
        return value

    def remark(self) -> str:
        """What the help says behind its text."""
        least, most = self.declared.least, self.declared.most
        parts = [f"{least:,} to {most:,}"] if least is not None and most is not None else []
        shown = self.default not in (None, False, "", ()) and "default" not in self.declared.about
        parts += [f"default: {self.default}"] if shown else []
        parts += ["repeatable"] if self.is_option and self.many else []
        parts += ["required"] if self.is_option and self.required else []
        return f" ({'; '.join(parts)})" if parts else ""


def _range(least: float | None, most: float | None) -> str:
    if least is None or most is None:
        return f"{least:,} or more" if most is None else f"at most {most:,}"
    return f"from {least:,} to {most:,}"


class Typed:
    """What was typed for a command, before the positional words are given to its arguments."""

    def __init__(self, command: Command, root: Mapping[str, Any]) -> None:
        self.command = command
        self.root = root
        self.options: dict[str, Any] = {}
        self.words: list[str] = []

    def arguments(self) -> dict[str, Any]:
        """Give the words to the arguments, in order; an argument that takes many takes all that others can spare."""
        wanted = self.command.arguments
        values: dict[str, Any] = {}
        words = list(self.words)
        for number, each in enumerate(wanted):
            later = wanted[number + 1 :]
            if each.many:
                spare = max(len(words) - sum(one.required for one in later), 0)
                values[each.name], words = words[:spare] or None, words[spare:]
            elif words and (each.required or len(words) > sum(one.required for one in later)):
                values[each.name] = words.pop(0)
        if words:
            raise UsageError(f"unexpected argument {words[0]!r}; --help shows the arguments", self.command.path)
        return values

    def value(self, name: str) -> Any:
        """Return the value of an option or an argument, as far as it was typed."""
        if name in self.options:
            return self.options[name]
        try:
            return self.arguments().get(name)
        except UsageError:
            return None


class Command:
    """A function that people call by typing: its parameters, and its help."""

    def __init__(self, path: str, function: Callable[..., Any]) -> None:
        self.path = path
        self.function = function
        self.bundles: dict[str, Any] = {}
        self.parameters = self.read_parameters()
        self.arguments = [each for each in self.parameters if not each.is_option]
        self.options = {name: each for each in self.parameters for name in each.declared.names}

    def read_parameters(self) -> list[Parameter]:
        """Return the parameters of the function, with each NamedTuple replaced by its fields; required ones first."""
        hints, defaults = hints_of(self.function, include_extras=True), _defaults(self.function)
        found: list[Parameter] = []
        for name in _names(self.function):
            kind = hints[name]
            if not hasattr(kind, "_fields"):
                found.append(_parameter(name, kind, defaults))
                continue
            self.bundles[name] = kind
            fields = hints_of(kind, include_extras=True)
            found += (_parameter(field, fields[field], kind._field_defaults) for field in kind._fields)
        return sorted(found, key=lambda each: not each.required)

    def parse(self, arguments: Sequence[str], root: Mapping[str, Any]) -> Typed:
        """Sort what was typed into options and words; raises UsageError."""
        typed = Typed(self, root)
        waiting = list(arguments)
        while waiting:
            word = waiting.pop(0)
            if word == "--":
                typed.words += waiting
                break
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                self._take(typed, name, [value] if equals else None, waiting)
            elif word.startswith("-") and word != "-":
                self._take_letters(typed, word, waiting)
            else:
                typed.words.append(word)
        return typed

    def _take_letters(self, typed: Typed, word: str, waiting: list[str]) -> None:
        """Take `-f`, `-n5` or `-fn 5`."""
        letters = word[1:]
        while letters:
            name, letters = f"-{letters[0]}", letters[1:]
            found = self.options.get(name)
            if found is None:
                raise self.unknown_option(word)
            attached = [letters] if letters and found.kind is not bool else None
            self._take(typed, name, attached, waiting)
            if attached:
                return

    def _take(self, typed: Typed, name: str, attached: list[str] | None, waiting: list[str]) -> None:
        found = self.options.get(name)
        if found is None:
            raise self.unknown_option(name)
        if found.kind is bool:
            if attached:
                raise UsageError(f"{name} takes no value", self.path)
            typed.options[found.name] = True
            return
        if not attached and not waiting:
            raise UsageError(f"{name} needs a value: {name} {found.metavar}", self.path)
        text = attached[0] if attached else waiting.pop(0)
        if found.many:
            typed.options.setdefault(found.name, []).append(text)
        else:
            typed.options[found.name] = text

    def unknown_option(self, name: str) -> UsageError:
        return UsageError(f"there is no option {name}{nearest(name, self.options)}", self.path)

    def values(self, typed: Typed) -> dict[str, Any]:
        """Return the function's arguments; raises UsageError for one that is missing or cannot be read."""
        given = {**typed.options, **typed.arguments()}
        values: dict[str, Any] = {}
        for each in self.parameters:
            text = given.get(each.name)
            if text is None:
                if each.required:
                    what = "option" if each.is_option else "argument"
                    raise UsageError(f"missing {what} {each.label}", self.path)
                values[each.name] = each.default
                continue
            try:
                if isinstance(text, list):
                    values[each.name] = [each.read(one) for one in text]
                else:
                    values[each.name] = text if text is True else each.read(text)
            except UsageError as error:
                raise UsageError(str(error), self.path) from None
        return values

    def call(self, values: dict[str, Any]) -> Any:
        """Call the function."""
        for name, kind in self.bundles.items():
            values[name] = kind(**{field: values.pop(field) for field in kind._fields})
        known = _names(self.function)
        return self.function(**{name: value for name, value in values.items() if name in known})

    def usage(self) -> str:
        """Return the usage line: arguments first, then options."""
        words = []
        for each in self.arguments:
            shown = f"{each.metavar}..." if each.many else each.metavar
            words.append(shown if each.required else f"[{shown}]")
        words += [f"{each.label} {each.metavar}" for each in self.parameters if each.is_option and each.required]
        return " ".join([self.path, *words, "[OPTIONS]"])

    def help(self) -> str:
        """Return the help page."""
        options = [each for each in self.parameters if each.is_option]
        own = [each for each in options if each.label not in _COMMON]
        common = sorted((each for each in options if each.label in _COMMON), key=lambda each: _COMMON.index(each.label))
        rows = {
            "Arguments:": [(each.metavar, each.declared.about + each.remark()) for each in self.arguments],
            "Options:": [_option_row(each) for each in own],
            "Common options:": [*(_option_row(each) for each in common), HELP_ROW],
        }
        label = max(len(left) for part in rows.values() for left, _ in part)
        about, more, examples = parts_of(self.function.__doc__)
        parts = [wrapped(f"Usage: {self.usage()}", hang=7), paragraphs(" ".join([about, *more[:1]]))]
        parts += [paragraphs(each) for each in more[1:]]
        parts += [f"{title}\n{columns(part, label)}" for title, part in rows.items() if part]
        if examples:
            parts.append("\n".join([EXAMPLES, *(f"{_INDENT}{line}" for line in examples)]))
        return "\n\n".join(parts) + "\n"


class Section:
    """Commands under one name, such as `holdfast topic`; the `usual` one is meant if none is named."""

    def __init__(self, about: str, usual: str = "") -> None:
        self.about = about
        self.usual = usual
        self.functions: dict[str, Callable[..., Any]] = {}

    def command(self, name: str) -> Callable[[_Function], _Function]:
        """Add a command: a function that returns its exit code."""

        def add(function: _Function) -> _Function:
            self.functions[name] = function
            return function

        return add

    def help(self, path: str) -> str:
        """Return the help page: the commands, each with its summary and its first example."""
        rows = [(name, parts_of(function.__doc__)[0]) for name, function in self.functions.items()]
        examples = [f"{_INDENT}{line}" for each in self.functions.values() for line in parts_of(each.__doc__)[2][:1]]
        return (
            "\n\n".join(
                [
                    f"Usage: {path} COMMAND [ARGUMENTS]",
                    paragraphs(self.about),
                    f"Commands:\n{columns(rows)}",
                    "\n".join([EXAMPLES, *examples]),
                    f"`{path} COMMAND --help` explains one of them.",
                ]
            )
            + "\n"
        )


HELP_ROW: Final = ("-h, --help", "Show this help.")


def _option_row(each: Parameter) -> tuple[str, str]:
    names = ", ".join(each.declared.names)
    return f"{names} {each.metavar}".rstrip(), each.declared.about + each.remark()


def parts_of(docstring: str | None) -> tuple[str, list[str], list[str]]:
    """Split a docstring into its first sentence, the rest of its text by paragraph, and its examples."""
    from inspect import cleandoc  # for help only

    text, _, examples = cleandoc(docstring or "").partition(f"\n{EXAMPLES}\n")
    first, *others = [" ".join(part.split()) for part in text.split("\n\n")]
    about, dot, rest = first.partition(". ")
    more = [rest, *others] if rest or others else []
    return about + dot.rstrip(), more, [line.strip() for line in examples.splitlines() if line.strip()]


def nearest(word: str, known: Iterator[str] | Mapping[str, Any] | Sequence[str]) -> str:
    """Return a hint at the known word that was probably meant."""
    from difflib import get_close_matches

    found = get_close_matches(word, names := list(known), n=1) or get_close_matches(word.lower(), names, n=1)
    return f"; did you mean {found[0]}?" if found else ""


# Reading the parameters of a function.


_REQUIRED: Final = object()


# As inspect.signature does, which takes longer to load than this module and all that it needs.
def _names(function: Any) -> tuple[str, ...]:
    code = function.__code__
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return names


def _defaults(function: Any) -> dict[str, Any]:
    last, code = function.__defaults__ or (), function.__code__
    positional = code.co_varnames[code.co_argcount - len(last) : code.co_argcount]
    return {**dict(zip(positional, last, strict=True)), **(function.__kwdefaults__ or {})}


def _parameter(name: str, annotation: Any, defaults: Mapping[str, Any]) -> Parameter:
    kind, *notes = get_args(annotation)
    return parameter_of(name, kind, notes[0], defaults.get(name, _REQUIRED))


def parameter_of(name: str, kind: Any, declared: Declared, default: Any = _REQUIRED) -> Parameter:
    """Return a parameter of this type."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(each for each in get_args(kind) if each is not type(None))
    many = get_origin(kind) is list
    kind = get_args(kind)[0] if many else kind
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    required = default is _REQUIRED
    return Parameter(name, declared, str if choices else kind, choices, many, required, None if required else default)


# Laying out text.


def cells() -> int:
    """Return the width of the terminal; 80 if there is none."""
    said = os.environ.get("COLUMNS", "")
    if said.isascii() and said.isdigit() and int(said):
        return int(said)
    for stream in (sys.__stdout__, sys.__stderr__):
        try:
            width = os.get_terminal_size(stream.fileno()).columns  # type: ignore[union-attr]
        except (AttributeError, OSError, ValueError):
            continue
        if width:  # some terminals, such as those of containers, do not know their size
            return width
    return 80


def _width() -> int:
    return max(_LEAST_CELLS, min(cells(), _MOST_CELLS))


def wrapped(text: str, *, indent: int = 0, hang: int = 0) -> str:
    """Break a paragraph into lines of the terminal's width; words are never cut."""
    import textwrap  # for help only

    return textwrap.fill(
        text,
        _width(),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hang),
        break_long_words=False,
        break_on_hyphens=False,
    )


def paragraphs(text: str) -> str:
    """Break a text into lines; paragraphs stay apart, and lines that are indented stay as they are."""
    return "\n\n".join(
        part if part.startswith(" ") else wrapped(" ".join(part.split())) for part in text.split("\n\n") if part
    )


def columns(rows: Sequence[tuple[str, str]], label: int = 0) -> str:
    """Lay out names and what they mean in two columns; a long name has its own line."""
    import textwrap  # for help only

    label = min(max(label, *(len(left) for left, _ in rows)), _MOST_LABEL)
    lines = []
    for left, right in rows:
        text = textwrap.wrap(right, max(_width() - label - 4, 24), break_long_words=False, break_on_hyphens=False)
        if len(left) > label:
            lines.append(f"{_INDENT}{left}")
            left = ""
        first, *others = text or [""]
        lines.append(f"{_INDENT}{left:{label}}  {first}".rstrip())
        lines += [f"{_INDENT}{'':{label}}  {each}" for each in others]
    return "\n".join(lines)
