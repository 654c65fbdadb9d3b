"""The thread pool that works until the end of the process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future

import pytest

from holdfast.env.threads import DaemonThreads

PATIENCE_S = 60  # only what hangs takes so long


def test_work_is_done_on_as_many_threads_as_are_needed_and_allowed():
    pool, both = DaemonThreads(2), threading.Barrier(2)
    waiting = [pool.submit(both.wait, PATIENCE_S) for _ in range(2)]
    assert sorted(each.result(PATIENCE_S) for each in waiting) == [0, 1]
    names = {pool.submit(lambda: threading.current_thread().name).result(PATIENCE_S) for _ in range(20)}
    assert names <= {"holdfast_0", "holdfast_1"}
    pool.shutdown()


def test_work_in_turn_needs_one_thread():
    pool = DaemonThreads(8)
    threads = {pool.submit(threading.get_ident).result(PATIENCE_S) for _ in range(50)}
    assert len(threads) == 1
    pool.shutdown()


def test_an_error_is_raised_where_the_result_is_asked_for():
    pool = DaemonThreads(1)
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(PATIENCE_S)
    assert pool.submit(lambda: 1).result(PATIENCE_S) == 1
    pool.shutdown()


def test_shutdown_waits_for_what_was_submitted_or_cancels_what_has_not_begun():
    for cancel in (False, True):
        pool, begun, go_on = DaemonThreads(1), threading.Event(), threading.Event()

        def first(begun: threading.Event = begun, go_on: threading.Event = go_on) -> bool:
            begun.set()
            return go_on.wait(PATIENCE_S)

        running: Future[bool] = pool.submit(first)
        assert begun.wait(PATIENCE_S)
        behind = pool.submit(lambda: 7)
        pool.shutdown(wait=False, cancel_futures=cancel)
        go_on.set()
        pool.shutdown()
        assert (running.result(), behind.cancelled()) == (True, cancel)
        with pytest.raises(RuntimeError):
            pool.submit(lambda: 7)


def test_a_forgotten_pool_ends_its_threads():
    pool = DaemonThreads(1)
    thread = pool.submit(threading.current_thread).result(PATIENCE_S)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_started_pool_works_after_the_main_thread_has_returned_and_while_the_process_exits():
    program = """
import atexit, concurrent.futures, threading
from holdfast.env.threads import DaemonThreads
pool = DaemonThreads(1)
pool.submit(str).result()
atexit.register(lambda: print(pool.submit(str, "at exit").result()))
def afterwards():
    threading.main_thread().join()
    print(pool.submit(str, "after main").result(), flush=True)
threading.Thread(target=afterwards).start()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert (done.stdout, done.stderr) == ("after main\nat exit\n", "")
