"""Background work of an engine: idle and closed topics, key compaction, tiering, disk space."""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Final

from holdfast.broker.folder.layout import (
    DEAD_SUFFIX,
    RESERVE,
    RESERVE_BYTES,
    TIER,
    TOPICS,
    check_readable_name,
    is_store,
    names_in,
)
from holdfast.broker.journal import BEFORE, SNAPSHOT, SnapshotFiles
from holdfast.broker.partition import Partition
from holdfast.broker.past import is_past
from holdfast.broker.samples import SAMPLES
from holdfast.broker.topic import Topic
from holdfast.env.process import get_logger
from holdfast.errors import BadSettings, Closed, HoldfastError
from holdfast.storage.files import LOCK, QUARANTINE, durable_replace, index_bases, join, read_file
from holdfast.storage.retention import to_tier

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine
    from holdfast.env.chain.disk import ChainDisk
    from holdfast.env.tier import Stub, TieredDisk
    from holdfast.settings import QueueSettings
    from holdfast.storage.log import Log
    from holdfast.storage.retention import SegmentFacts
    from holdfast.storage.segment import Segment


logger = get_logger(__name__)

_AFTER_ERROR_NS: Final = 10_000_000_000


class Sweep:
    """Applies retention to closed topics, one at a time, spread over `retention_check_ms`."""

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = engine
        self.folder = engine.folder
        self.on_attention: Callable[[], None] = lambda: None
        self.before_close: Callable[[], None] = lambda: None
        self._closing_idle = threading.Lock()
        self._round: list[str] = []
        self._every_ns = 0
        self._due_ns = engine.world.clock.monotonic_ns() + engine.settings.topic.retention_check_ms * 1_000_000

    def tick(self) -> int | None:
        """Visit the next topic if it is time; returns in how many ms to call again."""
        self._engine.check_open()
        now_ns = self._engine.world.clock.monotonic_ns()
        if now_ns >= self._due_ns:
            if not self._round:
                self._begin()
            if self._round:
                self._visit(self._round.pop())
            self._due_ns = now_ns + self._every_ns
        return max(self._due_ns - now_ns, 0) // 1_000_000

    def close_idle(self, but: Topic | None) -> None:
        """Close the least recently used topics if too many are open, except `but`."""
        engine, most = self._engine, self._engine.settings.open_partitions
        if self._open_partitions() <= most or not self._closing_idle.acquire(blocking=False):
            return  # another thread is doing it, and checks the limit again after each topic
        try:
            for topic in sorted(engine.open_topics(), key=lambda topic: topic.used_ns):
                if self._open_partitions() <= most:
                    return
                if topic is not but:
                    engine.close_if_idle(topic)
        finally:
            self._closing_idle.release()

    def _open_partitions(self) -> int:
        return sum([len(topic.partitions) for topic in self._engine.open_topics()])

    def _begin(self) -> None:
        engine = self._engine
        try:
            for name in engine.catalog.leftovers():
                with suppress(HoldfastError), engine.alone(name):  # the next round tries again
                    engine.catalog.tidy(name)
            self._round = [name for name in engine.catalog.names() if not engine.is_open(name)]
        except OSError as error:  # open topics must still get their ticks
            logger.warning("topics could not be listed", extra={"folder": engine.folder, "error": str(error)})
            self._every_ns = _AFTER_ERROR_NS
            return
        whole_ns = engine.settings.topic.retention_check_ms * 1_000_000
        self._every_ns = whole_ns // max(len(self._round), 1)

    def _visit(self, name: str) -> None:
        engine = self._engine
        if engine.is_open(name):
            return
        try:
            with engine.using(name) as topic:
                topic.tick()
                topic.retain()
                engine.tiering.visit(topic)
                engine.space.tick(everything=True)
            engine.close_idle()
        except HoldfastError as error:  # deleted meanwhile, or damaged: then its users get the error
            if engine.closed:
                return
            logger.warning("a closed topic could not be checked", extra={"topic": name, "error": str(error)})


# Key compaction, on its own thread: it reads a lot, and leases must not wait for it.


_LOOK_AGAIN_MS: Final = 60_000


