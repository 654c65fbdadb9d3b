"""Real file systems in a loop device: one that is full, and one that the kernel has made read-only.

They need root and the file system's tools, and are skipped without them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import DiskFailed

Mounted = Callable[..., Path]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    """Mounts a new file system of the kind, and unmounts it at the end."""
    with ExitStack() as stack:

        def mount(kind: str, *, mebibytes: int) -> Path:
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
