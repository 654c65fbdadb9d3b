"""Changing a topic in use: settings at once, new partitions step by step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.broker.folder.contents import keep_settings, settings_for
from holdfast.broker.folder.layout import check_topic_name, topic_folder
from holdfast.env.world import checkpoint
from holdfast.errors import BadSettings, HoldfastError

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine

# Partitions added per step, during which the topic is locked against other changes.
_GROW_AT_ONCE: Final = 4


def change_topic(engine: BrokerEngine, name: str, changes: Mapping[str, Any]) -> int:
    """Change settings at once and durably; returns the number of partitions wanted, for `grow_topic`."""
    name = check_topic_name(name)
    with engine.alone(name), engine.using(name) as topic:
        changes = dict(changes)
        count = len(topic.partitions)
        wanted = changes.pop("partitions", count)
        if type(wanted) is not int or wanted < count:
            raise BadSettings(
                f"partitions={wanted!r} cannot be used: {name} has {count}, and partitions cannot be removed; "
                "create another topic"
            )
        world, folder, base = engine.world, topic_folder(engine.folder, name), engine.settings.topic
        changes["partitions"] = wanted
        kept = settings_for(world, folder, None, changes, base)
        settings = settings_for(world, folder, None, {**engine.filed(name), **changes}, base)
        engine.tiering.check(settings)
        keep_settings(world, folder, kept, base)
        topic.list_parts()
        topic.alter(msgspec.structs.replace(settings, partitions=count))
        engine.tell(topic)
        return wanted


def grow_topic(engine: BrokerEngine, name: str, wanted: int) -> bool:
    """Add a few partitions towards the number wanted; returns whether to call again.

    The topic is complete between calls, so a caller may stop at any point.
    """
    checkpoint()
    with engine.alone(name), engine.using(name) as topic:
        count = len(topic.partitions)
        if count >= wanted:
            return False
        # Written to the catalog first: messages in a partition unknown to it after a crash would be lost.
        grown = min(count + _GROW_AT_ONCE, wanted)
        engine.catalog.grow(name, grown)
        try:
            topic.grow(grown)
        except BaseException:
            with suppress(HoldfastError, OSError):  # then the next opening creates them
                engine.catalog.grow(name, len(topic.partitions))
            raise
        finally:
            engine.tell(topic)
        return grown < wanted
