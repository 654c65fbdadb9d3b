"""What Schemathesis must know of our media types; it loads this module by the variable SCHEMATHESIS_HOOKS."""

from __future__ import annotations

from typing import Any

import msgspec
import schemathesis

_NEVER = b"\xc1"  # which no MessagePack begins with


@schemathesis.serializer("application/msgpack")
def packed(context: schemathesis.SerializationContext, value: Any) -> bytes:
    """Bodies as MessagePack, sometimes; what has no place there becomes bytes that are none."""
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, TypeError, ValueError):
        return _NEVER


@schemathesis.deserializer("application/msgpack")
def unpacked(context: schemathesis.DeserializationContext, response: schemathesis.Response) -> Any:
    """Answers as JSON would have them: with bytes in base64."""
    return msgspec.to_builtins(msgspec.msgpack.decode(response.content))
