"""The names of the platform layer that others import, and what they promise. Torch is needed where marked."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator

import pytest

import lmcache
import lmcache.v1.platform
from helpers.devices import backend, install_backends
from lmcache import errors
from lmcache.v1.platform import _device_detect
from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.platform.cpu import CpuDeviceSpec
from lmcache.v1.platform.cpu.stub_cpu_device import StubCPUDevice, StubStream

WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("no torch here", name="torch")
sys.meta_path.insert(0, Refuse())
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("DEVICE_TYPE", "LMCACHE_DEVICE_BACKEND")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env={**clean, **env},
    )


@pytest.fixture(autouse=True)
def fresh_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test makes its own choice of device."""
    monkeypatch.delenv("DEVICE_TYPE", raising=False)
    monkeypatch.delenv("LMCACHE_DEVICE_BACKEND", raising=False)
    _device_detect.reset()
    yield
    _device_detect.reset()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *classes: install_backends(monkeypatch, *classes)


# --- import ------------------------------------------------------------------------------------------------


def test_importing_the_package_imports_neither_torch_nor_the_platform() -> None:
    done = run("""
        import sys, lmcache, lmcache.v1
        heavy = [m for m in sys.modules if m == "torch" or m.startswith("lmcache.v1.platform")]
        sys.exit(", ".join(heavy) or 0)
    """)
    assert done.returncode == 0, done.stderr


def test_contracts_can_be_imported_without_torch_and_without_a_choice_of_device() -> None:
    done = run(
        WITHOUT_TORCH
        + textwrap.dedent("""
        from lmcache.v1.platform.base.device_spec import DeviceSpec
        from lmcache.v1.platform.base.device_ops import DeviceOps
        from lmcache.v1.platform import _device_detect, torch_ops
        assert _device_detect._HOST._selection is None and _device_detect._HOST._registry is None
        """),
        LMCACHE_DEVICE_BACKEND="nope",
    )
    assert done.returncode == 0, done.stderr


def test_without_torch_there_is_a_cpu_without_a_device_module_and_ops_name_the_remedy() -> None:
    done = run(
        WITHOUT_TORCH
        + textwrap.dedent("""
        import lmcache
        from lmcache.errors import DeviceError
        assert (lmcache.torch_dev, lmcache.torch_device_type) == (None, "cpu")
        try:
            from lmcache import device_ops
        except DeviceError as exc:
            assert "pip install lmcache[cpu]" in str(exc) and "\\n" not in str(exc), exc
        else:
            raise SystemExit("no error")
        """)
    )
    assert done.returncode == 0, done.stderr


def test_a_misspelt_backend_fails_when_a_device_is_first_used_and_not_before() -> None:
    done = run(
        """
        import lmcache, lmcache.cli
        from lmcache.errors import DeviceError
        try:
            lmcache.torch_device_type
        except DeviceError as exc:
            assert "LMCACHE_DEVICE_BACKEND=nope" in str(exc) and "backends here: cpu" in str(exc), exc
        else:
            raise SystemExit("no error")
        """,
        LMCACHE_DEVICE_BACKEND="nope",
    )
    assert done.returncode == 0, done.stderr


def test_the_version_is_that_of_the_distribution_and_unknown_names_are_refused() -> None:
    assert isinstance(lmcache.__version__, str)
    assert {"torch_dev", "torch_device_type", "device_ops", "__version__"} <= set(dir(lmcache))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = lmcache.no_such_name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = lmcache.v1.platform.no_such_name


@pytest.mark.torch
def test_without_an_accelerator_the_device_is_the_stub_and_ops_are_the_cpu_s() -> None:
    pytest.importorskip("torch")
    assert isinstance(lmcache.torch_dev, StubCPUDevice)
    assert lmcache.torch_device_type == "cpu"
    assert lmcache.device_ops.device_type == "cpu"
    assert lmcache.device_ops is lmcache.v1.platform.resolve_device_ops("cpu")
    assert lmcache.v1.platform._detect_device() == (lmcache.torch_dev, "cpu")
    assert isinstance(lmcache.v1.platform.current_device_spec, CpuDeviceSpec)
    lmcache.v1.platform.synchronize_device("cpu:0")
    lmcache.v1.platform.synchronize_current_stream("cpu:0")


# --- selection ---------------------------------------------------------------------------------------------


