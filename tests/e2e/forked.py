"""Engines that start in seconds: forked from a process that has imported vLLM, where a fresh start imports it in
three processes one after another.

The engine, its core and its workers are processes as ever, and only come to be in another way: vLLM's ``spawn`` is
served by the same fork server, which has no thread but its own, so that OpenMP starts anew in each of them.
"""

from __future__ import annotations

import os
from multiprocessing import context, forkserver
from multiprocessing.connection import Connection
from subprocess import TimeoutExpired

_SERVER = context.ForkServerContext()
_SERVER.set_forkserver_preload(
    ["vllm", "vllm.entrypoints.llm", "vllm.lora.request", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"]
)
_log = ""


class _Child(context.ForkServerProcess):
    """A process with the environment, the process group and the log of who starts it."""

    def start(self) -> None:
        self._settings = _log, dict(os.environ), os.getpgid(0)
        super().start()

    def run(self) -> None:
        _settle(*self._settings)
        super().run()


class _Spawn(context.ForkServerContext):
    _name = "spawn"
    Process = _Child


def _settle(log: str, variables: dict[str, str], group: int) -> None:
    """Make of a child of the fork server what a fresh interpreter would have been."""
    global _log
    _log = log
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.setpgid(0, group)
    os.environ.clear()
    os.environ.update(variables)
    if "OMP_NUM_THREADS" in variables:  # OpenMP read it long ago
        import torch

        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    context._concrete_contexts["spawn"] = _Spawn()  # type: ignore[attr-defined]
    forkserver._forkserver.ensure_running = lambda: (
        None
    )  # it has our server's address, and would start another


def _engine(log: str, variables: dict[str, str], commands: Connection, answers: Connection) -> None:
    _settle(log, variables, 0)
    from e2e import engine_main

    engine_main.serve(os.dup(commands.fileno()), os.dup(answers.fileno()))


class ForkedEngine:
    """What :class:`EngineProcess` uses of ``subprocess.Popen``. ``commands`` and ``answers`` stay the caller's."""

    def __init__(self, log: str, variables: dict[str, str], commands: int, answers: int) -> None:
        pipes = Connection(os.dup(commands), writable=False), Connection(os.dup(answers), readable=False)
        self._child = _SERVER.Process(target=_engine, args=(log, variables, *pipes))
        self._child.start()
        for pipe in pipes:
            pipe.close()

    @property
    def pid(self) -> int:
        return int(self._child.pid or 0)

    def wait(self, timeout: float) -> None:
        self._child.join(timeout)
        if self._child.exitcode is None:
            raise TimeoutExpired("the engine", timeout)
