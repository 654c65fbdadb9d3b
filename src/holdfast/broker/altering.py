"""Topics that change while they are in use: other settings at once, more partitions step by step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.broker.layout import check_topic_name, topic_folder
from holdfast.broker.policy import keep_settings, settings_for
from holdfast.errors import BadSettings, HoldfastError

if TYPE_CHECKING:
    from holdfast.broker.broker import BrokerEngine

# Each is a few new files, synced: together moments, in which nobody else changes the topic.
_GROW_AT_ONCE: Final = 4


def change_topic(engine: BrokerEngine, name: str, changes: Mapping[str, Any]) -> int:
    """Change settings, which count at once and are kept; answers how many partitions are wanted, for `grow_topic`."""
    name = check_topic_name(name)
    with engine.alone(name), engine.using(name) as topic:
        changes = dict(changes)
        count = len(topic.partitions)
        wanted = changes.pop("partitions", count)
        if type(wanted) is not int or wanted < count:
            raise BadSettings(
                f"partitions={wanted!r} cannot be used: {name} has {count}, and a partition is never taken away"
            )
        world, folder, base = engine.world, topic_folder(engine.folder, name), engine.settings.topic
        changes["partitions"] = wanted
        kept = settings_for(world, folder, None, changes, base)
        settings = settings_for(world, folder, None, {**engine.filed(name), **changes}, base)
        keep_settings(world, folder, kept, base)
        topic.list_parts()
        topic.alter(msgspec.structs.replace(settings, partitions=count))
        engine.tell(topic)
        return wanted


def grow_topic(engine: BrokerEngine, name: str, wanted: int) -> bool:
    """Add some partitions, until there are as many as wanted; answers whether more are to come.

    Whoever does not go on leaves a topic with those that were added so far: nothing is half done between two steps.
    """
    with engine.alone(name), engine.using(name) as topic:
        count = len(topic.partitions)
        if count >= wanted:
            return False
        # Noted first: messages in a partition of which nobody knows after a crash would be lost.
        grown = min(count + _GROW_AT_ONCE, wanted)
        engine.catalog.grow(name, grown)
        try:
            topic.grow(grown)
        except BaseException:
            with suppress(HoldfastError, OSError):  # then the next opening makes them
                engine.catalog.grow(name, len(topic.partitions))
            raise
        finally:
            engine.tell(topic)
        return grown < wanted
