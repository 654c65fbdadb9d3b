"""A test kit for programs that use a queue: the real engine on a simulated disk, with a clock that you control.

```python
def test_a_payment_is_retried(holdfast_kit):
    kit = holdfast_kit(max_attempts=3)
    kit.queue.put(b"pay 7")
    assert kit.drain(failing_handler).failed == 1
    kit.clock.advance(minutes=15)
    assert kit.drain(handler).handled == 1
```

`holdfast_kit` is a pytest fixture that comes with the package. Without pytest, create a `QueueKit(...)` yourself.
"""

from holdfast.testing.kit import Drained, QueueKit, VirtualClock

__all__ = ["Drained", "QueueKit", "VirtualClock"]
