"""A range of offsets as Arrow record batches, straight from the segment files."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.broker.marks import MOVED, ONLY_FOR
from holdfast.codec.arrow_columns import FrameColumns
from holdfast.codec.columns import FLAGS
from holdfast.codec.frame import Frame, Kind
from holdfast.errors import DamagedRange, OffsetOutOfRange, UnknownFormat
from holdfast.spark.folder import DataFolder
from holdfast.spark.schema import Maker, Source

logger = logging.getLogger(__name__)

# A batch ends at either: enough rows to spread what a batch costs, few enough bytes for any executor.
_MOST_ROWS: Final = 32_768
_MOST_BYTES: Final = 8 << 20


class Range(msgspec.Struct, frozen=True):
    """The messages [start, stop) of one partition."""

    topic: str
    partition: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"offsets {self.start} to {self.stop - 1} of {self.topic}/{self.partition}"


class Reading(msgspec.Struct, frozen=True):
    """What to do with messages that are damaged, gone, or for one group only."""

    skip_corrupt: bool = False
    fail_on_data_loss: bool = True
    include_redriven: bool = False


def record_batches(folder: DataFolder, wanted: Range, maker: Maker, reading: Reading) -> Iterator[pa.RecordBatch]:
    """The messages of the range, in order. No more than one batch is held at a time, however large the range."""
    gathered: list[Frame] = []
    rows = size = 0
    for frame in _frames(folder, wanted, reading):
        gathered.append(frame)
        rows += frame.count
        size += frame.header.raw_bytes
        if rows >= _MOST_ROWS or size >= _MOST_BYTES:
            yield from _batch(gathered, wanted, maker, reading)
            gathered, rows, size = [], 0, 0
    if gathered:
        yield from _batch(gathered, wanted, maker, reading)


def _frames(folder: DataFolder, wanted: Range, reading: Reading) -> Iterator[Frame]:
    """The frames that hold messages of the range."""
    reader = folder.reader(wanted.topic, wanted.partition)
    at = wanted.start
    while reader is not None and at < wanted.stop:
        try:
            for frame in reader.read(at):
                if frame.base_offset >= wanted.stop:
                    return
                if frame.header.kind == Kind.DATA:
                    yield frame
                at = frame.next_offset
            reach = at
        except DamagedRange as damage:
            if not reading.skip_corrupt:
                raise
            until = min(damage.next_offset, wanted.stop)
            _warn("damaged messages passed over", wanted, until - max(damage.first_offset, at), str(damage))
            at = damage.next_offset
            continue
        except OffsetOutOfRange as gone:
            if at < gone.start:  # retention was faster
                if reading.fail_on_data_loss:
                    raise lost(wanted, gone.start) from None
                _warn("messages are gone, passed over", wanted, min(gone.start, wanted.stop) - at, str(gone))
                at = gone.start
                continue
            reach = gone.end
        except UnknownFormat as error:
            raise UnknownFormat(f"{wanted} cannot be read: {error}") from None
        if reach < wanted.stop:
            _end_too_early(wanted, reach, reader.start, reading)
        return


def _end_too_early(wanted: Range, end: int, start: int, reading: Reading) -> None:
    """The log ends before the range does: its tail went with a power cut after the range was planned."""
    if reading.fail_on_data_loss:
        raise OffsetOutOfRange(
            f"{wanted.topic}/{wanted.partition} ends at {end}, and {wanted} were to be read: messages that were not "
            "synced were lost. Read again what is there now",
            offset=wanted.stop,
            start=start,
            end=end,
        )
    _warn("messages are gone, passed over", wanted, wanted.stop - end, "the log ends before")


def _batch(frames: Sequence[Frame], wanted: Range, maker: Maker, reading: Reading) -> Iterator[pa.RecordBatch]:
    columns = FrameColumns(frames)
    batch = maker.batch(Source(columns, wanted.topic, wanted.partition))
    below = max(wanted.start - frames[0].base_offset, 0)
    above = max(frames[-1].next_offset - wanted.stop, 0)
    kept = columns.kept()
    if not reading.include_redriven:
        kept = _without_redriven(frames, columns, kept)
    if below or above:
        batch = batch.slice(below, columns.rows - below - above)
        kept = None if kept is None else kept[below : columns.rows - above]
    if kept is not None:
        batch = batch.filter(pa.array(kept))
    if batch.num_rows:
        yield batch


def _without_redriven(
    frames: Sequence[Frame], all_columns: FrameColumns, kept: np.ndarray[Any, np.dtype[np.bool_]] | None
) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """Leave out what came back for one group: everybody else has had it."""
    if not (all_columns.flags() & MOVED).any():
        return kept
    at = 0
    for frame in frames:
        if frame.header.columns & FLAGS:
            columns = frame.columns()
            moved = [i for i, flags in enumerate(columns.flags() or ()) if flags & MOVED]
            headers = columns.headers() if moved else None
            back = [at + i for i in moved if headers and any(name == ONLY_FOR for name, _ in headers[i])]
            if back:
                kept = np.ones(sum(frame.count for frame in frames), np.bool_) if kept is None else kept
                kept[back] = False
        at += frame.count
    return kept


def lost(wanted: Range, start: int) -> OffsetOutOfRange:
    """Messages that were to be read are no longer there."""
    until = min(start, wanted.stop)
    return OffsetOutOfRange(
        f"{until - wanted.start} messages of {wanted.topic}/{wanted.partition} are gone: retention removed those "
        f"before offset {start}, and reading was to begin at {wanted.start}. To go on without them, set the option "
        '"failOnDataLoss" to false',
        offset=wanted.start,
        start=start,
        end=wanted.stop,
    )


def _warn(what: str, wanted: Range, messages: int, why: str) -> None:
    logger.warning("%s: %d of %s (%s)", what, messages, wanted, why)
