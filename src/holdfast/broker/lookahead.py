"""Messages that nobody gets any more, passed over many at a time.

Where the next message is expired, lost or for another group, those behind it often are as well. One commit for each,
and a new choice after each, would make a run of them cost its square; so the look widens as long as it finds nothing
to hand out. It ends after about a thousand: then the caller lets go of the lock, so that others have their turn.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast.broker.delivery import Delivery
    from holdfast.delivery.decide import Moment

_STEPS: Final = (4, 16, 64, 256, 1_000)
# Long enough for a thread that waits for a lock to wake up and take it.
_PAUSE_S: Final = 0.0002


def look_ahead(delivery: Delivery, now: Moment) -> bool:
    """Pass over what comes next and cannot be handed out; whoever calls holds the lock.

    Answers whether the end of it is in sight; otherwise it is time to give others a turn.
    """
    for step in _STEPS:
        offsets = delivery._supply.coming(step, now)
        if not offsets or delivery._load(offsets, now):
            return True
    return False


def give_way() -> None:
    """Let other threads run, and take the locks that this one has let go of."""
    threading.Event().wait(_PAUSE_S)
