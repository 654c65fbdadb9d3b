"""Owning a folder that lives in a store: following its owner, taking over, and showing that one is alive.

A process that opens the folder copies the newest checkpoint and the chain behind it into its cache, and waits there for
its turn: until the owner says that it is gone, or is known to be dead, or was silent for the lease. Then it puts a
fence, replays what was left, and owns the folder. While it waits, it tells how far it got (`StandbyNote`): that is for
people, and nothing is decided by it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import msgspec

from holdfast.env.chain.chain import Chain, ChainTimes, OwnershipLost, Position, Standby, is_left_behind, key_of, walk
from holdfast.env.chain.checkpoints import (
    Copy,
    Interrupted,
    LeftInStore,
    Listed,
    checkpoints,
    clean_up,
    read_checkpoint,
    write_checkpoint,
)
from holdfast.env.chain.disk import ChainDisk
from holdfast.env.chain.engines import Store, StoreRefused, StoreUnreachable, probe
from holdfast.env.chain.format import BadObject, ObjectHeader, ObjectKind, decode, replay
from holdfast.env.disk import BytesLike
from holdfast.env.process import close_in_children, get_logger
from holdfast.env.world import Clock, World
from holdfast.errors import InvalidRequest

logger = get_logger(__name__)

_LOOK_S: Final = 0.2  # a standby looks for the next object this often
_CHECKPOINT_BYTES: Final = 256 * 1024 * 1024
_CHECKPOINT_OBJECTS: Final = 5_000
_CHECKPOINT_NS: Final = 600 * 1_000_000_000
_NS: Final = 1_000_000_000
_FORGOTTEN_NS: Final = 60 * _NS  # a standby that has not moved for so long is not listed
_RETRY_S: Final = (5.0, 600.0)  # after a checkpoint that failed: at first, and at most
# In what an owner says about itself, beside what tells its process:
_LEASE: Final = "lease_s"
_DOUBTED: Final = "doubted_ms"  # when an owner was last replaced because it was silent: it may still be alive

BACKUPS: Final = ("backup", "begun")  # what tells a place that holds backups
CLUSTER: Final = "cluster"  # and one that holds a cluster

_Answer = TypeVar("_Answer")


class OwnedElsewhere(Exception):
    """Another process owns the folder; `note` is what it said about itself."""

    def __init__(self, note: Mapping[str, Any]) -> None:
        super().__init__("owned elsewhere")
        self.note = note


class ChainFollower:
    """A copy of the folder that follows the chain: to its end, or only to a number or a time."""

    def __init__(
        self, store: Store, root: str, world: World, folder: str, *,
        number: int | None = None, until_ns: int | None = None, leave: LeftInStore | None = None,
    ) -> None:  # fmt: skip
        self.at = Position()
        self._number = number  # objects from here on are left out
        self._until_ns = until_ns  # and those that were written later
        self.owner: dict[str, Any] = {}  # what the owner said about itself
        self.objects = 0  # applied since the checkpoint
        self.time_ns = 0  # when the last of them was written, or the checkpoint, by the clock of its writer
        self._is_whole = True  # no object is applied in part
        self._known = 0  # there was a checkpoint as of this number, so the chain goes at least so far
        self._store = store
        self._root = root
        self.copy = Copy(store, root, world.disk, folder, leave)

    def begin(self) -> None:
        """Start from the newest checkpoint that can be read, or from nothing."""
        self.at, self.objects, self.time_ns = Position(), 0, 0
        numbers = self._checkpoints()
        while numbers:
            try:
                found = read_checkpoint(self._store, self._root, numbers[0])
                if self._until_ns is not None and found.time_ns > self._until_ns:
                    numbers = numbers[1:]
                    continue
                self._known = max(self._known, numbers[0])
                self.copy.restore(found)
            except BadObject as error:
                self._known = max(self._known, numbers[0])
                logger.warning("checkpoint not used", extra={"store": self._store.name, "why": str(error)})
                # It may have been cleaned up while it was fetched: then there is a newer one.
                newest = self._checkpoints()
                numbers = newest if newest[:1] > numbers[:1] else numbers[1:]
                continue
            self.at, self.owner, self._is_whole = found.at, _note(found.owner), True
            self.time_ns = found.time_ns
            return
        self.copy.clear()
        self._is_whole = True

    def _checkpoints(self) -> list[int]:
        found = checkpoints(self._store, self._root)
        return found if self._number is None else [number for number in found if number <= self._number]

    @property
    def lease_s(self) -> float:
        """How long the owner may be silent, as it said itself; 0 if it did not."""
        said = self.owner.get(_LEASE)
        return float(said) if isinstance(said, int | float) else 0.0

    @property
    def doubted_ms(self) -> int:
        """When a silent owner was last replaced, by the wall clock of its successor; 0 if that never happened."""
        said = self.owner.get(_DOUBTED)
        return said if isinstance(said, int) else 0

    def is_left_behind(self) -> bool:
        """Whether the chain is known to go on, although the next object is missing: it was cleaned up."""
        return is_left_behind(self._store, self._root, self.at.number)

    def catch_up(self) -> bool:
        """Apply all that is there; returns whether there was something."""
        before = self.at.number
        with suppress(StoreUnreachable):  # what could not be read now is read the next time
            self.apply()
        return self.at.number != before

    def apply(self) -> None:
        """Apply all that is there; raises StoreUnreachable if something cannot be read."""
        if not self._is_whole:
            self.begin()
        for header, payload in walk(self._store, self._root, self.at):
            if self._is_beyond(header):
                break
            if header.kind == ObjectKind.FENCE:
                self.owner = _note(payload)
            else:
                self._is_whole = False  # it may name a large write, which cannot be fetched now
                replay(payload, self.copy)
                self._is_whole = True
                self.objects += 1
            self.at, self.time_ns = self.at.after(header), header.time_ns
        self._check_end()

    def _is_beyond(self, header: ObjectHeader) -> bool:
        if self._number is not None and header.number >= self._number:
            return True
        return self._until_ns is not None and header.time_ns > self._until_ns

    def _check_end(self) -> None:
        """Refuse to take for the end what cannot be: whoever went on from there would leave out what follows."""
        if self.at.number < self._known:
            raise BadObject(
                f"the checkpoint as of object {self._known} cannot be read, and the chain before it has been removed"
            )
        has_more = self.at.number == 0 and next(self._store.keys(f"{self._root}chain/"), None) is not None
        if has_more and self._store.read(key_of(self._root, 0)) is None:  # it may have been made just now
            raise BadObject("the first objects of the chain have been removed, and there is no checkpoint")


def _note(payload: BytesLike) -> dict[str, Any]:
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


def process_text(note: Mapping[str, Any]) -> str:
    """Return who it is that said this about itself."""
    return f"process {note['pid']} on {note['host']}" if "pid" in note and "host" in note else "another process"


class StandbyNote:
    """Tells others how far this standby has followed the chain, by objects whose keys have the number.

    Objects are only ever created, so each step is another one. The last two stay: whoever has just listed the newest
    can still read it after the next step.
    """

    def __init__(self, store: Store, root: str, clock: Clock, writer: bytes, said: bytes, every_s: float) -> None:
        self._store, self._prefix, self._writer = store, _standby_prefix(root), writer
        self._clock, self._said, self._every_ns = clock, said, round(every_s * _NS)
        self._told_ns: int | None = None
        self._keys: list[str] = []

    def tell(self, number: int) -> None:
        now_ns, key = self._clock.monotonic_ns(), f"{self._prefix}{number:020}-{self._writer.hex()}"
        if key in self._keys or (self._told_ns is not None and now_ns - self._told_ns < self._every_ns):
            return
        self._told_ns = now_ns
        with suppress(StoreUnreachable, StoreRefused):
            self._store.create(key, self._said)
            self._keys.append(key)
            self._keep(2)

    def close(self) -> None:
        with suppress(StoreUnreachable, StoreRefused):  # then it is not listed for long, and cleaned up later
            self._keep(0)

    def _keep(self, count: int) -> None:
        while len(self._keys) > count:
            self._store.remove(self._keys.pop(0))


def _standby_prefix(root: str) -> str:
    return f"{root}standby/"


def standbys(store: Store, root: str, at: Position, now_ns: int) -> list[Standby]:
    """Return who stands by, if the chain ends at a position; `now_ns` is by the owner's wall clock, if possible.

    An idle owner writes objects, too, so a standby that does not move any more has ended, and is soon left out.
    """
    prefix, newest = _standby_prefix(root), dict[str, str]()
    for key in store.keys(prefix):
        digits, _, writer = key.removeprefix(prefix).partition("-")
        if digits.isdecimal() and digits.isascii() and writer != at.writer.hex():
            newest[writer] = key
    found = []
    for key in newest.values():
        number = int(key.removeprefix(prefix).partition("-")[0])
        said, lag_ns = store.read(key), _age_ns(store, root, number, now_ns) if number < at.number else 0
        if said is not None and lag_ns is not None and lag_ns < _FORGOTTEN_NS:
            lag = max(0, at.number - number)
            found.append(
                Standby(process=process_text(_note(said)), number=number, lag_objects=lag, lag_seconds=lag_ns / _NS)
            )
    return found


def _age_ns(store: Store, root: str, number: int, now_ns: int) -> int | None:
    """Return how long ago an object was written; None if it was cleaned up, or cannot be read."""
    content = store.read(key_of(root, number))
    try:
        return None if content is None else max(0, now_ns - decode(content, number)[0].time_ns)
    except BadObject:
        return None


class StandbyWatch:
    """Who stands by, as the owner sees it: looked up when somebody asks, and not more often than that can change."""

    def __init__(self, chain: Chain, clock: Clock) -> None:
        self._chain, self._clock = chain, clock
        self._lock = threading.Lock()
        self._looked_ns: int | None = None
        self._found: list[Standby] = []

    def read(self) -> list[Standby]:
        """Return the standbys; the last ones known if another thread is looking, or the store does not answer."""
        if not self._lock.acquire(blocking=False):
            return self._found
        try:
            now_ns = self._clock.monotonic_ns()
            fresh = self._looked_ns is not None and now_ns - self._looked_ns < _NS
            if not fresh and self._chain.failure is None and self._chain.is_current():
                self._looked_ns = now_ns
                at = Position(number=self._chain.committed, writer=self._chain.writer)
                with suppress(StoreUnreachable, StoreRefused):
                    self._found = standbys(self._chain.store, self._chain.root, at, self._clock.now_ns())
            return self._found
        finally:
            self._lock.release()


class StoreStanding(msgspec.Struct, frozen=True, kw_only=True):
    """A folder in a store, as anybody can see it there. `owner` is empty if the last one has closed it."""

    name: str
    owner: str
    standbys: list[Standby]
    epoch: int
    objects: int
    silent_seconds: float


def standing(store: Store, root: str, now_ns: int) -> StoreStanding:
    """Return who owns the folder and who stands by, without a copy of it."""
    at, owner, written_ns = Position(), dict[str, Any](), 0
    for number in checkpoints(store, root):
        with suppress(BadObject):
            found = read_checkpoint(store, root, number)
            at, owner, written_ns = found.at, _note(found.owner), found.time_ns
            break
    for header, payload in walk(store, root, at):
        at, written_ns = at.after(header), header.time_ns
        if header.kind == ObjectKind.FENCE:
            owner = _note(payload)
    is_owned = at.number > 0 and not at.is_closed
    return StoreStanding(
        name=store.name, owner=process_text(owner) if is_owned else "", epoch=at.epoch, objects=at.number,
        silent_seconds=max(0, now_ns - written_ns) / _NS, standbys=standbys(store, root, at, now_ns),
    )  # fmt: skip


class StoreOwner:
    """This process as the owner of the folder: its disk, and the thread that keeps the chain moving."""

    def __init__(
        self, world: World, chain: Chain, folder: str, unrecorded: frozenset[str], follower: ChainFollower
    ) -> None:
        self.chain = chain
        self.disk = ChainDisk(world.disk, folder, chain, unrecorded=unrecorded)
        self.disk.files.digests.update(follower.copy.digests)
        self.doubted_ms: int = _note(chain.note).get(_DOUBTED, 0)
        self.standbys = StandbyWatch(chain, world.clock)
        chain.standbys = self.standbys.read
        self._clock = world.clock
        self._checkpoint_at = chain.committed - follower.objects
        self._checkpoint_bytes = 0
        self._checkpoint_ns = world.clock.monotonic_ns()
        self._listed: dict[int, Listed] = {}
        self._retry_ns = 0  # no checkpoint before: the last one failed
        self._retry_after_s = _RETRY_S[0]
        self._ended = threading.Event()
        self._closing = threading.Event()  # no more checkpoints
        self._threads: list[tuple[threading.Thread, threading.Event]] = []
        close_in_children(self)

    def keep(self) -> None:
        """Start the threads: one shows that the owner lives, also while the other writes a long checkpoint."""
        often_s = min(self.chain.times.send_s, self.chain.times.lease_s / 8)
        for name, work, every_s, over, wake in (
            ("checkpoint", self.checkpoint_if_due, _LOOK_S, self._closing, self._closing),
            ("chain", self.chain.tick, often_s, self._ended, self.chain.urgent),
        ):
            thread = threading.Thread(
                target=self._run, args=(work, every_s, over, wake), name=f"holdfast-{name}", daemon=True
            )
            self._threads.append((thread, over))
            thread.start()

    def disown(self) -> None:
        """In a child after a fork: the parent is the owner."""
        self._closing.set()
        self._ended.set()
        self.chain.urgent.set()

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint when there is enough that an opening could skip."""
        chain = self.chain
        objects = chain.committed - self._checkpoint_at
        grown = chain.bytes_sent - self._checkpoint_bytes
        old = self._clock.monotonic_ns() - self._checkpoint_ns >= _CHECKPOINT_NS and grown > 0
        due = objects >= _CHECKPOINT_OBJECTS or grown >= _CHECKPOINT_BYTES or old
        if not due or self._clock.monotonic_ns() < self._retry_ns:
            return
        try:
            self.checkpoint()
        except Interrupted:
            return
        except BaseException:
            # All of it is read and sent again: not at once, if the store does not take it.
            self._retry_ns = self._clock.monotonic_ns() + round(self._retry_after_s * _NS)
            self._retry_after_s = min(self._retry_after_s * 2, _RETRY_S[1])
            raise
        self._retry_after_s = _RETRY_S[0]

    def checkpoint(self) -> None:
        """Write a checkpoint, and remove what it and those before it make superfluous."""
        found = write_checkpoint(self.disk, self._clock.now_ns(), self._closing.is_set)
        self._checkpoint_at, self._checkpoint_bytes = found.at.number, self.chain.bytes_sent
        self._checkpoint_ns = self._clock.monotonic_ns()
        chain = self.chain
        now_ns = self._clock.now_ns()
        clean_up(chain.store, chain.root, now_ns, chain.confirm, self._listed, recheck=chain.require_current)

    def close(self) -> None:
        """Hand the folder to whoever waits for it. The engine must be closed before."""
        # While a checkpoint comes to its end, the other thread goes on: this is the owner until it says otherwise.
        for thread, over in self._threads:
            over.set()
            self.chain.urgent.set()
            if thread is not threading.current_thread():
                thread.join()
        if self.chain.failure is None:
            self.chain.close()

    def _run(self, work: Callable[[], None], every_s: float, over: threading.Event, wake: threading.Event) -> None:
        while not over.is_set():
            wake.wait(every_s)
            if over.is_set():
                return
            try:
                work()
            except OwnershipLost as error:
                logger.warning("the folder has another owner now", extra={"why": str(error)})
                return
            except (OSError, StoreUnreachable, StoreRefused, BadObject) as error:  # it is tried again later
                logger.warning("checkpoint not written", extra={"why": str(error)})
            except Exception:  # whatever it was: without this thread the folder would be lost to the next owner
                logger.exception("upkeep of a folder in a store failed")


