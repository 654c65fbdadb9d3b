"""`holdfast cluster`: create a cluster and look at it; and `holdfast serve --cluster`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from holdfast.api.drafts import parse_duration
from holdfast.cli import output
from holdfast.cli.opening import AsJson
from holdfast.cli.parsing import Section, argument, option
from holdfast.config.settings_file import Effective
from holdfast.env import real_world
from holdfast.env.process import asyncio
from holdfast.errors import BadSettings, Conflict, InvalidRequest, NotFound
from holdfast.model import count_of
from holdfast.settings import ServerSettings

if TYPE_CHECKING:
    from holdfast.cluster.placement import NodeTraits

app = Section("A cluster: several servers on one store.")

_AT_ONCE: Final = 8

ClusterPlace = Annotated[str, argument("URL", "The place of the cluster in a store, such as s3://bucket/jobs.")]


@app.command("init")
def init_command(
    url: ClusterPlace,
    shards: Annotated[int, option("--shards N", "How many shards it has, for good.", least=1, most=1_024)],
    lease: Annotated[
        str, option("--lease TIME", "How long the owner of a shard may be silent before another node takes over.")
    ] = "3s",
    if_absent: Annotated[bool, option("--if-absent", "Succeed if there is such a cluster already.")] = False,
) -> int:
    """Create a cluster in a store. The number of shards cannot be changed later.

    A shard has one owner at a time, so there is no use for more nodes than shards; three to ten times as many shards
    as nodes spread evenly. An idle shard costs one small object in the store every quarter of the lease.

    Examples:
        holdfast cluster init s3://bucket/jobs --shards 16
        holdfast cluster init file:///srv/jobs --shards 4
        holdfast cluster init s3://bucket/jobs --shards 16 --if-absent
    """
    from holdfast.broker.folder.stored import shown_place
    from holdfast.cluster.description import create_cluster, read_cluster

    lease_ms = round(parse_duration(lease, "--lease") * 1000)
    if not 500 <= lease_ms <= 300_000:
        raise InvalidRequest(f"--lease {lease} cannot be used: give 0.5s to 5m")
    shown = output.safe(shown_place(url))
    try:
        made = create_cluster(url, real_world(), shards=shards, lease_ms=lease_ms)
    except Conflict:
        if not if_absent:
            raise
        found = read_cluster(url)
        if (found.shards, found.lease_ms) != (shards, lease_ms):
            raise Conflict(
                f"the cluster in {shown} has {count_of(found.shards, 'shard')} and a lease of "
                f"{found.lease_ms / 1000:g}s, which cannot be changed: give these"
            ) from None
        output.say(f"there is a cluster of {count_of(found.shards, 'shard')} in {shown}")
        return output.OK
    output.say(f"created a cluster of {count_of(made.shards, 'shard')} in {shown}")
    return output.OK


@app.command("status")
def status_command(url: ClusterPlace, as_json: AsJson = False) -> int:
    """Show the nodes of a cluster, and who owns each shard. It is read from the store, so no node needs to run.

    Examples:
        holdfast cluster status s3://bucket/jobs
    """
    from holdfast.broker.folder.stored import shown_place
    from holdfast.cluster.description import read_cluster, shard_url
    from holdfast.cluster.registry import NodeRecord, Registry
    from holdfast.env.chain.engines import copies_in, open_store, parse_place

    description = read_cluster(url)
    store, root = open_store(parse_place(url))
    with closing(store):
        records = Registry(store, root, real_world().clock).read()
        copies = copies_in(store)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = list(pool.map(_standing, [shard_url(url, number) for number in range(description.shards)]))
    owners: dict[int, NodeRecord] = {}
    for record in records.values():
        for shard, epoch in record.shards.items():
            if shard not in owners or owners[shard].shards[shard] < epoch:
                owners[shard] = record
    if as_json:
        shards = [_document(number, standing, owners.get(number)) for number, standing in enumerate(found)]
        nodes = [msgspec.to_builtins(record) for _, record in sorted(records.items())]
        facts = {"id": description.id, "lease_ms": description.lease_ms, "copies": copies}
        output.print_json({**facts, "shards": shards, "nodes": nodes})
        return output.OK
    lease = f"a lease of {description.lease_ms / 1000:g} s"
    output.say(f"{output.safe(shown_place(url))}: {count_of(description.shards, 'shard')}, {lease}")
    output.say(f"the store keeps {output.safe(copies)}")
    zones = any(record.traits.zone for record in records.values())
    shares = any(record.traits.weight != 1 or record.traits.max_shards for record in records.values())
    more = [*(["zone"] if zones else []), *(["weight>", "at most>"] if shares else [])]
    shown = output.table("node", "address", "shards>", "state", "seen>", "version", *more)
    now_ms = real_world().clock.now_ns() // 1_000_000
    for name, record in sorted(records.items()):
        count = sum(1 for owner in owners.values() if owner.node == name)
        age_ms = max(0, now_ms - record.written_at_ms)
        state = "silent" if age_ms > 2 * description.lease_ms else "leaving" if record.leaving else "joined"
        cells = (name, record.url, str(count), state, f"{age_ms / 1000:.1f} s ago", record.version)
        traits = record.traits
        share = (f"{traits.weight:g}", str(traits.max_shards or "")) if shares else ()
        shown.add_row(*map(output.safe, cells), *([output.safe(traits.zone)] if zones else []), *share)
    output.stdout().print(shown)
    output.stdout().print()
    shown = output.table("shard>", "owner", "epoch>", "objects>", "silent>", "standby")
    for number, standing in enumerate(found):
        owner = owners.get(number)
        if standing is None:
            shown.add_row(str(number), "none yet", "", "", "", "")
            continue
        who = standing.owner and (owner.node if owner is not None else standing.owner)
        behind = ", ".join(f"at most {each.lag_seconds:.1f} s behind" for each in standing.standbys)
        silent = f"{standing.silent_seconds:.1f} s"
        cells = (str(number), who or "none", f"{standing.epoch:,}", f"{standing.objects:,}", silent, behind or "none")
        shown.add_row(*map(output.safe, cells))
    output.stdout().print(shown)
    return output.OK


def _standing(url: str) -> Any:
    """What the store tells of a shard; None if nobody has owned it yet."""
    from holdfast.broker.folder.stored import store_standing

    try:
        return store_standing(url, real_world())
    except NotFound:
        return None


def _document(number: int, standing: Any, owner: Any) -> dict[str, Any]:
    found = {"shard": number, "node": None if owner is None else owner.node}
    if standing is None:
        return {**found, "epoch": 0}
    facts = msgspec.structs.asdict(standing)
    return {**found, **facts, "standbys": [msgspec.structs.asdict(each) for each in standing.standbys]}


def _check_settings(other: str | None, effective: Effective, settings: ServerSettings) -> None:
    """Refuse what has no effect in a cluster, or would have another one."""
    if other is not None:
        raise InvalidRequest("--cluster goes without DIR and --store: its shards are in the cluster's store")
    if settings.audit_file is not None:
        raise BadSettings("audit_file cannot be set for a cluster: each shard keeps its audit log in the store")
    if effective.broker.tier is not None:
        raise BadSettings("tier cannot be set for a cluster: its shards are in a store already. Leave it out")


def traits_of(zone: str | None, weight: str | None, max_shards: int | None) -> NodeTraits:
    """What a node says about its share. Raises InvalidRequest."""
    from holdfast.cluster.placement import NodeTraits

    try:
        share = 1.0 if weight is None else float(weight)
    except ValueError:
        share = 0.0
    if not 0.01 <= share <= 100:
        raise InvalidRequest(f"--weight {weight} cannot be used: give a number from 0.01 to 100")
    return NodeTraits(weight=share, zone=zone or "", max_shards=max_shards or 0)


def serve_cluster(
    url: str,
    other: str | None,
    effective: Effective,
    settings: ServerSettings,
    advertise: str | None,
    node_id: str | None,
    traits: NodeTraits,
) -> int:
    """Be a node of a cluster until a signal comes. `other` is another place that was given to serve."""
    if settings.grpc_port is not None:
        raise InvalidRequest(
            "a node of a cluster does not serve gRPC yet: leave out --grpc-port and the setting grpc_port"
        )
    from holdfast.broker.folder.stored import shown_place
    from holdfast.cli.serve import begin_serving, now_serving, stop_on_signals
    from holdfast.cluster.description import read_cluster

    _check_settings(other, effective, settings)
    description = read_cluster(url)
    gc.disable()  # until it listens: everything loaded until then stays
    effective, settings = begin_serving(effective, settings)
    from holdfast.client.spark_commits import routes as spark_routes
    from holdfast.server.cluster.node import serve_node
    from holdfast.server.server import event_loop

    def ready(addresses: Sequence[str]) -> None:
        now_serving()
        where = ", ".join(addresses)
        sys.stdout.write(f"Holdfast serves the cluster {output.safe(shown_place(url))} at {where}\n")
        if settings.console:
            sys.stdout.write(f"Console: {addresses[0]}/ui  API: {addresses[0]}/docs\n")
        sys.stdout.flush()

    async def until_stopped() -> bool:
        loop = asyncio.get_running_loop()
        stop_asked = asyncio.Event()
        stop_on_signals(stop_asked, loop)
        return await serve_node(
            real_world(),
            url,
            description,
            effective.broker,
            settings,
            node_id=node_id,
            advertised=advertise,
            traits=traits,
            ready=ready,
            stop_asked=loop.create_task(stop_asked.wait()),
            effective=msgspec.structs.replace(effective, server=settings, data_dir=shown_place(url)),
            more=[spark_routes],
        )

    try:
        with asyncio.Runner(loop_factory=event_loop()) as runner:
            return output.OK if runner.run(until_stopped()) else output.DAMAGED
    finally:
        gc.enable()
