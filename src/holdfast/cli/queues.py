"""Queues that a command makes, and the settings that they follow, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import holdfast
from holdfast.broker.layout import DEFAULT_GROUP
from holdfast.cli.remote import is_remote
from holdfast.errors import Forbidden, UnknownTopic
from holdfast.settings import TopicSettings


def see_to_queue(broker: holdfast.Broker, name: str, changes: Mapping[str, Any] | None = None, *, create: bool) -> bool:
    """Make the queue where there is none; answers whether it did."""
    if not is_remote(broker):
        if name in broker._engine.topics():
            return False
        broker._engine.create_topic(name, None, None if changes is None else dict(changes))
        broker._engine.open_topic(name).group(DEFAULT_GROUP)
        return True
    try:
        broker.describe_topic(name)
    except UnknownTopic:
        if not create:
            raise
        broker.queue(name, **(changes or {}))
        return True
    except Forbidden:
        pass  # one who may only publish is not told
    return False


def settings_of(broker: holdfast.Broker, topic: str) -> TopicSettings:
    """What a topic follows."""
    if is_remote(broker):
        from holdfast.client.broker_face import topic_settings

        return topic_settings(broker.describe_topic(topic).settings)
    with broker._engine.using(topic) as opened:
        return opened.settings
