r"""Selecting messages: a `where` given as a function, or as an expression in a small language.

    error ~ "Timeout|refused" and attempts >= 3
    json.user.id == 42 or header["x-tenant"] in ["acme", "globex"]
    age > 1h30m and key != null and not (priority < 5)

    expression = all { "or" all }
    all        = one { "and" one }
    one        = { "not" } ( "(" expression ")" | value [ operator value ] )
    operator   = "==" "!=" "<" "<=" ">" ">=" "~" "!~" "in" "not in"
    value      = name { .part | [number] | ["text"] } | "text" | 'text' | number | duration | list | true | false | null
    list       = "[" value { "," value } "]"     of plain values, without names

Names: see `NAMES`. Anything missing is null; `json` is null if the body is not JSON. Bytes are read as UTF-8, and a
byte that is not UTF-8 becomes one of U+DC80 to U+DCFF (Python's surrogateescape). Headers are text; of a repeated
header the first counts. A time without a zone is UTC.

A comparison of different types (text with a number, true with 1), or with null, is false, even with `!=` and `not in`;
only a literal null may be compared, with == and !=. Lists and objects cannot be compared: use `in`, an index or a part.
A value on its own counts as true unless it is null, false, 0 or empty.

`~` searches with RE2 (see `Expression`), and `!~` is true for a text without a match. In a text, \\ \" \' \n \r \t have
their usual meaning and every other backslash stands for itself, so "\d+" needs no doubling.

Nothing is evaluated as Python. Length and nesting are limited, and everything runs in time linear in the message,
regular expressions included, so a condition may come from someone you do not trust.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

import msgspec

from holdfast.errors import InvalidRequest
from holdfast.later import pattern

_UNITS_MS: Final = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_DURATION: Final = pattern("".join(rf"(?:([0-9]+(?:\.[0-9]+)?){unit})?" for unit in _UNITS_MS))
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

# Defined once: `int | float` inside a function would be built again at every call.
_NUMBERS: Final = (int, float)
_SCALARS: Final = (str, int, float)
_BYTES: Final = (bytes, bytearray, memoryview)


class Facts:
    """One message while it is examined; its body is parsed as JSON at most once."""

    __slots__ = ("_tree", "_tree_known", "message", "steps")

    def __init__(self, message: Any) -> None:
        self.message = message
        self._tree_known = False
        self.steps = 0  # taken by regular expressions so far

    def plain(self, name: str) -> Any:
        return _plain(getattr(self.message, name, None))

    def header(self, name: str) -> Any:
        headers = getattr(self.message, "headers", None)
        if headers is None:
            return None
        if hasattr(headers, "get"):
            return _plain(headers.get(name))
        return next((_plain(value) for key, value in headers if key == name), None)

    def json(self, path: tuple[str | int, ...]) -> Any:
        if not self._tree_known:
            self._tree = _parsed(getattr(self.message, "body", None))
            self._tree_known = True
        tree = self._tree
        for step in path:
            if isinstance(step, str):
                tree = tree.get(step) if isinstance(tree, dict) else None
            else:
                tree = tree[step] if isinstance(tree, list) and -len(tree) <= step < len(tree) else None
        return tree

    def time(self) -> datetime | None:
        time_ns = getattr(self.message, "timestamp_ns", None)
        try:
            return None if time_ns is None else _EPOCH + timedelta(microseconds=time_ns // 1000)
        except OverflowError:
            return None

    def age(self, now_ms: int) -> float | None:
        time_ns = getattr(self.message, "timestamp_ns", None)
        return None if time_ns is None else (now_ms * 1_000_000 - time_ns) / 1e9


def seconds_of(text: str) -> float | None:
    """Return the seconds of a duration such as `1h30m`, `500ms` or `7d`, largest unit first; None if it is not one."""
    found = _DURATION.fullmatch(text)
    if found is None or not text:
        return None
    return sum(float(part) * unit for part, unit in zip(found.groups(), _UNITS_MS.values(), strict=True) if part) / 1000


def compared(holds: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
    """Whether the relation holds; False for different types. Text compared with a time is parsed as a time."""
    if isinstance(left, datetime) and isinstance(right, str):
        right = moment_of(right)
    elif isinstance(right, datetime) and isinstance(left, str):
        left = moment_of(left)
    return _alike(left, right) and holds(left, right)


def _alike(left: Any, right: Any) -> bool:
    if isinstance(left, bool) or isinstance(right, bool):
        return isinstance(left, bool) and isinstance(right, bool)
    if isinstance(left, str):
        return isinstance(right, str)
    if isinstance(left, _NUMBERS):
        return isinstance(right, _NUMBERS)
    return isinstance(left, datetime) and isinstance(right, datetime)


def contains(container: Any, value: Any) -> bool | None:
    """Whether the container holds the value; None if the question makes no sense for these types."""
    if isinstance(container, list):
        if value is None:
            return True if None in container else None
        return any(_alike(item, value) and item == value for item in container)
    if isinstance(container, str | dict) and isinstance(value, str):
        return value in container
    return None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, _SCALARS):
        return value
    if isinstance(value, _BYTES):
        return bytes(value).decode("utf-8", "surrogateescape")
    return str(value)


def _parsed(body: Any) -> Any:
    if not isinstance(body, (str, *_BYTES)):
        return None
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def moment_of(text: str) -> datetime | None:
    """Parse an ISO 8601 time, in UTC if it has no zone; None if it is not one."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


