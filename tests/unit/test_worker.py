"""The worker with handlers that are plain functions."""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Closed, InvalidRequest, LeaseLost, NotAQueue, Reject, Retry, Unavailable, UnknownTopic, Worker
from tests.unit.workers import PATIENCE_S, Place, ended, eventually


@pytest.fixture
def place(tmp_path: Path):
    place = Place(tmp_path)
    yield place
    place.q.close()


def test_what_the_handler_returns_from_is_acked(place: Place):
    place.q.put_many([b"%d" % number for number in range(100)])
    seen = []
    worker = place.worker(lambda message: seen.append(message.body), concurrency=4)
    worker.start()
    eventually(lambda: worker.health().handled == 100)
    assert ended(worker) == 0
    assert sorted(seen, key=int) == [b"%d" % number for number in range(100)]
    assert (place.q.stats().ready, place.q.stats().leased, place.errors) == (0, 0, [])


def test_what_it_raises_counts_as_an_attempt_and_is_kept_with_the_message(tmp_path: Path):
    place = Place(tmp_path, max_attempts=2)
    stored = place.q.put(b"bad")

    def handler(message: Any) -> None:
        raise ValueError(f"attempt {message.attempt}")

    with place.worker(handler) as worker:
        eventually(lambda: place.q.stats().dead == 1)
        eventually(lambda: worker.health().failed == 2)
    (letter,) = place.q.dead.list()
    assert [failure.error.splitlines()[0] for failure in letter.failures] == [
        "ValueError: attempt 1",
        "ValueError: attempt 2",
    ]
    assert [(str(error), message.id) for error, message in place.errors] == [
        ("attempt 1", stored.id),
        ("attempt 2", stored.id),
    ]
    place.q.close()


def test_no_more_is_taken_than_handlers_are_free(place: Place):
    place.q.put_many([b"a"] * 10)
    go, begun = threading.Event(), threading.Semaphore(0)

    def handler(message: Any) -> None:
        begun.release()
        assert go.wait(PATIENCE_S)

    with place.worker(handler, concurrency=3) as worker:
        for _ in range(3):
            assert begun.acquire(timeout=PATIENCE_S)
        assert (place.q.stats().leased, worker.health().running) == (3, 3)
        go.set()
        eventually(lambda: worker.health().handled == 10)


def test_reject_goes_straight_to_the_dead_letters(place: Place):
    place.q.put(b"nonsense")

    def handler(message: Any) -> None:
        try:
            int(message.body)
        except ValueError as error:
            raise Reject("no number") from error

    with place.worker(handler) as worker:
        eventually(lambda: worker.health().rejected == 1)
    (letter,) = place.q.dead.list()
    assert letter.reason == "REJECTED"
    assert letter.failures[-1].error.startswith("ValueError: invalid literal for int()")
    assert (place.errors, worker.health().failed) == ([], 0)


def test_retry_says_when_to_come_back(place: Place):
    place.q.put(b"later")

    def handler(message: Any) -> None:
        raise Retry("the bank is closed", delay=3600)

    with place.worker(handler) as worker:
        eventually(lambda: worker.health().retried == 1)
    (delayed,) = place.q.messages("delayed")
    assert (delayed.attempts, delayed.error) == (1, "the bank is closed")
    assert place.errors == []


def test_a_wish_that_makes_no_sense_is_a_failure_like_others(place: Place):
    place.q.put(b"later")

    def handler(message: Any) -> None:
        if message.attempt == 1:
            raise Retry(delay=-1)

    with place.worker(handler) as worker:
        eventually(lambda: worker.health().handled == 1)
    assert isinstance(place.errors[0][0], InvalidRequest)


