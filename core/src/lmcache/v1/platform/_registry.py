"""The device backends of this process: where they come from, and why some cannot be used.

Candidates come from sources: today the packages below this one; a source of entry points fits beside it.
Every failure is kept with its reason and costs only the candidate that failed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lmcache.logging import init_logger
from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.utils.subclass_discovery import OnError, discover_subclasses

__all__ = ["SOURCES", "Registry", "discover"]

logger = init_logger(__name__)

_NOT_BACKENDS = frozenset(["base", "torch_ops"])


@dataclass
class Registry:
    """Every backend found: usable specs by backend name, and why the others are not among them."""

    specs: dict[str, DeviceSpec] = field(default_factory=dict)
    faults: list[tuple[str, str]] = field(default_factory=list)
    """Module, class or backend name, and the reason in one line."""

    def fail(self, name: str, exc: BaseException | str) -> None:
        reason = exc if isinstance(exc, str) else f"{type(exc).__name__}: {exc}"
        self.faults.append((name, " ".join(reason.split())))
        logger.warning("device backend %s cannot be used: %s", *self.faults[-1])

    def of_type(self, device_type: str) -> list[DeviceSpec]:
        return [spec for spec in self.specs.values() if spec.device_type == device_type]


def discover() -> Registry:
    """Build the registry: construct and check every class of every source."""
    found = Registry()
    for source in SOURCES:
        for cls in source(found.fail):
            _add(found, cls)
    return found


def builtin_spec_classes(on_error: OnError) -> Iterable[type[DeviceSpec]]:
    """Spec classes of the packages directly below this one."""
    return discover_subclasses(
        importlib.import_module("lmcache.v1.platform"),
        DeviceSpec,
        module_filter=lambda short: short not in _NOT_BACKENDS,
        on_error=on_error,
        packages_only=True,
    )


#: In order of precedence: of two backends with one name, the earlier stays.
SOURCES: tuple[Callable[[OnError], Iterable[type[DeviceSpec]]], ...] = (builtin_spec_classes,)


def _add(found: Registry, cls: type[DeviceSpec]) -> None:
    label = f"{cls.__module__}:{cls.__qualname__}"
    try:
        spec = cls()
        names = spec.backend_name, spec.device_type
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        found.fail(label, exc)
        return
    if not all(isinstance(name, str) and name and name == name.lower() for name in names):
        found.fail(label, f"backend_name, device_type = {names!r}: expected non-empty lowercase strings")
    elif names[0] in found.specs:
        found.fail(label, f"backend_name {names[0]!r} is taken by {type(found.specs[names[0]]).__module__}")
    else:
        found.specs[names[0]] = spec
