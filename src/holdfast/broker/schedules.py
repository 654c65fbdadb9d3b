"""The schedules of a data folder: kept as documents, fired by the folder's owner.

A schedule is a document of the folder (see `locks`) whose name no user can give to one: `schedule:NAME`. So it is as
durable as a document, is part of snapshots, backups and checks, and needs no file of its own.

**Fired once.** The message and the note that it was fired are in two places, and the owner may die between them. So
nothing is noted before the message is on disk, and the message itself is the proof: it has the dedup id `name@due`.
Whoever comes to a due looks for that id in the topic, however old, and publishes only if it is not there:

    1.  publish with the dedup id `name@due`, and wait until it is on disk
    2.  write the document: the firing, and the next due

    killed before 1, or during it     the id is unknown to the next owner: it publishes
    killed between 1 and 2, during 2  the id is known to the next owner: it writes the document, and nothing else
    killed after 2                    the document names the next due

An id is looked for beyond the topic's deduplication window: otherwise an owner that was down for longer would fire a
due again. The index still has it then: it reads the ids from the logs when the topic is opened, and drops those that
have left the window only when it saves them, an hour later or at the end. So the schedules are read first of all when
a folder is opened (`recover`), and what was fired is noted then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import count, islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.broker.folder.layout import LOCKS, SCHEDULE_PREFIX, message_id
from holdfast.broker.locks import replayed_locks
from holdfast.broker.messages import DEDUP_ID, Draft, Place, partition_for
from holdfast.broker.metrics import Counter, Histogram
from holdfast.env import World
from holdfast.env.process import get_logger
from holdfast.errors import HoldfastError, InvalidRequest, NotFound
from holdfast.locking import Remove, ReplaceDocument
from holdfast.model import Appended
from holdfast.scheduling import (
    MOST_CAUGHT_UP,
    FiringPlan,
    ScheduleState,
    SettledDue,
    Template,
    after,
    check_timing,
    dues,
    firing_id,
    jitter_of,
    next_due,
    plan,
    wake_ms,
)
from holdfast.storage.files import join
from holdfast.storage.keeper import Keeper, soonest

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine
    from holdfast.broker.locks import FolderLocks
    from holdfast.broker.messages import Publication
    from holdfast.broker.partition import Partition
    from holdfast.broker.topic import Topic
    from holdfast.broker.upkeep import Using

logger = get_logger(__name__)

MOST_SCHEDULES: Final = 10_000
_LOOK_AGAIN_MS: Final = 10_000  # the clock may be set at any time
_SET_BACK_MS: Final = 1_000  # a clock that is corrected by less was not set back
_AFTER_ERROR_MS: Final = 10_000
_MOST_PLANNING_MS: Final = 50  # after a long outage it takes a while to see what is due
_AT_ONCE: Final = 100  # schedules and messages that share a sync
_FOREVER_MS: Final = 1 << 62

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ScheduleState).decode


class _Sent(NamedTuple):
    """A message that is written, or was before; without a publication it is to be synced with its topic."""

    using: Using
    topic: Topic
    message_id: str
    partition: Partition | None = None
    publication: Publication | None = None

    def let_go(self) -> None:
        self.using.__exit__()


class _Firing(NamedTuple):
    """A schedule that is being fired, with its messages so far."""

    name: str
    state: ScheduleState
    plan: FiringPlan
    now_ms: int
    sent: list[_Sent]

    def let_go(self) -> None:
        for sent in self.sent:
            sent.let_go()


class FolderSchedules:
    """The schedules of a data folder, and what fires them. Thread-safe; its calls wait for the disk."""

    def __init__(self, engine: BrokerEngine, *, kept: bool) -> None:
        self._engine = engine
        self._clock = engine.world.clock
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held by callers while they wait for the other: a tick lets them go first
        self._states: dict[str, ScheduleState] | None = None  # read at first use
        self._noted: Appended | None = None  # the last note of a firing; one sync serves all of a tick
        self._retry_ms: dict[str, int] = {}  # schedules that failed -> monotonic time of the next attempt
        self._logged_error = ""
        self._missed_now: dict[str, int] = {}  # since the last line about it in the log
        self.folder = engine.folder
        self.on_attention: Callable[[], None] = lambda: None
        self.before_close: Callable[[], None] = lambda: None
        self.fired, self.missed, self.failed = Counter("fired"), Counter("missed"), Counter("failed")
        self.lateness_seconds = Histogram("lateness_seconds")
        if kept:  # on a thread of its own: publishing may wait, and leases must end in time
            Keeper(self).start()
            engine.at_close(self.before_close)

    def put(self, name: str, wanted: ScheduleState) -> ScheduleState:
        """Create or change a schedule. One that is the same already goes on as it is, with its next due."""
        with self._turn, self._lock:
            states, now_ms = self._loaded(), self._now_ms()
            known = states.get(name)
            if known is not None and known.is_same(wanted):
                return known
            goes_on = known is not None and known.goes_on_with(wanted)
            if not goes_on:
                check_timing(wanted.timing, now_ms)
            if known is None and len(states) >= MOST_SCHEDULES:
                raise InvalidRequest(
                    f"schedule {name} was not created: there are {MOST_SCHEDULES} already, which is the limit. Delete "
                    "some"
                )
            base = known or wanted
            state = msgspec.structs.replace(
                wanted,
                paused=base.paused,
                created_ms=base.created_ms or now_ms,
                changed_ms=now_ms,
                timing=base.timing if base.has_timing_of(wanted) else wanted.timing,
                next_ms=base.next_ms if goes_on else next_due(wanted.timing, now_ms),
                seen_ms=base.seen_ms if goes_on else now_ms,
                fired=base.fired,
                missed=base.missed,
                firings=base.firings,
            )
            self._retry_ms.pop(name, None)  # the change may be the cure
            self._settle(self._write(name, state, bounded=True))
        self.on_attention()
        return state

    def get(self, name: str) -> ScheduleState | None:
        """Return a schedule, or None."""
        with self._turn, self._lock:
            return self._loaded().get(name)

    def all(self) -> dict[str, ScheduleState]:
        """Return all schedules by name."""
        with self._turn, self._lock:
            return dict(sorted(self._loaded().items()))

    def delete(self, name: str) -> bool:
        """Delete a schedule; False if there is none."""
        with self._turn, self._lock:
            states = self._loaded()
            if name not in states:
                return False
            removed = self._engine.locks().change(Remove(SCHEDULE_PREFIX + name))
            del states[name]
            self._retry_ms.pop(name, None)
            self._settle(removed.appended)
            return True

    def pause(self, name: str, *, paused: bool) -> ScheduleState:
        """Pause a schedule, or resume it: dues that pass meanwhile are neither fired nor missed. Raises NotFound."""
        with self._turn, self._lock:
            state = self._known(name)
            if state.paused == paused:
                return state
            now_ms = self._now_ms()
            state = msgspec.structs.replace(
                state, paused=paused, next_ms=next_due(state.timing, now_ms), seen_ms=now_ms, error=""
            )
            self._retry_ms.pop(name, None)
            self._settle(self._write(name, state))
        self.on_attention()
        return state

    def run(self, name: str) -> ScheduleState:
        """Publish the message now, besides what is due. Raises NotFound."""
        with self._turn, self._lock:
            state, now_ms = self._known(name), self._now_ms()
            published = self._publish(state, self._run_id(name, state, now_ms))
            self.fired.add()
            state = after(state, [SettledDue(now_ms, now_ms, published, by_hand=True)], state.next_ms, state.seen_ms)
            self._settle(self._write(name, state))
            return state

    def _run_id(self, name: str, state: ScheduleState, now_ms: int) -> str:
        """Return a dedup id that no run has had: there may be several in a millisecond."""
        with self._engine.using(state.template.topic) as topic:
            ids = (f"{firing_id(name, ms)}+run" for ms in count(now_ms))
            return next(each for each in ids if topic.duplicates.find(each.encode()) is None)

    def tick(self) -> int | None:
        """Fire what is due; returns in how many ms to call again."""
        self._engine.check_open()
        try:
            if not self._has_any():
                return None
            names = deque(self.all())
        except (HoldfastError, OSError) as error:
            return self._give_up(error)
        while names:
            with self._turn:
                pass
            with self._lock:
                self._fire_some(names)
        self._log_missed()
        noted, self._noted = self._noted, None
        with suppress(HoldfastError):  # without the notes, the next owner finds the messages
            self._settle(noted)
        due_ms = self.due_ms()
        return None if due_ms is None else min(due_ms, _LOOK_AGAIN_MS)

    def due_ms(self) -> int | None:
        """Ms until a schedule is due; None if none is."""
        states, now_ms = self._states or {}, self._now_ms()
        retries, mono_ms = dict(self._retry_ms), self._mono_ms()
        waits = []
        for name, state in list(states.items()):
            at_ms = wake_ms(name, state)
            if at_ms is not None:
                waits.append(max(at_ms - now_ms, retries.get(name, mono_ms) - mono_ms, 0))
        return soonest(*waits)

    def _give_up(self, error: Exception) -> int:
        """Say once why there are no schedules to fire, and when to try again."""
        self._engine.check_open()
        if str(error) != self._logged_error:
            self._logged_error = str(error)
            logger.error("schedules cannot be read", extra={"folder": self.folder, "error": str(error)})
        return _AFTER_ERROR_MS

    def _has_any(self) -> bool:
        """Whether there may be schedules: a folder without locks and documents has none."""
        engine = self._engine
        return self._states is not None or engine.has_locks or engine.world.disk.exists(join(self.folder, LOCKS))

    def recover(self) -> None:
        """Read the schedules, before anything is done that could make the topics forget what was fired."""
        try:
            with self._lock:
                self._loaded()
        except (HoldfastError, OSError) as error:
            self._give_up(error)

    def _loaded(self) -> dict[str, ScheduleState]:
        if self._states is None:
            self._states = _states_in(self._engine.locks().schedules())
            for name, state in list(self._states.items()):
                if (wake_ms(name, state) or _FOREVER_MS) <= self._now_ms():
                    with suppress(HoldfastError, OSError):  # firing it will fail for the same reason, and say so
                        self._note_published(name, state)
        return self._states

    def _note_published(self, name: str, state: ScheduleState) -> None:
        """Note the dues that an earlier owner fired; it died before it could. There are no more than fire at once."""
        topic_name, now_ms = state.template.topic, self._now_ms()
        outcomes: list[SettledDue] = []
        with self._engine.using(topic_name) as topic:
            for due_ms in islice(dues(state.timing, (state.next_ms or 0) - 1), MOST_CAUGHT_UP):
                place = topic.duplicates.find(firing_id(name, due_ms).encode())
                if place is None:
                    break
                outcomes.append(SettledDue(due_ms, now_ms, _id_at(topic_name, place)))
        if outcomes:
            next_ms = next_due(state.timing, outcomes[-1].due_ms)
            self._noted = self._write(name, after(state, outcomes, next_ms, now_ms))
            self.fired.add(len(outcomes))  # nobody knows how late they were

    def reread(self) -> None:
        """Notice schedules that came or went with a topic."""
        with self._turn, self._lock:
            self._states = None
            self._loaded()
        self.on_attention()

    def _known(self, name: str) -> ScheduleState:
        state = self._loaded().get(name)
        if state is None:
            raise NotFound(f"there is no schedule {name}: list the schedules with `holdfast schedule ls`")
        return state

    def _fire_some(self, names: deque[str]) -> None:
        """Take schedules from the left and fire those that are due, with one sync for the messages of all of them.

        The caller holds the lock: meanwhile nobody may change what is being fired. So they are not too many.
        """
        begun: list[_Firing] = []
        room, until_ms = _AT_ONCE, self._mono_ms() + _MOST_PLANNING_MS
        try:
            while names and room > 0 and self._mono_ms() <= until_ms:
                firing = self._begin(names.popleft())
                room -= 1
                if firing is not None:
                    begun.append(firing)
                    room -= len(firing.plan.fire)
            for firing in begun:
                self._complete(firing)
        finally:
            for firing in begun:
                firing.let_go()

    def _begin(self, name: str) -> _Firing | None:
        """Write the messages of a schedule that is due; None if it is not."""
        state, now_ms = self._loaded().get(name), self._now_ms()
        if state is None or self._retry_ms.get(name, 0) > self._mono_ms():
            return None
        firing = None
        try:
            state = self._after_clock_change(name, state, now_ms)
            planned = plan(name, state, now_ms)
            if planned is None:
                return None
            firing = _Firing(name, state, planned, now_ms, [])
            for due_ms in planned.fire:
                firing.sent.append(self._send(state, firing_id(name, due_ms)))
        except (HoldfastError, OSError) as error:
            if firing is not None:
                firing.let_go()
            self._engine.check_open()
            self._fail(name, state, str(error))
            return None
        return firing

    def _complete(self, firing: _Firing) -> None:
        """Wait until the messages are on disk, then note them."""
        name, state, planned = firing.name, firing.state, firing.plan
        outcomes = []
        try:
            if planned.missed:
                outcomes.append(SettledDue(planned.last_missed_ms, firing.now_ms, missed=planned.missed))
            for due_ms, sent in zip(planned.fire, firing.sent, strict=True):
                outcomes.append(SettledDue(due_ms, self._now_ms(), self._sent(sent, state.template)))
            self._noted = self._write(name, after(state, outcomes, planned.next_ms, firing.now_ms))
        except (HoldfastError, OSError) as error:
            self._engine.check_open()
            self._fail(name, state, str(error))
            return
        self._retry_ms.pop(name, None)
        self._count(name, state, outcomes)

    def _after_clock_change(self, name: str, state: ScheduleState, now_ms: int) -> ScheduleState:
        """If the clock was set back, start from its new time: dues that were fired before are found to be."""
        if state.next_ms is None or now_ms >= state.seen_ms - _SET_BACK_MS:
            return state
        state = msgspec.structs.replace(state, next_ms=next_due(state.timing, now_ms), seen_ms=now_ms)
        self._write(name, state)
        return state

    def _count(self, name: str, state: ScheduleState, outcomes: list[SettledDue]) -> None:
        for outcome in outcomes:
            if outcome.missed:
                self.missed.add(outcome.missed)
                self._missed_now[name] = outcome.missed
            else:
                self.fired.add()
                late_ms = outcome.at_ms - outcome.due_ms - jitter_of(name, outcome.due_ms, state.jitter_ms)
                self.lateness_seconds.observe_ns(max(late_ms, 0) * 1_000_000)

    def _log_missed(self) -> None:
        """Say what was missed in one line, however many schedules missed something."""
        missed, self._missed_now = self._missed_now, {}
        if missed:
            extra = {"schedule": next(iter(missed)), "other_schedules": len(missed) - 1, "count": sum(missed.values())}
            logger.warning("firings missed", extra=extra)

    def _fail(self, name: str, state: ScheduleState, reason: str) -> None:
        """Keep the due for another attempt, and remember why."""
        self.failed.add()
        self._retry_ms[name] = self._mono_ms() + _AFTER_ERROR_MS
        if state.error != reason:
            logger.warning("a schedule could not fire", extra={"schedule": name, "error": reason})
            failed = msgspec.structs.replace(state, error=reason)
            self._loaded()[name] = failed
            with suppress(HoldfastError, OSError):  # the disk may be what failed
                self._noted = self._write(name, failed)

    def _publish(self, state: ScheduleState, dedup_id: str) -> str:
        """Publish the message unless it was before; returns its id when it is on disk."""
        sent = self._send(state, dedup_id)
        try:
            return self._sent(sent, state.template)
        finally:
            sent.let_go()

    def _send(self, state: ScheduleState, dedup_id: str) -> _Sent:
        """Write the message unless it was before. Its topic is kept open until `let_go`."""
        template, sent = state.template, dedup_id.encode()
        using = self._engine.using(template.topic)
        topic = using.__enter__()
        try:
            place = topic.duplicates.find(sent)
            if place is not None:
                return _Sent(using, topic, _id_at(topic.name, place))
            number = self._partition(topic, template.key, sent)
            ttl_ms = topic.settings.ttl_ms
            draft = Draft(
                template.body,
                template.key,
                (*template.headers, (DEDUP_ID, sent)),
                template.priority,
                self._now_ms() + ttl_ms if ttl_ms else 0,
                dedup_id=sent,
                flags=template.flags,
            )
            partition = topic.partitions[number]
            publication = partition.publish([draft], durability="fsync")
            return _Sent(using, topic, _id_at(topic.name, publication.places[0], number), partition, publication)
        except BaseException:
            using.__exit__()
            raise

    @staticmethod
    def _sent(sent: _Sent, template: Template) -> str:
        """Return the id of a message when it is on disk."""
        if sent.publication is None or sent.partition is None:
            sent.topic.sync()
            return sent.message_id
        sent.partition.wait(sent.publication)
        sent.topic.metrics.published.add()
        sent.topic.metrics.published_bytes.add(len(template.body))
        return sent.message_id

    @staticmethod
    def _partition(topic: Topic, key: bytes | None, dedup_id: bytes) -> int:
        """The partition of the key; without one, any that can be used."""
        if key is not None:
            return topic.usable(partition_for(key, len(topic.partitions)))
        numbers = topic.usable_numbers() or [topic.usable(0)]
        return numbers[partition_for(dedup_id, len(numbers))]

    def _write(self, name: str, state: ScheduleState, *, bounded: bool = False) -> Appended | None:
        """Write the document. A note is written even if users' documents have left no room: it must not fail."""
        states = self._loaded()
        command = ReplaceDocument(SCHEDULE_PREFIX + name, _encode(state))
        decided = self._engine.locks().change(command, bounded=bounded)
        states[name] = state
        return decided.appended

    def _settle(self, appended: Appended | None) -> None:
        """Wait until a change is on disk: until then no caller may learn of it."""
        if appended is not None:
            self._engine.locks().journal.log.wait(appended)

    def _now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000

    def _mono_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000


