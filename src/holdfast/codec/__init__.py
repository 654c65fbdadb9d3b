"""Bytes to values and back: pure, without clock, disk, chance or log."""
