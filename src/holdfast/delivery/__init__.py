"""Which consumer holds which message: pure, compact, journaled. Time is an argument.

A command is *decided* (`decide`) into events, the events are journaled by the caller, and then *applied* to the state
(`group`). Only `apply` changes state, and a restart applies the journal again, so the live and the recovered state
cannot differ. A decision reads the state and changes nothing; if it refuses, nothing has happened.

`events` has the commands, the events and the table of allowed moves between phases. `choose` and `keys` pick the next
messages, without and with regard to keys. `image` is the state as one value for snapshots, and its invariants.
"""
