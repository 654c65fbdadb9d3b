"""The broker where threads meet: races, and topics that go while somebody uses them."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import NewMessage
from holdfast.broker.delivery import Delivery
from holdfast.broker.group import QueueGroup
from holdfast.broker.messages import partition_for
from holdfast.broker.partition import Draft
from holdfast.broker.upkeep import Cleaner
from holdfast.broker.waiters import Waiters
from holdfast.errors import (
    Closed,
    DiskFailed,
    DiskFull,
    HoldfastError,
    InvalidRequest,
    MessageTooLarge,
    UnknownGroup,
    UnknownTopic,
)
from holdfast.model import Producer
from holdfast.settings import BrokerSettings, TopicSettings
from tests.unit.brokers import FOLDER, Place, taken

FAR_MS = 10**14


@pytest.fixture(params=["threads", "tasks"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(tasks=request.param == "tasks")
    yield made
    made.close()


@pytest.fixture
def simple() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


def keys_for(partition: int, partitions: int, count: int) -> list[str]:
    """Keys that go to one partition."""
    found = (f"key-{i}" for i in range(10_000) if partition_for(f"key-{i}".encode(), partitions) == partition)
    return [next(found) for _ in range(count)]


def aside(call: Callable[[], object]) -> threading.Thread:
    """A thread that has had plenty of time for the call; it may still wait for somebody."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(0.2)
    return thread


# Names


def test_a_name_without_room_for_that_of_its_dead_letters_is_refused(place):
    place.broker.create_topic("x" * 196)
    group = place.broker.group("x" * 196, "billing")
    place.broker.publish("x" * 196, b"bad")
    group.receive(timeout=0).reject("no")
    for length in (197, 198, 200, 201, 300):
        with pytest.raises(InvalidRequest, match="at most 196"):
            place.broker.create_topic("x" * length)
    place.broker.delete_topic("x" * 196)
    place.reopen()
    assert place.broker.topics() == []


def test_whatever_was_left_half_deleted_does_not_keep_the_folder_from_opening(simple):
    simple.broker.create_topic("orders")
    simple.disk.make_folder(f"{FOLDER}/topics/.gone-{'x' * 200}-1")
    simple.reopen()
    assert simple.broker.topics() == ["orders"]


# Topics that go while somebody is about to use them


@pytest.mark.parametrize("use", ["delayed", "dedup", "sequences", "dead letters"])
def test_whoever_comes_too_late_makes_no_files_of_a_deleted_topic(simple, use):
    simple.broker.create_topic("orders")
    topic = simple.engine.topic("orders")
    partition = topic.partitions[0]
    late: dict[str, Callable[[], object]] = {
        "delayed": lambda: partition.publish([Draft(b"x", due_at_ms=FAR_MS)]),
        "dedup": lambda: partition.publish([Draft(b"x", dedup_id=b"once")]),
        "sequences": lambda: partition.append([b"x"], Producer(7, 0, 0)),
        "dead letters": lambda: topic.dead_partition(0),
    }
    simple.broker.delete_topic("orders")
    with pytest.raises((Closed, UnknownTopic)):
        late[use]()
    assert simple.disk.names(f"{FOLDER}/topics") == []
    simple.broker.create_topic("orders")
    simple.broker.publish("orders", b"a", delay=1, dedup_id="once")


def test_a_group_holds_its_topic_from_the_first_moment_on():
    settings = BrokerSettings(open_partitions=1, topic=TopicSettings(min_free_bytes=0))
    place = Place(settings=settings)
    for name in ("orders", "mails"):
        place.broker.create_topic(name)
    using = place.engine.using

    @contextlib.contextmanager
    def crowded(name: str) -> Iterator[Any]:
        with using(name) as topic:
            yield topic
        if name == "orders":
            place.engine.topic("mails")  # for which an idle one has to go

    place.engine.using = crowded
    group = place.broker.group("orders", "billing")
    place.broker.publish("orders", b"a")
    assert taken(group) == [b"a"]


def test_whoever_comes_when_a_topic_is_about_to_be_let_go_finds_it_open():
    place = Place(settings=BrokerSettings(open_partitions=1, topic=TopicSettings(min_free_bytes=0)))
    for name in ("orders", "mails"):
        place.broker.create_topic(name)
    orders, holder = place.engine.topic("orders"), _Holder()
    coming, found = [], []

    class Looked(type(orders)):
        @property
        def busy(self) -> bool:
            seen = super().busy
            coming.append(aside(lambda: found.append(place.engine.hold("orders", holder))))  # behind the look
            return seen

    orders.__class__ = Looked
    place.engine.topic("mails")
    coming[0].join()
    assert not found[0].closed
    place.engine.hold("mails", _Holder())
    assert not found[0].closed


