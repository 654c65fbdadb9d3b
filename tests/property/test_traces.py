"""Any text is read without an error, and any history of a group makes lives that can be, restarted or not."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.broker.tracing import TraceStep, format_tracestate, parse_traceparent, parse_tracestate
from holdfast.broker.tracing.log import Sampler, Search, decode_step, encode_step
from holdfast.delivery.events import Ack, Cancel, Expired, Extend, GiveUp, Nack, Phase, Reject, Tick
from holdfast.errors import Empty
from tests.unit.queues import Place
from tests.unit.test_traces import PARENT, TracedStory

HEX = "0123456789abcdef"

# What may follow a step of a message in one group. Whatever is ready may be leased, cancelled, buried or expired.
READY = {"leased", "cancelled", "buried", "expired"}
NEXT = {
    "": READY,
    "leased": {"extended", "acked", "nacked", "returned", "buried"},
    "extended": {"extended", "acked", "nacked", "returned", "buried"},
    "nacked": {"released", "cancelled", *READY},
    "returned": {"released", "cancelled", *READY},
    "released": READY,
}


near_misses = st.builds(
    lambda text, at, more: text[: at % 60] + more + text[at % 60 :],
    st.just(PARENT.decode()),
    st.integers(0, 59),
    st.text(HEX + "-F\n", max_size=3),
)


@given(st.text(HEX + "-=,@*AZ \t\x7fü", max_size=80) | st.binary(max_size=80) | near_misses)
def test_any_text_is_a_context_or_none(text):
    context = parse_traceparent(text)
    if context is not None:
        again = parse_traceparent(context.traceparent)
        assert (again.trace_id, again.span_id, again.sampled) == (context.trace_id, context.span_id, context.sampled)
    state = parse_tracestate(text)
    assert state is None or parse_tracestate(format_tracestate(state)) == state


@given(
    st.text(HEX, min_size=32, max_size=32), st.text(HEX, min_size=16, max_size=16), st.text(HEX, min_size=2, max_size=2)
)
def test_every_valid_context_is_read(trace_id, span_id, flags):
    context = parse_traceparent(f"00-{trace_id}-{span_id}-{flags}")
    if set(trace_id) == {"0"} or set(span_id) == {"0"}:
        assert context is None
    else:
        assert (context.trace_id, context.span_id, context.flags) == (trace_id, span_id, int(flags, 16))


@given(
    st.integers(0, 2**32), st.integers(0, 9_999), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**62), st.booleans()
)
def test_a_larger_share_takes_all_that_a_smaller_one_does(topic_id, partition, one, two, place, delayed):
    small, large = (Sampler("t", topic_id, partition, rate) for rate in sorted([one, two]))
    args = (None, place) if delayed else (place, None)
    found = small.message((), *args)
    if found is not None:
        assert found == large.message((), *args)
        assert parse_traceparent(found.context.traceparent) == found.context


commands = st.lists(
    st.tuples(
        st.sampled_from(["publish", "receive", "ack", "nack", "defer", "reject", "extend", "cancel", "expire", "tick"]),
        st.integers(0, 30),
    ),
    max_size=40,
)


def play(history: list[tuple[str, int]], *, restarts: bool) -> TracedStory:
    headers = dict.fromkeys(range(1, 100, 3), (("traceparent", PARENT),))
    story = TracedStory(3, sampler=Sampler("orders", 7, 0, 0.3), headers=headers)
    held = []
    for what, n in history:
        if restarts:
            story.begin()  # knows nothing of what went before
        held = [receipt for receipt in held if story.group.phase(receipt.offset) is Phase.LEASED]
        held = [receipt for receipt in held if story.group.leases[receipt.offset].fence == receipt.fence]
        receipt = held[n % len(held)] if held else None
        if what == "publish":
            story.publish(*[0] * (n % 4))
        elif what == "receive":
            held += story.receive(n % 4 + 1, lease_ms=n + 1)
        elif what == "tick":
            story.when(Tick(), after_ms=n * 10)
        elif what == "cancel":
            story.when(Cancel(n % len(story.log)))
        elif what == "expire":
            if n < len(story.log) and story.group.phase(n) is Phase.READY:
                story.happen(Expired((n, n + 1)))
        elif receipt is not None:
            command = {
                "ack": Ack([receipt]),
                "nack": Nack(receipt, n if n % 2 else 0, error="e"),
                "defer": Nack(receipt, 0, counted=False),
                "reject": Reject(receipt),
                "extend": Extend([receipt], n + 1),
            }[what]
            story.when(command)
    story.when(GiveUp())
    return story


@settings(max_examples=60)
@given(commands)
def test_the_steps_of_each_traced_message_make_a_life_and_no_other_message_has_any(history):
    story = play(history, restarts=False)
    story.hold()
    assert not story.sheet.errors
    lives: dict[int, list[TraceStep]] = {}
    for step in story.sheet.steps:
        lives.setdefault(step.offset, []).append(step)
        assert decode_step(encode_step(step)) == step
        assert Search().wants(step)
    for offset, life in lives.items():
        traced = story.sampler.of(story.fetch([offset])[0])
        assert traced is not None
        before = ""
        for step in life:
            assert step.step in NEXT.get(before, ()), [step.step for step in life]
            assert (step.id, step.trace_id) == (traced.id, traced.trace_id)
            before = step.step
        ended = {"acked", "buried", "cancelled", "expired"}
        settled = story.group.phase(offset) in (Phase.DONE, Phase.DEAD)
        assert settled == (before in ended)
        assert story.group.phase(offset) is not Phase.LEASED or before in ("leased", "extended")
    moved = {offset for offset in range(len(story.log)) if story.group.phase(offset) is not Phase.READY}
    assert {offset for offset in moved if story.sampler.of(story.fetch([offset])[0])} <= set(lives)


@settings(max_examples=60)
@given(commands)
def test_a_tracer_that_begins_in_the_middle_tells_the_same(history):
    assert play(history, restarts=True).sheet.steps == play(history, restarts=False).sheet.steps


SETTLE = ("ack", "nack", "defer", "reject")
CALLS = (*SETTLE, "put", "many", "later", "get", "take", "extend", "cancel", "redrive", "wait", "reopen", "kill")
calls = st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 7)), max_size=25)


class Player:
    """A queue that is played on; what it answers is written down."""

    def __init__(self, rate: float) -> None:
        self.place = Place(trace_sample=rate, max_attempts=2)
        self.held: list[Any] = []
        self.answers: list[Any] = []
        self.acked = 0

    def play(self, what: str, n: int) -> None:
        if what in SETTLE:
            self.settle(what, n)
        else:
            self.answers.append(getattr(self, what)(n))
        self.held = [message for message in self.held if not message.lost]
        numbers = self.place.numbers()
        self.answers.append([numbers[name] for name in ("ready", "leased", "delayed", "dead", "end", "floor")])

    def settle(self, how: str, n: int) -> None:
        if self.held:
            getattr(self.held.pop(n % len(self.held)), how)()
            self.acked += how == "ack"

    def put(self, n: int) -> str:
        return self.place.q.put(b"%d" % n, priority=n % 3, ttl=n or None).id

    def many(self, n: int) -> list[str]:
        return [stored.id for stored in self.place.q.put_many([b"m"] * n)]

    def later(self, n: int) -> str:
        return self.place.q.put(b"later", delay=n, headers={"traceparent": PARENT}).id

    def get(self, n: int) -> Any:
        try:
            message = self.place.q.get(timeout=0, lease=n + 1)
        except Empty:
            return None
        self.held.append(message)
        return message.id, message.attempt

    def take(self, n: int) -> list[str]:
        taken = self.place.q.get_many(n + 1, timeout=0)
        self.held += taken
        return [message.id for message in taken]

    def extend(self, n: int) -> None:
        if self.held:
            self.held[-1].extend(n + 1)

    def cancel(self, n: int) -> bool:
        return n < self.place.q.stats().end and self.place.q.cancel(f"jobs-0-{n}")

    def redrive(self, n: int) -> int:
        return self.place.q.dead.redrive().done

    def wait(self, n: int) -> None:
        self.place.after(seconds=n)

    def reopen(self, n: int) -> None:
        self.held.clear()
        self.place.reopen()

    def kill(self, n: int) -> None:
        self.held.clear()
        self.place.kill()


@settings(max_examples=25)
@given(calls)
def test_a_queue_that_is_traced_answers_as_one_that_is_not(history):
    plain, traced = Player(0.0), Player(1.0)
    for what, n in history:
        plain.play(what, n)
        traced.play(what, n)
        assert traced.answers == plain.answers
    log = traced.place.q._port.engine.traces.log
    assert log.lost == 0
    steps = traced.place.q._port.engine.traces.search(Search(), 10_000)
    counts = Counter(step.step for step in steps)
    assert counts["acked"] == traced.acked
    assert counts["published"] == len({step.id for step in steps})
    assert counts["leased"] >= counts["acked"] + counts["nacked"]
    for message in {step.id for step in steps}:
        assert traced.place.q._port.engine.trace(message)[0].step == "published"
    plain.place.q.close()
    traced.place.q.close()
