"""A data folder that lives in a store: where the local copy is, and becoming its owner."""

from __future__ import annotations

import hashlib
import posixpath
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import msgspec

from holdfast.broker.folder.layout import OWNER_SOCKET, RESERVE, STORE_MARK, TIER, is_store
from holdfast.env import World
from holdfast.env.chain.chain import ChainTimes, has_chain, key_of
from holdfast.env.chain.checkpoints import KEPT_NS, LeftInStore, checkpoints
from holdfast.env.chain.engines import (
    Store,
    StorePlace,
    StoreRefused,
    StoreUnreachable,
    cannot_open,
    open_store,
    parse_place,
)
from holdfast.env.chain.format import BadObject, NewerObject
from holdfast.env.chain.keys import makers_variables
from holdfast.env.chain.ownership import (
    ChainFollower,
    OwnedElsewhere,
    StoreOwner,
    StoreStanding,
    Turn,
    process_text,
    standing,
    take_over,
)
from holdfast.env.disk import FolderLock
from holdfast.env.process import environment, is_alive, process_space
from holdfast.errors import BadSettings, Busy, CorruptData, DiskFailed, NotFound, UnknownFormat
from holdfast.settings import BrokerSettings
from holdfast.storage.files import LOCK, durable_replace, open_error, read_file, take_lock

# What holds for one process on one machine, and for no copy elsewhere.
_UNRECORDED: Final = frozenset({LOCK, OWNER_SOCKET, RESERVE})
_CACHE: Final = "XDG_CACHE_HOME"
_SECRETS: Final = frozenset({"password", "sslpassword"})
# The same URL means different stores depending on these. Two of them must not share a copy, or an owner.
_ELSEWHERE: Final = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
}


def shown_place(place: str) -> str:
    """Return a folder, or a place in a store without its password."""
    return parse_place(place).shown if is_store(place) else place


def cache_folder(place: StorePlace, settings: BrokerSettings) -> str:
    """Return the folder of this machine that holds the local copy. Its name says which queue it is."""
    return f"{cache_above(settings)}/{hashlib.sha256(_identity(place).encode()).hexdigest()[:16]}/{place.name}"


def cache_above(settings: BrokerSettings) -> str:
    """Return the folder of this machine that holds all local copies."""
    given = settings.store_cache_dir
    if given is None:
        home = environment().get(_CACHE) or posixpath.join(posixpath.expanduser("~"), ".cache")
        given = posixpath.join(home, "holdfast")
    return posixpath.abspath(given)


def _identity(place: StorePlace) -> str:
    """Return what tells this store from all others: the URL, and what else says where it is."""
    parts, known = urlsplit(place.url), makers_variables(secrets=False)
    said = [f"{name}={known[name]}" for name in _ELSEWHERE.get(parts.scheme, ()) if known.get(name)]
    said += [f"{name}={value}" for name, value in parse_qsl(parts.query) if name not in _SECRETS]
    return " ".join([place.shown, *said])


def refreshed_copy(url: str, settings: BrokerSettings, world: World) -> str:
    """Bring the local copy up to date without owning the folder, for those who only read; returns where it is."""
    place = parse_place(url)
    folder = cache_folder(place, settings)
    with ExitStack() as closing:
        try:
            with _translated(place):
                lock = _locked_copy(place, folder, world)
        except Busy:
            return folder  # its owner is on this machine, and keeps it up to date
        closing.callback(lock.release)
        store, root = open_store(place)
        closing.callback(store.close)
        follower = ChainFollower(store, root, world, folder)
        with _translated(place):
            follower.begin()
            follower.catch_up()
    return folder


def _left(place: StorePlace, world: World, folder: str) -> LeftInStore | None:
    """Have segments that are in the store stay there until they are read; their cache is beside the copy."""
    cache = posixpath.join(posixpath.dirname(folder), TIER)
    return None if world.tier is None else LeftInStore(world.tier, place.url, cache)


class ChainSnapshot(msgspec.Struct, frozen=True):
    """A folder in a store as of a number of its chain. It does not change, so any process may read it."""

    folder: str
    number: int


