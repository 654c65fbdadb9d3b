"""Schedules of an engine as users see them. What changes them waits for the disk."""

from __future__ import annotations

from datetime import datetime
from itertools import islice
from typing import Final

from holdfast.api.drafts import Bodies, Drafter, moment_at, to_datetime
from holdfast.api.schedules import Firing, Schedule, ScheduleRequest
from holdfast.broker.body_checks import body_check_of
from holdfast.broker.engine import BrokerEngine
from holdfast.errors import MessageTooLarge, NotFound
from holdfast.scheduling import ScheduleState, SettledDue, Template, dues

MOST_BYTES: Final = 64 * 1024  # of the message: it is written again at each firing


def put_schedule(engine: BrokerEngine, bodies: Bodies, request: ScheduleRequest) -> Schedule:
    """Create or change a schedule, with a message that its topic accepts."""
    now_ns = engine.world.clock.now_ns()
    timing = request.timing
    state = ScheduleState(
        timing if not timing.every_ms else timing.starting(now_ns // 1_000_000),
        _template(engine, bodies, request, now_ns),
        request.misfire,
        request.jitter_ms,
    )
    return schedule_of(request.name, engine.schedules().put(request.name, state))


def _template(engine: BrokerEngine, bodies: Bodies, request: ScheduleRequest, now_ns: int) -> Template:
    with engine.using(request.topic) as topic:
        draft = Drafter(bodies, topic.settings, body_check_of(topic)).draft(request.message, now_ns)
        most_bytes = min(MOST_BYTES, topic.settings.max_message_bytes)
    template = Template(request.topic, bytes(draft.value), draft.key, tuple(draft.headers), draft.priority, draft.flags)
    if template.size > most_bytes:
        raise MessageTooLarge(
            f"the message of schedule {request.name} has {template.size} bytes with key and headers; {most_bytes} are "
            "allowed. Keep large data elsewhere, and a reference to it in the message"
        )
    return template


def get_schedule(engine: BrokerEngine, name: str) -> Schedule | None:
    """Return a schedule, or None."""
    state = engine.schedules().get(name)
    return None if state is None else schedule_of(name, state)


def all_schedules(engine: BrokerEngine) -> list[Schedule]:
    """Return all schedules by name."""
    return [schedule_of(name, state) for name, state in engine.schedules().all().items()]


def pause_schedule(engine: BrokerEngine, name: str, *, paused: bool) -> Schedule:
    """Pause a schedule, or resume it."""
    return schedule_of(name, engine.schedules().pause(name, paused=paused))


def run_schedule(engine: BrokerEngine, name: str) -> Firing:
    """Publish the message of a schedule now."""
    return firing_of(engine.schedules().run(name).firings[-1])


def next_dues(engine: BrokerEngine, name: str, count: int) -> list[datetime]:
    """Return the next times at which a schedule falls due, whether or not it is paused. Raises NotFound."""
    state = engine.schedules().get(name)
    if state is None:
        raise NotFound(f"there is no schedule {name}: list the schedules with `holdfast schedule ls`")
    return dues_of(state, engine.world.clock.now_ns() // 1_000_000, count)


def dues_of(state: ScheduleState, now_ms: int, count: int) -> list[datetime]:
    """Return the next times at which a schedule falls due."""
    return [to_datetime(due_ms * 1_000_000) for due_ms in islice(dues(state.timing, now_ms), count)]


def schedule_of(name: str, state: ScheduleState) -> Schedule:
    """Return a stored schedule as users see it."""
    timing, template = state.timing, state.template
    return Schedule(
        name=name,
        topic=template.topic,
        body=template.body,
        key=None if template.key is None else template.key.decode(),
        headers={name: value.decode() for name, value in template.headers},
        priority=template.priority,
        cron=timing.cron or None,
        timezone=timing.timezone,
        every=timing.every_ms / 1000 if timing.every_ms else None,
        at=moment_at(timing.at_ms),
        misfire=state.misfire,
        jitter=state.jitter_ms / 1000,
        paused=state.paused,
        next_due=None if state.paused else moment_at(state.next_ms),
        fired=state.fired,
        missed=state.missed,
        firings=[firing_of(outcome) for outcome in reversed(state.firings)],
        error=state.error,
        created_at=to_datetime(state.created_ms * 1_000_000),
        changed_at=to_datetime(state.changed_ms * 1_000_000),
    )


def firing_of(outcome: SettledDue) -> Firing:
    """Return what became of a due as users see it."""
    return Firing(
        due=to_datetime(outcome.due_ms * 1_000_000),
        at=to_datetime(outcome.at_ms * 1_000_000),
        message_id=outcome.message_id,
        missed=outcome.missed,
        by_hand=outcome.by_hand,
    )
