"""The owner of a data folder: its topics, each opened on first use and closed when idle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from os import PathLike
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.broker.body_checks import BodyChecks, check_not_kept
from holdfast.broker.changes import change_topic, grow_topic
from holdfast.broker.folder.contents import PRODUCERS as PRODUCERS_FILE
from holdfast.broker.folder.contents import (
    Catalog,
    TopicFacts,
    keep_settings,
    lacking_root,
    missing_root_parts,
    renew_root,
    root_has,
    settings_for,
    strike_off_root,
)
from holdfast.broker.folder.layout import (
    GROUPS,
    TOPICS,
    check_folder,
    check_topic_name,
    folder_path,
    is_store,
    opening_error,
    store_of,
    topic_folder,
    topic_for,
)
from holdfast.broker.folder.layout import LOCKS as LOCKS_FOLDER
from holdfast.broker.leases import FolderKey
from holdfast.broker.metrics import Observer
from holdfast.broker.producers import Producers
from holdfast.broker.sampler import QueueSampler
from holdfast.broker.streams.group import StreamGroups
from holdfast.broker.streams.queries import Queries
from holdfast.broker.topic import Topic
from holdfast.broker.tracing import TraceStep
from holdfast.broker.tracing.log import found_by
from holdfast.broker.tracing.observer import Traces, traced_as
from holdfast.broker.upkeep import LOCKS, PRODUCERS, Cleaner, Space, Sweep, Tiering, TopicLocks, Using
from holdfast.broker.workers import WorkerRegistry
from holdfast.env import OpenFiles, World, close_in_children, real_world
from holdfast.env.process import descriptor_limit, get_logger
from holdfast.env.world import still_world
from holdfast.errors import BadSettings, Closed, HoldfastError, InvalidRequest, NotAQueue, UnknownTopic
from holdfast.settings import BrokerSettings, QueueSettings
from holdfast.storage.files import join, require_own, take_lock
from holdfast.storage.keeper import Keeper, soonest

if TYPE_CHECKING:
    from holdfast.broker.locks import FolderLocks
    from holdfast.broker.moving import TopicMoves
    from holdfast.broker.schedules import FolderSchedules
    from holdfast.broker.transactions import FolderTransactions
    from holdfast.env.chain.chain import Chain
    from holdfast.env.chain.ownership import Turn

logger = get_logger(__name__)

_SHARE_IT: Final = "Close it there and try again; within one process, share the object: it is thread-safe"
_LOOK_AT_ALL_NS: Final = 60_000_000_000  # tick every topic this often, in case the wall clock was set


class BrokerEngine:
    """The owner of a data folder. Thread-safe."""

    # What replaces an API object of this folder in a forked child, and with which client; None if not shared.
    stand_in: Callable[[Any], Any] | None = None
    client_in_child: Any = None
    store: Chain | None = None  # what the folder lives in, if it does not live here
    moves: TopicMoves | None = None  # the topics that are leaving or coming, if there are other folders
    _schedules: FolderSchedules | None = None
    _transactions: FolderTransactions | None = None

    def __init__(self, world: World, folder: str, settings: BrokerSettings, observer: Observer | None = None) -> None:
        self.space = space = Space(self)
        # The rest of the process needs descriptors, too, and running out of them refuses calls.
        files = OpenFiles(min(settings.open_files, descriptor_limit() * 3 // 5))
        self.world = world = still_world(world, open_files=files, make_space=space.make, put_aside=space.put_aside)
        world.open_files.on_too_many = self._attention
        self.folder, self.settings, self.body_checks = folder, settings, BodyChecks(self)
        self.tiering = Tiering(self)
        self.closed = self._forked = self.closed_before_fork = False
        self._observer = observer
        self.on_attention: Callable[[], None] = lambda: None
        self.before_close: Callable[[], None] = lambda: None
        self.on_close: Callable[[], None] = lambda: None  # called first, while everything still works
        self.after_close: Callable[[], None] = lambda: None  # called last, when nothing is open any more
        self.on_topic: list[Callable[[Topic], None]] = []  # called for each topic that was opened or changed
        note = world.ids.process_note()
        self.holder = f"{settings.id or note['host']}:{note['pid']}"
        self.workers = WorkerRegistry(world.clock)
        self._lock = threading.RLock()  # guards the map of topics, held briefly; slow work is under `_locks_of`
        self._locks_of = TopicLocks()
        self._listing = threading.Lock()
        self._listed = False  # whether the folder has a list of its parts
        self._topics: dict[str, Topic] = {}
        self._kept = False
        self._cleaner: Cleaner | None = None
        self._producers: Producers | None = None
        self._locks: FolderLocks | None = None
        self._all_at_ns = 0
        self._began_ns = world.clock.monotonic_ns()
        self.catalog = Catalog(world, folder)
        self.queries = Queries(world, folder)
        self.key = FolderKey(world, folder)
        close_in_children(self)
        self._closing = ExitStack()
        self._closing.callback(take_lock(world, folder, _SHARE_IT).release)
        self.traces = Traces(world, folder, settings.trace_retention_ms)
        self.traces.log.on_attention = self._attention
        self._closing.callback(self.traces.log.close)  # after the topics, which still write their last steps
        try:
            self.space.keep_reserve()
            self.catalog.tidy()
            self._missing = frozenset(missing_root_parts(world, folder))
            if world.disk.exists(join(folder, TOPICS)):
                self.list_parts()
            self._sweep, self.sampler = Sweep(self), QueueSampler(self)
            self.streams = StreamGroups(self)
            self._closing.callback(self.streams.close)
        except BaseException:
            self.closed = True
            self._closing.close()
            raise

    @staticmethod
    def open(
        folder: str | PathLike[str], *, create: bool = True, settings: BrokerSettings | None = None,
        observer: Observer | None = None, world: World | None = None, turn: Turn | None = None,
    ) -> BrokerEngine:  # fmt: skip
        """Become the owner of the data folder, which is created if needed (unless create=False).

        Raises NotAQueue if the folder is something else, and Busy if another process owns it; a `turn` waits longer.
        """
        folder = folder_path(folder)
        world = world or real_world()
        if settings is not None and not isinstance(settings, BrokerSettings):
            raise BadSettings(f"settings must be BrokerSettings, not {type(settings).__name__}")
        settings = settings or BrokerSettings()
        try:
            copied = None if is_store(folder) else store_of(world, folder)
        except OSError as error:
            raise opening_error(folder, error) from error
        if copied is not None or is_store(folder):
            url, copy = (copied or folder), (folder if copied else None)
            return BrokerEngine._open_stored(url, copy, settings, observer, world, turn, create=create)
        return BrokerEngine._open_here(folder, settings, observer, world, create=create)

    @staticmethod
    def _open_here(
        folder: str, settings: BrokerSettings, observer: Observer | None, world: World, *, create: bool
    ) -> BrokerEngine:
        try:
            check_folder(world, folder, create=create)
            world.disk.make_folder(folder)
            require_own(world, folder, trusted=settings.trust_folder)
            return BrokerEngine(world, folder, settings, observer)
        except OSError as error:
            raise opening_error(folder, error) from error

    @staticmethod
    def _open_stored(
        url: str, copy: str | None, settings: BrokerSettings, observer: Observer | None, world: World,
        turn: Turn | None, *, create: bool,
    ) -> BrokerEngine:  # fmt: skip
        from holdfast.broker.folder.stored import own_stored
        from holdfast.broker.streams.stored_queries import StoredQueries

        folder, stored, owner, give_up = own_stored(url, settings, world, copy, turn)
        try:
            owner.keep()
            engine = BrokerEngine._open_here(folder, settings, observer, stored, create=create)
        except BaseException:
            give_up()
            raise
        engine.after_close, engine.store = give_up, owner.chain
        engine.queries.stored = StoredQueries(owner.chain, world.clock)
        engine.tiering.use_chain(url, owner.disk)
        return engine

    def list_parts(self) -> None:
        """Record which parts the folder has besides topics, so that a lost one is noticed. A failure is only logged."""
        with self._listing:
            with self._translated(""):
                # First, because `open` recognizes a data folder by its topics.
                self.world.disk.make_folder(join(self.folder, TOPICS))
            try:
                renew_root(self.world, self.folder)
                self._listed = True
            except OSError as error:
                logger.warning("parts not listed", extra={"folder": self.folder, "error": str(error)})

    @contextmanager
    def parting(self, part: str) -> Iterator[None]:
        """Take a part off the list while the caller removes it, and do not list it again meanwhile."""
        with self._listing:
            strike_off_root(self.world, self.folder, part)
            yield

    def require_part(self, part: str) -> None:
        """Raise CorruptData if a part of the folder is listed but missing."""
        if part in self._missing and not root_has(self.world, self.folder, part):
            raise lacking_root(self.folder, part)

    def missing_groups(self) -> list[str]:
        """The groups in stream mode whose files are missing."""
        return [part.removeprefix(f"{GROUPS}/") for part in sorted(self._missing) if part.startswith(f"{GROUPS}/")]

    def keep(self) -> None:
        """Start the threads that call `tick_due`, sweep closed topics and compact keys."""
        with self._lock:
            self._kept = True  # before the first tick, which otherwise does what other threads are for
            topics = list(self._topics.values())
        Keeper(self, at_most_ms=_LOOK_AT_ALL_NS // 1_000_000, tick=BrokerEngine.tick_due).start()
        if self.world.disk.exists(join(self.folder, LOCKS_FOLDER)):  # both are stored there
            self.transactions().recover()
            self.schedules().recover()
        # On its own thread: opening a topic may take long, and leases in other topics must still end in time.
        Keeper(self._sweep).start()
        Keeper(self.sampler).start()
        for topic in topics:
            self._clean(topic)

    def _clean(self, topic: Topic) -> None:
        """Start the threads for compaction and tiering with the first topic that needs them."""
        with self._lock:
            if self._kept and self.tiering.is_wanted(topic):
                Keeper(self.tiering).start()
            if self._kept and self._cleaner is None and topic.settings.cleanup != "delete":
                self._cleaner = Cleaner(self)
                Keeper(self._cleaner).start()

    def at_close(self, call: Callable[[], None]) -> None:
        """Register a call for when the topics are closed, before the rest is."""
        with self._lock:
            self.check_open()
            self._closing.callback(call)

    def open_topics(self) -> list[Topic]:
        """The topics that are open now."""
        return [topic for topic in list(self._topics.values()) if not topic.closed]

    def topics(self) -> list[str]:
        """The names of all topics."""
        self.check_open()
        with self._translated(""):
            found = self.catalog.names()
        return found if self.moves is None else [name for name in found if not self.moves.is_elsewhere(name)]

    def producers(self) -> Producers:
        """The named producers; opened on first use."""
        if self._producers is not None and not self.closed:  # without the lock, as in `hold`
            return self._producers
        with self._locks_of.of(PRODUCERS), self._translated(""):
            self.check_open()
            if self._producers is None:
                self.require_part(PRODUCERS_FILE)
                self.list_parts()
                self._producers = Producers.open(self.world, self.folder)
                self._producers.on_first = self.list_parts
            return self._producers

    def locks(self) -> FolderLocks:
        """The locks and state documents; opened on first use."""
        if self._locks is not None and not self.closed:  # without the lock, as in `hold`
            return self._locks
        with self._locks_of.of(LOCKS), self._translated(""):
            self.check_open()
            if self._locks is None:
                from holdfast.broker.locks import FolderLocks  # few programs lock anything

                self.require_part(LOCKS_FOLDER)
                self.list_parts()
                self._locks = FolderLocks.open(
                    self.world, self.folder, self.check_open, self._began_ns // 1_000_000, self.key
                )
                self.list_parts()
                self._locks.on_attention = self._locks.journal.log.on_attention = self._attention
            return self._locks

    def schedules(self) -> FolderSchedules:
        """The schedules; nothing is read before their first use."""
        with self._lock:
            self.check_open()
            if self._schedules is None:
                from holdfast.broker.schedules import FolderSchedules  # few programs have any

                self._schedules = FolderSchedules(self, kept=self._kept)
            return self._schedules

    def schedules_changed(self) -> None:
        """Notice schedules that came or went with a topic; before `keep`, nobody has read them yet."""
        if self._kept or self._schedules is not None:
            self.schedules().reread()

    def transactions(self) -> FolderTransactions:
        """The transactions; nothing is read before their first use."""
        with self._lock:
            self.check_open()
            if self._transactions is None:
                from holdfast.broker.transactions import FolderTransactions  # few programs have any

                self._transactions = FolderTransactions(self, kept=self._kept)
            return self._transactions

    @property
    def has_locks(self) -> bool:
        """Whether the locks can be used without disk access."""
        return self._locks is not None

    def topic(self, name: str) -> Topic:
        """Return the topic, opened if needed. Without a holder it may be closed again at any time."""
        topic = self._topics.get(name) if type(name) is str else None
        if topic is None or topic.closed:
            topic = self.open_topic(check_topic_name(name))
        if self.closed:
            self.check_open()
        topic.used_ns = self.world.clock.monotonic_ns()
        return topic

    def is_open(self, name: str) -> bool:
        """Whether the topic can be used without disk access."""
        topic = self._topics.get(name) if type(name) is str else None
        return topic is not None and not topic.closed

    def using(self, name: str) -> Using:
        """Context manager that returns the topic and keeps it open."""
        return Using(self.enter_open, self.hold, name)

    def enter_open(self, name: str) -> Topic | None:
        """Return a topic that is open, with one more in `topic.users`, which the caller takes off again; else None.

        Without the name's lock: partitions may be being added under it, and a task must not wait for that.
        """
        topic = self._topics.get(name) if type(name) is str else None
        if topic is None:
            return None
        topic.used_ns = self.world.clock.monotonic_ns()
        # From here on nothing is called: no signal handler can run before the caller has the topic.
        topic.users += 1
        if not (topic.leaving or topic.closed or self.closed):
            return topic
        topic.users -= 1
        return None

    def hold(self, name: str, holder: object) -> Topic:
        """Return the topic and keep it open for as long as the holder is alive and in `topic.holders`."""
        known = self.enter_open(name)
        if known is not None:
            try:
                known.holders.add(holder)
            finally:
                known.users -= 1
            return known
        name = check_topic_name(name)
        with self._locks_of.of(name):
            topic = self._open_topic(name)
            topic.holders.add(holder)
            topic.used_ns = self.world.clock.monotonic_ns()
        self.close_idle(topic)
        return topic

    def queue_topic(
        self, name: str | None, given: QueueSettings | None, changes: Mapping[str, Any], *, create: bool
    ) -> Topic:
        """Open the topic of a simple queue (see `queue_name`), created if needed."""
        name = self.queue_name(name, create=create)
        if name not in self.topics():
            self.create_topic(name, given, changes)
        return self.open_topic(name, given, changes)

    def queue_name(self, name: str | None, *, create: bool) -> str:
        """The name of a queue's topic: as given, else that of the only topic, else the folder's own name.

        Raises InvalidRequest if there are several to choose from, and NotAQueue if it would have to be created.
        """
        found = self.topics()
        if name is None and len(found) > 1:
            raise InvalidRequest(
                f"{self.folder} has {len(found)} topics; choose one with topic={found[0]!r}, or use a broker"
            )
        name = check_topic_name(name) if name is not None else found[0] if found else topic_for(self.folder)
        if name not in found and not create:
            raise NotAQueue(
                f"{self.folder} holds no queue{f' {name}' if found else ''}; open it with create=True to create one"
            )
        return name

    def create_topic(
        self, name: str, given: QueueSettings | None = None, changes: Mapping[str, Any] | None = None
    ) -> TopicFacts:
        """Create a topic. Raises TopicExists."""
        name = check_topic_name(name)
        with self.alone(name):
            self.check_open()
            base, changes = self.settings.topic, changes or {}
            settings = settings_for(self.world, "", given, {**self.filed(name), **changes}, base)
            self.tiering.check(settings)
            kept = settings_for(self.world, "", given, {**changes, "partitions": settings.partitions}, base)
            if not self._listed:
                self.list_parts()
            return self.catalog.create(name, kept, base)

    def alter_topic(self, name: str, changes: Mapping[str, Any]) -> None:
        """Change settings of a topic, open or not, at once and durably."""
        wanted = change_topic(self, name, changes)
        while grow_topic(self, name, wanted):
            pass

    def delete_topic(self, name: str) -> None:
        """Delete a topic with all its messages, groups and dead letters. Raises UnknownTopic."""
        name = check_not_kept(check_topic_name(name))
        with self.alone(name):
            self.check_open()
            self.catalog.facts(name)
            with self._lock:
                topic = self._topics.pop(name, None)
            if topic is not None:
                topic.deleted = True  # first, so that users who find it closed get the right error
                topic.close()
            self.catalog.delete(name)

    def open_topic(
        self, name: str, given: QueueSettings | None = None, changes: Mapping[str, Any] | None = None
    ) -> Topic:
        """Open an existing topic; `changes` to its settings are saved once it is open. Raises UnknownTopic."""
        topic = self._open_topic(name, given, changes)
        self.close_idle(topic)
        return topic

    def _open_topic(
        self, name: str, given: QueueSettings | None = None, changes: Mapping[str, Any] | None = None
    ) -> Topic:
        with self.alone(name):
            self.check_open()
            known = self._topics.get(name)
            if known is not None and not known.closed and given is None and not changes:
                return known
            facts = self.catalog.facts(name)
            folder, base = topic_folder(self.folder, name), self.settings.topic
            changes = dict(changes or {})
            grown = changes.pop("partitions", facts.partitions)
            kept = settings_for(self.world, folder, given, changes, base)
            if grown != facts.partitions and not (given is None and grown == base.partitions):
                raise BadSettings(
                    f"{name} has {facts.partitions} partitions, not {grown}; add some with add_partitions"
                )
            settings = settings_for(self.world, folder, given, {**self.filed(name), **changes}, base)
            settings = msgspec.structs.replace(settings, partitions=facts.partitions)
            topic = Topic(
                self.world,
                self.folder,
                name,
                facts,
                settings,
                observer=self._observer,
                holder=self.holder,
                check_owner=self.check_open,
                on_attention=self._attention,
                traces=self.traces.log,
                queries=self.queries,
                key=self.key,
            )
            topic.on_pause, topic.body_checks = self._release_late, self.body_checks
            try:
                with suppress(OSError):  # no space: the next opening does it
                    if self._listed:  # otherwise the folder's own list would count as lost
                        self.catalog.bring_up_to_date(name, facts)
                if changes or given is not None:
                    keep_settings(self.world, folder, kept, base)
                    topic.list_parts()
                self.tell(topic)  # before its first tick: retention must know what others still need
            except BaseException:
                topic.close()
                raise
            with self._lock:
                self._topics[name] = topic
            self._attention()  # its first tick is due: without it, leases and delays of an earlier owner would not end
            return topic

    def tell(self, topic: Topic) -> None:
        """Notify listeners that the topic was opened or changed."""
        for notify in self.on_topic:
            notify(topic)
        self._clean(topic)

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Keep other threads from opening, changing or deleting the topic; other topics are not blocked.

        Raises Unavailable if the topic is in another folder, or on its way.
        """
        with self.alone_here(name):
            self.check_here(name)
            yield

    def check_here(self, name: str) -> None:
        """Raise Unavailable if the topic is in another folder, or on its way."""
        refusal = None if self.moves is None else self.moves.refusal(name)
        if refusal is not None:
            raise refusal

    @contextmanager
    def alone_here(self, name: str) -> Iterator[None]:
        """Like `alone`, for whoever moves the topic."""
        with self._locks_of.of(name), self._translated(name):
            yield

    def let_go(self, topic: Topic) -> None:
        """Close a topic in use, because it is about to leave the folder. Called with its name's lock held."""
        with self._lock:
            self._topics.pop(topic.name, None)
        topic.close()

    def filed(self, name: str) -> Mapping[str, Any]:
        """The settings of this topic in the settings file."""
        return self.settings.topics.get(name, {})

    def tick(self) -> int | None:
        """Do what is due in all topics; returns in how many ms to call again."""
        self._all_at_ns = 0
        return self.tick_due()

    def tick_due(self) -> int | None:
        """Like `tick`, but only for topics that expect something to be due. Called by the keeper thread."""
        self.check_open()
        now_ns = self.world.clock.monotonic_ns()
        everything = not self._all_at_ns or now_ns - self._all_at_ns >= _LOOK_AT_ALL_NS
        if everything:
            self._all_at_ns = now_ns or 1
            self.queries.tidy()
        due: list[int | None] = [self.traces.tick(), self.streams.tick()]
        if self._locks is not None:
            due.append(self._locks.tick())
        for topic in list(self._topics.values()):
            if not topic.closed:
                due.append(self._tick_topic(topic, now_ns, everything=everything))
        self.space.tick(everything=everything)
        if not self._kept:
            due.append(self._sweep.tick())
            due += [self.transactions().tick(), self.schedules().tick()]
        due.append(self.world.open_files.tick())
        return soonest(*due)

    def _tick_topic(self, topic: Topic, now_ns: int, *, everything: bool) -> int | None:
        if everything or (topic.due_ns is not None and topic.due_ns <= now_ns):
            topic.due_ns = None  # before its tick, so that a request for attention meanwhile is not lost
            try:
                due_ms = topic.tick()
            except Closed:
                if topic.closed:
                    return None
                raise
            again: int | None = topic.due_ns
            if again is None and due_ms is not None:
                topic.due_ns = now_ns + due_ms * 1_000_000
        return None if topic.due_ns is None else max(topic.due_ns - now_ns, 0) // 1_000_000

    def _release_late(self) -> None:
        """Release due messages of all topics; called during long work in one topic's tick."""
        for topic in self.open_topics():
            topic.release_late()

    def due_ms(self) -> int | None:
        """Ms until a lease, delay or scheduled message is due, not counting upkeep of files."""
        locks_ms = None if self._locks is None else self._locks.due_ms()
        schedules_ms = None if self._schedules is None else self._schedules.due_ms()
        return soonest(locks_ms, schedules_ms, *[topic.due_ms() for topic in self.open_topics()])

    def close_idle(self, but: Topic | None = None) -> None:
        """Close the least recently used topics if too many are open, except `but`."""
        self._sweep.close_idle(but)

    def close_if_idle(self, topic: Topic) -> None:
        """Close the topic unless it is in use, or another thread holds its lock."""
        with self._locks_of.if_free(topic.name) as ours:
            if not ours or self._topics.get(topic.name) is not topic or not topic.may_leave():
                return
            with self._lock:
                del self._topics[topic.name]
            try:
                topic.close()
            except (HoldfastError, OSError) as error:  # must not fail the caller, who is opening another topic
                logger.error("a topic failed to close", extra={"topic": topic.name, "error": str(error)})

    def trace(self, message: object) -> list[TraceStep]:
        """The recorded steps of a sampled message, which may no longer be kept."""
        return found_by(self.looking_for_trace(message))

    def looking_for_trace(self, message: object) -> Generator[int, None, list[TraceStep]]:
        """Generator version of `trace`: reads one frame of the trace log at a time."""
        self.check_open()
        return (yield from self.traces.looking_for(*traced_as(self, message)))

    def sync(self) -> None:
        """Wait until everything written so far, acks included, is on disk."""
        self.check_open()
        for topic in self.open_topics():
            try:
                topic.sync()
            except (Closed, UnknownTopic):
                if not topic.closed:  # if it was closed meanwhile, the close has synced it
                    raise
        self.streams.sync()
        if self._locks is not None:
            self._locks.sync()

    def disown(self) -> None:
        """Mark as closed in a child process after a fork: the parent still owns the folder."""
        if not self._forked:
            self.closed_before_fork = self.closed
        self.closed = self._forked = True

    def check_open(self) -> None:
        """Raise Closed if the engine is closed, or was opened before a fork."""
        if self._forked:
            raise Closed(
                f"the queue in {self.folder} was opened before a fork, by the parent, which still owns it. Open it "
                "again in this process; a shared folder does this automatically"
            )
        if self.closed:
            raise Closed(f"the queue in {self.folder} is closed; open it again to use it")

    def close(self) -> None:
        """Sync, save and release the folder. Closing twice is fine."""
        if self._forked:
            return  # without the lock, which a thread of the parent may have held at the fork
        if not self.closed:
            self.on_close()
        with self._lock:
            if self.closed:
                return
            self.closed = True
        with (
            ExitStack() as last,
            self._closing,
        ):  # runs all callbacks, last one first, even if one fails or is interrupted
            last.callback(self.after_close)
            self._closing.callback(self._stop_threads)  # after the logs, whose closing makes the threads end
            self._closing.callback(self._close_parts)
            # Threads that open, grow or delete a topic find the folder closed and give up.
            self._closing.callback(self._locks_of.wait_until_free)
            self._closing.callback(self.before_close)

    def _close_parts(self) -> None:
        with ExitStack() as closing:
            closing.callback(self._list_at_end)
            if self._locks is not None:
                closing.callback(self._locks.close)
            for topic in list(self._topics.values()):
                closing.callback(topic.close)

    def _list_at_end(self) -> None:
        """List parts created while open, such as traces; if that fails, the next opening does it."""
        if self._listed:
            with suppress(HoldfastError):
                self.list_parts()

    def _stop_threads(self) -> None:
        self._sweep.before_close()
        self.sampler.before_close()
        self.sampler.close()
        self.tiering.end()
        if self._cleaner is not None:
            self._cleaner.before_close()

    def _attention(self) -> None:
        self.on_attention()

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise opening_error(f"{self.folder}/{TOPICS}/{name}".rstrip("/"), error) from error
