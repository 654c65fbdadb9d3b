"""`holdfast schedule`: messages that are published at certain times."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Annotated, Any, Final, TypeAlias, cast

from holdfast.api.drafts import parse_duration, parse_instant
from holdfast.api.schedules import Firing, Schedule, check_next
from holdfast.broker.folder.layout import check_name
from holdfast.broker.schedules import stored_schedules
from holdfast.cli import output
from holdfast.cli.opening import WAIT, AsJson, DataFolder, Topic, Wait, chosen_topic, opened_broker, topics_of
from holdfast.cli.parsing import Section, argument, option
from holdfast.cli.use.put import NO_OPTIONS, SharedOptions, header_pairs
from holdfast.client.opening import is_address
from holdfast.env import real_world
from holdfast.errors import NotFound
from holdfast.local.schedules import dues_of, schedule_of
from holdfast.scheduling import Misfire, zone_of

app = Section("Messages that are published at certain times.")

ScheduleName: TypeAlias = Annotated[str, argument("NAME", "The schedule's name.")]
_STDIN = "-"


@app.command("add")
def add_command(
    folder: DataFolder,
    name: ScheduleName,
    body: Annotated[str, argument("BODY", "The body of the message; `-` reads it from stdin.")],
    cron: Annotated[
        str | None, option("--cron EXPR", "When: minute, hour, day, month and weekday, such as '0 3 * * mon-fri'.")
    ] = None,
    timezone: Annotated[str, option("--timezone ZONE", "The zone of --cron, such as Europe/Berlin.")] = "UTC",
    every: Annotated[str | None, option("--every TIME", "At this interval from now on, such as 30s or 6h.")] = None,
    at: Annotated[str | None, option("--due ISO", "Once, at this time, such as 2026-12-24T18:00:00Z or +1h.")] = None,
    topic: Topic = None,
    key: Annotated[str | None, option("--key", "The key of the message.")] = None,
    shared: SharedOptions = NO_OPTIONS,
    misfire: Annotated[
        Misfire, option("--misfire", "What to do about firings that were missed: run_once, skip or all.")
    ] = "run_once",
    jitter: Annotated[str, option("--jitter TIME", "Fire up to this much later than due.")] = "0",
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Create a schedule, or change the one with this name.

    It fires while a server or a program has the folder open, once however many there are.

    Examples:
        holdfast schedule add ./data report 'daily' --cron '0 3 * * *' --timezone Europe/Berlin
        holdfast schedule add ./data poll 'go' --every 30s --topic jobs
    """
    target = chosen_topic(folder, topic)
    content = sys.stdin.buffer.read() if body == _STDIN else body.encode("utf-8", "surrogateescape")
    now_ms = real_world().clock.now_ns() // 1_000_000
    with opened_broker(folder, wait=wait) as broker:
        made = broker.schedules.put(
            name,
            target,
            content,
            cron=cron,
            timezone=timezone,
            every=None if every is None else parse_duration(every, "--every"),
            at=None if at is None else parse_instant(at, now_ms, "--due"),
            key=key,
            headers=cast(dict[str, str], dict(header_pairs(shared.headers) or ())),  # bytes are refused
            priority=shared.priority,
            misfire=misfire,
            jitter=parse_duration(jitter, "--jitter"),
        )
    if as_json:
        output.print_json(_document(made))
    else:
        output.say(f"{output.safe(made.name)} {_when_next(made)}")
        if not is_address(folder):
            output.note("it fires while a server or a program has the folder open")
    return output.OK


@app.command("ls")
def ls_command(folder: DataFolder, as_json: AsJson = False) -> int:
    """List the schedules: when each is due next, and what it has done. Does not lock the folder.

    Examples:
        holdfast schedule ls ./data
    """
    found = _schedules(folder)
    if as_json:
        output.print_each(map(_document, found))
    elif not found:
        output.note(f"no schedules in {output.safe(folder)}")
    else:
        shown = output.table("schedule", "topic", "when", "next due", "fired>", "missed>", "state")
        for each in found:
            shown.add_row(
                output.safe(each.name),
                output.safe(each.topic),
                output.safe(_timing(each)),
                _moment_or_dash(each.next_due),
                f"{each.fired:,}",
                f"{each.missed:,}",
                _state(each),
            )
        output.stdout().print(shown)
    return output.OK


