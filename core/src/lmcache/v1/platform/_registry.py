"""The device backends of this process: what was found, and how far each one got.

Building the registry reads metadata and imports the built-in packages, no more. A plugin is imported when
it is needed: one of them if LMCACHE_DEVICE_BACKEND names it, else all. Every failure is kept in the record
of the candidate, is logged once, and costs only that candidate.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.platform._admission import Candidate, Refused, admit, check_range, guarded, load_entry_point
from lmcache.v1.platform._compat import CORE
from lmcache.v1.platform._metadata import core_version, entry_point_records
from lmcache.v1.platform._records import BUILT_IN, PluginRecord, State, describe, one_line
from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.utils.entry_points import DISABLE_VARIABLE, blocked_names, entry_points, normal_name
from lmcache.v1.utils.subclass_discovery import discover_subclasses

__all__ = ["DISABLE_VARIABLE", "HOST_TYPE", "SOURCES", "Registry", "discover"]

logger = init_logger(__name__)

BACKEND_VARIABLE = "LMCACHE_DEVICE_BACKEND"
TYPE_VARIABLE = "DEVICE_TYPE"
HOST_TYPE = "cpu"
_NOT_BACKENDS = frozenset(["base", "torch_ops"])
_SLOW_IMPORT = 5.0

#: Called before code of a plugin runs, with its record and what is about to be done.
Observer = Callable[[PluginRecord, str], None]


def variable(name: str) -> str:
    """An environment variable in the form in which names are compared; unset and blank are alike."""
    return os.environ.get(name, "").strip().lower()


def _nobody(record: PluginRecord, step: str) -> None:
    return None


class Registry:
    """All candidates in order of precedence, and the specs of those that could be loaded.

    Not thread-safe: the host of the process guards it with its lock.
    """

    def __init__(self, candidates: list[Candidate], core_version: str) -> None:
        self._candidates = candidates
        self._core_version = core_version
        self.specs: dict[str, DeviceSpec] = {}
        """Loaded specs by backend name."""
        self.chosen_as: str | None = None
        """LMCACHE_DEVICE_BACKEND when the choice was made: a plugin that changes it later changes nothing."""
        self.observer: Observer = _nobody
        self.remark = ""
        """What is wrong with LMCACHE_DISABLE_PLUGINS; empty if nothing is."""

    @property
    def records(self) -> list[PluginRecord]:
        """What is known of every candidate, built-in ones first."""
        return [candidate.record for candidate in self._candidates]

    def named(self, backend: str) -> list[PluginRecord]:
        return [record for record in self.records if record.name == backend]

    def of_type(self, device_type: str) -> list[PluginRecord]:
        """Loaded backends of a device type."""
        return [r for r in self.records if r.spec is not None and r.device_type == device_type]

    def load_built_in(self) -> None:
        """Construct the backends that ship with the core."""
        for candidate in self._candidates:
            if candidate.record.origin == BUILT_IN and candidate.record.state is State.FOUND:
                self._load(candidate)

    def load(self, backend: str | None = None) -> None:
        """Import and check what has not been yet: everything, or what is called ``backend``.

        The first candidate of a name that can be loaded has the name; later ones are duplicates and are
        never imported. One that fails does not hold its name.
        """
        for candidate in self._candidates:
            record = candidate.record
            if record.state is State.FOUND and record.spec is None and backend in (None, record.name):
                self._load(candidate)

    def _load(self, candidate: Candidate) -> None:
        record = candidate.record
        try:
            check_range(record, self._core_version)
            self._check_duplicate(record)
            self.observer(record, "import")
            spec = admit(candidate, self._core_version)
            self._check_duplicate(record)  # a built-in one has its name only now
        except Refused as exc:
            self.refuse(record, exc)
            return
        record.spec = self.specs[record.name] = spec
        if record.import_seconds is not None and record.import_seconds > _SLOW_IMPORT:
            logger.warning("%s took %.0f s to import", label(record), record.import_seconds)

    def _check_duplicate(self, record: PluginRecord) -> None:
        holder = next((r for r in self.named(record.name) if r.spec is not None and r is not record), None)
        if holder is None:
            return
        code = "duplicate-built-in" if holder.origin == BUILT_IN else "duplicate"
        note = f"the name {record.name!r} is taken by {holder.source} ({holder.value})"
        raise Refused(code, note, other=holder.distribution)

    def refuse(self, record: PluginRecord, why: Refused) -> None:
        """Settle a failure and log it: once, in one line, naming plugin, distribution and version."""
        record.settle(why.code, why.note, why.exc, **why.extra)
        _report(record)

    def probe(self, record: PluginRecord, torch: Any) -> bool:
        """Whether a loaded backend can be used here now; the record says why not. Never cached."""
        spec = record.spec
        if spec is None:
            return False
        self.observer(record, "probe")
        try:
            guarded("probe-raised", lambda: _require(spec, torch))
        except Refused as why:
            if why.code == "probe-raised":
                self.refuse(record, why)
            else:
                record.settle(why.code, why.note, why.exc)
            return False
        record.settle("usable")
        return True


def _report(record: PluginRecord) -> None:
    remedy = f"; {record.remedy}" if record.remedy else ""
    logger.warning("%s cannot be used: %s: %s%s", label(record), record.state.value, record.note, remedy)


def label(record: PluginRecord) -> str:
    """How messages call a backend."""
    return f"device backend {record.name} of {record.source} ({record.value})"


def _require(spec: DeviceSpec, torch: Any) -> None:
    if not spec.is_available():
        reason = str(spec.unavailable_reason() or "")
        raise Refused("not-on-this-host", "not available on this host" + (f": {reason}" if reason else ""))
    if spec.device_type == HOST_TYPE:
        return
    if torch is None:
        raise Refused("no-torch", "it needs torch, which cannot be imported")
    if not hasattr(torch, spec.torch_module_name):
        raise Refused("no-torch-module", f"torch has no module {spec.torch_module_name!r}")


def discover() -> Registry:
    """A registry of all that the sources know, without importing any plugin."""
    candidates = [candidate for source in SOURCES for candidate in source()]
    registry = Registry(candidates, core_version())
    for record in registry.records:
        if record.state is not State.FOUND:
            _report(record)
    registry.remark = _block(registry.records)
    if registry.remark:
        logger.warning("%s", registry.remark)
    registry.load_built_in()
    return registry


def builtin_candidates() -> list[Candidate]:
    """The spec classes of the packages directly below this one, in order of package name."""
    package = importlib.import_module("lmcache.v1.platform")
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__) if info.ispkg)
    return [found for name in names if name not in _NOT_BACKENDS for found in _builtin(package, name)]


def _builtin(package: Any, name: str) -> list[Candidate]:
    faults: list[BaseException] = []
    started = time.perf_counter()
    classes = discover_subclasses(
        package,
        DeviceSpec,
        module_filter=lambda short: short == name,
        on_error=lambda module, exc: faults.append(exc),
        packages_only=True,
    )
    seconds = time.perf_counter() - started
    module = f"{package.__name__}.{name}"
    found = []
    for cls in classes:
        record = _builtin_record(name, f"{module}:{cls.__qualname__}")
        record.import_seconds = seconds
        found.append(Candidate(record, partial(_same, cls)))
    for exc in faults:
        record = _builtin_record(name, module)
        record.settle("import-raised", describe(exc), exc)
        record.import_seconds = seconds
        found.append(Candidate(record, partial(_same, None)))
    return found


def _builtin_record(name: str, value: str) -> PluginRecord:
    return PluginRecord(name, CORE, core_version(), value, BUILT_IN)


def _same(value: object) -> object:
    return value


def entry_point_candidates() -> list[Candidate]:
    """External plugins, in (name, value) order."""
    return [Candidate(record, partial(load_entry_point, record.value)) for record in entry_point_records()]


#: In order of precedence: of two backends with one name, the earlier stays. So nothing replaces a built-in.
SOURCES: tuple[Callable[[], list[Candidate]], ...] = (builtin_candidates, entry_point_candidates)


def _block(records: list[PluginRecord]) -> str:
    """Apply LMCACHE_DISABLE_PLUGINS: names of plugins or of distributions, separated by commas.

    Returns:
        Which of the names nothing has, in words; empty if there is none.
    """
    wanted = blocked_names()
    unused = set(wanted)
    for record in records:
        hit = wanted & {normal_name(record.name), normal_name(record.distribution)}
        if record.origin == BUILT_IN:
            hit -= {normal_name(HOST_TYPE), normal_name(record.distribution)}  # something must always be left
        if hit and record.state is State.FOUND:
            record.settle("disabled", f"disabled by {DISABLE_VARIABLE}")
        unused -= hit
    if unused:  # the variable also blocks the plugins of the other group
        unused -= {
            normal_name(name) for p in entry_points("lmcache.plugins") for name in (p.name, p.distribution)
        }
    if not unused:
        return ""
    found = ", ".join(r.name for r in records if r.origin != BUILT_IN) or "no plugins"
    listed = one_line(", ".join(sorted(unused)))
    return f"{DISABLE_VARIABLE}: no plugin to disable is called {listed}; found: {found}"