def test_a_topic_stays_open_while_a_call_uses_it_and_no_longer():
    place = Place(settings=BrokerSettings(open_partitions=1, topic=TopicSettings(min_free_bytes=0)))
    for name in ("orders", "mails"):
        place.broker.create_topic(name)
    with place.engine.using("orders") as first, place.engine.using("orders") as orders:
        assert (first, orders.users) == (orders, 2)
        mails = place.engine.topic("mails")
        place.engine.close_idle(mails)
        assert not orders.closed
    assert orders.users == 0
    place.broker.publish("orders", b"x", durability="os")
    assert orders.users == 0
    place.engine.close_idle(mails)
    assert orders.closed


def test_a_call_that_is_interrupted_before_it_lets_go_of_a_topic_does_not_keep_it_open():
    place = Place()
    place.broker.create_topic("orders")
    using = place.engine.using("orders")
    orders = using.__enter__()
    assert orders.users == 1
    del using  # as when a signal handler raises where the exit would begin
    assert orders.users == 0
    assert not orders.busy


class _Holder:
    pass


def test_publishing_to_an_open_topic_waits_for_nobody_who_opens_another(place):
    place.broker.create_topic("orders")
    opening, done = threading.Event(), threading.Event()

    def open_for_long() -> None:
        with place.engine._lock:
            opening.set()
            done.wait(10)

    opener = threading.Thread(target=open_for_long, daemon=True)
    opener.start()
    opening.wait(10)
    publishing = aside(lambda: place.broker.publish("orders", b"a"))
    publishing.join(2)
    late = publishing.is_alive()
    done.set()
    opener.join()
    publishing.join()
    assert not late


def test_a_topic_is_found_by_the_keeper_only_when_all_have_said_what_they_need_of_it(simple):
    simple.broker.create_topic("orders")
    simple.reopen()
    found: list[bool] = []
    simple.engine.on_topic.append(lambda topic: found.append(simple.engine.is_open(topic.name)))
    simple.engine.topic("orders")
    assert found == [False]


def test_a_topic_that_is_no_name_is_refused(place):
    with pytest.raises(InvalidRequest):
        place.broker.publish(["orders"], b"a")


def test_a_body_type_that_cannot_be_is_refused_before_the_group_is_made(place):
    place.broker.create_topic("orders")
    with pytest.raises(HoldfastError):
        place.broker.group("orders", "billing", body_type=lambda: None)
    assert place.broker.describe_topic("orders").groups == []


@pytest.mark.parametrize("gone", ["topic", "group"])
def test_whatever_is_asked_of_what_was_deleted_says_what_was_deleted(place, gone):
    place.broker.create_topic("orders")
    place.broker.publish_many("orders", [b"a", b"b", b"c"])
    group = place.broker.group("orders", "billing")
    first, second, third = group.receive_many(3)
    if gone == "topic":
        place.broker.delete_topic("orders")
    else:
        place.broker.delete_group("billing", "orders")
    known = {"topic": (UnknownTopic, "no topic orders"), "group": (UnknownGroup, "billing on orders was deleted")}
    error, said = known[gone]
    for call in (group.receive, first.ack, second.nack, second.extend, group.stats, lambda: group.ack_many([third])):
        with pytest.raises(error, match=said):
            call()


def test_a_tick_of_what_was_closed_meanwhile_is_nobodys_trouble(simple, caplog):
    simple.broker.create_topic("orders")
    simple.broker.create_topic("mails")
    orders, mails = simple.engine.topic("orders"), simple.engine.topic("mails")
    for name in ("first", "second"):
        simple.broker.group("orders", name)
    delivery = orders.groups["first"].deliveries[0]
    tick = delivery.tick

    def tick_and_delete() -> int | None:
        if "second" in orders.groups:
            simple.broker.delete_group("second", "orders")
        return tick()

    delivery.tick = tick_and_delete
    orders.tick()
    simple.broker.delete_topic("mails")
    mails.tick()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_tick_that_fails_is_still_told(simple, caplog):
    simple.broker.create_topic("orders")
    topic = simple.engine.topic("orders")

    def fail() -> int | None:
        raise DiskFailed("the disk is gone")

    topic.partitions[0].tick = fail
    topic.tick()
    assert [record.message for record in caplog.records] == ["upkeep failed"]


