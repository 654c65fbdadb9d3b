"""The fused paths of put, get and ack do what the general ones do: the same answers, and the same bytes on disk.

Where leases and acks are noted in the scratch file, the bytes differ, but not the state that they add up to.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.broker import scratch
from holdfast.broker.inspect.status import replayed_group
from holdfast.delivery.image import GroupImage, check, image_of
from holdfast.errors import HoldfastError
from holdfast.storage.log import Log
from tests.unit.queues import FOLDER, Place

_JOURNAL = f"{FOLDER}/topics/jobs/0/groups/default"

_SETTINGS: list[dict[str, Any]] = [
    {},
    {"durability": "os"},
    {"key_order": True},
    {"trace_sample": 1.0},
    {"priority_choice": "fair"},
    {"promote_after_ms": 50},
    {"key_group_concurrency": 1, "key_group_separator": "/", "key_order": True, "trace_sample": 0.5},
    {"ttl_ms": 40, "expired_to_dead": True},
    {"max_attempts": 2},
]

_options = st.fixed_dictionaries(
    {},
    optional={
        "key": st.sampled_from(["a", "a/b", b"b"]),
        "priority": st.integers(0, 9),
        "headers": st.sampled_from([{"h": "x"}, {"h": b"x", "i": "y"}, {"ü": "ß"}]),
        "ttl": st.sampled_from([0.01, 10]),
        "delay": st.sampled_from([0.01, 0.05]),
        "dedup_id": st.sampled_from(["d", "e"]),
        "correlation_id": st.just("c"),
        "durability": st.sampled_from(["os", "fsync", "interval"]),
    },
)
_picks = st.integers(0, 20)
_steps = st.lists(
    st.tuples(st.just("put"), st.binary(max_size=9), _options)
    | st.tuples(st.just("put_many"), st.lists(st.binary(max_size=9), max_size=3))
    | st.tuples(st.just("get"))
    | st.tuples(st.sampled_from(["ack", "nack", "defer", "reject", "drop"]), _picks)
    | st.tuples(st.just("wait"), st.integers(1, 60))
    | st.tuples(st.just("seek"), st.sampled_from(["start", "end"]))
    | st.tuples(st.just("cancel"), _picks)
    | st.tuples(st.just("get_many"), st.integers(1, 3)),
    max_size=25,
)


class _Side:
    """One queue, and what was put into it and got from it."""

    def __init__(self, settings: dict[str, Any], *, fused: bool) -> None:
        self.place = Place(**settings)
        self.ids: list[str] = []
        self.held: list[Any] = []
        if not fused:
            port = self.place.q._port
            port.put_now = port.put_plain = port.take_next = lambda *_: None
            port.ack_now = lambda _: False
            for delivery in port.deliveries:
                delivery._receive_one = lambda *_: None
        self.fused = fused

    def do(self, step: tuple[Any, ...]) -> object:
        with nullcontext() if self.fused else patch.object(Log, "write_alone", lambda *_: -1):
            try:
                return self._do(*step)
            except HoldfastError as error:
                return type(error), str(error)

    def _do(self, verb: str, *rest: Any) -> object:
        queue = self.place.q
        match verb, *rest:
            case "put", body, options:
                stored = queue.put(body, **options)
                self.ids.append(stored.id)
                return stored
            case "put_many", bodies:
                many = queue.put_many(bodies)
                self.ids += [stored.id for stored in many]
                return list(many)
            case "get" | "get_many", *count:
                found = queue.get_many(count[0], timeout=0) if count else [queue.get(block=False)]
                self.held += found
                return [_shown(message) for message in found]
            case "wait", ms:
                return self.place.after(ms=ms)
            case "seek", to:
                return queue.seek(to)
            case "cancel", pick:
                return queue.cancel(self.ids[pick % len(self.ids)]) if self.ids else None
            case _, pick:
                if not self.held:
                    return None
                message = self.held.pop(pick % len(self.held))
                return None if verb == "drop" else getattr(message, verb)()
        raise AssertionError(verb)

    def traces(self) -> list[object]:
        engine = self.place.q._port.engine
        log = engine.traces.log.readable()
        return [] if log is None else [(record.timestamp_ns, record.key, record.value) for record in log.records(0)]

    def files(self) -> dict[str, bytes]:
        return {name: content for name, content in self.place.files().items() if "__traces" not in name}

    def image(self) -> GroupImage:
        """The state of the group, which must be sound, and the same for a reader of the files."""
        group = self.place.q._port.deliveries[0].group
        assert check(group) == []
        seen = replayed_group(self.place.world, _JOURNAL)
        assert seen.wrong == []
        assert _without_priorities(image_of(seen.group)) == _without_priorities(image_of(group))
        return image_of(group)


def _without_priorities(image: GroupImage) -> list[Any]:
    """An image without what is read from the messages, not from events."""
    read = {"ahead", "levels", "ready", "scanned"}
    return [getattr(image, name) for name in image.__struct_fields__ if name not in read]


def _shown(message: Any) -> tuple[object, ...]:
    return (
        message.id, message.body, message.key, dict(message.headers), message.priority, message.attempt,
        message.fence, message.holder, message.correlation_id, message.receipt,
    )  # fmt: skip


@example({"key_order": True}, [("put", b"", {}), ("get",), ("drop", 0)])
@given(st.sampled_from(_SETTINGS), _steps)
def test_fused_and_general_agree_step_by_step(settings, steps):
    with patch.object(scratch, "_STEADY", 3 * len(steps) + 10):
        _agree_to_the_byte(settings, steps)


def _agree_to_the_byte(settings: dict[str, Any], steps: list[Any]) -> None:
    fused, general = _Side(settings, fused=True), _Side(settings, fused=False)
    for step in [*steps, ("get",), ("wait", 20), ("get",), ("ack", 0), ("get",), ("ack", 1)]:
        assert fused.do(step) == general.do(step), step
        assert fused.files() == general.files(), step
    assert fused.traces() == general.traces()
    for side in (fused, general):
        side.held.clear()
        side.place.q.close()
    assert fused.files() == general.files()


@example({}, [("put", b"a", {}), ("put", b"b", {}), ("get",), ("get",), ("ack", 1), ("nack", 0)], 0)
@given(st.sampled_from(_SETTINGS), _steps, st.integers(0, 2))
def test_noted_and_general_agree_step_by_step(settings, steps, steady):
    noted, general = _Side(settings, fused=True), _Side(settings, fused=False)
    with patch.object(scratch, "_STEADY", steady):
        for step in [*steps, ("get",), ("wait", 20), ("get",), ("ack", 0), ("get",), ("ack", 1)]:
            assert noted.do(step) == general.do(step), step
            assert noted.image() == general.image(), step
        for side in (noted, general):
            side.held.clear()
            side.place.kill()
        assert noted.image() == general.image()
