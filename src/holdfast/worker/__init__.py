"""The worker: receives messages from queues and runs a handler for each, until it is stopped.

```
 lane, one thread per queue     receives as many messages as slots are free; retries after errors
        v
 crew (threads) or tasks        run the handler
        v
 handling                       settles the message: ack, nack, reject
 control, one thread            time limits, silence, drain
```
"""

from holdfast.worker.handling import WorkerHealth
from holdfast.worker.sources import Reject, Retry
from holdfast.worker.worker import Worker

__all__ = ["Reject", "Retry", "Worker", "WorkerHealth"]
