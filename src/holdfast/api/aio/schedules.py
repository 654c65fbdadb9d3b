"""Schedules, for tasks."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from holdfast.api.drafts import NewMessage, Seconds
from holdfast.api.schedules import Firing, Schedule, ScheduleOptions, check_next, schedule_request
from holdfast.broker.folder.layout import check_name
from holdfast.scheduling import Misfire

if TYPE_CHECKING:
    from holdfast.api.aio.ports import AsyncSchedulesPort

list_ = list  # inside the class the name means its method


class AsyncSchedules:
    """The schedules of a data folder: messages that are published at certain times, once however many programs run.

    They fire while a program or a server has the folder open. Safe to use from any task.
    """

    def __init__(self, port: AsyncSchedulesPort) -> None:
        self._port = port

    async def put(
        self, name: str, topic: str, body: Any, *, cron: str | None = None, timezone: str = "UTC",
        every: Seconds | None = None, at: datetime | None = None, key: str | None = None,
        headers: dict[str, str] | None = None, priority: int = 0, misfire: Misfire = "run_once", jitter: Seconds = 0,
    ) -> Schedule:  # fmt: skip
        """Create a schedule, or change the one with this name. One that is the same already goes on undisturbed.

            await broker.schedules.put("report", "reports", b"daily", cron="0 3 * * *", timezone="Europe/Berlin")

        Args:
            name: The name of the schedule.
            topic: The topic that each firing publishes to.
            body: The body of the message, in the type that the broker was opened with: bytes by default.
            cron: When it fires: minute, hour, day, month and weekday, as in cron(8), or a name such as "@daily".
            timezone: The IANA name of the zone that `cron` is meant in.
            every: Fire at this interval from now on, in seconds or as a timedelta; at least a second.
            at: Fire once, at this aware datetime.
            key: The key of the message.
            headers: The headers of the message.
            priority: 0 to 9; 9 is the most urgent.
            misfire: What happens to firings that were missed because nobody had the folder open: "run_once" fires once
                for all of them, "skip" none of them, "all" each of them, up to the last hundred.
            jitter: Fire up to this much later than due, differently for each due.

        Returns:
            The schedule, with its next due.

        Raises:
            InvalidRequest: An argument cannot be used, or the time of `at` has passed.
            UnknownTopic: There is no such topic.
            MessageTooLarge: The message is larger than 64 KiB, or than its topic allows.
        """
        message = NewMessage(body, key=key, headers=headers, priority=priority)
        options = ScheduleOptions(cron, timezone, every, at, misfire, jitter)
        return await self._port.put(schedule_request(name, topic, message, options))

    async def get(self, name: str) -> Schedule | None:
        """Return a schedule.

        Args:
            name: The name of the schedule.

        Returns:
            The schedule with its next due and its last firings, or None if it does not exist.

        Raises:
            InvalidRequest: The name cannot be used.
        """
        return await self._port.get(check_name(name, "schedule"))

    async def list(self) -> list_[Schedule]:
        """List the schedules.

        Returns:
            All schedules by name.
        """
        return await self._port.all()

    async def delete(self, name: str) -> bool:
        """Delete a schedule. Messages that it has published stay.

        Args:
            name: The name of the schedule.

        Returns:
            False if it did not exist.

        Raises:
            InvalidRequest: The name cannot be used.
        """
        return await self._port.delete(check_name(name, "schedule"))

    async def pause(self, name: str) -> Schedule:
        """Pause a schedule: until it is resumed it does not fire, and what is due meanwhile does not count as missed.

        Args:
            name: The name of the schedule.

        Returns:
            The schedule.

        Raises:
            NotFound: There is no such schedule.
        """
        return await self._port.pause(check_name(name, "schedule"), paused=True)

    async def resume(self, name: str) -> Schedule:
        """Resume a schedule that is paused. It goes on with its next due from now.

        Args:
            name: The name of the schedule.

        Returns:
            The schedule, with its next due.

        Raises:
            NotFound: There is no such schedule.
        """
        return await self._port.pause(check_name(name, "schedule"), paused=False)

    async def run_now(self, name: str) -> Firing:
        """Publish the message of a schedule now, besides its dues; also if it is paused.

        Args:
            name: The name of the schedule.

        Returns:
            The firing, with the id of the message.

        Raises:
            NotFound: There is no such schedule.
            UnknownTopic: Its topic was deleted.
        """
        return await self._port.run_now(check_name(name, "schedule"))

    async def next(self, name: str, count: int = 5) -> list_[datetime]:
        """Return the next times at which a schedule falls due, jitter not included.

        Args:
            name: The name of the schedule.
            count: How many, up to 1,000.

        Returns:
            The times in UTC, the soonest first; fewer if it falls due less often.

        Raises:
            NotFound: There is no such schedule.
        """
        return await self._port.next_dues(check_name(name, "schedule"), check_next(count))
