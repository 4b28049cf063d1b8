"""Cache contexts: what the server sees of a worker's KV, and what of it is given back, whatever goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lmcache.utils import EngineType
from lmcache.v1.kv_layer_groups import EngineGroupInfo
from lmcache.v1.kv_layout import EngineKVFormat
from lmcache.v1.platform.base.cache_context import BaseCacheContext
from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.platform.base_cache_context import BaseCacheContext as OtherPath
from lmcache.v1.platform.cache_context import create_cache_context, restore_backends, snapshot_backends
from lmcache.v1.platform.cpu import CpuDeviceSpec
from lmcache.v1.platform.cpu.cache_context import CPUCacheContext
from lmcache.v1.platform.cpu.ipc_wrapper import CpuShmTensorWrapper
from lmcache.v1.platform.cpu.stub_cpu_device import StubStream

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

CHUNK, BLOCK, HEADS, SIZE, BLOCKS = 64, 16, 2, 8, 10
HINTS: Any = {"engine_kv_format": "NL_X_NB_TWO_BS_NH_HS"}


class Wrapper:
    """An IPC wrapper that counts how often it was closed."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.closed = tensor, 0

    def to_tensor(self) -> Any:
        assert not self.closed
        return self.tensor

    def close(self) -> None:
        self.closed += 1


def layer(dtype: Any = None, heads: int = HEADS, device: str = "cpu") -> Any:
    return torch.zeros(BLOCKS, 2, BLOCK, heads, SIZE, dtype=dtype or torch.float16, device=device)


def wrappers(*tensors: Any) -> list[Wrapper]:
    return [Wrapper(tensor) for tensor in tensors or (layer(), layer(), layer())]


def info(group: int, *layers: int, window: int = -1) -> EngineGroupInfo:
    return EngineGroupInfo(
        engine_group_id=group, layer_indices=layers, tokens_per_block=BLOCK, sw_size_tokens=window
    )


def create(caches: Any = None, *infos: EngineGroupInfo, **settings: Any) -> Any:
    caches = wrappers() if caches is None else caches
    return create_cache_context(caches, CHUNK, HINTS, infos, EngineType.VLLM, **settings)


@pytest.fixture(autouse=True)
def _backends_stay() -> Iterator[None]:
    before = snapshot_backends()
    yield
    restore_backends(before)


# ----------------------------------------------------------------------------------------------------- creation


def test_the_contract_has_two_import_paths_and_is_one_class() -> None:
    assert OtherPath is BaseCacheContext
    assert issubclass(CPUCacheContext, BaseCacheContext)
    assert CPUCacheContext.device_type == "cpu"


def test_the_device_s_own_class_is_made_with_what_was_passed() -> None:
    assert isinstance(create(), CPUCacheContext)
    seen: list[Any] = []
    restore_backends({"cpu": lambda *args: seen.append(args) or "made"})
    caches = wrappers()
    assert (
        create_cache_context(caches, 128, HINTS, (info(0, 0, 1, 2),), EngineType.VLLM, False, True) == "made"
    )
    assert seen == [(caches, 128, HINTS, (info(0, 0, 1, 2),), EngineType.VLLM, False, True)]
    assert create_cache_context(caches) == "made"
    assert seen[1] == (caches, 256, None, (), EngineType.VLLM, True, False)


def test_factories_that_stand_in_are_put_back_as_they_were() -> None:
    before = snapshot_backends()
    restore_backends({"cpu": list, "other": dict})
    taken = snapshot_backends()
    taken["third"] = set
    assert snapshot_backends() == {"cpu": list, "other": dict}, "a copy"
    restore_backends(before)
    assert isinstance(create(), CPUCacheContext)


def test_wrappers_that_make_no_context_are_refused_and_closed_by_whoever_made_them() -> None:
    with pytest.raises(ValueError, match="non-empty"):
        create([])
    with pytest.raises(ValueError, match="expected one or more"):
        CPUCacheContext([])
    with pytest.raises(ValueError, match=r"share one device type, got \['cpu', 'meta'\]"):
        create(wrappers(layer(), layer(device="meta")))
    with pytest.raises(ValueError, match="No cache-context class registered for device type 'meta'"):
        create(wrappers(layer(device="meta")))


def test_a_spec_without_a_context_is_said_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDeviceSpec, "create_cache_context", DeviceSpec.create_cache_context)
    with pytest.raises(
        ValueError, match=r"No cache-context class registered for device type 'cpu'.*engine_driven"
    ):
        create()


@pytest.mark.parametrize("failing", range(3))
def test_a_construction_that_fails_gives_back_what_it_had_mapped(failing: int) -> None:
    caches = wrappers()

    def fails() -> Any:
        raise OSError("cannot map")

    caches[failing].to_tensor = fails  # type: ignore[method-assign]
    with pytest.raises(OSError, match="cannot map"):
        CPUCacheContext(caches, CHUNK, HINTS)
    assert [wrapper.closed for wrapper in caches] == [1, 1, 1]


