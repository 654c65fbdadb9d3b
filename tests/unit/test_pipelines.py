"""Pipelines as far as they need no JVM: what they are told, how a batch comes to count, who may run them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from pyarrow import parquet as pq

pytest.importorskip("pyspark")

from holdfast.env import real_world
from holdfast.env.disk import LakeDisk
from holdfast.errors import BadSettings, Busy, ExpectationFailed, HoldfastError, InvalidRequest
from holdfast.spark.pipelines.batches import check_failures, unmet_sql
from holdfast.spark.pipelines.checkpoint import KEPT, Ledger, LedgerBatch, check_fit, forget, held
from holdfast.spark.pipelines.lake import additions, commit, finish_pending
from holdfast.spark.pipelines.parquet import batches_in, file_name, files_between
from holdfast.spark.pipelines.project import Pipeline, Runner, project_of, read_project
from holdfast.spark.pipelines.python import pipeline
from holdfast.spark.pipelines.spec import (
    Expectation,
    LakeOptions,
    Project,
    interval_ms,
    kind_named,
    kind_names,
    located,
    python_template,
    yaml_template,
)
from holdfast.spark.pipelines.stores import access_to
from holdfast.spark.session import in_words
from tests.unit.lake_kit import Crash, FrailDisk, changed, context_of, seen, staged

SHOP = """\
folder: shop
lake: lake
pipelines:
  orders-gold:   {kind: aggregate, source: orders-silver, time: at, window: "1 hour", by: [country]}
  orders-land:   {kind: land, topics: [orders], compact_files: true}
  orders-silver:
    kind: refine
    source: orders-land
    schema: "id long, amount double, at timestamp"
    key: id
    expect: [{name: positive, check: "amount > 0", on_fail: quarantine}]
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(HoldfastError) as raised:
        read_project(write(tmp_path / "p.yaml", text))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_yaml_and_python_make_the_same_pipelines(tmp_path):
    from_yaml = read_project(write(tmp_path / "p.yaml", SHOP))
    from_python = (
        Pipeline.land("orders", folder=tmp_path / "shop", lake=tmp_path / "lake", compact_files=True)
        .refine("id long, amount double, at timestamp", key="id")
        .expect("positive", "amount > 0", on_fail="quarantine")
        .aggregate(time="at", window="1 hour", by=["country"])
    )
    assert from_yaml.pipelines == from_python.project.pipelines
    assert (from_yaml.folder, from_yaml.lake) == (str(tmp_path / "shop"), str(tmp_path / "lake"))


def test_a_python_file_declares_pipelines_too(tmp_path):
    path = write(
        tmp_path / "p.py",
        "from holdfast.spark.pipelines.project import Pipeline\n"
        "orders = Pipeline.land('orders', folder='shop', lake='lake').refine(key='id')\n"
        "mails = Pipeline.land('mails', folder='shop', lake='lake')\n",
    )
    project = read_project(path)
    assert set(project.pipelines) == {"orders-land", "orders-silver", "mails-land"}
    assert project.folder == str(tmp_path / "shop")


