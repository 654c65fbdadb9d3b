"""CRC-32C, the checksum of everything that is stored.

Importing the `crc32c` package makes it look up its own version, which loads the standard library's mail and archive
modules and takes longer than importing all of Holdfast. Only its compiled part is needed, so that is loaded directly.
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
    except (ImportError, AttributeError):  # a release that is built differently
        from crc32c import crc32c