def test_a_layout_that_cannot_be_told_or_does_not_fit_gives_all_back() -> None:
    caches = wrappers()
    with pytest.raises(ValueError, match="layer"):
        CPUCacheContext(caches, CHUNK, HINTS, (info(0, 0, 1, 7),))
    assert [wrapper.closed for wrapper in caches] == [1, 1, 1]
    caches = wrappers(torch.zeros(3))
    with pytest.raises(ValueError):
        CPUCacheContext(caches, CHUNK, HINTS)
    assert caches[0].closed == 1


def test_closing_twice_closes_each_wrapper_once_and_lets_the_memory_go() -> None:
    caches = wrappers()
    context = create(caches)
    context.close()
    context.close()
    assert [wrapper.closed for wrapper in caches] == [1, 1, 1]
    assert list(context.kv_tensors) == []


def test_a_wrapper_that_cannot_be_closed_does_not_keep_the_stream_from_being_waited_for() -> None:
    context = create()
    waited: list[int] = []
    context._stream.synchronize = lambda: waited.append(1)
    context.close()
    assert waited == [1]


def test_a_context_over_shared_memory_sees_what_the_worker_writes() -> None:
    mine = layer()
    wrapper = CpuShmTensorWrapper.wrap(mine)
    context = create([CpuShmTensorWrapper.from_wire(wrapper.to_wire())])
    mine[3].fill_(5)
    assert bool((context.kv_tensors[0][3] == 5).all())
    context.kv_tensors[0][4].fill_(6)
    assert bool((mine[4] == 6).all())
    context.close()
    wrapper.close()


# ----------------------------------------------------------------------------------------------------- geometry


def test_all_that_is_to_be_known_of_one_group() -> None:
    caches = wrappers()
    context = create(caches)
    assert str(context.device) == "cpu"
    assert [id(tensor) for tensor in context.kv_tensors] == [id(wrapper.tensor) for wrapper in caches]
    assert (context.num_layers, context.num_blocks, context.block_size) == (3, BLOCKS, BLOCK)
    assert context.hidden_dim_sizes == [HEADS * SIZE]
    fmt = int(EngineKVFormat.NL_X_NB_TWO_BS_NH_HS)
    assert context.engine_kv_formats == [fmt]
    assert context.engine_kv_format_per_layer == [fmt] * 3
    assert context.get_engine_kv_format(0) == fmt
    desc = context.get_shape_desc(0)
    assert (desc.kv_size, desc.nl, desc.nb, desc.bs, desc.nh, desc.hs) == (2, 3, BLOCKS, BLOCK, HEADS, SIZE)
    assert context.calculate_num_blocks(CHUNK, 0) == CHUNK // BLOCK
    assert context.blocks_for_tokens(CHUNK, 0) == CHUNK // BLOCK
    assert context.group_slots_per_blocks == [BLOCK]
    assert context.get_slots_per_chunk_in_sw(0) == CHUNK
    assert tuple(context.get_kv_buffer_shape(48, 0)) == (2, 3, 48, HEADS * SIZE)
    assert context.get_kernel_group_shape_dtype(48, 0) == (torch.Size((2, 3, 48, 16)), torch.float16)
    assert context.concrete_engine_kv_shape(0) == (BLOCKS, 2, BLOCK, HEADS, SIZE)
    assert context.cache_size_per_token() == 2 * 3 * HEADS * SIZE * 2
    pointers = [wrapper.tensor.data_ptr() for wrapper in caches]
    assert context.get_kernel_group_kv_pointer_list(0) == pointers
    assert (
        context.get_kernel_group_kv_pointers(0).tolist()
        == context.get_group_kv_pointers(0).tolist()
        == pointers
    )
    assert context.kv_pointers.tolist() == pointers
    assert context.kv_layer_groups_manager.num_kernel_groups == 1
    status = context.report_status()
    assert (status["device"], status["layers"], status["bytes_per_token"]) == ("cpu", 3, 192)
    assert status["kernel_groups"][0]["layers"] == [0, 1, 2]


def test_streams_hold_no_work_and_answer_as_both_kinds_of_stream() -> None:
    context = create()
    assert isinstance(context.stream, StubStream)
    assert context.stream is context.cupy_stream
    assert context.high_priority_stream is context.high_priority_cupy_stream
    assert context.high_priority_stream is not context.stream
    assert context.cupy_stream.ptr == 0
    assert context.stream.query()