def _id_at(topic: str, place: Place, number: int = 0) -> str:
    return message_id(topic, number if place.partition is None else place.partition, place.offset, place.delayed_id)


def _states_in(contents: Mapping[str, bytes]) -> dict[str, ScheduleState]:
    found = {}
    for name, content in contents.items():
        try:
            found[name] = _decode(content)
        except msgspec.MsgspecError as error:  # the others must still fire
            logger.error("a schedule cannot be read", extra={"schedule": name, "error": str(error)})
    return found


def schedules_for(locks: FolderLocks, topic: str) -> dict[str, bytes]:
    """Return the documents of the schedules that publish to a topic, by the names of the schedules."""
    contents = locks.schedules()
    return {name: contents[name] for name, state in _states_in(contents).items() if state.template.topic == topic}


def take_schedules(locks: FolderLocks, contents: Mapping[str, bytes]) -> None:
    """Write schedules as they were in another folder, durably."""
    for name, content in contents.items():
        _settled(locks, ReplaceDocument(SCHEDULE_PREFIX + name, content))


def drop_schedules(locks: FolderLocks, names: Iterable[str]) -> None:
    """Remove schedules that are in another folder now, durably."""
    for name in names:
        _settled(locks, Remove(SCHEDULE_PREFIX + name))


def _settled(locks: FolderLocks, command: ReplaceDocument | Remove) -> None:
    appended = locks.change(command, bounded=False).appended
    if appended is not None:
        locks.journal.log.wait(appended)


def stored_schedules(world: World, root: str) -> dict[str, ScheduleState]:
    """Return the schedules of a data folder by name, without owning it, while its owner may be running."""
    if not world.disk.exists(join(root, LOCKS)):
        return {}
    return _states_in(dict(sorted(replayed_locks(world, root).schedules.items())))
