"""What runs in the child process of a diagnosis: everything that a faulty plugin could break.

One JSON object per line goes to a pipe. Before code of a plugin runs, a line says whose and what, so that a
parent whose child dies or hangs knows the culprit. ``lmcache.v1.platform.diagnosis`` is the parent.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lmcache.errors import DeviceError
from lmcache.v1.platform import _device_detect, _selection
from lmcache.v1.platform._admission import guarded
from lmcache.v1.platform._records import PluginRecord, State, describe
from lmcache.v1.platform._registry import HOST_TYPE, Registry
from lmcache.v1.platform.base.device_spec import DeviceSpec

__all__ = ["TORCH", "key_of", "main"]

#: Stands for a record's key where torch itself is imported.
TORCH = "torch"

_SEPARATOR = "\x1f"
_COPIED = [7, 0, 255]


def key_of(record: PluginRecord) -> str:
    """What tells a record from all others, the same in parent and child."""
    return _SEPARATOR.join((record.origin, record.name, record.value, record.distribution))


class _Child:
    def __init__(self, pipe: int, task: dict[str, Any]) -> None:
        self._pipe = pipe
        self._verdicts: dict[str, list[str]] = task["verdicts"]
        self._only: str | None = task["only"]

    def run(self) -> None:
        torch = self._torch()
        if self._only is not None:
            # So that native code which asks for the device of the process gets the one under test.
            os.environ[_selection.BACKEND_VARIABLE] = self._only.split(_SEPARATOR)[1]
        # The host of this process, not a registry of our own: a plugin may ask it back, and must be refused.
        with _device_detect._HOST.registry() as found:
            self._apply_verdicts(found)
            found.observer = lambda record, step: self._send(step=step, key=key_of(record))
            if self._only is None:
                self._all(found, torch)
                return
            record = self._load_one(found, torch)
        checks = [] if record.spec is None else self._checks(record, record.spec, torch)
        self._send(records=[self._told(record)], checks=checks)

    def _torch(self) -> Any:
        if TORCH in self._verdicts:
            _selection.import_torch = lambda: None
            return None
        self._send(step="import", key=TORCH)
        return _selection.import_torch()

    def _apply_verdicts(self, found: Registry) -> None:
        """What was the end of an earlier child is not tried again."""
        for record in found.records:
            verdict = self._verdicts.get(key_of(record))
            if verdict:
                record.settle(verdict[0], verdict[1])

    def _all(self, found: Registry, torch: Any) -> None:
        # The choice comes first, as in any process: a plugin that it does not import must not sway it.
        self._send(step="choose", key="")
        choice: dict[str, Any] = {"selected": None, "why": "", "error": ""}
        try:
            chosen = _selection.select(found)
            choice.update(selected=chosen.record.name, why=chosen.why)
        except DeviceError as exc:
            choice["error"] = str(exc)
        found.load()
        for record in found.records:
            if record.spec is not None and record.state is State.FOUND:
                found.probe(record, torch)
        self._send(
            records=[self._told(record) for record in found.records], choice=choice, remark=found.remark
        )

    def _load_one(self, found: Registry, torch: Any) -> PluginRecord:
        record = next(r for r in found.records if key_of(r) == self._only)
        found.load(record.name)
        if record.spec is not None:
            found.probe(record, torch)
        return record

    def _checks(self, record: PluginRecord, spec: DeviceSpec, torch: Any) -> list[dict[str, Any]]:
        """Native code and a copy to the device and back, on what is available."""
        if record.state is not State.AVAILABLE:
            return []
        if torch is None:
            return [{"check": "copy", "ok": None, "note": "not tried: torch cannot be imported"}]
        checks: list[tuple[str, Callable[[], str]]] = [
            ("native", lambda: str(spec.get_ops().binding_report())),
            ("copy", lambda: _copy(spec, torch)),
        ]
        results: list[dict[str, Any]] = []
        for name, check in checks:
            self._send(step=name, key=key_of(record))
            results.append(_try(name, check))
        return results

    def _told(self, record: PluginRecord) -> dict[str, Any]:
        return {**record.as_dict(), "key": key_of(record)}

    def _send(self, **line: Any) -> None:
        data = f"\n{json.dumps(line)}\n".encode()  # on a line of its own, whatever else wrote before
        while data:
            data = data[os.write(self._pipe, data) :]


def _try(name: str, check: Callable[[], str]) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        note, ok = guarded(name, check), True
    except Exception as exc:
        cause = exc.__cause__
        note, ok = str(cause) if isinstance(cause, DeviceError) else str(exc), False
    return {"check": name, "ok": ok, "note": note, "seconds": time.perf_counter() - started}


def _copy(spec: DeviceSpec, torch: Any) -> str:
    """Three elements there and back."""
    source = torch.tensor(_COPIED)
    there = source.to(spec.device_type)
    spec.synchronize_device(None)
    back = there.to(HOST_TYPE).tolist()
    if back != _COPIED:
        raise DeviceError(f"three elements came back wrong: expected {_COPIED}, got {back}")
    return "three elements there and back"


def main(pipe: int, task: str) -> None:
    """Do what ``task`` (JSON) says, report through file descriptor ``pipe``, and leave without clean-up.

    A plugin's threads or exit handlers must not decide how this ends.
    """
    os.set_inheritable(pipe, False)  # or what a plugin starts would keep the pipe open
    try:
        _Child(pipe, json.loads(task)).run()
    except BaseException as exc:
        with suppress(Exception):  # a plugin may have closed it
            print(describe(exc), file=sys.stderr, flush=True)  # noqa: T201 - the parent quotes it
        os._exit(1)
    os._exit(0)
