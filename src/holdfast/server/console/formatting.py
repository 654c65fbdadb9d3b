"""Numbers, times and bytes for people."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias

import msgspec

from holdfast.large import LargeValue

View: TypeAlias = Literal["json", "text", "hex"]

SHOWN_BYTES: Final = 64 * 1024  # of a body; the rest is for those who download it
PREVIEW_BYTES: Final = 160

_UNITS: Final = (("d", 86_400), ("h", 3_600), ("min", 60))
_LINE: Final = 16
_CONTROLS: Final = frozenset(map(chr, [*range(9), 11, 12, *range(14, 32), 127]))


def count(number: int) -> str:
    """A number with its thousands apart."""
    return f"{number:,}"


def size(number: float) -> str:
    """So many bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:,.0f} {unit}" if unit == "B" or number >= 100 else f"{number:,.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"


def rate(number: float) -> str:
    """So many a second."""
    if number == 0:
        return "0/s"
    return f"{number:,.0f}/s" if number >= 100 else f"{number:.1f}/s" if number >= 0.1 else "<0.1/s"


def age(seconds: float) -> str:
    """A length of time, short."""
    if seconds < 0:
        return "-" + age(-seconds)
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    for unit, length in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:,.0f} s"


def told(value: object) -> str:
    """A setting or an argument: a text as it is, anything else as JSON."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()


def moment(value: datetime | int) -> str:
    """A time to the millisecond; a number is one in nanoseconds."""
    found = datetime.fromtimestamp(value / 1e9, UTC) if isinstance(value, int) else value.astimezone(UTC)
    return f"{found:%Y-%m-%d %H:%M:%S}.{found.microsecond // 1000:03d}Z"


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """A body as it is shown: in which way, which ways there are, and whether there is more of it."""

    view: View
    views: tuple[View, ...]
    text: str
    size: int
    cut: bool


def beginning(value: bytes | LargeValue, most: int) -> bytes:
    """The first bytes of a body."""
    return value[:most] if isinstance(value, bytes) else value.first(most)


def payload(value: bytes | LargeValue, wanted: View | None = None) -> Payload:
    """A body as JSON if it is that, else as text if it is that, else as bytes; or as one wants it."""
    start, length = beginning(value, SHOWN_BYTES), len(value)
    cut = length > len(start)
    texts: dict[View, str] = {}
    pretty = None if cut else _pretty(start)
    if pretty is not None:
        texts["json"] = pretty
    text = as_text(start, cut=cut)
    if text is not None:
        texts["text"] = text
    view: View = wanted if wanted in texts or wanted == "hex" else next(iter(texts), "hex")
    return Payload(
        view=view,
        views=(*texts, "hex"),
        text=texts[view] if view in texts else dump(start),
        size=length,
        cut=cut,
    )


def preview(value: bytes | LargeValue) -> str:
    """The beginning of a body in one line."""
    start = beginning(value, PREVIEW_BYTES)
    text = as_text(start, cut=len(value) > len(start))
    line = " ".join(text.split()) if text is not None else start[:40].hex(" ")
    return f"{line}…" if len(value) > len(start) or (text is None and len(start) > 40) else line


def plain(value: str | bytes | None) -> str:
    """A key or a header, whatever it is made of."""
    if value is None:
        return ""
    return value if isinstance(value, str) else as_text(value) or f"0x{value.hex()}"


def as_text(content: bytes, *, cut: bool = False) -> str | None:
    """Bytes as text, if they are that; a letter that was cut in two at the end does not count."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        if not cut or error.start < len(content) - 3:
            return None
        text = content[: error.start].decode("utf-8")
    return None if _CONTROLS.intersection(text) else text


def dump(content: bytes) -> str:
    """Bytes as hex beside what they would be as ASCII."""
    lines = []
    for place in range(0, len(content), _LINE):
        some = content[place : place + _LINE]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in some)
        lines.append(f"{place:08x}  {some.hex(' '):<47}  {letters}")
    return "\n".join(lines)


def _pretty(content: bytes) -> str | None:
    if content.strip()[:1] not in (b"{", b"["):
        return None
    try:
        msgspec.json.decode(content)
        return msgspec.json.format(content, indent=2).decode("utf-8")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
