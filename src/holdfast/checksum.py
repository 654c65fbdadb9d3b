"""CRC-32C, the checksum of all that is stored.

The package that computes it looks for its own version when it is imported, and for that loads what reads mail and
archives: longer than all of ours takes. Only its compiled part is needed.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import TYPE_CHECKING, Any

__all__ = ["crc32c"]


def _compiled() -> Any:
    package = PathFinder.find_spec("crc32c")
    found = package and PathFinder.find_spec("crc32c._crc32c", package.submodule_search_locations)
    if found is None or found.loader is None:
        raise ImportError("crc32c has no compiled part by itself")
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from crc32c import crc32c
else:
    try:
        crc32c = _compiled().crc32c
    except (ImportError, AttributeError):  # a release that is built in another way
        from crc32c import crc32c
