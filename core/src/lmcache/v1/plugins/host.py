"""Loads plugins and calls their hooks, each plugin behind a guard of its own.

Whatever a plugin raises, ``SystemExit`` and other ``BaseException`` included, costs that plugin only and is
kept in its record. ``KeyboardInterrupt`` alone passes: it comes from the person at the keyboard.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

import pluggy

from lmcache.logging import init_logger
from lmcache.v1.platform._compat import range_mismatch
from lmcache.v1.platform._metadata import core_version
from lmcache.v1.plugins import hookspecs
from lmcache.v1.plugins.records import PluginRecord
from lmcache.v1.utils.entry_points import EntryPoint, blocked_names, entry_points, is_blocked, target

__all__ = ["GROUP", "PluginHost", "announces_verb"]

logger = init_logger(__name__)

GROUP = "lmcache.plugins"
_VERB_PREFIX = "cli."


def announces_verb(point: EntryPoint) -> str:
    """The verb that an entry point ``cli.VERB`` announces by its name, else nothing."""
    return point.name.removeprefix(_VERB_PREFIX) if point.name.startswith(_VERB_PREFIX) else ""


class _Invalid(Exception):
    """The plugin does not keep to the contract; the text says where."""


class PluginHost:
    """The plugins of one process.

    Args:
        wanted: which entry points to load; the others leave no record.
        report: called with the record of every failure; logs one line unless given.
        observe: called with each entry point before anything of it is imported.
    """

    def __init__(
        self,
        wanted: Callable[[EntryPoint], bool] = lambda point: True,
        report: Callable[[PluginRecord], None] | None = None,
        observe: Callable[[EntryPoint], None] = lambda point: None,
    ) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._report = report or _log
        self._observe = observe
        self._loaded: dict[int, PluginRecord] = {}
        self.calling = ""
        """The plugin whose hook runs now, for messages about one that does not return."""
        self.records = [PluginRecord(point) for point in entry_points(GROUP) if wanted(point)]
        blocked = blocked_names()
        for record in self.records:
            self._load(record, blocked)

    def listens(self, hook: str) -> bool:
        """Whether any plugin that is loaded implements ``hook``."""
        return bool(getattr(self._manager.hook, hook).get_hookimpls())

    def broadcast(self, hook: str, **arguments: Any) -> None:
        """Call ``hook`` of every plugin; one that raises is unplugged."""
        for _ in self._calls(hook, arguments):
            continue

    def collect(
        self, hook: str, taken: Mapping[str, Any] | None = None
    ) -> dict[str, tuple[Any, PluginRecord]]:
        """What plugins offer by name through a hook that returns a mapping.

        A name in ``taken``, or one that an earlier plugin offers, is not offered again: the record says so.
        """
        offers: dict[str, tuple[Any, PluginRecord]] = {}
        for record, answer in self._calls(hook, {}):
            if answer is None:
                continue
            if not isinstance(answer, Mapping) or not all(isinstance(name, str) and name for name in answer):
                self.unplug(record, f"{hook} returned {type(answer).__name__}: expected a mapping from names")
                continue
            for name, offer in answer.items():
                if name in (taken or ()) or name in offers:
                    holder = offers[name][1].point.source if name in offers else "lmcache"
                    fault = f"its {name!r} is not used: the name is taken by {holder}"
                    record.note = f"{record.note}; {fault}" if record.note else fault
                    logger.warning("plugin %s of %s: %s", record.point.name, record.point.source, fault)
                else:
                    offers[name] = (offer, record)
        return offers

    def unplug(self, record: PluginRecord, note: str, exc: BaseException | None = None) -> None:
        """Call a plugin never again, and say why."""
        plugin = next((p for p in self._manager.get_plugins() if self._loaded.get(id(p)) is record), None)
        if plugin is not None:
            self._manager.unregister(plugin)
        record.settle("unplugged", note, exc)
        self._report(record)

    # ---- loading

    def _load(self, record: PluginRecord, blocked: frozenset[str]) -> None:
        point = record.point
        if is_blocked(point, blocked):
            record.settle("blocked")  # as asked: nothing to report
        elif point.fault:
            self._fail(record, "invalid", point.fault, point.error)
        elif mismatch := range_mismatch(point.requires, point.distribution, core_version()):
            self._fail(record, "incompatible", mismatch[0], command=mismatch[1])
        elif earlier := self._earlier(record):
            self._fail(
                record, "duplicate", f"the name is taken by {earlier.point.source} ({earlier.point.value})"
            )
        else:
            self._import(record)

    def _earlier(self, record: PluginRecord) -> PluginRecord | None:
        same = (r for r in self.records if r.point.name == record.point.name and r.state == "loaded")
        return next(same, None)

    def _import(self, record: PluginRecord) -> None:
        self._observe(record.point)
        try:
            plugin = _resolve(record.point.value)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            self._fail(record, "import-failed", exc=exc)
            return
        try:
            record.hooks = self._register(plugin)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            if isinstance(exc, (_Invalid, pluggy.PluginValidationError)):
                self._fail(record, "invalid", str(exc))
            else:
                self._fail(record, "invalid", "it cannot be examined", exc)
            return
        self._loaded[id(plugin)] = record
        record.settle("loaded")

    def _fail(self, record: PluginRecord, state: str, note: str = "", exc: BaseException | None = None,
              command: str = "") -> None:  # fmt: skip
        record.settle(state, note, exc, command)
        self._report(record)

    def _register(self, plugin: Any) -> list[str]:
        """Give the plugin to pluggy, which checks names of arguments; the hooks that it implements."""
        if isinstance(plugin, type):
            raise _Invalid(
                f"the entry point names the class {plugin.__qualname__}: expected a module or an object"
            )
        if self._manager.is_registered(plugin):
            raise _Invalid("another entry point names the same object: keep one of the two")
        name = self._manager.register(plugin)
        try:
            return _checked_hooks(self._manager, plugin)
        except BaseException:
            self._manager.unregister(name=name)
            raise

    # ---- calling

    def _calls(self, hook: str, arguments: Mapping[str, Any]) -> Iterator[tuple[PluginRecord, Any]]:
        """The hook's answer of each plugin, in the order of loading but for ``tryfirst`` and ``trylast``."""
        impls = getattr(self._manager.hook, hook).get_hookimpls()
        for impl in sorted(impls, key=lambda impl: impl.trylast - impl.tryfirst):
            record = self._loaded[id(impl.plugin)]
            self.calling = f"{record.point.name} of {record.point.source}"
            try:
                answer = impl.function(*(arguments[name] for name in impl.argnames))
            except KeyboardInterrupt:
                raise
            except BaseException as exc:
                self.unplug(record, hook, exc)
                continue
            finally:
                self.calling = ""
            yield record, answer


def _resolve(value: str) -> Any:
    """The object that ``module:attribute`` names."""
    module, attributes = target(value)
    return reduce(getattr, attributes, importlib.import_module(module))


def _checked_hooks(manager: pluggy.PluginManager, plugin: Any) -> list[str]:
    callers = manager.get_hookcallers(plugin) or []
    known = sorted(name for name in dir(hookspecs) if name.startswith("lmcache_"))
    for caller in callers:
        if not caller.has_spec():
            close = difflib.get_close_matches(caller.name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"
            raise _Invalid(f"there is no hook {caller.name}: {hint}")
        if any(
            impl.plugin is plugin and (impl.wrapper or impl.hookwrapper) for impl in caller.get_hookimpls()
        ):
            raise _Invalid(f"{caller.name} is a wrapper: expected a plain implementation")
    if not callers:
        raise _Invalid("it implements no hook: expected functions marked with lmcache.v1.plugins.hookimpl")
    return sorted(caller.name for caller in callers)


def _log(record: PluginRecord) -> None:
    logger.warning("%s", record.verdict())
