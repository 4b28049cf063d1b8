"""The server's view on a worker's KV, over memory and streams of the fake driver."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache_cuda._native")

import standin
from peer import Gate

from lmcache.v1.kv_layer_groups import EngineGroupInfo
from lmcache_cuda import keeping, runtime
from lmcache_cuda.context import GPUCacheContext, StreamHandle
from lmcache_cuda.ops import CudaDeviceOps

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fake_cuda")]

LAYERS, BLOCKS, SLOTS, WIDTH, CHUNK = 3, 8, 4, 16, 16


class Wrapper:
    """A mapped tensor that counts how often it was closed."""

    def __init__(self, tensor: Any, fails: bool = False) -> None:
        self.tensor, self.closed, self.fails = tensor, 0, fails

    def to_tensor(self) -> Any:
        if self.fails:
            raise RuntimeError("the exporter has ended")
        return self.tensor

    def close(self) -> None:
        self.closed += 1


def layer() -> Any:
    return standin.device_tensor(torch.randn(BLOCKS, SLOTS, WIDTH).to(torch.float16))


def make(wrappers: list[Wrapper]) -> GPUCacheContext:
    return GPUCacheContext(
        wrappers,
        CHUNK,
        {"engine_kv_format": "NL_X_NB_BS_HS"},
        [EngineGroupInfo(0, tuple(range(LAYERS)), SLOTS)],
    )


@pytest.fixture
def wrappers() -> list[Wrapper]:
    return [Wrapper(layer()) for _ in range(LAYERS)]


def test_its_pointer_table_tells_kernels_how_wide_they_may_copy(wrappers: list[Wrapper]) -> None:
    context = make(wrappers)
    table = context.get_kernel_group_kv_pointers(0)
    addresses = [wrapper.tensor.data_ptr() for wrapper in wrappers]
    assert table.tolist() == addresses
    assert table.lmcache_alignment == addresses[0] | addresses[1] | addresses[2]
    assert table.lmcache_alignment % 16 == 0
    context.close()


def test_its_streams_are_its_own_and_one_goes_before_the_other(wrappers: list[Wrapper]) -> None:
    one, two = make(wrappers), make(wrappers)
    handles = [one.stream, one.high_priority_stream, two.stream, two.high_priority_stream]
    assert len({stream.cuda_stream for stream in handles}) == 4
    assert one.high_priority_stream.priority < one.stream.priority, "a lower number goes first"
    assert one.cupy_stream.ptr == one.stream.cuda_stream
    assert one.high_priority_cupy_stream.ptr == one.high_priority_stream.cuda_stream
    one.close()
    two.close()


@pytest.mark.parametrize("by_address", [False, True], ids=["tensors", "addresses"])
def test_it_gathers_the_workers_blocks_into_its_staging_on_its_stream(
    wrappers: list[Wrapper], by_address: bool
) -> None:
    ops = CudaDeviceOps()
    ops.ensure_native()
    context = make(wrappers)
    staging = standin.device_tensor(torch.zeros(1, LAYERS, CHUNK, WIDTH, dtype=torch.float16))
    ids = [6, 1, 4, 2]
    with standin.queued_on(context.stream):
        ops.multi_layer_block_kv_transfer(
            context.get_kernel_group_kv_pointers(0) if by_address else list(context.kv_tensors),
            [staging.data_ptr() if by_address else staging],
            context.stage_block_ids(ids),
            context.device,
            1,
            context.get_shape_desc(0),
            CHUNK,
            context.get_engine_kv_format(0),
        )
    context.stream.synchronize()
    for mine, wrapper in zip(staging[0], wrappers, strict=True):
        assert torch.equal(mine, wrapper.tensor[ids].reshape(CHUNK, WIDTH))
    context.close()


def test_more_block_ids_than_it_has_room_for_are_refused(wrappers: list[Wrapper]) -> None:
    context = make(wrappers)
    assert context.stage_block_ids([5, 0, 7]).tolist() == [5, 0, 7]
    with pytest.raises(ValueError, match="block ids: expected at most"):
        context.stage_block_ids(range(50_000_000))
    context.close()


def test_closing_waits_for_both_streams_unmaps_once_and_may_be_called_again(wrappers: list[Wrapper]) -> None:
    context = make(wrappers)
    gates = [Gate(), Gate()]
    gates[0].hold(context.stream)
    gates[1].hold(context.high_priority_stream)
    closing = threading.Thread(target=context.close)
    closing.start()
    for gate in gates:
        assert [wrapper.closed for wrapper in wrappers] == [0] * LAYERS, "a stream still has work"
        gate.open()
    closing.join(30)
    assert not closing.is_alive()
    assert [wrapper.closed for wrapper in wrappers] == [1] * LAYERS
    context.close()
    assert [wrapper.closed for wrapper in wrappers] == [1] * LAYERS


def test_a_context_that_cannot_be_made_gives_everything_back() -> None:
    wrappers = [Wrapper(layer()), Wrapper(layer(), fails=True), Wrapper(layer())]
    with pytest.raises(RuntimeError, match="the exporter has ended"):
        make(wrappers)
    assert [wrapper.closed for wrapper in wrappers] == [1] * LAYERS
    gc.collect()


def test_a_callback_comes_once_the_work_before_it_is_done_and_in_order() -> None:
    stream, gate = standin.Stream(), Gate()
    gate.hold(stream)
    handle = StreamHandle(stream, 0)
    seen: list[int] = []
    last = threading.Event()
    for index in range(5):
        handle.launch_host_func(seen.append, index)
    handle.launch_host_func(lambda arg: last.set(), None)
    assert seen == []
    gate.open()
    assert last.wait(30)
    assert seen == [0, 1, 2, 3, 4]


def test_a_callback_that_fails_costs_itself_only(caplog: pytest.LogCaptureFixture) -> None:
    handle = StreamHandle(standin.Stream(), 0)
    done = threading.Event()
    handle.launch_host_func(lambda arg: 1 // 0, None)
    handle.launch_host_func(lambda arg: done.set(), None)
    assert done.wait(30)
    assert "a callback of a stream failed" in caplog.text


def test_a_stream_is_told_by_torchs_handle_cupys_or_the_number_itself() -> None:
    stream = standin.Stream()
    assert runtime.stream_handle(stream) == runtime.stream_handle(stream.cuda_stream) == stream.cuda_stream
    assert runtime.stream_handle(StreamHandle(stream, 0)) == stream.cuda_stream
    with pytest.raises(TypeError, match="is no stream"):
        runtime.stream_handle(None)


def test_the_thread_of_its_callbacks_goes_with_a_stream() -> None:
    stream = standin.Stream()
    handle, before = StreamHandle(stream, 0), set(threading.enumerate())
    called = threading.Event()
    handle.launch_host_func(lambda arg: called.set(), None)
    (thread,) = [t for t in set(threading.enumerate()) - before if t.name == "lmcache-cuda-host"]
    assert called.wait(60)
    del handle
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_host_memory_is_not_let_go_under_a_copy_that_cannot_be_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, waited = standin.Stream(), []
    native = standin.native()

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return {"event_record": refuse, "stream_synchronize": wait}.get(name) or getattr(native, name)

    def refuse(*args: Any) -> None:
        raise RuntimeError("cuEventRecord: out of memory")

    def wait(handle: int, ordinal: int) -> None:
        waited.append(handle)
        native.stream_synchronize(handle, ordinal)

    monkeypatch.setattr(runtime, "native", lambda: Refusing())
    with standin.queued_on(stream):
        keeping.until_done(0, [object()])
    assert waited == [stream.cuda_stream]