def test_what_the_handler_settles_itself_is_respected(place: Place):
    place.q.put_many([b"ack", b"reject", b"defer"])

    def handler(message: Any) -> None:
        if message.raw == b"defer":
            message.defer(delay=3600)
        else:
            getattr(message, message.raw.decode())()

    with place.worker(handler) as worker:
        eventually(lambda: worker.health().handled == 3)
    assert place.attempts_of("delayed") == [(b"defer", 0)]
    assert [letter.raw for letter in place.q.dead.list()] == [b"reject"]
    assert (place.q.stats().leased, place.errors) == (0, [])


def test_an_error_after_the_handler_has_settled_is_told_of_and_changes_nothing(place: Place):
    place.q.put(b"a")

    def handler(message: Any) -> None:
        message.ack()
        raise OSError("too late to matter")

    with place.worker(handler) as worker:
        eventually(lambda: worker.health().failed == 1)
    assert place.q.stats().ready == 0
    assert [str(error) for error, _ in place.errors] == ["too late to matter"]


def test_leaving_by_sys_exit_is_a_failure_and_no_way_out(place: Place):
    place.q.put_many([b"exit", b"go on"])

    def handler(message: Any) -> None:
        if message.raw == b"exit" and message.attempt == 1:
            raise SystemExit(7)

    with place.worker(handler, concurrency=1) as worker:
        eventually(lambda: worker.health().handled == 2)
    assert worker.health().failed == 1


def test_a_plain_function_that_returns_a_coroutine_has_handled_nothing(place: Place):
    place.q.put(b"a")

    async def work(message: Any, factor: int) -> None: ...

    with place.worker(lambda message: work(message, 2)) as worker:
        assert place.notified.wait(PATIENCE_S)
    assert "make it async def" in str(place.errors[0][0])
    assert worker.health().handled == 0


def test_a_handler_that_outlives_its_lease_keeps_it(tmp_path: Path):
    place = Place(tmp_path)
    place.q.put(b"long")
    leases = place.q._port.deliveries[0].group.leases
    lost = []

    def handler(message: Any) -> None:
        first_ms = leases[message.offset].until_ms
        eventually(lambda: leases[message.offset].until_ms > first_ms + 100)  # its time, had nobody renewed it
        lost.append(message.lost)

    with place.worker(handler, lease=0.1) as worker:
        eventually(lambda: worker.health().handled == 1)
    assert (lost, place.errors) == ([False], [])
    place.q.close()


def test_a_lease_that_was_lost_shows_in_the_handler_and_is_told_of(place: Place):
    place.q.put(b"moved on")
    lost = []

    def handler(message: Any) -> None:
        if not lost:
            place.q.resume(message.receipt).defer()  # an operator takes it away
        lost.append(message.lost)

    with place.worker(handler, concurrency=1) as worker:
        eventually(lambda: worker.health().handled == 1)
    assert (lost, worker.health().lost) == ([True, False], 1)
    assert [type(error) for error, _ in place.errors] == [LeaseLost]


def test_a_handler_that_has_had_its_time_loses_its_message_and_its_slot_is_replaced(place: Place):
    place.q.put(b"hangs")
    hung, go = threading.Event(), threading.Event()
    attempts, threads = [], []

    def handler(message: Any) -> None:
        attempts.append(message.attempt)
        threads.append(threading.current_thread())
        if message.attempt == 1:
            hung.set()
            assert go.wait(PATIENCE_S)
            assert message.settled

    worker = place.worker(handler, concurrency=1, time_limit=5)
    worker.start()
    assert hung.wait(PATIENCE_S)
    place.clock.advance(seconds=4.9)
    assert worker.health().timed_out == 0
    place.clock.advance(seconds=0.2)
    eventually(lambda: worker.health().handled == 1)  # by another thread, while the first one hangs
    go.set()
    threads[0].join(PATIENCE_S)
    assert not threads[0].is_alive()  # nobody needs it any more
    assert ended(worker) == 0
    assert (attempts, worker.health().handled) == ([1, 2], 1)
    assert (worker.health().timed_out, worker.health().failed) == (1, 0)
    ((error, message),) = place.errors
    assert isinstance(error, TimeoutError)
    assert (str(error), message.raw) == ("the handler ran for longer than its time limit of 5 s", b"hangs")