class Rounds:
    """Goes round the open topics on a thread of its own. One that fails does not keep the others from their turn."""

    failure = ""

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = engine
        self.folder = engine.folder
        self.on_attention: Callable[[], None] = lambda: None
        self.before_close: Callable[[], None] = lambda: None

    def tick(self) -> int | None:
        """Visit every open topic; returns in how many ms to call again."""
        self._engine.check_open()
        for topic in self._engine.open_topics():
            try:
                self.visit(topic)
            except (HoldfastError, OSError) as error:
                if self._engine.closed:
                    raise Closed(str(error)) from error
                if topic.closed:
                    continue  # closed meanwhile, which explains the error
                logger.warning(self.failure, extra={"topic": topic.name, "error": str(error)})
        return _LOOK_AGAIN_MS

    def visit(self, topic: Topic) -> None:
        """Do what is due in a topic."""
        raise NotImplementedError

    def _now_ms(self) -> int:
        return self._engine.world.clock.now_ns() // 1_000_000


class Cleaner(Rounds):
    """Compacts open topics with `cleanup` other than "delete", after segments were sealed or tombstones expired."""

    failure = "key compaction failed"

    def __init__(self, engine: BrokerEngine) -> None:
        super().__init__(engine)
        self._done: dict[str, tuple[int, int]] = {}  # topic -> (`_sealed` at its last compaction, time of it)

    def visit(self, topic: Topic) -> None:
        if topic.settings.cleanup != "delete" and self._is_due(topic):
            self._compact(topic)

    def _is_due(self, topic: Topic) -> bool:
        sealed, at_ms = self._done.get(topic.name, (-1, 0))
        return _sealed(topic) != sealed or self._now_ms() - at_ms > max(topic.settings.tombstone_ms, _LOOK_AGAIN_MS)

    def _compact(self, topic: Topic) -> None:
        self._done[topic.name] = _sealed(topic), self._now_ms()
        with self._engine.using(topic.name) as held:
            if held is topic:
                topic.compact_keys()


def _sealed(topic: Topic) -> int:
    """A number that changes whenever a segment of any partition is sealed."""
    return sum(segments[-1].base_offset for p in topic.partitions if (segments := p.log.segments()))


# Tiering: sealed segments leave the disk for a store, by the settings of their topic, and are fetched when they are
# read (`env/tier`). Objects go when no stub names them any more. That is found out by listing both, objects first, so
# that it does not matter where a crash came in between. Their keys begin with an id that was drawn for this folder, and
# is not part of a backup: another folder that uses the same store never takes these objects for its own.


_TIER_ID: Final = "id"
_LIST_UNUSED_NS: Final = 3600 * 1_000_000_000


