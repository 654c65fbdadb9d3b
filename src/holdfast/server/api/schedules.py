"""Schedules: messages that are published at certain times.

A schedule publishes for its caller for as long as it is there. So whoever changes one needs the right to publish, both
to its topic and to a topic with the schedule's own name: tokens for some names only can use schedules of these names.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from holdfast.api.drafts import NewMessage
from holdfast.api.schedules import Firing, Schedule, ScheduleOptions, schedule_request
from holdfast.broker.folder.layout import check_name
from holdfast.errors import Forbidden, InvalidRequest, NotFound
from holdfast.protocol.messages import NextDues, NextDuesQuery, PutSchedule, ScheduleDeleted, ScheduleList
from holdfast.server.routing import Action, Routes
from holdfast.server.service import Call

routes = Routes("schedules")


async def _may_put(call: Call) -> None:
    wanted: PutSchedule = call.body
    call.principal.check("publish", wanted.topic)
    await _may_change(call)


async def _may_change(call: Call) -> None:
    await _check_topic(call, "publish")


async def _may_see(call: Call) -> None:
    await _check_topic(call, "read")


async def _check_topic(call: Call, action: Action) -> None:
    """Raise Forbidden unless the caller has the right to the schedule's topic, whose name stays untold."""
    found = await call.service.schedules.get(_name(call))
    if found is not None and not call.principal.may(action, found.topic):
        raise Forbidden(
            f"{call.principal.name} does not have the right {action!r} on the topic of the schedule {found.name}; the "
            f"token allows {call.principal.allowed()}"
        )


def sees(call: Call, schedule: Schedule) -> bool:
    """Whether the caller may see a schedule, with its message."""
    return call.principal.may("read", schedule.name) and call.principal.may("read", schedule.topic)


def may_change(call: Call, schedule: Schedule) -> bool:
    """Whether the caller may pause, run, change and delete a schedule."""
    return call.principal.may("publish", schedule.name) and call.principal.may("publish", schedule.topic)


@routes.add("GET", "/v1/schedules", action="read", scope="any")
async def list_schedules(call: Call) -> ScheduleList:
    """List the schedules that you may see: those whose name and topic you may read."""
    return ScheduleList(schedules=[each for each in await call.service.schedules.all() if sees(call, each)])


@routes.add("GET", "/v1/schedules/{schedule}", action="read", allowed=_may_see, errors=("not_found",))
async def get_schedule(call: Call) -> Schedule:
    """Return a schedule, with its next due and its last firings."""
    found = await call.service.schedules.get(_name(call))
    if found is None:
        raise NotFound(f"there is no schedule {_name(call)}: list the schedules with GET /v1/schedules")
    return found


@routes.add(
    "PUT",
    "/v1/schedules/{schedule}",
    action="publish",
    body=PutSchedule,
    allowed=_may_put,
    act=True,
    errors=("unknown_topic", "message_too_large"),
)
async def put_schedule(call: Call) -> Schedule:
    """Create or change a schedule. One that is the same already goes on undisturbed."""
    given: PutSchedule = call.body
    message = NewMessage(_body(given), key=given.key, headers=given.headers, priority=given.priority)
    options = ScheduleOptions(given.cron, given.timezone, given.every, given.at, given.misfire, given.jitter)
    request = schedule_request(_name(call), given.topic, message, options)
    return await call.service.schedules.put(request)


@routes.add("DELETE", "/v1/schedules/{schedule}", action="publish", allowed=_may_change, act=True)
async def delete_schedule(call: Call) -> ScheduleDeleted:
    """Delete a schedule. Messages that it has published stay."""
    return ScheduleDeleted(deleted=await call.service.schedules.delete(_name(call)))


@routes.add(
    "POST", "/v1/schedules/{schedule}/pause", action="publish", allowed=_may_change, act=True, errors=("not_found",)
)
async def pause_schedule(call: Call) -> Schedule:
    """Pause a schedule: until it is resumed it does not fire, and what is due meanwhile does not count as missed."""
    return await call.service.schedules.pause(_name(call), paused=True)


@routes.add(
    "POST", "/v1/schedules/{schedule}/resume", action="publish", allowed=_may_change, act=True, errors=("not_found",)
)
async def resume_schedule(call: Call) -> Schedule:
    """Resume a schedule that is paused. It goes on with its next due from now."""
    return await call.service.schedules.pause(_name(call), paused=False)


@routes.add(
    "POST",
    "/v1/schedules/{schedule}/run",
    action="publish",
    allowed=_may_change,
    act=True,
    errors=("not_found", "unknown_topic"),
)
async def run_schedule(call: Call) -> Firing:
    """Publish the message of a schedule now, besides its dues; also if it is paused."""
    return await call.service.schedules.run_now(_name(call))


@routes.add(
    "GET", "/v1/schedules/{schedule}/next", action="read", query=NextDuesQuery, allowed=_may_see, errors=("not_found",)
)
async def next_dues(call: Call) -> NextDues:
    """List the next times at which a schedule falls due, jitter not included."""
    return NextDues(times=await call.service.schedules.next_dues(_name(call), call.query.count))


def _name(call: Call) -> str:
    return check_name(call.path["schedule"], "schedule")


def _body(given: PutSchedule) -> bytes:
    values = [each for each in (given.body, given.text) if each is not None]
    if len(values) + (given.json is not UNSET) != 1:
        raise InvalidRequest("a schedule has one body: give one of body, text and json")
    if values:
        return values[0].encode() if isinstance(values[0], str) else values[0]
    return msgspec.json.encode(given.json)
