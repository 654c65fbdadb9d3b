"""Writes the modules for threads: each is made of the one for tasks, which is written by hand.

    python tools/sync.py            write those that changed, remove those whose source is gone
    python tools/sync.py --check    say which are stale, and exit with 1 if any is

Code loses its `async` and `await`, and its names change as the tables below say: `AsyncQueue` becomes `Queue`,
`wait_async` becomes `wait`, `__aenter__` becomes `__enter__`, the package `aio` becomes `sync`. A call that is
moved off the event loop, `await asyncio.to_thread(f, x)` or `await self._aside(f, x)`, becomes `f(x)`. Docstrings
and comments say thread where they said task; comments, blank lines and the order of things stay. What ruff can mend
by itself, such as the order of imports and those that nobody uses any more, it mends.

Where that is not enough, a comment says so. It stands at the end of a statement (of its first line, or of the last
line of its head where it has a body), or in a line of its own right above:

    # async only              The statement is left out, with the comments above it. An `if` goes with its body, and
                              its `else` stays; an `except` goes alone. A reason may follow: `# async only: why`.
                              On the first line of a file: threads have no such module.
    # sync: <code>            At the end of a statement: this code instead of it; where the code ends with a colon,
                              instead of its head. In a line of its own: this code in its place, indented alike.
    # threads: module.name    Above a method: this function instead, written by hand, where threads deserve a way of
                              their own.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from keyword import iskeyword
from pathlib import Path
from typing import Final, NamedTuple, TypeGuard

ROOT: Final = Path(__file__).resolve().parents[1]

# Folders of modules for tasks, and where those for threads are written. One that does not exist is passed over.
PAIRS: Final = {
    "src/holdfast/api/aio": "src/holdfast/api/sync",
    "src/holdfast/client/aio": "src/holdfast/client/sync",
    "src/holdfast/local/aio": "src/holdfast/local/sync",
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
# Awaited, they call their first argument with the others.
ASIDE: Final = frozenset({"to_thread", "aside", "_aside", "aside_while_wanted"})
TRANSPARENT: Final = frozenset({"shield"})  # they stand for what their argument answers
OPENING: Final = "AsyncOpening"  # called or awaited, it calls its first argument with the others
PROMISES: Final = frozenset({"Awaitable", "Coroutine", OPENING})  # annotations: of these the last argument is left

CODE_WORDS: Final = (
    (re.compile(r"\basync (?=with\b|for\b|def\b)|(?<=\{)await |\bawait (?=[\w.]*\w[(\[])"), ""),
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
MARK: Final = re.compile(r"# (?:(?P<drop>async only)(?:: .*)?|sync: (?P<code>.+)|threads: (?P<override>[\w.]+))$")
# Faults that only what is generated has, and that ruff may mend in it: `yield from` is not for tasks.
MENDED: Final = '"PYI016", "SIM117", "UP028"'


class NoSyncForm(Exception):
    """Something that has no form for threads, and where it stands."""


class Edit(NamedTuple):
    """A part of the source, and what stands there instead. One that lies inside another counts for nothing."""

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


Placed = ast.expr | ast.stmt | ast.ExceptHandler
Words = Iterable[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]]


def translated(source: str, name: str = "the module") -> str:
    """The module for threads, not formatted yet; NoSyncForm where something has none."""
    return Translation(source, name).text()


class Translation:
    """The edits that make a module for threads of one for tasks: the tree says where, the text keeps its comments."""

    def __init__(self, source: str, name: str) -> None:
        self._source, self._name = source, name
        self._lines = source.split("\n")
        self._starts = [0, *accumulate(len(line) + 1 for line in self._lines)]
        self._tree = ast.parse(source, filename=name)
        self._tokens = list(self._tokenized())
        self._offsets = [token.start for token in self._tokens]
        self._edits: list[Edit] = []

    def text(self) -> str:
        """The whole of it."""
        self._follow_marks()
        for node in _walk(self._tree):
            self._change_node(node)
        docstrings = {self._start(node) for node in _walk(self._tree) if _is_docstring(node)}
        for number, token in enumerate(self._tokens):
            if token.kind == tokenize.NAME:
                self._rename(number, token)
            elif token.kind == tokenize.COMMENT:
                self._edit(token.start, token.end, _reworded(token.string, WORDS))
            elif token.kind == tokenize.STRING and "b" not in token.string[:2].lower():
                words = WORDS if token.start in docstrings else CODE_WORDS
                self._edit(token.start, token.end, _reworded(token.string, words))
        return self._applied()

    def _applied(self) -> str:
        """The text after all edits."""
        parts, needs, problems, done = [], set[str](), [], 0
        for edit in sorted(set(self._edits), key=lambda edit: (edit.start, -edit.end)):
            if edit.start >= done:
                parts += [self._source[done : edit.start], edit.text]
                done = edit.end
                needs.add(edit.needs)
                if edit.problem:
                    line = bisect.bisect_right(self._starts, edit.start)
                    problems.append(f"{self._name}:{line}: {edit.problem}")
        if problems:
            raise NoSyncForm("\n".join(problems))
        text = "".join([*parts, self._source[done:]])
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            wrong = text.split("\n")[(error.lineno or 1) - 1].strip()
            raise NoSyncForm(f"{self._name}: what is left for threads is not Python: {error.msg}: {wrong}") from None
        for node in ast.walk(tree):  # in an f-string, where only words were changed
            if isinstance(node, ast.Await) or (isinstance(node, ast.Name) and node.id == "asyncio"):
                raise NoSyncForm(f"{self._name}: no sync form is known for {ast.unparse(node)} in an f-string")
        return _with_imports(text, tree, needs - {""})

    # Marks

    def _follow_marks(self) -> None:
        beside, above, comments = self._marks()
        dropped: dict[ast.AST, Edit] = {}
        for node in _walk(self._tree):
            if isinstance(node, (ast.stmt, ast.ExceptHandler)):
                first = top = min(each.lineno for each in [node, *getattr(node, "decorator_list", [])])
                while top - 1 in comments and not self._is_elif(node):
                    top -= 1
                found = [above.pop(line, None) for line in range(top, first)]
                found += [beside.pop(line, None) for line in (node.lineno, self._head_end(node))]
                marks = [mark for mark in found if mark]
                if _is_for_tasks(node) or any(mark["drop"] for mark in marks):
                    if isinstance(node, ast.If) and (node.orelse or self._is_elif(node)):
                        self._drop_branch(node, top)
                    else:
                        self._edit_lines(top, _last_line(node))
                        dropped[node] = self._edits[-1]
                elif marks:
                    self._follow(node, marks[0], top)
        for line in [*beside, *above]:
            self._edit_lines(line, line, problem="this marker belongs to no statement")
        for block in _blocks(self._tree):
            if block and all(node in dropped for node in block):
                self._edits.remove(dropped[block[-1]])
                self._edits.append(dropped[block[-1]]._replace(text=f"{' ' * block[-1].col_offset}pass\n"))

    def _marks(self) -> tuple[dict[int, re.Match[str]], dict[int, re.Match[str]], set[int]]:
        """The marks beside statements and above them, by their lines; the lines that have nothing but a comment."""
        beside, above, comments = {}, {}, set()
        for token in self._tokens:
            if token.kind == tokenize.COMMENT:
                mark = MARK.search(token.string)
                if self._source[self._starts[token.line - 1] : token.start].strip():
                    beside.update({token.line: mark} if mark else {})
                elif mark and mark["code"]:
                    self._edit(token.start, token.end, mark["code"])
                else:
                    comments.add(token.line)
                    above.update({token.line: mark} if mark else {})
        return beside, above, comments

    def _follow(self, node: ast.stmt | ast.ExceptHandler, mark: re.Match[str], top: int) -> None:
        """Put something else in place of a statement; `top` is the first line of the comments above it."""
        indent = " " * node.col_offset
        if mark["code"]:
            last = self._head_end(node) if mark["code"].endswith(":") else _last_line(node)
            self._edit_lines(node.lineno, last, f"{indent}{mark['code']}\n")
        elif "." in mark["override"] and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            module, _, function = mark["override"].rpartition(".")
            method = renamed(node.name)
            alias, renaming = (function, "") if function != method else (f"_{function}", f" as _{function}")
            needs = f"from {module} import {function}{renaming}"
            self._edit_lines(top, _last_line(node), f"{indent}{method} = {alias}\n", needs=needs)
        else:
            self._edit_lines(top, node.lineno, problem="`# threads: module.name` belongs above a method")

    def _drop_branch(self, node: ast.If, top: int) -> None:
        """Leave out a condition and its body; what stands in its `else` takes its place."""
        if not node.orelse:
            self._edit_lines(node.lineno, _last_line(node))
            return
        other, body_end = node.orelse[0], self._end(node.body[-1])
        line = next(token.line for token in self._tokens[self._index(body_end) :] if token.string in {"else", "elif"})
        if self._is_elif(node) or self._is_elif(other):
            self._edit_lines(top, line - 1)
            if not self._is_elif(node):
                self._edit(self._start(other), self._start(other) + len("elif"), "if")
            return
        self._edit_lines(top, line)
        for start in self._starts[line : _last_line(node)]:
            margin = start + node.col_offset, start + other.col_offset
            token = self._tokens[self._index(start) - 1]  # a line that begins inside a string keeps its margin
            if not self._source[slice(*margin)].strip() and token.end <= start:
                self._edit(*margin, "")

    # Code

    def _change_node(self, node: ast.AST) -> None:
        if isinstance(node, ast.Await):
            self._strip_parentheses(node)
            if isinstance(node.value, ast.Call) and node.value.args and _last_name(node.value.func) in ASIDE:
                self._call_here(node.value)
        elif isinstance(node, ast.Call) and node.args and _last_name(node.func) == OPENING:
            self._call_here(node)
        elif isinstance(node, ast.Call) and len(node.args) == 1 and _last_name(node.func) in TRANSPARENT:
            self._keep_only(self._start(node), node.args[0], self._end(node))
        elif isinstance(node, ast.Subscript):
            self._change_annotation(node)
        elif isinstance(node, ast.Attribute) and _last_name(node.value) == "asyncio" and node.attr in ASYNCIO:
            form = ASYNCIO[node.attr]
            needs = f"import {form.partition('.')[0]}" if "." in form else ""
            self._edits.append(Edit(self._start(node), self._end(node), form, needs))
        elif isinstance(node, (ast.Name, ast.Attribute, ast.ImportFrom)):
            what = f"from {node.module}" if isinstance(node, ast.ImportFrom) else ast.unparse(node)
            if what in PROMISES or what.removeprefix("from ").partition(".")[0] == "asyncio":
                problem = f"no sync form is known for {what}; add it to a table of tools/sync.py, or mark the line"
                self._edits.append(Edit(self._start(node), self._end(node), problem=problem))

    def _strip_parentheses(self, node: ast.Await) -> None:
        """`(await f())[0]` needs no parentheses any more."""
        number, end = self._index(self._start(node)), self._end(node)
        begin = self._tokens[number + 1].start
        before, closing = number - 1, self._index(end)
        while self._tokens[before].kind == tokenize.NL:
            before -= 1
        while self._tokens[closing].kind == tokenize.NL:
            closing += 1
        caller = self._tokens[before - 1]
        is_call = caller.string in {")", "]", "}"} or (caller.kind == tokenize.NAME and not iskeyword(caller.string))
        pair = self._tokens[before].string + self._tokens[closing].string
        if pair == "()" and not is_call and _stands_alone(self._source[begin:end]):
            self._edit(self._tokens[before].start, begin, "")
            self._edit(end, self._tokens[closing].end, "")

    def _call_here(self, call: ast.Call) -> None:
        """`to_thread(f, x)` becomes `f(x)`, and so does `to_thread(lambda: f(x))`."""
        function, start, end = call.args[0], self._start(call), self._end(call)
        if len(call.args) + len(call.keywords) > 1:
            comma = self._index(self._end(function))
            while self._tokens[comma].string != ",":
                comma += 1
            self._keep_only(start, function, self._tokens[comma + 1].start, "(")
        elif isinstance(function, ast.Lambda) and not ast.unparse(function.args):
            self._keep_only(start, function.body, end)
        else:
            self._keep_only(start, function, end, "()")

    def _keep_only(self, start: int, kept: ast.expr, end: int, behind: str = "") -> None:
        """Of a part of the source keep one expression, in parentheses where it needs them."""
        opening, closing = ("", "") if isinstance(kept, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else "()"
        self._edit(start, self._start(kept), opening)
        self._edit(self._end(kept), end, closing + behind)

    def _change_annotation(self, node: ast.Subscript) -> None:
        """`Awaitable[T]` becomes `T`; a generator for threads also says what it returns."""
        several = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if _last_name(node.value) in PROMISES:
            self._edit(self._start(node), self._start(several[-1]), "")
            self._edit(self._end(several[-1]), self._end(node), "")
        elif _last_name(node.value) == "AsyncGenerator":
            self._edit(self._end(several[-1]), self._end(several[-1]), ", None" * (3 - len(several)))

    def _rename(self, number: int, token: Token) -> None:
        """The name as threads have it; the keywords of tasks are left out."""
        before = [each.string for each in self._tokens[max(0, number - 3) : number]]
        if token.string in {"async", "await"}:
            self._edit(token.start, self._tokens[number + 1].start, "")
        elif token.string == "aio" and before[-2:] == ["holdfast", "."] and before[:-2] != ["."]:
            self._edit(token.start - 1, token.end, "")
        else:
            self._edit(token.start, token.end, "sync" if token.string == "aio" else renamed(token.string))

    # Places

    def _tokenized(self) -> Iterator[Token]:
        """The tokens; an f-string is one, as it was before Python 3.12."""
        depth = first = 0
        for kind, string, (line, column), (end_line, end_column), _ in tokenize.generate_tokens(
            io.StringIO(self._source).readline
        ):
            start, end = self._starts[line - 1] + column, self._starts[end_line - 1] + end_column
            if tokenize.tok_name[kind] == "FSTRING_START":
                depth, first = depth + 1, first if depth else start
            elif tokenize.tok_name[kind] == "FSTRING_END":
                depth -= 1
                if not depth:
                    at = bisect.bisect_right(self._starts, first)
                    yield Token(tokenize.STRING, self._source[first:end], first, end, at)
            elif not depth:
                yield Token(kind, string, start, end, line)

    def _start(self, node: Placed) -> int:
        return self._from_bytes(node.lineno, node.col_offset)

    def _end(self, node: Placed) -> int:
        return self._from_bytes(_last_line(node), node.end_col_offset or 0)

    def _from_bytes(self, line: int, column: int) -> int:
        """The tree counts bytes, all others characters."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _index(self, offset: int) -> int:
        """The number of the first token that begins there or behind."""
        return bisect.bisect_left(self._offsets, offset)

    def _is_elif(self, node: ast.AST) -> bool:
        return isinstance(node, ast.If) and self._source.startswith("elif", self._start(node))

    def _head_end(self, node: ast.stmt | ast.ExceptHandler) -> int:
        """The last line of a statement, or of its head where it has a body."""
        body = getattr(node, "body", None)
        if not body:
            return _last_line(node.subject if isinstance(node, ast.Match) else node)
        number = self._index(min(self._start(each) for each in [body[0], *getattr(body[0], "decorator_list", [])]))
        return next(token.line for token in reversed(self._tokens[:number]) if token.string == ":")

    def _edit(self, start: int, end: int, text: str) -> None:
        if self._source[start:end] != text:
            self._edits.append(Edit(start, end, text))

    def _edit_lines(self, first: int, last: int, text: str = "", *, needs: str = "", problem: str = "") -> None:
        self._edits.append(Edit(self._starts[first - 1], self._starts[last], text, needs, problem))


