"""Copies between addresses of host memory that threads share among them. Torch is not needed."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lmcache.v1.memory import hostcopy
from lmcache.v1.utils.shared_work import run_together

FORKED = """
import ctypes, os, signal, threading, time
os.sched_getaffinity = lambda _: set(range(8))
from lmcache.v1.memory import hostcopy
hostcopy._THREADED_BYTES = 0
threads, pool = hostcopy._helpers()
met = threading.Barrier(threads)
begun = [pool.submit(met.wait) for _ in range(threads - 1)]
met.wait()
while pool._idle_semaphore._value < len(begun):
    time.sleep(0.01)
at, to = bytearray(range(8)), bytearray(8)
source, target = (ctypes.addressof((ctypes.c_char * 8).from_buffer(b)) for b in (at, to))
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    signal.alarm(20)
    hostcopy.copy_runs([target + i for i in range(8)], [source + i for i in range(8)], [1] * 8)
    os._exit(to != at)
"""


def test_a_forked_process_copies_without_the_threads_that_it_has_not() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_run_is_copied_whatever_number_of_threads_there_is(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostcopy._helpers.cache_clear()
    monkeypatch.setattr(hostcopy.os, "sched_getaffinity", lambda _: set(range(2 * threads)))
    monkeypatch.setattr(hostcopy, "_THREADED_BYTES", 0)
    source, target = bytearray(range(200)), bytearray(200)
    start, begin = (ctypes.addressof((ctypes.c_char * 200).from_buffer(part)) for part in (source, target))
    for count in range(1, 20):
        target[:] = bytes(200)
        offsets = range(0, 10 * count, 10)
        hostcopy.copy_runs([begin + at for at in offsets], [start + at for at in offsets], [10] * count)
        assert target == source[: 10 * count] + bytes(200 - 10 * count)
    hostcopy._helpers.cache_clear()


class _Late(ThreadPoolExecutor):
    """Has no more threads, but keeps what it was asked."""

    def submit(self, *asked: Any, **kwargs: Any) -> Any:
        future = super().submit(*asked, **kwargs)
        raise RuntimeError(f"can't start new thread for {future}")


@pytest.mark.parametrize("kind", [ThreadPoolExecutor, _Late])
def test_a_pool_that_refuses_leaves_all_to_the_caller_and_none_of_it_is_under_way_then(
    kind: type[ThreadPoolExecutor],
) -> None:
    pool, left, done, under_way = kind(1), iter(range(100)), list[int](), set[int]()
    if kind is ThreadPoolExecutor:
        pool.shutdown()

    def run() -> None:
        for number in left:
            under_way.add(number)
            time.sleep(0.001)
            done.append(number)
            under_way.remove(number)

    run_together(pool, 3, run)
    assert sorted(done) == list(range(100))
    assert not under_way
    pool.shutdown()
