"""Delayed messages wait here, outside the partition's log, for seconds or years, until they are due.

    write ──► intake (a log) ── spill ──► runs: files sorted by due time
                 │                          │
                 └────────── due ◄──────────┘  ──► the partition's log, once

A message's delayed id is its offset in the intake, and is never reused. `gone` is a bitmap of the ids that were
released or cancelled but are still in a file. The manifest is the single source of truth about files: it names the
runs, says how far the intake was spilled, and holds `gone`. It is replaced as a whole, so a crash leaves the old state
or the new one. Opening removes files that it does not name.

**Released once.** The store and the partition's log are two places, and the log may lose an unsynced tail
in a power cut. So the caller follows these steps, which `tests/crash/test_delayed_crash.py` exercises:

1.  `due(now_ms, limit)` returns messages and changes nothing. Every message it returns is on disk in the intake, so
    no power cut can make the intake reissue an id that the partition already carries.
2.  The caller appends them to the partition's log, each with its delayed id.
3.  `released(ids, position)`: they are in the partition's log, below the offset `position`. In memory they are
    gone from now on; on disk they are not, because the log might still lose them.
4.  `settled(position)`: the partition's log is synced below this offset. Only now may the next manifest count
    these ids as gone, and files are removed only after that manifest is on disk.
5.  `accounted` is the offset of the manifest on disk: every release below it is in that manifest. The caller
    must keep (pin) the partition's log from there on. At opening it reads the log from `accounted` to its end,
    calls `forget(ids)` with the delayed ids found, and `settled(end)`, since a log just opened is synced.

Between 1 and 3 a message is in both places. The caller must not cancel during that time (one lock around 1 to 3 and
around `cancel` is enough), or a message may be both cancelled and released.

`tick` does the upkeep and may take a second when it spills, so call it from a background thread. The other calls
proceed meanwhile. Under the policies `os` and `interval` a power cut may lose a message that was not delivered yet,
and its id is then given to another message: to rely on an id across power cuts, publish with `fsync`.
"""

from holdfast.broker.delayed.runs import DelaySettings
from holdfast.broker.delayed.store import Delayed, DelayStore

__all__ = ["DelaySettings", "DelayStore", "Delayed"]
