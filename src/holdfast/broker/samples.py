"""Samples of the last seven days, in a file of bounded size that nobody depends on.

Every sample is merged into three rings of slots (see `codec/samples.py`): one of 5 seconds for a quarter of an hour,
one of a minute for six hours, one of 15 minutes for seven days. Counts add up in a slot; of levels, such as the number
of ready messages, the highest stays. So the slot of a step that is still under way is always as complete as it can be,
nothing has to be summed up at the end of a step, and a restart in its midst goes on where it was.

Samples are expendable, and everything here follows from that. The blocks are kept in memory as they are in the file.
Changed slots are written in place about once a minute, without a sync: the death of the process costs at most that
minute, and a power cut whatever the kernel had not written. A slot that was half written fails its checksum and counts
as empty. A file that cannot be used is replaced, and one that cannot be written is tried again a minute later;
meanwhile the samples stay in memory. No error leaves this module.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias, cast

import msgspec

from holdfast.broker.folder.layout import TOPICS
from holdfast.codec import samples
from holdfast.env import World
from holdfast.env.disk import File, write_fully
from holdfast.env.process import get_logger
from holdfast.storage.files import join

logger = get_logger(__name__)

SAMPLES: Final = "samples"
MOST_SERIES: Final = 100
TOTAL: Final = samples.SeriesKey("total")
_LEAST_FREE_BYTES: Final = 16 * 1024 * 1024  # with less room on the disk, samples leave it to messages

Mode: TypeAlias = Literal["total", "topic", "queue", "stream"]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One step of time: rates in messages per second, the highest levels, and quantiles of the handling time.

    `oldest_seconds` is the age of the oldest message not handled. The quantiles are null if nothing was acked.
    """

    at: datetime
    published_rate: float
    handled_rate: float
    failed_rate: float
    ready: int
    dead: int
    oldest_seconds: float
    handle_p50_seconds: float | None
    handle_p99_seconds: float | None


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of a group, of a topic without groups in queue mode, or of all together, oldest first.

    Steps in which nothing was sampled, because the topic or the folder was closed, are left out.
    """

    topic: str
    group: str
    mode: Mode
    step_seconds: int
    since: datetime
    until: datetime
    samples: list[Sample]


def ring_for(span_s: float) -> samples.Ring:
    """The finest ring that covers this time up to now."""
    return next((ring for ring in samples.RINGS if span_s <= ring.span_s), samples.RINGS[-1])


class _Block:
    """A series in memory, as it is in the file, and the slots that the file does not have yet."""

    __slots__ = ("busy", "content", "dirty", "is_new", "key", "used_s")

    def __init__(self, key: samples.SeriesKey, content: bytearray | None = None) -> None:
        self.key = key
        self.is_new = content is None
        self.content = (
            bytearray(samples.series_header(key).ljust(samples.SERIES_BYTES, b"\0")) if content is None else content
        )
        self.dirty: set[int] = set()
        self.busy = 0.0  # recent traffic, by which series are kept when there are too many
        self.used_s = 0


class SampleStore:
    """The samples of one data folder. Thread-safe."""

    def __init__(self, world: World, folder: str, *, most_series: int = MOST_SERIES) -> None:
        self._world = world
        self._folder = folder
        self._path = join(folder, SAMPLES)
        self._most = most_series
        self._lock = threading.Lock()
        self._blocks: list[_Block] | None = None  # None until they are needed: opening a folder reads none
        self._places: dict[samples.SeriesKey, _Block] = {}
        self._renew = False  # the file cannot be used, and is replaced
        self._logged_error = ""

    def merge(
        self, key: samples.SeriesKey, sample: samples.Slot, quantiles: Iterable[tuple[float, float]] | None = None
    ) -> bool:
        """Add a sample to its slot in each ring; returns False if there is no room for the series.

        `quantiles` are the median and the 99th percentile of the handling time in each ring's slot so far.
        """
        with self._lock:
            block = self._block(key)
            if block is None:
                return False
            block.used_s = sample.at_s
            known = iter(quantiles or ())
            for ring in samples.RINGS:
                self._merge(block, ring, sample, next(known, None))
            return True

    def _merge(
        self, block: _Block, ring: samples.Ring, sample: samples.Slot, quantiles: tuple[float, float] | None
    ) -> None:
        at_s = sample.at_s // ring.step_s * ring.step_s
        position = ring.position(at_s)
        before = samples.read_slot(block.content, position)
        if before is None or before.at_s != at_s:
            before = samples.Slot(at_s)
        p50_s, p99_s = quantiles or (before.handle_p50_s, before.handle_p99_s)
        merged = samples.Slot(
            at_s,
            before.published + sample.published,
            before.handled + sample.handled,
            before.failed + sample.failed,
            max(before.ready, sample.ready),
            max(before.dead, sample.dead),
            max(before.oldest_s, sample.oldest_s),
            p50_s,
            p99_s,
        )
        samples.write_slot(block.content, position, merged)
        block.dirty.add(position)

    def read(self, key: samples.SeriesKey, span_s: float) -> Samples:
        """The samples of the last `span_s` seconds; none if the series has no place here."""
        now_ns = self._world.clock.now_ns()
        ring = ring_for(span_s)
        now_s = now_ns // 1_000_000_000
        last_s = now_s // ring.step_s * ring.step_s
        first_s = last_s - (max(min(math.ceil(span_s / ring.step_s), ring.steps), 1) - 1) * ring.step_s
        with self._lock:
            block = self._loaded().get(key)
            times = range(max(first_s, 0), last_s + 1, ring.step_s)
            slots = [None if block is None else samples.read_slot(block.content, ring.position(at_s)) for at_s in times]
        found = [
            _sample(slot, min(ring.step_s, max(now_s - slot.at_s, 1)))
            for at_s, slot in zip(times, slots, strict=True)
            if slot is not None and slot.at_s == at_s
        ]
        return Samples(
            topic=key.topic,
            group=key.group,
            mode=cast(Mode, key.mode),
            step_seconds=ring.step_s,
            since=_time(times.start),
            until=datetime.fromtimestamp(now_ns / 1e9, UTC),
            samples=found,
        )

    def has(self, key: samples.SeriesKey) -> bool:
        """Whether the series is sampled, or was."""
        with self._lock:
            return key in self._loaded()

    def series(self) -> list[samples.SeriesKey]:
        """What is sampled, or was."""
        with self._lock:
            return list(self._loaded())

    def note_traffic(self, traffic: dict[samples.SeriesKey, float]) -> None:
        """Give blocks to the busiest series; called once a minute with the messages of that minute.

        A series that has a block keeps it until another one has twice its traffic, so that they do not take turns.
        """
        with self._lock:
            blocks = self._loaded()
            for key, block in blocks.items():
                block.busy = block.busy * 0.98 + traffic.get(key, 0.0)
            waiting = sorted((key for key in traffic if key not in blocks), key=lambda key: -traffic[key])
            for key in waiting:
                least = min(
                    (block for block in blocks.values() if block.key != TOTAL),
                    key=lambda block: (block.busy, block.used_s),
                    default=None,
                )
                if len(blocks) < self._most or least is None or traffic[key] <= 2 * least.busy:
                    break
                del blocks[least.key]
                assert self._blocks is not None
                blocks[key] = self._blocks[self._blocks.index(least)] = block = _Block(key)
                block.busy = traffic[key]

    def save(self) -> None:
        """Write what has changed to the file. A failure is logged once, and costs nothing but samples."""
        with self._lock:
            blocks = [] if self._blocks is None else self._blocks
            if not any(block.dirty or block.is_new for block in blocks):
                return
            disk = self._world.disk
            try:
                if not disk.exists(join(self._folder, TOPICS)):
                    return  # a folder with only samples in it would not be recognized as a data folder
                if disk.free_bytes(self._folder) < _LEAST_FREE_BYTES:
                    return
                with closing(disk.open(self._path, write=True, create=True)) as file:
                    self._write(file, blocks)
                self._logged_error = ""
            except OSError as error:
                self._tell("samples could not be written", error)

    def _write(self, file: File, blocks: list[_Block]) -> None:
        if self._renew or file.size() < samples.HEADER_BYTES:
            file.truncate(0)
            write_fully(file, 0, [samples.file_header()])
            for block in blocks:
                block.is_new = True
            self._renew = False
        for number, block in enumerate(blocks):
            start = samples.HEADER_BYTES + number * samples.SERIES_BYTES
            if block.is_new:
                write_fully(file, start, [block.content])
            else:
                for first, end in _runs(block.dirty):
                    write_fully(file, start + first, [block.content[first:end]])
            block.is_new = False
            block.dirty.clear()

    def _block(self, key: samples.SeriesKey) -> _Block | None:
        blocks = self._loaded()
        found = blocks.get(key)
        if found is None and len(blocks) < self._most:
            found = blocks[key] = _Block(key)
            assert self._blocks is not None
            self._blocks.append(found)
        return found

    def _loaded(self) -> dict[samples.SeriesKey, _Block]:
        """The series by key, read from the file on first use."""
        if self._blocks is None:
            self._blocks = []
            try:
                self._load(self._blocks)
            except OSError as error:
                self._tell("samples could not be read", error)
            if not any(block.key == TOTAL for block in self._blocks):
                del self._blocks[self._most - 1 :]
                self._blocks.append(_Block(TOTAL))
            self._places = {block.key: block for block in self._blocks}
        return self._places

    def _load(self, blocks: list[_Block]) -> None:
        if not self._world.disk.exists(self._path):
            return
        with closing(self._world.disk.open(self._path)) as file:
            problem = samples.file_problem(file.read(0, samples.HEADER_BYTES))
            if problem is not None:
                self._renew = True
                logger.warning("samples start over", extra={"file": self._path, "error": problem})
                return
            for content in _blocks_in(file, self._most):
                key = samples.parse_series(content)
                if key is None or any(block.key == key for block in blocks):
                    self._renew = True  # this block is left out, so the others move up
                else:
                    blocks.append(_Block(key, content))

    def _tell(self, what: str, error: OSError) -> None:
        if str(error) != self._logged_error:  # once, not every minute
            self._logged_error = str(error)
            logger.warning(what, extra={"file": self._path, "error": str(error)})


def check_samples(world: World, folder: str) -> str | None:
    """What is wrong with the file of samples in a data folder; None if nothing is, or if there is none."""
    path = join(folder, SAMPLES)
    if not world.disk.exists(path):
        return None
    with closing(world.disk.open(path)) as file:
        problem = samples.file_problem(file.read(0, samples.HEADER_BYTES))
        if problem is not None:
            return f"{path} cannot be used: {problem}; opening the folder starts a new one. Only charts lose data"
        damaged = slots = 0
        for content in _blocks_in(file, MOST_SERIES):
            if samples.parse_series(content) is None:
                damaged += 1
            else:
                slots += samples.damaged_slots(content)
    if not damaged and not slots:
        return None
    return f"{path} is damaged: {damaged} series and {slots} samples are left out. Only charts lose data"


def _blocks_in(file: File, most: int) -> Iterator[bytearray]:
    size = file.size()
    for number in range(most):
        start = samples.HEADER_BYTES + number * samples.SERIES_BYTES
        if start + samples.SERIES_BYTES > size:
            return
        yield bytearray(file.read(start, samples.SERIES_BYTES))


def _runs(positions: set[int]) -> Iterator[tuple[int, int]]:
    """The parts of a block that these slots take up; neighbours are one part."""
    first = end = -1
    for position in sorted(positions):
        if position != end:
            if end >= 0:
                yield first, end
            first = position
        end = position + samples.SLOT_BYTES
    if end >= 0:
        yield first, end


def _sample(slot: samples.Slot, seconds: int) -> Sample:
    """A slot as a sample; the step may still be under way, so only the seconds that passed count."""
    return Sample(
        at=_time(slot.at_s),
        published_rate=slot.published / seconds,
        handled_rate=slot.handled / seconds,
        failed_rate=slot.failed / seconds,
        ready=round(slot.ready),
        dead=round(slot.dead),
        oldest_seconds=slot.oldest_s,
        handle_p50_seconds=None if math.isnan(slot.handle_p50_s) else slot.handle_p50_s,
        handle_p99_seconds=None if math.isnan(slot.handle_p99_s) else slot.handle_p99_s,
    )


def _time(at_s: int) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)


# Samples as lines for charts: on an even grid, with gaps, and on a scale that a burst does not flatten.


Line: TypeAlias = Sequence[float | None]

# One burst may be so much above the rest before the scale ends below it.
_BURST: Final = 4.0
_USUAL: Final = 0.95
_MARGIN: Final = 1.5


def line_of(samples: Samples, field: str) -> list[float | None]:
    """The values of a field for each step of the time asked for, oldest first; None where nothing was sampled."""
    start_s, step_s = round(samples.since.timestamp()), samples.step_seconds
    steps = round(samples.until.timestamp() - start_s) // step_s + 1
    line: list[float | None] = [None] * max(steps, 1)
    for sample in samples.samples:
        place = (round(sample.at.timestamp()) - start_s) // step_s
        if 0 <= place < len(line):
            line[place] = getattr(sample, field)
    return line


def squeezed(line: Line, columns: int) -> list[float | None]:
    """The line in at most so many columns; each shows the highest of its values, so that no peak is lost."""
    if len(line) <= columns:
        return list(line)
    found: list[float | None] = []
    for i in range(columns):
        some = [value for value in line[i * len(line) // columns : (i + 1) * len(line) // columns] if value is not None]
        found.append(max(some, default=None))
    return found


def peak_of(*lines: Line) -> float:
    """The highest value of all lines; 0 if they have none."""
    return max((value for line in lines for value in line if value is not None), default=0.0)


def top_of(*lines: Line) -> float:
    """Where the scale of these lines ends: at the peak, or lower if one burst is far above all the rest."""
    values = sorted(value for line in lines for value in line if value)
    if not values:
        return 0.0
    usual = values[int((len(values) - 1) * _USUAL)] * _MARGIN
    return usual if values[-1] > _BURST * usual else values[-1]
