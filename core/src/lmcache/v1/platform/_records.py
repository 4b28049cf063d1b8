"""What became of every backend that was found: one record each, kept for the life of the process.

A record starts as ``found``. Whatever happens to it afterwards is one row of ``REASONS``: a code programs can
rely on, the state it leads to, and what a person can do about it.
"""

from __future__ import annotations

import traceback as traceback_module
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache.v1.platform.base.device_spec import DeviceSpec

__all__ = ["BUILT_IN", "ENTRY_POINT", "REASONS", "PluginRecord", "State", "describe", "one_line"]

BUILT_IN = "built-in"
ENTRY_POINT = "entry-point"
_NOTE_LENGTH = 400


class State(str, Enum):
    """How far a backend got."""

    FOUND = "found"
    BLOCKED = "blocked"
    INCOMPATIBLE = "incompatible"
    IMPORT_FAILED = "import-failed"
    INVALID = "invalid"
    DUPLICATE = "duplicate"
    UNAVAILABLE = "unavailable"
    AVAILABLE = "available"
    SELECTED = "selected"


_REPORT = "report it to the maintainers of {distribution}"
_AVOID = "set LMCACHE_DISABLE_PLUGINS={name} until it is mended, and " + _REPORT
_KEEP_ONE = "keep one of the two: pip uninstall {distribution}"

#: Reason code: state, remedy. Braces name fields of the record, or what the caller of ``settle`` adds.
REASONS: dict[str, tuple[State, str]] = {
    "found": (State.FOUND, ""),
    "disabled": (State.BLOCKED, "take it out of LMCACHE_DISABLE_PLUGINS"),
    "core-version": (State.INCOMPATIBLE, "{command}"),
    "plugin-api": (State.INCOMPATIBLE, "{command}"),
    "import-raised": (State.IMPORT_FAILED, "pip install --force-reinstall {distribution}, or " + _REPORT),
    "import-exited": (State.IMPORT_FAILED, _REPORT + ": importing it must not end the process"),
    "import-asks-for-device": (
        State.IMPORT_FAILED,
        _REPORT + ": what depends on the device belongs inside the function that needs it",
    ),
    "import-crashed": (State.IMPORT_FAILED, _AVOID),
    "import-timeout": (State.IMPORT_FAILED, _AVOID),
    "metadata": (State.INVALID, "pip install --force-reinstall {distribution}, or " + _REPORT),
    "entry-point": (State.INVALID, _REPORT),
    "not-a-class": (State.INVALID, _REPORT + ": the entry point must name a DeviceSpec subclass itself"),
    "not-a-device-spec": (State.INVALID, _REPORT + ": the entry point must name a DeviceSpec subclass"),
    "plugin-api-pin": (State.INVALID, _REPORT + ": plugin_api is a pair of integers (major, minor)"),
    "constructor": (State.INVALID, _REPORT + ": the class must be constructible without arguments"),
    "property": (State.INVALID, _REPORT),
    "name": (State.INVALID, _REPORT + ": names are non-empty lowercase strings"),
    "name-mismatch": (State.INVALID, _REPORT + ": the entry point is named by its backend_name"),
    "torch-module-name": (State.INVALID, _REPORT + ": it names an attribute of torch"),
    "duplicate": (State.DUPLICATE, _KEEP_ONE + " or pip uninstall {other}"),
    "duplicate-built-in": (
        State.DUPLICATE,
        "pip uninstall {distribution}: a built-in backend is never replaced",
    ),
    "not-on-this-host": (State.UNAVAILABLE, ""),
    "no-torch": (State.UNAVAILABLE, "install torch with support for this device"),
    "no-torch-module": (
        State.UNAVAILABLE,
        "install a torch, or a torch extension, that supports this device",
    ),
    "probe-raised": (State.UNAVAILABLE, _REPORT + ": is_available() must not raise"),
    "probe-crashed": (State.UNAVAILABLE, _AVOID),
    "probe-timeout": (State.UNAVAILABLE, _AVOID),
    "usable": (State.AVAILABLE, ""),
    "chosen": (State.SELECTED, ""),
    "native-abi": (State.SELECTED, "pip install --upgrade {older}"),
    "native-failed": (State.SELECTED, "pip install --force-reinstall {distribution}, or " + _REPORT),
}


@dataclass
class PluginRecord:
    """One candidate: where it comes from, how far it got, and why not further."""

    name: str
    """Entry-point name, which is to be the backend name."""
    distribution: str
    version: str
    value: str
    """``module:Class``."""
    origin: str
    """``built-in`` or ``entry-point``."""
    state: State = State.FOUND
    code: str = "found"
    note: str = ""
    remedy: str = ""
    traceback: str = ""
    import_seconds: float | None = None
    """What importing its module took in this process; None if it was not imported."""
    device_type: str = ""
    requires: tuple[str, ...] = ()
    """The distribution's own requirements."""
    spec: DeviceSpec | None = field(default=None, repr=False, compare=False)

    @property
    def source(self) -> str:
        """The distribution and its version, for messages."""
        return f"{self.distribution} {self.version}".strip() + (
            " (built in)" if self.origin == BUILT_IN else ""
        )

    def settle(self, code: str, note: str = "", exc: BaseException | None = None, **extra: str) -> None:
        """Move to the state of ``code``; ``extra`` fills what its remedy names beside the record's fields."""
        self.state, remedy = REASONS[code]
        self.code, self.note = code, one_line(note)
        names = {"name": self.name, "distribution": self.distribution or "this plugin", **extra}
        self.remedy = remedy.format(**names)
        self.traceback = "".join(traceback_module.format_exception(exc)) if exc is not None else ""

    def annotate(self, code: str, note: str, exc: BaseException | None = None, **extra: str) -> None:
        """Like :meth:`settle` for what fails later on: the choice of backend has been made and stays."""
        state = self.state
        self.settle(code, note, exc, **extra)
        self.state = state

    def verdict(self) -> str:
        """State, note and remedy in one line, for errors that name this backend."""
        parts = [f"{self.state.value} ({self.source})", self.note, self.remedy]
        return "; ".join(part for part in parts if part)

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "spec"}
        return {**data, "state": self.state.value, "requires": list(self.requires)}


def describe(exc: BaseException) -> str:
    """``Type: message`` in one line. A message that cannot be made costs only itself."""
    try:
        text = str(exc)
    except KeyboardInterrupt:
        raise
    except BaseException as inner:
        text = f"(its message raises {type(inner).__name__})"
    return one_line(f"{type(exc).__name__}: {text}" if text else type(exc).__name__)


def one_line(text: str) -> str:
    """``text`` as one line that moves no cursor, cut where nobody would read on."""
    flat = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))
    return flat if len(flat) <= _NOTE_LENGTH else flat[: _NOTE_LENGTH - 1] + "…"