def snapshot(
    url: str, settings: BrokerSettings, world: World, number: int | None = None, stream: str | None = None
) -> ChainSnapshot:
    """Give the folder as of a number, or as it is now; segments are fetched when they are read.

    Those of the last hour are kept, beside the copy that an owner would use: what they refer to is in the store for as
    long. A `stream` takes one after another, so it has some of its own, of which only the newest are kept.
    """
    place = parse_place(url)
    above = shared = f"{posixpath.dirname(cache_folder(place, settings))}-snapshots"
    if stream is not None:
        above = f"{shared}/{_STREAM}{stream}"
    with _translated(place):
        if number is not None and world.disk.exists(f"{above}/{number}"):
            return ChainSnapshot(f"{above}/{number}/{place.name}", number)
        world.disk.make_folder(above)
        lock = _patient_lock(world, above)
    store, root = open_store(place)
    try:
        with _translated(place):
            _remove_old(world, above, most=None if stream is None else _KEPT_OF_STREAM)
            building = f"{above}/{_BUILDING}"
            _remove_tree(world, building)
            folder = f"{building}/{place.name}"
            leave = _left(place, world, f"{shared}/{_BUILDING}")  # streams share what was fetched, too
            reached = follow_into(place, store, root, world, folder, number=number, leave=leave).number
            durable_replace(world.disk, building, _TAKEN, str(world.clock.now_ns()).encode())
            if not world.disk.exists(f"{above}/{reached}"):
                world.disk.rename(building, f"{above}/{reached}")
    finally:
        store.close()
        lock.release()
    return ChainSnapshot(f"{above}/{reached}/{place.name}", reached)


_BUILDING: Final = "building"
_STREAM: Final = "stream-"
_KEPT_OF_STREAM: Final = 4  # a batch is read while the next one is planned, and tasks may be tried again
_TAKEN: Final = "taken"
_LOCK_S: Final = 120


def _patient_lock(world: World, folder: str) -> FolderLock:
    """Wait while another process takes a snapshot; raises Busy if that takes too long."""
    until_ns = world.clock.monotonic_ns() + _LOCK_S * 1_000_000_000
    while True:
        try:
            return take_lock(world, folder)
        except Busy:
            if world.clock.monotonic_ns() >= until_ns:
                raise
            world.clock.wait(threading.Event(), 0.05)


def _remove_old(world: World, above: str, *, most: int | None = None) -> bool:
    """Remove the snapshots that are too old, or more than `most`; returns whether one is left."""
    numbers = sorted(int(name) for name in world.disk.names(above) if name.isdecimal())
    kept = set(numbers if most is None else numbers[-most:])
    for number in numbers:
        taken = read_file(world.disk, f"{above}/{number}/{_TAKEN}")
        if taken is not None and world.clock.now_ns() - int(taken) > KEPT_NS:
            kept.discard(number)
        if number not in kept:
            _remove_tree(world, f"{above}/{number}")
    for name in world.disk.names(above):
        if name.startswith(_STREAM) and not _remove_old(world, f"{above}/{name}"):
            _remove_tree(world, f"{above}/{name}")  # of a stream that has ended
    return bool(kept)


def _remove_tree(world: World, folder: str) -> None:
    if not world.disk.exists(folder):
        return
    for name in world.disk.names(folder):
        path = f"{folder}/{name}"
        if world.disk.is_folder(path):
            _remove_tree(world, path)
        else:
            world.disk.remove(path)
    world.disk.remove_folder(folder)


_TRIES: Final = 5


class Reached(NamedTuple):
    """How far a copy goes: it has all objects before the number. The last of them was written at that time."""

    number: int
    time_ns: int


def follow_into(
    place: StorePlace, store: Store, root: str, world: World, folder: str, *,
    number: int | None = None, until_ns: int | None = None, leave: LeftInStore | None = None,
) -> Reached:  # fmt: skip
    """Make the folder what the chain says, to its end or as of a number or a time.

    Raises NotFound if the chain does not go there, or no longer goes back that far.
    """
    follower = ChainFollower(store, root, world, folder, number=number, until_ns=until_ns, leave=leave)
    with _translated(place):
        try:
            for tries in range(1, _TRIES + 1):
                try:
                    follower.begin()
                    follower.apply()
                    break
                except StoreUnreachable:
                    if tries == _TRIES:
                        raise
                    world.clock.wait(threading.Event(), tries)
        except BadObject:
            oldest = min(checkpoints(store, root), default=0)
            if (number is None and until_ns is None) or store.read(key_of(root, 0)) is not None:
                raise
            raise NotFound(
                f"{place.shown} no longer goes back that far: the oldest number that can be restored is {oldest}"
            ) from None
    if number is not None and follower.at.number < number:
        raise NotFound(f"{place.shown} goes to number {follower.at.number}: there is no {number}")
    return Reached(follower.at.number, follower.time_ns)


