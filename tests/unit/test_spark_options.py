"""Options of the Spark source: each is read as its users mean it, and a wrong one is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import CaseInsensitiveDict

from holdfast.errors import InvalidRequest
from holdfast.spark.options import as_meant, batch_read_options, check_options, stream_read_options

NOW_MS = 1_800_000_000_000
GIVEN = {"path": "/data/shop", "topic": "orders"}


def batch(**more: str) -> Any:
    return batch_read_options(CaseInsensitiveDict({**GIVEN, **more}), NOW_MS)


def stream(**more: str) -> Any:
    return stream_read_options(CaseInsensitiveDict({**GIVEN, **more}), NOW_MS)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"minOffsetsPerTrigger": "20", "maxOffsetsPerTrigger": "10"}, "must not exceed the second"),
        ({"minOffsetsPerTrigger": "none"}, '"minOffsetsPerTrigger" is'),
        ({"maxTriggerDelay": "soon"}, '"maxTriggerDelay"'),
        ({"maxRecordsPerPartition": "0"}, '"maxRecordsPerPartition" is'),
        ({"startingOffsetsByTimestamp": "yesterday"}, "milliseconds since 1970 by topic and partition"),
        ({"startingOffsetsByTimestamp": '{"a": {"0": 1}}', "startingOffsets": "latest"}, "choose one of them"),
        ({"startingOffsetsByTimestampStrategy": "none"}, 'use "error" or "latest"'),
        ({"server": "http://host:7700"}, "choose one of them"),
        ({"token": "secret"}, "would show up in plans and logs"),
    ],
)
def test_a_wrong_option_of_a_stream_is_refused_in_a_sentence(given: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        stream(**given)
    assert named in str(refused.value)
    assert "secret" not in str(refused.value)


def test_options_are_sent_to_tasks_by_their_own_names_and_with_the_drivers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = CaseInsensitiveDict({"path": "shop", "startingOffsets": "earliest", "nonsense": "1"})
    assert as_meant(given) == {"path": str(tmp_path / "shop"), "startingOffsets": "earliest", "nonsense": "1"}
    assert as_meant({"server": "https://host:7700"}) == {"path": "https://host:7700"}
    assert as_meant({"topic": "orders"}) == {"topic": "orders"}  # who reads it says what is missing


def test_a_batch_begins_at_the_earliest_and_a_stream_behind_the_latest_message() -> None:
    assert (batch().starting, batch().ending) == ("earliest", "latest")
    assert stream().starting == "latest"


def test_options_are_read_whatever_their_case() -> None:
    assert batch(STARTINGOFFSETS="Latest").starting == "latest"
    assert batch(includeheaders="TRUE").include_headers


def test_a_stream_has_limits_unless_told_otherwise() -> None:
    assert (stream().max_offsets, stream().max_bytes) == (1_000_000, 256 << 20)
    assert stream(maxOffsetsPerTrigger="5", maxBytesPerTrigger="10 MB").max_bytes == 10 << 20
    assert stream(maxOffsetsPerTrigger="none", maxBytesPerTrigger="none").max_offsets is None


def test_topics_are_named_in_any_of_four_ways() -> None:
    assert batch().subscription.names == ("orders",)
    by_list = batch_read_options(CaseInsensitiveDict({"path": "/p", "subscribe": "b, a,a"}), NOW_MS)
    assert by_list.subscription.names == ("a", "b")
    by_pattern = batch_read_options(CaseInsensitiveDict({"path": "/p", "subscribePattern": "or.*"}), NOW_MS)
    assert by_pattern.subscription.pattern == "or.*"
    assigned = batch_read_options(CaseInsensitiveDict({"path": "/p", "assign": '{"a": [1, 0]}'}), NOW_MS)
    assert assigned.subscription.wants("a", 1)
    assert not assigned.subscription.wants("a", 2)


def test_offsets_are_given_by_topic_and_partition() -> None:
    assert batch(startingOffsets='{"orders": {"0": 23, "1": -2}}').starting == {"orders": {0: 23, 1: -2}}


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("-10m", NOW_MS * 1_000_000 - 600 * 10**9),
        ("1800000000000", 1_800_000_000_000 * 10**6),
        ("2027-01-15T08:00:00Z", 1_800_000_000 * 10**9),
        (" 2027-01-15T10:00:00+02:00 ", 1_800_000_000 * 10**9),
        ("2027-01-15T08:00:00", 1_800_000_000 * 10**9),
        ("1969-12-31T23:59:59Z", -(10**9)),
    ],
)
def test_a_time_is_relative_or_in_milliseconds_or_iso(text: str, ns: int) -> None:
    assert batch(startingTimestamp=text).starting_ns == ns


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"topicc": "x"}, 'option "topicc" is not known; did you mean "topic"'),
        ({"kafka.bootstrap.servers": "x:9092"}, "is for a Kafka server: leave it out, and name a folder"),
        ({"startingTimestamp": "-1000"}, 'option "startingTimestamp"'),
        ({"startingTimestamp": "2027-13-01"}, 'option "startingTimestamp"'),
        ({"minPartitions": "-1"}, 'option "minPartitions"'),
        ({"nonsense": "x"}, 'option "nonsense" is not known; known ones: assign,'),
        ({"subscribe": "other"}, "topic and subscribe are given"),
        ({"startingOffsets": "middle"}, 'option "startingOffsets"'),
        ({"startingOffsets": '{"orders": {"0": -3}}'}, 'option "startingOffsets"'),
        ({"startingOffsets": "[1]"}, 'option "startingOffsets"'),
        ({"startingOffsets": "latest", "startingTimestamp": "-1h"}, "both given"),
        ({"startingTimestamp": "yesterdayish"}, 'option "startingTimestamp"'),
        ({"includeHeaders": "yes"}, "option \"includeHeaders\" is 'yes': use true or false"),
        ({"failOnDataLoss": "1"}, 'option "failOnDataLoss"'),
        ({"minPartitions": "0"}, 'option "minPartitions"'),
        ({"minPartitions": "many"}, 'option "minPartitions"'),
        ({"onCorrupt": "ignore"}, 'option "onCorrupt"'),
        ({"maxOffsetsPerTrigger": "10"}, 'option "maxOffsetsPerTrigger" is for a stream read'),
        ({"path": ""}, 'option "path" is missing'),
    ],
)
def test_a_wrong_option_of_a_batch_is_refused_by_its_name(given: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        batch(**given)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"endingOffsets": "latest"}, 'option "endingOffsets" is for a batch read'),
        ({"maxOffsetsPerTrigger": "0"}, 'option "maxOffsetsPerTrigger"'),
        ({"maxOffsetsPerTrigger": "10m"}, 'option "maxOffsetsPerTrigger"'),
        ({"maxBytesPerTrigger": "lots"}, 'option "maxBytesPerTrigger"'),
        ({"pinTimeout": "soon"}, 'option "pinTimeout"'),
    ],
)
def test_a_wrong_option_of_a_stream_is_refused_by_its_name(given: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        stream(**given)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    "given", [{}, {"subscribePattern": "("}, {"assign": "{}"}, {"assign": '{"a": []}'}, {"topic": " , "}]
)
def test_something_to_read_must_be_named(given: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="option"):
        batch_read_options(CaseInsensitiveDict({"path": "/p", **given}), NOW_MS)


def test_what_can_be_checked_early_is() -> None:
    check_options(CaseInsensitiveDict(GIVEN))
    with pytest.raises(InvalidRequest, match="onCorrupt"):
        check_options(CaseInsensitiveDict({**GIVEN, "onCorrupt": "x"}))


def test_spaces_and_file_addresses_are_taken_as_meant() -> None:
    assert batch(topic=" orders , organs ").subscription.names == ("orders", "organs")
    assert batch(minPartitions=" 4 ").min_partitions == 4
    assert not batch(failOnDataLoss=" False ").fail_on_data_loss
    assert [batch(path=path).path for path in ("file:///data", "file:/data", "/data")] == ["/data"] * 3


@pytest.mark.parametrize("text", ["100ms", "0", "2w", "soon", "-5m"])
def test_a_time_out_that_cannot_be_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match="pinTimeout"):
        stream(pinTimeout=text)
