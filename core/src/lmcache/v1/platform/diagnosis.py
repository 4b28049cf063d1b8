"""What is installed, how far it gets and why: asked of child processes, so no plugin can break the asker.

``survey`` looks at all backends in one child. If a plugin kills that child or lets it hang, the plugin gets
that as its verdict, and another child goes on without it. ``examine`` gives each backend a child of its own,
and also tries its native code and a copy.
"""

from __future__ import annotations

import json
import os
import select
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lmcache.errors import LMCacheError
from lmcache.v1.platform._inspect import TORCH, key_of
from lmcache.v1.platform._records import PluginRecord
from lmcache.v1.platform._registry import discover

__all__ = ["ChildEnd", "Survey", "examine", "run_child", "survey"]

DEFAULT_SECONDS = 20.0
_TORCH_SECONDS = 120.0
_EXIT_SECONDS = 10.0
_GLANCE_SECONDS = 0.1
_TAIL = 300
# Isolated mode leaves the user's site folder out: its path is given, and its .pth files may install importers.
_CODE = """
import json, site, sys
for folder in json.loads(sys.argv[4]):
    site.addsitedir(folder)
sys.path[:] = json.loads(sys.argv[1])
import importlib
importlib.import_module(sys.argv[5]).main(int(sys.argv[2]), sys.argv[3])
"""

#: What it means that a child ended, or did not, in a step: reason codes for a crash and for a time-out.
_CODES = {"import": ("import-crashed", "import-timeout"), "probe": ("probe-crashed", "probe-timeout")}
_DOING = {"import": "it was imported", "probe": "is_available() ran", "choose": "the choice was made"}


@dataclass
class Survey:
    """Every backend as a dictionary (``PluginRecord.as_dict``), and the choice made among them."""

    records: list[dict[str, Any]]
    selected: str | None = None
    why: str = ""
    error: str = ""
    """Why no choice can be made."""
    remark: str = ""
    """Which names in LMCACHE_DISABLE_PLUGINS nothing has."""


@dataclass
class ChildEnd:
    """How a child ended: with a result, or in a step of some record."""

    result: dict[str, Any] | None = None
    key: str = ""
    step: str = ""
    fault: str = ""
    timed_out: bool = False


def survey(seconds: float = DEFAULT_SECONDS) -> Survey:
    """Look at every backend, in this environment, as any process of this installation would.

    Args:
        seconds: How long a plugin may take for one step (import, probe) before it counts as hung.

    Raises:
        LMCacheError: The child process fails for a reason that is no plugin's.
    """
    verdicts: dict[str, tuple[str, str]] = {}
    while True:
        end = run_child({"verdicts": verdicts, "only": None}, seconds)
        if end.result is not None:
            choice = end.result["choice"]
            return Survey(
                [_public(r) for r in end.result["records"]],
                choice["selected"],
                choice["why"],
                choice["error"],
                end.result["remark"],
            )
        if not end.key or end.key in verdicts:
            raise LMCacheError(f"looking at device backends failed: {end.fault}")
        verdicts[end.key] = _verdict(end)


def examine(seconds: float = DEFAULT_SECONDS) -> list[dict[str, Any]]:
    """Try every backend in a process of its own: import, probe, native code, a copy of three elements.

    Returns:
        The records in order, each with ``checks``: dictionaries of check, ok (None is not tried), note.
    """
    return [_examined(record, seconds) for record in _candidates()]


def _candidates() -> list[tuple[str, PluginRecord]]:
    """All candidates as metadata has them; nothing but the built-in packages is imported."""
    return [(key_of(record), record) for record in discover().records]