def _locked_copy(place: StorePlace, folder: str, world: World) -> FolderLock:
    """Lock what is beside the copy, which is emptied before the engine can lock it; raises Busy."""
    beside = posixpath.dirname(folder)
    world.disk.make_folder(beside)
    lock = take_lock(world, beside)
    durable_replace(world.disk, beside, STORE_MARK, place.url.encode())
    return lock


@contextmanager
def _translated(place: StorePlace) -> Iterator[None]:
    try:
        yield
    except OwnedElsewhere as elsewhere:
        busy = Busy(_owned(place, elsewhere.note))
        busy.is_elsewhere = True
        raise busy from None
    except (StoreRefused, StoreUnreachable) as error:
        raise DiskFailed(cannot_open(place, error)) from error
    except OSError as error:
        raise open_error(f"the local copy of {place.shown}", error) from error
    except NewerObject as error:
        raise UnknownFormat(
            f"{place.shown} cannot be opened: {error}. Nothing was changed; open it with the release that wrote it, or "
            "a later one"
        ) from error
    except BadObject as error:
        raise CorruptData(f"{place.shown} cannot be opened: {error}. Restore it from a copy") from error


def is_chain(place: StorePlace) -> bool:
    """Whether a data folder lives in the place."""
    store, root = open_store(place)
    with closing(store), _translated(place):
        return has_chain(store, root)


def store_standing(url: str, world: World) -> StoreStanding:
    """Return who owns a folder in a store, and who stands by, as the store tells; raises NotFound if there is none."""
    place = parse_place(url)
    store, root = open_store(place)
    with closing(store), _translated(place):
        found = standing(store, root, world.clock.now_ns())
    if not found.epoch:
        raise NotFound(f"there is no queue in {place.shown}; `holdfast put` creates one")
    return found


def own_stored(
    url: str, settings: BrokerSettings, world: World, copy: str | None = None, turn: Turn | None = None
) -> tuple[str, World, StoreOwner, Callable[[], None]]:
    """Become the owner of a folder in a store; returns its local copy, a world with its disk, and how to let go.

    The copy is `copy` if that is known already. Raises Busy if another process owns it and goes on doing so. With a
    `turn`, it waits for as long as that says.
    """
    place = parse_place(url)
    if settings.tier is not None:
        raise BadSettings(f"tier cannot be set for {place.shown}: a folder in a store is its own tier. Leave it out")
    store, root = open_store(place)
    known = copy is not None and posixpath.basename(copy) == place.name
    folder = posixpath.abspath(copy) if known and copy is not None else cache_folder(place, settings)
    times = ChainTimes(lease_s=settings.store_lease_ms / 1000, send_s=settings.store_send_ms / 1000)
    with ExitStack() as undoing:
        undoing.callback(store.close)
        with _translated(place):
            undoing.callback(_locked_copy(place, folder, world).release)
            owner = take_over(
                store, root, world, folder,
                unrecorded=_UNRECORDED, times=times,
                wait_s=None if turn is not None else settings.store_wait_ms / 1000, turn=turn,
                note=process_facts(world), is_dead=lambda note: has_ended(world, note),
                leave=_left(place, world, folder) if settings.tiers else None,
            )  # fmt: skip
        undoing.callback(owner.close)
        give_up = undoing.pop_all().close
    return folder, msgspec.structs.replace(world, disk=owner.disk, doubted_ms=owner.doubted_ms), owner, give_up


def process_facts(world: World) -> dict[str, Any]:
    """What an owner says about itself, so that others know whom to look for."""
    return {**world.ids.process_note(), "boot": world.ids.boot_id(), "pids": process_space()}


def has_ended(world: World, note: Mapping[str, Any]) -> bool:
    """Whether the owner was a process of this machine, in this container, that has ended."""
    pid = note.get("pid")
    if note.get("boot") != world.ids.boot_id() or note.get("pids") != process_space() or not isinstance(pid, int):
        return False
    return not is_alive(pid)


def _owned(place: StorePlace, note: Mapping[str, Any]) -> str:
    return (
        f"{place.shown} is owned by {process_text(note)}, which is alive; one process owns a folder at a time. "
        "Connect to its server, or wait longer for it to end (store_wait_ms)"
    )
