"""The store of delayed messages: its public calls.

One lock guards the state. It is held for work in memory and for reading due messages, never while waiting for a
sync. Due times are wall-clock times: setting the clock forward releases messages early, setting it back delays them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import Final

import msgspec
from pyroaring import BitMap64

from holdfast.broker.delayed.intake import SOON_MS, DelayedIntake
from holdfast.broker.delayed.runs import NEVER_MS, DelayedRun, DelaySettings, Entry, load
from holdfast.broker.delayed.upkeep import DelayedState, DelayedUpkeep
from holdfast.broker.messages import Draft, DraftFields, batch_of
from holdfast.env import World
from holdfast.env.process import stand_back
from holdfast.errors import CorruptData, InvalidRequest
from holdfast.model import Appended, Batch, CodecName, Durability, Record
from holdfast.settings import LogSettings
from holdfast.storage.batches import PORTION_BYTES, portions
from holdfast.storage.files import join, open_error
from holdfast.storage.log import Log

_CHUNK: Final = 256  # messages that a listing reads at a time
_LOOK_EVERY: Final = 10_000  # messages that may arrive before `tick` checks whether to spill
_BLOCKS: Final = 64  # decoded blocks of runs that are kept while messages are released


class Delayed(msgspec.Struct, frozen=True, gc=False):
    """A message that waits; the record's offset is the delayed id."""

    id: int
    due_at_ms: int
    record: Record


