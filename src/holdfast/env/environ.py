"""The variables that this process was started with."""

from __future__ import annotations

import os
from collections.abc import Mapping


def environment() -> Mapping[str, str]:
    """As they are now; later changes do not show."""
    return dict(os.environ)


def set_variable(name: str, value: str) -> None:
    """For this process and those that it starts."""
    os.environ[name] = value
