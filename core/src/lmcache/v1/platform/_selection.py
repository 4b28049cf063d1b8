"""The rules that pick a backend.

LMCACHE_DEVICE_BACKEND names one exactly; DEVICE_TYPE narrows to a torch device type; otherwise the only
available backend of a type wins. What was asked for and cannot be had is an error, never a fallback. What was
chosen automatically is logged in one line with what was not taken.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from lmcache.errors import DeviceError
from lmcache.logging import init_logger, warn_once
from lmcache.v1.platform._admission import guarded
from lmcache.v1.platform._known import did_you_mean, hardware_hint, install_hint, known_wheels
from lmcache.v1.platform._records import BUILT_IN, PluginRecord, State
from lmcache.v1.platform._registry import BACKEND_VARIABLE, HOST_TYPE, TYPE_VARIABLE, Registry, variable
from lmcache.v1.platform.base.device_spec import DeviceSpec

__all__ = [
    "BACKEND_VARIABLE",
    "TYPE_VARIABLE",
    "Selection",
    "import_torch",
    "select",
    "spec_for_type",
    "spec_named",
]

logger = init_logger(__name__)


@dataclass(frozen=True)
class Selection:
    """The backend this process uses. ``torch_dev`` is None exactly where torch is absent."""

    spec: DeviceSpec
    torch_dev: Any
    record: PluginRecord = field(repr=False)
    why: str = ""
    """The rule that chose it, in words."""

    @property
    def device_type(self) -> str:
        return self.record.device_type


def select(found: Registry) -> Selection:
    """Apply the rules to the environment as it is now.

    Raises:
        DeviceError: What is asked for cannot be delivered, or several backends of a type are available and
            no variable decides.
    """
    backend, wanted_type = variable(BACKEND_VARIABLE), variable(TYPE_VARIABLE)
    torch = import_torch()
    if backend:
        record, why = _select_backend(found, torch, backend, wanted_type)
    elif wanted_type:
        record, why = _select_type(found, torch, wanted_type)
    else:
        record, why = _select_any(found, torch)
    spec = found.specs[record.name]
    torch_dev = None if torch is None else _torch_module(spec, record)
    record.settle("chosen", why)
    found.chosen_as = backend
    return Selection(spec, torch_dev, record, why)


def _torch_module(spec: DeviceSpec, record: PluginRecord) -> Any:
    """The torch module of the backend that was chosen.

    Raises:
        DeviceError: It raised instead of giving one.
    """
    try:
        return guarded("probe-raised", spec._get_torch_module)
    except Exception as exc:
        raise DeviceError(f"device backend {record.name} ({record.source}): torch module: {exc}") from exc


def _select_backend(found: Registry, torch: Any, backend: str, wanted_type: str) -> tuple[PluginRecord, str]:
    asked = f"{BACKEND_VARIABLE}={backend}"
    found.load(backend)
    record = next((r for r in found.named(backend) if r.spec is not None), None)
    if record is None:
        raise DeviceError(f"{asked}: {_absent(found, backend)}")
    if wanted_type and record.device_type != wanted_type:
        raise DeviceError(
            f"{asked} contradicts {TYPE_VARIABLE}={wanted_type}: "
            f"that backend is of type {record.device_type!r}; unset one of the two"
        )
    if not found.probe(record, torch):
        raise DeviceError(f"{asked}: {_reason(record)}; {_inventory(found)}")
    return record, f"{asked} names it"


def _select_type(found: Registry, torch: Any, wanted_type: str) -> tuple[PluginRecord, str]:
    asked = f"{TYPE_VARIABLE}={wanted_type}"
    found.load()
    candidates = found.of_type(wanted_type)
    if not candidates:
        hint = install_hint(wanted_type) or did_you_mean(wanted_type, _types(found), _known_types())
        raise DeviceError(f"{asked}: no backend of that type{hint}; {_inventory(found)}")
    usable = [record for record in candidates if found.probe(record, torch)]
    if not usable:
        listed = "; ".join(f"{record.name}: {_reason(record)}" for record in candidates)
        raise DeviceError(f"{asked}: none is usable: {listed}; unset {TYPE_VARIABLE} to choose automatically")
    return _only(usable, asked), f"{asked}, and it is the only one available of that type"


def _select_any(found: Registry, torch: Any) -> tuple[PluginRecord, str]:
    """Accelerators before the host; among device types the order of discovery decides, and is logged."""
    found.load()
    usable: dict[str, list[PluginRecord]] = {}
    for record in found.records:
        if record.spec is not None and record.device_type != HOST_TYPE and found.probe(record, torch):
            usable.setdefault(record.device_type, []).append(record)
    if not usable:
        return _select_host(found, torch)
    device_type, group = next(iter(usable.items()))
    record = _only(group, "automatic choice")
    others = [other.name for rest in usable.values() for other in rest if other is not record]
    logger.info(
        "device backend %s chosen automatically; not taken: %s (%s decides)",
        record.name,
        ", ".join([*others, HOST_TYPE]),
        BACKEND_VARIABLE,
    )
    why = f"the only one available of type {device_type}"
    return record, why + (f", and found before {', '.join(others)}" if others else "")


def _select_host(found: Registry, torch: Any) -> tuple[PluginRecord, str]:
    host = next((r for r in found.named(HOST_TYPE) if r.spec is not None), None)
    if host is None or not found.probe(host, torch):
        raise DeviceError(f"the {HOST_TYPE} backend is missing from this installation; {_inventory(found)}")
    passed_over = [
        f"{r.name}: {r.note if r.state is State.UNAVAILABLE else r.state.value}"
        for r in found.records
        if r is not host
    ]
    if passed_over:
        logger.info(
            "device backend %s chosen automatically; not usable: %s", host.name, "; ".join(passed_over)
        )
    hint = hardware_hint(r.name for r in found.records)
    if hint:
        warn_once(logger, "hardware", "device backend %s chosen automatically; %s", host.name, hint)
    return host, "no accelerator is available" + (f"; {hint}" if hint else "")


def spec_for_type(found: Registry, device_type: str) -> DeviceSpec:
    """The spec that serves a device type, whether or not it is the selected one.

    Raises:
        DeviceError: None serves it, or several do and nothing decides.
    """
    backend = variable(BACKEND_VARIABLE) if found.chosen_as is None else found.chosen_as
    # What is named, and what ships with the core, may already answer; then no plugin is imported for it.
    found.load(backend or None)
    if backend and backend not in found.specs and device_type != HOST_TYPE:
        raise DeviceError(f"{BACKEND_VARIABLE}={backend}: {_absent(found, backend)}")
    if backend and not found.of_type(device_type):
        found.load()
    candidates = found.of_type(device_type)
    if not candidates:
        hint = install_hint(device_type)
        raise DeviceError(f"device type {device_type!r}: no backend serves it{hint}; {_inventory(found)}")
    if len(candidates) == 1:
        return found.specs[candidates[0].name]
    by_name = {record.name: record for record in candidates}
    if backend in by_name:
        return found.specs[backend]
    torch = import_torch()
    usable = [r for r in candidates if r.state is State.SELECTED or found.probe(r, torch)]
    chosen = [r for r in usable if r.state is State.SELECTED]
    if not usable and device_type in by_name:
        return found.specs[device_type]
    # Nor does an external wheel take a type from a built-in backend, by making it ambiguous.
    built_in = [r for r in usable if r.origin == BUILT_IN]
    return found.specs[_only(chosen or built_in or usable or candidates, f"device type {device_type!r}").name]


def spec_named(found: Registry, backend: str) -> DeviceSpec:
    """The spec of a backend that can be used here now, by its name; no other plugin is imported for it.

    Raises:
        DeviceError: There is none of that name, or it cannot be used here; says why and what to do.
    """
    asked = f"device backend {backend!r}"
    found.load(backend)
    record = next((r for r in found.named(backend) if r.spec is not None), None)
    if record is None:
        raise DeviceError(f"{asked}: {_absent(found, backend)}")
    if record.state is not State.SELECTED and not found.probe(record, import_torch()):
        raise DeviceError(f"{asked}: {_reason(record)}")
    return found.specs[record.name]


def _only(records: list[PluginRecord], asked: str) -> PluginRecord:
    if len(records) > 1:
        names = ", ".join(record.name for record in records)
        sources = ", ".join(f"{record.name} from {record.source}" for record in records)
        raise DeviceError(
            f"{asked}: several backends are available: {names}; set {BACKEND_VARIABLE} to one ({sources})"
        )
    return records[0]


def _absent(found: Registry, backend: str) -> str:
    """Why nothing that could be loaded is called ``backend``."""
    refused = [record.verdict() for record in found.named(backend)]
    if refused:
        return "; ".join(refused)
    names = [record.name for record in found.records]
    hint = install_hint(backend) or did_you_mean(backend, names, (known.backend for known in known_wheels()))
    return f"no such backend{hint}; {_inventory(found)}"


def _reason(record: PluginRecord) -> str:
    return "; ".join(filter(None, [record.note, record.remedy])) or record.state.value


def _inventory(found: Registry) -> str:
    """Backends that may be named, from metadata: none is imported to write an error message."""
    named = [r.name for r in found.records if r.spec is not None or r.state is State.FOUND]
    text = "backends here: " + (", ".join(named) or "none")
    bad = [f"{r.name} ({r.state.value}: {r.note})" for r in found.records if r.name not in named]
    return f"{text}; unusable: {', '.join(bad)}" if bad else text


def _types(found: Registry) -> list[str]:
    return [record.device_type for record in found.records if record.device_type]


def _known_types() -> list[str]:
    return [known.device_type for known in known_wheels()]


def import_torch() -> Any:
    """torch, or None. A torch that is installed but broken is not the same as none: it is warned about."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as exc:
        if exc.name == "torch":
            return None
        reason: BaseException = exc
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # torch itself loads plugins at import, and one that exits is no end of us
        reason = exc
    warn_once(logger, "torch", "torch cannot be imported: %s: %s", type(reason).__name__, reason)
    return None
