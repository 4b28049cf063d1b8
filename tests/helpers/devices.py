"""Device backends made for one test, and a way to put them beside the built-in ones without a wheel."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.v1.platform import _device_detect, _registry, get_device_spec
from lmcache.v1.platform._admission import Candidate
from lmcache.v1.platform._records import ENTRY_POINT, PluginRecord
from lmcache.v1.platform.base.device_spec import DeviceSpec


def backend(
    name: str, device_type: str = "foo", available: bool | BaseException = True, **members: Any
) -> type[DeviceSpec]:
    """A spec class; ``available`` may be what its probe raises, ``members`` are put over it."""

    class Spec(DeviceSpec):
        @property
        def device_type(self) -> str:
            return device_type

        @property
        def backend_name(self) -> str:
            return name

        @property
        def torch_module_name(self) -> str:
            return device_type

        def is_available(self) -> bool:
            if isinstance(available, BaseException):
                raise available
            return available

    for member, value in members.items():
        setattr(Spec, member, value)
    return Spec


def candidate(cls: Any, name: str = "", distribution: str = "", **fields: Any) -> Candidate:
    """As if an entry point of a wheel named ``cls``."""
    if not name:
        try:
            name = cls.backend_name.fget(None)  # without constructing it
        except AttributeError:
            name = cls.__name__.lower()
    record = PluginRecord(name, distribution or f"lmcache-{name}", "0.1", f"m:{name}", ENTRY_POINT, **fields)
    return Candidate(record, lambda: cls)


def install_candidates(monkeypatch: pytest.MonkeyPatch, *candidates: Candidate) -> None:
    """Make these the external plugins of this process, with a torch that has modules ``foo`` and ``bar``."""
    torch = SimpleNamespace(foo="torch.foo", bar="torch.bar", __version__="0")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(_registry, "SOURCES", (_registry.builtin_candidates, lambda: list(candidates)))
    _device_detect.reset()


def install_backends(monkeypatch: pytest.MonkeyPatch, *classes: type[DeviceSpec]) -> None:
    """The same, one wheel per class."""
    install_candidates(monkeypatch, *map(candidate, classes))


@contextmanager
def sim_served_by(backend_name: str, folder: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """The simulated device is this backend's in this process; its distribution is in ``folder``."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.syspath_prepend(str(folder))
        _device_detect.reset()
        try:
            spec = get_device_spec("sim")
            assert spec is not None
            assert spec.backend_name == backend_name
            yield
        finally:
            _device_detect.reset()