@app.command("show")
def show_command(folder: DataFolder, name: ScheduleName, as_json: AsJson = False) -> int:
    """Show a schedule, its message and its last firings. Does not lock the folder. Exit code: 3 if there is none.

    Examples:
        holdfast schedule show ./data report
    """
    found = next((each for each in _schedules(folder) if each.name == check_name(name, "schedule")), None)
    if found is None:
        output.note(f"there is no schedule {output.safe(name)} in {output.safe(folder)}")
        return output.NOTHING_THERE
    if as_json:
        output.print_json(_document(found))
        return output.OK
    facts = output.facts_table()
    for title, fact in _facts(found):
        facts.add_row(title, output.safe(fact))
    output.stdout().print(facts)
    if found.firings:
        shown = output.table("due", "at", "message")
        for firing in found.firings:
            what = f"{firing.missed:,} missed" if firing.missed else output.safe(firing.message_id or "-")
            due = "by hand" if firing.by_hand else output.seconds_text(firing.due)
            shown.add_row(due, output.seconds_text(firing.at), what)
        output.say("")
        output.stdout().print(shown)
    return output.OK


@app.command("next")
def next_command(
    folder: DataFolder,
    name: ScheduleName,
    count: Annotated[int, option("--count N", "How many.", least=1, most=1000)] = 5,
    as_json: AsJson = False,
) -> int:
    """Print the next times at which a schedule falls due, in its own time zone. Does not lock the folder.

    Examples:
        holdfast schedule next ./data report --count 10
    """
    times, zone = _next_times(folder, check_name(name, "schedule"), check_next(count))
    for due in times:
        if as_json:
            output.print_json(output.moment("due", due))
        else:
            output.say(due.astimezone(zone_of(zone)).isoformat(sep=" ", timespec="seconds"))
    return output.OK


@app.command("pause")
def pause_command(folder: DataFolder, name: ScheduleName, wait: Wait = WAIT, as_json: AsJson = False) -> int:
    """Pause a schedule: until it is resumed it does not fire, and what is due meanwhile does not count as missed.

    Examples:
        holdfast schedule pause ./data report
    """
    with opened_broker(folder, wait=wait) as broker:
        return _changed(broker.schedules.pause(name), as_json=as_json)


@app.command("resume")
def resume_command(folder: DataFolder, name: ScheduleName, wait: Wait = WAIT, as_json: AsJson = False) -> int:
    """Resume a schedule that is paused. It goes on with its next due from now.

    Examples:
        holdfast schedule resume ./data report
    """
    with opened_broker(folder, wait=wait) as broker:
        return _changed(broker.schedules.resume(name), as_json=as_json)


@app.command("run")
def run_command(folder: DataFolder, name: ScheduleName, wait: Wait = WAIT, as_json: AsJson = False) -> int:
    """Publish the message of a schedule now, besides its dues, and print the message's id.

    Examples:
        holdfast schedule run ./data report
    """
    with opened_broker(folder, wait=wait) as broker:
        firing = broker.schedules.run_now(name)
    if as_json:
        output.print_json({"name": name, "id": firing.message_id, **output.moment("at", firing.at)})
    else:
        output.say(output.safe(firing.message_id))
    return output.OK


@app.command("rm")
def rm_command(folder: DataFolder, name: ScheduleName, wait: Wait = WAIT, as_json: AsJson = False) -> int:
    """Delete a schedule. Messages that it has published stay. Exit code: 3 if there is none.

    Examples:
        holdfast schedule rm ./data report
    """
    with opened_broker(folder, wait=wait) as broker:
        deleted = broker.schedules.delete(name)
    if as_json:
        output.print_json({"name": name, "deleted": deleted})
    else:
        output.say(f"{output.safe(name)} is deleted" if deleted else f"there is no schedule {output.safe(name)}")
    return output.OK if deleted else output.NOTHING_THERE


