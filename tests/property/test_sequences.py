"""Any order of sends, repeats, new epochs, kills, restarts and truncations: each message is stored once, in order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.broker.producers import KnownBatch, Sequences
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Fenced, OutOfSequence
from holdfast.model import Producer
from holdfast.settings import LogSettings
from holdfast.storage.log import Log

FOLDER = "/data/0"
SMALL = LogSettings(segment_bytes=4096, frame_bytes=1024, index_bytes=512, min_free_bytes=0, durability="os")

producers = st.integers(1, 3)
counts = st.integers(1, 6)


class SequencesMachine(RuleBasedStateMachine):
    """The model is what the log holds, message by message: (producer, epoch in which counting began, sequence)."""

    def __init__(self) -> None:
        super().__init__()
        self.disk, self.clock, self.ids = SimulatedDisk(), ManualClock(), SeededIds(1)
        self.disk.make_folder(FOLDER)
        self.stored: list[tuple[int, int, int] | None] = []
        self.epochs = dict.fromkeys((1, 2, 3), 0)
        self.since = dict.fromkeys((1, 2, 3), 0)
        self.newest = dict.fromkeys((1, 2, 3), -1)  # the epoch that wrote last
        self._open()

    def _open(self) -> None:
        world = World(clock=self.clock, disk=self.disk, ids=self.ids)
        self.log = Log.open(f"{FOLDER}/log", SMALL, world)
        self.sequences = Sequences.open(world, FOLDER, self.log)

    def _next(self, producer: int) -> int:
        return sum(1 for each in self.stored if each is not None and each[:2] == (producer, self.since[producer]))

    def _send(self, producer: int, epoch: int, first: int, count: int) -> KnownBatch | int:
        sender = Producer(producer, epoch, first)
        with self.sequences.lock:
            known = self.sequences.check(sender, count)
            if known is not None:
                return known
            offset = self.log.write([bytes(300)] * count, producer=sender).offset
            self.sequences.record(sender, count, offset)
        assert offset == len(self.stored)
        self.stored += [(producer, self.since[producer], number) for number in range(first, first + count)]
        self.newest[producer] = epoch
        return offset

    @rule(producer=producers, count=counts)
    def send_what_comes_next(self, producer: int, count: int) -> None:
        assert type(self._send(producer, self.epochs[producer], self._next(producer), count)) is int

    @rule(producer=producers, back=st.integers(1, 12), count=counts)
    def send_again(self, producer: int, back: int, count: int) -> None:
        expected = self._next(producer)
        if not 0 < back <= expected or self.newest[producer] != self.epochs[producer]:
            return
        first = expected - back
        if count > back:
            try:
                self._send(producer, self.epochs[producer], first, count)
            except OutOfSequence as error:
                assert error.expected == expected
            else:
                raise AssertionError("what is known in part was taken")
            return
        known = self._send(producer, self.epochs[producer], first, count)
        assert isinstance(known, KnownBatch)
        wanted = [(producer, self.since[producer], number) for number in range(first, first + count)]
        assert not known.offsets or [self.stored[offset] for offset in known.offsets] == wanted

    @rule(producer=producers, ahead=st.integers(1, 10))
    def leave_a_gap(self, producer: int, ahead: int) -> None:
        try:
            self._send(producer, self.epochs[producer], self._next(producer) + ahead, 1)
        except OutOfSequence:
            return
        raise AssertionError("a gap was taken")

    @rule(producer=producers, resume=st.booleans())
    def begin_anew(self, producer: int, resume: bool) -> None:
        old = self.epochs[producer]
        self.epochs[producer] += 1
        if not resume or not self._next(producer):
            self.since[producer] = self.epochs[producer]
        self._send(producer, self.epochs[producer], self._next(producer), 1)
        try:
            self._send(producer, old, self._next(producer), 1)
        except Fenced:
            return
        raise AssertionError("an old epoch was taken")

    @rule(count=counts)
    def somebody_else_writes(self, count: int) -> None:
        self.log.append([bytes(50)] * count)
        self.stored += [None] * count

    @rule()
    def save(self) -> None:
        self.sequences.save()

    @rule()
    def kill(self) -> None:
        self.disk = self.disk.kill()
        self._open()

    @rule()
    def restart(self) -> None:
        self.sequences.close()
        self.log.close()
        self._open()

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """An operator cuts the log, between two batches; what was cut off was never sent."""
        ends = [frame.header.next_offset for frame in self.log.read(0) if not frame.header.batch_remaining]
        if not ends:
            return
        offset = data.draw(st.sampled_from(ends[-3:]))
        self.log.truncate(offset)
        gone = self.stored[offset:]
        del self.stored[offset:]
        for producer in (1, 2, 3):
            if any(each is not None and each[0] == producer for each in gone):
                # Whoever lost messages begins anew: its epochs may be gone with them.
                self.epochs[producer] += 1
                self.since[producer] = self.epochs[producer]
                self._send(producer, self.epochs[producer], 0, 1)

    @invariant()
    def the_partition_expects_what_comes_next(self) -> None:
        for producer in (1, 2, 3):
            if self.newest[producer] == self.epochs[producer]:
                assert self.sequences.next_sequence(producer) == self._next(producer)

    def teardown(self) -> None:
        self.log.close()


TestSequencesMachine = SequencesMachine.TestCase
TestSequencesMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
