"""The spec: what is said where there is no device, what is declared as absent, and what an import costs."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.v1.platform.base.device_spec import MPTransferMode
from lmcache_xpu import runtime
from lmcache_xpu.spec import XpuDeviceSpec


def fake_torch(xpu: str | None, sees: bool, version: str = "2.99") -> Any:
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(xpu=xpu),
        xpu=SimpleNamespace(is_available=lambda: sees),
    )


@pytest.mark.parametrize(
    ("build", "said"),
    [
        ((None, False), "torch 2.99 is built without XPU; install a build of torch for XPU"),
        (("20260000", False), "torch 2.99 finds no Intel GPU; install Intel's GPU driver"),
        (
            ("20250000", True, "2.9.1+xpu"),
            "torch 2.9.1+xpu: expected 2.13 or later, which brings libsycl.so.9;",
        ),
        (("20250000", True, "1.13"), "torch 1.13: expected 2.13 or later, which brings libsycl.so.9;"),
    ],
    ids=["CPU", "XPU without a GPU", "the runtime before", "the major version before"],
)
def test_what_is_not_there_says_why_in_one_line(
    monkeypatch: pytest.MonkeyPatch, build: Any, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(*build))
    assert not XpuDeviceSpec().is_available()
    reason = XpuDeviceSpec().unavailable_reason()
    assert reason.startswith(said)
    assert "\n" not in reason


@pytest.mark.parametrize(
    "version", ["2.13.0+xpu", "2.13.0.dev20260701+xpu", "2.14.0a0+gitabc", "3.0", "main"]
)
def test_a_torch_that_sees_a_gpu_makes_it_available(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch("20260000", True, version))
    assert XpuDeviceSpec().is_available()


def test_what_torch_says_when_it_is_asked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> bool:
        raise RuntimeError("Level Zero:\n  no loader")

    torch = fake_torch("20260000", True)
    torch.xpu.is_available = asked
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert not XpuDeviceSpec().is_available()
    assert "torch.xpu cannot be asked: Level Zero: no loader" in XpuDeviceSpec().unavailable_reason()


@pytest.mark.parametrize("torch", [None, SimpleNamespace()], ids=["none", "without its parts"])
def test_a_torch_that_is_broken_makes_it_unavailable(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert not XpuDeviceSpec().is_available()
    assert "install a build of torch for XPU" in XpuDeviceSpec().unavailable_reason()


@pytest.mark.torch
def test_lmcache_driven_mode_is_declared_as_absent_with_what_it_lacks() -> None:
    pytest.importorskip("torch")
    spec = XpuDeviceSpec()
    missing = {"ipc_wrapper_cls", "event_ipc_backend", "create_cache_context"}
    assert set(spec.missing_for_lmcache_driven()) == missing
    assert not spec.is_lmcache_driven_available()
    assert spec.default_mp_transfer_mode() is MPTransferMode.ENGINE_DRIVEN
    assert not spec.is_pin_supported


def test_the_handle_of_a_stream_is_its_queue() -> None:
    spec = XpuDeviceSpec()
    assert spec.get_stream_handle(SimpleNamespace(sycl_queue=0x1234)) == 0x1234
    assert spec.get_stream_handle(0x1234) == 0x1234
    with pytest.raises(TypeError, match="is no stream"):
        spec.get_stream_handle("main")


def test_work_is_queued_where_torch_queues_on_the_device_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queues = {None: 0x10, "xpu:1": 0x20}
    xpu = SimpleNamespace(current_stream=lambda device: SimpleNamespace(sycl_queue=queues[device]))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(xpu=xpu))
    assert [runtime.current_queue(), runtime.current_queue("xpu:1")] == [0x10, 0x20]


@pytest.mark.torch
def test_torch_has_the_names_that_are_asked_of_it() -> None:
    torch = pytest.importorskip("torch")
    assert inspect.signature(torch.xpu.current_stream).bind(None)
    assert "sycl_queue" in inspect.getsource(torch.xpu.streams)
    assert torch.xpu.is_available() is False or torch.version.xpu


IMPORT = """
import sys, time
import lmcache.v1.platform.base.device_spec
before = set(sys.modules)
began = time.perf_counter()
import lmcache_xpu.spec
took = time.perf_counter() - began
lmcache_xpu.spec.XpuDeviceSpec()
import json
maps = open("/proc/self/maps").read()
print(json.dumps([took, sorted(set(sys.modules) - before), "libsycl" in maps]))
"""


def test_the_import_is_quick_and_loads_neither_torch_nor_the_runtime() -> None:
    seconds = []
    while len(seconds) < 20 and min(seconds, default=1) > 0.020:  # the quickest: others share the machine
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120)
        took, new, has_runtime = json.loads(done.stdout)
        seconds.append(took)
        assert not has_runtime
        assert {name for name in new if name.partition(".")[0] in ("torch", "numpy", "intel")} == set()
        assert "lmcache_xpu._native" not in new
    assert min(seconds) <= 0.020


NO_RUNTIME = """
import sys
sys.prefix = "/nonexistent"
from lmcache_xpu import native
try:
    native.load()
except RuntimeError as exc:
    print(type(exc).__name__, exc)
"""


def test_without_the_runtime_the_loader_s_words_and_the_remedy_are_given() -> None:
    done = subprocess.run([sys.executable, "-c", NO_RUNTIME], capture_output=True, text=True, timeout=120)
    (line,) = done.stdout.splitlines()
    assert line.startswith("DeviceError lmcache_xpu._native cannot be loaded: libsycl.so.9: cannot open")
    assert "torch 2.13 or later for XPU" in line
