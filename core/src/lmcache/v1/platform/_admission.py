"""From an entry point to a usable spec: every step in which code of a plugin runs, each of them guarded.

Whatever a plugin raises, ``SystemExit`` and other ``BaseException`` included, becomes a ``Refused`` with a
reason code. ``KeyboardInterrupt`` alone passes: it comes from the person at the keyboard.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from lmcache.errors import DeviceError
from lmcache.v1.platform._compat import api_mismatch, is_api_pin, range_mismatch
from lmcache.v1.platform._records import BUILT_IN, PluginRecord, describe
from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.utils.entry_points import target

__all__ = ["Candidate", "DiscoveryRunning", "Refused", "admit", "check_range", "guarded", "load_entry_point"]

T = TypeVar("T")


class DiscoveryRunning(DeviceError):
    """A plugin asked which device is used while it is being decided."""


class Refused(Exception):
    """Why a plugin goes no further: a reason code, a note, the cause, and fillings of the remedy."""

    def __init__(self, code: str, note: str, exc: BaseException | None = None, **extra: str) -> None:
        super().__init__(note)
        self.code, self.note, self.exc, self.extra = code, note, exc, extra


@dataclass(frozen=True)
class Candidate:
    """A record, and how to get at the object it stands for."""

    record: PluginRecord
    load: Callable[[], object]


def guarded(code: str, call: Callable[[], T], prefix: str = "") -> T:
    """``call()``; what it raises is :class:`Refused` with ``code``, or a code that fits the cause better."""
    try:
        return call()
    except (KeyboardInterrupt, Refused):
        raise
    except BaseException as exc:
        raise Refused(code, prefix + describe(exc), exc) from exc


def load_entry_point(value: str) -> object:
    """Import the module that ``value`` (``module:attribute``) names, and get the attribute."""
    module_name, attributes = target(value)
    if not module_name or (":" in value and not attributes):
        raise Refused("entry-point", f"its entry point is {value!r}: expected module:Class")
    found: object = _import(module_name)
    for attribute in attributes:
        try:
            found = getattr(found, attribute)
        except AttributeError as exc:
            raise Refused(
                "entry-point", f"module {module_name!r} has no {'.'.join(attributes)!r}", exc
            ) from exc
    return found


def _import(module_name: str) -> object:
    try:
        return importlib.import_module(module_name)
    except DiscoveryRunning as exc:
        raise Refused("import-asks-for-device", describe(exc).partition(": ")[2], exc) from exc
    except SystemExit as exc:
        raise Refused("import-exited", f"{describe(exc)} while {module_name} was imported", exc) from exc


def check_range(record: PluginRecord, core_version: str) -> None:
    """Raise :class:`Refused` if the distribution's own requirement excludes this core."""
    mismatch = range_mismatch(record.requires, record.distribution, core_version)
    if mismatch:
        raise Refused("core-version", mismatch[0], command=mismatch[1])


def admit(candidate: Candidate, core_version: str) -> DeviceSpec:
    """Import, check and construct. The record's import time is set even if the import fails.

    Raises:
        Refused: with the first reason found.
    """
    record = candidate.record
    started = time.perf_counter()
    try:
        loaded = guarded("import-raised", candidate.load)
    finally:
        if record.import_seconds is None:  # scanning the built-in packages has imported and timed them
            record.import_seconds = time.perf_counter() - started
    cls = guarded("not-a-class", lambda: _spec_class(loaded))
    _check_api(cls, record, core_version)
    spec = guarded("constructor", lambda: cls())
    guarded("property", lambda: _check_identity(spec, record))
    return spec


def _spec_class(loaded: Any) -> type[DeviceSpec]:
    where = f"{getattr(loaded, '__module__', '?')}.{getattr(loaded, '__qualname__', '?')}"
    if not isinstance(loaded, type):
        kind = type(loaded)
        what = f"an instance of {kind.__name__}" if isinstance(loaded, DeviceSpec) else f"a {kind.__name__}"
        raise Refused("not-a-class", f"the entry point names {what}: expected a class")
    if loaded is DeviceSpec:
        raise Refused("not-a-device-spec", "the entry point names DeviceSpec itself: expected a subclass")
    if not issubclass(loaded, DeviceSpec):
        raise Refused("not-a-device-spec", f"the entry point names {where}, which is no DeviceSpec")
    return loaded


def _check_api(cls: type[DeviceSpec], record: PluginRecord, core_version: str) -> None:
    pin = guarded("property", lambda: cls.plugin_api, "plugin_api: ")
    if not is_api_pin(pin):
        raise Refused("plugin-api-pin", f"plugin_api = {pin!r}: expected (major, minor)")
    mismatch = api_mismatch(pin, record.distribution, core_version)
    if mismatch:
        raise Refused("plugin-api", mismatch[0], command=mismatch[1])


def _check_identity(spec: DeviceSpec, record: PluginRecord) -> None:
    """Read the names once, check them, and put them into the record."""
    names = {
        name: guarded("property", partial(getattr, spec, name), f"{name}: ")
        for name in ("device_type", "backend_name", "torch_module_name")
    }
    for name in ("device_type", "backend_name"):
        value = names[name]
        if not (isinstance(value, str) and value.isprintable() and value and value == value.lower().strip()):
            raise Refused("name", f"{name} = {value!r}: expected a non-empty lowercase string")
    module = names["torch_module_name"]
    if not (isinstance(module, str) and module):
        raise Refused("torch-module-name", f"torch_module_name = {module!r}: expected a non-empty string")
    if record.origin == BUILT_IN:
        record.name = names["backend_name"]
    elif record.name != names["backend_name"]:
        raise Refused(
            "name-mismatch",
            f"the entry point is named {record.name!r} and backend_name {names['backend_name']!r}",
        )
    record.device_type = names["device_type"]
