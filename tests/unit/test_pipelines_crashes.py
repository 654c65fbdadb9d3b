"""Pipelines that are cut short, or looked at, in a bad moment; none of this needs a JVM."""

from __future__ import annotations

import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("pyspark")

from holdfast.env import real_world
from holdfast.env.disk import LakeDisk
from holdfast.errors import BadSettings, CorruptData, Fenced, InvalidRequest
from holdfast.spark.pipelines import land
from holdfast.spark.pipelines.checkpoint import (
    ID,
    RUN,
    Ledger,
    LedgerBatch,
    Totals,
    check_fit,
    end_run,
    forget,
    is_half_forgotten,
)
from holdfast.spark.pipelines.lake import additions, commit, finish_pending, table_files
from holdfast.spark.pipelines.parquet import file_name
from holdfast.spark.pipelines.project import Pipeline, Runner
from holdfast.spark.pipelines.python import pipeline
from holdfast.spark.pipelines.spec import Context, kind_named
from holdfast.spark.pipelines.streams import run_stream, write_batch_of
from tests.unit.lake_kit import Crash, FrailDisk, context_of, seen, staged


class Session:
    """As much of a session as a run without rows needs: its settings."""

    def __init__(self, **settings: str) -> None:
        self.settings = settings
        self.conf = self

    def get(self, name: str, otherwise: None) -> str | None:
        return self.settings.get(name, otherwise)

    def set(self, name: str, value: str) -> None:
        self.settings[name] = value

    def unset(self, name: str) -> None:
        del self.settings[name]


def chain(tmp_path: Path) -> Pipeline:
    return Pipeline.land("orders", folder=tmp_path / "shop", lake=tmp_path / "lake", name="l").refine(
        "id long", name="s"
    )


def finished(checkpoint: str, *batches: LedgerBatch) -> None:
    ledger = Ledger(real_world(), checkpoint)
    for batch in batches:
        ledger.decide(batch)
        ledger.finish(batch)


def test_a_full_refresh_that_was_cut_short_anywhere_is_finished_by_the_next_run(tmp_path):
    halves = 0
    for calls in range(100):
        sound = context_of(tmp_path / str(calls), LakeDisk(), format="parquet")
        place = (sound.world, sound.project, sound.spec)
        check = Path(sound.checkpoint)
        check.mkdir(parents=True)
        check_fit(*place)
        moves = additions(sound, staged(sound, "rows", a__1="x", a__2="y"), sound.table, 0)
        commit(sound, LedgerBatch(batch=0, adds=tuple(moves)))
        frail = context_of(tmp_path / str(calls), FrailDisk(calls), format="parquet")
        try:
            forget(frail.world, frail.project, frail.spec)
            ended = True
        except Crash:
            ended = False
        if is_half_forgotten(*place):
            halves += 1
            session: Any = Session()
            # There is no topic, so nothing is landed; but what was half removed is gone.
            [outcome] = Runner(sound.project, spark=session).run(["p"])
            assert outcome.error is not None
        known = Ledger(sound.world, sound.checkpoint).last() is not None
        assert seen(sound) == (["x", "y"] if known else [])
        if ended:
            assert not known
            assert not is_half_forgotten(*place)
            break
    assert ended
    assert halves > 3


def test_a_batch_is_decided_only_when_the_names_of_all_its_files_are_durable(tmp_path):
    synced = set()

    class Watched(LakeDisk):
        def sync_folder(self, folder: str) -> None:
            synced.add(folder.rstrip("/"))
            super().sync_folder(folder)

        def rename(self, old: str, new: str) -> None:
            if new.endswith(".pending"):
                rows = f"{context.staging}/rows"
                assert {f"{rows}/a=1", rows, context.staging, f"{lake}/_staging", lake} <= synced
            super().rename(old, new)

    context = context_of(tmp_path, Watched())
    lake = context.project.lake
    commit(
        context,
        LedgerBatch(batch=0, adds=tuple(additions(context, staged(context, "rows", a__1="x"), context.table, 0))),
    )
    assert seen(context) == ["x"]


def test_a_decided_batch_whose_files_are_gone_is_an_error_and_not_an_empty_batch(tmp_path):
    context = context_of(tmp_path, LakeDisk())
    moves = additions(context, staged(context, "rows", a__1="x"), context.table, 0)
    Ledger(context.world, context.checkpoint).decide(LedgerBatch(batch=0, adds=tuple(moves)))
    for path in Path(context.staging).rglob("*.parquet"):
        path.unlink()
    with pytest.raises(CorruptData, match="neither there nor in"):
        finish_pending(context)


