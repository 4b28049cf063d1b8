"""Geometry of the cache context: what the server may rely on when it moves bytes by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lmcache.testing import needs
from lmcache.testing.peer import layers
from lmcache.v1.kv_layer_groups import EngineGroupInfo
from lmcache.v1.platform.cache_context import create_cache_context
from lmcache.v1.platform.kv_wire import import_kv_caches

pytestmark = needs("device", "cache-context", "tensor-ipc")

_LAYERS, _BLOCKS, _SLOTS, _WIDTH, _CHUNK = 3, 8, 4, 16, 16


@pytest.fixture(scope="module")
def context(helper: Any) -> Iterator[Any]:
    """This process is the server, and the helper is the worker whose KV it maps."""
    with helper as worker:
        wrappers = import_kv_caches(worker.export_layers(_LAYERS, (_BLOCKS, _SLOTS, _WIDTH)))
        made = create_cache_context(
            wrappers,
            _CHUNK,
            {"engine_kv_format": "NL_X_NB_BS_HS"},
            [EngineGroupInfo(0, tuple(range(_LAYERS)), _SLOTS)],
        )
        try:
            yield made
        finally:
            made.close()
            made.close()  # twice is once


def test_it_has_the_worker_s_tensors(context: Any, device: Any) -> None:
    assert context.device.type == device.type
    assert context.num_layers == _LAYERS
    assert context.num_blocks == _BLOCKS
    theirs = layers(_LAYERS, (_BLOCKS, _SLOTS, _WIDTH))
    assert all((mine.cpu() == other).all() for mine, other in zip(context.kv_tensors, theirs, strict=True))


def test_pointers_are_those_of_the_tensors(context: Any) -> None:
    pointers = context.get_kernel_group_kv_pointers(0)
    assert pointers.dtype.itemsize == 8
    assert pointers.dim() == 1
    assert pointers.cpu().tolist() == [tensor.data_ptr() for tensor in context.kv_tensors]
    assert context.get_kernel_group_kv_pointer_list(0) == pointers.cpu().tolist()


def test_sizes_agree_with_each_other(context: Any) -> None:
    shape, dtype = context.get_kernel_group_shape_dtype(_CHUNK, 0)
    assert tuple(shape) == (1, _LAYERS, _CHUNK, _WIDTH)
    assert dtype.itemsize == 2
    assert context.cache_size_per_token() == _LAYERS * _WIDTH * 2
    assert tuple(context.get_kv_buffer_shape(_CHUNK, 0)) == tuple(shape)
    desc = context.get_shape_desc(0)
    assert (desc.kv_size, desc.nl, desc.nb, desc.bs, desc.hs) == (1, _LAYERS, _BLOCKS, _SLOTS, _WIDTH)
    assert context.get_engine_kv_format(0) == 3


def test_staging_slots_are_apart_and_on_the_device(context: Any, device: Any) -> None:
    assert context.max_batch_size >= 1
    buffers = [context.get_temp_kernel_group_buffer(index, 0) for index in range(context.max_batch_size)]
    for index, buffer in enumerate(buffers):
        buffer.fill_(index + 1)
        assert buffer.device.type == device.type
        assert tuple(buffer.shape) == (1, _LAYERS, _CHUNK, _WIDTH)
    assert all((buffer.cpu() == index + 1).all() for index, buffer in enumerate(buffers))
    flat = context.get_temp_object_group_buffer(0, 0)
    assert flat.numel() * flat.element_size() >= buffers[0].numel() * 2
    for outside in (context.max_batch_size, -1):
        with pytest.raises(ValueError, match=r".+"):
            context.get_temp_kernel_group_buffer(outside, 0)


def test_block_ids_reach_the_device_and_too_many_are_refused(context: Any) -> None:
    ids = [5, 0, 7, 3]
    assert context.stage_block_ids(ids).cpu().tolist() == ids
    with pytest.raises(ValueError, match="block ids"):
        context.stage_block_ids(range(50_000_000))


def test_its_stream_has_a_handle(context: Any) -> None:
    assert isinstance(context.cupy_stream.ptr, int)
    context.stream.synchronize()


def test_it_gathers_the_worker_s_blocks_into_its_staging(context: Any, ops: Any, device: Any) -> None:
    ids = [6, 1, 4, 2]
    buffer = context.get_temp_kernel_group_buffer(0, 0)
    by_address = "tensors" not in ops.operand_kinds("multi_layer_block_kv_transfer")
    ops.multi_layer_block_kv_transfer(
        context.get_kernel_group_kv_pointers(0) if by_address else list(context.kv_tensors),
        [buffer.data_ptr() if by_address else buffer],
        context.stage_block_ids(ids),
        context.device,
        1,
        context.get_shape_desc(0),
        _CHUNK,
        context.get_engine_kv_format(0),
        0,
    )
    context.stream.synchronize()
    for mine, theirs in zip(buffer[0].cpu(), layers(_LAYERS, (_BLOCKS, _SLOTS, _WIDTH)), strict=True):
        assert (mine == theirs[ids].reshape(_CHUNK, _WIDTH)).all()


def test_closing_waits_for_its_stream_and_gives_its_mappings_back(helper: Any) -> None:
    import gc
    from pathlib import Path

    def mappings() -> int:
        gc.collect()
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = 0
    with helper as worker:
        wires = worker.export_layers(_LAYERS, (_BLOCKS, _SLOTS, _WIDTH))
        for turn in range(14):
            made = create_cache_context(
                import_kv_caches(wires),
                _CHUNK,
                {"engine_kv_format": "NL_X_NB_BS_HS"},
                [EngineGroupInfo(0, tuple(range(_LAYERS)), _SLOTS)],
            )
            made.close()
            del made
            before = mappings() if turn == 3 else before
        assert mappings() < before + 10, "a mapping is left per context"
