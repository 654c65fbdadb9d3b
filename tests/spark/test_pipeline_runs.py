"""The pipelines beside the medallion, run on real folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deltalake
import pytest
from pyspark.sql import SparkSession

import holdfast
from holdfast.errors import Busy, CorruptData, InvalidRequest
from holdfast.spark.pipelines import replay as replay_module
from tests.spark.pipelines_kit import Kit


@pytest.fixture
def kit(spark: SparkSession, tmp_path: Path) -> Kit:
    return Kit(spark, tmp_path)


def publish(kit: Kit, topic: str, bodies: list[str], *, partitions: int = 2, **settings: Any) -> None:
    with holdfast.open_broker(kit.folder, body_type=str) as broker:
        broker.create_topic(topic, partitions=partitions, exist_ok=True, **settings)
        for number, body in enumerate(bodies):
            broker.publish(topic, body, key=f"customer-{number % 5}", headers={"from": "tests"})


def bodies(kit: Kit, topic: str) -> list[str]:
    with holdfast.open_broker(kit.folder, body_type=str) as broker:
        return [message.body for number in range(2) for message in broker.read(topic, partition=number, limit=1000)]


def orders(count: int, start: int = 0) -> list[str]:
    return [f"order {number}" for number in range(start, start + count)]


def test_a_replay_sends_a_slice_once_with_where_it_came_from(kit: Kit):
    publish(kit, "orders", orders(20))
    publish(kit, "again", [])
    kit.declare("again-now", "replay", topics=["orders"], to="again", key="customer-3", where="value != 'order 8'")
    plan = kit.plan("again-now")
    assert (plan.rows, plan.writes) == (3, ("topic again",))
    assert any("order 3" in note for note in plan.notes)
    assert bodies(kit, "again") == []

    summary = kit.run("again-now")
    assert (summary.rows_out, summary.lag) == (3, 0)
    assert kit.run("again-now").rows_out == 0
    with holdfast.open_broker(kit.folder, body_type=str) as broker:
        found = [message for number in range(2) for message in broker.read("again", partition=number)]
        old = [message for number in range(2) for message in broker.read("orders", partition=number)]
    assert sorted(message.body for message in found) == ["order 13", "order 18", "order 3"]
    names = {message.body: message.id for message in old}
    for message in found:
        headers = dict(message.headers.pairs)
        assert headers["replay-id"] == b"again-now"
        assert headers["replay-of"].decode() == names[message.body]
        assert headers["from"] == b"tests"
        assert message.key == b"customer-3"


def test_a_replay_that_was_cut_short_goes_on_and_doubles_nothing(kit: Kit, monkeypatch: pytest.MonkeyPatch):
    publish(kit, "orders", orders(20))
    publish(kit, "again", [])
    kit.declare("again-now", "replay", topics=["orders"], to="again", batch_rows=6, text=True)
    replace, calls = replay_module.durable_replace, 0

    def dies_behind_the_second_batch(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:  # the first settles what is sent
            raise OSError("the power is gone")
        replace(*args)

    monkeypatch.setattr(replay_module, "durable_replace", dies_behind_the_second_batch)
    with pytest.raises(OSError, match="power"):
        kit.run("again-now")
    monkeypatch.setattr(replay_module, "durable_replace", replace)
    sent = bodies(kit, "again")
    assert 6 < len(sent) < 20
    publish(kit, "orders", orders(5, start=100))  # which came too late for this replay

    assert "continues" in kit.plan("again-now").notes[0]
    kit.run("again-now")
    assert sorted(bodies(kit, "again")) == sorted(orders(20))
    assert kit.plan("again-now").notes == ("replay again-now is done",)


def test_messages_of_one_key_are_replayed_in_their_order(kit: Kit):
    publish(kit, "orders", orders(40))
    publish(kit, "again", [], partitions=1)
    kit.declare("again-now", "replay", topics=["orders"], to="again", batch_rows=10)
    kit.run("again-now")
    with holdfast.open_broker(kit.folder, body_type=str) as broker:
        found = broker.read("again")
    for customer in range(5):
        key = f"customer-{customer}".encode()
        assert [each.body for each in found if each.key == key] == [f"order {n}" for n in range(customer, 40, 5)]


def test_a_replay_is_not_changed_on_the_way_but_may_be_made_again(kit: Kit):
    publish(kit, "orders", orders(10))
    publish(kit, "again", [])
    kit.declare("again-now", "replay", topics=["orders"], to="again", starting_offsets={"orders": {0: 2, 1: 1}})
    first = kit.run("again-now").rows_out
    assert first == 7
    kit.declare("again-now", "replay", topics=["orders"], to="again")
    with pytest.raises(InvalidRequest, match=r"was started with starting_offsets .* give it another id"):
        kit.run("again-now")
    kit.declare("again-now", "replay", topics=["orders"], to="again", id="second")
    assert kit.run("again-now").rows_out == 10
    assert len(bodies(kit, "again")) == 17


def test_a_rate_is_kept_between_batches(kit: Kit):
    publish(kit, "orders", orders(12))
    publish(kit, "again", [])
    kit.declare("again-now", "replay", topics=["orders"], to="again", rate=6, batch_rows=6)
    assert kit.run("again-now").seconds >= 1


def test_a_replay_to_a_topic_that_is_not_there_is_not_begun(kit: Kit):
    publish(kit, "orders", orders(3))
    kit.declare("again-now", "replay", topics=["orders"], to="nowhere")
    with pytest.raises(InvalidRequest, match="there is no topic nowhere"):
        kit.run("again-now")


@pytest.mark.parametrize("kept_as", ["delta", "parquet"])
def test_the_lake_is_proved_against_the_queue(kit: Kit, kept_as: str):
    publish(kit, "orders", orders(30))
    kit.declare("landed", "land", topics=["orders"], format=kept_as)
    kit.declare("proof", "reconcile", source="landed")
    with pytest.raises(InvalidRequest, match="landed has not run yet"):
        kit.run("proof")
    summary = kit.run("landed", "proof")
    assert (summary.ok, summary.rows_in, summary.rows_out, summary.lag) == (True, 30, 30, 0)
    assert sum(in_lake for (in_lake,) in kit.rows("proof/hours", "in_lake")) == 30
    assert kit.rows("proof/differences", "fault") == []

    publish(kit, "orders", orders(5, start=30))  # not landed yet, which is no fault
    summary = kit.run("proof")
    assert (summary.ok, summary.lag) == (True, 5)

    lost, twice = sorted(Path(kit.lake, "landed").rglob("*.parquet"))[:2]
    if kept_as == "delta":
        table = deltalake.DeltaTable(f"{kit.lake}/landed")
        other = next(row[0] for row in kit.rows("landed", "partition"))
        deltalake.write_deltalake(table, table.to_pyarrow_table(filters=[("partition", "=", 1 - other)]), mode="append")
        table.delete(f"partition = {other}")
    else:
        lost.unlink()
        twice.with_name(twice.name.replace("-00001.", "-00009.")).write_bytes(twice.read_bytes())
    summary = kit.run("proof")
    assert not summary.ok
    assert (summary.details["missing"], summary.details["duplicated"]) == (
        30 - summary.rows_out // 2,
        summary.rows_out // 2,
    )
    assert any(note.startswith("missing: orders/") for note in summary.notes)
    for path in Path(kit.lake, "landed").rglob("*.parquet"):
        path.unlink()
    if kept_as == "delta":
        with pytest.raises(CorruptData, match="is missing, and the table needs it"):
            kit.run("proof")


def test_what_the_lake_was_told_to_leave_out_is_no_gap(kit: Kit):
    publish(kit, "orders", orders(30))
    checks = [
        {"name": "small", "check": "offset < 10", "on_fail": "drop"},
        {"name": "not seven", "check": "value NOT LIKE '%7'", "on_fail": "quarantine"},
    ]
    kit.declare("landed", "land", topics=["orders"], expect=checks)
    kit.declare("proof", "reconcile", source="landed")
    summary = kit.run("landed", "proof")
    assert (summary.ok, summary.rows_in) == (True, 30)
    assert summary.rows_out < 30


def test_sealed_segments_go_to_the_cold_tier_once(kit: Kit):
    settings = {"segment_bytes": 1 << 16}
    publish(kit, "orders", [f"{'x' * 2000} {number}" for number in range(100)], partitions=1, **settings)
    kit.declare("cold", "compact", topics=["orders"], latest=True)
    kit.declare("proof", "reconcile", source="cold")
    plan = kit.plan("cold")
    summary = kit.run("cold")
    assert 0 < summary.rows_out == plan.rows < 100
    assert kit.run("cold").rows_out == 0
    assert kit.rows("cold", "offset") == [(offset,) for offset in range(summary.rows_out)]
    assert kit.run("proof").ok

    publish(kit, "orders", [f"{'y' * 2000} {number}" for number in range(100)], partitions=1)
    more = kit.run("cold").rows_out
    assert kit.rows("cold", "offset") == [(offset,) for offset in range(summary.rows_out + more)]
    proof = kit.run("proof")
    assert (proof.ok, proof.rows_out) == (True, summary.rows_out + more)
    latest = kit.rows("cold.latest", "key", "offset")
    assert [key for key, _ in latest] == [f"customer-{number}".encode() for number in range(5)]
    assert {offset for _, offset in latest} == set(range(summary.rows_out + more - 5, summary.rows_out + more))


def test_a_slice_of_the_lake_is_replayed_too(kit: Kit):
    publish(kit, "orders", orders(20))
    publish(kit, "again", [])
    kit.declare("landed", "land", topics=["orders"])
    kit.declare("again-now", "replay", source="landed", to="again", where="value LIKE '%1_'", since="-1h")
    kit.run("landed", "again-now")
    assert sorted(bodies(kit, "again")) == sorted(orders(10, start=10))


def fail(kit: Kit, errors: list[str]) -> None:
    """Messages that die, each of another error, and one that is handled."""
    with holdfast.open_broker(kit.folder, body_type=str) as broker:
        broker.create_topic("orders", partitions=2, exist_ok=True, trace_sample=1.0)
        group = broker.group("orders", "billing")
        for error in errors:
            broker.publish("orders", error)
            group.receive(timeout=5).reject(error)
        broker.publish("orders", "fine")
        group.receive(timeout=5).ack()


def waiting(kit: Kit) -> list[str]:
    with holdfast.open_broker(kit.folder, body_type=str) as broker:
        return sorted(letter.error for letter in broker.group("orders", "billing").dead.list())


def test_dead_letters_are_told_by_kind_and_put_back_by_condition(kit: Kit):
    fail(kit, ["timed out after 3 s", "timed out after 5 s", "no order 17 for <b>'anna'</b>"])
    kit.declare("triage", "deadletters", redrive="error LIKE 'timed out%'", redrive_limit=1)
    plan = kit.plan("triage")
    assert plan.rows == 3
    assert plan.notes[0].startswith("redrives 1 dead letter: orders.dlq-")
    assert len(waiting(kit)) == 3

    summary = kit.run("triage")
    assert summary.seconds > 0
    assert (summary.rows_in, summary.details["kinds"], summary.details["redriven"]) == (3, 2, 1)
    assert waiting(kit) == ["no order 17 for <b>'anna'</b>", "timed out after 5 s"]
    assert kit.rows("triage/kinds", "error_kind", "count", "waiting") == [
        ("no order <number> for <b><text></b>", 1, 1),
        ("timed out after <number> s", 2, 2),
    ]
    page = Path(summary.details["report"]).read_text("utf-8")
    assert "no order &lt;number&gt; for &lt;b&gt;&lt;text&gt;&lt;/b&gt;" in page
    assert {path.name for path in Path(kit.lake, "triage", "report").iterdir()} == {
        "report.html",
        "kinds.png",
        "over-time.png",
    }

    again = kit.run("triage")
    assert again.details["redriven"] == 1
    assert kit.rows("triage/kinds", "count", "waiting") == [(1, 1), (2, 1)]


def test_a_redrive_beside_a_living_owner_says_who_has_the_folder(kit: Kit):
    fail(kit, ["timed out after 3 s"])
    kit.declare("triage", "deadletters", redrive="true")
    with holdfast.open_broker(kit.folder), pytest.raises(Busy):
        kit.run("triage")
    assert kit.rows("triage/kinds", "count") == [(1,)]  # looking needs no ownership
    assert waiting(kit) == ["timed out after 3 s"]


def test_a_folder_without_dead_letters_or_traces_has_reports_that_say_so(kit: Kit):
    publish(kit, "orders", orders(1))
    kit.declare("triage", "deadletters")
    kit.declare("lives", "traces")
    for name in ("triage", "lives"):
        summary = kit.run(name)
        assert summary.rows_in == 0
        assert "<h2>No " in Path(summary.details["report"]).read_text("utf-8")


def test_the_life_of_messages_is_told_by_topic_and_hour(kit: Kit):
    fail(kit, ["timed out after 3 s", "timed out after 5 s"])
    kit.declare("lives", "traces", topics=["orders"], since="-1h")
    assert kit.plan("lives").rows == 9
    summary = kit.run("lives")
    (row,) = kit.rows("lives/hours", "topic", "published", "deliveries", "retries", "acked", "buried", "handling_count")
    assert row == ("orders", 3, 3, 0, 1, 2, 3)
    assert kit.rows("lives/attempts", "attempt", "acked", "buried") == [(1, 1, 2)]
    pictures = {path.name for path in Path(kit.lake, "lives", "report").glob("*.png")}
    assert pictures == {"first-delivery.png", "handling.png", "attempts.png"}
    assert "Time to first delivery" in Path(summary.details["report"]).read_text("utf-8")


def test_a_condition_that_is_no_sql_is_refused_in_a_sentence(kit: Kit):
    fail(kit, ["x"])
    kit.declare("triage", "deadletters", redrive="error LIKE")
    with pytest.raises(InvalidRequest, match="triage: "):
        kit.run("triage")
    kit.declare("triage", "deadletters", where="no_such_column = 1")
    with pytest.raises(InvalidRequest, match="no_such_column"):
        kit.run("triage")
