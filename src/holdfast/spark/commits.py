"""The driver's commit: staged rows go into the log, each exactly once, whatever stops it on the way.

1. own the folder; finish what earlier commits left; stop here if this batch is in the log already
2. note where the logs end, durably with the list of staged files: from now on the batch is committed
3. append the files' frames, each with who wrote it and which of the lane's rows it begins with
4. sync; note the batch as done; remove its files

Who stops between 2 and 4 leaves a manifest. The next commit goes on from it: what the logs hold behind the noted
ends says how far each lane had come.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import msgspec

from holdfast.broker.broker import BrokerEngine
from holdfast.broker.partition import Partition
from holdfast.broker.topic import Topic
from holdfast.env import World
from holdfast.errors import Busy, HoldfastError, InvalidRequest, Unavailable, UnknownTopic
from holdfast.settings import BrokerSettings
from holdfast.spark.staging import Done, Lane, LaneStart, Manifest, StagedFile, Staging
from holdfast.spark.tracks import NoTrack, Track, Writer
from holdfast.storage.opening import translated

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S: Final = 0.05
_MOST_ROWS: Final = 2**32 - 1  # the log numbers them with 32 bits


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be committed. `kept`: the write goes on after this batch, so that its end must be remembered.

    `streaming`: it is a query's, of whose batches none but the last can come again.
    """

    write_id: str
    batch: int
    files: tuple[StagedFile, ...]
    kept: bool = True
    streaming: bool = False
    new_partitions: int | None = None


@contextmanager
def owning(
    world: World,
    root: str,
    settings: BrokerSettings,
    wait_ms: int,
    is_shared: Callable[[str], bool] | None = None,
) -> Iterator[BrokerEngine | None]:
    """The folder, owned; waits for a while where somebody else has it, as other writes may be at their commits.

    None where whoever has it lets others in.
    """
    deadline_ns = world.clock.monotonic_ns() + wait_ms * 1_000_000
    engine: BrokerEngine | None = None
    while engine is None:
        try:
            engine = BrokerEngine.open(root, create=False, settings=settings, world=world)
        except Busy as error:
            if is_shared is not None and is_shared(root):
                yield None
                return
            if world.clock.monotonic_ns() >= deadline_ns:
                owner = str(error).partition("; ")[0]
                raise Busy(
                    f"{owner}, and does not share it: Spark can write there only while no such process owns it. Close "
                    "it there, then write again; nothing is lost or doubled by that"
                ) from None
            world.clock.wait(threading.Event(), _LOOK_AGAIN_S)
    try:
        yield engine
    finally:
        engine.close()


def commit(engine: BrokerEngine, write: Write) -> bool:
    """Bring the rows into the log, or learn that they are there: then the answer is False."""
    staging = Staging(engine.world, engine.folder)
    finish_pending(engine, write.write_id)
    done = staging.done(write.write_id)
    fresh = done.batch < write.batch
    if not fresh:
        _check_again(write, done)
    elif write.files:
        with translated(staging.root):
            staging.check_there(write.write_id, write.batch, write.files)
        manifest = _manifest(engine, write)
        staging.note_manifest(manifest)
        with _telling_that_it_counts(write):
            _carry_out(engine, staging, manifest, resumed=False)
    try:
        staging.tidy()
    except (HoldfastError, OSError) as error:  # the rows are in the log; whoever commits next tidies up
        logger.warning("staged rows not removed", extra={"folder": staging.root, "error": str(error)})
    return fresh


def _check_again(write: Write, done: Done) -> None:
    """Refuse what has the number of a batch that was written, and is another one."""
    if write.streaming and write.batch < done.batch:
        raise InvalidRequest(
            f"batch {write.batch} of query {write.write_id} came again, and those up to {done.batch} are written: "
            "its checkpoint is a copy, or older than what the query wrote. Nothing was written; start the query with a "
            "new checkpoint, at the offsets where the old one ended"
        )
    topics = {lane.topic for staged in write.files for lane, _ in staged.lanes}
    if write.batch == done.batch and done.topics and topics.isdisjoint(done.topics) and topics:
        raise InvalidRequest(
            f"batch {write.batch} of write {write.write_id} was written to {', '.join(done.topics)}, and now it comes "
            f"for {', '.join(sorted(topics))}. Nothing was written; give each write an id, or each batch a number, of "
            "its own"
        )


