"""A data folder that lives in a store: which places are stores, where the local copy is, and becoming its owner."""

from __future__ import annotations

import hashlib
import posixpath
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

import msgspec

from holdfast.broker.folder.layout import OWNER_SOCKET, RESERVE, STORE_MARK, is_store
from holdfast.env import World
from holdfast.env.chain.chain import ChainTimes, key_of
from holdfast.env.chain.checkpoints import checkpoints
from holdfast.env.chain.engines import FolderStore, MemoryStore, Store, StoreRefused, StoreUnreachable
from holdfast.env.chain.format import BadObject
from holdfast.env.chain.ownership import ChainFollower, OwnedElsewhere, StoreOwner, take_over
from holdfast.env.disk import FolderLock
from holdfast.env.process import environment, is_alive, process_space
from holdfast.errors import Busy, CorruptData, DiskFailed, InvalidRequest, NotFound, NotInstalled
from holdfast.settings import BrokerSettings
from holdfast.storage.files import LOCK, durable_replace, open_error, take_lock

# What holds for one process on one machine, and for no copy elsewhere.
_UNRECORDED: Final = frozenset({LOCK, OWNER_SOCKET, RESERVE})
_CACHE: Final = "XDG_CACHE_HOME"
_MOST_NAME_BYTES: Final = 200  # a name in a folder may have 255, and some get a suffix
_SECRETS: Final = frozenset({"password", "sslpassword"})
# The same URL means different stores depending on these. Two of them must not share a copy, or an owner.
_ELSEWHERE: Final = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
}
_memories: Final[dict[str, MemoryStore]] = {}


class StorePlace(msgspec.Struct, frozen=True):
    """A place in a store: its URL, which may hold a password, the same for people, and the name of the folder there."""

    url: str
    shown: str
    name: str

    def __repr__(self) -> str:
        return f"StorePlace({self.shown!r})"


