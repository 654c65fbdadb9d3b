"""What a lock and the document of its name do, as the checker of histories has it.

A lock has a holder, who is known by a fencing number, and a document has a value and a version. The model is bound by
what succeeded. A call that was refused says little: a lease may have expired, and a caller may be told so a little
later. It also knows no time, so a lock may be granted while another one has it: `checks` compares leases with clocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.nemesis.history import Event, Result


class Held(NamedTuple):
    """A lock and its document."""

    holder: int = 0  # the fence of the lock's holder, 0 if nobody has it
    fence: int = 0  # the highest fence that was granted
    value: str | None = None
    version: int = 0  # 0: there is no document
    known: bool = True  # whether the version is exact; otherwise it is higher than this


def step(state: Held, call: Event) -> Iterator[Held]:
    """The states after a call with this outcome."""
    maybe = call.result is Result.UNKNOWN
    match call.op:
        case "acquire":
            if not maybe and call.out["fence"] > state.fence:
                fence = call.out["fence"]
                yield state._replace(holder=fence, fence=fence)
        case "keepalive":
            if not maybe and state.holder == call.given["fence"]:
                yield state
        case "release":
            # A client that had to repeat the call takes "it is not yours" for "it was released before".
            yield state._replace(holder=0) if state.holder == call.given["fence"] else state
        case "get":
            yield from _read(state, call.out)
        case "update":
            yield from _written(state, call, maybe)
        case other:
            raise AssertionError(other)


def tells(call: Event) -> bool:
    """Whether the call says anything about the state; others are left out."""
    if call.result is Result.OK:
        return True
    if call.op == "update":
        return call.result is Result.UNKNOWN or call.error == "conflict"
    return False


def _read(state: Held, found: Any) -> Iterator[Held]:
    if found["value"] != state.value:
        return
    if found["version"] == state.version and state.known:
        yield state
    elif not state.known and found["version"] > state.version:
        yield state._replace(version=found["version"], known=True)


def _written(state: Held, call: Event, maybe: bool) -> Iterator[Held]:
    expected, fence = call.given.get("version"), call.given.get("fence")
    if call.result is Result.FAIL:  # a conflict: it has another version than was expected
        if (state.known and expected != state.version) or not state.known:
            yield state
        return
    if fence is not None and state.holder != fence:
        return
    if expected is not None:
        if state.known and expected != state.version:
            return
        if not state.known and expected <= state.version:
            return
    least = state.version if expected is None else expected
    value = call.given["value"]
    if maybe:
        yield state._replace(value=value, version=least, known=False)
    elif call.out["version"] > least:
        yield state._replace(value=value, version=call.out["version"], known=True)
