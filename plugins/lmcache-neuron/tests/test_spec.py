"""What the spec says of the device: where it is not there, and what it can do where it is."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lmcache.errors import ConfigError, DeviceError
from lmcache.v1.platform.base.device_spec import MPTransferMode
from lmcache_neuron import runtime
from lmcache_neuron import spec as spec_module
from lmcache_neuron.spec import NeuronDeviceSpec

LOADED = """
import sys, time
import lmcache.v1.platform.base.device_spec
began = time.perf_counter()
import lmcache_neuron.spec
spent = time.perf_counter() - began
lmcache_neuron.spec.NeuronDeviceSpec().is_available()
lmcache_neuron.spec.NeuronDeviceSpec().unavailable_reason()
heavy = ("torch", "numpy", "msgspec", "torch_neuronx", "lmcache_neuron._native", "lmcache_neuron.runtime")
print(spent, *[name for name in heavy if name in sys.modules])
"""


def test_importing_the_spec_and_asking_it_loads_nothing_heavy_and_takes_less_than_20_ms() -> None:
    if any(Path("/dev").glob("neuron[0-9]*")):
        pytest.skip("this machine has a Neuron device, whose SDK is asked then")
    best = 1.0
    for _ in range(20):  # the machine may be busy
        out = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
        spent, *heavy = out.stdout.split()
        assert heavy == []
        best = min(best, float(spent))
        if best < 0.020:
            break
    assert best < 0.020


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A machine of which a test decides what it has."""
    monkeypatch.setattr(spec_module, "_DEVICES", tmp_path)
    whole = importlib.util.find_spec

    def make(device: bool = True, package: bool = True, torch: Any = None) -> NeuronDeviceSpec:
        if device:
            (tmp_path / "neuron0").touch()
        found = importlib.machinery.ModuleSpec("torch_neuronx", None) if package else None
        monkeypatch.setattr(
            spec_module.importlib.util,
            "find_spec",
            lambda name: found if name == "torch_neuronx" else whole(name),
        )
        monkeypatch.setitem(sys.modules, "torch", torch)
        return NeuronDeviceSpec()

    return make


def neuron(available: Any) -> Any:
    return SimpleNamespace(neuron=SimpleNamespace(is_available=available))


def test_a_machine_without_the_device_is_told_from_files_alone(machine: Any) -> None:
    spec = machine(device=False)
    assert not spec.is_available()
    assert "neuron0 is not there: no Neuron device" in spec.unavailable_reason()


def test_a_missing_package_is_named(machine: Any) -> None:
    spec = machine(package=False)
    assert not spec.is_available()
    assert spec.unavailable_reason().startswith(
        "package torch_neuronx is not installed; install the Neuron SDK's"
    )


def test_a_release_without_the_device_type_is_told_from_a_device_that_is_taken(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch_neuronx", ModuleType("torch_neuronx"))
    spec = machine(torch=SimpleNamespace())
    assert not spec.is_available()
    assert "install a release of torch-neuronx that has the device type neuron" in spec.unavailable_reason()
    spec = machine(torch=neuron(lambda: False))
    assert not spec.is_available()
    assert "NEURON_RT_VISIBLE_CORES" in spec.unavailable_reason()


def test_a_device_that_torch_finds_is_available_and_the_package_is_not_imported_for_it(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch_neuronx", raising=False)
    assert machine(torch=neuron(lambda: True)).is_available()
    assert "torch_neuronx" not in sys.modules


def test_a_module_that_raises_costs_nobody_else(machine: Any) -> None:
    def broken() -> bool:
        raise RuntimeError("driver\nmismatch")

    spec = machine(torch=neuron(broken))
    assert not spec.is_available()
    assert "torch.neuron cannot be asked: driver mismatch" in spec.unavailable_reason()


def test_names_agree_and_the_contract_s_version_is_pinned() -> None:
    spec = NeuronDeviceSpec()
    assert (spec.device_type, spec.backend_name, spec.torch_module_name) == ("neuron", "neuron", "neuron")
    assert NeuronDeviceSpec.plugin_api == (1, 1)


def test_it_declares_engine_driven_transfers_only_and_names_what_the_other_mode_lacks() -> None:
    pytest.importorskip("lmcache_neuron._native")
    spec = NeuronDeviceSpec()
    assert spec.missing_for_lmcache_driven() == (
        "ipc_wrapper_cls",
        "event_ipc_backend",
        "create_cache_context",
        "record_completion_on_stream",
    )
    assert spec.default_mp_transfer_mode() is MPTransferMode.ENGINE_DRIVEN
    assert not spec.is_pin_supported
    assert spec.create_gpu_connector(None, None, None) is None


def test_the_native_module_answers_what_it_brings() -> None:
    pytest.importorskip("lmcache_neuron._native")
    report = NeuronDeviceSpec().get_ops().binding_report()
    assert report.bound == ("alloc_pinned_ptr", "batched_memcpy", "free_pinned_ptr")
    assert not report.refused


def test_native_code_can_be_turned_off_and_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_NEURON_NATIVE", "off")
    spec = NeuronDeviceSpec()
    assert spec.page_mover is None
    assert spec.get_ops().binding_report().bound == ()
    monkeypatch.setenv("LMCACHE_NEURON_NATIVE", "maybe")
    with pytest.raises(ConfigError, match="LMCACHE_NEURON_NATIVE='maybe': expected on or off"):
        runtime.native_wanted()


def test_a_native_module_that_does_not_load_is_an_error_with_the_loader_s_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import lmcache_neuron

    monkeypatch.setitem(sys.modules, "lmcache_neuron._native", None)
    monkeypatch.delattr(lmcache_neuron, "_native", raising=False)
    with pytest.raises(
        DeviceError, match=r"lmcache_neuron\._native cannot be loaded: .*LMCACHE_NEURON_NATIVE=off"
    ):
        NeuronDeviceSpec().get_ops()
