"""tools/sync.py makes the code for threads of the code for tasks: each of its rules, by example."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from textwrap import dedent

import pytest

from tools.sync import HEAD, NoSyncForm, main, renamed, tidied, translated

needs_ruff = pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="needs ruff")


def sync(source: str) -> str:
    return translated(dedent(source), "aio/some.py")


def line(source: str) -> str:
    """What becomes of one statement inside an `async def`."""
    first, made = translated(f"async def f():\n    {source}\n", "aio/some.py").rstrip().split("\n", 1)
    assert first == "def f():"
    return dedent(made)


@pytest.mark.parametrize(
    ("tasks", "threads"),
    [
        ("await g()", "g()"),
        ("return await g(await h(1))", "return g(h(1))"),
        ("x = (await g())[0]", "x = g()[0]"),
        ("x = (await (await g()).h).i", "x = g().h.i"),
        ("x = -(await g()) ** 2", "x = -g() ** 2"),
        ("x = g(await h())", "x = g(h())"),
        ("x = a[1](await h())", "x = a[1](h())"),
        ("x = (await g(), 1)", "x = (g(), 1)"),
        ("x = await (a or b)", "x = (a or b)"),
        ("x = (await (a or b)).c", "x = (a or b).c"),
        ("x = (\n        await g()\n    ).h", "x = g().h"),
        ("x = (\n    await g\n    .h()\n    ).i", "x = (\ng\n.h()\n).i"),
        ("x = await (\n    # why\n    g()\n    )", "x = (\n# why\ng()\n)"),
        ("x = lambda: (await g())", "x = lambda: g()"),
        ("x = not (await g()) or (await h())", "x = not g() or h()"),
        ("x = (await g(  # why\n    1))[0]", "x = g(  # why\n1)[0]"),
        ("x = 'ä', (await g())[0], 'ö'", "x = 'ä', g()[0], 'ö'"),
        ("while (x := await g()) is not None: pass", "while (x := g()) is not None: pass"),
        ("async with g() as x, await h(): pass", "with g() as x, h(): pass"),
        ("async for x in g(): pass", "for x in g(): pass"),
        ("x = [await y async for y in g() if await y]", "x = [y for y in g() if y]"),
        ("raise StopAsyncIteration", "raise StopIteration"),
        ("x = await anext(aiter(y), None)", "x = next(iter(y), None)"),
        ("await self._log.wait_async(x, lock_async=1)", "self._log.wait(x, lock=1)"),
        ("x = f'{await y.z_async()} of {AsyncQueue.name!r}'", "x = f'{y.z()} of {Queue.name!r}'"),
        ("x = f'{await y} {z}'", "x = f'{y} {z}'"),
        ("x = cast('AsyncQueue[Any]', y)", "x = cast('Queue[Any]', y)"),
        (
            "raise Closed('await queue.close() of holdfast.aio first')",
            "raise Closed('queue.close() of holdfast first')",
        ),
        ("x = 'tasks', b'await x'", "x = 'tasks', b'await x'"),
        ("x = is_async, for_async", "x = is_async, for_async"),
    ],
)
def test_an_awaited_call_is_a_plain_call(tasks: str, threads: str):
    assert line(tasks) == threads


@pytest.mark.parametrize(
    ("tasks", "threads"),
    [
        ("await asyncio.to_thread(g)", "g()"),
        ("return await asyncio.to_thread(self._g, *a, b=1, **c)", "return self._g(*a, b=1, **c)"),
        ("await asyncio.to_thread(\n        self._g, a, (b or c)\n    )", "self._g(a, (b or c)\n)"),
        ("await asyncio.to_thread(g, (b or c), d)", "g((b or c), d)"),
        ("await asyncio.to_thread((g or h), d)", "(g or h)(d)"),
        ("x = await self._aside(lambda: self._g(1))", "x = self._g(1)"),
        ("x = await _aside(lambda: a or b)", "x = (a or b)"),
        ("x = await _aside(lambda y: y + 1, 2)", "x = (lambda y: y + 1)(2)"),
        ("x = (await _aside(g, 1))[0]", "x = g(1)[0]"),
        ("x = await asyncio.shield(g(1))", "x = g(1)"),
        ("return AsyncOpening(self._open, 1)", "return self._open(1)"),
    ],
)
def test_what_is_called_aside_is_called_here(tasks: str, threads: str):
    assert line(tasks) == threads


@pytest.mark.parametrize(
    ("tasks", "threads"),
    [
        ("AsyncIterator[AsyncMessage[Body]]", "Iterator[Message[Body]]"),
        ("Awaitable[T] | None", "T | None"),
        ("Callable[..., collections.abc.Awaitable[AsyncQueue[T]]]", "Callable[..., Queue[T]]"),
        ("Coroutine[Any, Any, list[T]]", "list[T]"),
        ("AsyncOpening[AsyncQueue[Any]]", "Queue[Any]"),
        ("AsyncGenerator[T, None]", "Generator[T, None, None]"),
        ("AsyncGenerator[Awaitable[T]]", "Generator[T, None, None]"),
        ("AbstractAsyncContextManager[AsyncQueue]", "AbstractContextManager[Queue]"),
    ],
)
def test_annotations_say_what_comes_at_once(tasks: str, threads: str):
    assert sync(f"def f(x: {tasks}) -> {tasks}: ...\n") == f"def f(x: {threads}) -> {threads}: ...\n"


@pytest.mark.parametrize(
    ("tasks", "threads"),
    [
        ("AsyncQueue", "Queue"),
        ("_AsyncQueue", "_Queue"),
        ("Async", "Async"),
        ("Asynchronous", "Asynchronous"),
        ("append_one_async", "append_one"),
        ("TaskWaiter", "ThreadWaiter"),
        ("__aexit__", "__exit__"),
    ],
)
def test_names_lose_what_says_that_they_are_for_tasks(tasks: str, threads: str):
    assert renamed(tasks) == threads


def test_parts_of_asyncio_are_replaced_and_what_replaces_them_is_imported():
    made = sync(
        '''\
        """Locks."""

        from __future__ import annotations

        import asyncio


        class AsyncLocks:
            def __init__(self):
                self._lock = asyncio.Lock()

            async def take(self):
                try:
                    async with self._lock:
                        await asyncio.sleep(0)
                except asyncio.CancelledError:
                    raise
        '''
    )
    assert made == dedent(
        '''\
        """Locks."""

        from __future__ import annotations
        import threading
        import time



        class Locks:
            def __init__(self):
                self._lock = threading.Lock()

            def take(self):
                try:
                    with self._lock:
                        time.sleep(0)
                except KeyboardInterrupt:
                    raise
        '''
    )


def test_modules_for_tasks_are_those_for_threads():
    made = sync(
        """\
        import holdfast.aio
        from holdfast.api.aio import group
        from holdfast.api.aio.group import AsyncQueue
        from holdfast.broker.waiters import TaskWaiter
        """
    )
    assert made == dedent(
        """\
        import holdfast
        from holdfast.api.sync import group
        from holdfast.api.sync.group import Queue
        from holdfast.broker.waiters import ThreadWaiter
        """
    )


def test_docstrings_and_comments_speak_of_threads():
    made = sync(
        '''\
        """The queue, for the tasks of any event loop. Each task has its own: `await holdfast.aio.open("x")`."""

        # A task that waits, see AsyncGroup.


        def f():  # not for tasks
            """For an `async with` block of a task, which can await it.

                async with aio.open("x") as queue:
                    async for message in queue:
                        await message.ack()
            """
        '''
    )
    assert made == dedent(
        '''\
        """The queue. Safe to use from any thread. Each thread has its own: `holdfast.open("x")`."""

        # A thread that waits, see Group.


        def f():  # not for threads
            """For a `with` block of a thread, which can await it.

                with holdfast.open("x") as queue:
                    for message in queue:
                        message.ack()
            """
        '''
    )


def test_comments_and_blank_lines_stay():
    source = dedent(
        """\
        # first

        X = 1  # beside


        def f():
            # inside

            a = [
                1,  # one
                # two
            ]

            return a
            # last
        """
    )
    assert sync(source) == source


def test_async_only_leaves_out_a_statement_with_its_comments():
    made = sync(
        """\
        import ssl  # async only
        # Why there is one.
        X = 1  # async only: threads need none
        class AsyncA:
            a = 1

            # About b.
            # async only
            @property
            async def b(self):
                return 1

            async def c(  # async only
                self,
            ):
                return 1

            def __await__(self):
                return self.c().__await__()

        async def d():
            try:
                e()
            except CancelledError:  # async only
                raise
            except (
                ValueError,
                TypeError,
            ):  # async only
                raise
            finally:
                g()  # async only
        """
    )
    assert made == dedent(
        """\
        class A:
            a = 1




        def d():
            try:
                e()
            finally:
                pass
        """
    )


def test_a_body_of_which_nothing_is_left_passes():
    made = sync(
        """\
        class AsyncA:
            # async only
            async def b(self): ...
            c: int  # async only

        async def d(x):
            match x:
                case 1:
                    # why
                    await x()  # async only
        """
    )
    assert made == dedent(
        """\
        class A:
            pass

        def d(x):
            match x:
                case 1:
                    pass
        """
    )


def test_async_only_on_an_if_keeps_its_else():
    made = sync(
        '''\
        async def f(x):
            if isinstance(x, AsyncIterable):  # async only
                async for y in x:
                    g(y)
            else:
                # in turn
                for y in x:
                    g(y)

                h("""
                text
                """)
            if a:  # async only
                b()
            elif c:
                d()
            if e:
                f()
            elif isawaitable(x):  # async only
                await x
            else:
                g()
            if isawaitable(x):  # async only
                await x
            else:
                if isawaitable(y):  # async only
                    await y
                else:
                    h()
        '''
    )
    assert made == dedent(
        '''\
        def f(x):
            # in turn
            for y in x:
                g(y)

            h("""
                text
                """)
            if c:
                d()
            if e:
                f()
            else:
                g()
            h()
        '''
    )


def test_a_line_can_say_what_threads_have_instead():
    made = sync(
        '''\
        """For tasks, awaited."""  # sync: """For threads."""

        # sync: import threading

        async def f():
            await asyncio.gather(a(), b())  # sync: a(), b()
            async with asyncio.timeout(1):  # sync: with deadline(1):
                await c()
            # Why.
            # sync: for each in d:
            # sync:     each.join()
            # async only
            await asyncio.gather(
                *d
            )

        @cache
        async def g(
            x,
        ):  # sync: def g(x, y):
            return await x

        async def h():  # sync: h = g
            return await x
        '''
    )
    assert made == dedent(
        '''\
        """For threads."""

        import threading

        def f():
            a(), b()
            with deadline(1):
                c()
            # Why.
            for each in d:
                each.join()

        @cache
        def g(x, y):
            return x

        h = g
        '''
    )


def test_a_method_can_have_a_way_of_its_own_for_threads():
    made = sync(
        '''\
        """Queue."""

        class AsyncQueue:
            # threads: holdfast.local.fused.put_now
            async def put(self, body):
                """Store it."""
                await self.g(body)

            # threads: holdfast.local.fused.get
            async def get(self):
                return 1
        '''
    )
    assert made == dedent(
        '''\
        """Queue."""
        from holdfast.local.fused import get as _get
        from holdfast.local.fused import put_now

        class Queue:
            put = put_now

            get = _get
        '''
    )


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        ("import asyncio\nasyncio.gather(x)\n", r"^aio/some\.py:2: no sync form is known for asyncio\.gather; add it"),
        ("import asyncio\nx = asyncio\n", r"^aio/some\.py:2: no sync form is known for asyncio;"),
        ("x = asyncio.to_thread(f)\n", r"no sync form is known for asyncio\.to_thread"),
        ("asyncio.run(x)\ny\nasyncio.wait(x)\n", r"py:1: .* asyncio\.run; .*\n.*py:3: .* asyncio\.wait;"),
        ("from asyncio import Lock\n", r":1: no sync form is known for from asyncio"),
        ("isinstance(x, Awaitable)\n", "no sync form is known for Awaitable"),
        ("x = [\n    1,  # async only\n    2,\n]\n", r"^aio/some\.py:2: this marker belongs to no statement$"),
        ("# threads: a.b\nx = 1\n", "belongs above a method"),
        ("# threads: b\ndef x(): ...\n", "belongs above a method"),
        ("x = 1  # sync: x = = 1\n", r"^aio/some\.py: what is left for threads is not Python: .*: x = = 1"),
        ("try:\n    x\nexcept E:  # async only\n    y\n", "is not Python"),
        ("x = f'{asyncio.get_running_loop()}'\n", "no sync form is known for asyncio in an f-string"),
        ("x = f'{1 + await y}'\n", "no sync form is known for await y in an f-string"),
    ],
)
def test_what_has_no_form_for_threads_is_refused_with_its_place(source: str, printed: str):
    with pytest.raises(NoSyncForm, match=printed):
        sync(source)


@needs_ruff
def test_imports_that_nobody_uses_any_more_go_and_the_others_are_sorted():
    made = translated(
        dedent(
            '''\
            """Queue."""

            from __future__ import annotations

            import asyncio
            from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterable
            from inspect import isawaitable


            class AsyncQueue:
                """A queue."""

                lock = asyncio.Lock()

                async def put(self, x: AsyncIterable[T] | Iterable[T], y: Awaitable[int]) -> int:
                    # async only
                    if isawaitable(x):
                        x = await x
                    return await y

                async def each(self) -> AsyncIterator[int]:
                    async with self.lock:
                        with self.open() as opened:
                            for x in opened:
                                yield x
            '''
        )
    )
    root = Path(__file__).parents[2]
    assert tidied(made, root / "src/holdfast/api/sync/group.py") == dedent(
        '''\
        """Queue."""

        from __future__ import annotations

        import threading
        from collections.abc import Iterable, Iterator


        class Queue:
            """A queue."""

            lock = threading.Lock()

            def put(self, x: Iterable[T], y: int) -> int:
                return y

            def each(self) -> Iterator[int]:
                with self.lock, self.open() as opened:
                    yield from opened
        '''
    )


@needs_ruff
def test_files_are_written_when_they_are_stale_and_removed_with_their_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def printed(*arguments: str) -> tuple[int, str]:
        code = main(arguments, tmp_path, {"a/aio": "a/sync", "b/aio": "b/sync"})
        return code, "".join(capsys.readouterr())

    renew = 'Run "make sync", and look at what it changed.\n'
    source, target = tmp_path / "a/aio/deep/group.py", tmp_path / "a/sync/deep/group.py"
    source.parent.mkdir(parents=True)
    source.write_text('"""A group for tasks."""\n')
    (tmp_path / "a/aio/opening.py").write_text('# async only\n"""How tasks open it."""\n')

    assert printed("--check") == (1, f"a/sync/deep/group.py: stale\n{renew}")
    assert printed() == (0, "a/sync/deep/group.py: written\n")
    assert target.read_text() == HEAD.format(source="aio/deep/group.py") + '"""A group for threads."""\n'
    assert printed("--check") == printed() == (0, "")

    (target.parent / "fused.py").write_text('"""Written by hand."""\n')
    source.write_text('"""A group, for tasks."""\n')
    assert printed("--check") == (1, f"a/sync/deep/group.py: stale\n{renew}")
    source.unlink()
    assert printed("--check") == (1, f"a/sync/deep/group.py: its source is gone\n{renew}")
    assert printed() == (0, "a/sync/deep/group.py: removed\n")
    assert printed("--check") == (0, "")

    (tmp_path / "a/aio/deep/fused.py").write_text('"""For tasks."""\n')
    code, error = printed()
    assert code == 1
    assert "fused.py was not generated: move it away" in error
    assert (target.parent / "fused.py").read_text() == '"""Written by hand."""\n'
