"""Coverage-guided fuzzing of the decoders, by hand: not part of the test run. Needs atheris.

    python -m venv fuzz && fuzz/bin/pip install atheris -e .[arrow]
    fuzz/bin/python -m tests.property.fuzz_frame -max_total_time=120 corpus/

The first byte chooses the decoder; checksums are made right before a frame is read, so that what lies behind
them is reached. Anything but a refusal ends the run and leaves the input in a file.
"""

from __future__ import annotations

import contextlib
import sys

import atheris

with atheris.instrument_imports(include=["holdfast"]):
    from holdfast.codec.arrow import values_to_arrow
    from holdfast.codec.frame import HEADER_BYTES, Codec, decompress, read_frame, read_header
    from holdfast.errors import CorruptData, MessageTooLarge
    from holdfast.storage.frames import FrameRules, find_frame, first_log_id, parse_index, walk
    from holdfast.storage.state import parse_epochs

from crc32c import crc32c

REFUSALS = (CorruptData, MessageTooLarge)
LIMIT = 1 << 20


def sealed(data: bytes) -> bytes:
    """The bytes as a frame at position 0 whose length and checksums are right; all else is the fuzzer's."""
    head, stored = bytearray(data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")), data[HEADER_BYTES:]
    padded = stored + bytes(-len(stored) % 8)
    head[:4] = b"HFR\x01"
    head[8:16] = bytes(4) + len(stored).to_bytes(4, "little")
    head[24] = head[24] % 4 + 1
    head[25] %= 4
    if head[25] == 0:
        head[16:20] = head[12:16]
    head[29:32] = bytes(3)
    head[80:84] = crc32c(padded).to_bytes(4, "little")
    head[84:88] = crc32c(bytes(head[:84])).to_bytes(4, "little")
    return bytes(head) + padded


def frame(data: bytes) -> None:
    found = read_frame(memoryview(sealed(data)), 0, 0, max_raw_bytes=LIMIT)
    for read in (found.values, lambda: list(found.records()), found.columns().headers, found.columns().keys):
        with contextlib.suppress(*REFUSALS):
            read()
    values_to_arrow(found).to_pylist()


def plain_bytes(data: bytes) -> None:
    read_header(memoryview(data), 0, 0)


def segment(data: bytes) -> None:
    whole = sealed(data[: HEADER_BYTES + 40])
    view = memoryview(whole + data)
    log_id = first_log_id(view) or 0
    for bodies in (True, False):
        assert len(list(walk(view, FrameRules(log_id, 0), bodies=bodies))) <= len(view)
    find_frame(view, 0, FrameRules(log_id, 0))


def packed(data: bytes) -> None:
    raw_bytes = int.from_bytes(data[1:4], "little")
    decompress(Codec(data[0] % 3 + 1), data[4:], raw_bytes=raw_bytes, max_raw_bytes=LIMIT)


def small_files(data: bytes) -> None:
    content = data + crc32c(data).to_bytes(4, "little")
    parse_epochs(content)
    parse_epochs(b"HFEPOCH\x01" + data)
    parse_index(content, 0, 0, 512)


TARGETS = [frame, plain_bytes, segment, packed, small_files]


def one_input(data: bytes) -> None:
    if len(data) < 5:
        return
    with contextlib.suppress(*REFUSALS):
        TARGETS[data[0] % len(TARGETS)](data[1:])


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
