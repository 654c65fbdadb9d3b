"""The face for tasks: `async with holdfast.aio.open("jobs") as queue`."""

from holdfast.embedded.aio import AsyncQueue, open  # noqa: A004  the same name as for threads
from holdfast.embedded.aio_group import AsyncMessage

__all__ = ["AsyncMessage", "AsyncQueue", "open"]