# Regular expressions use RE2, whose time grows linearly with the text. Python's `re` backtracks: a pattern such as
# `(a+)+$` takes twice as long for every letter more. RE2 follows all alternatives at once. In return it has no
# look-arounds and no back-references; `\d`, `\w`, `\s` and `\b` are ASCII (`\pL` is any letter, `\pN` any digit), and
# `$` is the very end of the text.
#
# Each byte of the text costs at most one step for each instruction of the compiled pattern. Both are limited, so that a
# search ends within a second whatever it is given; so is the total for one message.

MAX_PATTERN_CHARACTERS: Final = 1_000
MAX_INSTRUCTIONS: Final = 2_000
# Instructions times bytes of text, for all searches in one message.
MAX_STEPS: Final = 25_000_000

_MEMORY_BYTES: Final = 1 << 20
_ESCAPE_EXPRESSIONS: Final = pattern(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)


@cache
def _surrogates() -> dict[int, int]:
    """RE2 reads UTF-8, which has no surrogates; here they represent bytes that are not UTF-8.

    So they are mapped, in text and pattern alike, to code points that nothing else uses: the end of the last private
    plane.
    """
    return {0xD800 + number: 0x10F800 + number for number in range(0x800)}


# Syntax that RE2 rejects, and what to call it.
_LACKING: Final = (
    (r"\(\?<?[=!]", "look-arounds"),
    (r"\\[1-9]|\(\?P=", "back-references"),
    (r"\(\?\(", "conditions"),
    (r"\(\?>", "atomic groups"),
    (r"\(\?#", "comments"),
    (r"\(\?[a-zA-Z]", "flags other than i, m, s and U"),
)


class Expression:
    """A compiled regular expression."""

    def __init__(self, pattern: str) -> None:
        self.pattern: Final = pattern
        self._compiled = _compiled(pattern)
        self._most_bytes = MAX_STEPS // self._compiled.programsize

    def steps(self, text: str) -> int:
        """Return how many steps a search in the text may take."""
        return int(self._compiled.programsize) * len(_encoded(text))

    def found_in(self, text: str) -> bool:
        """Whether it matches anywhere in the text."""
        return self._compiled.search(self._read(text)) is not None

    def matches(self, text: str) -> bool:
        """Whether it matches the whole text."""
        return self._compiled.fullmatch(self._read(text)) is not None

    def _read(self, text: str) -> bytes:
        content = _encoded(text)
        if len(content) > self._most_bytes:
            raise InvalidRequest(
                f"the regular expression {_shown(self.pattern)} is too large for a text of {len(content)} bytes: it "
                f"may be used on {self._most_bytes}. Use a shorter one, or smaller repetitions such as {{9}}"
            )
        return content


def _compiled(pattern: str) -> Any:
    import re2  # slow to import, and rarely needed

    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise InvalidRequest(f"it has {len(pattern)} characters, at most {MAX_PATTERN_CHARACTERS} are allowed")
    if number := re.search(r"\{[0-9]{10,}", pattern):  # RE2 takes it for literal text
        raise InvalidRequest(f"no repetition can be as large as {_shown(number[0])}")
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = _MEMORY_BYTES
    try:
        compiled = re2.compile(_encoded(_ESCAPE_EXPRESSIONS.sub(_escape, pattern)), options)
    except re2.error as error:
        raise InvalidRequest(_reason(pattern, error)) from None
    if compiled.programsize > MAX_INSTRUCTIONS:
        raise InvalidRequest(
            f"it makes a program of {compiled.programsize} instructions, at most {MAX_INSTRUCTIONS} are allowed; use "
            "fewer and smaller repetitions such as {9}"
        )
    return compiled


