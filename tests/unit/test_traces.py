"""Trace context, which messages are traced, what a group's events mean for them, and the log that keeps it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from holdfast.broker.delayed import Delayed
from holdfast.broker.messages import DEAD, DELAYED_ID, DeadNote, encode_note
from holdfast.broker.tracing import (
    TraceContext,
    TraceStep,
    format_tracestate,
    new_context,
    parse_traceparent,
    parse_tracestate,
)
from holdfast.broker.tracing.log import (
    STEPS,
    TRACE,
    PartitionTracer,
    Sampler,
    Search,
    TraceLog,
    decode_step,
    encode_step,
    newest,
    search,
    stats,
    trace,
)
from holdfast.broker.tracing.observer import GroupTracer
from holdfast.delivery.decide import EXPIRED, Moment, decide
from holdfast.delivery.events import (
    DEFERRED,
    DROPPED,
    Bury,
    Cancel,
    Event,
    Expired,
    Extend,
    GiveUp,
    Lost,
    Nack,
    OpenGroup,
    Reject,
    Seek,
    Tick,
)
from holdfast.delivery.events import Ack as AckCommand
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import InvalidRequest
from holdfast.model import Record
from holdfast.storage.reader import LogReader
from tests.unit.stories import PLAIN, Story

PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = PARENT[:-2] + b"00"
FOLDER = "/data/topics/__traces/0/log"
ALL = Sampler("orders", 7, 0, 1.0)
NEXT_TO_NONE = Sampler("orders", 7, 0, 1e-12)


class Sheet:
    """A sink in memory."""

    def __init__(self) -> None:
        self.steps: list[TraceStep] = []
        self.writes = 0
        self.errors: list[BaseException] = []

    def record(self, steps: Sequence[TraceStep]) -> None:
        self.steps += steps
        self.writes += 1

    def record_one(self, step: TraceStep) -> None:
        self.record([step])

    def failed(self, error: BaseException) -> None:
        self.errors.append(error)

    def steps_seen(self) -> list[tuple[Any, ...]]:
        return [(step.step, step.offset) for step in self.steps]


class TracedStory(Story):
    """A story whose events are traced as the shell does it."""

    def __init__(self, messages: int = 0, *, sampler: Sampler = ALL, headers: dict[int, Any] | None = None) -> None:
        self.sheet = Sheet()
        self.sampler = sampler
        self.headers = headers or {}
        self.tracer: GroupTracer | None = None
        self.read: list[int] = []
        super().__init__(messages)
        self.begin()

    def begin(self) -> None:
        """A tracer begins, with what the group holds by now."""
        self.tracer = GroupTracer(self.sampler, "billing", self.group, self.fetch, self.sheet)

    def fetch(self, offsets: Sequence[int]) -> list[Record]:
        self.read += offsets
        return [Record(offset, 5, b"body", headers=self.headers.get(offset, ())) for offset in offsets]

    def happen(self, *events: Event) -> None:
        if self.tracer is None:
            super().happen(*events)
            return
        steps = self.tracer.steps(events, self.wall_ms * 1_000_000)
        super().happen(*events)
        self.tracer.written(steps)

    def restart(self) -> None:
        """The owner ends and another one comes: what was held comes back."""
        self.tracer = None
        self.reopen()
        self.begin()
        self.when(GiveUp())

    @property
    def last(self) -> TraceStep:
        return self.sheet.steps[-1]


class Traces:
    """A log of traces on a simulated disk."""

    def __init__(self, retention_ms: int | None = None, disk: SimulatedDisk | None = None) -> None:
        self.disk = disk or SimulatedDisk()
        self.clock = ManualClock()
        self.ids = SeededIds(1)
        self.retention_ms = retention_ms
        self.log = TraceLog.open(self.world, FOLDER, retention_ms)

    @property
    def world(self) -> World:
        return World(clock=self.clock, disk=self.disk, ids=self.ids)

    def add(self, step: str, message: str = "orders-0-1", **more: Any) -> TraceStep:
        """One step, a second after the one before."""
        self.clock.advance(seconds=1)
        made = TraceStep(self.clock.now_ns(), step, message, **{"topic": message.rpartition("-")[0][:-2], **more})
        self.log.record([made])
        return made

    def kill(self) -> None:
        self.disk = self.disk.kill()
        self.log = TraceLog.open(self.world, FOLDER, self.retention_ms)

    def trace(self, message: str, since_ns: int = 0) -> list[str]:
        return [f"{step.id[9:]} {step.step}" for step in trace(self.log.log, message, since_ns)]

    def search(self, **wanted: Any) -> list[TraceStep]:
        return list(search(self.log.log, Search(**wanted)))


def test_a_traceparent_is_read_and_written():
    context = parse_traceparent(PARENT)
    assert context == TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", 1)
    assert context.sampled
    assert context.traceparent.encode() == PARENT
    assert context.child("b7ad6b7169203331").traceparent == "00-4bf92f3577b34da6a3ce929d0e0e4736-b7ad6b7169203331-01"
    assert not parse_traceparent(UNSAMPLED).sampled


def test_a_later_version_may_say_more_and_is_answered_in_the_first():
    text = "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-ff-what-the-future-has"
    context = parse_traceparent(text)
    assert context.sampled
    assert context.traceparent == "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"00",
        PARENT[:-1],
        PARENT + b"-more",
        PARENT + b"\n",
        b" " + PARENT,
        PARENT.upper(),
        b"ff" + PARENT[2:],
        b"cc" + PARENT[2:] + b".more",
        b"00-" + b"0" * 32 + b"-00f067aa0ba902b7-01",
        b"00-4bf92f3577b34da6a3ce929d0e0e4736-" + b"0" * 16 + b"-01",
        b"00-4bf92f3577b34da6a3ce929d0e0e473g-00f067aa0ba902b7-01",
        b"\xff" * 55,
        PARENT.replace(b"-", b"_"),
    ],
)
def test_what_is_no_traceparent_is_no_trace(text):
    assert parse_traceparent(text) is None


def test_new_contexts_are_made_of_the_worlds_numbers():
    ids = SeededIds(3)
    one, two = new_context(ids.random_u32), new_context(ids.random_u32, sampled=False)
    assert one == new_context(SeededIds(3).random_u32)
    assert one.trace_id != two.trace_id
    assert (one.sampled, two.sampled) == (True, False)
    assert parse_traceparent(one.traceparent) == one


def test_a_tracestate_keeps_its_order_and_is_void_as_a_whole():
    assert parse_tracestate(b"congo=t61rcWkgMzE , rojo=00f067aa0ba902b7,,\t1a@b=x y") == (
        ("congo", "t61rcWkgMzE"),
        ("rojo", "00f067aa0ba902b7"),
        ("1a@b", "x y"),
    )
    assert format_tracestate((("a", "1"), ("b", "2"))) == "a=1,b=2"
    assert parse_tracestate("") == ()
    for wrong in ("a", "=1", "A=1", "a=1,a=2", "a=é", "a=b=c", "a=", "a" * 257 + "=1", "a=" + "x" * 257):
        assert parse_tracestate(wrong) is None, wrong
    assert len(parse_tracestate(",".join(f"k{i}=v" for i in range(32)))) == 32
    assert parse_tracestate(",".join(f"k{i}=v" for i in range(33))) is None
    assert parse_tracestate("a=" + "," * 10_000) is None


def test_the_share_is_taken_by_place_and_is_the_same_each_time():
    sampler = Sampler("orders", 7, 0, 0.1)
    taken = {n for n in range(20_000) if sampler.chosen(n)}
    assert 1_800 < len(taken) < 2_200
    again = Sampler("orders", 7, 0, 0.1)
    assert taken == {n for n in range(20_000) if again.chosen(n)}
    larger = Sampler("orders", 7, 0, 0.2)
    assert taken < {n for n in range(20_000) if larger.chosen(n)}
    for other in (Sampler("orders", 8, 0, 0.1), Sampler("orders", 7, 1, 0.1), Sampler("others", 7, 0, 0.1)):
        assert taken != {n for n in range(20_000) if other.chosen(n)}
    assert all(ALL.chosen(n) for n in range(10_000))
    assert not any(Sampler("orders", 7, 0, 0.0).chosen(n) for n in range(10_000))


def test_a_message_is_in_the_trace_that_its_sender_began():
    traced = ALL.message([("traceparent", PARENT), ("tracestate", b"a=1, b=2")], 5)
    assert (traced.id, traced.trace_id, traced.parent_id, traced.state) == (
        "orders-0-5",
        "4bf92f3577b34da6a3ce929d0e0e4736",
        "00f067aa0ba902b7",
        "a=1,b=2",
    )
    assert traced.span_id not in ("", traced.parent_id)
    assert ALL.message([("TraceParent", PARENT)], 5).trace_id == traced.trace_id


def test_a_message_without_a_trace_gets_one_of_its_own():
    one, two = ALL.message([], 5), ALL.message([], 6)
    assert one == ALL.message([], 5)
    assert len({one.trace_id, two.trace_id}) == 2
    assert parse_traceparent(one.context.traceparent) is not None
    assert one.parent_id == one.state == ""


def test_a_sampled_parent_is_followed_whatever_the_share():
    assert NEXT_TO_NONE.message([("traceparent", PARENT)], 5) is not None
    assert NEXT_TO_NONE.message([("traceparent", UNSAMPLED)], 5) is None
    assert NEXT_TO_NONE.message([("traceparent", b"nonsense")], 5) is None
    assert ALL.message([("traceparent", b"nonsense")], 5).parent_id == ""
    assert ALL.message([("traceparent", UNSAMPLED)], 5).trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"


def test_a_delayed_message_keeps_its_id_and_its_choice_when_it_is_released():
    sampler = Sampler("orders", 7, 0, 0.5)
    for delayed_id in range(50):
        waiting = sampler.message([], None, delayed_id)
        released = sampler.message([(DELAYED_ID, b"%d" % delayed_id)], 1_000 + delayed_id)
        assert released == waiting
        assert waiting is None or waiting.id == f"orders-0-d{delayed_id}"


def test_publishing_is_noted_for_those_that_are_traced():
    sheet = Sheet()
    tracer = PartitionTracer(NEXT_TO_NONE, sheet, lambda: 0)
    tracer.published([(), (("traceparent", PARENT),), ()], 3, 3, 77)
    (step,) = sheet.steps
    assert (step.at_ns, step.step, step.id, step.offset, step.topic) == (77, "published", "orders-0-4", 4, "orders")
    assert step.parent_id == "00f067aa0ba902b7"
    PartitionTracer(ALL, sheet, lambda: 0).published(None, 8, 2, 78)
    assert sheet.steps_seen()[1:] == [("published", 8), ("published", 9)]


def test_a_delayed_message_is_published_delayed_and_released_under_one_id():
    sheet = Sheet()
    times = iter([20, 30])
    tracer = PartitionTracer(ALL, sheet, lambda: next(times))
    tracer.delayed([()], 9, [5_000], 10)
    tracer.released([Delayed(9, 5_000, Record(9, 1, b""))], 33)
    tracer.cancelled(9, ())
    assert [(s.step, s.id, s.offset, s.due_ms, s.at_ns) for s in sheet.steps] == [
        ("published", "orders-0-d9", None, 0, 10),
        ("delayed", "orders-0-d9", None, 5_000, 10),
        ("released", "orders-0-d9", 33, 0, 20),
        ("cancelled", "orders-0-d9", None, 0, 30),
    ]
    assert len({(s.trace_id, s.span_id) for s in sheet.steps}) == 1


def test_a_redriven_message_goes_on_in_the_trace_that_it_had():
    sheet = Sheet()
    sampler = Sampler("orders", 7, 0, 0.5)
    offset = next(n for n in range(100) if sampler.message([], n) and not sampler.message([], n + 100))
    tracer = PartitionTracer(sampler, sheet, lambda: 50)
    note = DeadNote(f"orders-0-{offset}", "orders", 0, "billing", offset, 1, "REJECTED", "no", 1, 1, 1, 1)
    letter = Record(0, 1, b"", headers=((DEAD, encode_note(note)),))
    header = tracer.trace_header(letter, note)
    assert [name for name, _ in header] == [TRACE]
    tracer.redriven([(letter, note)], offset + 100, 50)
    before, after = sheet.steps
    assert (before.step, before.id, before.related) == ("redriven", f"orders-0-{offset}", f"orders-0-{offset + 100}")
    assert (after.step, after.id, after.related, after.why) == ("published", before.related, before.id, "redriven")
    again = sampler.message(header, offset + 100)
    assert again.trace_id == before.trace_id == after.trace_id
    assert again.parent_id == before.span_id == after.parent_id
    assert again.span_id == after.span_id != before.span_id
    sent = sampler.message((("traceparent", PARENT), *header), offset + 100)
    assert sent.parent_id == before.span_id  # where it comes from last, whoever sent it first
    untraced = next(n for n in range(100) if not sampler.message([], n))
    note = msgspec.structs.replace(note, offset=untraced, id=f"orders-0-{untraced}")
    assert tracer.trace_header(letter, note) == ()
    tracer.redriven([(letter, note)], 500, 50)
    assert len(sheet.steps) == 2


def test_a_life_from_lease_to_ack():
    story = TracedStory(2)
    first, _second = story.receive(2, holder="ann")
    story.when(Extend([first], 500), after_ms=10)
    story.when(AckCommand([first]), after_ms=10)
    assert story.sheet.steps_seen() == [("leased", 0), ("leased", 1), ("extended", 0), ("acked", 0)]
    leased, other, extended, acked = story.sheet.steps
    assert {step.holder for step in story.sheet.steps} == {"ann"}
    assert {step.group for step in story.sheet.steps} == {"billing"}
    assert leased.until_ms == 1_000_050
    assert extended.until_ms == 1_000_510
    assert (leased.attempt, acked.attempt) == (1, 1)
    assert acked.at_ns - leased.at_ns == 20_000_000
    assert leased.span_id == extended.span_id == acked.span_id != other.span_id
    assert leased.parent_id == ALL.message([], 0).span_id


def test_a_nack_says_the_error_and_when_it_comes_again():
    story = TracedStory(1)
    (receipt,) = story.receive()
    story.when(Nack(receipt, error="no route"), after_ms=5)
    nacked = story.last
    assert (nacked.step, nacked.error, nacked.due_ms, nacked.holder, nacked.attempt) == (
        "nacked",
        "no route",
        1_000_105,
        "ann",
        1,
    )
    story.when(Tick(), after_ms=100)
    assert (story.last.step, story.last.offset, story.last.group) == ("released", 0, "billing")
    story.receive()
    assert (story.last.step, story.last.attempt) == ("leased", 2)
    assert story.last.span_id != nacked.span_id
    assert story.last.parent_id == nacked.parent_id


def test_a_message_that_is_ready_again_at_once_was_not_released():
    story = TracedStory(1)
    (receipt,) = story.receive()
    story.when(Nack(receipt, 0, why=DEFERRED, counted=False))
    assert story.sheet.steps_seen() == [("leased", 0), ("returned", 0)]
    assert (story.last.why, story.last.due_ms) == ("deferred", 0)
    story.receive()
    assert (story.last.step, story.last.attempt) == ("leased", 1)


def test_every_way_back_says_why():
    story = TracedStory(3)
    one, two, _three = story.receive(3)
    story.when(Nack(one, why=DROPPED))
    assert (story.last.step, story.last.why) == ("returned", "dropped unhandled")
    story.when(Tick(), after_ms=50)
    assert [(s.step, s.offset, s.why) for s in story.sheet.steps[-2:]] == [
        ("returned", 1, "lease ended"),
        ("returned", 2, "lease ended"),
    ]
    assert two.offset == 1


def test_a_burial_says_the_reason():
    story = TracedStory(2)
    one, two = story.receive(2)
    story.when(Reject(one, "broken"))
    assert (story.last.step, story.last.why, story.last.error, story.last.holder) == (
        "buried",
        "REJECTED",
        "broken",
        "ann",
    )
    for _ in range(4):
        story.when(Nack(two, 0, error="again"))
        (two,) = story.receive()
    story.when(Nack(two, 0, error="again"))
    assert (story.last.step, story.last.why, story.last.attempt) == ("buried", "MAX_ATTEMPTS", 5)


def test_what_nobody_took_is_expired_cancelled_or_buried_by_its_own_record():
    story = TracedStory(5, sampler=NEXT_TO_NONE, headers=dict.fromkeys((0, 2, 3), (("traceparent", PARENT),)))
    story.happen(Expired((0, 2)))
    story.when(Cancel(2))
    story.when(Bury((3, 5), EXPIRED))
    assert story.sheet.steps_seen() == [("expired", 0), ("cancelled", 2), ("buried", 3)]
    assert story.last.attempt == 0
    assert story.last.span_id == NEXT_TO_NONE.message(story.headers[3], 3).span_id


def test_lost_messages_are_noted_by_their_place():
    story = TracedStory(2)
    story.happen(Lost((0, 1)))
    assert story.sheet.steps_seen() == [("lost", 0)]
    assert story.read == []


def test_a_seek_is_noted_of_what_waited():
    story = TracedStory(4)
    (receipt,) = story.receive()
    story.when(Nack(receipt))
    story.when(Seek(3))
    assert story.sheet.steps_seen() == [("leased", 0), ("nacked", 0), ("skipped", 0)]
    story.when(Seek(0))
    story.receive()
    assert (story.last.step, story.last.offset) == ("leased", 0)


def test_only_traced_messages_make_steps_and_others_are_not_read_again():
    story = TracedStory(4, sampler=NEXT_TO_NONE, headers={2: (("traceparent", PARENT),)})
    receipts = story.receive(4)
    story.read.clear()
    story.when(AckCommand(receipts))
    assert story.sheet.steps_seen() == [("leased", 2), ("acked", 2)]
    assert story.read == []


def test_a_tracer_remembers_only_what_is_held():
    story = TracedStory(60)
    for _ in range(20):
        done, failed, dead = story.receive(3)
        story.when(AckCommand([done]))
        story.when(Nack(failed, 0))
        story.when(Reject(dead))
    story.receive(2)
    assert sorted(story.tracer._known) == sorted(story.group.leases)


def test_records_at_hand_are_not_read_again():
    story = TracedStory(2)
    story.tracer.loaded([Record(0, 1, b"", headers=(("traceparent", PARENT),)), Record(1, 1, b"")])
    story.receive(2)
    assert story.read == []
    assert story.sheet.steps[0].trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"


def test_what_was_held_before_is_traced_on_after_a_restart():
    headers = dict.fromkeys((0, 2), (("traceparent", PARENT),))
    story = TracedStory(3, sampler=NEXT_TO_NONE, headers=headers)
    receipts = story.receive(2, session=1)
    story.when(Nack(receipts[0]))
    leased = story.sheet.steps[0]
    story.restart()
    assert story.sheet.steps_seen() == [("leased", 0), ("nacked", 0)]  # nobody traces what else was held
    story.when(Tick(), after_ms=100)
    assert story.sheet.steps_seen()[2:] == [("released", 0)]
    assert story.last.trace_id == leased.trace_id
    assert story.last.span_id == leased.parent_id
    story.receive(2, session=story.group.session)
    leased = story.last
    story.restart()
    assert (story.last.step, story.last.offset, story.last.why) == ("returned", 0, "holder gone")
    assert (story.last.holder, story.last.span_id, story.last.attempt) == ("ann", leased.span_id, 2)


def test_steps_that_were_not_journaled_did_not_happen():
    story = TracedStory(1)
    (receipt,) = story.receive()
    acked = decide(story.group, AckCommand([receipt]), PLAIN, Moment(0, 0))
    assert len(story.tracer.steps(acked, 5)) == 1  # the write fails: nobody calls `written`
    assert story.sheet.steps_seen() == [("leased", 0)]
    story.when(AckCommand([receipt]))
    assert story.sheet.steps_seen() == [("leased", 0), ("acked", 0)]


def test_a_batch_of_steps_is_one_write():
    story = TracedStory(50)
    receipts = story.receive(50)
    assert story.sheet.writes == 1
    story.when(AckCommand(receipts))
    assert story.sheet.writes == 2
    assert len(story.sheet.steps) == 100


def test_a_log_that_cannot_be_read_costs_the_trace_and_nothing_else():
    story = TracedStory(1)

    def broken(offsets: Sequence[int]) -> list[Record]:
        raise ValueError("what a day")

    story.tracer = GroupTracer(ALL, "billing", story.group, broken, story.sheet)
    (receipt,) = story.receive()
    story.when(AckCommand([receipt]))
    assert story.sheet.steps == []
    assert [str(error) for error in story.sheet.errors] == ["what a day"]
    assert story.phases() == "d"


def test_an_opening_is_no_step():
    story = TracedStory(1)
    story.when(OpenGroup(7, 1))
    assert story.sheet.steps == []


def test_steps_are_stored_by_name_and_without_what_they_do_not_say():
    step = TraceStep(5, "acked", "orders-0-1", "orders", offset=1, group="billing")
    assert decode_step(encode_step(step)) == step
    assert msgspec.msgpack.decode(encode_step(step)) == {
        "at_ns": 5,
        "step": "acked",
        "id": "orders-0-1",
        "topic": "orders",
        "offset": 1,
        "group": "billing",
    }
    later = msgspec.msgpack.encode({**msgspec.structs.asdict(step), "of_the_future": 1})
    assert decode_step(later) == step


def test_steps_are_found_by_message_and_survive_a_kill():
    traces = Traces()
    for step in ("published", "leased", "acked"):
        traces.add(step)
        traces.add(step, "orders-0-11")
        traces.add(step, "orders-0-111", topic="orders")
    traces.kill()
    assert traces.trace("orders-0-1") == ["1 published", "1 leased", "1 acked"]
    assert traces.trace("orders-0-2") == []
    traces.log.close()


def test_the_life_goes_on_through_a_redrive_whichever_message_is_asked_for():
    traces = Traces()
    traces.add("published", "orders-0-1")
    traces.add("buried", "orders-0-1")
    traces.add("redriven", "orders-0-1", related="orders-0-5")
    begun = traces.add("published", "orders-0-5", related="orders-0-1", why="redriven")
    traces.add("buried", "orders-0-5")
    traces.add("redriven", "orders-0-5", related="orders-0-9")
    traces.add("published", "orders-0-9", related="orders-0-5", why="redriven")
    traces.add("acked", "orders-0-9")
    traces.add("published", "orders-0-7")
    whole = [
        "1 published",
        "1 buried",
        "1 redriven",
        "5 published",
        "5 buried",
        "5 redriven",
        "9 published",
        "9 acked",
    ]
    assert [traces.trace(f"orders-0-{n}") for n in (1, 5, 9)] == [whole] * 3
    assert traces.trace("orders-0-5", begun.at_ns) == whole


def test_an_earlier_message_in_the_same_place_is_another_message():
    traces = Traces()
    traces.add("published")
    traces.add("acked")
    again = traces.add("published")
    traces.add("leased")
    assert traces.trace("orders-0-1") == ["1 published", "1 leased"]
    assert traces.trace("orders-0-1", again.at_ns) == ["1 published", "1 leased"]


def test_steps_are_told_in_the_order_of_time():
    traces = Traces()
    late = traces.clock.now_ns() + 5
    traces.log.record([TraceStep(late, "leased", "orders-0-1", "orders")])  # the consumer was quicker to write it down
    traces.log.record([TraceStep(late - 5, "published", "orders-0-1", "orders")])
    assert traces.trace("orders-0-1") == ["1 published", "1 leased"]


def test_a_search_by_anything():
    traces = Traces()
    first = traces.add("leased", group="billing", holder="ann")
    second = traces.add("nacked", group="billing", holder="ann", error="No route to host")
    third = traces.add("nacked", "others-0-1", group="audit", holder="bob", error="full")
    assert traces.search() == [first, second, third]
    assert traces.search(topic="orders") == [first, second]
    assert traces.search(topic="order") == []
    assert traces.search(group="audit") == [third]
    assert traces.search(event="nacked") == [second, third]
    assert traces.search(holder="bob", event="leased") == []
    assert traces.search(error="no ROUTE") == [second]
    assert traces.search(since_ns=second.at_ns) == [second, third]
    assert traces.search(since_ns=second.at_ns + 1) == [third]
    assert traces.search(until_ns=second.at_ns) == [first, second]
    assert traces.search(since_ns=third.at_ns + 10**12) == []
    assert newest(search(traces.log.log, Search()), 2) == [second, third]


def test_a_search_from_a_time_on_does_not_read_what_is_older():
    traces = Traces()
    steps = [traces.add("leased") for _ in range(20)]
    log = traces.log.log
    read = []

    class Watched:
        start, end, find_time = log.start, log.end, log.find_time

        def read(self, offset: int, *, on_damage: Any = "raise") -> Any:
            read.append(offset)
            return log.read(offset, on_damage=on_damage)

    assert list(search(Watched(), Search(since_ns=steps[15].at_ns))) == steps[15:]
    assert trace(Watched(), "orders-0-1", steps[10].at_ns) == steps[10:]
    assert read == [15, 10]


def test_a_search_for_what_cannot_be_says_what_can():
    with pytest.raises(InvalidRequest, match="did you mean leased"):
        Search(event="lease")
    with pytest.raises(InvalidRequest, match="give a text"):
        Search(error=5)
    for event in STEPS:
        Search(event=event)


def test_a_step_that_cannot_be_written_is_counted_and_said_once(caplog):
    traces = Traces(disk=SimulatedDisk(maps=False))
    traces.add("published")
    traces.disk.faults.fail(1, errno.EIO, sticky=True, calls=frozenset({"write"}))
    with caplog.at_level(logging.ERROR):
        traces.add("leased")
        traces.add("acked")
    assert traces.disk.faults.fired
    assert traces.log.lost == 2
    said = [record.message for record in caplog.records if record.name == "holdfast.broker.tracing.log"]
    assert said == ["trace steps lost; the messages are safe"]
    assert traces.trace("orders-0-1") == ["1 published"]


def test_a_step_that_cannot_be_encoded_is_lost_like_any_other():
    traces = Traces()
    traces.add("leased", holder="\udcff")
    assert traces.log.lost == 1
    traces.add("acked")
    assert [step.step for step in traces.search()] == ["acked"]


def test_a_log_that_cannot_be_opened_is_tried_again_with_the_next_tick(caplog):
    tries = 0

    def refuse() -> Any:
        nonlocal tries
        tries += 1
        raise InvalidRequest("not here")

    log = TraceLog(refuse)
    step = TraceStep(1, "acked", "orders-0-1", "orders")
    for _ in range(5):
        log.record([step])
    assert (tries, log.lost) == (1, 5)
    assert log.tick() is None
    log.record([step])
    assert (tries, log.lost) == (2, 6)
    log.close()
    log.tick()
    log.record([step])
    assert (tries, log.lost) == (2, 7)
    assert len(caplog.records) == 2


def test_old_traces_go_by_their_own_retention():
    traces = Traces(retention_ms=10 * 3_600_000)
    traces.add("published")
    traces.clock.advance(seconds=2 * 3600)
    traces.log.tick()
    kept = traces.add("leased")
    traces.clock.advance(seconds=9 * 3600)
    traces.log.tick()
    assert traces.search() == [kept]


def test_traces_are_read_by_a_process_that_does_not_own_them():
    traces = Traces()
    step = traces.add("published")
    reader = LogReader(FOLDER, world=traces.world)
    assert trace(reader, "orders-0-1") == [step]
    assert list(search(reader, Search(topic="orders"))) == [step]


def test_a_step_of_another_release_is_passed_over():
    traces = Traces()
    step = traces.add("published")
    traces.log.log.append([b"\xc1 no step at all"])
    assert traces.search() == [step]
    assert traces.trace("orders-0-1") == ["1 published"]


def test_damage_costs_the_steps_that_it_hit_and_no_others():
    traces = Traces()
    for step in ("published", "leased", "acked"):
        traces.add(step)
    position = next(traces.log.log.read(1)).header.position
    traces.disk.flip(f"{FOLDER}/{0:020}.log", position + 100, 0xFF)
    assert [step.step for step in traces.search()] == ["published", "acked"]
    assert traces.trace("orders-0-1") == ["1 published", "1 acked"]


def test_the_numbers_of_a_few_lives():
    traces = Traces()
    traces.add("published")
    traces.add("leased", group="g", attempt=1)
    traces.add("nacked", group="g", attempt=1, error="oh")
    traces.add("released", group="g", attempt=1)
    traces.add("leased", group="g", attempt=2)
    traces.add("acked", group="g", attempt=2)
    traces.add("published", "orders-0-2")
    traces.add("delayed", "orders-0-2")
    traces.add("released", "orders-0-2")
    traces.add("leased", "orders-0-2", group="g", attempt=1)
    traces.add("buried", "orders-0-2", group="g", attempt=1, error="oh")
    found = stats(traces.search())
    assert found.messages == 2
    assert found.steps["leased"] == 3
    assert (found.first_delivery.count, found.first_delivery.sum) == (2, 2.0)
    assert (found.handling.count, found.handling.sum) == (3, 3.0)
    assert found.attempts == {1: 1, 2: 1}
    assert found.errors == [("oh", 2)]
    assert stats([]).messages == 0
