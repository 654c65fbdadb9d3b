"""Murmur3 of many keys at once, 32 bits, seed 0: keys of one length go through it side by side. Needs numpy."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

_C1, _C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_M1, _M2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_FIVE, _ADDED = np.uint32(5), np.uint32(0xE6546B64)

# Beyond either, going through them length by length does not pay.
_MOST_LENGTHS: Final = 64
_LONGEST: Final = 256


def murmur3_of(ends: npt.NDArray[np.int32], data: npt.NDArray[np.uint8]) -> Words | None:
    """The hash of each of the items that lie in the data, from one end to the next; None where they are too mixed."""
    sizes = np.diff(ends)
    lengths: Any = np.unique(sizes)
    if len(lengths) > _MOST_LENGTHS or (len(lengths) and lengths[-1] > _LONGEST):
        return None
    found = np.empty(len(sizes), np.uint32)
    for length in lengths.tolist():
        which = np.flatnonzero(sizes == length)
        found[which] = _of_one_length(data[ends[which][:, None] + np.arange(length)])
    return found


def _of_one_length(items: npt.NDArray[np.uint8]) -> Words:
    """A row of bytes each."""
    count, length = items.shape
    padded = np.zeros((count, (length + 3) // 4 * 4), np.uint8)
    padded[:, :length] = items
    words = padded.view(np.uint32)
    hashes = np.zeros(count, np.uint32)
    for at in range(length // 4):
        hashes = _rotated(hashes ^ _mixed(words[:, at]), 13) * _FIVE + _ADDED
    if length % 4:
        hashes ^= _mixed(words[:, -1])
    hashes ^= np.uint32(length)
    hashes = (hashes ^ (hashes >> np.uint32(16))) * _M1
    hashes = (hashes ^ (hashes >> np.uint32(13))) * _M2
    return hashes ^ (hashes >> np.uint32(16))


def _mixed(words: Words) -> Words:
    return _rotated(words * _C1, 15) * _C2


def _rotated(words: Words, bits: int) -> Words:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))
