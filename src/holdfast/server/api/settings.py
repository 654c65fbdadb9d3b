"""The settings in force, each with where it comes from, and those of topics changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import msgspec

from holdfast.broker.layout import SETTINGS, TOPICS, topic_folder
from holdfast.broker.policy import kept_settings
from holdfast.embedded.effective import DEFAULT, Effective, Origin, Setting
from holdfast.protocol.topics import AlterTopic, SettingsTold, SettingTold, TopicSettingsQuery
from holdfast.server.api.topics import changes_of
from holdfast.server.calls import Call
from holdfast.server.routing import Routes
from holdfast.server.service import Service

routes = Routes("settings")


def effective_of(service: Service) -> Effective:
    """What the server follows, with where each comes from, as far as it was told."""
    return service.effective or Effective(
        broker=service.broker.settings, server=service.settings, data_dir=service.folder
    )


@routes.add("GET", "/v1/settings", action="read", answers=SettingsTold)
async def settings(call: Call) -> SettingsTold:
    """Every setting of server and broker that is in force, and where it comes from."""
    return _told(effective_of(call.service).settings())


@routes.add(
    "GET",
    "/v1/topics/{topic}/settings",
    action="read",
    query=TopicSettingsQuery,
    answers=SettingsTold,
    errors=("unknown_topic",),
)
async def topic_settings(call: Call) -> SettingsTold:
    """The settings that a topic follows, and where each comes from."""
    query: TopicSettingsQuery = call.query
    return _told(await asyncio.to_thread(_topic_settings, call, every=query.all))


@routes.add(
    "PATCH",
    "/v1/topics/{topic}/settings",
    action="admin",
    body=AlterTopic,
    answers=SettingsTold,
    act=True,
    errors=("unknown_topic", "bad_settings"),
)
async def alter_settings(call: Call) -> SettingsTold:
    """Change settings of a topic; they count at once, and are kept."""
    given: AlterTopic = call.body
    await call.service.broker.alter_topic(call.path["topic"], **changes_of(given.settings))
    return _told(await asyncio.to_thread(_topic_settings, call, every=True))


def _topic_settings(call: Call, *, every: bool) -> list[Setting]:
    service, name = call.service, call.path["topic"]
    with service.broker._engine.using(name) as topic:
        place = f"{TOPICS}/{name}/{SETTINGS}"
        kept = kept_settings(service.world, f"{topic_folder(service.folder, name)}/{SETTINGS}")
        own = {each.name: each for each in effective_of(service).topic_settings(name, kept, place)}
        own["partitions"] = Setting("partitions", len(topic.partitions), Origin("folder", place))
        if not every:
            return list(own.values())
        return list(_all(own, msgspec.structs.asdict(topic.settings)))


def _all(own: dict[str, Setting], followed: dict[str, object]) -> Iterator[Setting]:
    for name, value in followed.items():
        yield own.get(name) or Setting(name, value, DEFAULT)


def _told(found: Iterable[Setting]) -> SettingsTold:
    return SettingsTold(
        settings=[
            SettingTold(name=each.name, value=each.value, origin=str(each.origin), kind=each.origin.kind)
            for each in found
        ]
    )
