"""Writes the modules for threads: each is made of the one for tasks, which is written by hand.

    python tools/sync.py            write those that changed, remove those whose source is gone
    python tools/sync.py --check    say which are stale, and exit with 1 if any is

Code loses its `async` and `await`, and its names change as the tables below say: `AsyncQueue` becomes `Queue`,
`wait_async` becomes `wait`, `__aenter__` becomes `__enter__`, the package `aio` becomes `sync`. A call that is
moved off the event loop, `await asyncio.to_thread(f, x)` or `await self._aside(f, x)`, becomes `f(x)`. Docstrings
and comments say thread where they said task; comments, blank lines and the order of things stay. What ruff can mend
by itself, such as the order of imports and those that nobody uses any more, it mends.

Where that is not enough, a comment says what threads have instead. It stands at the end of the statement's first or
last line (of its head, where it has a body), or in the lines right above the statement:

    # async only              left out. An `if` is left out with its body, its `else` stays; an `except` goes alone.
                              On the first line of a file: there is no such module for threads.
    # sync: <code>            this code instead. Where it ends with a colon it replaces the head and the body stays.
                              Several such lines above a statement are several lines of code.
    # threads: module.name    this function instead of the method: for a way of their own, which is written by hand.

A reason may follow: `# async only: a thread is never cancelled`.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import io
import keyword
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeGuard

ROOT: Final = Path(__file__).resolve().parents[1]

# Folders of modules for tasks, and where those for threads are written. One that does not exist is passed over.
PAIRS: Final = {
    "src/holdfast/api/aio": "src/holdfast/api/sync",
    "src/holdfast/local/aio": "src/holdfast/local/sync",
    "src/holdfast/producing/aio": "src/holdfast/producing/sync",
    "src/holdfast/remote/aio": "src/holdfast/remote/sync",
}
MADE: Final = "# Generated from "
HEAD: Final = MADE + '{source} by tools/sync.py: do not edit it, edit that one and run "make sync".\n'

# Besides these a name loses `Async` at its start and `_async` at its end.
NAMES: Final = {
    "AbstractAsyncContextManager": "AbstractContextManager",
    "StopAsyncIteration": "StopIteration",
    "TaskWaiter": "ThreadWaiter",
    "TaskWays": "ThreadWays",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "aclose": "close",
    "aclosing": "closing",
    "aiter": "iter",
    "anext": "next",
    "asynccontextmanager": "contextmanager",
    "enter_async_context": "enter_context",
    "push_async_callback": "callback",
    "push_async_exit": "push",
}
# What a thread uses instead of a part of asyncio; a module in the name is imported.
ASYNCIO: Final = {
    "CancelledError": "KeyboardInterrupt",  # what ends a thread's waiting from outside
    "Condition": "threading.Condition",
    "Event": "threading.Event",
    "Lock": "threading.Lock",
    "Queue": "queue.Queue",
    "QueueEmpty": "queue.Empty",
    "QueueFull": "queue.Full",
    "Semaphore": "threading.Semaphore",
    "TimeoutError": "TimeoutError",
    "current_task": "threading.current_thread",
    "sleep": "time.sleep",
}
ASIDE: Final = frozenset({"to_thread", "aside", "_aside"})  # awaited, they call their first argument with the others
TRANSPARENT: Final = frozenset({"shield", "Opening"})  # they stand for what their argument answers
PROMISES: Final = frozenset({"Awaitable", "Coroutine", "Opening"})  # annotations: of these the last argument is left

CODE_WORDS: Final = (
    (re.compile(r"\basync (?=with\b|for\b|def\b)|\bawait (?=[\w(])"), ""),
    (re.compile(r"\bholdfast\.aio\b"), "holdfast"),
    (re.compile(r"(?<![\w.])aio\.(?=\w)"), "holdfast."),
    (re.compile(r"\b\w+\b"), lambda match: renamed(match[0])),
)
WORDS: Final = (
    (re.compile(r"\ban (?=`?async (?:with|for)\b)"), "a "),
    (re.compile(r", for the tasks of any event loop\b"), ". Safe to use from any thread"),
    (re.compile(r"\(async\) "), ""),
    *CODE_WORDS,
    (re.compile(r"\b([Tt])ask(s?)\b"), lambda match: f"{'Thread' if match[1] == 'T' else 'thread'}{match[2]}"),
)
MARK: Final = re.compile(r"# (?:(async only)(?:: .*)?|sync: (.+)|threads: ([\w.]+))$")
LAYOUT: Final = frozenset({tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT})


class NoSyncForm(Exception):
    """Something that has no form for threads, and where it stands."""


class Edit(NamedTuple):
    """A part of the source, and what stands there instead; inside a larger edit it counts for nothing."""

    start: int
    end: int
    text: str = ""
    needs: str = ""  # an import, for the text
    problem: str = ""


class Token(NamedTuple):
    """A token, with its place in the text."""

    kind: int
    string: str
    start: int
    end: int
    line: int


class Mark(NamedTuple):
    """What a comment asks for, and its line."""

    line: int
    alone: bool
    drops: bool
    code: str
    override: str


def translated(source: str, name: str = "the module") -> str:
    """The module for threads, not formatted yet; NoSyncForm where something has none."""
    return Translation(source, name).text()


class Translation:
    """The edits that make a module for threads of one for tasks."""

    def __init__(self, source: str, name: str) -> None:
        self._source, self._name = source, name
        self._lines = source.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._tree = ast.parse(source, filename=name)
        self._tokens = list(self._tokenized())
        self._at = [token.start for token in self._tokens]
        self._edits: list[Edit] = []
        self._dropped: dict[ast.AST, Edit] = {}

    def text(self) -> str:
        """The whole of it."""
        self._follow_marks()
        for node in _walk(self._tree):
            if isinstance(node, ast.Await):
                self._unwrap_await(node)
            elif isinstance(node, ast.Call) and len(node.args) == 1 and _last_name(node.func) in TRANSPARENT:
                self._keep_only(self._start(node), node.args[0], self._end(node))
            elif isinstance(node, ast.Subscript):
                self._unwrap_annotation(node)
            elif isinstance(node, ast.ImportFrom) and node.module == "asyncio":
                self._refuse(self._start(node), self._end(node), "import asyncio itself, not names of it,")
        docstrings = {self._start(node) for node in _walk(self._tree) if _is_docstring(node)}
        for number, token in enumerate(self._tokens):
            if token.kind == tokenize.NAME:
                self._rename(number, token)
            elif token.kind == tokenize.COMMENT:
                self._replace(token.start, token.end, _reworded(token.string, WORDS))
            elif token.kind == tokenize.STRING and "b" not in token.string[:2].lower():
                words = WORDS if token.start in docstrings else CODE_WORDS
                self._replace(token.start, token.end, _reworded(token.string, words))
        return self._applied()

    def _applied(self) -> str:
        """The edits, done; whatever lies in a larger one has gone with it."""
        parts, needs, done = [], set[str](), 0
        for edit in sorted(set(self._edits), key=lambda edit: (edit.start, -edit.end)):
            if edit.start >= done:
                if edit.problem:
                    raise NoSyncForm(f"{edit.problem} at {self._name}:{self._line(edit.start)}")
                parts += [self._source[done : edit.start], edit.text]
                done = edit.end
                needs.add(edit.needs)
        text = "".join([*parts, self._source[done:]])
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            line = text.split("\n")[(error.lineno or 1) - 1].strip()
            raise NoSyncForm(f"what threads would get of {self._name} is not Python: {error.msg}: {line}") from None
        for node in ast.walk(tree):
            if isinstance(node, ast.FormattedValue) and "asyncio" in (code := ast.unparse(node.value)):
                raise NoSyncForm(f"no sync form is known for asyncio in an f-string of {self._name}: {code}")
        return _with_imports(text, tree, needs - {""})

    # Marks

    def _follow_marks(self) -> None:
        marks, own_lines = self._marks()
        used = set[Mark]()
        for node in _walk(self._tree):
            if isinstance(node, (ast.stmt, ast.ExceptHandler)):
                first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
                top = first
                while top - 1 in own_lines and not self._is_elif(node):
                    top -= 1
                above = [marks[line] for line in range(top, first) if line in marks]
                lines = {node.lineno, self._head_end(node)}
                beside = [marks[line] for line in lines if line in marks and not marks[line].alone]
                used.update(above, beside)
                self._follow(node, above + beside, top, first)
        for mark in set(marks.values()) - used:
            self._refuse(self._starts[mark.line - 1], self._starts[mark.line], "a marker beside no statement")
        for block in _blocks(self._tree):
            if block and all(node in self._dropped for node in block):
                last = self._dropped[block[-1]]
                self._edits.remove(last)
                self._edits.append(last._replace(text=f"{' ' * block[-1].col_offset}pass\n"))

    def _marks(self) -> tuple[dict[int, Mark], set[int]]:
        """The marks by their lines; and the lines with nothing but a comment."""
        marks, own_lines = {}, set()
        for token in self._tokens:
            if token.kind == tokenize.COMMENT:
                alone = not self._source[self._starts[token.line - 1] : token.start].strip()
                if alone:
                    own_lines.add(token.line)
                if found := MARK.search(token.string):
                    marks[token.line] = Mark(token.line, alone, bool(found[1]), found[2] or "", found[3] or "")
        return marks, own_lines

    def _follow(self, node: ast.stmt | ast.ExceptHandler, marks: list[Mark], top: int, first: int) -> None:
        """Do what the marks of a statement ask for; `top` is the first line of the comments above it."""
        assert node.end_lineno is not None
        indent = " " * node.col_offset
        if any(mark.drops for mark in marks) or _has_no_meaning(node):
            if isinstance(node, ast.If) and (node.orelse or self._is_elif(node)):
                self._drop_branch(node, top)
            else:
                self._edit_lines(top, node.end_lineno)
                self._dropped[node] = self._edits[-1]
        elif code := [mark.code for mark in marks if mark.code]:
            text = "".join(f"{indent}{line}\n" for line in code)
            begin = min(first, *(mark.line for mark in marks))
            if code[-1].endswith(":") and self._head_end(node) != node.end_lineno:
                self._edit_lines(begin, first - 1)
                self._edit_lines(node.lineno, self._head_end(node), text)
            else:
                self._edit_lines(begin, node.end_lineno, text)
        elif override := "".join(mark.override for mark in marks):
            module, _, function = override.rpartition(".")
            if not module or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._refuse(self._start(node), self._end(node), "`# threads: module.name` stands above a method, not")
                return
            method = renamed(node.name)
            alias = function if function != method else f"_{function}"
            needs = f"from {module} import {function}{'' if alias == function else f' as {alias}'}"
            begin = min(mark.line for mark in marks)
            self._edit_lines(begin, node.end_lineno, f"{indent}{method} = {alias}\n", needs)

    def _drop_branch(self, node: ast.If, top: int) -> None:
        """Leave out a condition and its body; what stands in its `else` takes its place."""
        assert node.end_lineno is not None
        if not node.orelse:
            self._edit_lines(node.lineno, node.end_lineno)
            return
        other = node.orelse[0]
        if self._is_elif(other):
            self._edit_lines(top, other.lineno - 1)
            if not self._is_elif(node):
                self._replace(self._start(other), self._start(other) + len("elif"), "if")
            return
        body_end = self._end(node.body[-1])
        line = next(token.line for token in self._tokens if token.start >= body_end and token.string == "else")
        if self._is_elif(node):
            self._edit_lines(top, line - 1)
            return
        self._edit_lines(top, line)
        for number in range(line + 1, node.end_lineno + 1):
            start = self._starts[number - 1]
            margin = Edit(start + node.col_offset, start + other.col_offset)
            if not self._source[margin.start : margin.end].strip() and not self._in_string(start):
                self._edits.append(margin)

    # Expressions

    def _unwrap_await(self, node: ast.Await) -> None:
        """`(await f())[0]` needs no parentheses any more, and what was called aside is called here."""
        number = self._index(self._start(node))
        begin, end = self._tokens[number + 1].start, self._end(node)
        before, closing = self._significant(number - 1, -1), self._significant(self._index(end), 1)
        if before.string == "(" and closing.string == ")" and not self._is_call(before):
            inner = self._source[begin:end]
            gap = self._source[before.end : self._tokens[number].start] + self._source[end : closing.start]
            if not gap.strip() and _stands_alone(inner):
                self._replace(before.start, begin, "")
                self._replace(end, closing.end, "")
        if isinstance(node.value, ast.Call) and node.value.args and _last_name(node.value.func) in ASIDE:
            self._call_here(node.value)

    def _call_here(self, call: ast.Call) -> None:
        """`to_thread(f, x)` becomes `f(x)`, and `to_thread(lambda: f(x))` as well."""
        function, start, end = call.args[0], self._start(call), self._end(call)
        rest = [*call.args[1:], *call.keywords]
        if isinstance(function, ast.Lambda) and not rest and not ast.unparse(function.args):
            self._keep_only(start, function.body, end)
        elif not rest:
            self._keep_only(start, function, end, "()")
        else:
            comma = self._significant(self._index(self._end(function)), 1, skip=")")
            following = self._tokens[self._index(comma.start) + 1]
            arguments = following.start if following.kind not in LAYOUT else comma.end
            self._keep_only(start, function, arguments, "(")

    def _keep_only(self, start: int, kept: ast.expr, end: int, behind: str = "") -> None:
        """Of a part of the source keep one expression, in parentheses where it needs them."""
        is_primary = isinstance(kept, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant))
        self._replace(start, self._start(kept), "" if is_primary else "(")
        self._replace(self._end(kept), end, behind if is_primary else f"){behind}")

    def _unwrap_annotation(self, node: ast.Subscript) -> None:
        """`Awaitable[T]` becomes `T`; a generator, which is sent nothing at its end, gets its third argument."""
        name = _last_name(node.value)
        several = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name in PROMISES:
            self._replace(self._start(node), self._start(several[-1]), "")
            self._replace(self._end(several[-1]), self._end(node), "")
        elif name == "AsyncGenerator" and len(several) == 2:
            self._replace(self._end(several[-1]), self._end(several[-1]), ", None")

    def _rename(self, number: int, token: Token) -> None:
        """The name as threads have it; keywords of tasks are left out."""
        following = self._tokens[number + 1]
        before = [each.string for each in self._tokens[max(0, number - 3) : number]]
        if token.string in {"async", "await"}:
            self._replace(token.start, following.start, "")
        elif token.string == "asyncio" and before[-1:] != ["."]:
            last = self._tokens[number + 2] if following.string == "." else token
            form = ASYNCIO.get(last.string)
            if form is None:
                what = self._source[token.start : last.end]
                self._refuse(token.start, last.end, f"no sync form is known for {what}: add it, or mark the line,")
            else:
                module = form.rpartition(".")[0]
                self._replace(token.start, last.end, form, f"import {module}" if module else "")
        elif token.string == "aio" and before[-2:] == ["holdfast", "."] and before[:-2] != ["."]:
            self._replace(token.start - 1, token.end, "")
        elif token.string in PROMISES and not self._in_import(token):
            self._refuse(token.start, token.end, f"no sync form is known for {token.string} without its arguments,")
        else:
            self._replace(token.start, token.end, "sync" if token.string == "aio" else renamed(token.string))

    # Places

    def _tokenized(self) -> Iterator[Token]:
        """The tokens; an f-string is one, as it was before Python 3.12."""
        depth, begin = 0, (0, 0)
        for kind, string, start, end, _ in tokenize.generate_tokens(io.StringIO(self._source).readline):
            name = tokenize.tok_name[kind]
            if name == "FSTRING_START":
                depth, begin = depth + 1, begin if depth else start
            if not depth:
                yield Token(kind, string, self._offset(start), self._offset(end), start[0])
            if name == "FSTRING_END":
                depth -= 1
                if not depth:
                    first, last = self._offset(begin), self._offset(end)
                    yield Token(tokenize.STRING, self._source[first:last], first, last, begin[0])

    def _offset(self, place: tuple[int, int]) -> int:
        return min(self._starts[min(place[0], len(self._starts)) - 1] + place[1], len(self._source))

    def _start(self, node: ast.expr | ast.stmt | ast.ExceptHandler) -> int:
        return self._from_bytes(node.lineno, node.col_offset)

    def _end(self, node: ast.expr | ast.stmt | ast.ExceptHandler) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._from_bytes(node.end_lineno, node.end_col_offset)

    def _from_bytes(self, line: int, column: int) -> int:
        """The tree counts bytes, all others characters."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _line(self, offset: int) -> int:
        return bisect.bisect_right(self._starts, offset)

    def _index(self, offset: int) -> int:
        """The number of the first token that begins there or behind."""
        return bisect.bisect_left(self._at, offset)

    def _significant(self, number: int, step: int, *, skip: str = "") -> Token:
        while self._tokens[number].kind == tokenize.NL or self._tokens[number].string == skip:
            number += step
        return self._tokens[number]

    def _is_call(self, opening: Token) -> bool:
        """Whether a parenthesis opens the arguments of a call."""
        before = self._tokens[self._index(opening.start) - 1]
        is_name = before.kind == tokenize.NAME and not keyword.iskeyword(before.string)
        return is_name or before.string in {")", "]", "}"}

    def _is_elif(self, node: ast.AST) -> bool:
        return isinstance(node, ast.If) and self._source.startswith("elif", self._start(node))

    def _in_string(self, offset: int) -> bool:
        """Whether a line begins inside a string."""
        token = self._tokens[self._index(offset) - 1]
        return token.kind == tokenize.STRING and token.end > offset

    def _in_import(self, token: Token) -> bool:
        return any(
            isinstance(node, (ast.Import, ast.ImportFrom)) and self._start(node) <= token.start < self._end(node)
            for node in _walk(self._tree)
        )

    def _head_end(self, node: ast.stmt | ast.ExceptHandler) -> int:
        """The last line of a statement, or of its head where it has a body."""
        body = getattr(node, "body", None)
        if not body:
            assert node.end_lineno is not None
            return node.end_lineno
        first = min([self._start(body[0]), *(self._start(each) for each in getattr(body[0], "decorator_list", []))])
        number = self._index(first) - 1
        while self._tokens[number].string != ":":
            number -= 1
        return self._tokens[number].line

    # Edits

    def _replace(self, start: int, end: int, text: str, needs: str = "") -> None:
        if self._source[start:end] != text:
            self._edits.append(Edit(start, end, text, needs))

    def _refuse(self, start: int, end: int, problem: str) -> None:
        self._edits.append(Edit(start, end, problem=problem))

    def _edit_lines(self, first: int, last: int, text: str = "", needs: str = "") -> None:
        if first <= last:
            self._edits.append(Edit(self._starts[first - 1], min(self._starts[last], len(self._source)), text, needs))