def test_a_ledger_can_be_read_in_the_moment_in_which_a_batch_is_finished(tmp_path):
    class Late(LakeDisk):
        def names(self, folder: str) -> list[str]:
            found = super().names(folder)
            for path in Path(folder).glob("*.pending"):
                path.rename(path.with_suffix(".json"))
            return found

    context = context_of(tmp_path, Late())
    ledger = Ledger(context.world, context.checkpoint)
    ledger.decide(LedgerBatch(batch=0))
    assert ledger.pending() is None
    last = ledger.last()
    assert last is not None
    assert last.batch == 0


def test_a_ledger_can_be_read_in_the_moment_in_which_batches_are_summed_up(tmp_path):
    class Late(LakeDisk):
        def names(self, folder: str) -> list[str]:
            found = super().names(folder)
            (Path(folder) / "totals.json").write_bytes(msgspec.json.encode(Totals(through=1, batches=2, rows_out=7)))
            for number in (0, 1):
                (Path(folder) / f"{number:012d}.json").unlink(missing_ok=True)
            return found

    context = context_of(tmp_path, Late())
    finished(context.checkpoint, *(LedgerBatch(batch=number, rows_out=number + 3) for number in range(3)))
    ledger = Ledger(context.world, context.checkpoint)
    assert ledger.totals().rows_out == 12
    assert [(batch.batch, batch.rows_out) for batch in ledger.after(-1)] == [(1, 7), (2, 5)]


def test_a_listing_that_met_a_folder_as_it_was_removed_is_made_again(tmp_path):
    class Merged(LakeDisk):
        listings = 0

        def files_below(self, folder: str) -> list[str]:
            self.listings += 1
            return [file_name(0, 0, 0)] if self.listings == 1 else [file_name(0, 9, 0), file_name(10, 10, 0)]

    assert table_files(Merged(), str(tmp_path)) == [file_name(0, 9, 0), file_name(10, 10, 0)]


def test_a_query_that_outlived_its_run_writes_nothing(tmp_path):
    context = context_of(tmp_path, LakeDisk())
    check = Path(context.checkpoint)
    (check / "spark/offsets").mkdir(parents=True)
    (check / RUN).write_text("mine", encoding="ascii")
    entered, leave, order = threading.Event(), threading.Event(), []
    rows: Any = None

    def write(context: Context, rows: Any, batch: int, offsets: str | None) -> LedgerBatch:
        entered.set()
        assert leave.wait(60)
        order.append("written")
        return LedgerBatch(batch=batch)

    def end() -> None:
        end_run(context.world, context.checkpoint)
        order.append("ended")

    writer = threading.Thread(target=write_batch_of, args=(context.project, "p", "mine", write, rows, 0))
    writer.start()
    assert entered.wait(60)
    ender = threading.Thread(target=end)
    ender.start()
    leave.set()
    writer.join(60)
    ender.join(60)
    assert order == ["written", "ended"]  # a batch that was begun is finished first
    with pytest.raises(Fenced, match="batch 1 is left to the next one"):
        write_batch_of(context.project, "p", "mine", write, rows, 1)
    (check / RUN).write_text("another", encoding="ascii")
    with pytest.raises(Fenced):
        write_batch_of(context.project, "p", "mine", write, rows, 1)
    assert order == ["written", "ended"]


def test_the_state_after_a_batch_is_on_disk_before_the_batch_counts(tmp_path):
    class Synced(LakeDisk):
        """Notes what was synced, and when the ledger decided."""

        def __init__(self) -> None:
            self.done: list[str] = []

        def sync_file(self, path: str) -> None:
            super().sync_file(path)
            self.done.append(path)

        def sync_folder(self, path: str) -> None:
            super().sync_folder(path)
            self.done.append(path)

        def rename(self, old: str, new: str) -> None:
            super().rename(old, new)
            self.done.append(new)

    disk = Synced()
    context = context_of(tmp_path, disk)
    state = Path(context.checkpoint) / "spark/state"
    for name in ("0/_metadata/schema", "0/0/4.delta", "0/0/5.delta", "0/1/left-keys/5.delta", "0/1/left-keys/3.delta"):
        (state / name).parent.mkdir(parents=True, exist_ok=True)
        (state / name).write_bytes(b"state")
    commit(context, LedgerBatch(batch=4, offsets="v1"))
    decided = next(at for at, path in enumerate(disk.done) if path.endswith(".pending"))
    before = {str(Path(path).relative_to(state)) for path in disk.done[:decided] if Path(path).is_relative_to(state)}
    new = {"0/_metadata/schema", "0/0/5.delta", "0/1/left-keys/5.delta"}
    assert before == new | {".", "0", "0/_metadata", "0/0", "0/1", "0/1/left-keys"}