class Tiering(Rounds):
    """Moves segments out, and removes objects that are not needed any more. Only the folder's owner does."""

    failure = "segments could not be moved to the store: they stay on the disk, and are tried again"

    def __init__(self, engine: BrokerEngine) -> None:
        super().__init__(engine)
        self._place = engine.settings.tier
        self._chain: ChainDisk | None = None
        if self._place is not None and (not is_store(self._place) or self._place.startswith("memory:")):
            raise BadSettings(
                f"tier={self._place.partition('?')[0]!r} cannot be used: give the URL of a store that lasts, such as "
                "s3://bucket/name"
            )
        self._cache = join(engine.folder, TIER)
        self._moving = threading.Lock()
        self._id = ""
        self._started = self._cache_limited = False
        self._places: set[str] = set() if self._place is None else {self._place}
        self._listed = (-1, 0)  # how many stubs had gone when unused objects were last removed, and when that was
        self.moved_bytes = 0

    def use_chain(self, url: str, disk: ChainDisk) -> None:
        """Take what checkpoints have stored for the tier: the folder lives in a store itself."""
        self._place, self._chain = url, disk
        self._cache = join(posixpath.dirname(self._engine.folder), TIER)

    def end(self) -> None:
        """Stop the thread, and close the connections."""
        self.before_close()
        if self._engine.world.tier is not None:
            self._engine.world.tier.let_go()

    def is_wanted(self, topic: Topic) -> bool:
        """Whether the topic is the first that needs the thread. Called with the engine's lock held."""
        wanted = not self._started and (topic.settings.is_tiered or self._engine.settings.tier is not None)
        self._started = self._started or wanted
        return wanted

    def check(self, settings: QueueSettings) -> None:
        """Raise BadSettings if segments are to leave and there is no place for them."""
        if settings.is_tiered and self._place is None:
            raise BadSettings(
                "tier_after_ms and tier_after_bytes need a store for the segments: set tier in [broker] of the "
                "settings file, or HOLDFAST_BROKER_TIER, for example to s3://bucket/name"
            )

    def tick(self) -> int | None:
        """Move what is due, and remove unused objects; returns in how many ms to call again."""
        super().tick()
        try:
            self.remove_unused()
        except (HoldfastError, OSError) as error:
            logger.warning("unused objects stay in the store", extra={"folder": self.folder, "error": str(error)})
        return min(_LOOK_AGAIN_MS, self._engine.settings.topic.retention_check_ms)

    def visit(self, topic: Topic) -> None:
        """Move the segments of a topic that are beyond its limits."""
        tier, settings = self._engine.world.tier, topic.settings
        if tier is None or self._place is None or not settings.is_tiered:
            return
        with self._moving, self._engine.using(topic.name) as held:
            if held is not topic:
                return
            for number, partition in enumerate(topic.partitions):
                log = partition.log
                for facts in to_tier(log.segments(), settings, now_ns=self._engine.world.clock.now_ns()):
                    if self._engine.closed or topic.closed:
                        return
                    self._move(tier, log, facts, f"{topic.name}-{number}")

    def _move(self, tier: TieredDisk, log: Log, facts: SegmentFacts, name: str) -> None:
        segment = log.sealed(facts.base_offset)
        key = None if segment is None else self._key(segment, name)
        if segment is None or key is None or facts.next_offset > log.synced_end:
            return
        rewrites, place = segment.rewrites, str(self._place)
        self._limit_cache(tier)
        tier.store(segment.path, place=place, key=key, cache=self._cache, is_there=self._chain is not None)
        if not log.keeping(segment, rewrites, tier.put_stub):
            tier.forget_stub(segment.path)
            return
        tier.sync_folder(log.folder)
        if log.keeping(segment, rewrites, tier.drop):
            self.moved_bytes += facts.bytes
            logger.info("segment moved to the store", extra={"segment": segment.path, "bytes": facts.bytes})

    def _key(self, segment: Segment, name: str) -> str | None:
        """Return the key of a segment's object; None if it cannot be moved yet: no checkpoint has it."""
        if self._chain is None:
            return f"{TIER}/{self._folder_id()}-{name}-{segment.base_offset:020}-{self._random()}"
        digest = self._chain.files.digests.get(segment.path.removeprefix(f"{self._engine.folder}/"))
        return None if digest is None or " " in digest else f"content/{digest}"

    def _limit_cache(self, tier: TieredDisk) -> None:
        if not self._cache_limited:
            tier.limit_cache(self._cache, self._engine.settings.tier_cache_bytes)
            self._cache_limited = True

    def _folder_id(self) -> str:
        if not self._id:
            disk = self._engine.world.disk
            known = read_file(disk, join(self._cache, _TIER_ID))
            if known is None:
                disk.make_folder(self._cache)
                known = self._random().encode()
                durable_replace(disk, self._cache, _TIER_ID, known)
            self._id = known.decode()
        return self._id

    def _random(self) -> str:
        return self._engine.world.ids.random_bytes(8).hex()

    def remove_unused(self) -> int:
        """Remove objects of this folder that no stub names; returns how many. Raises OSError if that cannot be told."""
        world = self._engine.world
        tier, now_ns = world.tier, world.clock.monotonic_ns()
        removed, at_ns = self._listed
        if tier is None or self._chain is not None or not world.disk.exists(join(self._cache, _TIER_ID)):
            return 0
        if removed == tier.removed and now_ns - at_ns < _LIST_UNUSED_NS:
            return 0
        with self._moving:
            removed, prefix = tier.removed, f"{TIER}/{self._folder_id()}-"
            found = {place: tier.objects(place, prefix) for place in self._places}
            used = set()
            for stub in self._stubs(tier):
                used.add((stub.place, stub.key))
                self._places.add(stub.place)
            unused = [(place, key) for place, keys in found.items() for key in keys if (place, key) not in used]
            for place, key in unused:
                tier.remove_object(place, key)
        self._listed = removed, now_ns
        return len(unused)

    def _stubs(self, tier: TieredDisk) -> Iterator[Stub]:
        for topic in names_in(self._engine.world, join(self.folder, TOPICS)):
            parts = join(join(self.folder, TOPICS), topic)
            for number in tier.names(parts) if tier.is_folder(parts) else ():
                folder = f"{parts}/{number}/log"
                if number.isdecimal() and tier.is_folder(folder):
                    yield from tier.stubs(folder).values()