def renamed(name: str) -> str:
    """The name that threads have for it."""
    shorter = NAMES.get(name) or re.sub(r"^(_*)Async(?=[A-Z])", r"\1", name).removesuffix("_async")
    return name if keyword.iskeyword(shorter) or not shorter else shorter


def _reworded(text: str, words: Iterable[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]]) -> str:
    for pattern, replacement in words:
        text = pattern.sub(replacement, text)
    return text


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all in it; not what is in an f-string, whose places the tree of Python 3.11 gets wrong."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _walk(child)


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """The bodies of all statements that have one."""
    for node in _walk(tree):
        if not isinstance(node, ast.Module):
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                if isinstance(block, list):
                    yield block


def _is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _last_name(node: ast.expr) -> str:
    """`c` for `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _has_no_meaning(node: ast.AST) -> bool:
    """Whether a thread can have no use for it: what makes a thing awaitable, and asyncio."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names] == ["asyncio"]
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == "__await__"


def _stands_alone(expression: str) -> bool:
    """Whether it needs no parentheses around its lines."""
    try:
        ast.parse(expression, mode="eval")
    except SyntaxError:
        return False
    return True


def _with_imports(text: str, tree: ast.Module, needs: set[str]) -> str:
    """The text with more imports, behind the docstring and what must come first."""
    line = 0
    for node in tree.body:
        if _is_docstring(node) or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            assert node.end_lineno is not None
            line = node.end_lineno
    lines = text.split("\n")
    return "\n".join([*lines[:line], *sorted(needs), *lines[line:]])


