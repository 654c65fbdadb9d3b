"""The worker: takes messages from queues and gives them to a handler, until it is told to stop.

```
 lane, one thread a queue       takes as many messages as slots are free; tries again after errors
        v
 crew (threads) or tasks        run the handler
        v
 handling                       what became of it: ack, nack, reject
 control, one thread            time limits, silence, drain
```
"""

from holdfast.worker.handling import WorkerHealth
from holdfast.worker.sources import Reject, Retry
from holdfast.worker.worker import Worker

__all__ = ["Reject", "Retry", "Worker", "WorkerHealth"]
