"""A pipeline's checkpoint: one runner at a time, for one spec, and how to begin anew.

_checkpoints/NAME/lock         who runs it
_checkpoints/NAME/spec.json    what it was made for
_checkpoints/NAME/id           a number that is another one after a new beginning
_checkpoints/NAME/forgetting   there only while all of it is being removed
_checkpoints/NAME/batches/     what was written (see `ledger`)
_checkpoints/NAME/spark/       Spark's own checkpoint, where the source is a topic
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Never

import msgspec

from holdfast.env import World
from holdfast.env.disk import LakeDisk
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.spark.pipelines.context import Context, kind_named
from holdfast.spark.pipelines.ledger import Ledger
from holdfast.spark.pipelines.spec import Project, Spec
from holdfast.storage.files import LOCK, durable_replace, join, read_file, remove_tree
from holdfast.storage.opening import take_lock

SPEC = "spec.json"
ID = "id"
FORGETTING = "forgetting"


@contextmanager
def held(world: World, project: Project, spec: Spec) -> Iterator[None]:
    """Own the pipeline's checkpoint for a while, or raise Busy at once, with who has it."""
    folder = project.checkpoint(spec.name)
    LakeDisk().make_folder(project.lake)
    world.disk.make_folder(folder)
    lock = take_lock(world, folder, f"Wait until that run of {spec.name} has ended, or end it")
    try:
        yield
    finally:
        lock.release()


def check_fit(world: World, project: Project, spec: Spec) -> None:
    """Refuse to go on from a checkpoint that was made for something else; note what it is made for."""
    folder = project.checkpoint(spec.name)
    if not world.disk.exists(join(folder, ID)):
        durable_replace(world.disk, folder, ID, f"{world.ids.random_u32():08x}".encode())
    wanted = _identity(spec)
    content = read_file(world.disk, join(folder, SPEC))
    if content is None or not _is_used(world, folder):
        durable_replace(world.disk, folder, SPEC, msgspec.json.encode(wanted))
        return
    made_for = json.loads(content)
    for field in sorted({*made_for, *wanted}):
        old, new = made_for.get(field), wanted.get(field)
        if old != new:
            raise InvalidRequest(
                f"the checkpoint of {spec.name} was made with {field} {_said(old)}, and now it is {_said(new)}: "
                "give the pipeline another name, or begin anew with "
                f"`holdfast pipeline run {spec.name} --full-refresh`, which removes its tables and reads all again"
            )


def checkpoint_id(world: World, project: Project, name: str) -> str | None:
    """Which beginning of the pipeline this is; None before the first."""
    content = read_file(world.disk, join(project.checkpoint(name), ID))
    return None if content is None else content.decode("ascii", "replace")


def _is_used(world: World, folder: str) -> bool:
    """Whether anything was ever begun: before that, options may change as they like."""
    others = set(world.disk.names(folder)) - {LOCK, SPEC, ID, "schema.json", "spark"}
    offsets = join(folder, "spark/offsets")
    return bool(others) or (world.disk.exists(offsets) and bool(world.disk.names(offsets)))


def forget(world: World, project: Project, spec: Spec) -> None:
    """Remove the tables of a pipeline and all that it knows, but not the lock that the caller holds.

    A table without its checkpoint would get its rows a second time, and a checkpoint without its table none. So a
    note is made first, and goes last: a removal that was cut short is finished by the next run.
    """
    checkpoint = project.checkpoint(spec.name)
    durable_replace(world.disk, checkpoint, FORGETTING, b"")
    for folder in (
        project.table(spec.name),
        project.quarantine(spec.name),
        f"{project.lake}/_staging/{spec.name}",
        f"{project.lake}/_staging/{spec.name}.merging",
    ):
        remove_tree(world.disk, folder)
    for name in world.disk.names(checkpoint):
        if name not in (LOCK, FORGETTING):
            remove_tree(world.disk, join(checkpoint, name))
    for folder in (project.lake, f"{project.lake}/_staging", checkpoint):
        if world.disk.exists(folder):
            world.disk.sync_folder(folder)
    world.disk.remove(join(checkpoint, FORGETTING))


def is_half_forgotten(world: World, project: Project, spec: Spec) -> bool:
    """Whether somebody began to remove it and did not come to the end."""
    return world.disk.exists(join(project.checkpoint(spec.name), FORGETTING))


def _identity(spec: Spec) -> dict[str, Any]:
    identity = {"kind": spec.kind, **kind_named(spec.kind).identity(spec.options)}
    plain: dict[str, Any] = json.loads(msgspec.json.encode(identity))
    return plain


def _said(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value) if not isinstance(value, str) else value


# Where pipelines are: from their checkpoints alone, without a session and without a lock.


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How far one pipeline is, over all of its runs; `lag` is what its source has beyond that, where that is known."""

    pipeline: str
    kind: str
    batches: int
    last_batch: int | None
    last_batch_at_ms: int | None
    rows_in: int
    rows_out: int
    dropped: int
    quarantined: int
    duplicates: int
    expectations: dict[str, int]
    pending: bool
    lag: int | None


def standing_of(world: World, project: Project, spec: Spec) -> Standing:
    """Where this pipeline is."""
    ledger = Ledger(world, project.checkpoint(spec.name))
    totals, last = ledger.totals(), ledger.last()
    return Standing(
        pipeline=spec.name,
        kind=spec.kind,
        batches=totals.batches,
        last_batch=None if last is None else last.batch,
        last_batch_at_ms=None if last is None else last.at_ms,
        rows_in=totals.rows_in,
        rows_out=totals.rows_out,
        dropped=totals.dropped,
        quarantined=totals.quarantined,
        duplicates=totals.duplicates,
        expectations=totals.expectations,
        pending=ledger.pending() is not None,
        lag=_lag(world, project, spec),
    )


class _NeedsSession(Exception):
    """This cannot be told without Spark."""


def _no_session() -> Never:
    raise _NeedsSession


def _lag(world: World, project: Project, spec: Spec) -> int | None:
    try:
        return kind_named(spec.kind).plan(Context(world=world, session=_no_session, project=project, spec=spec)).rows
    except (HoldfastError, _NeedsSession, OSError):
        return None