@contextmanager
def _telling_that_it_counts(write: Write) -> Iterator[None]:
    """Whoever has no number to try again with must know that the rows will come."""
    try:
        yield
    except HoldfastError as error:
        if not write.kept:
            told = "do not write them again, the next write of Spark's to this folder brings them in"
            error.args = (f"{error}. The rows are committed all the same: {told}",)
        raise


def finish_pending(engine: BrokerEngine, write_id: str | None = None) -> int:
    """Finish the commits that were cut short; answers how many. One that cannot be stops none but its own write."""
    staging = Staging(engine.world, engine.folder)
    finished = 0
    with translated(staging.root):
        found = list(staging.pending())
    for manifest in found:
        try:
            _carry_out(engine, staging, manifest, resumed=True)
            finished += 1
        except HoldfastError as error:
            if manifest.write_id == write_id:
                raise
            facts = {"write": manifest.write_id, "batch": manifest.batch, "error": str(error)}
            logger.warning("a commit that was cut short cannot be finished", extra=facts)
    return finished


def _manifest(engine: BrokerEngine, write: Write) -> Manifest:
    """The batch as it will be written down, after a look at all that could keep it from being carried out."""
    rows: dict[Lane, int] = {}
    for staged in write.files:
        for lane, count in staged.lanes:
            rows[lane.bare] = rows.get(lane.bare, 0) + count
    _check_topics(engine, write)
    starts = []
    for lane, count in sorted(rows.items()):
        if count > _MOST_ROWS:
            raise InvalidRequest(f"{count} rows for one partition of {lane.topic} are too many; write them in parts")
        with _topic(engine, lane.topic) as topic:
            partition = topic.partition(lane.partition)
            partition.sync()  # what lies below the noted ends must never be lost: they would say too little
            intake = 0 if partition.delayed is None else partition.delayed.intake.written_end
            starts.append(LaneStart(lane, topic.id, partition.log.written_end, intake))
    return Manifest(
        write_id=write.write_id,
        batch=write.batch,
        kept=write.kept,
        noted_at_ms=engine.world.clock.now_ns() // 1_000_000,
        lanes=tuple(starts),
        files=write.files,
    )


def _check_topics(engine: BrokerEngine, write: Write) -> None:
    """The topics are those that the tasks found, or are made now."""
    wanted = write.new_partitions
    for name, topic_id in sorted({(lane.topic, lane.topic_id) for staged in write.files for lane, _ in staged.lanes}):
        if not topic_id and wanted is not None:
            if name not in engine.catalog:
                engine.create_topic(name, changes={"partitions": wanted})
            there = engine.catalog.facts(name).partitions
            if there != wanted:
                raise Unavailable(
                    f"topic {name} was made by somebody else meanwhile: it has {there} partitions, and the rows were "
                    f"meant for {wanted}. Nothing was written; write again"
                )
        with _topic(engine, name, topic_id):
            pass


@contextmanager
def _topic(engine: BrokerEngine, name: str, topic_id: int = 0) -> Iterator[Topic]:
    with engine.using(name) as topic:
        if topic_id not in (0, topic.id):
            raise UnknownTopic(
                f"topic {name} was deleted and made anew while rows were on their way to it; they were for the old "
                "one, and are not written"
            )
        yield topic


def _carry_out(engine: BrokerEngine, staging: Staging, manifest: Manifest, *, resumed: bool) -> None:
    writer = Writer(engine.world, manifest, resumed)
    with ExitStack() as topics:
        tracks: dict[Lane, Track] = {}
        partitions: list[Partition] = []
        for start in manifest.lanes:
            lane = start.lane
            try:
                topic = topics.enter_context(_topic(engine, lane.topic, start.topic_id))
            except UnknownTopic:
                if not resumed:
                    raise
                told = {"write": manifest.write_id, "batch": manifest.batch, "topic": lane.topic}
                logger.warning("rows on their way to a topic went with it when it was deleted", extra=told)
                tracks[lane] = NoTrack()
                continue
            partition = topic.partition(lane.partition)
            partitions.append(partition)
            tracks[lane] = writer.general(partition, start) if lane.general else writer.plain(partition, start)
        last: dict[tuple[str, int], Track] = {}
        for staged in manifest.files:
            for lane, frame, stored in staging.frames(manifest, staged):
                track = tracks[lane.bare]
                before = last.setdefault((lane.topic, lane.partition), track)
                if before is not track:
                    before.make_way()
                    last[lane.topic, lane.partition] = track
                track.take(frame, stored)
            for track in tracks.values():  # before the file is let go
                track.put_down()
        for partition in partitions:
            partition.sync()
    staging.note_done(manifest)
