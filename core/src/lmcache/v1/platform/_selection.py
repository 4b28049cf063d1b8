"""The rules that pick a backend.

LMCACHE_DEVICE_BACKEND names one exactly; DEVICE_TYPE narrows to a torch device type; otherwise the only
available backend of a type wins. What was asked for and cannot be had is an error, never a fallback.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

from lmcache.errors import DeviceError
from lmcache.logging import init_logger, warn_once
from lmcache.v1.platform._registry import Registry
from lmcache.v1.platform.base.device_spec import DeviceSpec

__all__ = ["BACKEND_VARIABLE", "TYPE_VARIABLE", "Selection", "import_torch", "select", "spec_for_type"]

logger = init_logger(__name__)

BACKEND_VARIABLE = "LMCACHE_DEVICE_BACKEND"
TYPE_VARIABLE = "DEVICE_TYPE"
_HOST_TYPE = "cpu"


@dataclass(frozen=True)
class Selection:
    """The backend this process uses. ``torch_dev`` is None exactly where torch is absent."""

    spec: DeviceSpec
    torch_dev: Any

    @property
    def device_type(self) -> str:
        return self.spec.device_type


def select(found: Registry) -> Selection:
    """Apply the rules to the environment as it is now.

    Raises:
        DeviceError: What is asked for cannot be delivered, or several backends of a type are available and
            no variable decides.
    """
    backend = _variable(BACKEND_VARIABLE)
    wanted_type = _variable(TYPE_VARIABLE)
    torch = import_torch()
    if backend:
        return _select_backend(found, torch, backend, wanted_type)
    if wanted_type:
        return _select_type(found, torch, wanted_type)
    return _select_any(found, torch)


def _select_backend(found: Registry, torch: Any, backend: str, wanted_type: str) -> Selection:
    asked = f"{BACKEND_VARIABLE}={backend}"
    spec = found.specs.get(backend)
    if spec is None:
        raise DeviceError(f"{asked}: no such backend; {_inventory(found)}")
    if wanted_type and spec.device_type != wanted_type:
        raise DeviceError(
            f"{asked} contradicts {TYPE_VARIABLE}={wanted_type}: "
            f"that backend is of type {spec.device_type!r}; unset one of the two"
        )
    reason = _why_not(found, torch, spec)
    if reason:
        raise DeviceError(f"{asked}: {reason}; {_inventory(found)}")
    return Selection(spec, _torch_dev(torch, spec))


def _select_type(found: Registry, torch: Any, wanted_type: str) -> Selection:
    asked = f"{TYPE_VARIABLE}={wanted_type}"
    candidates = found.of_type(wanted_type)
    if not candidates:
        raise DeviceError(f"{asked}: no backend of that type; {_inventory(found)}")
    reasons = {spec.backend_name: _why_not(found, torch, spec) for spec in candidates}
    usable = [spec for spec in candidates if not reasons[spec.backend_name]]
    if not usable:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise DeviceError(f"{asked}: none is usable: {listed}; unset {TYPE_VARIABLE} to choose automatically")
    spec = _only(usable, asked)
    return Selection(spec, _torch_dev(torch, spec))


def _select_any(found: Registry, torch: Any) -> Selection:
    """Accelerators before the host; among device types the order of discovery decides, and is logged."""
    usable: dict[str, list[DeviceSpec]] = {}
    for spec in found.specs.values():
        if spec.device_type != _HOST_TYPE and not _why_not(found, torch, spec):
            usable.setdefault(spec.device_type, []).append(spec)
    for group in usable.values():
        spec = _only(group, "automatic choice")
        selection = Selection(spec, _torch_dev(torch, spec))
        others = [other.backend_name for rest in usable.values() for other in rest if other is not spec]
        logger.info(
            "device backend %s chosen automatically; not taken: %s (%s decides)",
            spec.backend_name,
            ", ".join([*others, _HOST_TYPE]),
            BACKEND_VARIABLE,
        )
        return selection
    host = found.specs.get(_HOST_TYPE)
    if host is None:
        raise DeviceError(f"the cpu backend is missing from this installation; {_inventory(found)}")
    return Selection(host, _torch_dev(torch, host))


def spec_for_type(found: Registry, device_type: str) -> DeviceSpec:
    """The spec that serves a device type, whether or not it is the selected one.

    Raises:
        DeviceError: None serves it, or several do and nothing decides.
    """
    candidates = found.of_type(device_type)
    if not candidates:
        raise DeviceError(f"device type {device_type!r}: no backend serves it; {_inventory(found)}")
    if len(candidates) == 1:
        return candidates[0]
    by_name = {spec.backend_name: spec for spec in candidates}
    backend = _variable(BACKEND_VARIABLE)
    if backend in by_name:
        return by_name[backend]
    torch = import_torch()
    usable = [spec for spec in candidates if not _why_not(found, torch, spec)]
    if not usable and device_type in by_name:
        return by_name[device_type]
    return _only(usable or candidates, f"device type {device_type!r}")


def _only(specs: list[DeviceSpec], asked: str) -> DeviceSpec:
    if len(specs) > 1:
        names = ", ".join(spec.backend_name for spec in specs)
        raise DeviceError(f"{asked}: several backends are available: {names}; set {BACKEND_VARIABLE} to one")
    return specs[0]


def _why_not(found: Registry, torch: Any, spec: DeviceSpec) -> str:
    """Why ``spec`` cannot be used here, in one line; empty if it can. A probe that raises means no."""
    try:
        if not spec.is_available():
            return "not available on this host"
        if spec.device_type == _HOST_TYPE:
            return ""
        if torch is None:
            return "it needs torch, which cannot be imported"
        if not hasattr(torch, spec.torch_module_name):
            return f"torch has no module {spec.torch_module_name!r}"
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        found.fail(spec.backend_name, exc)
        return found.faults[-1][1]
    return ""


def _torch_dev(torch: Any, spec: DeviceSpec) -> Any:
    return None if torch is None else spec._get_torch_module()


def _inventory(found: Registry) -> str:
    text = "backends here: " + (", ".join(found.specs) or "none")
    if found.faults:
        text += "; unusable: " + ", ".join(f"{name} ({reason})" for name, reason in found.faults)
    return text


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


def import_torch() -> Any:
    """torch, or None. A torch that is installed but broken is not the same as none: it is warned about."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as exc:
        if exc.name == "torch":
            return None
        reason: Exception = exc
    except Exception as exc:
        reason = exc
    warn_once(logger, "torch", "torch cannot be imported: %s: %s", type(reason).__name__, reason)
    return None
