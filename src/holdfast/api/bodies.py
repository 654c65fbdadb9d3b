"""Bodies: plain bytes, text, or any type that msgspec supports, as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.errors import BadBody, InvalidRequest
from holdfast.model import BodyKind

_TYPES: Final[dict[BodyKind, Any]] = {"bytes": bytes, "text": str, "json": Any}


def kind_of(body_type: Any) -> BodyKind | None:
    """Return the kind of bodies that is stored with a queue, which does not depend on the types of a program."""
    if body_type is None or body_type is bytes:
        return None if body_type is None else "bytes"
    return "text" if body_type is str else "json"


def type_of(kind: BodyKind | None) -> Any:
    """Return the type in which bodies of this kind are returned; JSON becomes a dict, a list, a number and so on."""
    return None if kind is None else _TYPES[kind]


class Bodies:
    """Encodes and decodes bodies of one type."""

    def __init__(self, body_type: Any) -> None:
        self.plain = body_type is None or body_type is bytes
        self.decode: Callable[[bytes], Any]
        self.encode: Callable[[Any], bytes]
        if self.plain:
            self.encode, self.decode = _from_bytes, bytes
        elif body_type is str:
            self.encode, self.decode = _from_text, _to_text
        else:
            self.encode, self.decode = _typed(body_type)


def _from_bytes(body: object) -> bytes:
    if isinstance(body, bytes):
        return body
    if isinstance(body, (bytearray, memoryview)):
        return bytes(body)
    hint = "; write body.encode(), or open the queue with body_type=str" if isinstance(body, str) else ""
    hint = hint or "; open the queue with body_type=... to put values of other types"
    raise BadBody(f"a body must be bytes, not {type(body).__name__}{hint}. Nothing was stored")


def _from_text(body: object) -> bytes:
    if not isinstance(body, str):
        raise BadBody(
            f"a body of this queue must be str, not {type(body).__name__}. Nothing was stored; convert it first"
        )
    try:
        return body.encode()
    except UnicodeEncodeError as error:
        raise BadBody(
            f"the body cannot be stored as text: {error}. Nothing was stored; use body_type=bytes for it"
        ) from None


def _to_text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise BadBody(f"the body is not text: {error}. Read its bytes from `raw`, or reject the message") from None


def _typed(body_type: Any) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    encoder = msgspec.json.Encoder()
    try:
        decoder = msgspec.json.Decoder(body_type)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"body_type={body_type!r} cannot be used: {error}. Use bytes, str, dict or a type that msgspec supports"
        ) from None
    name = getattr(body_type, "__name__", str(body_type))

    def encode(body: Any) -> bytes:
        try:
            content = encoder.encode(body)
            decoder.decode(content)  # what is put must come out again
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            raise BadBody(
                f"the body does not fit {name}: {error}. Nothing was stored; change the body, or the queue's body_type"
            ) from None
        return content

    def decode(body: bytes) -> Any:
        try:
            return decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise BadBody(
                f"the body does not fit {name}: {error}. Read its bytes from `raw`, or reject the message"
            ) from None

    return encode, decode