def test_a_sync_passes_over_a_topic_that_is_closed_meanwhile(simple):
    for name in ("mails", "orders"):
        simple.broker.create_topic(name)
        simple.broker.publish(name, b"a")
    mails = simple.engine.topic("mails")
    sync = mails.sync

    def sync_and_delete() -> None:
        sync()
        simple.broker.delete_topic("orders")

    mails.sync = sync_and_delete
    simple.broker.sync()


def test_the_cleaner_goes_on_when_a_topic_is_taken_away_under_it(simple, caplog):
    for name in ("mails", "orders"):
        simple.broker.create_topic(name, cleanup="compact", segment_messages=2)
        for i in range(5):
            simple.broker.publish(name, b"%d" % i, key="k")
    topics = [simple.engine.topic("mails"), simple.engine.topic("orders")]
    simple.broker.delete_topic("mails")
    simple.engine.open_topics = lambda: topics  # as it was a moment ago
    assert Cleaner(simple.engine).tick() is not None
    assert [message.body for message in simple.broker.read("orders")] == [b"4"]
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_an_idle_topic_that_fails_to_close_is_no_trouble_of_whoever_opens_another(caplog):
    place = Place(settings=BrokerSettings(open_partitions=1, topic=TopicSettings(min_free_bytes=0)))
    for name in ("orders", "mails"):
        place.broker.create_topic(name)

    def fail() -> None:
        raise DiskFailed("the disk is gone")

    place.engine.topic("orders").close = fail
    place.broker.publish("mails", b"a")
    assert [record.message for record in caplog.records] == ["a topic failed to close"]


# Settings


def test_what_the_settings_file_says_of_a_topic_counts_also_behind_a_change():
    place = Place()
    place.broker.create_topic("orders", lease_ms=7_000)
    place.settings = BrokerSettings(topic=place.settings.topic, topics={"orders": {"max_attempts": 2}})
    place.reopen()
    place.broker.alter_topic("orders", lease_ms=9_000)
    settings = place.engine.topic("orders").settings
    assert (settings.max_attempts, settings.lease_ms) == (2, 9_000)
    place.broker.alter_topic("orders", max_attempts=3)  # the program has the last word
    assert place.engine.topic("orders").settings.max_attempts == 3


def test_what_the_settings_file_says_of_a_topic_is_not_kept_with_it():
    place = Place()
    plain = place.settings
    place.settings = BrokerSettings(topic=plain.topic, topics={"orders": {"max_attempts": 2, "partitions": 3}})
    place.reopen()
    assert len(place.broker.create_topic("orders", lease_ms=7_000).partitions) == 3
    assert place.engine.topic("orders").settings.max_attempts == 2
    place.settings = plain
    place.reopen()
    settings = place.engine.topic("orders").settings
    assert (settings.max_attempts, settings.lease_ms, settings.partitions) == (5, 7_000, 3)


# Publishing to several partitions


def test_a_call_with_a_message_that_is_too_large_stores_nothing_in_any_partition(place):
    place.broker.create_topic("orders", partitions=2, max_message_bytes=1_024)
    small, large = keys_for(0, 2, 1)[0], keys_for(1, 2, 1)[0]
    messages = [NewMessage(body=b"a", key=small), NewMessage(body=b"b" * 2_000, key=large)]
    with pytest.raises(MessageTooLarge, match="message 1 of the call"):
        place.broker.publish_many("orders", messages)
    assert place.broker.describe_topic("orders").messages == 0


def test_a_call_with_too_much_for_one_partition_stores_nothing_in_any(place):
    place.broker.create_topic("orders", partitions=2, max_batch_bytes=1_024, max_message_bytes=1_024)
    small, large = keys_for(0, 2, 1)[0], keys_for(1, 2, 1)[0]
    messages = [NewMessage(body=b"a", key=small), *[NewMessage(body=b"b" * 600, key=large)] * 2]
    with pytest.raises(MessageTooLarge, match="for partition 1"):
        place.broker.publish_many("orders", messages)
    assert place.broker.describe_topic("orders").messages == 0


