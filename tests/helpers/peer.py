"""Another process that does what a test says, and files, mappings and segments that may leak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from helpers.server import wait_for

_LOOP = """
import json, os, sys
space = {}
for line in sys.stdin:
    space.pop("out", None)
    try:
        exec(json.loads(line), space)
        answer = {"out": space.get("out")}
    except Exception as exc:
        answer = {"error": f"{type(exc).__name__}: {exc}"}
    sys.stdout.write(json.dumps(answer) + "\\n")
    sys.stdout.flush()
"""


class Peer:
    """A fresh interpreter. ``do(code)`` runs code there and gives what it left in ``out``, as JSON can hold it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid

    def do(self, code: str) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"error": "the process has ended"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["out"]

    def end(self) -> None:
        """Let it end by itself, and reap it."""
        self._leave()
        assert self.process.wait(30) == 0

    def kill(self, reap: bool = True) -> None:
        self.process.kill()
        if reap:
            self._leave()
            self.process.wait(30)

    def _leave(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        if self.process.stdout:
            self.process.stdout.close()


def memfd_mappings() -> list[str]:
    """This process's mappings of LMCache's anonymous files."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:lmcache" in line]


def memfd_descriptors(pid: int | str = "self") -> list[str]:
    """A process's descriptors of LMCache's anonymous files."""
    found = []
    for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
        try:
            target = os.readlink(entry)
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if "memfd:lmcache" in target:
            found.append(entry.name)
    return found


def segments() -> set[str]:
    """Names in /dev/shm that LMCache, or torch for it, may have left; other programs have theirs there."""
    return {e.name for e in Path("/dev/shm").iterdir() if e.name.startswith(("lmcache", "torch_"))}


def check_nothing_left(before: set[str]) -> None:
    """Every name that is new since ``before`` is used by somebody or soon gone: tests that run beside this one, and
    what they kill, have names of theirs there."""
    new = segments() - before
    wait_for(lambda: not _unused(new & segments()), 30, f"names left in /dev/shm: {new}")


def _unused(names: set[str]) -> set[str]:
    """Those of which no process has a mapping."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if not names:
            break
        with suppress(OSError):  # it has ended
            text = maps.read_text()
            names = {name for name in names if f"/dev/shm/{name}" not in text}
    return names
