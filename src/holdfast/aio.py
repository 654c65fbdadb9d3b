"""The face for tasks: `async with holdfast.aio.open("jobs") as queue`."""

from holdfast.embedded.aio import AsyncMessage, AsyncQueue, open  # noqa: A004  the same name as for threads

__all__ = ["AsyncMessage", "AsyncQueue", "open"]
