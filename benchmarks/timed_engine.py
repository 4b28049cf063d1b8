"""The engine process of ``bench_original.py``: the tests' engine, plus clocks on its KV connector.

The clocks sit on two methods of the connector interface, so they fit any connector. They measure transfers
only for one whose transfers end within these calls.
"""

from __future__ import annotations

import time
from typing import Any

from e2e import engine_main

TIMED = ("wait_for_save", "start_load_kv")


def _connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def put_clocks(worker: Any) -> str:
    """In the worker process: time each call from now on; returns the path that the connector says it uses."""
    connector = _connector()
    connector.clocks = {name: [] for name in TIMED}
    for name in TIMED:
        setattr(connector, name, _with_clock(getattr(connector, name), connector.clocks[name]))
    if hasattr(connector, "worker_adapter"):  # 0.5
        return type(connector.worker_adapter.transfer_ctx.engine_driven_context).__name__
    return str(connector._worker.context.path)


def _with_clock(method: Any, seconds: list[float]) -> Any:
    def measured(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - began)

    return measured


def take_clocks(worker: Any) -> dict[str, float]:
    """In the worker process: seconds in each method since the last time."""
    clocks = _connector().clocks
    sums = {name: sum(seconds) for name, seconds in clocks.items()}
    for seconds in clocks.values():
        seconds.clear()
    return sums


class TimedEngine(engine_main.Engine):
    """Understands ``put_clocks`` and ``take_clocks`` beside the usual commands."""

    def put_clocks(self) -> Any:
        return self.llm.collective_rpc(put_clocks)[0]

    def take_clocks(self) -> Any:
        return self.llm.collective_rpc(take_clocks)[0]


if __name__ == "__main__":
    import timed_engine  # under its own name, or the worker process could not import what it is sent

    engine_main.Engine = timed_engine.TimedEngine
    engine_main.main()