def test_groups_of_several_dtypes_are_told_apart() -> None:
    caches = wrappers(layer(), layer(torch.float32), layer())
    context = create(caches, info(0, 0, 2), info(1, 1))
    assert context.engine_kv_format_per_layer == [int(EngineKVFormat.NL_X_NB_TWO_BS_NH_HS)] * 3
    assert [dtype for _, dtype in (context.get_kernel_group_shape_dtype(16, i) for i in (0, 1))] == [
        torch.float16,
        torch.float32,
    ]
    assert context.get_kernel_group_kv_pointer_list(0) == [caches[i].tensor.data_ptr() for i in (0, 2)]
    assert context.cache_size_per_token() == 2 * 2 * 16 * 2 + 2 * 16 * 4


def test_a_layer_in_no_group_has_no_format_and_is_not_cached() -> None:
    context = create(wrappers(), info(0, 0, 2))
    assert context.engine_kv_format_per_layer[1] is None
    assert context.num_layers == 3


# ------------------------------------------------------------------------------------------------------ staging


def interleaved(**settings: Any) -> Any:
    """Full attention in kernel groups 0 and 2, a window in 1: object groups do not follow one another."""
    caches = wrappers(layer(), layer(), layer(torch.float32, heads=1))
    return create(caches, info(0, 0), info(1, 1, window=32), info(2, 2), **settings)


@pytest.mark.parametrize("settings", [{}, {"separate_object_groups": False}, {"full_sw_kv": True}], ids=str)
def test_staging_of_an_object_group_is_one_run_and_no_two_buffers_share_a_byte(
    settings: dict[str, Any],
) -> None:
    context = interleaved(**settings)
    groups = context.kv_layer_groups_manager.object_groups
    flat = [context.get_tmp_gpu_buffer_flat(i) for i in range(context.max_batch_size)]
    for buffer in flat:
        buffer.zero_()
    for batch in range(context.max_batch_size):
        for number, group in enumerate(groups):
            run = context.get_temp_object_group_buffer(batch, number)
            assert run.dtype == torch.uint8
            for index in group.kernel_group_indices:
                buffer = context.get_temp_kernel_group_buffer(batch, index)
                assert buffer.data_ptr() % buffer.element_size() == 0
                start = buffer.data_ptr() - run.data_ptr()
                assert start == context.get_kernel_group_offset_in_object(index)
                mine = run[start : start + buffer.numel() * buffer.element_size()]
                assert not mine.any(), "nobody else has written here"
                buffer.view(torch.uint8).fill_(index + 1)
                assert bool((mine == index + 1).all())
        assert not any(later.any() for later in flat[batch + 1 :]), "a batch slot is its own"


def test_a_window_takes_only_its_own_slots_unless_all_are_kept() -> None:
    assert interleaved().get_temp_kernel_group_buffer(0, 1).shape[
        2
    ] == interleaved().get_slots_per_chunk_in_sw(1)
    assert interleaved().get_slots_per_chunk_in_sw(1) < CHUNK
    assert interleaved(full_sw_kv=True).get_temp_kernel_group_buffer(0, 1).shape[2] == CHUNK


def test_staging_has_as_many_slots_as_it_says() -> None:
    context = create()
    last = context.max_batch_size - 1
    assert last + 1 == 4
    batch = context.get_tmp_chunk_gpu_buffer_batched(last + 1)
    assert len({buffer.data_ptr() for buffer in batch}) == last + 1
    assert context.get_tmp_chunk_gpu_buffer().data_ptr() == batch[0].data_ptr()
    for ask in (
        lambda n: context.get_temp_kernel_group_buffer(n, 0),
        lambda n: context.get_temp_object_group_buffer(n, 0),
        context.get_tmp_gpu_buffer_flat,
    ):
        ask(last)
        for wrong in (last + 1, -1):
            with pytest.raises(ValueError, match=f"batch slot {wrong}: expected 0 to {last}"):
                ask(wrong)
    with pytest.raises(ValueError, match=f"batch of {last + 2}: expected at most {last + 1}"):
        context.get_tmp_chunk_gpu_buffer_batched(last + 2)


def test_block_ids_are_staged_in_one_buffer_that_cannot_overflow() -> None:
    context = create()
    staged = context.stage_block_ids([7, 0, 3])
    assert (staged.tolist(), staged.dtype) == ([7, 0, 3], torch.int64)
    assert context.stage_block_ids([]).numel() == 0
    assert context.stage_block_ids(range(9)).data_ptr() == staged.data_ptr()
    context.block_ids_buffer_ = torch.zeros(4, dtype=torch.int64)
    context.stage_block_ids([1, 2, 3, 4])
    with pytest.raises(ValueError, match="5 block ids: expected at most 4"):
        context.stage_block_ids([9, 9, 9, 9, 9])
    assert context.block_ids_buffer_.tolist() == [1, 2, 3, 4], "checked before anything is written"


def test_events_are_held_until_they_are_let_go() -> None:
    context = create()
    event = object()
    key = context.hold_imported_event(event)
    assert context._imported_events[key] is event
    context.release_imported_event(key)
    context.release_imported_event(key)
    assert not context._imported_events