class DelayStore:
    """Delayed messages in a folder, owned by this object until it is closed. Safe to use from any thread.

    The package's docstring explains how a message gets from here into its partition exactly once, even across crashes.
    """

    def __init__(self, world: World, folder: str, settings: DelaySettings, state: DelayedState) -> None:
        self.folder = folder
        self.settings = settings
        self._state = state
        self._now_ns = world.clock.now_ns
        self._log = state.intake.log
        self._upkeep = DelayedUpkeep(world, folder, settings, state)
        self._blocks: OrderedDict[tuple[DelayedRun, int], list[Record]] = OrderedDict()
        with state.lock:
            state.look_ahead()
        # Spills and manifests, which may take long: see `DelayedUpkeep`.
        self.spill = self._upkeep.spill
        self.save = self._upkeep.save
        self.tick = self._upkeep.tick

    @staticmethod
    def open(world: World, folder: str, settings: LogSettings, delays: DelaySettings | None = None) -> DelayStore:
        """Open the store in the folder and own it; it is created if there is none."""
        try:
            world.disk.make_folder(folder)
            intake = DelayedIntake.open(world, join(folder, "intake"), settings)  # its lock also locks the store
            try:
                loaded = load(world, folder, intake_is_new=intake.log.written_end == 0)
                return DelayStore(world, folder, delays or DelaySettings(), DelayedState(intake, loaded))
            except BaseException:
                intake.log.close()
                raise
        except OSError as error:
            raise open_error(folder, error) from error

    @property
    def accounted(self) -> int:
        """The manifest on disk has every release below this offset of the partition's log: pin the log here."""
        return self._state.saved_position

    @property
    def intake(self) -> Log:
        """The log that takes messages in, for callers that read it or pin it against trimming."""
        return self._log

    @property
    def damage(self) -> list[str]:
        """Descriptions of the damage found; empty if there is none."""
        state = self._state
        with state.lock:
            damaged = [f"{run.path}: {why}" for run in state.runs for why in run.damaged.values()]
            unreadable = len(state.intake.unreadable)
            lost = [f"{self._log.folder}: {unreadable} messages cannot be read"] if unreadable else []
            return [*state.damage, *damaged, *lost]

    @property
    def on_pause(self) -> Callable[[], object]:
        """Called repeatedly during a spill, which takes long, so that due messages can be released meanwhile."""
        return self._upkeep.on_pause

    @on_pause.setter
    def on_pause(self, call: Callable[[], object]) -> None:
        self._upkeep.on_pause = call

    @property
    def on_attention(self) -> Callable[[], None]:
        """Called when `tick` is needed sooner than it said: for a sync, a due message, or a spill."""
        return self._log.on_attention

    @on_attention.setter
    def on_attention(self, call: Callable[[], None]) -> None:
        self._log.on_attention = call

    def forget(self, ids: Iterable[int]) -> None:
        """At opening, drop ids that were found in the partition's synced log, so that they are not released again."""
        state = self._state
        with state.lock:
            state.gone |= state.known(BitMap64(list(ids)))
            state.changed = True

    def write(
        self,
        batch: Batch,
        *,
        durability: Durability | None = None,
        codec: CodecName | None = None,
        any_size: bool = False,
    ) -> Appended:
        """Append messages, all or none, without waiting. The offsets returned are their ids; `wait` comes next."""
        dues_ms = batch.due_at_ms
        if dues_ms is None or len(dues_ms) != len(batch.values):
            raise InvalidRequest("a delayed message needs a due time: give due_at_ms for each of the batch")
        whole = {*map(type, dues_ms)} <= {int}
        if not whole or (dues_ms and not 0 <= min(dues_ms) <= max(dues_ms) < NEVER_MS):
            raise InvalidRequest("a due time is a whole number of milliseconds since 1970, below 2**63")
        state = self._state
        with state.lock:  # otherwise a spill could see them in the log before the state knows them
            time_ns = self._now_ns()
            appended = self._log.write(batch, durability=durability, codec=codec, any_size=any_size, time_ns=time_ns)
            state.intake.present.add_range(appended.offset, appended.next_offset)
            state.intake.keep_new(batch, appended.offset, time_ns, state.timers.edge_ms)
            state.timers.add(dues_ms, appended.offset)
            first_ms = min(dues_ms, default=NEVER_MS)
            sooner = first_ms < state.not_before_ms
            state.not_before_ms = min(state.not_before_ms, first_ms)
        # Not on every write: the caller of `tick` already wakes for an earlier message, and looks ahead again then.
        if sooner or appended.offset // _LOOK_EVERY != appended.next_offset // _LOOK_EVERY:
            self.on_attention()
        return appended

    def write_one(self, fields: DraftFields, head: bytes, columns: int, chosen: Durability, time_ns: int = 0) -> int:
        """Fused form of `write` for one draft, with its `single_head`; returns its id, or -1 if only `write` can."""
        value, due_at_ms = fields[0], fields[5]
        state = self._state
        if state.lock.locked():
            stand_back(state.lock)
        with state.lock:
            time_ns = time_ns or self._now_ns()
            message_id = self._log.write_alone(value, chosen, head, columns, time_ns)
            if message_id < 0:
                return -1
            state.intake.present.add(message_id)
            if due_at_ms <= state.timers.edge_ms + SOON_MS:
                batch = msgspec.structs.replace(batch_of([Draft(*fields)]), due_at_ms=[due_at_ms])
                state.intake.keep_new(batch, message_id, time_ns, state.timers.edge_ms)
            state.timers.add_pairs(((due_at_ms, message_id),))
            sooner = due_at_ms < state.not_before_ms
            if sooner:
                state.not_before_ms = due_at_ms
        if sooner or not (message_id + 1) % _LOOK_EVERY:
            self.on_attention()
        return message_id

    def wait(self, appended: Appended) -> None:
        """Return once what was written is as durable as requested."""
        self._log.wait(appended)

    async def wait_async(self, appended: Appended) -> None:
        """Async version of `wait`."""
        await self._log.wait_async(appended)

    def due(self, now_ms: int, limit: int) -> list[Delayed]:
        """Return the first messages due by now, ordered by (due, id). Changes nothing: report back with `released`.

        Returns fewer messages than are due if they are large, since the caller writes them all at once.
        """
        state = self._state
        with state.lock:
            state.check_open()
            state.timers.advance(now_ms)
            state.timers.shed(state.done_here)
            found = self._due_here(now_ms, limit)
            while found is None:  # replace those that turn out to be damaged
                sources = [run.entries(state.gone, until_ms=now_ms) for run in state.runs_due(now_ms)]
                chosen = list(islice(merge(state.waiting_here(state.timers.near(now_ms)), *sources), limit))
                messages, whole = self._fetch(chosen, now_ms)
                found = messages if whole else None
            if len(found) < limit:
                self._blocks.clear()  # nothing else is due for now
            if not found:
                state.look_ahead()
            ids = BitMap64([message.id for message in found]) & state.intake.present
            unsynced = bool(ids) and ids.max() >= self._log.synced_end
        if sum([len(message.record.value) for message in found]) > PORTION_BYTES:
            found = list(next(portions(found, lambda message: len(message.record.value))))
        if unsynced:
            self._log.sync()
        return found

    def _due_here(self, now_ms: int, limit: int) -> list[Delayed] | None:
        """Fused form of the search in `due` for messages that all wait in the intake; None if some may not."""
        state = self._state
        if state.runs_due(now_ms):
            return None
        entries = state.timers.leading(now_ms, limit)
        ids = [message_id for _, message_id in entries]
        if ids and not state.all_wait_here(ids):
            return None
        records = state.intake.fetch_due(sorted(ids), now_ms, state.gone)
        if len(records) < len(ids):
            return None
        return [Delayed(message_id, due_at_ms, records[message_id]) for due_at_ms, message_id in entries]

    def released(self, ids: Sequence[int], position: int) -> None:
        """Mark these as written to the partition's log, below the offset `position`, not necessarily synced yet."""
        state = self._state
        with state.lock:
            known = state.known(BitMap64(list(ids))) - state.gone
            if known:
                state.gone |= known
                state.unsettled.append((position, known))
            state.timers.shed(state.done_here, ids)
            state.intake.forget(ids)
            state.look_ahead()
            state.intake.drop_before(state.not_before_ms)

    def settled(self, position: int) -> None:
        """The partition's log is synced below this offset. Report all releases below it with `released` first."""
        state = self._state
        with state.lock:
            kept = deque(each for each in state.unsettled if each[0] > position)
            state.changed = state.changed or len(kept) < len(state.unsettled)
            state.unsettled = kept
            state.settled_position = max(state.settled_position, position)

    def cancel(self, message_id: int) -> bool:
        """Cancel a message, durably; returns False if it is unknown, released or cancelled already."""
        appended = self.write_cancel(message_id)
        if appended is not None:
            self.wait(appended)
        return appended is not None

    def write_cancel(self, message_id: int) -> Appended | None:
        """Do the first half of `cancel`, which never waits; the cancellation is durable after `wait`."""
        state = self._state
        with state.lock:
            state.check_open()
            known = message_id >= 0 and message_id not in state.gone and bool(state.known(BitMap64([message_id])))
            if not known:
                return None
            appended = state.intake.write_cancelled(message_id)
            state.gone.add(message_id)
            state.timers.shed(state.done_here)
            state.intake.forget([message_id])
            state.look_ahead()
            state.changed = True
            return appended

    def get(self, message_id: int) -> Delayed | None:
        """Return the message if it waits and can be read, otherwise None."""
        state = self._state
        with state.lock:
            state.check_open()
            entry: Entry | None = None
            run = next((run for run in state.runs if message_id >= 0 and message_id in run.ids), None)
            if run is not None and message_id not in state.gone:
                entry = run.find(message_id)
            elif run is None:
                entry = next(state.waiting_here([(0, message_id)] if message_id >= 0 else []), None)
            found, _ = self._fetch([entry] if entry is not None else [])
            return found[0] if found else None

    def waiting(self, *, after: tuple[int, int] | None = None, limit: int | None = None) -> Iterator[Delayed]:
        """Yield the waiting messages by (due, id), after a place; read from the files as the caller iterates.

        Messages released or cancelled meanwhile are left out; messages that arrive meanwhile may be.
        """
        state = self._state
        with state.lock:
            state.check_open()
            here = state.timers.ordered(after)
        at, left = 0, limit
        while left is None or left > 0:
            size = _CHUNK if left is None else min(_CHUNK, left)
            with state.lock:
                state.check_open()
                while at < len(here) and after is not None and here[at] <= after:
                    at += 1
                sources = [run.entries(state.gone, after=after) for run in state.runs]
                chosen = list(islice(merge(state.waiting_here(islice(here, at, None)), *sources), size))
                found, _ = self._fetch(chosen)
            if not chosen:
                return
            after = chosen[-1][:2]
            left = None if left is None else left - len(found)
            yield from found

    def next_due_ms(self) -> int | None:
        """Return when the first waiting message is due; None if none waits."""
        with self._state.lock:
            return self._state.look_ahead()

    def late_ms(self, now_ms: int) -> int:
        """Return about how late the first waiting message is. Takes no lock and is cheap."""
        return now_ms - self._state.not_before_ms

    def __len__(self) -> int:
        """Number of waiting messages."""
        with self._state.lock:
            return self._state.live()

    def __bool__(self) -> bool:
        return True  # an empty store must not be falsy

    def close(self) -> None:
        """Save, sync, and release the folder. Closing twice is fine."""
        self._upkeep.close()

    def __enter__(self) -> DelayStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def check(self) -> None:
        """Assert the invariants."""
        with self._state.lock:
            self._state.check()

    def _fetch(self, entries: Sequence[Entry], now_ms: int | None = None) -> tuple[list[Delayed], bool]:
        """Read the messages at these places, and say whether all were readable. `now_ms` is given if they are due."""
        ids = sorted([message_id for _, message_id, run, _, _ in entries if run is None])
        state = self._state
        here = state.intake.fetch(ids) if now_ms is None else state.intake.fetch_due(ids, now_ms, state.gone)
        found = []
        for _, message_id, run, block, i in entries:
            if run is None:
                record = here.get(message_id)
            else:
                records = self._blocks.get((run, block)) or self._block(run, block)
                record = records[i] if records else None
            if record is not None:
                found.append(Delayed(message_id, record.due_at_ms, record))
        return found, len(found) == len(entries)

    def _block(self, run: DelayedRun, block: int) -> list[Record]:
        """Return the messages of a block, cached for a while; none if it cannot be read."""
        try:
            records = self._blocks[run, block] = run.records(block)
        except CorruptData:
            return []
        if len(self._blocks) > _BLOCKS:
            self._blocks.popitem(last=False)
        return records