@pytest.mark.parametrize("step", ["publish", "wait"])
def test_a_call_of_which_one_partition_fails_says_what_is_stored_and_that_can_be_read(place, step):
    place.broker.create_topic("orders", partitions=2)
    group = place.broker.group("orders", "billing")
    good, bad = keys_for(0, 2, 1)[0], keys_for(1, 2, 1)[0]
    partition = place.engine.topic("orders").partitions[1]

    def fail(*_: object, **__: object) -> None:
        raise DiskFull("no room")

    async def fail_async(*_: object) -> None:
        raise DiskFull("no room")

    if step == "publish":
        partition.publish = partition.publish_one = fail
    else:
        for waited in (partition, partition.log):
            waited.wait, waited.wait_async = fail, fail_async
    messages = [NewMessage(body=b"a", key=good), NewMessage(body=b"b", key=bad), NewMessage(body=b"c", key=good)]
    with pytest.raises(DiskFull) as caught:
        place.broker.publish_many("orders", messages)
    assert caught.value.__notes__ == [
        "2 of 3 messages are stored, in other partitions: those at indexes 0, 2 of the call; resend only the rest"
    ]
    assert taken(group) == [b"a", b"c"]
    with pytest.raises(DiskFull) as caught:
        place.broker.publish_many("orders", messages[1:2])
    assert not hasattr(caught.value, "__notes__")


# Groups


def test_what_a_closed_view_has_in_hand_can_still_be_settled(place):
    place.broker.create_topic("orders")
    place.broker.publish_many("orders", [b"a", b"b"])
    view = place.broker.group("orders", "billing")
    first, second = view.receive(timeout=0), view.receive(timeout=0)
    view.close()
    assert not first.lost
    first.ack()
    second.ack()
    place.reopen()
    assert taken(place.broker.group("orders", "billing")) == []


def test_two_handles_of_one_message_in_one_call_give_it_back_once(place):
    place.broker.create_topic("orders")
    place.broker.publish("orders", b"a")
    group = place.broker.group("orders", "billing")
    message = group.receive(timeout=0)
    again = group.resume(message.receipt)
    group.nack_many([message, again, message], delay=0)
    assert (message.settled, again.settled) == (True, True)
    place.kill()
    assert place.broker.group("orders", "billing").receive(timeout=0).attempt == 2


def test_dead_letters_that_are_switched_off_while_one_is_moved_leave_a_sound_journal(simple):
    simple.broker.create_topic("orders")
    simple.broker.publish("orders", b"bad")
    group = simple.broker.group("orders", "billing")
    message, delivery = group.receive(timeout=0), group._port.deliveries[0]
    graves = delivery.dead.open()
    append = graves._append

    def append_and_switch_off(batch: Any) -> None:
        append(batch)
        simple.broker.alter_topic("orders", dead_letters=False)
        delivery.dead.store_dead()

    graves._append = append_and_switch_off
    message.reject("no")
    simple.kill()
    assert taken(simple.broker.group("orders", "billing")) == []


def test_a_limit_holds_while_it_is_changed(simple):
    simple.broker.create_topic("orders", partitions=2)
    group = simple.broker.group("orders", "billing", key_group_separator="/", key_group_concurrency=1)
    for partition in (1, 0):
        simple.broker.publish("orders", b"%d" % partition, key=f"acme/{partition}", partition=partition)
    (message,) = group.receive_many(2, timeout=0)
    assert message.partition == 1  # which is changed last
    other = group._port.deliveries[1]
    change, taking, more = other.change, [], []

    def change_while_others_take(*arguments: Any, **options: Any) -> None:
        taking.append(aside(lambda: more.extend(group.receive_many(2, timeout=0))))
        change(*arguments, **options)

    other.change = change_while_others_take
    simple.broker.group("orders", "billing", key_group_fair=True)
    taking[0].join()
    assert more == []


def test_a_change_of_other_settings_waits_for_nobody_who_is_served_by_the_limits(simple):
    simple.broker.create_topic("orders", partitions=2)
    group = simple.broker.group("orders", "billing", key_group_concurrency=1)
    simple.broker.publish("orders", b"a", key="acme", partition=0)
    delivery = group._port.deliveries[1]
    change, taking = delivery.change, []

    def change_while_others_take(*arguments: Any, **options: Any) -> None:
        taking.append(aside(lambda: group.receive_many(2, timeout=0)))
        assert not taking[0].is_alive()
        change(*arguments, **options)

    delivery.change = change_while_others_take
    simple.broker.group("orders", "billing", max_attempts=9)
    assert taking


