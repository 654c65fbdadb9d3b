"""The settings that a topic keeps in its folder, so that every opener means the same topic.

From weakest to strongest: our defaults, the settings file's general ones, what the topic keeps, what the settings
file says of this topic, what the program says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from holdfast.broker.layout import SETTINGS
from holdfast.broker.sealed import sealed, unsealed
from holdfast.env import World
from holdfast.errors import BadSettings, CorruptData
from holdfast.settings import QueueSettings, TopicSettings, load
from holdfast.storage.files import durable_replace, join, read_file

# Chosen by each program for itself: a weaker promise must never come from a file. And `partitions` is no wish: it is
# noted with the topic.
NOT_KEPT: Final = frozenset({"durability", "ack_durability", "partitions"})

_DEFAULTS: Final = TopicSettings()


def settings_for(
    world: World,
    folder: str,
    given: QueueSettings | None,
    changes: Mapping[str, Any],
    base: TopicSettings = _DEFAULTS,
) -> TopicSettings:
    """Those given, or those that the folder keeps on top of the base, with the changes."""
    if given is None:
        kept = kept_settings(world, join(folder, SETTINGS))
        return load(TopicSettings, {**msgspec.structs.asdict(base), **kept, **changes})
    return check_settings(given, changes)


def check_settings(given: QueueSettings | None, changes: Mapping[str, Any]) -> TopicSettings:
    """Those given with the changes; BadSettings where they do not fit."""
    if given is not None and not isinstance(given, QueueSettings):
        raise BadSettings(f"settings must be QueueSettings or TopicSettings, not {type(given).__name__}")
    return load(TopicSettings, {**msgspec.structs.asdict(given or _DEFAULTS), **changes})


def keep_settings(world: World, folder: str, settings: TopicSettings, base: TopicSettings = _DEFAULTS) -> None:
    """Note what differs from the base, where that has changed."""
    differing = differing_settings(settings, base)
    content = sealed(msgspec.json.format(msgspec.json.encode(differing)))
    known = read_file(world.disk, join(folder, SETTINGS))
    if content != known and (differing or known is not None):
        durable_replace(world.disk, folder, SETTINGS, content)


def differing_settings(settings: TopicSettings, base: TopicSettings) -> dict[str, Any]:
    """What is to be kept of the settings."""
    return {
        name: getattr(settings, name)
        for name in settings.__struct_fields__
        if name not in NOT_KEPT and getattr(settings, name) != getattr(base, name)
    }


def dead_settings(settings: TopicSettings) -> TopicSettings:
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
        cleanup="delete",
        trace_sample=0.0,
        key_order=False,
        key_group_concurrency=None,
        key_group_rate=None,
        key_group_fair=False,
    )


def log_settings(settings: TopicSettings) -> TopicSettings:
    """As the logs of its partitions follow them: a topic that is only compacted keeps the last of each key for ever."""
    if settings.cleanup != "compact":
        return settings
    return msgspec.structs.replace(
        settings, retention_ms=None, retention_bytes=None, retention_segments=None, retention_done_bytes=None
    )


def kept_settings(world: World, path: str) -> dict[str, Any]:
    """What a file of settings says, checked; nothing where there is none."""
    content = read_file(world.disk, path)
    if content is None:
        return {}
    try:
        kept = msgspec.json.decode(unsealed(content, path), type=dict[str, Any])
        if isinstance(kept.get("priority_weights"), list):
            kept["priority_weights"] = tuple(kept["priority_weights"])
        load(TopicSettings, kept)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptData(f"{path} cannot be read: {error}. Mend it, or remove it to get the defaults") from error
    except BadSettings as error:
        raise BadSettings(f"{path} cannot be used: {error}. Mend it, or remove it to get the defaults") from None
    return kept
