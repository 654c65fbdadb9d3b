"""What users hold: faces for tasks (`aio`) and threads (`sync`), and the arguments and values that both share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from functools import partial
from operator import attrgetter
from types import TracebackType
from typing import Any, Generic, Never, NoReturn, ParamSpec, TypeVar

from holdfast.env import close_in_children, refuse_to_pickle

_Given = ParamSpec("_Given")
_Opened = TypeVar("_Opened", bound=AbstractAsyncContextManager[Any])

# For the rest of the package: the port is not part of the public API.
port_of: Callable[[Any], Any] = attrgetter("_port")


def check_port(face: object, port: Any) -> None:
    """Refuse what people pass who expect a class to open a folder. Raises TypeError."""
    if port is not None and not isinstance(port, str) and not hasattr(port, "__fspath__"):
        return
    name = type(face).__name__
    module, kind = "holdfast.aio" if name.startswith("Async") else "holdfast", name.removeprefix("Async")
    broker = "" if kind == "Broker" else f".{kind.lower()}(...)"
    way = "open(folder)" if kind == "Queue" else f"open_broker(folder){broker}"
    raise TypeError(f"{module}.{name} is not for opening a folder or a server: use {module}.{way}")


class Face:
    """What brokers, groups and queues have in common."""

    def __init__(self, port: Any = None, **options: Never) -> None:
        check_port(self, None if options else port)
        self._port = port
        close_in_children(self)

    def disown(self) -> None:
        """Switch to a port of its own in a child after a fork; the parent keeps using the old one."""
        self._port = self._port.after_fork()

    @property
    def folder(self) -> str:
        """The data folder, or the address of the server."""
        place: str = self._port.place
        return place

    @property
    def closed(self) -> bool:
        """Whether it is closed, so that every call raises Closed."""
        closed: bool = self._port.closed
        return closed

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle(self)


class AsyncOpening(Coroutine[Any, Any, _Opened], Generic[_Opened]):
    """Something to open: `await` it, or enter it with `async with`.

    It is also a coroutine, so that `asyncio.create_task`, `gather` and the like accept it. Nothing is opened until you
    await it, so there is no warning if you never do.
    """

    def __init__(
        self, open_it: Callable[_Given, Awaitable[_Opened]], *given: _Given.args, **options: _Given.kwargs
    ) -> None:
        self._open = partial(open_it, *given, **options)
        self._opened: _Opened | None = None
        self._steps: Generator[Any, Any, _Opened] | None = None  # of the task that runs it

    def __await__(self) -> Generator[Any, Any, _Opened]:
        return self._open().__await__()

    def send(self, value: Any) -> Any:
        """Run the next step (part of the coroutine protocol)."""
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an error at the current step (part of the coroutine protocol)."""
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.throw(*error)

    def close(self) -> None:
        """Stop running it (part of the coroutine protocol)."""
        if self._steps is not None:
            self._steps.close()

    async def __aenter__(self) -> _Opened:
        self._opened = opened = await self._open()
        await opened.__aenter__()
        return opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._opened is not None
        return await self._opened.__aexit__(kind, error, trace)
