"""What became of every plugin: one record each, kept as long as the host that loaded it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

from lmcache.v1.platform._records import describe, one_line
from lmcache.v1.utils.entry_points import EntryPoint

__all__ = ["STATES", "PluginRecord"]

_REPORT = "report it to the maintainers of {distribution}"

#: State: what a person can do about it.
STATES = {
    "found": "",
    "blocked": "take it out of LMCACHE_DISABLE_PLUGINS",
    "incompatible": "{command}",
    "import-failed": "pip install --force-reinstall {distribution}, or " + _REPORT,
    "invalid": _REPORT,
    "duplicate": "pip uninstall {distribution}, or the other one",
    "loaded": "",
    "unplugged": _REPORT,
}


@dataclass
class PluginRecord:
    """One entry point of ``lmcache.plugins``: how far it got, and why not further."""

    point: EntryPoint
    state: str = "found"
    note: str = ""
    remedy: str = ""
    traceback: str = ""
    hooks: list[str] = field(default_factory=list)
    """The hooks that it implements; known once it is loaded."""

    def settle(self, state: str, note: str = "", exc: BaseException | None = None, command: str = "") -> None:
        """Move to ``state``; ``exc`` is what the plugin raised."""
        reason = describe(exc) if exc is not None else ""
        self.state, self.note = state, one_line(": ".join(part for part in (note, reason) if part))
        named = self.point.distribution or "the plugin"
        self.remedy = STATES[state].format(distribution=named, command=command)
        self.traceback = "".join(traceback.format_exception(exc)) if exc is not None else ""

    def verdict(self) -> str:
        """Who, what and why in one line."""
        parts = [one_line(f"plugin {self.point.name} of {self.point.source} is {self.state}"), self.note]
        line = ": ".join(part for part in parts if part)
        return f"{line}; {self.remedy}" if self.remedy else line

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        point = self.point
        return {
            "name": point.name,
            "value": point.value,
            "distribution": point.distribution,
            "version": point.version,
            "state": self.state,
            "hooks": self.hooks,
            "note": self.note,
            "remedy": self.remedy,
            "traceback": self.traceback,
        }
