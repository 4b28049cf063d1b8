"""Work that a thread shares with those of a pool, and that is over when the call is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

__all__ = ["run_together"]


def run_together(pool: Executor, helpers: int, run: Callable[[], None]) -> None:
    """Call ``run`` in this thread, and in as many of the pool's as begin meanwhile.

    Args:
        pool: Its threads may be busy, or gone after a fork: none of them is counted on.
        helpers: How many of the pool's may take part.
        run: Takes what is left of the work until nothing is.

    Raises:
        Exception: What a call has raised. None is under way any more, in any thread.
    """
    asked: list[Future[None]] = []
    try:
        for _ in range(helpers):
            asked.append(pool.submit(run))
        run()
    finally:
        # One that has not begun by now has nothing to do.
        begun = [helper for helper in asked if not helper.cancel()]
        wait(begun)  # for all, also if one has failed: what they copy may be freed or used anew after this
    for helper in begun:
        helper.result()