def test_a_handler_that_ends_just_in_time_is_not_disturbed(place: Place):
    place.q.put_many([b"a", b"b"])
    worker = place.worker(lambda message: None, concurrency=1, time_limit=5)
    with worker:
        eventually(lambda: worker.health().handled == 2)
        place.clock.advance(seconds=60)
        place.q.put(b"c")
        eventually(lambda: worker.health().handled == 3)
    assert worker.health().timed_out == 0


def test_at_the_end_what_runs_is_finished_and_nothing_more_is_taken(place: Place):
    place.q.put_many([b"a", b"b", b"c"])
    begun, go = threading.Event(), threading.Event()

    def handler(message: Any) -> None:
        begun.set()
        assert go.wait(PATIENCE_S)

    worker = place.worker(handler, concurrency=1)
    worker.start()
    assert begun.wait(PATIENCE_S)
    worker.stop()
    eventually(lambda: worker.health().status == "draining")
    assert worker.wait(0.01) is None
    go.set()
    assert worker.wait(PATIENCE_S) == 0
    assert (worker.health().status, worker.health().handled) == ("stopped", 1)
    assert place.attempts_of("ready") == [(b"b", 0), (b"c", 0)]


def test_what_does_not_finish_in_time_is_given_back_with_the_reason(place: Place):
    place.q.put(b"hangs")
    begun, go = threading.Event(), threading.Event()

    def handler(message: Any) -> None:
        begun.set()
        go.wait(PATIENCE_S)

    worker = place.worker(handler, drain=10)
    worker.start()
    assert begun.wait(PATIENCE_S)
    worker.stop()
    eventually(lambda: worker.health().status == "draining")
    place.clock.advance(seconds=9)
    assert worker.wait(0.05) is None
    place.clock.advance(seconds=1)
    assert worker.wait(PATIENCE_S) == 1
    go.set()
    assert worker.health().cut_off == 1
    (listed,) = [*place.q.messages("ready"), *place.q.messages("delayed")]
    assert listed.attempts == 1
    assert listed.error == "shutdown: the worker ended, and waited 10 s for its handler"


def test_what_was_taken_and_not_begun_is_given_back_as_if_untouched(place: Place):
    class Slow:
        """A queue whose answer comes when the worker has been stopped."""

        name = "slow"
        closed = False

        def receive_many(self, *arguments: Any, **options: Any) -> Any:
            asked.set()
            assert go.wait(PATIENCE_S)
            return place.q.receive_many(*arguments, **options)

    place.q.put(b"a")
    asked, go = threading.Event(), threading.Event()
    worker = place.worker(lambda message: pytest.fail("too late"), queue=Slow())
    worker.start()
    assert asked.wait(PATIENCE_S)
    worker.stop()
    eventually(lambda: worker.health().status == "draining")
    go.set()
    assert worker.wait(PATIENCE_S) == 0
    assert worker.health().given_back == 1
    assert place.attempts_of("ready") == [(b"a", 0)]


class Frail:
    """A queue that fails so often, and then works."""

    def __init__(self, queue: Any, failures: int, error: type[Exception] = Unavailable) -> None:
        self._queue = queue
        self._error = error
        self.left = failures
        self.name = "frail"

    @property
    def closed(self) -> bool:
        return bool(self._queue.closed)

    def receive_many(self, *arguments: Any, **options: Any) -> Any:
        if self.left:
            self.left -= 1
            raise self._error("the server is away")
        return self._queue.receive_many(*arguments, **options)


