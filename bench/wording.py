"""Figures as people read them: three digits and a unit."""

from __future__ import annotations


def count(value: float) -> str:
    """1234567 -> "1.23 M"."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= limit * 0.9995:
            return three_digits(value / limit) + unit
    return three_digits(value)


def size(value: float) -> str:
    """12345678 -> "12.3 MB"."""
    return f"{count(value)}B" if value >= 1e3 else f"{count(value)} B"


def duration(nanoseconds: float) -> str:
    """12345 -> "12.3 µs"."""
    for limit, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if nanoseconds >= limit * 0.9995:
            return f"{three_digits(nanoseconds / limit)} {unit}"
    return f"{three_digits(nanoseconds)} ns"


def duration_range(low_ns: float, high_ns: float) -> str:
    """The unit once where both share it: "1.20 – 1.50 µs"."""
    low, high = duration(low_ns), duration(high_ns)
    if low.split()[1] == high.split()[1]:
        low = low.split()[0]
    return f"{low} – {high}"


def ratio(value: float | None, *, is_baseline: bool = False) -> str:
    """Our time is 1: 23.0 -> "23× slower", 0.5 -> "2.0× faster"."""
    if value is None:
        return "–"
    if is_baseline or 0.95 < value < 1.05:
        return "1.0×"
    return f"{_times(value)}× slower" if value > 1 else f"{_times(1 / value)}× faster"


def three_digits(value: float) -> str:
    """1.23, 12.3, 123, 1,234."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _times(value: float) -> str:
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}"
