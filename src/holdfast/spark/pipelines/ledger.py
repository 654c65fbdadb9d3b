"""Which batches a pipeline has written: one small file for each, and that file is what makes the batch count.

    _checkpoints/NAME/batches/000000000012.pending   batch 12 is decided; its files are on their way into the tables
    _checkpoints/NAME/batches/000000000012.json      they are all there
    _checkpoints/NAME/batches/totals.json            the sum of those batches that are too old to be kept one by one

A pending batch is finished before anything else happens, from what stands in it. Whoever reads the table further on
takes batches up to the last one that is finished.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.env import World
from holdfast.errors import CorruptData
from holdfast.spark.pipelines.context import Progress, Summary
from holdfast.storage.files import durable_replace, join, read_file

if TYPE_CHECKING:
    from holdfast.spark.pipelines.context import Context


_NAME: Final = re.compile(r"([0-9]{12})\.(json|pending)")
KEPT: Final = 1_000


class Move(msgspec.Struct, frozen=True):
    """A file or a folder on its way from staging into a table, both from the lake's folder."""

    staged: str
    place: str


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch: what it counted, and which files make it up.

    `adds` are new files; `swaps` are folders that take the place of older ones. `through` is the last batch of the
    source's table that is in it, and `source_id` tells from which beginning of that pipeline. `offsets` are Spark's,
    where Spark says what a batch holds. `state` is the kind's own.
    """

    batch: int
    rows_in: int = 0
    rows_out: int = 0
    dropped: int = 0
    quarantined: int = 0
    duplicates: int = 0
    expectations: dict[str, int] = {}
    bytes: int = 0
    adds: tuple[Move, ...] = ()
    swaps: tuple[Move, ...] = ()
    through: int | None = None
    source_id: str | None = None
    offsets: str | None = None
    state: dict[str, Any] = {}
    at_ms: int = 0


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """The sum of the batches up to `through`."""

    through: int = -1
    batches: int = 0
    rows_in: int = 0
    rows_out: int = 0
    dropped: int = 0
    quarantined: int = 0
    duplicates: int = 0
    expectations: dict[str, int] = {}

    def and_(self, batch: Batch) -> Totals:
        failed = dict(self.expectations)
        for name, count in batch.expectations.items():
            failed[name] = failed.get(name, 0) + count
        return Totals(
            through=batch.batch,
            batches=self.batches + 1,
            rows_in=self.rows_in + batch.rows_in,
            rows_out=self.rows_out + batch.rows_out,
            dropped=self.dropped + batch.dropped,
            quarantined=self.quarantined + batch.quarantined,
            duplicates=self.duplicates + batch.duplicates,
            expectations=failed,
        )


class Ledger:
    """The batches of one pipeline. Reading needs no lock; only the holder of the checkpoint's lock writes."""

    def __init__(self, world: World, checkpoint: str) -> None:
        self._disk = world.disk
        self.folder = join(checkpoint, "batches")

    def numbers(self) -> list[int]:
        """The finished batches that are kept one by one, in order."""
        return self._numbered("json")

    def last(self) -> Batch | None:
        """The newest finished batch."""
        numbers = self.numbers()
        return self.read(numbers[-1]) if numbers else None

    def read(self, number: int) -> Batch:
        return self._decode(_file(number, "json"))

    def after(self, number: int) -> list[Batch]:
        """The finished batches beyond this one. Those that are no longer kept one by one come as one."""
        totals, found = self._beyond(number)
        if number < totals.through:
            return [Batch(batch=totals.through, rows_out=totals.rows_out), *found]
        return found

    def totals(self) -> Totals:
        """Everything that was ever written."""
        totals, found = self._beyond(-1)
        for batch in found:
            totals = totals.and_(batch)
        return totals

    def pending(self) -> Batch | None:
        """The batch that is decided but not finished, if there is one."""
        numbers = self._numbered("pending")
        with suppress(FileNotFoundError):  # finished since we looked
            return self._decode(_file(numbers[-1], "pending")) if numbers else None
        return None

    def decide(self, batch: Batch) -> None:
        """From here on the batch counts, whatever happens."""
        self._disk.make_folder(self.folder)
        durable_replace(self._disk, self.folder, _file(batch.batch, "pending"), msgspec.json.encode(batch))

    def finish(self, batch: Batch) -> None:
        """All files of a decided batch are where they belong."""
        number = batch.batch
        self._disk.rename(join(self.folder, _file(number, "pending")), join(self.folder, _file(number, "json")))
        self._disk.sync_folder(self.folder)
        self._forget_old()

    def _beyond(self, number: int) -> tuple[Totals, list[Batch]]:
        """The sums, and the batches that are neither in them nor up to this one."""
        while True:
            totals = self._totals()
            with suppress(FileNotFoundError):  # the holder of the lock has just added it to the sums: look again
                first = max(number, totals.through) + 1
                return totals, [self.read(each) for each in self.numbers() if each >= first]

    def _forget_old(self) -> None:
        numbers = self.numbers()
        if len(numbers) < 2 * KEPT:
            return
        totals = self._totals()
        for number in numbers[:-KEPT]:
            if number > totals.through:
                totals = totals.and_(self.read(number))
        durable_replace(self._disk, self.folder, "totals.json", msgspec.json.encode(totals))
        for number in numbers[:-KEPT]:
            self._disk.remove(join(self.folder, _file(number, "json")))

    def _totals(self) -> Totals:
        content = read_file(self._disk, join(self.folder, "totals.json"))
        return Totals() if content is None else msgspec.json.decode(content, type=Totals)

    def _numbered(self, end: str) -> list[int]:
        try:
            names = self._disk.names(self.folder)
        except FileNotFoundError:
            return []
        return [int(found[1]) for name in names if (found := _NAME.fullmatch(name)) and found[2] == end]

    def _decode(self, name: str) -> Batch:
        path = join(self.folder, name)
        content = read_file(self._disk, path)
        if content is None:
            raise FileNotFoundError(path)
        try:
            return msgspec.json.decode(content, type=Batch)
        except msgspec.MsgspecError as error:
            raise CorruptData(
                f"{path} is not what was written there ({error}); run the pipeline with --full-refresh to begin anew"
            ) from None


def _file(number: int, end: str) -> str:
    return f"{number:012d}.{end}"


# The counts of a run, gathered batch by batch.


class Tally:
    """Adds up what each batch counted and tells how far the run has come."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._totals = Totals()
        self._files = 0
        self.notes: list[str] = []
        self.lag: int | None = None

    @property
    def batches(self) -> int:
        return self._totals.batches

    def add(self, batch: Batch, lag: int | None = None) -> None:
        """One more batch is written; `lag` is what the source has beyond it."""
        self._totals = self._totals.and_(batch)
        self._files += len(batch.adds) + len(batch.swaps)
        self.lag = lag
        self._context.tell(
            Progress(
                pipeline=self._context.name,
                batch=batch.batch,
                rows_in=self._totals.rows_in,
                rows_out=self._totals.rows_out,
                lag=lag,
            )
        )

    def summary(self, **details: Any) -> Summary:
        totals = self._totals
        return Summary(
            pipeline=self._context.name,
            kind=self._context.spec.kind,
            batches=totals.batches,
            rows_in=totals.rows_in,
            rows_out=totals.rows_out,
            dropped=totals.dropped,
            quarantined=totals.quarantined,
            duplicates=totals.duplicates,
            expectations=totals.expectations,
            files=self._files,
            lag=self.lag,
            notes=tuple(self.notes),
            details=details,
        )
