"""Where delayed messages wait, outside the partition's log, for seconds or years, until they are due.

    write ──► intake (a log) ── spill ──► runs: files sorted by due time
                 │                          │
                 └────────── due ◄──────────┘  ──► the partition's log, once

A message's delayed id is its offset in the intake: unique for ever. What was released or cancelled but still
lies in a file is `gone`, a bitmap of ids. The manifest is the one truth about files: it names the runs, tells
up to where the intake was spilled and holds `gone`; it is replaced as a whole, so that a crash on the way
leaves the old state or the new one. A file that it does not name is left over and removed at opening.

**Released once.** The store and the partition's log are two places, and the log may lose an unsynced tail
in a power cut. So the caller follows these steps, which `tests/crash/test_delayed_crash.py` holds in code:

1.  `due(now_ms, limit)` answers with messages and changes nothing. Whatever it answers is on disk in the intake:
    no power cut can make the intake issue an id anew that the partition already carries.
2.  The caller appends them to the partition's log, each with its delayed id.
3.  `released(ids, position)`: they are in the partition's log, below the offset `position`. In memory they are
    gone from now on; on disk they are not, for the log might still lose them.
4.  `settled(position)`: the partition's log is synced below this offset. Only now may the next manifest count
    these ids as gone, and only a manifest that is on disk lets files go.
5.  `accounted` is the offset of the manifest on disk: every release below it is in that manifest. The caller
    must keep (pin) the partition's log from there on. At opening it reads the log from `accounted` to its end,
    calls `forget(ids)` with the delayed ids found, and `settled(end)`, since a log just opened is synced.

Between 1 and 3 a message is in two hands: the caller must not cancel in that time (one lock around
1 to 3 and around `cancel` is enough), or a message may be both cancelled and released.

`tick` does the upkeep and may take a second when it spills; call it from a thread that has the time. The other
calls go on meanwhile. Under the policies `os` and `interval` a power cut may take a message back that nobody was shown
yet, and its id is then given to another: whoever keeps an id across power cuts puts with `fsync`.
"""

from holdfast.broker.delayed.runs import DelaySettings
from holdfast.broker.delayed.store import Delayed, DelayStore

__all__ = ["DelaySettings", "DelayStore", "Delayed"]