def test_receiving_that_fails_is_tried_again_after_a_pause_that_grows(place: Place, caplog: pytest.LogCaptureFixture):
    place.q.put(b"a")
    caplog.set_level(logging.WARNING)
    frail = Frail(place.q, 3)
    with place.worker(lambda message: None, queue=frail) as worker:
        pauses = []
        for number in range(1, 4):
            eventually(lambda number=number: len(place.errors) == number)
            pauses.append(caplog.records[-1].args[0])
            place.clock.advance(seconds=pauses[-1])
        eventually(lambda: worker.health().handled == 1)
        assert worker.health().restarts == 3
        frail.left = 1
        eventually(lambda: len(place.errors) == 4)
        assert caplog.records[-1].args[0] <= 0.1  # from the beginning, since it went well in between
    assert [isinstance(error, Unavailable) and message is None for error, message in place.errors] == [True] * 4
    assert all(low <= pause <= 2 * low for low, pause in zip((0.05, 0.1, 0.2), pauses, strict=True))


def test_an_error_of_any_kind_does_not_end_it(place: Place):
    place.q.put(b"a")
    with place.worker(lambda message: None, queue=Frail(place.q, 1, OSError)) as worker:
        assert place.notified.wait(PATIENCE_S)
        place.clock.advance(seconds=1)
        eventually(lambda: worker.health().handled == 1)


def test_a_stop_ends_the_pause(place: Place):
    worker = place.worker(lambda message: None, queue=Frail(place.q, 1000))
    worker.start()
    assert place.notified.wait(PATIENCE_S)
    assert ended(worker) == 0


def test_a_queue_that_somebody_closes_ends_it_with_the_error(place: Place):
    worker = place.worker(lambda message: None)
    worker.start()
    eventually(lambda: worker.health().status == "running")
    place.q.close()
    with pytest.raises(Closed):
        worker.wait(PATIENCE_S)
    assert isinstance(place.errors[-1][0], Closed)


def test_hooks_are_called_at_the_start_and_at_the_end(place: Place):
    calls = []
    place.q.put(b"a")
    worker = place.worker(
        lambda message: calls.append("handler"),
        on_start=lambda: calls.append("start"),
        on_stop=lambda: calls.append("stop"),
    )
    with worker:
        eventually(lambda: worker.health().handled == 1)
    assert calls == ["start", "handler", "stop"]


def test_nothing_is_taken_before_the_start_hook_went_well(place: Place):
    tries = []
    place.q.put(b"a")

    def on_start() -> None:
        tries.append(place.q.stats().ready)
        if len(tries) < 3:
            raise ConnectionError("no database yet")

    with place.worker(lambda message: None, on_start=on_start) as worker:
        for number in (1, 2):
            eventually(lambda number=number: len(place.errors) == number)
            assert worker.health().status == "starting"
            place.clock.advance(seconds=1)
        eventually(lambda: worker.health().handled == 1)
    assert tries == [1, 1, 1]
    assert worker.health().hook_errors == 2


def test_hooks_that_raise_are_logged_counted_and_do_not_end_it(place: Place, caplog: pytest.LogCaptureFixture):
    place.q.put_many([b"bad", b"good"])

    def handler(message: Any) -> None:
        if message.raw == b"bad":
            raise Reject if message.attempt > 1 else ValueError("bad")

    def on_error(error: BaseException, message: Any) -> None:
        raise RuntimeError("the hook is broken")

    def on_stop() -> None:
        raise RuntimeError("this one, too")

    worker = place.worker(handler, on_error=on_error, on_stop=on_stop, concurrency=1)
    worker.start()
    eventually(lambda: worker.health().handled == 1 and worker.health().rejected == 1)
    assert ended(worker) == 1  # it did not end in order
    assert worker.health().hook_errors == 3  # the last one: on_error was told of on_stop
    assert [record.message for record in caplog.records if record.message.startswith("hook ")] == [
        "hook on_error failed",
        "hook on_stop failed",
        "hook on_error failed",
    ]