def test_the_cpu_can_be_asked_for_beside_an_accelerator(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("LMCACHE_DEVICE_BACKEND", "DEVICE_TYPE"):
        install(backend("foo"))
        monkeypatch.setenv(variable, " CPU ")
        assert lmcache.torch_device_type == "cpu"
        assert isinstance(lmcache.torch_dev, StubCPUDevice)
        monkeypatch.delenv(variable)


def test_an_available_accelerator_is_chosen_and_what_was_not_taken_is_logged(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    install(backend("foo"), backend("bar", "bar"), backend("gone", "bar", available=False))
    with caplog.at_level(logging.INFO, "lmcache"):
        assert (lmcache.torch_dev, lmcache.torch_device_type) == ("torch.foo", "foo")
    lines = [r.getMessage() for r in caplog.records if "chosen automatically" in r.getMessage()]
    assert lines == [
        "device backend foo chosen automatically; not taken: bar, cpu (LMCACHE_DEVICE_BACKEND decides)"
    ]


def test_two_available_backends_of_a_type_need_a_decision(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(backend("foo-a"), backend("foo-b"))
    with pytest.raises(errors.DeviceError, match=r"foo-a, foo-b; set LMCACHE_DEVICE_BACKEND"):
        _ = lmcache.torch_device_type
    assert lmcache.v1.platform.get_device_spec("foo") is None
    monkeypatch.setenv("LMCACHE_DEVICE_BACKEND", "foo-b")
    assert lmcache.v1.platform.current_device_spec.backend_name == "foo-b"
    spec = lmcache.v1.platform.get_device_spec("foo")
    assert spec is not None
    assert spec.backend_name == "foo-b"


def test_a_variable_that_changes_after_the_choice_changes_nothing(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(backend("foo-a"))
    assert lmcache.torch_device_type == "foo"
    monkeypatch.setenv("LMCACHE_DEVICE_BACKEND", "nonsense")
    spec = lmcache.v1.platform.get_device_spec("foo")
    assert spec is not None
    assert spec.backend_name == "foo-a"


@pytest.mark.parametrize(
    ("env", "fault"),
    [
        ({"LMCACHE_DEVICE_BACKEND": "gone"}, "LMCACHE_DEVICE_BACKEND=gone: not available on this host"),
        ({"LMCACHE_DEVICE_BACKEND": "broken"}, "LMCACHE_DEVICE_BACKEND=broken: SystemExit: 7"),
        ({"LMCACHE_DEVICE_BACKEND": "nomod"}, "torch has no module 'nomod'"),
        ({"LMCACHE_DEVICE_BACKEND": "foo", "DEVICE_TYPE": "bar"}, "contradicts DEVICE_TYPE=bar"),
        ({"DEVICE_TYPE": "xyz"}, "DEVICE_TYPE=xyz: no backend of that type; backends here: cpu, foo"),
        ({"DEVICE_TYPE": "bar"}, "DEVICE_TYPE=bar: none is usable: gone: not available"),
    ],
)
def test_what_is_asked_for_and_cannot_be_had_is_an_error_in_one_line(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, env: dict[str, str], fault: str
) -> None:
    install(
        backend("foo"),
        backend("gone", "bar", available=False),
        backend("broken", "broken", available=SystemExit(7)),
        backend("nomod", "nomod"),
    )
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.DeviceError, match=fault) as caught:
        _ = lmcache.torch_dev
    assert "\n" not in str(caught.value)


def test_a_faulty_backend_costs_only_itself_and_its_reason_is_kept(install: Callable[..., None]) -> None:
    class Unbuildable(DeviceSpec):
        def __init__(self) -> None:
            raise SystemExit("no")

    install(Unbuildable, backend("Upper"), backend(""), backend("cpu", "cpu"), backend("foo"), backend("foo"))
    found = _device_detect.registry()
    assert set(found.specs) == {"cpu", "foo"}
    assert isinstance(found.specs["cpu"], CpuDeviceSpec)
    reasons = " / ".join(record.note for record in found.records)
    assert "SystemExit: no" in reasons
    assert "lowercase" in reasons
    assert "'foo' is taken" in reasons
    assert lmcache.torch_device_type == "foo"


def test_racing_threads_see_one_choice(install: Callable[..., None]) -> None:
    made: list[int] = []

    class Slow(backend("foo")):  # type: ignore[misc]
        def __init__(self) -> None:
            made.append(threading.get_ident())
            threading.Event().wait(0.02)

    install(Slow)
    seen: list[object] = []
    threads = [threading.Thread(target=lambda: seen.append(_device_detect.selected())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(set(map(id, seen))) == 1


def test_a_type_nobody_serves_has_no_spec_and_no_ops(install: Callable[..., None]) -> None:
    assert lmcache.v1.platform.get_device_spec("xyz") is None
    with pytest.raises(errors.DeviceError, match="device type 'xyz': no backend serves it"):
        lmcache.v1.platform.synchronize_device("xyz:1")


# --- the CPU stub ------------------------------------------------------------------------------------------


def test_the_stub_has_the_surface_of_a_device_module_and_admits_that_it_is_none() -> None:
    dev = StubCPUDevice("cpu")
    assert (dev.is_available(), dev.device_count(), dev.current_device()) == (False, 1, 0)
    dev.init()
    dev.set_device(0)
    dev.synchronize()
    dev.empty_cache()
    dev.set_stream(None)
    with dev.device("cpu"), dev.stream(None):
        pass
    assert dev.current_stream() is dev.default_stream()
    properties = dev.get_device_properties(0)
    assert (properties.name, properties.total_memory) == ("StubCPU", 0)
    assert properties.uuid == StubCPUDevice().get_device_properties().uuid
    assert not hasattr(dev, "cudart")


def test_stub_events_are_complete_and_cross_processes_as_constant_bytes() -> None:
    first, second = StubCPUDevice.Event(enable_timing=True), StubCPUDevice.Event(enable_timing=True)
    first.record()
    second.record(StubStream())
    assert first.query()
    assert first.elapsed_time(second) >= 0
    handle = StubCPUDevice.Event(interprocess=True).ipc_handle()
    assert StubCPUDevice.Event.from_ipc_handle("cpu", handle).query()
    for fault in (
        lambda: StubCPUDevice.Event.from_ipc_handle("cpu", b"?"),
        lambda: first.elapsed_time(StubCPUDevice.Event()),
    ):
        with pytest.raises(ValueError, match="event"):
            fault()


def test_a_stub_stream_runs_host_functions_at_once() -> None:
    stream = StubStream(device="cpu", priority=0)
    done: list[object] = []
    stream.launch_host_func(done.append, 5)
    stream.synchronize()
    stream.wait_event(stream.record_event())
    stream.wait_stream(StubStream())
    assert done == [5]
    assert (stream.ptr, stream.cuda_stream, stream.query()) == (0, 0, True)
    assert CpuDeviceSpec().get_stream_handle(stream) == 0
    assert CpuDeviceSpec().is_stream_event_complete(CpuDeviceSpec().create_stream_event())
