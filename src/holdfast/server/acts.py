"""What the audit log says of one act: short, and without what nobody else should read."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from holdfast.env import World

BEGUN: Final = "begun"
DONE: Final = "done"

MOST_TEXT: Final = 500
_MOST_PARAMETERS: Final = 8 * 1024
_SECRETS: Final = ("token", "secret", "password", "authorization", "sha256", "cookie", "private")


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `count` is how many messages, or other things, it concerned."""

    time: datetime
    id: str
    principal: str
    peer: str
    action: str
    route: str
    target: str
    parameters: dict[str, Any]
    correlation_id: str
    outcome: str = BEGUN
    count: int | None = None


def act_of(
    world: World,
    *,
    principal: str,
    peer: str,
    action: str,
    route: str,
    target: str = "",
    parameters: Mapping[str, Any] | None = None,
    correlation_id: str = "",
) -> Act:
    """An act that begins now."""
    ids = world.ids
    return Act(
        time=now(world),
        id=f"{ids.random_u32():08x}{ids.random_u32():08x}",
        principal=principal,
        peer=peer,
        action=action,
        route=route,
        target=target[:MOST_TEXT],
        parameters=_without_secrets(parameters or {}),
        correlation_id=correlation_id[:MOST_TEXT],
    )


def now(world: World) -> datetime:
    return datetime.fromtimestamp(world.clock.now_ns() / 1e9, UTC)


def line_of(act: Act) -> bytes:
    return msgspec.json.encode(act) + b"\n"


def _without_secrets(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What an act was asked with, short, and without what nobody else should read."""
    plain: dict[str, Any] = {str(name)[:100]: _plain(str(name), value) for name, value in parameters.items()}
    size = len(msgspec.json.encode(plain))
    return plain if size <= _MOST_PARAMETERS else {"left_out_bytes": size}


def _plain(name: str, value: Any) -> Any:
    if any(word in name.lower() for word in _SECRETS):
        return "(not shown)"
    match value:
        case None | bool() | int() | float():
            return value
        case bytes() | bytearray() | memoryview():
            return f"({len(value)} bytes)"
        case dict():
            return {str(inner)[:100]: _plain(str(inner), each) for inner, each in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain("", each) for each in value]
        case msgspec.Struct():
            return _plain("", msgspec.structs.asdict(value))
        case _:
            return str(value)[:MOST_TEXT]
