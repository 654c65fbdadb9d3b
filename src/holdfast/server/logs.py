"""What must never be read in a log: tokens, passwords, and whatever else a caller proves itself with."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

import msgspec

HIDDEN: Final = "[hidden]"

_NAMES: Final = frozenset(
    {"authorization", "cookie", "credential", "credentials", "passwd", "password", "secret", "token"}
)
_PARTS: Final = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")

# In texts: what follows `Bearer` or `Basic`, what is said after such a name, and who stands before the @ of a URL.
_IN_TEXT: Final[tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = (
    (re.compile(r"(?i)\b(bearer\s+)[^\s,;\"']{8,}"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b(basic\s+)[a-z0-9+/_-]{12,}=*"), rf"\1{HIDDEN}"),
    (re.compile(r"(\w://)[^\s/@]+@"), rf"\1{HIDDEN}@"),
    (
        re.compile(
            r"(?i)\b((?:[a-z0-9]+[_-])*(?:api[_-]?key|authorization|cookie|passwd|password|secret|token)[\"']?\s*[:=]\s*)"
            r"(?:(?:bearer|basic)\s+)?(?:\"[^\"]*\"|'[^']*'|[^\s,;&\"'}]+)"
        ),
        rf"\1{HIDDEN}",
    ),
)
# Without one of these no pattern fits: most texts are looked through once.
_MAYBE: Final = re.compile(r"(?i)bearer|basic|://|api[_-]?key|authorization|cookie|passw|secret|token")


def is_secret(name: str) -> bool:
    """Whether what goes by this name is one: `Authorization`, `auth_token`; not `token_name`, `tokens_file`."""
    parts = [part.lower() for part in _PARTS.split(name) if part]
    return bool(parts) and (parts[-1] in _NAMES or parts[-1] == "apikey" or parts[-2:] == ["api", "key"])


def hidden(text: str) -> str:
    """The text, without the secrets in it."""
    if _MAYBE.search(text):
        for pattern, instead in _IN_TEXT:
            text = pattern.sub(instead, text)
    return text


# Log lines for people and for machines: one line of text, or one JSON object, with all facts of `extra=`.
#
# Secrets are in neither, and nothing that a caller sends can begin a line of its own.


_DEPTH: Final = 6
_MOST_INT: Final = 2**63

# What every record has; anything else came with `extra=`.
_OWN: Final = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
_FIRST: Final = frozenset({"time", "level", "logger", "message", "exception"})

_ESCAPES: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}
# JSON may hold these as they are, but some who read lines take them for the end of one, or for a command.
_JSON_ESCAPES: Final = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}


class JsonFormatter(logging.Formatter):
    """`{"time": ..., "level": ..., "logger": ..., "message": ..., every extra, "exception": {...}}`"""

    def format(self, record: logging.LogRecord) -> str:
        """One line. An extra by the name of one of the first fields gets an underscore."""
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
        }
        for name, value in _extras(record):
            line[f"{name}_" if name in _FIRST else name] = value
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = {
                "type": record.exc_info[0].__qualname__,
                "message": _clean(_text(record.exc_info[1])),
                "traceback": _clean(self.formatException(record.exc_info)),
            }
        if record.stack_info:
            line["stack"] = _clean(self.formatStack(record.stack_info))
        return msgspec.json.encode(line).decode().translate(_JSON_ESCAPES)


class TextFormatter(logging.Formatter):
    """`2026-11-16 10:00:00.000 WARNING holdfast.broker.topic: upkeep failed topic=orders error="no space left"`"""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback below where there is one."""
        at = _time(record).replace("T", " ").removesuffix("000Z")
        parts = [f"{at} {record.levelname} {record.name}: {_message(record).translate(_ESCAPES)}"]
        parts += [f"{name}={_quoted(value)}" for name, value in _extras(record)]
        line = " ".join(parts)
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + _indented(_clean(self.formatException(record.exc_info)))
        if record.stack_info:
            line += "\n" + _indented(_clean(self.formatStack(record.stack_info)))
        return line


FORMATTERS: Final[dict[str, type[logging.Formatter]]] = {"text": TextFormatter, "json": JsonFormatter}


def start_logging(form: Literal["text", "json"], stream: TextIO, level: int = logging.INFO) -> logging.Handler:
    """Send all that is logged to the stream, in this form, in place of what the program sent it to before."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(FORMATTERS[form]())
    root = logging.getLogger()
    for before in list(root.handlers):
        root.removeHandler(before)
    root.addHandler(handler)
    root.setLevel(level)
    return handler


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    try:
        return _clean(record.getMessage())
    except Exception:  # a phrase and arguments that do not fit: better a poor line than none
        return _clean(f"{record.msg} {record.args!r}")


def _extras(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    for name, value in vars(record).items():
        if name not in _OWN and not name.startswith("_"):
            yield name, HIDDEN if is_secret(name) else _plain(value)


def _plain(value: object, depth: int = _DEPTH) -> Any:
    """The value as JSON knows it, whatever it is."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return int(value) if -_MOST_INT <= value < _MOST_INT else str(value)
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        return {
            _clean(_text(key)): HIDDEN if is_secret(_text(key)) else _plain(inner, depth - 1)
            for key, inner in value.items()
        }
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray):
        return [_plain(inner, depth - 1) for inner in value]
    return _clean(_text(value))


def _text(value: object) -> str:
    try:
        return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    except Exception:  # somebody's own __str__: no reason to lose the line
        return f"<{type(value).__name__} that cannot be shown>"


def _clean(text: str) -> str:
    """Without secrets, and such that it can be encoded."""
    return hidden(text).encode("utf-8", "backslashreplace").decode()


def _quoted(value: object) -> str:
    """Bare where that cannot be misread, otherwise as JSON."""
    if isinstance(value, str) and value and not any(char.isspace() or char in '"=\\' for char in value):
        return value.translate(_ESCAPES)
    return msgspec.json.encode(value).decode().translate(_ESCAPES)


def _indented(text: str) -> str:
    """Set in, so that no line of it looks like a line of the log."""
    return "\n".join("  " + line.translate(_ESCAPES) for line in text.split("\n"))