def tidied(text: str, target: Path, root: Path = ROOT) -> str:
    """The text as ruff would leave it in that file: mended where it can mend, and formatted."""
    for work in (["check", "--fix-only", "--extend-select", "PYI016"], ["format"]):
        command = [sys.executable, "-m", "ruff", *work, "--quiet", "--stdin-filename", str(target), "-"]
        done = subprocess.run(command, cwd=root, input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoSyncForm(f"ruff cannot tidy {target.relative_to(root)}: {done.stderr.strip()}")
        text = done.stdout
    return text


def generated(root: Path = ROOT, pairs: dict[str, str] = PAIRS) -> dict[Path, str]:
    """Every module for threads, as it is to be."""
    found = {}
    for aio, sync in pairs.items():
        for path in sorted((root / aio).rglob("*.py")):
            source, name = path.read_text("utf-8"), path.relative_to(root).as_posix()
            if not source.startswith("# async only"):
                target = root / sync / path.relative_to(root / aio)
                head = HEAD.format(source=path.relative_to((root / aio).parent).as_posix())
                found[target] = tidied(head + translated(source, name), target, root)
    return found


def changes(root: Path = ROOT, pairs: dict[str, str] = PAIRS) -> dict[Path, str | None]:
    """The files that are not as they are to be, each with its text; None for one whose source is gone."""
    wanted: dict[Path, str | None] = dict(generated(root, pairs))
    for sync in pairs.values():
        for path in (root / sync).rglob("*.py"):
            if path not in wanted and path.read_text("utf-8").startswith(MADE):
                wanted[path] = None
    return {path: text for path, text in sorted(wanted.items()) if text != _text_of(path)}


def _text_of(path: Path) -> str | None:
    return path.read_text("utf-8") if path.is_file() else None


def write(path: Path, text: str | None) -> None:
    """Write a module for threads, or remove it. One that was written by hand is left alone."""
    if not (_text_of(path) or MADE).startswith(MADE):
        raise NoSyncForm(f"{path} was not generated: move it away, or name the module for tasks otherwise")
    if text is None:
        path.unlink()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def main() -> int:
    """Write what changed, or say what is stale."""
    parser = argparse.ArgumentParser(description="Write the modules for threads from those for tasks.")
    parser.add_argument("--check", action="store_true", help="say which are stale, and exit with 1 if any is")
    check = parser.parse_args().check
    try:
        stale = changes()
        for path, text in stale.items():
            what = "its source is gone" if text is None else "stale" if check else "written"
            print(f"{path.relative_to(ROOT)}: {what if check or text is not None else 'removed'}")
            if not check:
                write(path, text)
    except NoSyncForm as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if check and stale:
        print('Run "make sync", and look at what it changed.')
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