def test_lanes_keep_their_turns_though_each_message_is_taken_from_a_group_that_is_asked_for_anew(simple):
    simple.broker.create_topic("orders", priority_choice="fair", promote_after_ms=None)
    for priority in (9, 0):
        simple.broker.publish_many("orders", [NewMessage(body=b"%d" % priority, priority=priority)] * 60)
    got = []
    for _ in range(50):
        message = simple.broker.group("orders", "billing").receive(timeout=0)
        message.ack()
        got.append(message.body)
    assert b"0" in got


def test_a_disk_that_fails_when_producers_are_first_named_is_told_as_our_own_error(simple):
    def fail(path: str) -> None:
        raise OSError(5, "the disk is gone")

    simple.engine.world.disk.make_folder = fail
    with pytest.raises(HoldfastError, match="the disk is gone"):
        simple.engine.producers()


def test_messages_of_one_partition_are_handed_out_though_another_fails(simple):
    simple.broker.create_topic("orders", partitions=2, max_attempts=2)
    group = simple.broker.group("orders", "billing")
    for i in range(6):
        simple.broker.publish("orders", b"%d" % i, partition=0)

    def fail(*_: object, **__: object) -> None:
        raise DiskFailed("its journal is gone")

    group._port.deliveries[1].receive = fail
    got: list[bytes] = []
    failed = 0
    for _ in range(8):
        try:
            some = group.receive_many(4, timeout=0)
        except DiskFailed:
            failed += 1
            continue
        group.ack_many(some)
        got += [message.body for message in some]
    assert sorted(got) == [b"%d" % i for i in range(6)]
    assert failed
    assert not group._port.deliveries[0].group.leases


def test_a_group_that_is_made_while_urgent_messages_are_written_knows_how_urgent_they_are(simple):
    simple.broker.create_topic("orders")
    simple.broker.publish("orders", b"plain")
    partition = simple.engine.topic("orders").partitions[0]
    publication = partition.publish([Draft(b"urgent", priority=9)])  # written, and not yet to be read
    group = simple.broker.group("orders", "billing")
    partition.wait(publication)
    assert [message.body for message in group.receive_many(2, timeout=0)] == [b"urgent", b"plain"]


def test_a_deleted_group_holds_nothing_back_though_its_tick_is_under_way(simple):
    simple.broker.create_topic("orders")
    delivery = simple.broker.group("orders", "billing")._port.deliveries[0]
    simple.broker.delete_group("billing", "orders")
    delivery.pin()  # as the end of such a tick does
    assert simple.engine.topic("orders").partitions[0].log.pins == {}


def test_groups_that_come_and_go_leave_nothing_in_memory(simple):
    simple.broker.create_topic("orders", partitions=2)
    left = []
    for i in range(3):
        group = simple.broker.group("orders", f"g{i}")
        left += [weakref.ref(delivery) for delivery in group._port.deliveries]
        group.close()
        del group
        simple.broker.delete_group(f"g{i}", "orders")
    gc.collect()
    assert [found for ref in left if (found := ref()) is not None] == []


def test_a_deleted_group_leaves_no_dead_letter_though_one_is_on_its_way(simple):
    simple.broker.create_topic("orders")
    simple.broker.publish("orders", b"bad")
    group = simple.broker.group("orders", "billing")
    message = group.receive(timeout=0)
    graves = group._port.deliveries[0].dead.open()
    append, deleting = graves._append, []

    def delete_and_append(batch: Any) -> None:
        deleting.append(aside(lambda: simple.broker.delete_group("billing", "orders")))
        append(batch)

    graves._append = delete_and_append
    message.reject("no")
    deleting[0].join()
    again = simple.broker.group("orders", "billing", start="latest")
    assert again.dead.list() == []
    assert again.stats().dead == 0


def test_counting_dead_letters_keeps_no_consumer_waiting(simple):
    simple.broker.create_topic("orders")
    group = simple.broker.group("orders", "billing")
    delivery, held = group._port.deliveries[0], []
    delivery.dead.count = lambda: held.append(delivery.lock.locked()) or 0
    group.stats()
    assert held == [False]