def renamed(name: str) -> str:
    """The name that threads have for it."""
    shorter = NAMES.get(name) or re.sub(r"^(_*)Async(?=[A-Z])", r"\1", name).removesuffix("_async")
    return name if iskeyword(shorter) or not shorter else shorter


def _reworded(text: str, words: Words) -> str:
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
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and node is not tree:
                yield block


def _last_line(node: Placed) -> int:
    return node.end_lineno or node.lineno


def _last_name(node: ast.expr) -> str:
    """`c` for `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_for_tasks(node: ast.AST) -> bool:
    """Whether threads can have no use for it: what makes a thing awaitable, and asyncio."""
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
    first = [node for node in tree.body if _is_docstring(node) or getattr(node, "module", "") == "__future__"]
    line = max((_last_line(node) for node in first), default=0)
    lines = text.split("\n")
    return "\n".join([*lines[:line], *sorted(needs), *lines[line:]])


def tidied(text: str, target: Path, root: Path = ROOT) -> str:
    """The text as ruff would leave it in that file: mended where it can mend, and formatted."""
    rules = f"lint.extend-select = [{MENDED}]", f"lint.extend-safe-fixes = [{MENDED}]"
    for work in (["check", "--fix-only", "--config", rules[0], "--config", rules[1]], ["format"]):
        command = [sys.executable, "-m", "ruff", *work, "--quiet", "--stdin-filename", str(target), "-"]
        done = subprocess.run(command, cwd=root, input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoSyncForm(f"ruff cannot tidy {target.relative_to(root)}: {done.stderr.strip()}")
        text = done.stdout
    return text


def generated(root: Path = ROOT, pairs: Mapping[str, str] = PAIRS) -> dict[Path, str]:
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


def changes(root: Path = ROOT, pairs: Mapping[str, str] = PAIRS) -> dict[Path, str | None]:
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


def main(arguments: Sequence[str] | None = None, root: Path = ROOT, pairs: Mapping[str, str] = PAIRS) -> int:
    """Write what changed, or say what is stale."""
    parser = argparse.ArgumentParser(description="Write the modules for threads from those for tasks.")
    parser.add_argument("--check", action="store_true", help="say which are stale, and exit with 1 if any is")
    check = parser.parse_args(arguments).check
    try:
        stale = changes(root, pairs)
        for path, text in stale.items():
            if not check:
                write(path, text)
            verbs = ("stale", "its source is gone") if check else ("written", "removed")
            print(f"{path.relative_to(root)}: {verbs[text is None]}")
    except NoSyncForm as error:
        print(error, file=sys.stderr)
        return 1
    if check and stale:
        print('Run "make sync", and look at what it changed.')
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
