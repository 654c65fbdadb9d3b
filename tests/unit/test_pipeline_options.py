"""The pipelines beside the medallion, as far as they need no Spark: options, templates, bounds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

import yaml

import holdfast
from holdfast.env import real_world
from holdfast.env.disk import LakeDisk
from holdfast.errors import InvalidRequest, OffsetOutOfRange
from holdfast.spark.pipelines import compact
from holdfast.spark.pipelines.compact import CompactOptions
from holdfast.spark.pipelines.origin import partitions_there, sealed_there
from holdfast.spark.pipelines.replay import ReplayOptions
from holdfast.spark.pipelines.report import swap_in
from holdfast.spark.pipelines.spec import Context, Project, Spec, kind_named, read_options
from holdfast.spark.ranges import DataFolder

KINDS = ("replay", "deadletters", "traces", "reconcile", "compact")


@pytest.mark.parametrize("name", KINDS)
def test_a_template_is_a_pipeline_also_with_all_that_is_commented_out(name: str):
    kind = kind_named(name)
    for text in (kind.template, re.sub(r"^    # (?=\w+:)", "    ", kind.template, flags=re.MULTILINE)):
        given = yaml.safe_load(text)
        assert given.pop("kind") == name
        read_options(kind.options, given, name)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("replay", {"topics": ["orders"], "to": "x", "rate": 0}, "rate is 0"),
    ("replay", {"topics": ["orders"], "to": "x", "id": "a/b"}, "replay id"),
    ("replay", {"to": "x"}, "say what to read"),
    ("replay", {"topics": ["orders"], "source": "landed", "to": "x"}, "one of them"),
    ("replay", {"topics": ["orders"]}, "to"),
    ("reconcile", {}, "source: NAME"),
    ("compact", {"topics": []}, "name the topics"),
    ("deadletters", {"redrive_limit": 3}, "no effect without redrive"),
    ("deadletters", {"redriv": "true"}, "did you mean 'redrive'"),
]


@pytest.mark.parametrize(("kind", "options", "words"), BAD)
def test_wrong_options_are_refused_in_words(kind: str, options: dict[str, Any], words: str):
    with pytest.raises(InvalidRequest, match=words):
        read_options(kind_named(kind).options, options, "one")


def test_a_rate_bounds_what_is_stored_at_once():
    assert ReplayOptions(topics=("a",), to="b").rows_at_once == 100_000
    assert ReplayOptions(topics=("a",), to="b", rate=10).rows_at_once == 50
    assert ReplayOptions(topics=("a",), to="b", rate=0.01).rows_at_once == 1


@pytest.fixture
def folder(tmp_path: Path) -> str:
    path = str(tmp_path / "shop")
    with holdfast.open_broker(path) as broker:
        broker.create_topic("orders", partitions=2, segment_messages=10)
        for number in range(47):
            broker.publish("orders", b"x", partition=number % 2)
    return path


def sealed(folder: str, known: dict[str, Any]) -> list[tuple[int, int, int]]:
    spec = Spec(name="cold", kind="compact", options=CompactOptions(topics=("orders",)))
    project = Project(folder=folder, lake="", pipelines={"cold": spec})
    context = Context(world=real_world(), session=lambda: None, project=project, spec=spec)
    there, ranges = partitions_there(context, ["orders"]), sealed_there(context, ["orders"])
    found = compact.sealed(there, ranges, known, fail_on_data_loss=True)
    return [(each.partition, each.start, each.stop) for each in found]


def test_the_segment_that_is_being_written_is_not_sealed(folder: str):
    assert sealed(folder, {}) == [(0, 0, 20), (1, 0, 20)]
    topic_id = DataFolder(folder, real_world()).topic_id("orders")
    assert sealed(folder, {"orders": {"id": topic_id, "offsets": {"0": 20, "1": 7}}}) == [(1, 7, 20)]


def test_a_topic_that_was_made_again_is_not_mixed_with_the_old_one(folder: str):
    with pytest.raises(InvalidRequest, match="deleted and recreated"):
        sealed(folder, {"orders": {"id": 1, "offsets": {}}})


def test_what_retention_took_before_it_was_kept_is_said(folder: str):
    topic_id = DataFolder(folder, real_world()).topic_id("orders")
    known = {"orders": {"id": topic_id, "offsets": {"0": -5, "1": 0}}}
    with pytest.raises(OffsetOutOfRange, match="messages -5 to -1 of orders/0 were dropped"):
        sealed(folder, known)


def test_a_batch_takes_a_share_of_every_partition():
    stretches = [compact.SealedRange("a", 0, 0, 100), compact.SealedRange("a", 1, 50, 60)]
    assert [(each.start, each.stop) for each in compact.limited(stretches, 40)] == [(0, 20), (50, 60)]


def test_a_folder_takes_the_place_of_another_as_a_whole(tmp_path: Path):
    disk, table = LakeDisk(), tmp_path / "lake" / "triage"
    for number in (1, 2):
        fresh = tmp_path / "lake" / "_staging" / "triage"
        (fresh / "kinds").mkdir(parents=True)
        (fresh / "kinds" / f"{number}.parquet").write_text("rows")
        swap_in(disk, str(fresh), str(table))
        assert [path.name for path in table.rglob("*.parquet")] == [f"{number}.parquet"]
        assert not fresh.exists()
