"""Each call of the driver that sharing, events and pinning make, failing: an error in one line, and nothing left."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache_cuda._native")

import standin

from lmcache.errors import DeviceError
from lmcache_cuda.events import DriverEventBackend
from lmcache_cuda.ipc import CudaIPCWrapper
from lmcache_cuda.ipc_ways import OFFERS
from lmcache_cuda.pinning import CudaPinMemoryBackend, Pieces
from lmcache_cuda.spec import CudaDeviceSpec
from lmcache_cuda.timeline import PAGES, TimelineEventBackend

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fake_cuda")]

CUDA = standin.kind() == "cuda"
OUT_OF_MEMORY, INVALID = 2, 1


@pytest.fixture
def fake() -> Iterator[Any]:
    made = standin.fake()
    standin.native().driver_version()  # loaded, and what it needs once is there
    made.reset()
    yield made
    made.reset()


def failing(fake: Any, call: str, hip: str, code: int = INVALID, times: int = -1) -> str:
    name = call if CUDA else hip
    fake.fail(name, code, 0, times)
    return name


@pytest.mark.parametrize(
    ("way", "cuda", "hip"),
    [
        ("raw", "cuIpcGetMemHandle", "hipIpcGetMemHandle"),
        ("raw", "cuMemGetAddressRange_v2", "hipMemGetAddressRange"),
        ("vmm", "cuMemExportToShareableHandle", "hipMemExportToShareableHandle"),
    ],
)
def test_memory_that_the_driver_does_not_export_is_refused_and_nothing_is_offered(
    fake: Any, monkeypatch: pytest.MonkeyPatch, way: str, cuda: str, hip: str
) -> None:
    monkeypatch.setenv("LMCACHE_CUDA_IPC", way)
    tensor = standin.device_tensor(torch.zeros(64, dtype=torch.uint8), vmm=way == "vmm")
    gc.collect()
    before = len(OFFERS)
    monkeypatch.setattr("lmcache_cuda.runtime.is_on_device", lambda tensor: True)
    name = failing(fake, cuda, hip)
    with pytest.raises(DeviceError, match=f"cannot be shared: {way}: .*{name}.*use engine_driven") as caught:
        CudaIPCWrapper.wrap([tensor, tensor])
    assert "\n" not in str(caught.value)
    assert len(OFFERS) == before


def test_of_planes_of_which_one_cannot_be_exported_none_is(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_CUDA_IPC", "vmm")
    shared = standin.device_tensor(torch.zeros(64, dtype=torch.uint8), vmm=True)
    plain = standin.device_tensor(torch.zeros(64, dtype=torch.uint8))
    gc.collect()
    before = len(OFFERS)
    with pytest.raises(DeviceError, match="cannot be shared: vmm"):
        CudaIPCWrapper.wrap([shared, plain])
    gc.collect()
    assert len(OFFERS) == before


@pytest.mark.parametrize(
    ("cuda", "hip"),
    [
        ("cuEventCreate", "hipEventCreateWithFlags"),
        ("cuEventRecord", "hipEventRecord"),
        ("cuIpcGetEventHandle", "hipIpcGetEventHandle"),
        ("cuStreamCreateWithPriority", "hipStreamCreateWithPriority"),
    ],
)
def test_the_probe_of_driver_events_names_the_call_and_the_other_way(fake: Any, cuda: str, hip: str) -> None:
    name = failing(fake, cuda, hip)
    with pytest.raises(
        RuntimeError, match=f"event IPC is not supported on cpu: {name}.*LMCACHE_CUDA_EVENTS=host"
    ):
        DriverEventBackend().check_event_support("cpu")


@pytest.mark.parametrize(
    ("kind", "cuda", "hip"),
    [
        ("host", "cuMemHostRegister_v2", "hipHostRegister"),
        ("device", "cuMemAlloc_v2", "hipMalloc"),
        ("device", "cuIpcGetMemHandle", "hipIpcGetMemHandle"),
        ("host", "cuStreamWriteValue64_v2", "hipStreamWriteValue64"),
        ("device", "cuStreamWaitValue64_v2", "hipStreamWaitValue64"),
    ],
)
def test_the_probe_of_counters_names_the_call_that_fails(fake: Any, kind: str, cuda: str, hip: str) -> None:
    backend = TimelineEventBackend(PAGES[kind])
    name = failing(fake, cuda, hip)
    with pytest.raises(RuntimeError, match=f"event IPC by counters is not supported on cpu: {name}"):
        backend.check_event_support("cpu")
    fake.reset()
    backend.check_event_support("cpu")


def test_a_page_of_counters_that_cannot_be_shared_is_given_back(fake: Any) -> None:
    backend = TimelineEventBackend(PAGES["device"])
    backend.check_event_support("cpu")  # what all pages need, once
    free = standin.native().mem_info(0)[0]
    failing(fake, "cuIpcGetMemHandle", "hipIpcGetMemHandle")
    with pytest.raises(RuntimeError):
        TimelineEventBackend(PAGES["device"]).check_event_support("cpu")
    assert standin.native().mem_info(0)[0] == free


def test_pinning_that_the_driver_refuses_is_false_with_its_words_and_nothing_stays(
    fake: Any, caplog: pytest.LogCaptureFixture
) -> None:
    backend, memory = CudaPinMemoryBackend(Pieces()), torch.zeros(1 << 20, dtype=torch.uint8)
    assert backend.is_pin_supported
    name = failing(fake, "cuMemHostRegister_v2", "hipHostRegister", OUT_OF_MEMORY)
    with caplog.at_level(logging.WARNING):
        assert backend.pin_memory(memory.data_ptr(), 1 << 20) is False
    assert name in caplog.text
    fake.reset()
    assert backend.pin_memory(memory.data_ptr(), 1 << 20) is True, "the driver keeps the error"
    assert backend.unpin_memory(memory.data_ptr()) is True


def test_a_sticky_error_of_one_call_is_not_the_next_ones(fake: Any) -> None:
    failing(fake, "cuMemHostRegister_v2", "hipHostRegister", OUT_OF_MEMORY, times=1)
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    with pytest.raises(DeviceError):
        standin.native().host_register(memory.data_ptr(), 1 << 16, 0, 0)
    stream = standin.Stream()
    stream.synchronize()
    assert stream.query()


def test_the_spec_offers_lmcache_driven_transfers_and_nothing_is_missing() -> None:
    spec = CudaDeviceSpec()
    assert spec.missing_for_lmcache_driven() == ()
    assert spec.is_lmcache_driven_available()
    assert spec.is_pin_supported
    assert spec.event_ipc_backend is spec.event_ipc_backend
    assert spec.create_gpu_connector(None, None, "vllm") is None, "the core's routing and connectors serve"
    stream = standin.Stream()
    assert spec.get_stream_handle(stream) == stream.cuda_stream