def parse_place(url: str) -> StorePlace:
    """Parse the URL of a folder in a store; raises InvalidRequest."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidRequest(f"{url.partition('://')[0]}://... is not a place in a store: {error}") from None
    user, _, host = parts.netloc.rpartition("@")
    shown = f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
    path = unquote(parts.path).strip("/")
    names = path.split("/") if path else []
    name = names[-1] if names else host
    wrong = f"{shown!r} is not a place in a store: "
    # The name is that of a folder in the cache, which is emptied: it must not be one that leads elsewhere.
    if (
        any(each in ("", ".", "..") for each in [*names, name])
        or "\0" in path
        or bool(host) == (parts.scheme == "file")
    ):
        raise InvalidRequest(wrong + _EXAMPLES[parts.scheme])
    if len(name.encode()) > _MOST_NAME_BYTES:
        raise InvalidRequest(f"{wrong}its name has more than {_MOST_NAME_BYTES} bytes")
    if parts.scheme != "postgresql" and (user or parts.query or parts.fragment):
        raise InvalidRequest(f"{wrong}keys and options are not part of it, they come from the environment")
    return StorePlace(url=url.rstrip("/"), shown=shown, name=name)


def shown_place(place: str) -> str:
    """Return a folder, or a place in a store without its password."""
    return parse_place(place).shown if is_store(place) else place


def cache_folder(place: StorePlace, settings: BrokerSettings) -> str:
    """Return the folder of this machine that holds the local copy. Its name says which queue it is."""
    given = settings.store_cache_dir
    if given is None:
        home = environment().get(_CACHE) or posixpath.join(posixpath.expanduser("~"), ".cache")
        given = posixpath.join(home, "holdfast")
    return f"{posixpath.abspath(given)}/{hashlib.sha256(_identity(place).encode()).hexdigest()[:16]}/{place.name}"


def _identity(place: StorePlace) -> str:
    """Return what tells this store from all others: the URL, and what else says where it is."""
    parts, known = urlsplit(place.url), environment()
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


_TRIES: Final = 5


def follow_into(
    place: StorePlace, store: Store, root: str, world: World, folder: str, *,
    number: int | None = None, until_ns: int | None = None,
) -> int:  # fmt: skip
    """Make the folder what the chain says, to its end or as of a number or a time; returns the number reached.

    Raises NotFound if the chain does not go there, or no longer goes back so far.
    """
    follower = ChainFollower(store, root, world, folder, number=number, until_ns=until_ns)
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
                f"{place.shown} no longer goes back so far: the oldest number that can be restored is {oldest}"
            ) from None
    if number is not None and follower.at.number < number:
        raise NotFound(f"{place.shown} goes to number {follower.at.number}: there is no {number}")
    return follower.at.number


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
        raise DiskFailed(f"{place.shown} cannot be opened: {error}{_advice(place)}") from error
    except OSError as error:
        raise open_error(f"the local copy of {place.shown}", error) from error
    except BadObject as error:
        raise CorruptData(f"{place.shown} cannot be opened: {error}. Restore it from a copy") from error


def open_store(place: StorePlace) -> tuple[Store, str]:
    """Return the store, and the start of all keys in it. Raises NotInstalled, or InvalidRequest."""
    scheme = place.url.partition("://")[0]
    try:
        return _ENGINES[scheme](place)
    except StoreRefused as error:
        raise InvalidRequest(f"{place.shown} cannot be opened: {error}{_advice(place)}") from error
    except StoreUnreachable as error:
        raise DiskFailed(f"{place.shown} cannot be opened: {error}{_advice(place)}") from error


def is_chain(place: StorePlace) -> bool:
    """Whether a data folder lives in the place."""
    store, root = open_store(place)
    with closing(store), _translated(place):
        return any(next(store.keys(f"{root}{part}/"), None) is not None for part in ("chain", "checkpoint"))


def _advice(place: StorePlace) -> str:
    needed = _KEYS.get(place.url.partition("://")[0])
    return "" if needed is None else f". See that the environment has what it needs: {needed}"


def own_stored(
    place: StorePlace, settings: BrokerSettings, world: World, copy: str | None = None
) -> tuple[str, World, StoreOwner, Callable[[], None]]:
    """Become the owner of a folder in a store; returns its local copy, a world with its disk, and how to let go.

    The copy is `copy` if that is known already. Raises Busy if another process owns it and goes on doing so.
    """
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
                unrecorded=_UNRECORDED, times=times, wait_s=settings.store_wait_ms / 1000,
                note=process_facts(world), is_dead=lambda note: has_ended(world, note),
            )  # fmt: skip
        undoing.callback(owner.close)
        give_up = undoing.pop_all().close
    return folder, msgspec.structs.replace(world, disk=owner.disk), owner, give_up


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
    who = f"process {note['pid']} on {note['host']}" if "pid" in note and "host" in note else "another process"
    return (
        f"{place.shown} is owned by {who}, which is alive; one process owns a folder at a time. Connect to its server, "
        "or wait longer for it to end (store_wait_ms)"
    )


def _memory(place: StorePlace) -> tuple[Store, str]:
    return _memories.setdefault(place.shown, MemoryStore(place.shown)), ""


def _folder(place: StorePlace) -> tuple[Store, str]:
    return FolderStore(posixpath.abspath(unquote(urlsplit(place.url).path))), ""


def _object_store(place: StorePlace) -> tuple[Store, str]:
    _require("obstore", "stores", place)
    from holdfast.env.chain.services import ObjectStoreEngine

    return ObjectStoreEngine(place.url, place.shown), ""


def _postgres(place: StorePlace) -> tuple[Store, str]:
    _require("psycopg", "postgres", place)
    from holdfast.env.chain.services import PostgresStore

    parts = urlsplit(place.url)
    database, _, root = parts.path.strip("/").partition("/")
    if not database or not root:
        raise InvalidRequest(f"{place.shown} is not a place in a store: {_EXAMPLES['postgresql']}")
    url = urlunsplit(("postgresql", parts.netloc, f"/{database}", parts.query, ""))
    return PostgresStore(url, place.shown), f"{unquote(root)}/"


def _require(package: str, extra: str, place: StorePlace) -> None:
    if find_spec(package) is None:
        raise NotInstalled(f"{place.shown} needs the package {package}: pip install 'holdfast[{extra}]'")


_Opener: TypeAlias = Callable[[StorePlace], tuple[Store, str]]
_ENGINES: Final[dict[str, _Opener]] = {
    "s3": _object_store,
    "az": _object_store,
    "gs": _object_store,
    "postgresql": _postgres,
    "file": _folder,
    "memory": _memory,
}
_KEYS: Final = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, and AWS_ENDPOINT_URL unless it is Amazon's",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}
_EXAMPLES: Final = {
    "s3": "give s3://bucket/name",
    "az": "give az://container/name",
    "gs": "give gs://bucket/name",
    "postgresql": "give postgresql://host/database/name",
    "file": "give file:///folder/name",
    "memory": "give memory://name",
}
