"""Real file systems in a loop device or in memory: full ones, and one that the kernel has made read-only.

They need root and the file system's tools, and are skipped without them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path

import pytest

import holdfast
from holdfast.broker.check import check_folder
from holdfast.errors import DiskFailed, DiskFull

Mounted = Callable[..., Path]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    """Mounts a new file system of the kind, and unmounts it at the end."""
    with ExitStack() as stack:

        def mount(kind: str, *, mebibytes: int) -> Path:
            if kind == "tmpfs":
                return in_memory(mebibytes)
            make = shutil.which(f"mkfs.{kind}", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
            if make is None or os.geteuid() != 0:
                pytest.skip(f"needs root and mkfs.{kind}")
            image, folder = tmp_path / f"{kind}.img", tmp_path / kind
            folder.mkdir()
            with image.open("wb") as file:
                file.truncate(mebibytes << 20)
            subprocess.run([make, "-q", image], check=True, capture_output=True)
            if subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, check=False).returncode:
                pytest.skip(f"cannot mount {kind} here")
            stack.callback(subprocess.run, ["umount", "--lazy", folder], capture_output=True, check=False)
            return folder

        def in_memory(mebibytes: int) -> Path:
            folder = tmp_path / "tmpfs"
            folder.mkdir()
            how = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", folder]
            if subprocess.run(how, capture_output=True, check=False).returncode:
                pytest.skip("only root may mount a small disk")
            stack.callback(subprocess.run, ["umount", "--lazy", folder], capture_output=True, check=False)
            return folder

        yield mount


def test_what_a_disk_that_became_read_only_cannot_keep_is_not_acknowledged(mounted: Mounted) -> None:
    folder = mounted("ext4", mebibytes=256)
    acknowledged = []
    queue = holdfast.open(folder / "q", durability="fsync", min_free_bytes=0)
    for n in range(40):
        if n == 20:
            got = queue.get(timeout=5)  # so that it is also mapped for reading
            subprocess.run(["mount", "-o", "remount,abort", folder], check=True)
        with suppress(DiskFailed):
            queue.put(b"%d" % n)
            acknowledged.append(b"%d" % n)
    assert len(acknowledged) < 40
    with suppress(DiskFailed):
        queue.close()
    subprocess.run(["umount", folder], check=True)  # refused while a file is open
    subprocess.run(["mount", "-o", "loop", folder.with_suffix(".img"), folder], check=True)
    with holdfast.open(folder / "q", create=False, min_free_bytes=0) as queue:
        assert set(acknowledged) <= {got.body, *(message.body for message in queue.get_many(100))}


USE_A_FULL_DISK = """
import os, sys
import holdfast
from holdfast.errors import DiskFull

with holdfast.open(sys.argv[1] + "/q", min_free_bytes=0) as queue:
    queue.put(b"kept")
    with open(sys.argv[1] + "/filler", "wb", buffering=0) as filler:
        for size in (65536, 512):
            try:
                while filler.write(os.urandom(size)):
                    pass
            except OSError:
                pass
    try:
        while True:
            queue.put(bytes(1000), durability="os")
    except DiskFull:
        pass
print("closed")
"""


def test_a_full_disk_that_copies_on_write_does_not_end_the_process(mounted: Mounted) -> None:
    folder = mounted("btrfs", mebibytes=256)
    done = subprocess.run(
        [sys.executable, "-c", USE_A_FULL_DISK, folder], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
    (folder / "filler").unlink()
    with holdfast.open(folder / "q", create=False, min_free_bytes=0) as queue:
        assert queue.get(timeout=5).body == b"kept"


FILL_A_QUEUE = """
import os, sys
import holdfast

queue = holdfast.open(sys.argv[1], segment_bytes=int(sys.argv[2]), min_free_bytes=1 << 20)
for n in range(int(sys.argv[3])):
    queue.put(b"%d" % n, durability="os")
queue.sync()
os._exit(1)
"""
DRAIN_IT = """
import sys
import holdfast

with holdfast.open(sys.argv[1], create=False) as queue:
    while found := queue.get_many(1, timeout=0):
        found[0].ack()
        print(int(found[0].body), flush=True)
"""
STORED = 1_500


def fill(folder: Path) -> None:
    """Take every byte that is left, as another program might at any moment."""
    with (folder / "filler").open("ab", buffering=0) as filler:
        for size in (65536, 4096, 512, 1):
            with suppress(OSError):
                while filler.write(bytes(size)):
                    pass


def one_by_one(queue: holdfast.Queue[bytes], folder: Path) -> Iterator[int]:
    while found := queue.get_many(1, timeout=0):
        found[0].ack()
        yield int(found[0].body)
        fill(folder)


@pytest.mark.parametrize("segment_bytes", [64 << 20, 64 << 10], ids=["one", "several"])
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk_without_a_reserve_is_drained_one_by_one(mounted: Mounted, kind: str, segment_bytes: int) -> None:
    folder = mounted(kind, mebibytes=32)
    subprocess.run([sys.executable, "-c", FILL_A_QUEUE, folder / "q", str(segment_bytes), str(STORED)], check=False)
    (folder / "q/reserve").unlink(missing_ok=True)
    fill(folder)
    with holdfast.open(folder / "q", create=False) as queue:
        fill(folder)
        with pytest.raises(DiskFull):
            for _ in range(100):
                queue.put(bytes(20_000))
        drained = list(islice(one_by_one(queue, folder), STORED // 2))
        other = subprocess.run(  # by the owner's socket
            [sys.executable, "-c", DRAIN_IT, folder / "q"], capture_output=True, text=True, timeout=300, check=False
        )
        assert other.returncode == 0, other.stderr
        assert drained + [int(line) for line in other.stdout.split()] == list(range(STORED))
        queue.compact()
        (folder / "filler").unlink()
        queue.put(b"there is room again")
    with holdfast.open(folder / "q", create=False) as queue:
        assert queue.get(timeout=5).body == b"there is room again"
        assert (folder / "q/reserve").stat().st_size == 1 << 20
    assert check_folder(folder / "q").ok
