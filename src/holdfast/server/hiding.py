"""What must never be read in a log: tokens, passwords, and whatever else a caller proves itself with."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

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
