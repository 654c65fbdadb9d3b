"""Machines that use one queue in a store while they are killed, stopped and cut off; and what they were told, checked.

Each machine is a process with a cache of its own that puts, gets and acks whenever it is the owner, and writes down
what it was told and when, by a clock that all processes share. `check` then looks for what must never be:

- lost: a put was answered, nobody has begun to ack the message, and it is not in the queue at the end;
- doubled: a message was handed out by a call that began after its ack was answered, or it was acked twice;
- in two hands: an owner handed a message out after its successor had, or a successor handed one out although the lease
  was in the store (something synced later was answered) and had not ended, and its holder was alive.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.proxies import Proxy

LEASE_S = 4.0  # of a message
OWNER_LEASE_MS = 2000
_MARGIN_S = 0.1  # the clocks of leases and of these notes are read one after the other

MACHINE = """
import itertools, os, random, signal, sys, threading, time
import holdfast

url, name, path, lease_s, careless = sys.argv[1:]
notes = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
numbers = itertools.count()

if careless:
    from holdfast.env.chain import engines, ownership

    def overwrite(self, key, content):
        path = self._path(key)
        self._make(os.path.dirname(path))
        draft = f"{path}.{os.urandom(8).hex()}.new"
        with open(draft, "wb") as file:
            file.write(content)
        time.sleep(0.05)  # a network: a machine that is stopped mostly has a create on its way
        os.replace(draft, path)
        return True

    engines.FolderStore.create = overwrite
    ownership.probe = lambda *_: None

def note(*what):
    os.write(notes, (" ".join(map(str, what)) + "\\n").encode())  # whole, also if the process is killed next

def produce(queue, epoch, over):
    while not over():
        message = f"{name}-{os.getpid()}-{next(numbers)}"
        began = time.monotonic()
        queue.put(message.encode(), durability="fsync")
        note("put", epoch, message, began, time.monotonic())

def consume(queue, epoch, over):
    rng = random.Random()
    while not over():
        began = time.monotonic()
        try:
            message = queue.get(timeout=0.2, lease=float(lease_s))
        except holdfast.Empty:
            continue
        body = message.body.decode()
        note("got", epoch, body, began, time.monotonic())
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.5)
        began = time.monotonic()
        note("acking", epoch, body, began, began)
        try:
            message.ack(durability="fsync")
        except holdfast.LeaseLost:
            continue
        note("acked", epoch, body, began, time.monotonic())

