"""What may be set of the store of delayed messages."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.settings import check_fields


class DelaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much waits in memory, and how often the state is saved."""

    spill_messages: Annotated[int, Meta(ge=1, le=10_000_000)] = 50_000
    save_ms: Annotated[int, Meta(ge=1, le=3_600_000)] = 5_000

    def __post_init__(self) -> None:
        check_fields(self)