# Disk space: when the disk runs out, done messages are removed before a new message is refused.
#
# Done messages are kept only for replay, so they can be spared first. A write that finds too little space calls `make`
# while holding any lock except that of its own log. So `make` takes no locks except those of logs, and relies on floors
# that are known to be on disk. If that is not enough, the next tick brings the floors up to date, and a write that was
# refused may succeed a moment later. The oldest segments of all open topics go first, and no more than needed. Closed
# topics follow when the sweep visits them.
#
# Another program may fill the disk to the last byte while no message is done. Then acks must still work, because they
# are what frees space, and so must opening the folder, which writes a little as well. For these the folder keeps a
# reserve file. It is shortened when they need space, never for a new message, and filled up again later.
#
# There may be no reserve, or it may be used up. Then the folder gives up what it can do without, in this order:
#
#     tails      blocks that logs have reserved for messages to come
#     indexes    of segments; they are made anew
#     notes      in lock files, about who holds the lock
#     samples    for charts; they start over
#     past       events of journals that were trimmed: the history of settled messages
#     before     snapshots that are kept in case the newest is damaged, if it is whole
#
# What that frees goes into the reserve, because other programs would take it otherwise. With a few blocks, all messages
# can be acked, since a journal that cannot grow is folded into a snapshot (`StateJournal`).


_BLOCK_BYTES: Final = 4 * 1024