def test_a_line_that_leaves_while_others_are_woken_costs_nobody_the_call(simple):
    simple.broker.create_topic("orders")
    partition = simple.engine.topic("orders").partitions[0]
    woken: list[str] = []

    class Line(Waiters):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __bool__(self) -> bool:
            return True

        def wake(self, count: int = 1) -> None:
            woken.append(self.name)
            if self.name != "stays" and self in partition.lines:
                partition.leave(self)

    for name in ["stays", "leaves", "stays", "leaves", "stays"]:
        partition.join(Line(name))
    partition.wake()
    assert woken.count("stays") == 3


# Partitions that are added


def test_a_message_that_dies_in_a_partition_just_added_does_not_stop_the_broker(simple, monkeypatch):
    simple.broker.create_topic("orders")
    group = simple.broker.group("orders", "billing")
    recover, working = Delivery.recover, []

    def work() -> None:
        for message in group.receive_many(10, timeout=0):
            message.reject("no")

    def recover_while_others_work(delivery: Delivery, *, dead: bool) -> None:
        simple.broker.publish("orders", b"bad", partition=1)
        working.append(aside(work))
        recover(delivery, dead=dead)

    monkeypatch.setattr(Delivery, "recover", recover_while_others_work)
    simple.broker.add_partitions("orders", 1)
    assert not working[0].is_alive()
    work()
    assert [letter.body for letter in group.dead.list()] == [b"bad"]


def test_consumers_look_again_when_a_partition_was_added(simple):
    simple.broker.create_topic("orders")
    group = simple.broker.group("orders", "billing")
    seen: list[int] = []
    group._port.queue_group.waiters.wake_all = lambda: seen.append(len(group._port.deliveries))
    simple.broker.add_partitions("orders", 1)
    assert seen[-1] == 2  # what was published there before could wake nobody


def test_a_partition_that_could_not_be_opened_is_added_by_the_next_try(simple, monkeypatch):
    simple.broker.create_topic("orders")
    group = simple.broker.group("orders", "billing")
    simple.broker.publish("orders", b"bad")
    group.receive(timeout=0).reject("no")  # so that there are dead letters to be opened
    add = QueueGroup.add

    def fail(group: QueueGroup, delivery: Delivery) -> None:
        raise DiskFull("no room")

    monkeypatch.setattr(QueueGroup, "add", fail)
    with pytest.raises(DiskFull):
        simple.broker.add_partitions("orders", 1)
    monkeypatch.setattr(QueueGroup, "add", add)
    assert len(simple.broker.add_partitions("orders", 1).partitions) == 2
    simple.broker.publish("orders", b"again", partition=1)
    group.receive(timeout=0).reject("no")
    assert group.dead.redrive(where=lambda letter: letter.body == b"again").done == 1
    assert taken(group) == [b"again"]


# The end


def test_closing_that_is_interrupted_lets_go_of_the_folder_all_the_same():
    place = Place()
    place.broker.create_topic("orders")
    place.broker.publish("orders", b"a")

    def interrupted() -> None:
        raise KeyboardInterrupt

    place.engine.before_close = interrupted
    with pytest.raises(KeyboardInterrupt):
        place.broker.close()
    place.broker = place.open()
    assert [message.body for message in place.broker.read("orders")] == [b"a"]


def test_closing_does_not_wait_for_a_compaction_to_end():
    place = Place()
    place.broker.create_topic("orders")
    topic, closed = place.engine.topic("orders"), []
    place.engine._cleaner = SimpleNamespace(before_close=lambda: closed.append(topic.closed))
    place.broker.close()
    assert closed == [True]


def test_a_forked_child_does_not_wait_for_a_lock_of_its_parent():
    place = Place()
    release = threading.Event()
    taken_ = threading.Event()

    def hold() -> None:
        with place.engine._lock:
            taken_.set()
            release.wait(10)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    taken_.wait(10)
    place.engine.disown()
    closing = aside(place.engine.close)
    assert not closing.is_alive()
    release.set()
    holder.join()


def test_a_tick_that_is_overtaken_by_the_end_tells_nobody_of_trouble(simple, caplog):
    simple.broker.create_topic("orders")
    topic = simple.engine.topic("orders")
    tick = topic.partitions[0].tick

    def tick_at_the_end() -> int | None:
        simple.engine.closed = True
        simple.engine.check_open()
        return tick()

    topic.partitions[0].tick = tick_at_the_end
    with pytest.raises(Closed):
        simple.engine.tick()
    simple.engine.closed = False
    assert [record.message for record in caplog.records] == []
