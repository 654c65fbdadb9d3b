"""Writes the golden logs of a format version, once: `python -m tests.golden.make`.

The files stay as they are for ever; a new version of the format gets a new folder. What the log must hold
is taken from what it was told, not from reading it back. Nothing here depends on the machine: the disk is
simulated, clock and ids are fixed. Only packed bodies may differ with the version of a library.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast.codec.frame import VERSION, FrameHeader, Kind
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.model import Appended, Batch, Producer
from holdfast.settings import LogSettings
from holdfast.storage.files import segment_name
from holdfast.storage.frames import FrameRules, walk
from holdfast.storage.log import Log

HERE = Path(__file__).parent / f"v{VERSION}"
COMPACTED = Path(__file__).parent / f"compacted-v{VERSION}"
FOLDER = "golden"
NOW_NS = 1_700_000_000_000_000_000
TEXT = b"what it acknowledged it never lets go of; "
SETTINGS = LogSettings(
    segment_bytes=4096, frame_bytes=1024, index_bytes=512, codec_min_bytes=64, min_free_bytes=0, durability="os"
)


class Story:
    """A log and what it was told."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.clock = ManualClock(NOW_NS)
        self.ids = SeededIds(20_24)
        self.log = self._open()
        self.records: list[dict[str, Any]] = []
        self.lost: list[tuple[int, int]] = []

    def _open(self) -> Log:
        return Log.open(FOLDER, SETTINGS, World(self.clock, self.disk, self.ids))

    def append(self, batch: Batch, **options: Any) -> Appended:
        appended = self.log.append(batch, **options)
        now_ns = self.clock.now_ns()
        for i in range(len(batch.values)):
            self.records.append(
                {
                    "offset": appended.offset + i,
                    "timestamp_ns": now_ns if batch.times_ns is None else batch.times_ns[i],
                    "value": batch.values[i].hex(),
                    "key": None if batch.keys is None or (key := batch.keys[i]) is None else key.hex(),
                    "headers": [] if batch.headers is None else [[n, v.hex()] for n, v in batch.headers[i]],
                    "priority": 0 if batch.priorities is None else batch.priorities[i],
                    "expires_at_ms": 0 if batch.expires_at_ms is None else batch.expires_at_ms[i],
                    "due_at_ms": 0 if batch.due_at_ms is None else batch.due_at_ms[i],
                    "flags": 0 if batch.flags is None else batch.flags[i],
                    "epoch": self.log.epoch,
                }
            )
        self.clock.advance(ms=1500)
        return appended

    def plain(self, *values: bytes) -> Appended:
        return self.append(Batch(values=list(values)))

    def reopen(self) -> None:
        self.log.close()
        self.log = self._open()

    def kill_and_damage(self, offset: int) -> None:
        """Die without closing, with every synced frame from the offset on damaged: nothing is left of that tail."""
        self.log.sync()
        end = self.log.end
        self.disk = self.disk.kill()
        flipped_offset = offset
        while flipped_offset < end:
            flipped_offset = self.flip_in_frame(flipped_offset).next_offset
        self.log = self._open()
        assert self.log.report.lost_tail == (offset, end)
        self._lose(offset, end)

    def flip_in_frame(self, offset: int) -> FrameHeader:
        """Flip a byte in the body of the frame that begins with this offset."""
        base = max(segment.base_offset for segment in self.log.segments() if segment.base_offset <= offset)
        path = f"{FOLDER}/{segment_name(base)}"
        found = walk(memoryview(self.disk.contents(path)), FrameRules(self.log.log_id, base))
        header = next(f for f in found if isinstance(f, FrameHeader) and f.base_offset == offset)
        self.disk.flip(path, header.end - 9)
        return header

    def damage(self, offset: int) -> None:
        header = self.flip_in_frame(offset)
        self._lose(offset, header.next_offset)

    def truncate(self, offset: int) -> None:
        self.log.truncate(offset)
        self.records = [record for record in self.records if record["offset"] < offset]

    def trim(self, before: int) -> None:
        self.log.trim(before)
        self.records = [record for record in self.records if record["offset"] >= self.log.start]

    def compact(self) -> None:
        """Twice, with no patience for tombstones: sealed messages with a later one of their key go, then tombstones."""
        for _ in range(2):
            self.log.compact_keys(before=self.log.end, tombstone_ms=0, min_saving_percent=0)
        sealed = self.log.segments()[-1].base_offset
        last = {record["key"]: record["offset"] for record in self.records}
        self.records = [
            record
            for record in self.records
            if record["key"] is None
            or record["offset"] >= sealed
            or (record["offset"] == last[record["key"]] and not record["flags"] & 1)
        ]

    def _lose(self, first: int, next_offset: int) -> None:
        self.lost.append((first, next_offset))
        self.records = [record for record in self.records if not first <= record["offset"] < next_offset]

    def facts(self) -> dict[str, Any]:
        log = self.log
        return {
            "log_id": log.log_id,
            "epoch": log.epoch,
            "start": log.start,
            "end": log.end,
            "epochs": [list(entry) for entry in log._writer.epochs.entries],
            "lost": sorted(self.lost),
            "records": self.records,
        }

    def files(self) -> dict[str, bytes]:
        names = [name for name in self.disk.names(FOLDER) if name not in {"lock", "quarantine"}]
        if self.disk.exists(f"{FOLDER}/quarantine"):
            names += [f"quarantine/{name}" for name in self.disk.names(f"{FOLDER}/quarantine")]
        return {name: self.disk.contents(f"{FOLDER}/{name}") for name in names}


