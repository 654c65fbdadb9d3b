"""The variables that this process was started with."""

from __future__ import annotations

import os
from collections.abc import Mapping


def environment() -> Mapping[str, str]:
    """As they are now; later changes do not show."""
    return dict(os.environ)
