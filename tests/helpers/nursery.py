"""Rigs as processes that start quickly: forked from one that has imported torch and ours already."""

from __future__ import annotations

import multiprocessing
import os
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from helpers import rig

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "helpers.rig", "helpers.nursery"])


def _child(commands: Connection) -> None:
    for fd in (0, 1):
        os.dup2(commands.fileno(), fd)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    rig.main()


class _Process:
    """What :class:`RigProcess` uses of ``subprocess.Popen``."""

    def __init__(self) -> None:
        ours, theirs = _CONTEXT.Pipe()
        self._child = _CONTEXT.Process(target=_child, args=(theirs,), daemon=True)
        self._child.start()
        theirs.close()
        self.stdin, self.stdout = os.fdopen(os.dup(ours.fileno()), "w"), os.fdopen(os.dup(ours.fileno()))
        ours.close()

    @property
    def pid(self) -> int:
        return int(self._child.pid or 0)

    @property
    def returncode(self) -> int | None:
        return self._child.exitcode

    def poll(self) -> int | None:
        return self._child.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._child.kill()

    def wait(self, timeout: float) -> None:
        self._child.join(timeout)

    def communicate(self, timeout: float = 10.0) -> tuple[str, str]:
        """Wait for its end. What it wrote to standard error is on ours."""
        self._child.join(timeout)
        self.stdout.close()
        with suppress(BrokenPipeError):  # a command that nobody was there to read
            self.stdin.close()
        return "", ""


class ForkedRig(rig.RigProcess):
    """A :class:`RigProcess` but for how it starts."""

    def __init__(self, address: str, engine: str, **settings: Any) -> None:
        self.process: Any = _Process()
        self.errors = ""
        self._start(address, engine, None, settings)