def _schedules(place: str) -> list[Schedule]:
    """Return all schedules: read without owning the folder, or from a server."""
    if is_address(place):
        with opened_broker(place) as broker:
            return broker.schedules.list()
    topics_of(place)
    return [schedule_of(name, state) for name, state in stored_schedules(real_world(), place).items()]


def _next_times(place: str, name: str, count: int) -> tuple[list[datetime], str]:
    """Return the next dues of a schedule, and its time zone."""
    if is_address(place):
        with opened_broker(place) as broker:
            times, found = broker.schedules.next(name, count), broker.schedules.get(name)
            return times, "UTC" if found is None else found.timezone
    topics_of(place)
    world = real_world()
    state = stored_schedules(world, place).get(name)
    if state is None:
        raise NotFound(f"there is no schedule {name}: list the schedules with `holdfast schedule ls`")
    return dues_of(state, world.clock.now_ns() // 1_000_000, count), state.timing.timezone


def _changed(schedule: Schedule, *, as_json: bool) -> int:
    if as_json:
        output.print_json(_document(schedule))
    else:
        output.say(f"{output.safe(schedule.name)} {_when_next(schedule)}")
    return output.OK


def _when_next(schedule: Schedule) -> str:
    if schedule.next_due is None:
        return f"is {_state(schedule)}"
    return f"is due next at {output.seconds_text(schedule.next_due)} UTC"


def _timing(schedule: Schedule) -> str:
    if schedule.cron is not None:
        return schedule.cron if schedule.timezone == "UTC" else f"{schedule.cron} {schedule.timezone}"
    return f"every {schedule.every:g}s" if schedule.every else f"once at {output.seconds_text(schedule.at)}"


def _state(schedule: Schedule) -> str:
    if schedule.paused:
        return "paused"
    if schedule.next_due is None:
        return "finished"
    return "failing" if schedule.error else "active"


def _facts(schedule: Schedule) -> list[tuple[str, str]]:
    facts = [
        ("schedule", schedule.name),
        ("when", _timing(schedule)),
        ("next due", f"{_moment_or_dash(schedule.next_due)}{' UTC' if schedule.next_due else ''}"),
        ("state", _state(schedule)),
        ("topic", schedule.topic),
        ("body", output.preview(schedule.body, 200)),
        ("key", schedule.key or ""),
        ("headers", ", ".join(f"{name}={value}" for name, value in schedule.headers.items())),
        ("priority", str(schedule.priority) if schedule.priority else ""),
        ("misfire", schedule.misfire),
        ("jitter", f"{schedule.jitter:g}s" if schedule.jitter else ""),
        ("fired", f"{schedule.fired:,}"),
        ("missed", f"{schedule.missed:,}"),
        ("error", schedule.error),
    ]
    return [(title, fact) for title, fact in facts if fact]


_SAME: Final = ("topic", "key", "headers", "priority", "cron", "timezone", "misfire", "paused", "fired", "missed")


def _document(schedule: Schedule) -> dict[str, Any]:
    times = {"at": schedule.at, "next_due": schedule.next_due}
    times |= {"created": schedule.created_at, "changed": schedule.changed_at}
    document = {"name": schedule.name, **output.as_json("body", schedule.body)}
    document |= {name: getattr(schedule, name) for name in _SAME}
    document |= {"every_seconds": schedule.every, "jitter_seconds": schedule.jitter, "error": schedule.error}
    for name, when in times.items():
        document |= output.moment(name, when)
    return document | {"firings": list(map(_firing_document, schedule.firings))}


def _firing_document(firing: Firing) -> dict[str, Any]:
    facts = {"id": firing.message_id, "missed": firing.missed, "by_hand": firing.by_hand}
    return {**output.moment("due", firing.due), **output.moment("at", firing.at), **facts}


def _moment_or_dash(when: datetime | None) -> str:
    return "-" if when is None else output.seconds_text(when)
