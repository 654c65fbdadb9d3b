"""A message as shell variables: what `holdfast get --export` prints for `eval`."""

from __future__ import annotations

import os
import shlex
from typing import Any, Final

import holdfast
from holdfast.cli.messages import base64_text, bytes_of, text_value
from holdfast.cli.output import json_text
from holdfast.client.address import is_address

# Every one is set or unset each time: nothing of the message before may be taken for something of this one.
NAMES: Final = tuple(
    f"HOLDFAST_{name}"
    for name in (
        "RECEIPT",
        "ID",
        "ATTEMPT",
        "KEY",
        "KEY_BASE64",
        "CORRELATION_ID",
        "PRIORITY",
        "TIMESTAMP",
        "HEADERS",
        "BODY",
        "BODY_FILE",
        "PAYLOAD_PATH",
        "STATE",
        "QUEUE",
        "TOPIC",
        "GROUP",
    )
)

# The environment is no place for large things: with too much in it no program can be started.
_MOST_BODY_BYTES: Final = 32 * 1024


def fits_variable(message: holdfast.Message[bytes]) -> bool:
    """Whether the body can be the value of a variable."""
    if message.size > _MOST_BODY_BYTES:
        return False
    text = text_value(message.raw)
    return text is not None and "\0" not in text


def variables(
    folder: str, group: str, message: holdfast.Message[bytes], body_file: str | None, state: Any = None
) -> str:
    """The lines to be evaluated by a POSIX shell."""
    key = bytes_of(message.key)
    key_text = None if key is None else text_value(key)
    headers = {name: _readable(value) for name, value in reversed(message.headers.pairs)}
    body = text_value(message.raw) if message.size <= _MOST_BODY_BYTES and body_file is None else None
    values = {
        "HOLDFAST_QUEUE": folder if is_address(folder) else os.path.abspath(folder),
        "HOLDFAST_TOPIC": message.topic,
        "HOLDFAST_GROUP": group,
        "HOLDFAST_RECEIPT": message.receipt,
        "HOLDFAST_ID": message.id,
        "HOLDFAST_ATTEMPT": str(message.attempt),
        "HOLDFAST_KEY": key_text,
        "HOLDFAST_KEY_BASE64": None if key is None or key_text is not None else base64_text(key),
        "HOLDFAST_CORRELATION_ID": message.correlation_id,
        "HOLDFAST_PRIORITY": str(message.priority),
        "HOLDFAST_TIMESTAMP": message.timestamp.isoformat(),
        "HOLDFAST_HEADERS": json_text(headers),
        "HOLDFAST_BODY": body,
        "HOLDFAST_BODY_FILE": body_file,
        "HOLDFAST_PAYLOAD_PATH": body_file,
        "HOLDFAST_STATE": None if state is None else json_text(state),
    }
    return "".join(_line(name, values[name]) for name in NAMES)


def nothing_exported(code: int) -> str:
    """What stands there instead, so that `eval` ends with this exit code and no variable is left over."""
    return f"unset {' '.join(NAMES)}\n(exit {code})\n"


def _line(name: str, value: str | None) -> str:
    usable = value is not None and "\0" not in value
    return f"export {name}={shlex.quote(value or '')}\n" if usable else f"unset {name}\n"


def _readable(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")