def every_column(count: int) -> Batch:
    """All columns, with their corners."""
    rows = [[], [("a", b"1"), ("b", b""), ("a", b"2")], [("", b"")], [("имя ☃", bytes(range(256)))]]
    return Batch(
        values=[b"", b"\x00", TEXT, b"HFR\x01" * 5][:count],
        times_ns=[NOW_NS + 7, -1, 0, 2**62][:count],
        keys=[None, b"", b"key", b"\xff" * 9][:count],
        headers=rows[:count],
        priorities=[0, 1, 9, 255][:count],
        expires_at_ms=[0, 1, 1_800_000_000_000, 2**62][:count],
        due_at_ms=[1_700_000_000_500, 0, 0, 2**62][:count],
        flags=[1, 0, 128, 255][:count],
    )


def tell() -> Story:
    """The life of the golden log: it was trimmed, truncated, lost its tail, and went on."""
    story = Story()
    while len(story.log.segments()) < 2:  # a first segment, to be trimmed away
        story.plain(TEXT * 10)
    story.append(every_column(4))
    story.append(every_column(1))
    story.append(Batch(values=[b"a", b"b"], keys=[b"k1", b""]))
    for codec in ("zstd", "lz4", "gzip"):
        story.append(every_column(4), codec=codec)
        story.append(Batch(values=[TEXT * n for n in range(9)]), codec=codec)
        story.plain(b"behind " + codec.encode())
    story.append(Batch(values=[b"control"]), kind=Kind.CONTROL)
    story.append(Batch(values=[b"journal"]), kind=Kind.JOURNAL)
    story.append(Batch(values=[b"p0", b"p1"]), producer=Producer(0xFEDCBA9876543210, 7, 41))
    story.reopen()
    story.append(Batch(values=[bytes([n]) * 600 for n in range(3)], priorities=[1, 2, 3]))
    cut = story.plain(b"to be truncated")
    story.plain(b"this too")
    story.truncate(cut.offset)
    story.plain(b"in its place")
    damaged = story.plain(b"to be damaged", b"where it lies")
    story.plain(b"whole again")
    lost = story.plain(b"to be lost")
    story.plain(b"and this", b"with it")
    story.plain(TEXT * 3)
    story.kill_and_damage(lost.offset)
    story.plain(b"after the gap")
    story.append(Batch(values=[TEXT * 12] * 3), codec="zstd")
    story.append(Batch(values=[bytes([n]) * 500 for n in range(9)]))
    story.plain(b"the last one")
    story.trim(story.log.segments()[1].base_offset)
    story.damage(damaged.offset)
    return story


def tell_compacted() -> Story:
    """The life of the compacted log: packed and plain frames, a producer, two epochs, and two rounds of compaction."""
    story = Story()
    story.append(every_column(3))
    story.append(Batch(values=[TEXT] * 40, keys=[b"often"] * 38 + [None, b"once"]), codec="zstd")
    story.append(
        Batch(values=[b"p0", b"p1", b"p2"], keys=[b"often", b"k", b"often"]), producer=Producer(77, 2, 2**32 - 2)
    )
    story.append(Batch(values=[b"", b"x"], keys=[b"k", b"deleted"], flags=[0, 0]))
    for n in range(8):
        story.append(Batch(values=[b"%d" % n], keys=[b"often"]))
    story.plain(b"without a key")
    story.plain(b"in a short frame")
    story.log.sync()
    story.disk = story.disk.kill()
    story.log = story._open()  # another epoch
    for n in range(3):
        story.append(Batch(values=[b"%d" % n], keys=[b"often"]))
    story.append(Batch(values=[b"", b"y"], keys=[b"deleted", b"k"], flags=[1, 0]))
    story.log.roll()
    story.append(Batch(values=[TEXT * 3] * 9, keys=[b"a", None, b"b"] * 3, times_ns=range(NOW_NS, NOW_NS + 9)))
    story.compact()
    story.log.roll()
    story.append(Batch(values=[b"last", b"not compacted", b"either"], keys=[b"a", b"b", b"b"]))
    story.compact()
    return story


def main() -> None:
    missing = {
        folder: story_of for folder, story_of in ((HERE, tell), (COMPACTED, tell_compacted)) if not folder.exists()
    }
    if not missing:
        raise SystemExit("all are there already; golden files are written once")
    for folder, story_of in missing.items():
        write(folder, story_of())


def write(folder: Path, story: Story) -> None:
    facts = story.facts()
    story.log.close()
    for name, content in story.files().items():
        path = folder / "log" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "expected.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