def _escape(found: re.Match[str]) -> str:
    """Translate what Python's `re` writes differently from RE2: characters by number, and the end of the text."""
    text = found[1]
    if text[0] in "uU" and len(text) > 1:
        code = int(text[1:], 16)
        return rf"\x{{{_surrogates().get(code, code):x}}}"
    return r"\z" if text == "Z" else found[0]


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.translate(_surrogates()).encode()


def _reason(pattern: str, error: Exception) -> str:
    said = error.args[0].decode(errors="replace") if error.args and isinstance(error.args[0], bytes) else str(error)
    said = said.translate({new: old for old, new in _surrogates().items()})
    what, _, part = said.partition(": ")
    if what in ("invalid perl operator", "invalid escape sequence"):
        there = [pattern[found.start() :] for found in re.finditer(re.escape(part), pattern)]
        for start, name in _LACKING:
            found = next(filter(None, (re.match(start, text) for text in there)), None)
            if found is not None:
                return f"{name} such as {found[0]} are not supported by RE2, whose time is bounded"
    if "too large" in said:
        return "it is too large; use fewer and smaller repetitions such as {9}"
    return said


def _shown(pattern: str) -> str:
    return pattern if len(pattern) <= 50 else f"{pattern[:50]}…"


_TRACEBACK: Final = "Traceback (most recent call last):"


def headline(error: str) -> str:
    """The line of an error that says what went wrong: the first, or of a traceback the first after its last frame."""
    first = error.partition("\n")[0]
    if first != _TRACEBACK:
        return first
    lines = error[error.rfind('\n  File "') + 1 :].split("\n")
    return next((line for line in lines[1:] if line and not line.startswith(" ")), first)


def _headline_in(error: Any) -> Any:
    return headline(error) if isinstance(error, str) else None


MAX_CHARACTERS: Final = 2_000
MAX_DEPTH: Final = 40

# Read from the attribute of the same name.
_PLAIN: Final = ("body", "key", "id", "offset", "priority", "attempts", "correlation_id", "error", "reason", "holder")
NAMES: Final = (*_PLAIN, "headline", "time", "age", "header.NAME", "json.PATH")

_TOKEN: Final = pattern(
    r"""(?P<number> -?[0-9]+ (?:\.[0-9]+)? (?:[eE][+-]?[0-9]+)? [\w.]* )
      | (?P<text> "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' )
      | (?P<name> [^\W\d]\w* )
      | (?P<part> \.[^\W\d][\w-]* )
      | (?P<sign> [=!<>]= | !~ | [<>~()\[\],] )""",
    re.VERBOSE | re.DOTALL,
)
_NUMBER: Final = pattern(r"-?[0-9]+(?P<rest>(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")
_ESCAPE: Final = pattern(r"""\\([\\"'nrt])""")
_ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t"}
_WORDS: Final = {"true": True, "false": False, "null": None, "none": None}
_RESERVED: Final = frozenset({"and", "or", "not", "in"})
_ORDER: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def compile_where(where: str | Callable[[Any], object] | None, *, now_ms: int) -> Callable[[Any], bool]:
    """Return a predicate over messages; `age` is relative to `now_ms`. None selects every message.

    A message is any object with attributes of the plain names, `timestamp_ns` and `headers` (a mapping or pairs);
    missing ones are null.
    """
    if where is None:
        return lambda _message: True
    if isinstance(where, str):
        test = _Parser(where, now_ms).parse()
        return lambda message: test(Facts(message))
    if callable(where):
        chosen = where
        return lambda message: bool(chosen(message))
    raise InvalidRequest(f"where is a {type(where).__name__}; give a function of a message, or an expression as text")


_Test: TypeAlias = Callable[[Facts], bool]