def test_pipelines_run_behind_the_one_that_they_read_from(tmp_path):
    project = read_project(write(tmp_path / "p.yaml", SHOP))
    names = [spec.name for spec in project.in_order(["orders-gold", "orders-silver", "orders-land"])]
    assert names == ["orders-land", "orders-silver", "orders-gold"]
    assert [spec.name for spec in project.in_order(["orders-gold"])] == ["orders-gold"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("folder: a\nlake: b\npipelins: {}\n", "did you mean 'pipelines'?"),
        ("folder: a\npipelines: {x: {kind: land, topics: [t]}}\n", "lake is missing"),
        ("folder: a\nlake: b\n", "declares no pipelines"),
        ("folder: [a\n", "not YAML"),
        ("- a\n", "it must have the keys"),
        ("folder: a\nlake: b\npipelines: {x: {topics: [t]}}\n", "x: say what it does with kind"),
        ("folder: a\nlake: b\npipelines: {x: {kind: lannd, topics: [t]}}\n", "did you mean 'land'?"),
        ("folder: a\nlake: b\npipelines: {x: {kind: land, topcs: [t]}}\n", "did you mean 'topics'?"),
        ("folder: a\nlake: b\npipelines: {x: {kind: land, topics: t}}\n", "x: topics: expected `array`"),
        ("folder: a\nlake: b\npipelines: {x: {kind: land}}\n", "say which topics"),
        ("folder: a\nlake: b\npipelines: {x: {kind: refine}}\n", "needs a source"),
        (
            "folder: a\nlake: b\npipelines: {x: {kind: refine, source: y}}\n",
            "its source 'y' is not one of the pipelines",
        ),
        ("folder: a\nlake: b\npipelines: {x: {kind: refine, source: x}}\n", "from itself"),
        ("folder: a\nlake: b\npipelines: {../x: {kind: land, topics: [t]}}\n", "cannot be used"),
        ("folder: a\nlake: b\npipelines: {_x: {kind: land, topics: [t]}}\n", "choose another name"),
        ("folder: a\nlake: b\npipelines: {x: {kind: python, source: x}}\n", "name the Python file with file:"),
        ("folder: a\nlake: b\nfile: gone.py\npipelines: {}\n", "there is no file"),
        (
            "folder: a\nlake: b\npipelines: {x: {kind: land, topics: [t], expect: [{name: a, chek: b}]}}\n",
            "expect[0]: 'chek' is not known; did you mean 'check'?",
        ),
        (
            "folder: a\nlake: b\npipelines: {x: {kind: land, topics: [t], expect: [{name: a, check: b, on_fail: x}]}}",
            "on_fail",
        ),
        (
            "folder: a\nlake: b\npipelines: {x: {kind: aggregate, source: y, window: soon}, y: {kind: land}}\n",
            "window is 'soon': give a time",
        ),
        ("folder: a\nlake: b\npipelines: {2024: {kind: land, topics: [t]}}\n", "reads the name of a pipeline as 2024"),
        ("folder: a\nlake: b\npipelines:\n  x: {}\n  x: {}\n", "line 5: this is not YAML: 'x' appears twice"),
        (
            "folder: a\nlake: b\npipelines: {x: {kind: land, topics: [t], max_rows_per_batch: 0}}\n",
            "max_rows_per_batch",
        ),
        ("folder: a\nlake: b\npipelines: {x: {kind: land, topics: [t], target_file_bytes: 0}}\n", "target_file_bytes"),
        (
            "folder: a\nlake: b\npipelines: {x: {kind: land, topics: [t], starting: latest, since: -7d}}\n",
            "starting and since both say",
        ),
        (
            "folder: a\nlake: b\npipelines: {x: {kind: refine, source: y, max_rows_per_batch: -1}}\n",
            "x: max_rows_per_batch: expected `int` >= 1",
        ),
        (
            "folder: a\nlake: b\npipelines: {x: {kind: refine, source: y, expect: [{name: tombstone, check: b}]}}\n",
            "cannot be named 'tombstone' here",
        ),
        (
            "folder: a\nlake: b\npipelines: {x: {kind: aggregate, source: y, expect: [{name: late, check: b}]}}\n",
            "cannot be named 'late' here",
        ),
        ("folder: a\nlake: b\npipelines: {x: {kind: aggregate, source: y, by: [dt]}}\n", "'dt' cannot be used in by"),
        (
            "folder: a\nlake: b\npipelines: {x: {kind: aggregate, source: y, by: [a], measures: {a: sum(a)}}}\n",
            "'a' is both in by and in measures",
        ),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence_that_names_it(tmp_path, text, words):
    assert words in refused(tmp_path, text)


def test_a_mistake_in_a_file_of_ones_own_names_its_line(tmp_path):
    write(tmp_path / "mine.py", "x = 1\ny = x / 0\n")
    assert "mine.py, line 2: ZeroDivisionError" in refused(tmp_path, "folder: a\nlake: b\nfile: mine.py\n")


def test_functions_of_a_file_become_pipelines(tmp_path):
    write(
        tmp_path / "mine.py",
        "from holdfast.spark.pipelines.python import pipeline\n\n"
        "@pipeline(source='orders-land')\ndef big_orders(rows):\n    return rows\n",
    )
    text = "folder: a\nlake: b\nfile: mine.py\npipelines: {orders-land: {kind: land, topics: [orders]}}\n"
    project = read_project(write(tmp_path / "p.yaml", text))
    assert project.spec("big-orders").function(7) == 7
    again = f"{text[:-2]}, other: {{kind: python, source: orders-land, function: big_orders}}}}\n"
    assert read_project(write(tmp_path / "p.yaml", again)).spec("other").function(7) == 7


def test_what_stands_above_a_function_counts_where_the_entry_says_nothing_else(tmp_path):
    write(
        tmp_path / "mine.py",
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from holdfast.spark import pipeline\n\n"
        "@dataclass\nclass Rate:\n    rate: float\n\n"
        "@pipeline(source='l', expect=[{'name': 'a', 'check': 'b', 'on_fail': 'drop'}], partition_by=['c'])\n"
        "def big_orders(rows):\n    return rows\n\n"
        "def plain(rows):\n    return rows\n",
    )
    text = (
        "folder: a\nlake: b\nfile: mine.py\npipelines:\n  l: {kind: land, topics: [t], since: 2026-11-16}\n"
        "  big-orders: {kind: python, source: l, max_rows_per_batch: 7}\n  plain: {kind: python, source: l}\n"
    )
    project = read_project(write(tmp_path / "p.yaml", text))
    assert set(project.pipelines) == {"l", "big-orders", "plain"}
    options = project.spec("big-orders").options
    assert [each.on_fail for each in options.expect] == ["drop"]
    assert (options.partition_by, options.max_rows_per_batch) == (("c",), 7)
    assert project.spec("plain").function(7) == 7
    assert project.spec("l").options.since == "2026-11-16"


def test_two_pipelines_of_one_name_are_refused(tmp_path):
    land = Pipeline.land("orders", folder="shop", lake="lake", name="big-orders")
    with pytest.raises(InvalidRequest, match="two pipelines are named big-orders"):
        land.apply(pipeline(source="big-orders", name="big-orders")(lambda rows: rows))
    path = write(
        tmp_path / "p.py",
        "from holdfast.spark import Pipeline\n"
        "land = Pipeline.land('orders', folder='shop', lake='lake')\n"
        "strict = land.expect('a', 'key IS NOT NULL', on_fail='fail')\n"
        "silver = land.refine(key='id')\n",
    )
    with pytest.raises(BadSettings, match="two different pipelines named 'orders-land'"):
        read_project(path)


def test_an_expectation_of_a_function_is_checked_where_it_is_declared():
    with pytest.raises(BadSettings, match="did you mean 'check'"):
        pipeline(source="a", expect=[{"name": "x", "chekc": "y"}])(lambda rows: rows)


def test_every_template_can_be_read(tmp_path):
    home = {
        "orders-land": {"kind": "land", "topics": ["orders"]},
        "orders-silver": {"kind": "refine", "source": "orders-land"},
    }
    for kind in kind_names():
        if kind == "python":
            continue
        yaml = pytest.importorskip("yaml")
        document = yaml.safe_load(yaml_template("mine", kind, "p.yaml"))
        document["pipelines"] |= home
        assert project_of(document, "p.yaml").spec("mine").kind == kind
    named_like_a_number = write(tmp_path / "p.yaml", yaml_template("2024", "land", "p.yaml"))
    assert list(read_project(named_like_a_number).pipelines) == ["2024"]
    compile(python_template("my-own", "mine.py"), "mine.py", "exec")


def test_times_are_read_in_words_and_in_units():
    assert interval_ms("1 hour", "x") == interval_ms("1h", "x") == interval_ms("60 Minutes", "x") == 3_600_000
    with pytest.raises(BadSettings, match="window is 'whenever'"):
        interval_ms("whenever", "window")


def test_an_expectation_that_is_null_is_not_met():
    assert unmet_sql([]) == "cast(array() as array<string>)"
    assert unmet_sql([Expectation(name="a", check="x > 0")]) == (
        "array_compact(array(IF(coalesce((x > 0), false), NULL, 'a')))"
    )


def test_an_expectation_to_fail_on_stops_the_batch():
    expectations = [Expectation(name="a", check="x", on_fail="warn"), Expectation(name="b", check="y", on_fail="fail")]
    check_failures({"a": 5, "b": 0}, expectations, "p")
    with pytest.raises(ExpectationFailed, match=r"p: 2 rows do not meet 'b' \(y\)"):
        check_failures({"b": 2}, expectations, "p")


def test_files_say_which_batches_they_hold():
    names = [f"dt=2026-11-16/{file_name(*held)}" for held in ((0, 0, 0), (1, 4, 0), (5, 5, 0), (5, 5, 1))]
    assert batches_in(names[1]) == (1, 4)
    assert batches_in("dt=2026-11-16/part-0.parquet") is None
    assert files_between(names, -1, 9) == names
    assert files_between(names, 2, 4) == names[1:2]
    assert files_between(names, 4, 9) == names[2:]
    assert files_between(names, 5, 9) == []


@pytest.mark.slow
def test_a_ledger_keeps_its_sums_when_it_forgets_single_batches(tmp_path):
    ledger = Ledger(real_world(), str(tmp_path))
    for number in range(2 * KEPT + 1):
        batch = LedgerBatch(batch=number, rows_in=2, rows_out=1, expectations={"a": 1})
        (tmp_path / "batches").mkdir(exist_ok=True)
        (tmp_path / "batches" / f"{number:012d}.pending").write_bytes(
            json.dumps({"batch": number, "rows_in": 2, "rows_out": 1, "expectations": {"a": 1}}).encode()
        )
        ledger.finish(batch)
    totals = ledger.totals()
    assert len(ledger.numbers()) < 2 * KEPT
    assert (totals.batches, totals.rows_in, totals.expectations) == (
        2 * KEPT + 1,
        2 * (2 * KEPT + 1),
        {"a": 2 * KEPT + 1},
    )
    assert sum(batch.rows_out for batch in ledger.after(-1)) == 2 * KEPT + 1
    assert [batch.batch for batch in ledger.after(2 * KEPT - 1)] == [2 * KEPT]


@pytest.mark.parametrize("kept_as", ["delta", "parquet"])
def test_a_batch_that_was_cut_short_anywhere_is_there_once_after_the_next_run(tmp_path, kept_as):
    """Cut at every change of a name and every sync, such as between Delta's transaction and the ledger."""
    crashes = 0
    changes = (changed("p"), changed("p.quarantine")) if kept_as == "delta" else ()
    for calls in range(200):
        home = tmp_path / str(calls)
        sound = context_of(home, LakeDisk(), format=kept_as)
        first = additions(sound, staged(sound, "rows", a__1="x0", a__2="y0"), sound.table, 0)
        commit(sound, LedgerBatch(batch=0, adds=tuple(first), changes=changes[:1]))
        assert seen(sound) == ["x0", "y0"]
        frail = context_of(home, FrailDisk(calls), format=kept_as)
        try:
            adds = additions(frail, staged(frail, "rows", a__2="z1", a__3="v1"), frail.table, 1)
            adds += additions(frail, staged(frail, "bad", a__4="w1"), frail.quarantine, 1)
            commit(frail, LedgerBatch(batch=1, rows_out=2, adds=tuple(adds), changes=changes))
            ended = True
        except Crash:
            ended = False
            crashes += 1
            between = seen(sound)
            assert len(between) == len(set(between)), "a row is there twice"
            if kept_as == "delta":
                assert between in (["x0", "y0"], ["v1", "x0", "y0", "z1"]), "half a batch can be seen"
        decided = Ledger(sound.world, sound.checkpoint).pending() is not None
        finish_pending(sound)
        finish_pending(sound)
        last = Ledger(sound.world, sound.checkpoint).last()
        assert last is not None
        if last.batch == 1:
            assert seen(sound) == ["v1", "x0", "y0", "z1"]
            assert seen(sound, sound.quarantine) == ["w1"]
        else:
            assert not decided
            assert not ended
            assert seen(sound) == ["x0", "y0"]
        assert not Path(sound.staging).exists()
        if ended:
            break
    assert ended
    assert crashes > 10


def test_rows_that_are_merged_are_updated_once_wherever_it_was_cut_short(tmp_path):
    crashes = 0
    for calls in range(200):
        home = tmp_path / str(calls)
        sound, frail = context_of(home, LakeDisk()), context_of(home, FrailDisk(calls))
        first = additions(sound, staged(sound, "rows", a__1="x0", a__2="y0"), sound.table, 0)
        commit(sound, LedgerBatch(batch=0, adds=tuple(first), changes=(changed("p"),)))
        folder = Path(staged(frail, "rows", part="x1", more="z1"))
        for path in folder.rglob("*.parquet"):
            rows = pq.ParquetFile(path).read()
            pq.write_table(rows.append_column("a", [["1"]]), path)
        merged = changed("p", staged=os.path.relpath(folder, sound.project.lake), keys=("a", "key"))
        try:
            commit(frail, LedgerBatch(batch=1, changes=(merged,)))
            ended = True
        except Crash:
            ended, crashes = False, crashes + 1
            assert seen(sound) in (["x0", "y0"], ["x1", "y0", "z1"])
        finish_pending(sound)
        last = Ledger(sound.world, sound.checkpoint).last()
        assert last is not None
        assert seen(sound) == (["x1", "y0", "z1"] if last.batch == 1 else ["x0", "y0"])
        if ended:
            break
    assert ended
    assert crashes > 5


def test_a_second_runner_is_told_who_runs_the_pipeline(tmp_path):
    project = read_project(write(tmp_path / "p.yaml", SHOP))
    spec = project.spec("orders-land")
    with held(real_world(), project, spec), pytest.raises(Busy, match="is owned by process"):
        Runner(project).run(["orders-land"])
    with held(real_world(), project, spec):
        pass


def test_tables_can_be_read_by_others_and_checkpoints_cannot(tmp_path):
    before = os.umask(0o022)
    try:
        context = context_of(tmp_path, LakeDisk())
        with held(real_world(), context.project, context.spec):
            moves = additions(context, staged(context, "rows", a__1="x"), context.table, 0)
            commit(context, LedgerBatch(batch=0, adds=tuple(moves)))
    finally:
        os.umask(before)
    folders = [Path(context.project.lake), Path(context.table), Path(context.table) / "a=1", Path(context.checkpoint)]
    assert [oct(folder.stat().st_mode & 0o777) for folder in folders] == ["0o755", "0o755", "0o755", "0o700"]


def test_a_checkpoint_of_another_topic_is_refused_with_the_way_out(tmp_path):
    project = read_project(write(tmp_path / "p.yaml", SHOP))
    other = read_project(write(tmp_path / "p.yaml", SHOP.replace("topics: [orders]", "topics: [mails]")))
    world = real_world()
    with held(world, project, project.spec("orders-land")):
        check_fit(world, other, other.spec("orders-land"))  # nothing was begun, so it may still change
        check_fit(world, project, project.spec("orders-land"))
        Ledger(world, project.checkpoint("orders-land")).decide(LedgerBatch(batch=0))
        check_fit(world, project, project.spec("orders-land"))
        with pytest.raises(InvalidRequest, match="--full-refresh") as raised:
            check_fit(world, other, other.spec("orders-land"))
        assert 'made with topics ["orders"], but it is now ["mails"]' in str(raised.value)
        forget(world, other, other.spec("orders-land"))
        check_fit(world, other, other.spec("orders-land"))


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ("lake: http://host:7700", "lake is 'http://host:7700': tables are in a folder that all machines share, or in"),
        ("lake: s3://bucket/lake", "lake is s3://bucket/lake, and Spark cannot keep its checkpoints in a store: name"),
        ("{lake: lake, checkpoints: work}", "checkpoints is for a lake in a store: leave it out"),
        (
            "{lake: 'memory://lake', checkpoints: work}",
            "lake is memory://...: tables can be in a folder, or",
        ),
        ("{lake: 'postgresql://u:secret@h/d', checkpoints: work}", "lake is postgresql://...: tables can be in"),
        ("{lake: 's3://id:secret@bucket/lake', checkpoints: work}", "keys and options are not part of it, they come"),
        ("{lake: 's3://bucket/lake', checkpoints: 7}", "checkpoints must be the name of a folder"),
    ],
)
def test_a_lake_that_cannot_be_is_refused_before_anything_runs(tmp_path, places, words):
    given = yaml.safe_load(SHOP) | yaml.safe_load(places)
    with pytest.raises(BadSettings, match=re.escape(words)) as refused:
        located(read_project(write(tmp_path / "p.yaml", yaml.safe_dump(given))))
    assert "secret" not in str(refused.value)


