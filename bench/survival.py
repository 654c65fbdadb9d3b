"""Checks what each contestant says its put survives, as far as kill -9 can: nobody pulls a plug here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.harness import Operation, Outcome, Timed, run
from bench.kill import fill_and_kill
from bench.operations.puts import opened, peer_case
from bench.peers import EVERYBODY, NOTHING, Peer
from bench.scale import Scale

_KILLED = Operation("survives kill -9", "Put one by one, kill -9, open again, count.")


@dataclass(frozen=True)
class Survivor:
    """What one contestant promised and what was found."""

    name: str
    survives: str
    note: str
    found: str

    @property
    def broke_its_promise(self) -> bool:
        return self.found.startswith("LOST")


def check_survival(scale: Scale, folder: Path) -> list[Survivor]:
    """Every contestant that is installed, once."""
    cases = [peer_case(_KILLED, peer, partial(_count_after_kill, peer, scale)) for peer in EVERYBODY]
    return [_survivor(outcome, scale) for outcome in run(cases, folder, rounds=1, timeout_s=60)]


@contextmanager
def _count_after_kill(peer: type[Peer], scale: Scale, folder: Path) -> Iterator[Timed]:
    fill_and_kill(peer, scale, folder, scale.killed_after, batch=1)
    with opened(peer, scale, folder) as queue:
        yield queue.read_all


def _survivor(outcome: Outcome, scale: Scale) -> Survivor:
    return Survivor(outcome.case.contestant, outcome.case.survives, outcome.case.note, _found(outcome, scale))


def _found(outcome: Outcome, scale: Scale) -> str:
    if outcome.status != "measured":
        return f"{outcome.status}: {outcome.problem}"
    kept = min(outcome.samples[0].messages, scale.killed_after)
    text = f"{kept} of {scale.killed_after}"
    if kept < scale.killed_after and outcome.case.survives != NOTHING:
        return f"LOST {scale.killed_after - kept}: {text}"
    return text
