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
from typing import Any

import msgspec

from holdfast.env import World
from holdfast.env.lakedisk import LakeDisk
from holdfast.errors import InvalidRequest
from holdfast.spark.pipelines.kinds import kind_named
from holdfast.spark.pipelines.spec import Project, Spec
from holdfast.storage.files import LOCK, durable_replace, join, read_file, remove_tree
from holdfast.storage.lock import take_lock

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