def work(queue):
    epoch, failed = queue._port.engine.store.epoch, threading.Event()
    def guarded(do):
        try:
            do(queue, epoch, lambda: ended.is_set() or failed.is_set())
        except Exception as error:
            failed.set()
            note("failed", epoch, "-", 0, 0, type(error).__name__)
    threads = [threading.Thread(target=guarded, args=(do,)) for do in (produce, consume, consume)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

while not ended.is_set():
    try:
        with holdfast.open(url) as queue:
            epoch = queue._port.engine.store.epoch
            note("open", epoch, "-", 0, time.monotonic())
            work(queue)
            note("over", epoch, "-", 0, time.monotonic())
    except holdfast.CorruptData as error:
        note("corrupt", 0, "-", 0, 0)
        time.sleep(0.2)
    except holdfast.HoldfastError as error:
        note("failed", 0, "-", 0, 0, type(error).__name__)
        time.sleep(0.05)
"""


@dataclass
class Note:
    what: str
    epoch: int
    message: str
    began: float
    ended: float


@dataclass
class Verdict:
    """What was found; the three lists must be empty."""

    put: int = 0
    acked: int = 0
    owners: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    in_two_hands: list[str] = field(default_factory=list)
    corrupt: int = 0

    @property
    def faults(self) -> int:
        return len(self.lost) + len(self.doubled) + len(self.in_two_hands) + self.corrupt


class Machines:
    """Some machines at work; the places of a machine in the store may lead through a proxy of its own."""

    def __init__(
        self, folder: Path, urls: list[str], environs: list[dict[str, str]], *, careless: bool = False
    ) -> None:
        self.folder, self.urls, self.environs, self.careless = folder, urls, environs, careless
        self.ends: list[Note] = []  # of owners that could not write it down themselves
        self.processes = [self._started(i) for i in range(len(urls))]

    def _started(self, i: int) -> subprocess.Popen:
        environ = os.environ | self.environs[i] | {
            "HOLDFAST_BROKER_STORE_CACHE_DIR": str(self.folder / f"cache-{i}"),
            "HOLDFAST_BROKER_STORE_LEASE_MS": str(OWNER_LEASE_MS),
            "HOLDFAST_BROKER_STORE_WAIT_MS": "2000",
        }  # fmt: skip
        notes = str(self.folder / f"notes-{i}")
        given = [self.urls[i], f"m{i}", notes, str(LEASE_S), "careless" if self.careless else ""]
        return subprocess.Popen([sys.executable, "-c", MACHINE, *given], env=environ, stderr=subprocess.DEVNULL)

    def has_owner(self) -> bool:
        return any(note.what == "acked" for i in range(len(self.urls)) for note in self.notes(i))

    def owner(self) -> int:
        """The machine that was the last to say that it is the owner."""
        opened = [(note.epoch, i) for i in range(len(self.urls)) for note in self.notes(i) if note.what == "open"]
        return max(opened, default=(0, 0))[1]

    def notes(self, i: int) -> list[Note]:
        path = self.folder / f"notes-{i}"
        found = []
        for line in path.read_text().splitlines() if path.exists() else []:
            what, epoch, message, began, ended, *_ = line.split()
            found.append(Note(what, int(epoch), message, float(began), float(ended)))
        return found

    def kill(self, i: int) -> None:
        self.processes[i].kill()
        self.processes[i].wait()
        owned = [note.epoch for note in self.notes(i) if note.what == "open"]
        self.ends += [Note("over", epoch, "-", 0, time.monotonic()) for epoch in owned]
        self.processes[i] = self._started(i)

    def stop_for(self, i: int, seconds: float) -> None:
        self.processes[i].send_signal(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            self.processes[i].send_signal(signal.SIGCONT)

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(5 if self.careless else 60)  # whose store is broken may wait for it
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


HERE = ("kill", "stop")
IN_BETWEEN = ("cut", "hang", "answers lost")  # of the network, for which there must be proxies


def torment(
    machines: Machines, kinds: Sequence[str], seconds: float, rng: random.Random, proxies: Sequence[Proxy] = ()
) -> dict[str, int]:
    """Do to machines what happens to machines, mostly to the owner; returns how often each."""
    faults: dict[str, int] = defaultdict(int)
    while not machines.has_owner():
        time.sleep(0.1)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(rng.uniform(1, 3))
        i = machines.owner() if rng.random() < 0.8 else rng.randrange(len(machines.urls))
        fault = rng.choice(kinds)
        faults[fault] += 1
        if fault == "kill":
            machines.kill(i)
        elif fault == "stop":
            machines.stop_for(i, rng.uniform(0.5, 5))
        elif fault == "outlast":
            machines.stop_for(machines.owner(), 2 * OWNER_LEASE_MS / 1000)
        elif fault == "cut":
            proxies[i].cut_all()
        else:
            name = "swallow" if fault == "hang" else "swallow_answers"
            setattr(proxies[i], name, True)
            time.sleep(rng.uniform(0.5, 5))
            setattr(proxies[i], name, False)
            proxies[i].cut_all()  # what was swallowed is missing
    return dict(faults)


def check(notes: list[Note], left: set[str]) -> Verdict:
    """Compare what machines were told with each other, and with the messages that are left in the queue."""
    of: dict[str, dict[str, list[Note]]] = defaultdict(lambda: defaultdict(list))
    synced: dict[int, float] = defaultdict(float)  # the latest start of a synced call that was answered, by owner
    over: dict[int, float] = {}  # when those who had received messages of an owner were gone
    for note in notes:
        if note.what == "over":
            over[note.epoch] = min(note.ended, over.get(note.epoch, note.ended))
            continue
        of[note.message][note.what].append(note)
        if note.what in ("put", "acked"):
            synced[note.epoch] = max(synced[note.epoch], note.began)
    found = Verdict(owners=len({note.epoch for note in notes if note.what == "open"}))
    found.corrupt = sum(note.what == "corrupt" for note in notes)
    for message, told in of.items():
        found.put += len(told["put"])
        found.acked += len(told["acked"])
        if told["put"] and not told["acking"] and message not in left:
            found.lost.append(message)
        if len(told["acked"]) > 1 or (told["acked"] and message in left):
            found.doubled.append(message)
        for ack in told["acked"]:
            if any(got.began > ack.ended for got in told["got"]):
                found.doubled.append(message)
        for first in told["got"]:
            settled = min((ack.began for ack in told["acking"] if ack.epoch == first.epoch), default=float("inf"))
            for second in told["got"]:
                late = second.epoch < first.epoch and second.began > first.ended
                in_store = synced[first.epoch] > first.ended and first.epoch < second.epoch
                ends = min(first.began + LEASE_S - _MARGIN_S, settled, over.get(first.epoch, float("inf")))
                if late or (in_store and first.ended < second.ended < ends):
                    found.in_two_hands.append(message)
    return found