class Turn(Protocol):
    """Decides for a process that waits for a folder, and one of several may have. Called by the waiting thread."""

    def is_over(self) -> bool:
        """Whether to stop waiting."""

    def may_take(self, *, closed: bool, free: bool) -> bool:
        """Whether to become the owner now, if the folder is `free`; `closed` if the last one went of its own accord.

        Each time it is asked, the copy here has all that the store had a moment ago.
        """


def take_over(
    store: Store,
    root: str,
    world: World,
    folder: str,
    *,
    unrecorded: frozenset[str],
    times: ChainTimes | None = None,
    wait_s: float | None = None,
    note: Mapping[str, Any] | None = None,
    is_dead: Callable[[Mapping[str, Any]], bool] = lambda _: False,
    leave: LeftInStore | None = None,
    turn: Turn | None = None,
) -> StoreOwner:
    """Become the owner of the folder, as soon as that is safe; `folder` is the cache.

    Raises OwnedElsewhere after `wait_s` seconds; None waits for as long as it takes. `is_dead` tells from what the
    owner said about itself whether its process is known to have ended. A `turn` must allow it, too.
    """
    times = times or ChainTimes()
    clock = world.clock
    follower = ChainFollower(store, root, world, folder, leave=leave)
    _patiently(clock, times, follower.begin)
    follower.catch_up()
    if follower.at.number == 0 and turn is None:
        _patiently(clock, times, partial(_require_apart, store, root))
        probe(store, root, world.ids.random_bytes(8).hex())
    began_ns = moved_ns = clock.monotonic_ns()
    writer = world.ids.random_bytes(16)
    said = {**(note or world.ids.process_note()), _LEASE: times.lease_s}
    telling = StandbyNote(store, root, clock, writer, msgspec.json.encode(said), times.lease_s / 2)
    with closing(telling):
        while True:
            if turn is not None and turn.is_over():
                raise OwnedElsewhere(follower.owner)
            at, now_ns = follower.at, clock.monotonic_ns()
            lease_s = max(times.lease_s, follower.lease_s)  # an owner with a longer one relies on that
            is_over = at.number == 0 or at.is_closed or is_dead(follower.owner)
            is_over = is_over or at.writer == writer  # our own fence, which came too late to count
            free = is_over or now_ns - moved_ns >= lease_s * _NS
            if turn is not None:
                free = turn.may_take(closed=at.is_closed or at.number == 0, free=free)
            if free and _patiently(clock, times, follower.is_left_behind):
                # This process was stopped for so long that what comes next has been cleaned up.
                _patiently(clock, times, follower.begin)
                moved_ns = clock.monotonic_ns()
            elif free:
                doubted_ms = follower.doubted_ms if is_over else clock.now_ns() // 1_000_000
                told = msgspec.json.encode({**said, _DOUBTED: doubted_ms})
                chain = Chain.take_over(store, root, clock, at=at, writer=writer, note=told, times=times)
                if chain is not None:
                    logger.info("took over a folder in a store", extra={"store": store.name, "epoch": chain.epoch})
                    return StoreOwner(world, chain, folder, unrecorded, follower)
            elif wait_s is not None and now_ns - began_ns >= wait_s * _NS:
                raise OwnedElsewhere(follower.owner)
            else:
                telling.tell(at.number)
                clock.wait(threading.Event(), _LOOK_S)
            if follower.catch_up():
                moved_ns = clock.monotonic_ns()


def _require_apart(store: Store, root: str) -> None:
    """Refuse to begin where backups are: each would remove contents that the other needs."""
    if any(next(store.keys(f"{root}{part}/"), None) is not None for part in BACKUPS):
        raise InvalidRequest(f"{store.name} holds backups, and cannot hold a data folder as well. Choose another place")
    if next(store.keys(f"{root}{CLUSTER}/"), None) is not None:
        raise InvalidRequest(
            f"{store.name} holds a cluster, and cannot hold a data folder as well. Serve it with `holdfast serve "
            "--cluster`, and give clients the address of a node"
        )


def _patiently(clock: Clock, times: ChainTimes, call: Callable[[], _Answer]) -> _Answer:
    """Call it again while the store does not answer, for as long as an owner would wait."""
    until_ns = clock.monotonic_ns() + round(times.slowest_s * _NS)
    while True:
        try:
            return call()
        except StoreUnreachable:
            if clock.monotonic_ns() >= until_ns:
                raise
            clock.wait(threading.Event(), _LOOK_S)
