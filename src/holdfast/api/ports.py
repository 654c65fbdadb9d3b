"""For the rest of the package: what stands behind a face."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

port_of: Callable[[Any], Any] = attrgetter("_port")