def test_tables_in_a_store_have_their_checkpoints_in_a_folder_and_are_delta_tables(tmp_path):
    given = yaml.safe_load(SHOP) | {"lake": "s3://bucket/lake/", "checkpoints": "work"}
    assert read_project(write(tmp_path / "p.yaml", yaml.safe_dump(given))).lake == "s3://bucket/lake"
    project = located(read_project(write(tmp_path / "p.yaml", yaml.safe_dump(given))))
    assert project.table("orders-land") == "s3://bucket/lake/orders-land"
    assert project.checkpoint("orders-land") == f"{tmp_path}/work/_checkpoints/orders-land"
    given["pipelines"]["orders-land"]["format"] = "parquet"
    with pytest.raises(BadSettings, match="orders-land: a table in a store must be a Delta table: leave out format"):
        located(read_project(write(tmp_path / "p.yaml", yaml.safe_dump(given))))


def test_the_settings_of_a_store_come_from_the_environment_and_are_not_shown(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sesame")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "other")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    access = access_to("s3://bucket/lake")
    options = dict(access.options)
    assert (options["AWS_SECRET_ACCESS_KEY"], options["allow_http"]) == ("sesame", "true")
    assert "AZURE_STORAGE_ACCOUNT_KEY" not in options
    assert repr(access) == "StoreAccess('s3://bucket/lake')"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:9000")
    assert "allow_http" not in dict(access_to("s3://bucket/lake").options)


def test_following_is_not_faster_than_it_pays_and_not_for_what_has_an_end(tmp_path):
    project = read_project(write(tmp_path / "p.yaml", SHOP))
    with pytest.raises(InvalidRequest, match="give 100 ms or more"):
        Runner(project).run(["orders-land"], follow=True, every_ms=10)


def test_errors_of_ours_come_out_of_sparks_stacks_as_they_were():
    from pyspark.errors import PySparkException

    stack = "Job aborted\n  File x\nholdfast.errors.UnknownTopic: there is no topic ordres\n\tat org.apache..."
    found = in_words(PySparkException(stack), "p")
    assert (type(found).__name__, str(found)) == ("UnknownTopic", "p: there is no topic ordres")
    assert str(in_words(ValueError("no"), "p")) == "p: ValueError: no"


def test_the_docs_promise_once_for_every_kind_that_writes_a_table():
    page = (Path(__file__).parents[2] / "docs/explanation/spark-exactly-once.md").read_text("utf-8")
    [row] = [line for line in page.splitlines() if line.startswith("| a [pipeline]")]
    kinds = [name for name in kind_names() if issubclass(kind_named(name).options, LakeOptions)]
    assert [name for name in kinds if f"`{name}`" not in row] == []
    assert row.split("|")[2].strip() == "once"


def test_the_template_of_every_kind_names_it():
    for name in kind_names():
        assert kind_named(name).template.startswith(f"    kind: {name}\n")


def test_a_project_knows_its_pipelines_by_name(tmp_path):
    project = read_project(write(tmp_path / "p.yaml", SHOP))
    with pytest.raises(InvalidRequest, match="did you mean 'orders-land'"):
        project.spec("order-land")
    assert isinstance(project, Project)
