"""Modules for tasks, threads and the operating system that are loaded on first use; see `holdfast.later`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.later import module

if TYPE_CHECKING:
    import asyncio
    import ctypes
    from concurrent import futures
else:
    asyncio = module("asyncio")
    ctypes = module("ctypes")
    futures = module("concurrent.futures")

__all__ = ["asyncio", "ctypes", "futures"]
