"""The `holdfast_kit` fixture, which pytest finds through the entry point of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from holdfast.testing import QueueKit


@pytest.fixture
def holdfast_kit() -> Iterator[Callable[..., QueueKit]]:
    """Factory of queue kits: `kit = holdfast_kit(max_attempts=3)`. They are closed when the test ends."""
    kits: list[QueueKit] = []

    def make(**settings: object) -> QueueKit:
        kits.append(QueueKit(**settings))  # type: ignore[arg-type]
        return kits[-1]

    yield make
    for kit in kits:
        kit.close()