def _examined(candidate: tuple[str, PluginRecord], seconds: float) -> dict[str, Any]:
    key, record = candidate
    verdicts: dict[str, tuple[str, str]] = {}
    while True:
        end = run_child({"verdicts": verdicts, "only": key}, seconds)
        if end.result is not None:
            return {**_public(end.result["records"][0]), "checks": end.result["checks"]}
        if end.key == key and end.step in _CODES:
            code, note = _verdict(end)
            record.settle(code, note)
            return {**record.as_dict(), "checks": []}
        if end.key and end.key != key and end.key not in verdicts:
            verdicts[end.key] = _verdict(end)  # torch, or another of the same name, which comes first
            continue
        record.settle("usable" if end.step in ("native", "copy") else "found")
        return {
            **record.as_dict(),
            "checks": [{"check": end.step or "start", "ok": False, "note": end.fault}],
        }


def _public(told: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if name != "key"}


def _verdict(end: ChildEnd) -> tuple[str, str]:
    if end.key == TORCH:
        return "no-torch", end.fault
    return _CODES[end.step][end.timed_out], f"{end.fault} while {_DOING[end.step]}"


# --- the child process -------------------------------------------------------------------------------------


def run_child(
    task: Mapping[str, Any], seconds: float, module: str = "lmcache.v1.platform._inspect"
) -> ChildEnd:
    """Run ``module.main(pipe, task)`` in a child to its end, or until it is silent in one step for too long."""
    readable, writable = os.pipe()
    with tempfile.TemporaryFile() as said, os.fdopen(readable, "rb", buffering=0) as pipe:
        folders = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
        told = [json.dumps(sys.path), str(writable), json.dumps(task), json.dumps(folders), module]
        command = [sys.executable, "-I", "-c", _CODE, *told]
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=(writable,),
                start_new_session=True,
            )
        finally:
            os.close(writable)
        try:
            end = _listen(pipe, child, seconds)
        except BaseException:
            _kill(child, 0)
            raise
        # After a crash the kernel may still be writing a core file; its exit status is worth the wait.
        ended = _kill(child, 0 if end.timed_out else _EXIT_SECONDS)
        if end.result is None and not end.timed_out:
            end.timed_out = not ended
            end.fault = _fault(child.returncode, said) if ended else f"no end after {_EXIT_SECONDS:g} s"
        return end


def _listen(pipe: Any, child: subprocess.Popen[bytes], seconds: float) -> ChildEnd:
    end, rest = ChildEnd(), b""
    while end.result is None:
        limit = _TORCH_SECONDS if end.key in ("", TORCH) else seconds
        if not _speaks(pipe, child, limit):
            if child.poll() is None:
                end.timed_out, end.fault = True, f"no end after {limit:g} s"
            return end
        data = pipe.read(1 << 16)
        if not data:
            return end
        *lines, rest = (rest + data).split(b"\n")
        for line in filter(None, map(_understood, lines)):
            if "records" in line:
                end.result = line
            else:
                end.key, end.step = line["key"], line["step"]
    return end


def _speaks(pipe: Any, child: subprocess.Popen[bytes], limit: float) -> bool:
    """Whether there is something to read in time, or the end of it. A child may end and leave its pipe to a fork."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        ended = child.poll() is not None  # asked first: then what it wrote last is not missed
        if select.select([pipe], [], [], 0 if ended else _GLANCE_SECONDS)[0]:
            return True
        if ended:
            return False
    return False


def _understood(line: bytes) -> dict[str, Any] | None:
    """A line of the child, or None: a plugin may write into any file descriptor that it finds open."""
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) and ("records" in told or told.keys() >= {"key", "step"}) else None


def _kill(child: subprocess.Popen[bytes], seconds: float) -> bool:
    """End the child and whatever it may have started; whether the child ended by itself, and in time."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(seconds)
    ended = child.returncode is not None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    return ended


def _fault(code: int, said: Any) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"the process was killed by {signal.Signals(-code).name}"
    said.seek(0)
    tail = said.read()[-_TAIL:].decode(errors="replace").strip().splitlines()
    return f"the process ended with exit code {code}" + (f" ({tail[-1]})" if tail else "")
