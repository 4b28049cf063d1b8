"""Test side of ``engine_main.py``: a real vLLM engine in a process of its own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from e2e.forked import ForkedEngine

TESTS = Path(__file__).parent.parent
START_SECONDS = 240


class EngineFailed(AssertionError):
    """The engine process died, or answered with an error."""


class EngineProcess:
    """``engine.generate(...)`` and the other commands of ``engine_main.Engine``.

    Args:
        main: a module that is run as the main of a fresh interpreter; without it the engine is forked from one
            that has imported vLLM.
        python, env: that interpreter, and variables that differ from ours.
        settings: of vLLM's ``LLM``.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        connector: dict[str, Any] | None = None,
        *,
        python: str = sys.executable,
        main: str | None = None,
        env: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.log = log
        down, self._commands_fd = os.pipe()
        self._answers_fd, up = os.pipe()
        variables = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Several engines and servers share as few as two cores: a thread each, wherever the kernel puts it.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        }
        variables |= env or {}
        self.process: subprocess.Popen[bytes] | ForkedEngine
        with open(log, "wb") as out:
            if main is None:
                self.process = ForkedEngine(str(log), variables, down, up)
            else:
                self.process = subprocess.Popen(
                    [python, "-m", main, str(down), str(up)],
                    pass_fds=(down, up), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                    env=variables, start_new_session=True,
                )  # fmt: skip
        os.close(down)
        os.close(up)
        self._buffer = b""
        self._send(settings | {"model": str(model), "kv_transfer_config": connector})

    def ready(self) -> None:
        """Wait until the engine has started."""
        self._receive(START_SECONDS)

    def call(self, op: str, *args: Any, timeout: float = 180, **kwargs: Any) -> Any:
        """Run one command; its result."""
        self._send({"op": op, "args": args, "kwargs": kwargs})
        return self._receive(timeout)

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> list[dict[str, Any]]:
        return self.timed(prompts, **kwargs)[0]

    def timed(self, prompts: list[list[int]], **kwargs: Any) -> tuple[list[dict[str, Any]], float]:
        """Results and the seconds that the engine took."""
        answer = self.call("generate", prompts, **kwargs)
        return answer["results"], answer["seconds"]

    def worker(self, name: str, *args: Any) -> Any:
        return self.call("worker", name, *args)

    def close(self) -> None:
        for fd in (self._commands_fd, self._answers_fd):
            os.close(fd)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to the engine with all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait(10)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def _send(self, message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._commands_fd, data) :]

    def _receive(self, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if not select.select([self._answers_fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise EngineFailed(f"no answer in {timeout} s\n{self._tail()}")
            piece = os.read(self._answers_fd, 1 << 20)
            if not piece:
                raise EngineFailed(f"the engine died\n{self._tail()}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{answer['error']}\n{self._tail()}")
        return answer["ok"]

    def _tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-40:])


def connector(port: int, policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    """A kv_transfer_config for a server on ``port``."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": str(port),
            **extra,
        },
    }


def inproc(engine_id: str, *, by_path: bool = False, **extra: Any) -> dict[str, Any]:
    """A kv_transfer_config for a cache inside the engine, by the connector's bare name or by its module's path."""
    transfer = {
        "kv_connector": "LMCacheConnectorV1Dynamic" if by_path else "LMCacheConnectorV1",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "engine_id": engine_id,
        "kv_connector_extra_config": {"max_local_cpu_size": 0.25, **extra},
    }
    if by_path:
        transfer["kv_connector_module_path"] = "lmcache.integration.vllm.lmcache_connector_v1"
    return transfer


@contextmanager
def engine(
    model: Path, log: Path, transfer: dict[str, Any] | None = None, **settings: Any
) -> Iterator[EngineProcess]:
    """A started engine; gone on exit."""
    process = EngineProcess(model, log, transfer, **settings)
    try:
        process.ready()
        yield process
    finally:
        process.close()
