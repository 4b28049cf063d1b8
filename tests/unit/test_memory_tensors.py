"""Tensors of memory objects: views of the object's bytes, several per object, alive as long as anybody looks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from lmcache.v1.memory_management import (  # noqa: E402
    AdHocMemoryAllocator,
    MemoryFormat,
    MixedMemoryAllocator,
    PagedTensorMemoryAllocator,
    PinMemoryAllocator,
    TensorMemoryAllocator,
)
from lmcache.v1.platform import _device_detect, torch_ops  # noqa: E402

TYPES = (torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64)
KV = (2, 3, 16, 8)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.sampled_from(TYPES)),
        min_size=1,
        max_size=4,
    )
)
def test_each_tensor_of_an_object_has_its_shape_its_type_and_its_own_bytes(found: list[Any]) -> None:
    shapes, dtypes = [shape for shape, _ in found], [dtype for _, dtype in found]
    allocator = TensorMemoryAllocator(torch.zeros(4 << 12, dtype=torch.uint8), 64)
    obj = allocator.allocate(shapes, dtypes)
    assert obj is not None
    for i, tensor in enumerate(obj.tensors):
        assert (list(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shapes[i], dtypes[i], True)
        tensor.fill_(i + 1)
    assert [int(tensor.unique()) for tensor in obj.tensors] == list(range(1, len(found) + 1))
    assert obj.tensor.data_ptr() == obj.data_ptr
    with pytest.raises(IndexError, match=f"tensor {len(found)} of a memory object that has {len(found)}"):
        obj.get_tensor(len(found))


def test_a_tensor_and_the_byte_array_are_the_same_memory() -> None:
    obj = AdHocMemoryAllocator().allocate(torch.Size(KV), torch.float16, MemoryFormat.KV_2LTD)
    assert obj is not None
    obj.tensor.copy_(torch.arange(768, dtype=torch.float16).view(KV))
    assert bytes(obj.byte_array) == torch.arange(768, dtype=torch.float16).numpy().tobytes()
    assert bytes(obj.raw_tensor.numpy()) == bytes(obj.byte_array)
    assert (obj.get_num_tokens(), obj.get_shape(), obj.get_dtype()) == (16, KV, torch.float16)


def test_the_name_of_a_type_serves_as_well_as_the_type() -> None:
    obj = AdHocMemoryAllocator().allocate(KV, "bfloat16")
    assert obj is not None
    assert obj.tensor.dtype is torch.bfloat16


def test_objects_of_a_tensor_lie_in_that_tensor() -> None:
    base = torch.zeros(3 * 1536, dtype=torch.uint8)
    allocator = PagedTensorMemoryAllocator(base, KV, torch.float16, MemoryFormat.KV_2LTD)
    objs = allocator.batched_allocate(KV, torch.float16, 3, MemoryFormat.KV_2LTD)
    assert objs is not None
    for obj in objs:
        obj.tensor.fill_(1)
    assert torch.equal(base.view(torch.float16), torch.ones(3 * 768, dtype=torch.float16))


@pytest.mark.parametrize("make", [AdHocMemoryAllocator, lambda: MixedMemoryAllocator(1 << 16)])
def test_memory_lives_as_long_as_a_view_of_a_tensor_of_a_dropped_object(make: Any) -> None:
    allocator = make()
    view = allocator.allocate(KV, torch.float32).tensor[1, 2]
    gc.collect()
    assert allocator.live == 1
    allocator.close()
    other = torch.full((16, 8), 7.0)
    view.copy_(other)
    gc.collect()
    assert torch.equal(view, other)
    del view
    gc.collect()
    assert allocator.live == 0


def test_a_released_object_has_no_tensor_any_more() -> None:
    obj = AdHocMemoryAllocator().allocate(KV, torch.float32)
    assert obj is not None
    obj.ref_count_down()
    for look in (lambda: obj.tensor, lambda: obj.raw_tensor, lambda: obj.data_ptr):
        with pytest.raises(ValueError, match="its memory was given back"):
            look()


class DeviceTensor:
    """A tensor of a device whose memory the CPU cannot address: the same calls, no ``data_ptr`` of use here."""

    def __init__(self, tensor: Any) -> None:
        self.inner, self.device, self.dtype, self.shape = (
            tensor,
            torch.device("meta"),
            tensor.dtype,
            tensor.shape,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __getitem__(self, part: slice) -> Any:
        return self.inner[part]


def test_an_arena_on_a_device_has_tensors_but_no_bytes() -> None:
    base = torch.zeros(4096, dtype=torch.uint8)
    allocator = TensorMemoryAllocator(DeviceTensor(base), 64)
    first, second = (
        allocator.allocate((5,), torch.int16),
        allocator.allocate([(3,), (2,)], [torch.uint8, torch.int64]),
    )
    assert first is not None
    assert second is not None
    first.tensor.fill_(-1)
    second.get_tensor(1).fill_(-1)
    assert base.nonzero().flatten().tolist() == [*range(10), *range(64 + 8, 64 + 24)]
    with pytest.raises(ValueError, match="memory of device meta: the CPU cannot view its bytes"):
        _ = first.byte_array
    del second  # its tensors would not keep it, so its memory is not given to anybody else
    gc.collect()
    assert (allocator.live, allocator.dropped) == (2, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(8, dtype=torch.int16),
        torch.zeros(2, 4, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.uint8)[::2],
    ],
)
def test_an_arena_of_anything_but_flat_bytes_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"expected one contiguous axis of uint8; make it with torch\.empty"):
        TensorMemoryAllocator(wrong)


@pytest.mark.parametrize("numa_node", [None, 0])
def test_pinned_memory_is_the_selected_backend_s_own_where_it_has_the_op(
    numa_node: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Ops:
        """A backend that page-locks memory by itself, and has no op for nodes."""

        def alloc_pinned_ptr(self, size: int, device_id: int = 0) -> int:
            calls.append(torch_ops.alloc_pinned_ptr(size, device_id))
            return int(calls[0])

        def free_pinned_ptr(self, ptr: int) -> None:
            torch_ops.free_pinned_ptr(ptr)
            calls.append(("freed", ptr))

    monkeypatch.setattr(_device_detect, "resolve_device_ops", Ops)
    with PinMemoryAllocator(4096, numa_node=numa_node) as allocator:
        obj = allocator.allocate((4096,))
        assert obj is not None
        address = obj.data_ptr
        allocator.free(obj)
    assert calls == ([address, ("freed", address)] if numa_node is None else [])