class _Operand(NamedTuple):
    """One side of a comparison: a literal with its value, or a name that is read from each message."""

    at: int
    read: Callable[[Facts], Any]
    name: str = ""
    literal: bool = False
    value: Any = None


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class _Parser:
    """Recursive descent over the grammar above; each method consumes what it is named for and returns a test."""

    def __init__(self, source: str, now_ms: int) -> None:
        self._source = source
        self._now_ms = now_ms
        if len(source) > MAX_CHARACTERS:
            self._fail(f"it has {len(source)} characters, at most {MAX_CHARACTERS} are allowed", MAX_CHARACTERS)
        self._tokens = self._tokenised()
        self._next = 0

    def parse(self) -> _Test:
        test = self._any(0)
        if self._token.kind != "end":
            self._fail("expected `and`, `or` or the end", self._token.at)
        return test

    def _any(self, depth: int) -> _Test:
        tests = [self._all(depth)]
        while self._take("or"):
            tests.append(self._all(depth))
        return tests[0] if len(tests) == 1 else lambda facts: any(test(facts) for test in tests)

    def _all(self, depth: int) -> _Test:
        tests = [self._one(depth)]
        while self._take("and"):
            tests.append(self._one(depth))
        return tests[0] if len(tests) == 1 else lambda facts: all(test(facts) for test in tests)

    def _one(self, depth: int) -> _Test:
        turned = False
        while self._take("not"):
            turned = not turned
        at = self._token.at
        if self._take("("):
            if depth == MAX_DEPTH:
                self._fail(f"parentheses are nested more than {MAX_DEPTH} deep", at)
            test = self._any(depth + 1)
            self._need(")", "expected `)`, `and` or `or`")
        else:
            test = self._comparison()
        return (lambda facts: not test(facts)) if turned else test

    def _comparison(self) -> _Test:
        left = self._operand()
        at = self._token.at
        sign = self._operator()
        if not sign:
            return lambda facts: bool(left.read(facts))
        right = self._operand()
        if sign in {"~", "!~"}:
            return self._match(left, right, wanted=sign == "~")
        if sign in {"in", "not in"}:
            wanted = sign == "in"
            return lambda facts: contains(right.read(facts), left.read(facts)) is wanted
        return self._order(left, sign, right, at)

    def _operator(self) -> str:
        for sign in (*_ORDER, "~", "!~", "in"):
            if self._take(sign):
                return sign
        if self._take("not"):
            self._need("in", "expected `in` after `not`")
            return "not in"
        return ""

    def _order(self, left: _Operand, sign: str, right: _Operand, at: int) -> _Test:
        if sign in {"==", "!="} and (_is_null(left) or _is_null(right)):
            asked = left if _is_null(right) else right
            wanted = sign == "=="
            return lambda facts: (asked.read(facts) is None) is wanted
        left, right = self._fitted(left, right), self._fitted(right, left)
        if isinstance(left.value, list) or isinstance(right.value, list):
            self._fail("a list is looked into with `in`", at)
        holds = _ORDER[sign]
        return lambda facts: compared(holds, left.read(facts), right.read(facts))

    def _fitted(self, operand: _Operand, other: _Operand) -> _Operand:
        """Convert a literal to what the other side needs; fails if the comparison could never be true."""
        if not operand.literal or operand.value is None:
            return operand
        if other.name == "time":
            moment = moment_of(operand.value) if isinstance(operand.value, str) else None
            if moment is None:
                self._fail('expected a time in ISO 8601, such as "2026-11-16T10:00:00Z"', operand.at)
            return operand._replace(value=moment, read=lambda _facts: moment)
        if other.name == "age" and not isinstance(operand.value, int | float):
            self._fail("expected a duration without quotes, such as 30s, 5m or 1h30m", operand.at)
        return operand

    def _match(self, left: _Operand, right: _Operand, *, wanted: bool) -> _Test:
        if not (right.literal and isinstance(right.value, str)):
            self._fail("expected a regular expression as text in quotes", right.at)
        try:
            expression = Expression(right.value)
        except InvalidRequest as error:
            self._fail(f"this regular expression cannot be used: {error}", right.at)

        def test(facts: Facts) -> bool:
            value = left.read(facts)
            if not isinstance(value, str):
                return False
            facts.steps += expression.steps(value)
            if facts.steps > MAX_STEPS >= expression.steps(value):
                raise InvalidRequest(
                    "the regular expressions of this condition together are too large for a message with texts as "
                    f"long as {len(value)} characters: they would take {facts.steps} steps, at most {MAX_STEPS} are "
                    "allowed. Use fewer of them, or shorter ones"
                )
            return expression.found_in(value) is wanted

        return test

    def _operand(self) -> _Operand:
        token = self._token
        if token.kind == "name" and token.text.lower() not in _WORDS:
            return self._named()
        if self._take("["):
            values: list[Any] = []
            while not self._take("]"):
                if values:
                    self._need(",", "expected `,` or `]`")
                values.append(self._literal())
            return _literal(values, token.at)
        return _literal(self._literal(), token.at)

    def _literal(self) -> Any:
        kind, text, at = self._token
        self._next += 1
        if kind == "text":
            return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), text[1:-1])
        if kind == "number":
            number = _NUMBER.fullmatch(text)
            if number is not None:
                return float(text) if number["rest"] else int(text)
            seconds = seconds_of(text)
            if seconds is None:
                self._fail("expected a number, or a duration such as 500ms, 30s, 5m, 1h30m or 7d", at)
            return seconds
        if kind != "name" or text.lower() not in _WORDS:
            self._fail("expected a name, a text, a number, a duration, true, false, null or a list", at)
        return _WORDS[text.lower()]

    def _named(self) -> _Operand:
        _kind, name, at = self._token
        if name.lower() in _RESERVED:
            self._fail(f"expected a value before `{name}`", at)
        self._next += 1
        path = self._path()
        if name == "json":
            return _Operand(at, lambda facts: facts.json(path))
        if name == "header":
            if len(path) != 1 or not isinstance(path[0], str):
                self._fail('expected one header: header.NAME or header["x-name"]', at)
            header = path[0]
            return _Operand(at, lambda facts: facts.header(header))
        if name not in NAMES:
            self._fail(f"there is no {name!r}" + ("; put texts in quotes" if not path else ""), at)
        if path:
            self._fail(f"{name} has no parts; only json and header do", at)
        if name == "time":
            return _Operand(at, Facts.time, name)
        if name == "age":
            now_ms = self._now_ms
            return _Operand(at, lambda facts: facts.age(now_ms), name)
        if name == "headline":
            return _Operand(at, lambda facts: _headline_in(facts.plain("error")), name)
        return _Operand(at, lambda facts: facts.plain(name), name)

    def _path(self) -> tuple[str | int, ...]:
        path: list[str | int] = []
        while True:
            kind, text, _at = self._token
            if kind == "part":
                path.append(text[1:])
                self._next += 1
            elif self._take("["):
                at = self._token.at
                step = self._literal()
                if isinstance(step, bool) or not isinstance(step, str | int):
                    self._fail("expected a whole number or a text in quotes", at)
                path.append(step)
                self._need("]", "expected `]`")
            else:
                return tuple(path)

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self, text: str) -> bool:
        """Consume this word or sign if it comes next; returns whether it did."""
        token = self._token
        if token.kind in {"name", "sign"} and token.text.lower() == text:
            self._next += 1
            return True
        return False

    def _need(self, text: str, what: str) -> None:
        if not self._take(text):
            self._fail(what, self._token.at)

    def _tokenised(self) -> list[_Token]:
        tokens: list[_Token] = []
        at, source = 0, self._source
        while True:
            while at < len(source) and source[at].isspace():
                at += 1
            if at == len(source):
                return [*tokens, _Token("end", "", at)]
            found = _TOKEN.match(source, at)
            if found is None:
                hints = {
                    '"': "the closing quote is missing",
                    "'": "the closing quote is missing",
                    "=": "write == to compare",
                }
                self._fail(hints.get(source[at], f"{source[at]!r} means nothing here"), at)
            tokens.append(_Token(found.lastgroup or "", found[0], at))
            at = found.end()

    def _fail(self, what: str, at: int) -> NoReturn:
        first = max(0, at - 60)
        shown = self._source[first : at + 40]
        # One column for each character, so that the caret is below its place.
        line = "".join(character if character.isprintable() else " " for character in shown)
        raise InvalidRequest(
            f"cannot read the expression: {what}\n  {line}\n  {' ' * (at - first)}^\n"
            f"names: {', '.join(NAMES)}\noperators: {' '.join(_ORDER)} ~ !~ in, not in; and, or, not, ( )"
        ) from None


def _literal(value: Any, at: int) -> _Operand:
    return _Operand(at, lambda _facts: value, literal=True, value=value)


def _is_null(operand: _Operand) -> bool:
    return operand.literal and operand.value is None
