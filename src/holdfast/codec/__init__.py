"""Bytes to values and back. Pure: no clock, disk, randomness or logging."""
