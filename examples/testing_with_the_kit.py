"""Tests of a program that uses a queue: the real engine, on a clock and a disk that the test controls.

    python examples/testing_with_the_kit.py       or: pytest examples/testing_with_the_kit.py

With pytest installed, `holdfast_kit` is a fixture that comes with the package; without it use `QueueKit`.
"""

from holdfast.testing import QueueKit


def fail(message) -> None:
    raise TimeoutError("no answer")


def test_a_payment_is_retried_and_then_dead(holdfast_kit):
    kit = holdfast_kit(max_attempts=2)
    kit.queue.put(b"pay 7")
    assert kit.drain(fail).failed == 1
    assert kit.drain(fail).failed == 0  # it waits for its retry
    kit.clock.advance(minutes=15)  # at once
    assert kit.drain(fail).failed == 1
    assert [letter.reason for letter in kit.queue.dead.list()] == ["MAX_ATTEMPTS"]


def test_a_reminder_survives_a_power_cut(holdfast_kit):
    kit = holdfast_kit()
    kit.queue.put(b"call home", delay=3600)
    kit.power_cut()  # all that was not synced is gone; the queue is open again
    kit.clock.advance(hours=1)
    assert kit.drain(lambda message: None).handled == 1


if __name__ == "__main__":
    test_a_payment_is_retried_and_then_dead(QueueKit)
    test_a_reminder_survives_a_power_cut(QueueKit)
    print("both tests pass, and no real second has passed")
