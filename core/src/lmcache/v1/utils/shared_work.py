"""Work that a thread shares with those of a pool, and that is over when the call is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from threading import Condition

__all__ = ["run_together"]


def run_together(pool: Executor, helpers: int, run: Callable[[], None]) -> None:
    """Call ``run`` in this thread, and in as many of the pool's as begin meanwhile.

    Args:
        pool: Its threads may be busy, gone after a fork, or not to be had: none of them is counted on.
        helpers: How many of the pool's may take part.
        run: Takes what is left of the work until nothing is.

    Raises:
        Exception: What a call has raised. None is under way any more, in any thread: what they work on may be freed.
    """
    shared = _Shared(run)
    with suppress(RuntimeError):  # no more threads, or the interpreter ends: this one does the rest
        for _ in range(helpers):
            pool.submit(shared.help)
    try:
        run()
    finally:
        shared.end()
    if shared.faults:
        raise shared.faults[0]


class _Shared:
    """Who is at work. Futures do not tell: what a pool was asked and refused, it may begin nevertheless."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._change = Condition()
        self._at_work, self._is_over = 0, False
        self.faults: list[BaseException] = []

    def help(self) -> None:
        with self._change:
            if self._is_over:
                return
            self._at_work += 1
        try:
            self._run()
        except BaseException as fault:
            self.faults.append(fault)
        with self._change:
            self._at_work -= 1
            self._change.notify_all()

    def end(self) -> None:
        """Nobody begins any more, and whoever has is waited for."""
        with self._change:
            self._is_over = True
            self._change.wait_for(lambda: not self._at_work)
        del self._run  # a pool without threads keeps what it was asked