def test_the_function_for_each_batch_can_be_sent_to_another_process(tmp_path):
    own = chain(tmp_path).apply(pipeline(source="s", name="own")(lambda rows: threading.Lock()))
    sent: list[Any] = []

    class Rows:
        """Of Spark, as far as a query is started."""

        writeStream = property(lambda self: self)  # noqa: N815

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: self

        def foreachBatch(self, function: Any) -> Rows:  # noqa: N802
            sent.append(function)
            raise ValueError("enough")

    spec = own.project.spec("own")
    context = Context(world=real_world(), session=_no_session, project=own.project, spec=spec)
    Path(context.checkpoint).mkdir(parents=True)
    with pytest.raises(ValueError, match="enough"):
        run_stream(context, Rows(), land.write, lambda: None, output_mode="append")  # type: ignore[arg-type]
    project, name, *_ = pickle.loads(pickle.dumps(sent[0])).args
    assert (project.spec("own").function, name) == (None, "own")
    assert not (Path(context.checkpoint) / RUN).exists()


def _no_session() -> Any:
    raise AssertionError


def test_an_interrupt_frees_the_locks_only_when_nothing_runs_any_more(tmp_path):
    project = chain(tmp_path).project
    session: Any = Session(**{"spark.sql.session.timeZone": "Asia/Tokyo"})

    def runs() -> bool:
        return any(thread.name == "pipeline s" and thread.is_alive() for thread in threading.enumerate())

    def interrupt() -> None:
        while not runs():
            pass
        assert session.settings["spark.sql.session.timeZone"] == "UTC"
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        Runner(project, spark=session).run(["s"], follow=True, every_ms=60_000)
    assert not runs()
    assert session.settings == {"spark.sql.session.timeZone": "Asia/Tokyo"}


def test_rows_that_change_cannot_be_read_on_by_a_function_of_ones_own(tmp_path):
    own = chain(tmp_path).aggregate(name="g").apply(pipeline(source="g", name="own")(lambda rows: rows))
    with pytest.raises(BadSettings, match="its source g is of the kind aggregate: it must be land or refine or python"):
        Runner(own.project).plan(["own"])


def test_a_source_that_is_begun_anew_while_it_is_read_is_not_read_on(tmp_path):
    project = chain(tmp_path).project
    finished(project.checkpoint("l"), LedgerBatch(batch=0, rows_out=3), LedgerBatch(batch=1, rows_out=3))
    number = Path(project.checkpoint("l")) / ID
    number.write_text("one", encoding="ascii")
    finished(project.checkpoint("s"), LedgerBatch(batch=0, through=0, source_id="one"))
    Path(project.table("l")).mkdir(parents=True)
    (Path(project.table("l")) / file_name(1, 1, 0)).write_bytes(b"rows")

    def session() -> Any:
        number.write_text("two", encoding="ascii")
        raise ValueError("PATH_NOT_FOUND")

    context = Context(world=real_world(), session=session, project=project, spec=project.spec("s"))
    with pytest.raises(InvalidRequest, match="its source l was started over"):
        kind_named("refine").run(context)


def test_a_plan_says_that_the_source_was_begun_anew(tmp_path):
    project = chain(tmp_path).project
    finished(project.checkpoint("l"), LedgerBatch(batch=0, rows_out=3))
    (Path(project.checkpoint("l")) / ID).write_text("one", encoding="ascii")
    finished(project.checkpoint("s"), LedgerBatch(batch=0, through=0, source_id="one"))
    assert Runner(project).plan(["s"])[0].rows == 0
    (Path(project.checkpoint("l")) / ID).write_text("two", encoding="ascii")
    with pytest.raises(InvalidRequest, match="its source l was started over"):
        Runner(project).plan(["s"])