def test_a_queue_that_does_not_answer_makes_it_silent(place: Place):
    asked, go = threading.Event(), threading.Event()

    class Hanging(Frail):
        def receive_many(self, *arguments: Any, **options: Any) -> Any:
            asked.set()
            assert go.wait(PATIENCE_S)
            return super().receive_many(*arguments, **options)

    worker = place.worker(lambda message: None, queue=Hanging(place.q, 0), silence=60, exit_after_silence=120)
    worker.start()
    assert asked.wait(PATIENCE_S)
    place.clock.advance(seconds=59)
    assert worker.health().ok
    place.clock.advance(seconds=2)
    assert (worker.health().status, worker.health().ok, worker.health().silent_seconds) == ("silent", False, 61)
    place.clock.advance(seconds=60)
    eventually(lambda: worker.health().status == "draining")
    go.set()
    assert worker.wait(PATIENCE_S) == 4


def test_neither_an_empty_queue_nor_busy_handlers_are_silence(place: Place):
    begun, go = threading.Event(), threading.Event()

    def handler(message: Any) -> None:
        begun.set()
        assert go.wait(PATIENCE_S)

    with place.worker(handler, concurrency=1, silence=60, exit_after_silence=60) as worker:
        for _ in range(5):
            place.clock.advance(seconds=50)
            eventually(lambda: worker.health().seconds_since_last_receive < 1)  # it found nothing, but it asked
        place.q.put(b"long")
        assert begun.wait(PATIENCE_S)
        eventually(lambda: worker.health().silent_seconds == 0)
        place.clock.advance(seconds=3600)
        assert (worker.health().status, worker.health().seconds_since_last_receive) == ("running", 3600)
        go.set()


def test_several_queues_share_the_slots_and_each_has_one_of_its_own(tmp_path: Path):
    with holdfast.open_broker(tmp_path / "data", durability="os") as broker:
        for name in ("busy", "quiet"):
            broker.create_topic(name)
        queues = [broker.group(name, "workers") for name in ("busy", "quiet")]
        broker.publish_many("busy", [b"a"] * 10)
        begun, go = threading.Semaphore(0), threading.Event()
        quiet = threading.Event()

        def handler(message: Any) -> None:
            if message.topic == "quiet":
                quiet.set()
            else:
                begun.release()
                assert go.wait(PATIENCE_S)

        with Worker(handler, queue=queues, concurrency=3, poll=0.02) as worker:
            for _ in range(2):
                assert begun.acquire(timeout=PATIENCE_S)
            broker.publish("quiet", b"b")
            assert quiet.wait(PATIENCE_S)
            assert not begun.acquire(timeout=0.05)
            go.set()
            eventually(lambda: worker.health().handled == 11)


def test_a_folder_is_opened_and_closed_again(tmp_path: Path):
    with holdfast.open(tmp_path / "q") as queue:
        queue.put(b"a")
    seen = []
    with Worker(lambda message: seen.append(message.body), queue=tmp_path / "q", body_type=str) as worker:
        eventually(lambda: worker.health().handled == 1)
    assert seen == ["a"]
    with holdfast.open(tmp_path / "q") as queue:
        assert queue.stats().ready == 0


def test_a_folder_that_somebody_does_not_share_is_waited_for(tmp_path: Path):
    owner = holdfast.open(tmp_path / "q", share=False)
    owner.put(b"a")
    busy = threading.Event()
    worker = Worker(lambda message: None, queue=str(tmp_path / "q"), on_error=lambda error, message: busy.set())
    worker.start()
    assert busy.wait(PATIENCE_S)
    owner.close()
    eventually(lambda: worker.health().handled == 1)
    assert ended(worker) == 0


def test_queues_by_name_in_a_data_folder(tmp_path: Path):
    with holdfast.open_broker(tmp_path / "data") as broker:
        for name in ("a", "b", "other"):
            broker.create_topic(name)
            broker.publish(name, name.encode())
    seen = []
    worker = Worker(lambda message: seen.append(message.body), queue=["a", "b"], at=tmp_path / "data", group="g")
    with worker:
        eventually(lambda: worker.health().handled == 2)
    assert sorted(seen) == [b"a", b"b"]


