"""The settings that a queue keeps in its folder, so that every opener means the same queue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from holdfast.broker.layout import SETTINGS
from holdfast.env import World
from holdfast.errors import BadSettings, CorruptData
from holdfast.settings import QueueSettings, load
from holdfast.storage.files import durable_replace, join, read_file

# Chosen by each program for itself: a weaker promise must never come from a file.
_NOT_KEPT: Final = frozenset({"durability", "ack_durability"})


def settings_for(world: World, folder: str, given: QueueSettings | None, changes: Mapping[str, Any]) -> QueueSettings:
    """Those given, or those that the folder keeps, with the changes."""
    if given is None:
        return load(QueueSettings, {**_kept(world, join(folder, SETTINGS)), **changes})
    if not isinstance(given, QueueSettings):
        raise BadSettings(f"settings must be QueueSettings, not {type(given).__name__}")
    return load(QueueSettings, {**msgspec.structs.asdict(given), **changes})


def keep_settings(world: World, folder: str, settings: QueueSettings) -> None:
    """Note what differs from the defaults, where that has changed."""
    defaults = QueueSettings()
    differing = {
        name: getattr(settings, name)
        for name in settings.__struct_fields__
        if name not in _NOT_KEPT and getattr(settings, name) != getattr(defaults, name)
    }
    content = msgspec.json.format(msgspec.json.encode(differing))
    known = read_file(world.disk, join(folder, SETTINGS))
    if content != known and (differing or known is not None):
        durable_replace(world.disk, folder, SETTINGS, content)


def dead_settings(settings: QueueSettings) -> QueueSettings:
    """Dead letters are kept for a time of their own, are never retried, and have no dead letters themselves."""
    return msgspec.structs.replace(
        settings,
        durability="fsync",
        retention_ms=settings.dead_retention_ms,
        retention_ignores_pins=True,
        max_attempts=None,
        ttl_ms=None,
        expired_to_dead=False,
        promote_after_ms=None,
    )


def _kept(world: World, path: str) -> dict[str, Any]:
    content = read_file(world.disk, path)
    if content is None:
        return {}
    try:
        kept = msgspec.json.decode(content, type=dict[str, Any])
        if isinstance(kept.get("priority_weights"), list):
            kept["priority_weights"] = tuple(kept["priority_weights"])
        load(QueueSettings, kept)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptData(f"{path} cannot be read: {error}. Mend it, or remove it to get the defaults") from error
    except BadSettings as error:
        raise BadSettings(f"{path} cannot be used: {error}. Mend it, or remove it to get the defaults") from None
    return kept
