"""A message as something to type: the call that would send it again, for a shell and for Python."""

from __future__ import annotations

import base64
import shlex
from typing import Any, Final
from urllib.parse import quote, urlencode

from holdfast.embedded.listed import Listed
from holdfast.server.console.shown import as_text, beginning

_MOST: Final = 4_096  # bytes of a body that are written out


def curl(found: Listed[Any], base: str) -> str:
    """The call as a shell types it."""
    pairs: list[tuple[str, str]] = []
    if isinstance(found.key, str):
        pairs.append(("key", found.key))
    pairs += [("header", f"{name}:{value}") for name, value in found.headers.pairs if isinstance(value, str)]
    if found.priority:
        pairs.append(("priority", str(found.priority)))
    url = f"{base}/v1/queues/{quote(found.topic, safe='')}/enqueue" + (f"?{urlencode(pairs)}" if pairs else "")
    start, text = _start(found)
    if start is None:
        return f"curl -X POST --data-binary @body.bin {shlex.quote(url)}  # download the body as body.bin first"
    if text is not None and not text.startswith("@"):
        return f"curl -X POST --data-binary {shlex.quote(text)} {shlex.quote(url)}"
    packed = base64.b64encode(start).decode()
    return f"echo {packed} | base64 -d | curl -X POST --data-binary @- {shlex.quote(url)}"


def python(found: Listed[Any], base: str) -> str:
    """The call as a program makes it."""
    start, text = _start(found)
    if start is None:
        body = 'Path("body.bin").read_bytes()'
    elif text is None:
        body = repr(start)
    else:
        body = f"{text!r}.encode()" if not text.isascii() else repr(start)
    options = []
    if found.key is not None:
        options.append(f"key={found.key!r}")
    if found.headers:
        options.append(f"headers={dict(found.headers)!r}")
    if found.priority:
        options.append(f"priority={found.priority}")
    lines = ["from pathlib import Path", ""] if start is None else []
    lines += [
        "import holdfast",
        "",
        f"with holdfast.connect({base!r}) as broker:",
        f"    broker.publish({', '.join([repr(found.topic), body, *options])})",
    ]
    return "\n".join(lines)


def _start(found: Listed[Any]) -> tuple[bytes | None, str | None]:
    value = found._record.value
    if len(value) > _MOST:
        return None, None
    start = beginning(value, _MOST)
    return start, as_text(start)
