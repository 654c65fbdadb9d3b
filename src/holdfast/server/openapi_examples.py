"""Examples for the description of the API: what a call looks like."""

from __future__ import annotations

from typing import Any, Final

EXAMPLES: Final[dict[str, Any]] = {
    "queue": "orders",
    "topic": "orders",
    "name": "orders",
    "group": "billing",
    "member": "billing-5f3a91c2",
    "partition": 0,
    "id": "orders-0-17",
    "message_id": "orders-0-17",
    "topics": ["orders"],
    "messages": [{"json": {"order": 17}, "key": "customer-9"}],
    "receipt": "orders-0-17@AQAAAYAAAAAB6LtztPWVZjgOR8bOslIm",
    "receipts": ["orders-0-17@AQAAAYAAAAAB6LtztPWVZjgOR8bOslIm"],
    "offsets": [{"topic": "orders", "partition": 0, "offset": 18}],
    "settings": {"max_attempts": 5},
    "producer": "5577006791947779410",
    "fence": 1649267441665,
    "value": {"step": 2},
}
_TYPES: Final[dict[str, Any]] = {
    "string": "text",
    "integer": 1,
    "number": 1.0,
    "boolean": True,
    "array": [],
    "object": {},
}
_TOLD_ANYHOW: Final = ("messages", "settings", "value")


def example(schema: dict[str, Any]) -> dict[str, Any]:
    """A body with all that must be in it."""
    properties, required = schema["properties"], schema["required"]
    return {
        name: EXAMPLES[name] if name in EXAMPLES else _of(each)
        for name, each in properties.items()
        if name in required or name in _TOLD_ANYHOW
    }


def _of(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    return schema.get("minimum", _TYPES.get(schema.get("type", ""), "text"))
