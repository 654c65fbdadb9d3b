"""What the tests of check and repair share: a small log on a simulated disk, and ways to spoil it."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.codec.encode import Body, FramePlace, gap_body, header_for
from holdfast.codec.frame import FrameHeader, frame_bytes
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import DamagedRange
from holdfast.settings import LogSettings
from holdfast.storage.checks.check import check
from holdfast.storage.checks.finding import CheckReport, Finding
from holdfast.storage.checks.repair import RepairPlan, RepairResult, plan_repair, repair
from holdfast.storage.frames import FrameRules, walk
from holdfast.storage.log import Log

FOLDER = "/data/log"
SMALL = LogSettings(segment_bytes=4096, frame_bytes=1024, index_bytes=512, min_free_bytes=0)


class Logged:
    """A log in a folder of a simulated disk, with what was written to it."""

    def __init__(self, disk: SimulatedDisk | None = None) -> None:
        self.disk = disk or SimulatedDisk()
        self.ids = SeededIds(1)
        self.clock = ManualClock()
        self.values: dict[int, bytes] = {}

    @property
    def world(self) -> World:
        return World(clock=self.clock, disk=self.disk, ids=self.ids)

    def open(self, settings: LogSettings = SMALL) -> Log:
        return Log.open(FOLDER, settings, self.world)

    def append(self, log: Log, values: Sequence[bytes], **options: object) -> int:
        """Append and remember."""
        appended = log.append(list(values), **options)
        self.values |= dict(enumerate(values, appended.offset))
        return appended.offset

    def fill(self, batches: int = 40, *, close: bool = True) -> Log:
        """Some segments of batches of five short messages."""
        log = self.open()
        for n in range(batches):
            self.append(log, [b"message %d of batch %d" % (k, n) for k in range(5)])
        if close:
            log.close()
        return log

    def kill(self) -> None:
        """The owner is gone, the machine runs on."""
        self.disk = self.disk.kill()

    def restart(self) -> None:
        """The owner and the machine are gone; what was in the page cache happens to be on the disk."""
        self.kill()
        self.ids.reboot()

    def path(self, name: str) -> str:
        return f"{FOLDER}/{name}"

    def segments(self) -> list[str]:
        return [name for name in self.disk.names(FOLDER) if name.endswith(".log")]

    def frames(self, name: str) -> list[FrameHeader]:
        """The good frames of a segment, however its log stands."""
        data = memoryview(self.disk.contents(self.path(name)))
        return [f for f in walk(data, FrameRules(self.log_id, int(name[:20]))) if isinstance(f, FrameHeader)]

    @property
    def log_id(self) -> int:
        return int.from_bytes(self.disk.contents(self.path("state"))[72:76], "little")

    def flip(self, name: str, position: int, mask: int = 0xFF) -> None:
        self.disk.flip(self.path(name), position, mask)

    def write(self, name: str, position: int, content: bytes) -> None:
        file = self.disk.open(self.path(name), write=True, create=True)
        file.write(position, [content])
        file.sync()
        self.disk.sync_folder(FOLDER)

    def zero(self, name: str, start: int, end: int) -> None:
        self.write(name, start, bytes(end - start))

    def contents(self) -> dict[str, bytes]:
        """Every file of the folder and of the folders in it; the lock's note aside."""
        found: dict[str, bytes] = {}
        for name in self.disk.names(FOLDER):
            try:
                found[name] = self.disk.contents(self.path(name))
            except IsADirectoryError:
                for inner in self.disk.names(self.path(name)):
                    found[f"{name}/{inner}"] = self.disk.contents(self.path(f"{name}/{inner}"))
        found.pop("lock", None)
        return found

    def check(self, settings: LogSettings = SMALL, **options: object) -> CheckReport:
        return check(FOLDER, self.world, settings, **options)

    def plan(self) -> RepairPlan:
        return plan_repair(FOLDER, self.world, SMALL)

    def repair(self, **options: object) -> RepairResult:
        return repair(FOLDER, self.world, SMALL, **options)

    def readable(self) -> tuple[dict[int, bytes], set[int]]:
        """What an owner can read, and the offsets that it is told are lost."""
        found: dict[int, bytes] = {}
        lost: set[int] = set()
        with self.open() as log:
            offset = log.start
            while offset < log.end:
                try:
                    for record in log.records(offset):
                        found[record.offset] = record.value
                        offset = record.offset + 1
                except DamagedRange as damage:
                    lost |= set(range(damage.first_offset, damage.next_offset))
                    offset = damage.next_offset
        return found, lost

    def forge(self, name: str, header: FrameHeader, body: Body, **changes: int) -> None:
        """Put another frame of the same length in the place of one, with right checksums."""
        place = {
            "log_id": header.log_id,
            "epoch": header.epoch,
            "position": header.position,
            "base_offset": header.base_offset,
            "synced_offset": header.synced_offset,
        }
        remaining = changes.pop("batch_remaining", header.batch_remaining)
        forged = header_for(body, FramePlace(**(place | changes)), batch_remaining=remaining)
        content = b"".join([forged, *body.parts])
        assert len(content) == header.end - header.position
        self.write(name, header.position, content)


def only(report: CheckReport, severity: str) -> Finding:
    """The one finding of this severity."""
    found = [finding for finding in report.findings if finding.severity == severity]
    assert len(found) == 1, found
    return found[0]


def codes(report: CheckReport) -> list[str]:
    return [finding.code for finding in report.findings]


def filler(length: int, *, count: int, columns: int = 0, kind: int = 1) -> Body:
    """A body of zeros that fills a frame of this length."""
    plain = gap_body(length, count, 0)
    return Body(plain.parts, plain.body_bytes, plain.raw_bytes, count, columns, 0, 0, plain.crc, kind)


HEADER = frame_bytes(0)
