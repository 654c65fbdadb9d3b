"""What clients did and what they were told: each call is one line when it begins and one when its outcome is known."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from holdfast.errors import Conflict, Empty, Fenced, HoldfastError, LeaseLost, LockHeld, OutOfSequence

NEVER = float("inf")
BUG = "!"  # before an error that no client should ever see
REFUSALS = (Conflict, Empty, Fenced, LeaseLost, LockHeld, OutOfSequence)  # then nothing was done


class Result(Enum):
    """How a call ended, as its caller knows."""

    OK = "ok"
    FAIL = "fail"  # it was not done
    UNKNOWN = "unknown"


@dataclass
class Event:
    """A call: who made it, what it was given, and what came of it. Times are those of the machine's monotonic clock."""

    client: str
    op: str
    key: str
    given: dict[str, Any] = field(default_factory=dict)
    out: Any = None
    result: Result = Result.UNKNOWN
    error: str = ""
    began: float = 0.0
    ended: float = NEVER

    @property
    def ok(self) -> bool:
        return self.result is Result.OK

    @property
    def until(self) -> float:
        """When it was over; never, if that is not known."""
        return NEVER if self.result is Result.UNKNOWN else self.ended


class Recorder:
    """Writes a history as it happens. A line is one write, so that it is whole if the process is killed next."""

    def __init__(self, folder: Path, client: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / f"{client}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._client = client
        self._number = 0

    @contextmanager
    def call(self, op: str, key: str, **given: Any) -> Iterator[Event]:
        """Record a call. What is raised ends it; the caller of this sets `out`, and `result` if it was refused."""
        event = Event(self._client, op, key, given, began=time.monotonic())
        number = self.begin(event)
        event.result = Result.OK
        try:
            yield event
        except HoldfastError as error:
            event.result = Result.FAIL if isinstance(error, REFUSALS) else Result.UNKNOWN
            event.error = error.code
        except Exception as error:
            event.result, event.error = Result.UNKNOWN, f"{BUG}{type(error).__name__}: {error}"[:300]
        event.ended = time.monotonic()
        self.end(number, event)

    def begin(self, event: Event) -> str:
        """Record that a call begins. Whoever records it so records its end with `end`, and says what came of it."""
        self._number += 1
        number = f"{os.getpid()}-{self._number}"
        self._write({"id": number, "op": event.op, "key": event.key, "given": event.given, "began": event.began})
        return number

    def end(self, number: str, event: Event) -> None:
        told = {"id": number, "result": event.result.value, "out": event.out, "error": event.error}
        self._write({**told, "ended": event.ended})

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


def read_history(folder: Path) -> list[Event]:
    """All calls of all clients, in the order in which they began."""
    found: list[Event] = []
    for path in sorted(folder.glob("*.jsonl")):
        events: dict[str, Event] = {}
        for text in path.read_text().splitlines():
            line = json.loads(text)
            if "op" in line:
                events[line["id"]] = Event(path.stem, line["op"], line["key"], line["given"], began=line["began"])
                continue
            event = events[line["id"]]
            event.result, event.out, event.ended = Result(line["result"]), line["out"], line["ended"]
            event.error = line["error"]
        found += events.values()
    return sorted(found, key=lambda event: event.began)
