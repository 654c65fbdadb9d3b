"""What a cluster is: an object in the store that is created once and never changes.

    <place>/cluster/description          this object
    <place>/cluster/nodes/<node>/<n>     what the nodes say of themselves; see `registry`
    <place>/shards/<four digits>/        one folder in a store each, as `holdfast serve --store` would have it

Whoever can read the store can read every message in it, so the secret by which nodes know each other can be here, too.
"""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Final
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec import Meta

from holdfast.broker.folder.layout import is_store
from holdfast.cluster.placement import MOST_SHARDS
from holdfast.env import World
from holdfast.env.chain.chain import has_chain
from holdfast.env.chain.engines import (
    Store,
    StorePlace,
    StoreRefused,
    StoreUnreachable,
    cannot_open,
    open_store,
    parse_place,
    probe,
)
from holdfast.env.chain.ownership import BACKUPS, CLUSTER
from holdfast.errors import Conflict, CorruptData, DiskFailed, InvalidRequest, NotFound, UnknownFormat

FORMAT: Final = 1
DESCRIPTION: Final = f"{CLUSTER}/description"
SHARDS: Final = "shards"
LEASE_MS: Final = 3_000
_SECRET_BYTES: Final = 32


class ClusterDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster as it was created. Later releases may add fields; one with another format is refused."""

    format: int
    id: str  # hexadecimal
    shards: Annotated[int, Meta(ge=1, le=MOST_SHARDS)]
    lease_ms: Annotated[int, Meta(ge=500, le=300_000)]
    secret: str  # hexadecimal
    created_at_ms: int


def create_cluster(url: str, world: World, *, shards: int, lease_ms: int = LEASE_MS) -> ClusterDescription:
    """Create a cluster. Raises Conflict if there is one already, and InvalidRequest if the place cannot hold one."""
    if not 1 <= shards <= MOST_SHARDS:
        raise InvalidRequest(f"a cluster cannot have {shards} shards: choose 1 to {MOST_SHARDS}")
    place = _parse(url)
    made = ClusterDescription(
        format=FORMAT,
        id=world.ids.random_bytes(8).hex(),
        shards=shards,
        lease_ms=lease_ms,
        secret=world.ids.random_bytes(_SECRET_BYTES).hex(),
        created_at_ms=world.clock.now_ns() // 1_000_000,
    )
    store, root = open_store(place)
    with closing(store):
        try:
            _require_free(store, root, place)
            probe(store, root, made.id)
            if not store.create(f"{root}{DESCRIPTION}", msgspec.json.encode(made)):
                raise _exists(place)
        except (StoreRefused, StoreUnreachable) as error:
            raise DiskFailed(cannot_open(place, error)) from error
    return made


def read_cluster(url: str) -> ClusterDescription:
    """Read the description of a cluster. Raises NotFound if there is none."""
    place = _parse(url)
    store, root = open_store(place)
    with closing(store):
        try:
            content = store.read(f"{root}{DESCRIPTION}")
        except (StoreRefused, StoreUnreachable) as error:
            raise DiskFailed(cannot_open(place, error)) from error
    if content is None:
        raise NotFound(
            f"there is no cluster in {place.shown}: create one with `holdfast cluster init {place.shown} --shards 16`"
        )
    return _decode(content, place)


def shard_url(url: str, shard: int) -> str:
    """The place of a shard, which is a folder in a store like any other."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{SHARDS}/{shard:04}"))


def _decode(content: bytes, place: StorePlace) -> ClusterDescription:
    try:
        version = msgspec.json.decode(content, type=dict[str, object]).get("format")
        if version != FORMAT:
            raise UnknownFormat(
                f"the cluster in {place.shown} has format {version}, and this release reads {FORMAT}: use the release "
                "that created it, or a later one"
            )
        return msgspec.json.decode(content, type=ClusterDescription)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"the description of the cluster in {place.shown} cannot be read: {error}") from None


def _parse(url: str) -> StorePlace:
    if not is_store(url):
        raise InvalidRequest(
            f"{url} is not a store: a cluster lives in one that all its nodes can reach. Give a URL such as "
            "s3://bucket/jobs; file:///folder/jobs is for nodes of one machine, or with a shared mount"
        )
    return parse_place(url)


def _require_free(store: Store, root: str, place: StorePlace) -> None:
    if store.read(f"{root}{DESCRIPTION}") is not None:
        raise _exists(place)
    if has_chain(store, root):
        raise InvalidRequest(
            f"{place.shown} holds the data folder of a single server, and cannot hold a cluster as well. Choose "
            "another place"
        )
    if any(next(store.keys(f"{root}{part}/"), None) is not None for part in BACKUPS):
        raise InvalidRequest(f"{place.shown} holds backups, and cannot hold a cluster as well. Choose another place")


def _exists(place: StorePlace) -> Conflict:
    return Conflict(
        f"there is a cluster in {place.shown} already, and its number of shards cannot be changed. Nothing was "
        f"changed; `holdfast cluster status {place.shown}` shows it"
    )