class Space:
    """Frees disk space of a data folder. Thread-safe."""

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = engine
        self._wanted_bytes = 0  # free space that a caller wanted and did not get
        self._asked = False  # whether a caller was refused since the last tick
        self._told = False  # whether it was logged that the reserve is used, since it was last whole

    def make(self, wanted_bytes: int, *, urgent_bytes: int = 0) -> bool:
        """Remove done messages until `wanted_bytes` are free or none are left; returns whether any space was freed.

        If there is nothing to remove, `urgent_bytes` come from the reserve, or from what the folder can do without.
        """
        if self._make(wanted_bytes):
            self._fill()  # first, or other programs take it
            self._release(urgent_bytes)
            return True
        return urgent_bytes > 0 and (self._release(urgent_bytes) or self._give_up(urgent_bytes))

    def _make(self, wanted_bytes: int) -> bool:
        if self._asked:
            return False  # nothing has changed since the last refusal
        try:
            freed = self._free(wanted_bytes)
            short = self._is_short(wanted_bytes)
        except OSError:  # the caller should report the lack of space, not this
            return False
        if short:
            self._wanted_bytes, self._asked = wanted_bytes, True
            self._engine.on_attention()
        return freed > 0

    def keep_reserve(self) -> None:
        """Fill up the reserve if at least as much space again stays free."""
        with suppress(OSError):  # the next tick tries again
            if not self._is_short(2 * RESERVE_BYTES):
                self._fill()

    def put_aside(self) -> int:
        """Fill up the reserve with whatever is free, since something was freed on a full disk; returns its size."""
        self._asked = False
        return self._fill()

    def _fill(self) -> int:
        """Fill up the reserve as far as there is room; returns its size.

        Tried out, because free space may be reserved for root, and then counts as taken even if this process is root's.
        """
        disk, path, size = self._engine.world.disk, self._reserve, 0
        with suppress(OSError):  # the next tick tries again
            if not disk.exists(join(self._engine.folder, TOPICS)):
                return 0  # a folder with only a reserve in it would not be recognized as a data folder
            with closing(disk.open(path, write=True, create=True)) as file:
                size = file.size()
                step = RESERVE_BYTES - size
                while step >= _BLOCK_BYTES:
                    try:
                        file.reserve(size + step)
                    except OSError:
                        file.truncate(size)
                        step = step // 2 // _BLOCK_BYTES * _BLOCK_BYTES
                        continue
                    file.sync()
                    size += step
                    step = min(step, RESERVE_BYTES - size)
            self._told = self._told and size < RESERVE_BYTES
        return size

    def _release(self, urgent_bytes: int) -> bool:
        """Free this much of the reserve and no more, because other programs may take what is free."""
        try:
            with closing(self._engine.world.disk.open(self._reserve, write=True)) as file:
                size = file.size()
                left = max(0, size - -(-urgent_bytes // _BLOCK_BYTES) * _BLOCK_BYTES)
                if left == size:
                    return False
                file.truncate(left)
        except OSError:
            return False  # there is no reserve
        if not self._told:
            self._told = True
            logger.warning("the disk is full: using its reserve", extra={"folder": self._engine.folder, "left": left})
        return True

    def _give_up(self, urgent_bytes: int) -> bool:
        """Free this much by giving up what the folder can do without; returns whether anything was freed."""
        sources = (self._give_tails(), self._remove(self._indexes()), self._clear_notes(), self._remove(self._others()))
        given = 0
        with suppress(OSError):
            for size in chain(*sources):
                given += size
                if given >= urgent_bytes:
                    break
        if given:
            facts = {"folder": self._engine.folder, "bytes": given}
            logger.warning("the disk is full: removing files that can be rebuilt", extra=facts)
            self._fill()
            self._release(urgent_bytes)
        return given > 0

    def _give_tails(self) -> Iterator[int]:
        for log in self._logs():
            with suppress(HoldfastError, OSError):  # closed meanwhile
                yield log.give_tail()

    def _remove(self, paths: Iterable[str]) -> Iterator[int]:
        disk = self._engine.world.disk
        for path in paths:
            with suppress(OSError):
                with closing(disk.open(path)) as file:
                    size = file.size()
                disk.remove(path)
                yield size

    def _clear_notes(self) -> Iterator[int]:
        """Empty the lock files; the locks themselves stay held."""
        for path in self._files():
            if path.endswith(f"/{LOCK}"):
                with suppress(OSError), closing(self._engine.world.disk.open(path, write=True)) as file:
                    size = file.size()
                    file.truncate(0)
                    yield size

    def _indexes(self) -> Iterator[str]:
        return (path for path in self._files() if index_bases([path.rpartition("/")[2]]))

    def _others(self) -> Iterator[str]:
        """Samples, past events, and the snapshots before those that are whole."""
        yield join(self._engine.folder, SAMPLES)
        yield from (path for path in self._files() if is_past(path.rpartition("/")[2]))
        for path in self._files():
            folder, _, name = path.rpartition("/")
            if name == BEFORE and SnapshotFiles(self._engine.world, folder).newest(bytes)[1] == SNAPSHOT:
                yield path

    def _files(self, folder: str | None = None) -> Iterator[str]:
        """All files of the data folder, except those in quarantine."""
        disk, folder = self._engine.world.disk, folder or self._engine.folder
        for name in disk.names(folder):
            path = join(folder, name)
            if not disk.is_folder(path):
                yield path
            elif name != QUARANTINE:
                yield from self._files(path)

    @property
    def _reserve(self) -> str:
        return join(self._engine.folder, RESERVE)

    def tick(self, *, everything: bool) -> None:
        """Retry what `make` could not free, with the current floors of all groups."""
        if everything:
            self.keep_reserve()
        if not self._wanted_bytes or not (self._asked or everything):
            return
        self._asked = False
        if self._is_short(self._wanted_bytes):
            for topic in self._engine.open_topics():
                with suppress(HoldfastError, OSError):  # then less can be removed
                    topic.bring_pins()
            if self._free(self._wanted_bytes):
                self._fill()
        if not self._is_short(self._wanted_bytes):
            self._wanted_bytes = 0

    def _is_short(self, wanted_bytes: int) -> bool:
        return self._engine.world.disk.free_bytes(self._engine.folder) < wanted_bytes

    def _free(self, wanted_bytes: int) -> int:
        freed = self._drop(self._logs(), wanted_bytes)
        for log in self._logs():
            if log.all_done and self._is_short(wanted_bytes):
                with suppress(HoldfastError, OSError):  # there may be no space for a new segment
                    log.roll()
                    freed += self._drop([log], wanted_bytes)
        if freed:
            logger.warning(
                "handled messages removed: the disk is full", extra={"folder": self._engine.folder, "bytes": freed}
            )
        return freed

    def _drop(self, logs: Iterable[Log], wanted_bytes: int) -> int:
        found: list[tuple[SegmentFacts, Log]] = []
        for log in logs:
            with suppress(HoldfastError, OSError):  # closed meanwhile
                found += [(segment, log) for segment in log.done_segments()]
        freed = 0
        for segment, log in sorted(found, key=lambda each: each[0].max_time_ns):
            if not self._is_short(wanted_bytes):
                break
            with suppress(HoldfastError, OSError):  # try the others
                freed += log.drop_done(segment).bytes
        return freed

    def _logs(self) -> list[Log]:
        return [log for topic in self._engine.open_topics() for log in topic.logs()]


# Topics in use: a lock for each name, so that opening one does not block the others, and holds that keep one open.


# Opened under such a lock as well, without being topics; no topic can have these names.
PRODUCERS: Final = ".producers"
LOCKS: Final = ".locks"


class _NameLock:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0


class TopicLocks:
    """One lock per name, which exists only while a thread holds it or waits for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._locks: dict[str, _NameLock] = {}
        self._threads: dict[int, int] = {}  # how many locks each thread holds or waits for

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Hold the lock of a name. Reentrant."""
        entry = self._enter(name)
        try:
            with entry.lock:
                yield
        finally:
            self._leave(name, entry)

    @contextmanager
    def if_free(self, name: str) -> Iterator[bool]:
        """Hold the lock of a name if no other thread does; yields whether it is held."""
        entry = self._enter(name)
        try:
            ours = entry.lock.acquire(blocking=False)
            try:
                yield ours
            finally:
                if ours:
                    entry.lock.release()
        finally:
            self._leave(name, entry)

    def wait_until_free(self) -> None:
        """Wait until no other thread holds one of the locks or waits for one."""
        own = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._threads.keys() - {own})

    def _enter(self, name: str) -> _NameLock:
        thread = threading.get_ident()
        with self._changed:
            entry = self._locks.get(name)
            if entry is None:
                entry = self._locks[name] = _NameLock()
            entry.users += 1
            self._threads[thread] = self._threads.get(thread, 0) + 1
        return entry

    def _leave(self, name: str, entry: _NameLock) -> None:
        thread = threading.get_ident()
        with self._changed:
            entry.users -= 1
            if not entry.users:
                del self._locks[name]
            self._threads[thread] -= 1
            if not self._threads[thread]:
                del self._threads[thread]
                self._changed.notify_all()


class Using:
    """Keeps a topic open during a block. Not a generator, because it is used for every call."""

    __slots__ = ("__weakref__", "_enter_open", "_hold", "_name", "_topic")

    def __init__(
        self, enter_open: Callable[[str], Topic | None], hold: Callable[[str, object], Topic], name: str
    ) -> None:
        self._enter_open = enter_open
        self._hold = hold
        self._name = name
        self._topic: Topic | None = None

    def __enter__(self) -> Topic:
        topic = self._topic = self._enter_open(self._name)
        if topic is None:
            topic = self._hold(self._name, self)
            topic.users += 1
            self._topic = topic
        return topic

    def __exit__(self, *exc: object) -> None:
        topic, self._topic = self._topic, None
        if topic is not None:
            topic.users -= 1

    __del__ = __exit__  # a signal handler may raise before the exit has begun


class ReadableTopic:
    """A topic, or the dead letters of one, as something to read."""

    def __init__(self, topic: Topic, *, dead: bool) -> None:
        self.topic = topic
        self.dead = dead

    def partition(self, number: object) -> Partition:
        """Return a partition; one of dead letters is created on first use. Raises UnknownTopic or CorruptData."""
        if self.dead:
            return self.topic.dead_partition(self.topic.number(number)).target
        return self.topic.partition(number)

    def partitions(self) -> list[Partition]:
        """All partitions."""
        return [self.partition(number) for number in range(len(self.topic.partitions))]


@contextmanager
def reading(using: Callable[[str], Using], name: str) -> Iterator[ReadableTopic]:
    """Open a topic for reading, or the dead letters of one (`jobs.dlq`), and keep it open."""
    dead = check_readable_name(name).endswith(DEAD_SUFFIX)
    with using(name.removesuffix(DEAD_SUFFIX)) as topic:
        yield ReadableTopic(topic, dead=dead)
