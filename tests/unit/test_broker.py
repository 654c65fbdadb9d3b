"""The faces of the broker: each argument, right and wrong, for threads and for tasks."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import holdfast
from holdfast import (
    BadSettings,
    Broker,
    BrokerSettings,
    Busy,
    Closed,
    HoldfastError,
    InvalidRequest,
    MessageTooLarge,
    NewMessage,
    NotAQueue,
    OffsetOutOfRange,
    TopicExists,
    TopicSettings,
    UnknownGroup,
    UnknownTopic,
)
from holdfast.broker.messages import partition_for
from tests.unit.brokers import FOLDER, Place, polled, taken

BAD_NAMES = [
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "/",
    ".hidden",
    "-x",
    "x" * 300,
    "x" * 201,
    "a b",
    "a\0b",
    "ä",
    "a\n",
    None,
    7,
]


@pytest.fixture(params=["threads", "tasks"])
def place(request):
    made = Place(tasks=request.param == "tasks")
    yield made
    made.close()


def test_the_face_for_tasks_has_the_names_of_the_one_for_threads():
    def names(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert names(holdfast.aio.AsyncBroker) == names(Broker)
    assert names(holdfast.aio.AsyncGroup) == names(holdfast.Group)


# Topics


def test_a_topic_is_made_described_and_listed(place):
    made = place.broker.create_topic("orders", partitions=3, retention_hours=168, max_attempts=7)
    assert (made.name, len(made.partitions), made.messages, made.groups) == ("orders", 3, 0, [])
    assert made.settings["max_attempts"] == 7
    assert made.created_at == datetime.fromtimestamp(place.clock.now_ns() / 1e9, UTC)
    place.broker.create_topic("Mails_2.x-y")
    assert place.broker.topics() == ["Mails_2.x-y", "orders"]
    assert place.broker.describe_topic("orders") == made
    assert len(place.broker.describe_topic("Mails_2.x-y").partitions) == 1


@pytest.mark.parametrize("name", BAD_NAMES)
def test_no_path_can_be_made_of_a_name(name):
    place = Place()
    place.broker.create_topic("orders")
    before = place.files()
    for call in (
        place.broker.create_topic,
        place.broker.describe_topic,
        place.broker.delete_topic,
        lambda bad: place.broker.publish(bad, b""),
        place.broker.read,
        lambda bad: place.broker.alter_topic(bad, max_attempts=2),
        lambda bad: place.broker.add_partitions(bad, 1),
        lambda bad: place.broker.group(bad, "billing"),
        lambda bad: place.broker.group("orders", bad),
        lambda bad: place.broker.consumer(["orders", bad], group="readers"),
        lambda bad: place.broker.consumer("orders", group=bad),
        lambda bad: place.broker.delete_group(bad, "orders"),
        lambda bad: place.broker.reset_offsets(bad, "orders", to="earliest"),
    ):
        with pytest.raises(InvalidRequest, match=r"cannot be used|no group"):
            call(name)
    assert place.files() == before


@pytest.mark.parametrize("name", ["orders.dlq", "__traces"])
def test_names_of_our_own_are_refused(place, name):
    for call in (place.broker.create_topic, place.broker.delete_topic, lambda bad: place.broker.publish(bad, b"")):
        with pytest.raises(InvalidRequest, match=r"dead letters|are reserved"):
            call(name)


def test_a_topic_that_is_there_is_not_made_again(place):
    first = place.broker.create_topic("orders", partitions=2)
    place.broker.publish("orders", b"x")
    with pytest.raises(TopicExists, match="orders"):
        place.broker.create_topic("orders")
    again = place.broker.create_topic("orders", partitions=5, exist_ok=True)
    assert (again.id, len(again.partitions), again.messages) == (first.id, 2, 1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"retention_hour": 5}, "unknown setting retention_hour"),
        ({"max_atempts": 5}, "did you mean max_attempts"),
        ({"partitions": 0}, "partitions"),
        ({"partitions": -1}, "partitions"),
        ({"partitions": 10_001}, "partitions"),
        ({"partitions": "3"}, "partitions"),
        ({"partitions": 1.5}, "partitions"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"cleanup": "shred"}, "compact"),
        ({"retention_hours": 0}, "retention_hours"),
        ({"retention_hours": -5}, "retention_hours"),
        ({"retention_hours": "week"}, "retention_hours"),
        ({"retention_hours": float("nan")}, "retention_hours"),
        ({"retention_hours": 1, "retention_ms": 1}, "not both"),
    ],
)
def test_settings_that_cannot_be_are_refused_and_nothing_is_made(place, changes, named):
    with pytest.raises(BadSettings, match=named):
        place.broker.create_topic("orders", **changes)
    assert place.broker.topics() == []


def test_retention_in_hours_is_kept_in_milliseconds(place):
    assert place.broker.create_topic("orders", retention_hours=1).settings["retention_ms"] == 3_600_000
    assert place.broker.alter_topic("orders", retention_hours=0.5).settings["retention_ms"] == 1_800_000
    assert place.broker.alter_topic("orders", retention_hours=None).settings["retention_ms"] is None
    assert place.reopen().describe_topic("orders").settings["retention_ms"] is None


def test_settings_can_be_changed_while_it_runs_and_are_kept(place):
    place.broker.create_topic("orders", partitions=2)
    place.broker.publish("orders", b"x", partition=1)
    workers = place.broker.group("orders", "billing")
    message = workers.receive(timeout=0)
    altered = place.broker.alter_topic("orders", max_attempts=1)
    assert altered.settings["max_attempts"] == 1
    message.nack()
    assert workers.stats().dead == 1
    for reopened in (place.reopen(), place.kill()):
        assert reopened.describe_topic("orders").settings["max_attempts"] == 1


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, BadSettings),
        ({"max_attempt": 1}, BadSettings),
        ({"max_attempts": "x"}, BadSettings),
        ({"partitions": 1}, BadSettings),
        ({"partitions": True}, BadSettings),
        ({"partitions": 20_000}, BadSettings),
        ({"max_attempts": 2, "partitions": 0}, BadSettings),
    ],
)
def test_a_wrong_change_changes_nothing(place, changes, error):
    place.broker.create_topic("orders", partitions=2)
    before = place.broker.describe_topic("orders")
    with pytest.raises(error):
        place.broker.alter_topic("orders", **changes)
    assert place.broker.describe_topic("orders") == before
    assert place.reopen().describe_topic("orders") == before


def test_partitions_are_added_and_used_by_all_groups_from_their_first_message_on(place):
    place.broker.create_topic("orders", partitions=1)
    workers = place.broker.group("orders", "billing")
    place.broker.publish("orders", b"0")
    assert len(place.broker.add_partitions("orders", 2).partitions) == 3
    assert len(place.broker.alter_topic("orders", partitions=4).partitions) == 4
    for number in range(4):
        place.broker.publish("orders", b"%d" % (number + 1), partition=number)
    assert taken(workers) == [b"0", b"1", b"2", b"3", b"4"]
    assert taken(place.reopen().group("orders", "billing")) == []
    assert len(place.broker.describe_topic("orders").partitions) == 4


@pytest.mark.parametrize("count", [0, -1, 1.5, "1", None, True, 10_000])
def test_a_wrong_number_of_partitions_to_add_is_refused(place, count):
    place.broker.create_topic("orders")
    with pytest.raises(InvalidRequest):
        place.broker.add_partitions("orders", count)
    assert len(place.broker.describe_topic("orders").partitions) == 1


def test_what_is_said_of_a_topic_that_is_not_there(place):
    place.broker.create_topic("orders")
    for call in (
        lambda: place.broker.describe_topic("order"),
        lambda: place.broker.delete_topic("order"),
        lambda: place.broker.alter_topic("order", max_attempts=3),
        lambda: place.broker.add_partitions("order", 1),
        lambda: place.broker.publish("order", b"x"),
        lambda: place.broker.read("order"),
        lambda: place.broker.group("order", "billing"),
        lambda: place.broker.consumer(["orders", "order"], group="readers"),
        lambda: place.broker.groups("order"),
        lambda: place.broker.reset_offsets("billing", "order", to="earliest"),
    ):
        with pytest.raises(UnknownTopic, match=r"no topic order .*known topics: orders"):
            call()
    assert place.broker.groups() == []


def test_a_deleted_topic_is_gone_with_all_that_it_had(place):
    place.broker.create_topic("orders", partitions=2)
    place.broker.create_topic("mails")
    place.broker.publish("mails", b"stays")
    for body in (b"a", b"b", b"c"):
        place.broker.publish("orders", body)
    workers = place.broker.group("orders", "billing")
    place.broker.consumer("orders", group="readers").close()
    workers.receive(timeout=0).reject("never")
    message = workers.receive(timeout=0)
    place.broker.delete_topic("orders")
    assert place.broker.topics() == ["mails"]
    assert [path for path in place.files() if "orders" in path] == []
    with pytest.raises(UnknownTopic):
        place.broker.publish("orders", b"x")
    for call in (lambda: workers.receive(timeout=0), workers.stats, message.nack):
        with pytest.raises(UnknownTopic, match="orders"):
            call()
    assert [each.name for each in place.broker.groups()] == []
    with pytest.raises(UnknownTopic):
        place.broker.delete_topic("orders")
    again = place.broker.create_topic("orders")
    assert (again.messages, again.groups, again.stream_groups) == (0, [], [])
    assert place.broker.group("orders", "billing").dead.list() == []
    assert taken(place.broker.group("mails", "billing")) == [b"stays"]


def test_whoever_waits_for_a_message_hears_that_the_topic_or_the_group_is_gone(tmp_path):
    heard: list[str] = []
    with holdfast.open_broker(tmp_path / "data", durability="os") as broker:
        broker.create_topic("orders", partitions=2)
        broker.create_topic("mails")
        workers, readers = broker.group("orders", "billing"), broker.group("mails", "billing")

        def wait(group: Any, waiting: threading.Event) -> None:
            waiting.set()
            try:
                group.receive(timeout=60)
            except HoldfastError as error:
                heard.append(type(error).__name__)

        for group, end in (
            (workers, lambda: broker.delete_group("billing", "orders")),
            (readers, lambda: broker.delete_topic("mails")),
        ):
            waiting = threading.Event()
            thread = threading.Thread(target=wait, args=(group, waiting))
            thread.start()
            waiting.wait()
            end()
            thread.join(30)
            assert not thread.is_alive()
    assert heard == ["UnknownGroup", "UnknownTopic"]


# Publishing and reading


def test_a_message_goes_to_the_partition_of_its_key_in_turn_or_by_hand(place):
    place.broker.create_topic("orders", partitions=3)
    by_key = [place.broker.publish("orders", b"x", key=key) for key in ("a", b"a", "b", "a")]
    assert [stored.partition for stored in by_key] == [partition_for(key, 3) for key in (b"a", b"a", b"b", b"a")]
    in_turn = [place.broker.publish("orders", b"x").partition for _ in range(6)]
    assert sorted(in_turn[:3]) == sorted(in_turn[3:]) == [0, 1, 2]
    assert place.broker.publish("orders", b"x", key="a", partition=1).partition == 1
    assert place.broker.publish("orders", b"x").id.startswith("orders-")
    together = place.broker.publish_many("orders", [b"1", b"2", b"3"])
    assert len({stored.partition for stored in together}) == 1
    spread = place.broker.publish_many("orders", [NewMessage(body=b"x", key=f"{i}") for i in range(20)])
    assert [stored.partition for stored in spread] == [partition_for(b"%d" % i, 3) for i in range(20)]
    assert place.broker.publish_many("orders", []) == []
    assert place.broker.publish_many("orders", iter([b"x"]), partition=2)[0].partition == 2


@pytest.mark.parametrize("partition", [3, -1, "0", 1.0, True, 10**30])
def test_a_partition_that_is_not_there_is_refused(place, partition):
    place.broker.create_topic("orders", partitions=3)
    place.broker.group("orders", "billing")
    for call in (
        lambda: place.broker.publish("orders", b"x", partition=partition),
        lambda: place.broker.publish_many("orders", [b"x"], partition=partition),
        lambda: place.broker.read("orders", partition=partition),
        lambda: place.broker.reset_offsets("billing", "orders", to="earliest", partition=partition),
    ):
        with pytest.raises(InvalidRequest, match="partition"):
            call()
    assert place.broker.describe_topic("orders").messages == 0


def test_all_that_a_message_can_carry_is_stored(place):
    place.broker.create_topic("orders", partitions=2)
    stored = place.broker.publish(
        "orders",
        b"x",
        key="k",
        headers={"h": "v"},
        priority=5,
        ttl=60,
        dedup_id="once",
        correlation_id="c",
        durability="os",
        codec="zstd",
    )
    assert (stored.durability, stored.duplicate) == ("os", False)
    again = place.broker.publish("orders", b"y", key="k", dedup_id="once")
    assert (again.duplicate, again.id) == (True, stored.id)
    message = place.broker.group("orders", "billing").receive(timeout=0)
    assert (message.body, message.key, message.priority, message.correlation_id) == (b"x", "k", 5, "c")
    assert dict(message.headers) == {"h": "v"}


def test_a_delayed_message_reaches_every_group_when_it_is_due(place):
    place.broker.create_topic("orders", partitions=2)
    groups = [place.broker.group("orders", name) for name in ("billing", "audit")]
    place.broker.publish("orders", b"later", delay=5)
    place.broker.publish(
        "orders", b"then", at=datetime.fromtimestamp(place.clock.now_ns() / 1e9, UTC) + timedelta(seconds=9)
    )
    assert [taken(group) for group in groups] == [[], []]
    place.after(seconds=6)
    assert [taken(group) for group in groups] == [[b"later"], [b"later"]]
    place.after(seconds=6)
    assert [taken(group) for group in groups] == [[b"then"], [b"then"]]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"priority": 10}, InvalidRequest),
        ({"priority": "high"}, InvalidRequest),
        ({"delay": -1}, InvalidRequest),
        ({"delay": "soon"}, InvalidRequest),
        ({"ttl": 0}, InvalidRequest),
        ({"at": "tomorrow"}, InvalidRequest),
        ({"delay": 1, "at": datetime.now(UTC)}, InvalidRequest),
        ({"key": 5}, InvalidRequest),
        ({"headers": "h"}, InvalidRequest),
        ({"headers": {"holdfast.x": "v"}}, InvalidRequest),
        ({"dedup_id": ""}, InvalidRequest),
        ({"durability": "maybe"}, InvalidRequest),
        ({"codec": "rar"}, InvalidRequest),
        ({"correlation_id": 5}, InvalidRequest),
    ],
)
def test_a_wrong_message_is_refused_and_nothing_is_stored(place, options, error):
    place.broker.create_topic("orders", partitions=2)
    with pytest.raises(error):
        place.broker.publish("orders", b"x", **options)
    assert place.broker.describe_topic("orders").messages == 0


def test_wrong_bodies_are_refused_and_nothing_of_the_call_is_stored(place):
    place.broker.create_topic("orders", partitions=2, max_message_bytes=10)
    for bodies, error in (
        ([b"ok", b"x" * 11], MessageTooLarge),
        ([NewMessage(body=b"a", key="1"), NewMessage(body=b"b", key="2"), object()], InvalidRequest),
        (b"bytes", InvalidRequest),
        ("text", InvalidRequest),
        (7, InvalidRequest),
        ({"a": 1}, InvalidRequest),
    ):
        with pytest.raises(error):
            place.broker.publish_many("orders", bodies)
    assert place.broker.describe_topic("orders").messages == 0


def test_reading_changes_nothing(place):
    place.broker.create_topic("orders", partitions=2)
    for number in range(6):
        place.broker.publish("orders", b"%d" % number, partition=number % 2)
    workers = place.broker.group("orders", "billing")
    assert [each.body for each in place.broker.read("orders")] == [b"0", b"2", b"4"]
    assert [each.body for each in place.broker.read("orders", partition=1, offset=1)] == [b"3", b"5"]
    assert [each.id for each in place.broker.read("orders", partition=1, offset=1, limit=1)] == ["orders-1-1"]
    assert place.broker.read("orders", offset=3) == []
    assert len(taken(workers)) == 6
    assert len(place.broker.read("orders")) == 3


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"offset": -1}, OffsetOutOfRange),
        ({"offset": 4}, OffsetOutOfRange),
        ({"offset": "0"}, InvalidRequest),
        ({"offset": 1.0}, InvalidRequest),
        ({"limit": 0}, InvalidRequest),
        ({"limit": 10**9}, InvalidRequest),
        ({"limit": None}, InvalidRequest),
    ],
)
def test_reading_where_nothing_is_is_refused(place, options, error):
    place.broker.create_topic("orders")
    place.broker.publish_many("orders", [b"a", b"b", b"c"])
    with pytest.raises(error):
        place.broker.read("orders", **options)


# Groups


def test_each_group_gets_every_message(place):
    place.broker.create_topic("orders", partitions=3)
    bodies = [b"%d" % number for number in range(10)]
    for body in bodies[:5]:
        place.broker.publish("orders", body)
    billing = place.broker.group("orders", "billing")
    late = place.broker.group("orders", "late", start="latest")
    assert taken(billing) == bodies[:5]
    assert taken(late) == []
    for body in bodies[5:]:
        place.broker.publish("orders", body)
    audit = place.broker.group("orders", "audit")
    assert (taken(billing), taken(late), taken(audit)) == (bodies[5:], bodies[5:], bodies)
    assert [(each.name, each.mode, each.lag) for each in place.broker.groups("orders")] == [
        ("audit", "queue", 0),
        ("billing", "queue", 0),
        ("late", "queue", 0),
    ]


@pytest.mark.parametrize("again", ["reopen", "kill"])
def test_a_group_that_began_at_the_end_still_does_after_a_restart(place, again):
    place.broker.create_topic("orders", partitions=3)
    for number in range(6):
        place.broker.publish("orders", b"old", partition=number % 3)
    place.broker.group("orders", "late", start="latest")
    getattr(place, again)()
    place.broker.publish("orders", b"new")
    assert taken(place.broker.group("orders", "late")) == [b"new"]
    assert taken(place.broker.group("orders", "late", start="earliest")) == []  # it has begun already


def test_settings_of_a_group_are_its_own_and_are_kept(place):
    place.broker.create_topic("orders", partitions=2, max_attempts=9)
    strict = place.broker.group("orders", "strict", max_attempts=1)
    lenient = place.broker.group("orders", "lenient")
    place.broker.publish("orders", b"x")
    for group in (strict, lenient):
        group.receive(timeout=0).nack(delay=0)
    assert (strict.stats().dead, lenient.stats().dead) == (1, 0)
    place.reopen()
    place.broker.publish("orders", b"y")
    place.broker.group("orders", "strict").receive(timeout=0).nack(delay=0)
    assert place.broker.group("orders", "strict").stats().dead == 2
    place.broker.group("orders", "strict", max_attempts=5)
    place.broker.publish("orders", b"z")
    place.broker.group("orders", "strict").receive(timeout=0).nack(delay=0)
    assert place.broker.group("orders", "strict").stats().dead == 2


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"start": "middle"}, InvalidRequest, "earliest"),
        ({"start": 5}, InvalidRequest, "earliest"),
        ({"max_atempts": 3}, BadSettings, "did you mean max_attempts"),
        ({"max_attempts": 0}, BadSettings, "max_attempts"),
        ({"retention_ms": 5}, BadSettings, "alter_topic"),
        ({"partitions": 5}, BadSettings, "alter_topic"),
    ],
)
def test_a_group_that_cannot_be_is_refused_and_not_made(place, options, error, named):
    place.broker.create_topic("orders", partitions=2)
    with pytest.raises(error, match=named):
        place.broker.group("orders", "billing", **options)
    assert place.broker.groups() == []
    assert place.broker.describe_topic("orders").groups == []


def test_one_name_is_not_for_both_modes_on_one_topic(place):
    place.broker.create_topic("orders")
    place.broker.create_topic("mails")
    place.broker.group("orders", "billing")
    with pytest.raises(InvalidRequest, match="queue mode"):
        place.broker.consumer("orders", group="billing")
    place.broker.consumer("mails", group="readers").close()
    with pytest.raises(InvalidRequest, match="stream mode"):
        place.broker.group("mails", "readers")
    place.broker.group("orders", "readers")
    assert [(each.name, each.topic, each.mode) for each in place.broker.groups()] == [
        ("billing", "orders", "queue"),
        ("readers", "mails", "stream"),
        ("readers", "orders", "queue"),
    ]


def test_a_deleted_group_is_forgotten_and_a_new_one_of_its_name_begins_anew(place):
    place.broker.create_topic("orders", partitions=2)
    for body in (b"a", b"b", b"c"):
        place.broker.publish("orders", body)
    billing, audit = place.broker.group("orders", "billing"), place.broker.group("orders", "audit")
    message = billing.receive(timeout=0)
    billing.receive(timeout=0).reject("never")
    billing.receive(timeout=0).ack()
    audit.receive(timeout=0).reject("never")
    place.broker.delete_group("billing", "orders")
    assert place.broker.describe_topic("orders").groups == ["audit"]
    for call in (lambda: billing.receive(timeout=0), billing.stats, billing.dead.list):
        with pytest.raises(UnknownGroup, match="deleted"):
            call()
    with pytest.raises(HoldfastError):
        message.ack()
    assert audit.stats().dead == 1
    again = place.broker.group("orders", "billing")
    assert (taken(again), again.stats().dead) == ([b"a", b"b", b"c"], 0)
    place.kill()
    again = place.broker.group("orders", "billing")
    assert (taken(again), again.stats().dead) == ([], 0)
    assert len(place.broker.group("orders", "audit").dead.list()) == 1


def test_a_group_in_stream_mode_is_deleted_when_nobody_reads(place):
    place.broker.create_topic("orders")
    place.broker.publish("orders", b"x")
    consumer = place.broker.consumer("orders", group="readers")
    assert polled(consumer) == [b"x"]
    with pytest.raises(InvalidRequest, match="close its consumers"):
        place.broker.delete_group("readers")
    consumer.close()
    place.broker.delete_group("readers")
    assert place.broker.groups() == []
    assert place.reopen().groups() == []
    assert polled(place.broker.consumer("orders", group="readers")) == [b"x"]


@pytest.mark.parametrize("where", [("nobody",), ("nobody", "orders"), ("billing",)])
def test_a_group_that_is_not_there_cannot_be_deleted(place, where):
    place.broker.create_topic("orders")
    place.broker.group("orders", "billing")
    with pytest.raises(UnknownGroup, match=where[0]):
        place.broker.delete_group(*where)


@pytest.mark.parametrize("mode", ["queue", "stream"])
def test_offsets_are_reset_in_both_modes(place, mode):
    place.broker.create_topic("orders", partitions=2)
    for number in range(6):
        place.broker.publish("orders", b"%d" % number, partition=number % 2)
        place.clock.advance(seconds=10)

    def rest() -> list[bytes]:
        if mode == "queue":
            return taken(place.broker.group("orders", "g"))
        consumer = place.broker.consumer("orders", group="g")
        found = polled(consumer)
        consumer.close()
        return found

    everything = [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert rest() == everything
    plan = place.broker.reset_offsets("g", "orders", to="earliest", dry_run=True)
    assert [(each.partition, each.before, each.after, each.messages) for each in plan] == [(0, 3, 0, 3), (1, 3, 0, 3)]
    assert rest() == []
    assert place.broker.reset_offsets("g", "orders", to="earliest") == plan
    assert rest() == everything
    place.broker.reset_offsets("g", "orders", to=2)
    assert rest() == [b"4", b"5"]
    place.broker.reset_offsets("g", "orders", to=1, partition=1)
    assert rest() == [b"3", b"5"]
    place.broker.reset_offsets("g", "orders", to=datetime.fromtimestamp(place.clock.now_ns() / 1e9 - 25, UTC))
    assert rest() == [b"4", b"5"]
    place.broker.reset_offsets("g", "orders", to="earliest")
    place.broker.reset_offsets("g", "orders", to="latest")
    assert rest() == []
    place.broker.reset_offsets("g", "orders", to=10**12)  # the nearest that there is
    assert rest() == []


@pytest.mark.parametrize("to", ["start", "", None, -1, 1.5, True, datetime(2024, 1, 1)])
def test_a_reset_to_nowhere_is_refused(place, to):
    place.broker.create_topic("orders")
    place.broker.group("orders", "billing")
    with pytest.raises(InvalidRequest):
        place.broker.reset_offsets("billing", "orders", to=to)


def test_a_reset_of_nobody_is_refused(place):
    place.broker.create_topic("orders")
    with pytest.raises(UnknownGroup, match="nobody"):
        place.broker.reset_offsets("nobody", "orders", to="earliest")
    consumer = place.broker.consumer("orders", group="readers")
    with pytest.raises(InvalidRequest, match="close them first"):
        place.broker.reset_offsets("readers", "orders", to="earliest")
    consumer.close()


# The folder


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_closed_view_of_a_queue_stores_nothing(tmp_path, durability):
    with holdfast.open_broker(tmp_path / "data", durability=durability) as broker:
        closed, other = broker.queue("jobs"), broker.queue("jobs")
        closed.put(b"a")
        closed.put(b"b", key="k")
        closed.close()
        for options in ({}, {"key": "k"}, {"ttl": 5}):
            with pytest.raises(Closed, match="get it again"):
                closed.put(b"c", **options)
        assert other.qsize() == 2


def test_a_closed_broker_says_so(place):
    place.broker.create_topic("orders")
    workers, consumer = place.broker.group("orders", "billing"), place.broker.consumer("orders", group="readers")
    place.broker.close()
    place.broker.close()
    assert place.broker.closed
    assert "closed" in repr(place.broker if place._loop is None else place.broker._inner)
    for call in (
        place.broker.topics,
        place.broker.groups,
        place.broker.sync,
        lambda: place.broker.create_topic("mails"),
        lambda: place.broker.describe_topic("orders"),
        lambda: place.broker.delete_topic("orders"),
        lambda: place.broker.alter_topic("orders", max_attempts=2),
        lambda: place.broker.add_partitions("orders", 1),
        lambda: place.broker.publish("orders", b"x"),
        lambda: place.broker.publish_many("orders", [b"x"]),
        lambda: place.broker.read("orders"),
        lambda: place.broker.group("orders", "billing"),
        lambda: place.broker.consumer("orders", group="readers"),
        lambda: place.broker.delete_group("readers"),
        lambda: place.broker.reset_offsets("readers", "orders", to="earliest"),
        lambda: place.broker.producer().send("orders", b"x"),
        lambda: workers.receive(timeout=0),
        lambda: consumer.poll(0),
    ):
        with pytest.raises(Closed, match="closed"):
            call()


def test_a_folder_has_one_owner(place):
    with pytest.raises(Busy, match="Close it there"):
        place.open()
    with pytest.raises(Busy):
        holdfast.open(FOLDER, world=place.world)
    place.broker.create_topic("orders")


@pytest.mark.parametrize("folder", ["", 7, "a\0b", b"bytes"])
def test_a_folder_that_cannot_be_is_refused(folder):
    with pytest.raises(InvalidRequest):
        holdfast.open_broker(folder, world=Place().world)


def test_a_broker_is_opened_where_it_may_be(tmp_path):
    with pytest.raises(InvalidRequest, match="data folder"):
        holdfast.open_broker()
    with pytest.raises(NotAQueue, match="create=True"):
        holdfast.open_broker(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(NotAQueue, match="other files"):
        holdfast.open_broker(tmp_path)
    with pytest.raises(NotAQueue):
        holdfast.open_broker(tmp_path / "photo.jpg")
    with pytest.raises(BadSettings, match="BrokerSettings"):
        holdfast.open_broker(tmp_path / "data", settings=TopicSettings())
    with pytest.raises(InvalidRequest, match="not both"):
        holdfast.open_broker(tmp_path / "data", settings=BrokerSettings(), settings_file="x.toml")
    with pytest.raises(BadSettings, match="durability"):
        holdfast.open_broker(tmp_path / "data", durability="maybe")
    assert not (tmp_path / "data").exists()


def test_a_broker_opens_what_a_queue_has_made_and_the_other_way_round(tmp_path):
    with holdfast.open(tmp_path / "jobs", durability="os") as queue:
        queue.put_many([b"a", b"b"])
        queue.get(timeout=0).ack()
    with holdfast.open_broker(tmp_path / "jobs", durability="os") as broker:
        assert broker.topics() == ["jobs"]
        assert [(each.name, each.mode, each.lag) for each in broker.groups("jobs")] == [("default", "queue", 1)]
        assert taken(broker.group("jobs", "default")) == [b"b"]
        broker.publish("jobs", b"c")
        assert taken(broker.group("jobs", "audit")) == [b"a", b"b", b"c"]
    with holdfast.open(tmp_path / "jobs") as queue:
        assert queue.get(timeout=0).body == b"c"


def test_topics_beyond_the_limit_are_let_go_and_come_back_when_they_are_used():
    place = Place(settings=BrokerSettings(open_partitions=4, topic=TopicSettings(min_free_bytes=0)))
    names = [f"t{number}" for number in range(8)]
    for name in names:
        place.broker.create_topic(name, partitions=2)
        place.broker.group(name, "billing", start="latest")
    for turn in range(3):
        for name in names:
            place.clock.advance(seconds=1)
            place.broker.publish(name, b"%d" % turn)
            assert sum(len(topic.partitions) for topic in place.engine._topics.values()) <= 4
    held = place.broker.group("t0", "billing")
    for name in names[1:]:
        assert taken(place.broker.group(name, "billing")) == [b"0", b"1", b"2"]
    assert taken(held) == [b"0", b"1", b"2"]
    assert place.engine.is_open("t0")


def test_a_new_group_with_almost_the_name_of_another_is_warned_of_once(place, caplog):
    place.broker.create_topic("orders")
    place.broker.group("orders", "billing")
    place.broker.group("orders", "shipping")
    assert not caplog.records
    place.broker.group("orders", "biling")
    place.broker.group("orders", "biling")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "the group biling of topic orders is new" in record.message
    assert "there are billing, shipping" in record.message


def test_what_retention_drops_by_force_is_logged_once_with_its_range(place, caplog):
    place.broker.create_topic("orders", retention_ms=1_000, retention_ignores_pins=True)
    group, quick = place.broker.group("orders", "billing"), place.broker.group("orders", "shipping")
    for number in range(10):
        place.broker.publish("orders", b"%d" % number)
    assert len(taken(quick)) == 10
    held = group.receive_many(4, timeout=0)
    group.ack_many(held[1:])
    place.clock.advance(seconds=60)
    assert place.broker.apply_retention("orders").messages == 10
    place.broker.apply_retention("orders")
    (record,) = [each for each in caplog.records if "retention" in each.message]
    assert record.levelname == "WARNING"
    assert "retention dropped 7 messages" in record.message
    assert "offsets 0 to 9" in record.message
    assert (record.group, record.messages, record.first_offset, record.next_offset) == ("billing", 7, 0, 10)
    assert group.stats().ready == 0
