"""All that users can see, as text: the Python API, the HTTP API, the command line, the codes of errors and exits.

The files in tests/tidy/baselines say what it was; a test compares. After a change that is meant, renew them with
`python -m tests.tidy.surface --write`, and look at the difference before you commit it.

In api.txt every line begins with a name. A class that is exported has its members, and so has every public class that
one of these returns, such as `DeadLetters`. How a class is built is left out where only Holdfast builds it. A property
and a field are the same to a caller, and so are `async def` and a function that returns an awaitable; names of types
stand without their modules. So a class can move, or be written in another way, and its lines stay as they are.
In openapi.txt summaries and descriptions are left out.
Lines that begin with `~` may vanish: they belong to the classes `Remote*`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

import holdfast
import holdfast.aio
from holdfast.protocol.media import KINDS
from holdfast.server.routing import status_of_code
from tests.tidy.http_reference import all_routes
from tests.tidy.repo import ROOT
from tests.tidy.test_docs import INTERNAL

FOLDER = ROOT / "tests" / "tidy" / "baselines"
CELLS = 100  # the width of a terminal
SHOWN = 300  # of an entry that changed, in characters

# Built by Holdfast alone: users get them from `open`, `connect`, or from one another.
HANDED_OUT = frozenset(
    {"Broker", "Consumer", "DeadLetter", "Group", "Message", "Observer", "Producer", "Queue", "StreamMessage"}
)
PIECES = frozenset({"parcels"})  # what producers are made of
SPECIAL = frozenset(
    {
        "__aenter__",
        "__aexit__",
        "__aiter__",
        "__anext__",
        "__await__",
        "__call__",
        "__contains__",
        "__enter__",
        "__exit__",
        "__getitem__",
        "__iter__",
        "__len__",
        "__next__",
    }
)
_MODULE_PATH = re.compile(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_AWAITABLE = re.compile(r"^(?:Awaitable\[|Coroutine\[Any, Any, )(.*)\]$")


def api() -> list[str]:
    """Every exported name, then every class that can be reached from those."""
    lines = []
    exported = {}
    for module in (holdfast, holdfast.aio):
        for name in module.__all__:
            found = getattr(module, name)
            exported[f"{module.__name__}.{name}"] = found
            lines += list(_described(f"{module.__name__}.{name}", found))
    for kind in _reached([found for found in exported.values() if inspect.isclass(found)]):
        lines += list(_described(kind.__name__, kind, built=False))
    return sorted(set(lines), key=lambda line: (line.lstrip("~ ").startswith("holdfast") is False, line.lstrip("~ ")))


def _described(name: str, found: Any, *, built: bool = True) -> Iterator[str]:
    mark = "~ " if "Remote" in name else ""
    if inspect.ismodule(found):
        yield f"{mark}{name}: module"
    elif not inspect.isclass(found):
        yield f"{mark}{_call(name, found)}"
    else:
        plain = re.sub("^(Async)?(Remote)?", "", name.rpartition(".")[2])
        bases = [base.__name__ for base in found.__mro__[1:] if base.__name__ in holdfast.__all__ or _is_builtin(base)]
        yield f"{mark}{name}: class, is a {', '.join(base for base in bases if base != 'object') or 'object'}"
        if built and plain not in HANDED_OUT:
            yield f"{mark}{_call(name, found, found)}"
        for member in members(found):
            yield f"{mark}{_member(f'{name}.{member}', found, member)}"


def _is_builtin(kind: type) -> bool:
    return kind.__module__ in {"builtins", "queue"}


def members(kind: type) -> list[str]:
    """What a caller may use of a class, without what every object or every exception has."""
    given = {name for base in kind.__mro__ if _is_builtin(base) or base is msgspec.Struct for name in vars(base)}
    declared = {name for base in kind.__mro__ if "holdfast" in base.__module__ for name in vars(base)}
    declared |= {
        name
        for base in kind.__mro__
        if "holdfast" in base.__module__
        for name in vars(base).get("__annotations__", {})
        if issubclass(base, msgspec.Struct)
    }
    return sorted(
        name
        for name in declared
        if (name in SPECIAL or not name.startswith("_")) and name not in given | INTERNAL | PIECES
    )


def _member(name: str, kind: type, member: str) -> str:
    found = inspect.getattr_static(kind, member)
    if isinstance(found, property):
        return f"{name}: {_returned(found.fget)}"
    if isinstance(found, (classmethod, staticmethod)):
        return _call(name, getattr(kind, member))
    if inspect.isfunction(found):
        return _call(name, found, skip_first=True)
    text = next(
        (
            _text(vars(base)["__annotations__"][member])
            for base in kind.__mro__
            if member in vars(base).get("__annotations__", {})
        ),
        "",
    )
    if text and not text.startswith("ClassVar"):
        return f"{name}: {text}"
    if inspect.ismemberdescriptor(found) or callable(found):
        return f"{name}: attribute"
    return f"{name} = {_value(found)}"


def _call(name: str, found: Any, kind: type | None = None, *, skip_first: bool = False) -> str:
    """A call with its arguments, as it would be written."""
    if kind is not None and issubclass(kind, BaseException) and not inspect.isfunction(kind.__init__):
        return f"{name}(...)"  # what an exception of the standard library takes: no version of Python says it alike
    signature = inspect.signature(found)
    parts = []
    kinds = inspect.Parameter
    stars: dict[Any, str] = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}
    last: Any = None
    for number, one in enumerate(signature.parameters.values()):
        if skip_first and number == 0:
            continue
        if one.kind is kinds.KEYWORD_ONLY and last not in {kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL}:
            parts.append("*")
        annotation = f": {_text(one.annotation)}" if one.annotation is not one.empty else ""
        default = f" = {_value(one.default)}" if one.default is not one.empty else ""
        parts.append(f"{stars.get(one.kind, '')}{one.name}{annotation}{default}")
        last = one.kind
    arrow = "" if kind is not None else f" -> {_returned(found)}"
    return f"{name}({', '.join(parts)}){arrow}"


def _returned(function: Any) -> str:
    text = _text(inspect.signature(function).return_annotation)
    awaited = _AWAITABLE.match(text)
    if inspect.iscoroutinefunction(function):
        return f"awaitable {text}"
    return f"awaitable {awaited[1]}" if awaited else text


def _text(annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return "?"
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return annotation.__name__
    return _MODULE_PATH.sub("", annotation if isinstance(annotation, str) else str(annotation))


def _value(value: Any) -> str:
    return _ADDRESS.sub("", repr(value))


def _reached(kinds: list[type]) -> list[type]:
    """The public classes of ours that these return, and those that these return in turn."""
    waiting, known = list(kinds), set(kinds)
    found = []
    while waiting:
        kind = waiting.pop()
        for name in members(kind):
            for base in kind.__mro__:
                if name in vars(base) and base.__module__.startswith("holdfast"):
                    for other in _classes_in(_answer(vars(base)[name]), base.__module__):
                        if other not in known:
                            known.add(other)
                            found.append(other)
                            waiting.append(other)
                    break
    return found


def _answer(member: Any) -> str:
    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    return _text_of_return(member) if inspect.isfunction(member) else ""


def _text_of_return(function: Callable[..., Any]) -> str:
    annotation = inspect.signature(function).return_annotation
    return annotation if isinstance(annotation, str) else ""


def _classes_in(annotation: str, module: str) -> Iterator[type]:
    for word in re.findall(r"[A-Za-z]\w*", annotation):
        place = _places(module).get(word)
        if place is not None:
            found = getattr(importlib.import_module(place), word, None)
            if (
                inspect.isclass(found)
                and found.__module__.startswith("holdfast")
                and not found.__name__.startswith("_")
            ):
                yield found


@cache
def _places(module: str) -> dict[str, str]:
    """Where the names of a module's annotations come from, those that are imported for types only included."""
    path = inspect.getsourcefile(importlib.import_module(module))
    assert path is not None
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(Path(path).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("holdfast"):
            found |= {alias.name: node.module for alias in node.names if alias.asname is None}
        elif isinstance(node, ast.ClassDef):
            found[node.name] = module
    return found


def openapi() -> list[str]:
    """The OpenAPI document: one line for each call, one for each value."""
    document = _without_prose(importlib.import_module("holdfast.server.openapi").document(all_routes()))
    document["info"].pop("version")
    lines = []
    for path, methods in document.pop("paths").items():
        lines += [f"{method.upper()} {path}: {_json(operation)}" for method, operation in methods.items()]
    for part, named in document.pop("components").items():
        lines += [f"{part} {name}: {_json(schema)}" for name, schema in named.items()]
    lines += [f"{name}: {_json(value)}" for name, value in document.items()]
    return sorted(lines)


def _without_prose(node: Any) -> Any:
    """Programs do not read summaries and descriptions: they may be reworded."""
    if isinstance(node, dict):
        return {
            name: _without_prose(value)
            for name, value in node.items()
            if not (name in {"description", "summary"} and isinstance(value, str))
        }
    return [_without_prose(each) for each in node] if isinstance(node, list) else node


def _json(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def command_line() -> list[str]:
    """The help of every command: a line of it begins with the command that it is about."""
    main = importlib.import_module("holdfast.cli.main")
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(CELLS)
    try:
        pages = {"holdfast": main.root_help()}
        for name, command in main.tree().items():
            path = f"holdfast {name}"
            pages[path] = command.help() if hasattr(command, "options") else command.help(path)
    finally:
        os.environ.pop("COLUMNS")
        os.environ |= {} if before is None else {"COLUMNS": before}
    return sorted(
        f"{path}: {page}".rstrip().replace("\n", "\n    ").replace("\n    \n", "\n\n") for path, page in pages.items()
    )


def codes() -> list[str]:
    """The codes of errors with their class, status and whether to retry; the exit codes with their names."""
    output = importlib.import_module("holdfast.cli.output")
    lines = [
        f"error {code}: {kind.__name__}, HTTP {status_of_code(code)}, {'' if kind.retryable else 'not '}retryable"
        for code, kind in KINDS.items()
    ]
    exits = ("OK", "DAMAGED", "NOT_DONE", "NOTHING_THERE", "INTERRUPTED", "BROKEN_PIPE")
    return sorted(lines) + [f"exit {name}: {getattr(output, name)}" for name in exits]


SURFACES: dict[str, Callable[[], list[str]]] = {
    "api.txt": api,
    "openapi.txt": openapi,
    "command_line.txt": command_line,
    "codes.txt": codes,
}


def entries(text: str) -> dict[str, str]:
    """What a file says, by name. An entry goes on while lines are indented or empty."""
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", text.rstrip("\n")):
        name = re.split(r"\(| = |: ", entry, maxsplit=1)[0]
        found[f"{name}()" if f"{name}(" in entry[: len(name) + 1] else name] = entry
    return found


def differences(before: str, now: str) -> list[str]:
    """What changed, by name: gone, new, or with the old and the new text."""
    old, new = entries(before), entries(now)
    faults = [f"gone: {name}" for name in old if name not in new and not name.startswith("~")]
    faults += [f"new: {entry}" for name, entry in new.items() if name not in old]
    faults += [
        f"changed: {name}\n    was: {_around(old[name], entry)}\n    is:  {_around(entry, old[name])}"
        for name, entry in new.items()
        if name in old and old[name] != entry
    ]
    return faults


def _around(text: str, other: str) -> str:
    """The text; of a long one the part where it begins to differ."""
    if len(text) <= SHOWN:
        return text
    same = next((at for at, (one, two) in enumerate(zip(text, other, strict=False)) if one != two), len(other))
    begin = max(0, same - SHOWN // 2)
    return f"{'…' if begin else ''}{text[begin : begin + SHOWN]}…"


def rendered(file: str) -> str:
    """What the file should say."""
    return "\n".join(SURFACES[file]()) + "\n"


if __name__ == "__main__":
    for file in SURFACES:
        if "--write" in sys.argv[1:]:
            (FOLDER / file).write_text(rendered(file), "utf-8")
        else:
            sys.stdout.write(rendered(file))
