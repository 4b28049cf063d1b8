"""``lmcache_memcpy_async`` between tensors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.cpu.device_ops import CpuDeviceOps

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

OPS = pytest.mark.parametrize("ops", [CpuDeviceOps(), DeviceOps()], ids=["cpu", "any device"])
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def raw(tensor: Any) -> list[int]:
    return list(tensor.reshape(-1).view(torch.uint8).tolist())


@given(
    st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(0, 40), st.integers(0, 1), st.integers(0, 3)
)
def test_so_many_bytes_are_copied_whatever_the_types(
    to: Any, of: Any, nbytes: int, direction: int, offset: int
) -> None:
    src = torch.ones(80, dtype=of) if of is torch.bool else torch.arange(1, 81, dtype=torch.uint8).view(of)
    for ops in (CpuDeviceOps(), DeviceOps()):
        dest = torch.zeros(80 // to.itemsize, dtype=to)
        ops.lmcache_memcpy_async(dest, src, nbytes, direction, offset, 1 << 26)
        assert raw(dest) == raw(src)[:nbytes] + [0] * (80 - nbytes)


@OPS
def test_a_part_of_a_tensor_is_written_from_its_own_start(ops: DeviceOps) -> None:
    whole = torch.zeros(4, 3, dtype=torch.int16)
    ops.lmcache_memcpy_async(whole[2], torch.tensor([7, 8, 9], dtype=torch.int16), 4, 0, 0, 1)
    assert whole.tolist() == [[0, 0, 0], [0, 0, 0], [7, 8, 0], [0, 0, 0]]


@OPS
def test_more_bytes_than_either_has_are_refused(ops: DeviceOps) -> None:
    small, large = torch.zeros(4, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8)
    for dest, src, which in ((small, large, "dest"), (large, small, "src")):
        with pytest.raises(ValueError, match=f"nbytes=5: {which} has 4"):
            ops.lmcache_memcpy_async(dest, src, 5, 0, 0, 1)
    with pytest.raises(ValueError, match="nbytes=-1"):
        ops.lmcache_memcpy_async(small, large, -1, 0, 0, 1)
    assert small.tolist() == [0] * 4
    assert large.tolist() == [1] * 8


@OPS
def test_tensors_with_gaps_and_tensors_that_overlap_are_refused(ops: DeviceOps) -> None:
    base = torch.arange(16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"dest has shape \(8,\) and gaps"):
        ops.lmcache_memcpy_async(base[::2], torch.zeros(8, dtype=torch.uint8), 4, 0, 0, 1)
    for nbytes in (5, 8):
        with pytest.raises(ValueError, match="dest and src overlap"):
            ops.lmcache_memcpy_async(base[4:], base[:12], nbytes, 0, 0, 1)
    ops.lmcache_memcpy_async(base[4:], base[:12], 4, 0, 0, 1)
    assert base.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, *range(8, 16)]


@OPS
def test_a_tensor_and_an_address_do_not_mix(ops: DeviceOps) -> None:
    tensor = torch.zeros(1, dtype=torch.int64)  # which Python takes for an integer, too
    for operands in ((tensor, tensor.data_ptr()), (tensor.data_ptr(), tensor)):
        with pytest.raises(TypeError, match="expected two tensors or two addresses"):
            ops.lmcache_memcpy_async(*operands, 8, 0, 0, 1)


def test_the_copy_is_queued_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = torch.Tensor.copy_

    def copy(self: Any, other: Any, non_blocking: bool = False) -> Any:
        asked.append(non_blocking)
        return real(self, other, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    DeviceOps().lmcache_memcpy_async(torch.zeros(4), torch.ones(4), 16, 0, 0, 1)
    assert asked == [True]


def test_a_tensor_that_wants_a_gradient_is_written_as_it_is() -> None:
    dest = torch.zeros(2, requires_grad=True)
    DeviceOps().lmcache_memcpy_async(dest, torch.ones(2), 8, 0, 0, 1)
    assert dest.tolist() == [1.0, 1.0]