def test_a_queue_that_is_not_there_yet_is_waited_for(tmp_path: Path, place: Place, caplog: pytest.LogCaptureFixture):
    with holdfast.open_broker(tmp_path / "data") as broker:
        broker.create_topic("something")
    worker = place.worker(lambda message: None, queue="nothing", at=tmp_path / "data")
    worker.start()
    assert place.notified.wait(PATIENCE_S)
    (error, message) = place.errors[0]
    assert isinstance(error, UnknownTopic)
    assert message is None
    assert worker.wait(0.001) is None
    with holdfast.open_broker(tmp_path / "data") as broker:  # by the worker's own socket
        broker.create_topic("nothing")
        broker.publish("nothing", b"a")

    def handled() -> bool:
        place.clock.advance(seconds=5)  # the longest pause between two looks
        return worker.health().handled == 1

    eventually(handled)
    assert ended(worker) == 0
    assert len(place.errors) == 1
    notified = "the queue does not exist yet, waiting for it: there is no topic nothing"
    assert sum(text.startswith(notified) for text in caplog.messages) == 1


def test_a_wait_for_a_queue_is_silence_and_ends_as_that_does(tmp_path: Path, place: Place):
    with holdfast.open_broker(tmp_path / "data") as broker:
        broker.create_topic("something")
    worker = place.worker(
        lambda message: None, queue="nothing", at=tmp_path / "data", silence=60, exit_after_silence=120
    )
    worker.start()
    assert place.notified.wait(PATIENCE_S)
    place.clock.advance(seconds=61)
    eventually(lambda: worker.health().status == "silent")
    place.clock.advance(seconds=60)
    assert worker.wait(PATIENCE_S) == 4


def test_a_place_that_is_not_there_ends_it_with_the_error(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "holdfast.worker")
    with pytest.raises(NotAQueue):
        Worker(lambda message: None, queue="nothing", at=tmp_path / "missing").run(signals=False)
    assert "worker ended" not in caplog.messages  # with the code of an end in order


def test_it_runs_once(place: Place):
    worker = place.worker(lambda message: None)
    with pytest.raises(InvalidRequest, match="not started"):
        worker.wait()
    assert worker.health().status == "starting"
    with worker, pytest.raises(Closed, match="create a new one"):
        worker.run()
    with pytest.raises(Closed):
        worker.start()


class Callable:
    def __call__(self, message: Any) -> None: ...


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"handler": "work"}, "give a function that takes a message"),
        ({"handler": Callable}, "the class Callable"),
        ({"concurrency": 0}, "concurrency=0 cannot be used"),
        ({"concurrency": True}, "concurrency=True"),
        ({"queue": ["a", "b", "c"], "concurrency": 2}, "too low for 3 queues"),
        ({"queue": ["a", "a"]}, "named twice"),
        ({"queue": []}, "is empty"),
        ({"queue": 7}, "queue=7 cannot be used"),
        ({"queue": "a", "group": "g"}, "give their place with at="),
        ({"time_limit": 0}, "time_limit=0"),
        ({"drain": -1}, "drain=-1"),
        ({"lease": "long"}, "lease='long'"),
        ({"on_error": "mail"}, "on_error='mail'"),
    ],
)
def test_mistakes_in_the_call_are_refused_at_once(options: dict[str, Any], said: str):
    with pytest.raises(InvalidRequest, match=said):
        Worker(**{"handler": print, "queue": "a"} | options)


@pytest.mark.parametrize("handler", [partial(lambda factor, message: None, 2), Callable(), Callable().__call__, print])
def test_anything_that_can_be_called_with_a_message_is_a_handler(place: Place, handler: Any):
    place.q.put(b"a")
    with place.worker(handler) as worker:
        eventually(lambda: worker.health().handled == 1)
